//! Sets what `ocaml-probes version` prints about the build: its target and its commit.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=OCAML_PROBES_COMMIT");
    let target = env::var("TARGET").unwrap_or_else(|_| "unknown".to_owned());
    println!("cargo:rustc-env=OCAML_PROBES_BUILD_TARGET={target}");
    if let Some(commit) = commit() {
        println!("cargo:rustc-env=OCAML_PROBES_BUILD_COMMIT={commit}");
    }
}

/// Returns the commit that is built, if one of these names it: `OCAML_PROBES_COMMIT`, which the build of a package sets; the file that
/// `cargo package` adds; or, in a release build, git. In other builds git is not asked: cargo would have to build them again after
/// each commit.
fn commit() -> Option<String> {
    let given = env::var("OCAML_PROBES_COMMIT").ok();
    let commit = given.or_else(of_package).or_else(of_repository)?;
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "-+.".contains(it);
    (!commit.is_empty() && commit.chars().all(is_plain)).then_some(commit)
}

/// The commit in the file that `cargo package` adds.
fn of_package() -> Option<String> {
    let text = fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let hash = text
        .split("\"sha1\":")
        .nth(1)?
        .split('"')
        .nth(1)?
        .to_owned();
    let is_dirty = text.contains("\"dirty\": true");
    Some(if is_dirty { hash + "-dirty" } else { hash })
}

/// The commit of the repository that tracks this file; `None` if none does, as if a tarball was unpacked in another repository.
fn of_repository() -> Option<String> {
    if env::var("PROFILE").as_deref() != Ok("release") {
        return None;
    }
    let git = |args: &[&str]| {
        // Without this option, `git status` would write the index.
        let command = ["--no-optional-locks"].iter().chain(args);
        let output = Command::new("git").args(command).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // Run again if the commit or the sources change. Not if the index does: each `git status` of a user writes it.
    let directory = git(&["rev-parse", "--absolute-git-dir"])?;
    for file in ["HEAD", "logs/HEAD"] {
        let path = Path::new(&directory).join(file);
        if path.exists() {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    for sources in ["src", "../probes-lib/src"] {
        println!("cargo:rerun-if-changed={sources}");
    }
    let hash = git(&["rev-parse", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changes.is_empty() {
        hash
    } else {
        hash + "-dirty"
    })
}
