//! Probes in shared objects: linked, loaded late, loaded more than once, unloaded, deleted,
//! replaced and without a name. Probes of one name are one probe, in however many objects they are.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use probes_lib::{
    Action, Actions, Effect, ErrorKind, Launch, LaunchError, Launched, ProbeError, ProcessError,
    Selector, State, Target,
};
use test_support::{
    DEADLINE, Guard, Scratch, Talker, fixture, fixture_forms, process, program, program_forms,
};

use crate::session::{Session, all, heavy_test_lock, named};

/// The programs that load objects.
fn hosts() -> [Session; 2] {
    fixture_forms("objects/host").map(|file| Session::start(&file))
}

fn plugin() -> String {
    fixture("objects/plugin.so").display().to_string()
}

/// A plugin whose semaphores are in zero-initialised memory, on a page of no file.
fn zeroed_plugin() -> String {
    fixture("objects/zeroed.so").display().to_string()
}

/// Executes every site of the objects, and returns how often the handlers of each have run.
fn run_plugins(session: &mut Session) -> Vec<String> {
    let line = session.talker.ask("plugins", "plugins");
    let words = line.split_ascii_whitespace().skip(1);
    words.map(str::to_owned).collect()
}

/// For each probe name, the file name of the object of each of its sites.
fn sites(target: &Target) -> BTreeMap<String, Vec<String>> {
    let states = target.states().unwrap();
    let of_probe = |probe: probes_lib::ProbeState<'_>| {
        let file = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let objects = probe.sites().map(|site| file(site.object.path()));
        (probe.name().to_owned(), objects.collect())
    };
    states.probes().map(of_probe).collect()
}

fn load(session: &mut Session, how: &str, path: &str) {
    session.talker.ask(&format!("{how} {path}"), "loaded");
}

#[test]
fn library_probes_are_updated_in_program_without_probes() {
    for file in fixture_forms("objects/linked") {
        let mut session = Session::start(&file);
        assert_eq!(session.target.program(), file);
        let plugin = vec!["plugin.so".to_owned(); 2];
        let found = sites(&session.target);
        assert_eq!(found["plug"], plugin);
        assert_eq!(found["ping"], plugin[1..]);
        session.apply(&named(Action::Enable, "plug")).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=2"]);
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=1,plug=4"]);
        session.apply(&named(Action::Disable, "plug")).unwrap();
        session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=1,plug=4"]);
    }
}

#[test]
fn probes_appear_with_dlopen_and_vanish_with_dlclose() {
    for mut session in hosts() {
        assert_eq!(session.states().len(), 2);
        load(&mut session, "load", &plugin());
        assert_eq!(session.state("plug"), State::Disabled);
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=1,plug=2"]);
        assert_eq!(session.run()["ping"], 3);

        // Loaded again, it is as built: it has its own counters, which differ from the program's.
        session.talker.ask("unload 0", "unloaded");
        assert_eq!(session.states().len(), 2);
        session.assert_all((1, State::Enabled));
        load(&mut session, "load", &plugin());
        assert_eq!(session.states()["ping"], (0, State::Inconsistent));
        assert_eq!(session.states()["plug"], (0, State::Disabled));
        let error = session.apply(&named(Action::Enable, "ping")).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::Probe(ProbeError::Inconsistent { .. })
            ),
            "{error}"
        );
        let repair = named(Action::Enable, "ping").force(true);
        session.apply(&repair).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=1,plug=0"]);
        session.end();
    }
}

// promise: Objects that come and go: Each place where an object is loaded has its own counters (2)
#[test]
fn object_loaded_twice_has_two_sets_of_counters() {
    let scratch = Scratch::new();
    let copy = scratch.copy(&fixture("objects/plugin.so"), "copy.so");
    for mut session in hosts() {
        load(&mut session, "load", &plugin());
        load(&mut session, "isolate", &plugin());
        load(&mut session, "load", copy.to_str().unwrap());
        assert_eq!(sites(&session.target)["plug"].len(), 6);
        let report = session.apply(&named(Action::Enable, "plug")).unwrap();
        assert_eq!(report.changed[0].sites, 6);
        let places = |hits: &str| [0, 1, 2].map(|i| format!("{i}:{hits}"));
        assert_eq!(run_plugins(&mut session), places("ping=0,plug=2"));
        session.target.undo(&report, session.options).unwrap();
        assert_eq!(run_plugins(&mut session), places("ping=0,plug=2"));
        session.end();
    }
}

