//! Builds what is measured: the targets and the command-line tool.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::{Failure, Result};
use crate::programs::{BURST, CALLS, FIXTURES, KINDS_SPIN, LARGE, PAIRS, WAITING};

/// What was built.
pub(crate) struct BuildOutput {
    pub(crate) root: PathBuf,
    /// The directory of the built `test-programs`.
    pub(crate) targets: PathBuf,
    pub(crate) programs: Vec<Program>,
    /// Where `ocaml-probes` is, if it was built.
    pub(crate) tool: PathBuf,
}

/// The benchmark target, built as PIE or not, with a given number of sites.
pub(crate) struct Program {
    /// Its path below the fixtures' directory.
    pub(crate) name: &'static str,
    pub(crate) sites: u64,
    pub(crate) path: PathBuf,
}

/// Names, relative to the fixtures' directory, and numbers of sites.
const PROGRAMS: [(&str, u64); 7] = [
    ("spin_10.pie", 10),
    ("spin_10.nopie", 10),
    ("spin_1000.pie", 1_000),
    ("spin_1000.nopie", 1_000),
    ("spin_10000.pie", 10_000),
    ("spin_10000.nopie", 10_000),
    (LARGE, 10_000),
];

/// Returns the first program with that number of sites, which is the position-independent one.
pub(crate) fn with_sites(programs: &[Program], sites: u64) -> Result<&Program> {
    let mut programs = programs.iter();
    programs
        .find(|program| program.sites == sites)
        .ok_or_else(|| Failure::new(format!("no program has {sites} sites")))
}

/// Builds the targets and, if `with_tool`, `ocaml-probes`.
pub(crate) fn build(with_tool: bool) -> Result<BuildOutput> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root
        .canonicalize()
        .map_err(Failure::of("cannot find the workspace"))?;
    let wanted = PROGRAMS
        .iter()
        .map(|(name, _)| format!("./test-programs/{FIXTURES}/{name}"));
    let others = WAITING.iter().chain([&BURST, &CALLS, &KINDS_SPIN, &PAIRS]);
    let others = others.map(|file| format!("./test-programs/{file}"));
    run(Command::new("dune")
        .arg("build")
        .args(wanted.chain(others))
        .current_dir(&root))?;
    if with_tool {
        run(cargo(&root).args(["build", "--release", "-p", "probes-cli"]))?;
    }
    let targets = root.join("_build/default/test-programs");
    let built = targets.join(FIXTURES);
    let programs = PROGRAMS.map(|(name, sites)| Program {
        name,
        sites,
        path: built.join(name),
    });
    Ok(BuildOutput {
        targets,
        programs: programs.into(),
        tool: own_directory()?.join("ocaml-probes"),
        root,
    })
}

/// Returns a `cargo` command for the workspace.
pub(crate) fn cargo(root: &Path) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or(OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.current_dir(root);
    command
}

/// Returns `target/release`, the directory of this program.
pub(crate) fn own_directory() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(Failure::of("cannot find this program"))?;
    match own.parent() {
        Some(directory) if !cfg!(debug_assertions) => Ok(directory.to_owned()),
        _ => Err(Failure::new("bench has to be built with --release")),
    }
}

/// Runs a command and waits until it exits.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let what = format!("{command:?}");
    let status = command
        .status()
        .map_err(Failure::of(format!("cannot run {what}")))?;
    if status.success() {
        Ok(())
    } else {
        Err(Failure::new(format!("{what} failed with {status}")))
    }
}
