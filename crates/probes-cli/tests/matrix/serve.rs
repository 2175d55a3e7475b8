//! `serve -gc`, compared with what the program's own consumer of runtime events reads.

use nix::sys::signal::Signal;
use test_support::{eventually, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::events::own_lines;
use crate::gc::sums;
use crate::serving::Serving;
use crate::support::run;

// promise: Serving: Number and sum of pauses and allocated bytes are those of the program's own events (2 programs in each chroot)
#[test]
fn scraped_pauses_equal_the_own_consumer() {
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("start", "started");
        let serving = Serving::start(&format!("-gc -pid {}", program.pid));
        program.talker.ask("work 3 10", "worked");
        let expected = sums(&own_lines(&mut program));
        let value = |name: &str| {
            let metrics = serving.scrape();
            let mut found = metrics.iter();
            let found = found.find(|(it, _)| it.starts_with(&format!("ocaml_probes_gc_{name}{{")));
            *found.unwrap().1
        };
        eventually("all events are read", || {
            (value("pause_seconds_count") == expected.pauses.0 as f64).then_some(())
        });
        let sum = value("pause_seconds_sum") * 1e9;
        assert_eq!(sum.round() as u64, expected.pauses.1);
        assert_eq!(
            value("minor_allocated_bytes_total"),
            expected.bytes.0 as f64
        );
        assert_eq!(value("promoted_bytes_total"), expected.bytes.1 as f64);
        assert_eq!(value("lost_words_total"), 0.0);
        program.end();
        serving.end(Signal::SIGTERM);
    }
}

// promise: Serving: Events that are paused again, as `gc` leaves them, are said to be off, and not counted as no pauses (2 in each chroot)
#[test]
fn paused_events_are_no_figures() {
    for file in program_forms("calls") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let pid = program.pid;
        program.talker.send("run 1 10000000000");
        run(&format!("gc -pid {pid} -for 200ms")).answer();
        let refused = run(&format!("serve -gc -listen 127.0.0.1:0 -pid {pid}")).failure();
        let why = "writes no runtime events: they are not switched on";
        assert!(refused.contains(why), "{refused}");
        let hint = format!("`ocaml-probes gc -pid {pid}` switches them on while it observes it");
        assert!(refused.contains(&hint), "{refused}");
    }
}

// promise: Serving: The collector's figures of a program of OCaml 5 without the selected probes are served (2 in each chroot)
#[test]
fn collector_is_served_without_probes() {
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("start", "started");
        let name = file.file_name().unwrap().to_str().unwrap();
        let serving = Serving::start(&format!("-name {name} -probe start -pair start,stop -gc"));
        program.talker.ask("work 3 10", "worked");
        let metric = |name: &str| {
            let pid = format!("pid=\"{}\"", program.pid);
            let metrics = serving.scrape();
            let mut found = metrics.iter();
            let found = found.find(|(it, _)| it.contains(name) && it.contains(&pid));
            found.map(|(_, value)| *value)
        };
        eventually("pauses are read", || {
            (metric("_gc_pause_seconds_count")? > 0.0).then_some(())
        });
        assert_eq!(metric("_process_observed"), Some(1.0));
        let missing = "_missing_selections";
        assert_eq!(metric(missing), Some(1.0));
        let error = serving.error();
        assert_eq!(error["kind"], "probe.no_probes");
        program.end();
        serving.end(Signal::SIGTERM);
    }
}