// promise: Objects that come and go: What was done to an object that was unloaded is not undone in
//    another (2)
#[test]
fn undo_leaves_an_object_loaded_later_alone() {
    for mut session in hosts() {
        load(&mut session, "load", &plugin());
        let report = session.apply(&named(Action::Enable, "plug")).unwrap();
        session.talker.ask("unload 0", "unloaded");
        let error = session.target.undo(&report, session.options);
        let error = error.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::Unknown { .. })),
            "{error}"
        );
        load(&mut session, "load", &plugin());
        let back = session.target.undo(&report, session.options).unwrap();
        assert!(back.changed.is_empty());
        assert_eq!(session.states()["plug"], (0, State::Disabled));
    }
}

// promise: Objects that come and go: A file that was deleted or replaced is read as it is mapped,
//    or not at all (4)
#[test]
fn deleted_or_replaced_file_is_read_as_mapped() {
    let scratch = Scratch::new();
    let deleted = |path: &Path| fs::remove_file(path).unwrap();
    let replaced = |path: &Path| {
        deleted(path);
        fs::copy(fixture("objects/host.pie"), path).unwrap();
    };
    let changes: [&dyn Fn(&Path); 2] = [&deleted, &replaced];
    for change in changes {
        for mut session in hosts() {
            let copy = scratch.copy(&fixture("objects/plugin.so"), "gone.so");
            load(&mut session, "load", copy.to_str().unwrap());
            change(&copy);
            let target = Target::open(session.pid()).unwrap();
            if process::can_open_map_files() {
                assert_eq!(sites(&target)["plug"].len(), 2);
                assert!(target.unreadable().is_empty());
                session.apply(&named(Action::Enable, "plug")).unwrap();
                assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=2"]);
            } else {
                assert!(!sites(&target).contains_key("plug"));
                let unreadable = target.unreadable();
                let [one] = &unreadable[..] else {
                    panic!("{unreadable:?}");
                };
                assert_eq!(one.path, copy);
                assert_eq!(
                    one.why.to_string(),
                    format!(
                        "cannot open {}: it was deleted or replaced since it was loaded",
                        copy.display()
                    )
                );
                let error = session.apply(&named(Action::Enable, "plug")).unwrap_err();
                let program = session.target.program();
                assert_eq!(
                    error.to_string(),
                    format!(
                        "no probe \"plug\" in {}, and gone.so could not be read; nothing was changed",
                        program.file_name().unwrap().to_str().unwrap()
                    )
                );
                // The readable objects can be changed.
                session.apply(&named(Action::Enable, "ping")).unwrap();
                assert_eq!(session.run()["ping"], 3);
            }
            let _ = fs::remove_file(&copy);
        }
    }
}

// promise: Objects that come and go: An object that exists only in memory (memfd) is switched, or
//    reported if it cannot be opened (4)
#[test]
fn memfd_object_is_updated_if_it_opens() {
    for mut session in hosts() {
        load(&mut session, "held", &plugin());
        assert_eq!(sites(&session.target)["plug"].len(), 2);
        session.apply(&named(Action::Enable, "plug")).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=2"]);
        let object = session.target.objects().pop().unwrap();
        assert_eq!(object.path(), Path::new("/memfd:copy"));
        session.end();
    }
    for mut session in hosts() {
        load(&mut session, "memory", &plugin());
        let enabled = session.apply(&named(Action::Enable, "plug"));
        if process::can_open_map_files() {
            enabled.unwrap();
            assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=2"]);
        } else {
            let unreadable = session.target.unreadable();
            let [one] = &unreadable[..] else {
                panic!("{unreadable:?}");
            };
            assert_eq!(
                one.why.to_string(),
                "cannot open /memfd:copy: it exists only in memory (memfd_create), and no descriptor for it is open"
            );
            let error = enabled.unwrap_err().to_string();
            let why = ", and memfd:copy could not be read; nothing was changed";
            assert!(error.ends_with(why), "{error}");
            assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=0"]);
        }
        session.end();
    }
}

