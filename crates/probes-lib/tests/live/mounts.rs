//! Mapped files whose names, in the mount namespace of this process, belong to other files or to
//! none: files in other mount namespaces, on overlays, below other mounts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::{Action, ErrorKind, ProbeError};
use test_support::{Scratch, Talker, fixture, fixture_forms, output, process};

use crate::session::{Session, all, named};

/// Starts a program in its own user and mount namespaces, after `script` has mounted something
/// there on the empty directory `$1`; the directory with the plugin is `$2`.
fn start(script: &str, scratch: &Scratch, program: &Path) -> Talker {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--mount", "sh", "-euc"]);
    unshare.arg(format!("{script}\nexec \"$0\"")).arg(program);
    unshare.arg(mount_point(scratch)).arg(scratch.path());
    let mut talker = Talker::spawn(&mut unshare);
    talker.expect("ready");
    talker
}

/// Where something is mounted. Its path has no space.
fn mount_point(scratch: &Scratch) -> PathBuf {
    let directory = scratch.file("mounted");
    fs::create_dir_all(&directory).unwrap();
    directory
}

/// Device according to maps, and inode, of the first mapping of a file.
fn mapped(pid: i32, path: &Path) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps
        .lines()
        .find(|line| line.ends_with(path.to_str().unwrap()));
    let mut fields = line.unwrap().split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next().unwrap().split_once(':').unwrap();
    let [major, minor] = [major, minor].map(|hex| u64::from_str_radix(hex, 16).unwrap());
    let device = nix::sys::stat::makedev(major, minor);
    (device, fields.next().unwrap().parse().unwrap())
}

// promise: Containers: A file on an overlay, for which maps and stat(2) report different devices,
//    is known by its first page (2)
#[test]
fn file_on_an_overlay_is_identified_by_content() {
    // For layers on several file systems, stat(2) reports another device than maps.
    let script = r#"
        mount -t tmpfs tmpfs "$1"; cd "$1"; mkdir upper work merged; mkdir ../lower; cp ../plugin.so ../lower
        mount -t overlay -o lowerdir=../lower,upperdir=upper,workdir=work,xino=off overlay merged"#;
    for program in fixture_forms("objects/host") {
        let scratch = Scratch::new();
        scratch.copy(&fixture("objects/plugin.so"), "plugin.so");
        let mut talker = start(script, &scratch, &program);
        let plugin = mount_point(&scratch).join("merged/plugin.so");
        talker.ask(&format!("load {}", plugin.display()), "loaded");
        let seen = format!("/proc/{}/root{}", talker.pid(), plugin.display());
        let (device, inode) = mapped(talker.pid(), &plugin);
        let metadata = fs::metadata(seen).unwrap();
        assert_eq!((metadata.dev() == device, metadata.ino()), (false, inode));

        let mut session = Session::of(talker);
        assert!(session.target.unreadable().is_empty());
        assert_eq!(session.target.objects()[1].path(), plugin);
        session.apply(&all(Action::Enable)).unwrap();
        let hits = session.talker.ask("plugins", "plugins");
        assert_eq!(hits, "plugins 0:ping=1,plug=2");
        session.end();
    }
}

// promise: Objects that come and go: A file of the same name and inode number on another device is
//    not mistaken for the mapped one (2)
#[test]
fn same_inode_number_elsewhere_is_not_mistaken() {
    const COVER: &str = r#"mount -t tmpfs tmpfs "$0"; cp "$1" "$0/plugin.so""#;
    let script = r#"mount -t tmpfs tmpfs "$1"; cp "$2/plugin.so" "$1""#;
    for program in fixture_forms("objects/host") {
        let scratch = Scratch::new();
        scratch.copy(&fixture("objects/plugin.so"), "plugin.so");
        let mut talker = start(script, &scratch, &program);
        let plugin = mount_point(&scratch).join("plugin.so");
        talker.ask(&format!("load {}", plugin.display()), "loaded");
        // Another file of that name on another device. It too is the first file there, and so has
        // the same inode number.
        let mut cover = Command::new("nsenter");
        cover.args(["--user", "--mount", "--preserve-credentials", "--target"]);
        cover
            .arg(talker.pid().to_string())
            .args(["sh", "-euc", COVER]);
        let covered = output(cover.arg(mount_point(&scratch)).arg(&program));
        assert!(covered.status.success(), "{covered:?}");
        let seen = format!("/proc/{}/root{}", talker.pid(), plugin.display());
        let (device, inode) = mapped(talker.pid(), &plugin);
        let metadata = fs::metadata(seen).unwrap();
        assert_eq!((metadata.dev() == device, metadata.ino()), (false, inode));

        let mut session = Session::of(talker);
        let enabled = session.apply(&named(Action::Enable, "plug"));
        let hits = session.talker.ask("plugins", "plugins");
        if process::can_open_map_files() {
            enabled.unwrap();
            assert_eq!(hits, "plugins 0:ping=0,plug=2");
        } else {
            let error = enabled.unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Probe(ProbeError::Unknown { .. })),
                "{error}"
            );
            let why = ", and plugin.so could not be read; nothing was changed";
            assert!(error.to_string().ends_with(why), "{error}");
            let passed_over = session.target.unreadable();
            let [one] = &passed_over[..] else {
                panic!("{passed_over:?}");
            };
            assert_eq!(
                one.why.to_string(),
                format!(
                    "cannot open {}: another file has that name now",
                    plugin.display()
                )
            );
            assert_eq!(hits, "plugins 0:ping=0,plug=0");
        }
        session.end();
    }
}
