//! Programs in namespaces of their own: user, mount and pid, and another root folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::Action;
use test_support::{Scratch, Talker, fixture, fixture_forms, process};

use crate::session::{Session, all};

/// A folder that is to be the root: a program, the plugin, and what they need to be loaded.
fn root(program: &Path) -> Scratch {
    let scratch = Scratch::new();
    let ldd = test_support::output(Command::new("ldd").arg(program));
    let ldd = String::from_utf8(ldd.stdout).unwrap();
    let needed = ldd
        .split_ascii_whitespace()
        .filter(|word| word.starts_with('/'));
    let copy = |from: &Path, to: &Path| {
        let to = scratch.path().join(to.strip_prefix("/").unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    };
    for library in needed {
        copy(Path::new(library), Path::new(library));
    }
    copy(program, Path::new("/host"));
    copy(&fixture("objects/plugin.so"), Path::new("/plugin.so"));
    scratch
}

/// The one child of a process, once it executes `name`.
fn child(pid: i32, name: &str) -> i32 {
    test_support::eventually("the program is executed", || {
        let children = process::children(pid);
        let is_it = |&&child: &&i32| process::status(child, "Name") == name;
        children.iter().find(is_it).copied()
    })
}

#[test]
fn a_program_in_namespaces_of_its_own_is_changed_with_its_plugin() {
    for program in fixture_forms("objects/host") {
        let root = root(&program);
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount", "--pid", "--fork"]);
        unshare.arg("chroot").arg(root.path()).arg("/host");
        let mut outer = Talker::spawn(&mut unshare);
        outer.expect("ready");
        outer.ask("load /plugin.so", "loaded");

        // Known here by a pid that it does not know itself.
        let target = probes_lib::Target::open(child(outer.pid(), "host")).unwrap();
        assert!(target.passed_over().is_empty());
        let files: Vec<PathBuf> = target
            .objects()
            .iter()
            .map(|object| object.path().to_owned())
            .collect();
        assert!(
            files[0].ends_with("host") && files[1].ends_with("plugin.so"),
            "{files:?}"
        );
        let session = Session::inside(outer, target);
        session.apply(&all(Action::Enable)).unwrap();
        let mut session = session;
        let line = session.talker.ask("plugins", "plugins");
        assert_eq!(line, "plugins 0:ping=1,plug=2");
        session.apply(&all(Action::Disable)).unwrap();
        let line = session.talker.ask("plugins", "plugins");
        assert_eq!(line, "plugins 0:ping=1,plug=2");
        session.end();
    }
}