#[test]
fn program_started_through_its_loader_is_found() {
    // /proc/PID/exe is ld.so then, which has no OCaml probes.
    let loader = "/lib64/ld-linux-x86-64.so.2";
    for file in fixture_forms("forker") {
        let mut talker = Talker::spawn(Command::new(loader).arg(&file));
        talker.expect("ready");
        let mut session = Session::of(talker);
        assert_eq!(session.object().path(), file);
        session.apply(&all(Action::Enable)).unwrap();
        let hits = session.talker.ask("run", "hits");
        assert_eq!(hits, "hits ping=3 pong=1");
        session.talker.close_input();
        assert!(session.talker.guard().wait().success());
    }
}

// promise: Objects that come and go: A shared object that is loaded and unloaded all the time is
//    changed as a whole or not at all (2 × at least 200 updates, 3,000 times loaded and unloaded)
#[test]
fn objects_that_come_and_go_are_changed_whole() {
    let _lock = heavy_test_lock();
    for mut session in hosts() {
        let line = format!("churn 3000 {}", plugin());
        session.talker.send(&line);
        let mut done = 0;
        for action in [Action::Enable, Action::Disable].into_iter().cycle() {
            match session.apply(&named(action, "pong")) {
                Ok(_) => done += 1,
                Err(error) => panic!("{error}"),
            }
            match session.apply(&named(action, "plug").force(true)) {
                Ok(_) => {}
                Err(error) => {
                    // At each attempt, the object was not loaded, or was unloaded again.
                    let expected = matches!(
                        error.kind(),
                        ErrorKind::Probe(ProbeError::Unknown { .. })
                            | ErrorKind::Process(ProcessError::KeepsChanging)
                    );
                    assert!(expected, "{error}");
                }
            }
            if done >= 100 {
                break;
            }
        }
        session.talker.expect("churned 3000");
        session.apply(&all(Action::Disable)).unwrap();
        load(&mut session, "load", &plugin());
        assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=0"]);
        assert_eq!(session.run()["pong"], 0);
        session.end();
    }
}

// promise: Objects that come and go: An object whose semaphores are in zero-initialised memory is switched like any
//    other, and left alone until that memory is mapped (2)
#[test]
fn object_with_zeroed_semaphores_is_switched_whole() {
    for mut session in hosts() {
        load(&mut session, "load", &zeroed_plugin());
        session.apply(&named(Action::Enable, "plug")).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=2"]);
        session.apply(&named(Action::Disable, "plug")).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=2"]);
        session.talker.ask("unload 0", "unloaded");

        session
            .talker
            .ask(&format!("begin {}", zeroed_plugin()), "begun");
        // Where its counters will be, there is another part of the file so far.
        session.talker.ask("data", "mapped");
        let before = session.image();
        let force = named(Action::Enable, "plug").force(true);
        let error = session.apply(&force).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::Unknown { .. })),
            "{error}"
        );
        session.image().assert_same(&before, "without zeroes");
        session.talker.ask("finish", "finished");
        assert_eq!(session.state("plug"), State::Disabled);
        session.apply(&force).unwrap();
        session.apply(&named(Action::Disable, "plug")).unwrap();
        session.end();
    }
}

// promise: Objects that come and go: An object that is only partly mapped is left alone (2, byte by
//    byte)
#[test]
fn half_loaded_object_is_left_alone() {
    for mut session in hosts() {
        session.talker.ask(&format!("begin {}", plugin()), "begun");
        let before = session.image();
        assert_eq!(session.states().len(), 2);
        let force = named(Action::Enable, "plug").force(true);
        let error = session.apply(&force).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::Unknown { .. })),
            "{error}"
        );
        session.image().assert_same(&before, "half loaded");
        session.talker.ask("finish", "finished");
        assert_eq!(session.state("plug"), State::Disabled);
        session.apply(&force).unwrap();
        session.apply(&named(Action::Disable, "plug")).unwrap();
        session.end();
    }
}

/// The host's process, which maps an object by half again when an update or an observation chooses its
/// probes for the `nth` time: the objects have been looked for by then, and the memory has not been read.
fn restarted_on_choice(host: Arc<Mutex<Session>>, nth: usize) -> Selector {
    let times = AtomicUsize::new(0);
    Selector::predicate(move |name| {
        if name == "plug" && times.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            host.lock().unwrap().talker.ask("restart", "restarted");
        }
        name == "plug"
    })
}

