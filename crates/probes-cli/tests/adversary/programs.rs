//! The test programs, each run without the tool, and while it switches, observes or starts them.

use test_support::{Talker, program};

use crate::program::Program;
use crate::ways::every_way;

/// Whether the programs were built by OCaml 5. Then `domains` and `effects` exist.
fn is_of_ocaml_5() -> bool {
    let directory = program("terminating").with_file_name("ocaml5");
    directory.join("domains.exe").exists()
}

// promise: Observations: Timers every 100 µs whose handlers allocate and raise, and signals that a
//    program sends itself, are handled as without the tool (in every way)
#[test]
fn signal_handling_is_unaffected() {
    every_way("signals", &Program::checked("signals"));
}

#[test]
fn signals_are_handled_with_small_heap() {
    let program = Program::checked("signals").with_runtime("b,s=256");
    every_way("signals, in a small heap", &program);
}

// promise: Observations: System threads that wait, fork, and raise exceptions or exit in probe
//    handlers do so as without a tool (in every way)
#[test]
fn system_threads_are_unaffected() {
    every_way("system threads", &Program::checked("systhreads"));
}

// promise: Observations: A parent sees the exits, stops and execs of its children as without a tool
//    (in every way)
#[test]
fn wait_statuses_of_children_are_unaffected() {
    every_way("children", &Program::checked("children"));
}

// promise: Observations: Out_of_memory is caught as without the tool; a process that lacks memory for
//    an observation is not observed (address space, data, locked memory; in every way)
#[test]
fn limits_of_memory_are_respected() {
    for mode in ["address_space", "data", "locked"] {
        let program = Program::checked("limits")
            .with_args([mode])
            .may_be_refused();
        every_way(mode, &program);
    }
}

// promise: Own probes: A program switches its own probes while others switch and observe them (in
//    every way)
#[test]
fn program_switches_own_probes_while_observed() {
    let library = std::env::current_exe().unwrap();
    let library = library.with_file_name("libprobes.so");
    let program = Program::checked("self").with_args([library]);
    every_way("its own probes", &program);
}

// promise: Observations: Requests nested 140 deep, ended by an exception, or finished in another thread, are handled
//    as without a tool (in every way)
#[test]
fn requests_that_never_finish_are_unaffected() {
    every_way("requests", &Program::checked("requests"));
}

// promise: Observations: A program that closes all descriptors, moves to another root directory and
//    user, and forbids itself privileges, dumps and executable memory, is changed and observed as far
//    as it permits, and runs on (in every way)
#[test]
fn programs_that_confine_themselves_are_unaffected() {
    let library = std::env::current_exe().unwrap();
    let library = library.with_file_name("libprobes.so");
    let program = Program::checked("changes").with_args([library]);
    every_way("changes", &program.may_be_refused());
}

// promise: Observations: Callbacks of Gc.Memprof allocate and hit probes as without a tool (in every
//    way)
#[test]
fn memprof_callbacks_are_unaffected() {
    every_way("memprof", &Program::checked("memprof"));
}

// promise: Observations: Plugins are loaded by Dynlink, C libraries loaded and unloaded, as without a
//    tool (in every way)
#[test]
fn loading_plugins_and_libraries_is_unaffected() {
    let file = program("terminating");
    let [plugin, library] =
        ["plugins/plug.cmxs", "fixtures/objects/plugin.so"].map(|name| file.with_file_name(name));
    let program = Program::checked("loading").with_args([plugin, library]);
    every_way("plugins and libraries", &program.loading_objects());
}

// promise: Observations: Callbacks from C threads, exceptions through C and longjmp out of C behave
//    as without a tool (in every way)
#[test]
fn callbacks_from_c_are_unaffected() {
    every_way("callbacks", &Program::checked("callbacks"));
}

// promise: Observations: Values of every kind, moved by compactions, are shown as the program passes
//    them, and stay as they are (in every way)
#[test]
fn values_are_shown_as_passed() {
    every_way("values", &Program::checked("values"));
    for (name, runtime) in [
        ("values, in a small heap", "o=20,O=0,s=512"),
        ("values, with a cleanup at exit", "c,b"),
    ] {
        every_way(name, &Program::checked("values").with_runtime(runtime));
    }
}

// promise: Observations: Values of OCaml 4 that point to memory which was unmapped a moment before are not read (in every way)
#[test]
fn naked_pointers_are_not_read() {
    if !is_of_ocaml_5() {
        every_way("naked pointers", &Program::checked("naked"));
    }
}

#[test]
fn stack_overflow_handling_is_unaffected() {
    let program = Program::other("overflow", |talker| {
        let line = talker.ask("overflow 1", "overflow");
        assert!(line.contains("caught=9"), "{line}");
        assert!(line.ends_with("others=same"), "{line}");
    });
    every_way("stack overflows", &program);
}

#[test]
fn results_of_handlers_are_unaffected() {
    for name in ["handlers", "static/handlers"] {
        let program = Program::other(name, |talker| {
            let line = talker.ask("run", "round");
            assert!(line.contains(" work=516 "), "{line}");
        });
        every_way(name, &program);
    }
}

// promise: Observations: Programs with the sites of 4.11.0, 4.11.1, the compilers between and OxCaml
//    behave as without a tool (4 fixtures, in every way)
#[test]
fn fixtures_of_other_compilers_are_unaffected() {
    for name in [
        "gen_ocaml",
        "gen_ocaml_4_11_1",
        "gen_ocaml_2",
        "mixed_generations",
    ] {
        let program = Program::fixture(name, |talker| {
            let line = talker.ask("repeated", "repeated");
            assert!(line.ends_with("wrong=0"), "{line}");
            talker.send("repeat");
        });
        every_way(name, &program);
    }
}

/// Asserts that no value of any thread has changed.
fn assert_no_value_broken(talker: &mut Talker) {
    talker.send("report");
    loop {
        let line = talker.line().expect("a report");
        match line.rsplit_once("broken=") {
            Some((_, broken)) => assert_eq!(broken, "0", "{line}"),
            None if line == "report end" => break,
            None => {}
        }
    }
}

#[test]
fn threads_in_handlers_keep_their_values() {
    every_way(
        "parked",
        &Program::other("parked", assert_no_value_broken).with_args(["4"]),
    );
}

#[test]
fn domains_and_effects_are_unaffected() {
    if !is_of_ocaml_5() {
        return;
    }
    let domains =
        Program::other("ocaml5/domains", assert_no_value_broken).with_args(["3", "2", "collect"]);
    every_way("domains", &domains);
    let effects = Program::other("ocaml5/effects", |talker| {
        let line = talker.ask("run", "round");
        assert!(line.contains(" work=207 "), "{line}");
    });
    every_way("effects", &effects);
}

#[test]
fn busy_threads_keep_running() {
    let program = Program::other("threads", |talker| {
        talker.ask("report", "report end");
    });
    every_way("threads", &program.with_args(["2"]));
}
