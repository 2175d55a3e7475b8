//! Programs in their own user, mount and pid namespaces, with another root directory.

use std::fs;
use std::path::{Path, PathBuf};

use probes_lib::{Action, Observation, Selector, Target};
use test_support::container::Container;
use test_support::{Scratch, fixture, fixture_forms};

use crate::observe::options;
use crate::session::{Session, all, named};

/// A container with a program, and the plugin at this path.
fn container(program: &Path, plugin: &Path) -> Container {
    let files = [
        (program, Path::new("/host")),
        (&fixture("objects/plugin.so"), plugin),
    ];
    Container::with(&files)
}

/// Starts the program of a container, and loads the plugin there.
fn start(container: &Container, plugin: &Path) -> Session {
    let (mut talker, pid) = container.start(Path::new("/host"));
    talker.ask(&format!("load {}", plugin.display()), "loaded");
    // The pid here differs from the one inside.
    Session::with_target(talker, Target::open(pid).unwrap())
}

fn plugins(session: &mut Session) -> String {
    session.talker.ask("plugins", "plugins")
}

// promise: Containers: A program in its own namespaces is changed with its plugin (2)
#[test]
fn program_in_its_own_namespaces_is_changed() {
    let plugin = Path::new("/plugin.so");
    for program in fixture_forms("objects/host") {
        let container = container(&program, plugin);
        let mut session = start(&container, plugin);
        assert!(session.target.unreadable().is_empty());
        let objects = session.target.objects();
        let files: Vec<PathBuf> = objects.iter().map(|it| it.path().to_owned()).collect();
        assert!(
            files[0].ends_with("host") && files[1].ends_with("plugin.so"),
            "{files:?}"
        );
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(plugins(&mut session), "plugins 0:ping=1,plug=2");
        session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(plugins(&mut session), "plugins 0:ping=1,plug=2");
        session.end();
    }
}

#[test]
fn events_in_a_container_have_the_hosts_tids() {
    let plugin = Path::new("/plugin.so");
    for program in fixture_forms("objects/host") {
        let container = container(&program, plugin);
        let mut session = start(&container, plugin);
        let pid = session.target.pid();
        let observation = Observation::new().watch(Selector::name("plug"));
        let mut observer = session.target.observe(&observation, options()).unwrap();
        session.talker.ask("plugins", "plugins");
        let events = observer.events().unwrap().events;
        assert!(!events.is_empty());
        assert!(
            events.iter().all(|event| event.thread == Some(pid)),
            "{events:?}"
        );
        observer.remove().unwrap();
        session.end();
    }
}

// promise: Containers: A file with the same path on the host is not mistaken for the one that a
//    container has loaded (2)
#[test]
fn same_path_on_the_host_is_not_mistaken() {
    let here = Scratch::new();
    for program in fixture_forms("objects/host") {
        let plugin = here.copy(&program, "plugin.so");
        let container = container(&program, &plugin);
        let mut session = start(&container, &plugin);
        assert!(session.target.unreadable().is_empty());
        let report = session.apply(&named(Action::Enable, "plug")).unwrap();
        assert_eq!(report.changed[0].sites, 2);
        assert_eq!(plugins(&mut session), "plugins 0:ping=0,plug=2");
        session.end();
    }
}

// promise: Containers: A program that was deleted in its container is changed (2)
#[test]
fn program_deleted_in_its_container_is_changed() {
    let plugin = Path::new("/plugin.so");
    for program in fixture_forms("objects/host") {
        let container = container(&program, plugin);
        let mut session = start(&container, plugin);
        fs::remove_file(container.path(Path::new("/host"))).unwrap();
        session.target = Target::open(session.target.pid()).unwrap();
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(session.run()["ping"], 3);
        assert_eq!(plugins(&mut session), "plugins 0:ping=1,plug=2");
        session.end();
    }
}