// promise: Objects that come and go: No counter is read or written in an object that is unloaded and
//    loaded by half while an update begins (2)
#[test]
fn object_reloaded_by_half_is_left_alone() {
    for mut session in hosts() {
        session.talker.ask(&format!("begin {}", plugin()), "begun");
        session.talker.ask("finish", "finished");
        assert_eq!(session.state("plug"), State::Disabled);
        let target = Target::open(session.pid()).unwrap();
        let session = Arc::new(Mutex::new(session));
        // Its first choice only checks the names.
        let selector = restarted_on_choice(session.clone(), 2);
        let error = target
            .update(&Actions::of(Action::Enable, selector).force(true))
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::NoMatch { .. })),
            "{error}"
        );
        let mut session = session.lock().unwrap();
        session.talker.ask("finish", "finished");
        let states = session.states();
        assert_eq!(session.state("plug"), State::Disabled, "{states:?}");
    }
}

// promise: Objects that come and go: A shared object that is loaded and unloaded all the time is
//    shown as a whole or not at all (2 × at least 100 reads, while it is loaded and unloaded
//    without a pause)
#[test]
fn objects_that_come_and_go_are_shown_whole() {
    let _lock = heavy_test_lock();
    for mut session in hosts() {
        let line = format!("churn {} {}", i32::MAX, plugin());
        session.talker.send(&line);
        let started = Instant::now();
        let (mut with, mut without) = (0, 0);
        while with < 50 || without < 50 {
            assert!(
                started.elapsed() < DEADLINE,
                "{with} with, {without} without"
            );
            let target = Target::open(session.pid()).unwrap();
            let states = match target.states() {
                Ok(states) => states,
                // It was unloaded again each time.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Process(ProcessError::KeepsChanging)
                    ) =>
                {
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            // An unloaded object does not count as unreadable.
            let unreadable = target.unreadable();
            assert!(unreadable.is_empty(), "{unreadable:?}");
            for probe in states.probes() {
                assert_eq!(probe.state(), State::Disabled, "{}", probe.name());
            }
            match states.probe("plug") {
                Some(plug) => {
                    assert_eq!(plug.sites().count(), 2);
                    with += 1;
                }
                None => without += 1,
            }
        }
        session.talker.guard().child().kill().unwrap();
    }
}

#[test]
fn regular_expression_selects_names_of_all_objects() {
    for mut session in hosts() {
        load(&mut session, "load", &plugin());
        let regexp = Selector::regexp("p[il]").unwrap();
        let actions = Actions::of(Action::Enable, regexp);
        let report = session.apply(&actions).unwrap();
        let names: Vec<&str> = report.changed.iter().map(|it| &it.name[..]).collect();
        assert_eq!(names, ["ping", "plug"]);
        assert_eq!(run_plugins(&mut session), ["0:ping=1,plug=2"]);
    }
}

#[test]
fn ocaml_plugin_is_switched_with_its_host() {
    let plugin = program("plugins/dynhost").with_file_name("plug.cmxs");
    for file in program_forms("plugins/dynhost") {
        let mut session = Session::start(&file);
        session.apply(&named(Action::Enable, "shared")).unwrap();
        let round = |session: &mut Session| session.talker.ask("run", "round");
        assert_eq!(round(&mut session), "round host.shared=1");
        load(&mut session, "load", plugin.to_str().unwrap());
        // It is loaded as built.
        assert_eq!(session.states()["shared"], (0, State::Inconsistent));
        session.apply(&all(Action::Enable).force(true)).unwrap();
        let both = "round host.shared=2 shared=1 plug_only=1";
        assert_eq!(round(&mut session), both);
        let states = session.target.states().unwrap();
        let site = states.probe("plug_only").unwrap().sites().next().unwrap();
        let source = site.object.source_map().unwrap();
        let location = source.locate(site.site.address());
        let file = location.file.unwrap_or_default();
        assert!(file.ends_with("plug.ml"), "{file}");
        session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(round(&mut session), both);
        session.end();
    }
}

#[test]
fn ocaml_library_in_a_c_program_is_switched() {
    for host in fixture_forms("../plugins/embedded/host") {
        let mut talker = Talker::start(&host);
        let error = Target::open(talker.pid()).err().unwrap();
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::NoProbes { .. })),
            "{error}"
        );
        let library = host.with_file_name("embedded.so");
        talker.ask(&format!("load {}", library.display()), "loaded");
        let mut session = Session::of(talker);
        assert_eq!(session.target.program(), host.canonicalize().unwrap());
        let object = session.object();
        assert_eq!(object.path(), library.canonicalize().unwrap());
        assert_eq!(session.talker.ask("run", "calls"), "calls 0");
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(session.talker.ask("run", "calls"), "calls 1");
        session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(session.talker.ask("run", "calls"), "calls 1");
        session.end();
    }
}

/// Starts a program with `actions` applied.
fn launch(file: &Path, actions: Actions) -> probes_lib::Result<Launched> {
    let mut command = Command::new(file);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    Launch::new(command).actions(actions).spawn()
}

#[test]
fn linked_library_probes_are_set_before_main() {
    for file in fixture_forms("objects/linked") {
        let launched = launch(&file, named(Action::Enable, "plug")).unwrap();
        let changed = &launched.report().changed;
        assert_eq!((&changed[0].name[..], changed[0].sites), ("plug", 2));
        let mut talker = Talker::of(Guard::from(launched.into_child()));
        talker.expect("ready");
        assert_eq!(talker.ask("plugins", "plugins"), "plugins 0:ping=0,plug=2");
        let mut session = Session::of(talker);
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(run_plugins(&mut session), ["0:ping=1,plug=4"]);
        session.end();
    }
}

// promise: Objects that come and go: `trace` sets the probes of linked libraries before their
//    initialisers run (4)
#[test]
fn linked_library_probes_are_set_before_initialisers_run() {
    for name in ["objects/eager", "objects/musl/eager"] {
        for file in fixture_forms(name) {
            let launched = launch(&file, named(Action::Enable, "plug")).unwrap();
            let mut talker = Talker::of(Guard::from(launched.into_child()));
            talker.expect("ready");
            // Once in the constructor, and once now.
            assert_eq!(talker.ask("plugins", "plugins"), "plugins 0:ping=0,plug=4");
            // The loader is unchanged, and so is the code at the program's entry.
            assert!(!process::is_loader_changed(talker.pid()));
            let mut session = Session::of(talker);
            session.apply(&all(Action::Disable)).unwrap();
            assert_eq!(run_plugins(&mut session), ["0:ping=0,plug=4"]);
            session.end();
        }
    }
}

#[test]
fn unknown_name_keeps_a_program_from_starting() {
    for file in fixture_forms("objects/linked") {
        let children = process::children(std::process::id() as i32);
        let error = launch(&file, named(Action::Enable, "plugg")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("did you mean \"plug\"?"), "{text}");
        assert_eq!(error.effect(), Effect::NotStarted);
        let left = process::children(std::process::id() as i32);
        let is_new = |pid: &i32| !children.contains(pid);
        let ours = |pid: &i32| process::status(*pid, "Name").starts_with("linked");
        assert!(!left.iter().any(|pid| is_new(pid) && ours(pid)), "{left:?}");
    }
}

#[test]
fn missing_library_is_reported_as_exit_during_loading() {
    let scratch = Scratch::new();
    for file in fixture_forms("objects/linked") {
        let copy = scratch.copy(&file, "alone");
        let mut command = Command::new(&copy);
        command.stderr(Stdio::null());
        let enable = all(Action::Enable);
        let error = Launch::new(command).actions(enable).spawn().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Launch(LaunchError::DiedLoading)),
            "{error}"
        );
        assert_eq!(error.effect(), Effect::NotStarted);
        fs::remove_file(copy).unwrap();
    }
}

// promise: Objects that come and go: An object that could be unloaded during the update is not
//    changed with `-live` (2 × 2)
#[test]
fn live_updates_refuse_objects_that_may_be_unloaded() {
    for session in hosts() {
        let mut session = session.live();
        load(&mut session, "load", &plugin());
        let before = session.image();
        for name in ["plug", "ping"] {
            let error = session.apply(&named(Action::Enable, name)).unwrap_err();
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::Probe(ProbeError::LiveUnloadable { .. })
                ),
                "{error}"
            );
            assert_eq!(error.effect(), Effect::NothingChanged);
        }
        session.image().assert_same(&before, "refused");
        // The program's own probe can be changed.
        session.apply(&named(Action::Enable, "pong")).unwrap();
        assert_eq!(session.run()["pong"], 1);
        session.end();
    }
}
