//! Domains that hit probes without a pause while these are switched.

use std::path::Path;

use probes_lib::{Action, Actions, Options, Selector, Target};
use test_support::{DEADLINE, Talker, eventually, program_forms};

use crate::chroot::{ChrootProgram, Isolation};

/// What a worker has counted so far, read while it waits between two rounds.
#[derive(Clone, Copy, Debug)]
struct Counts {
    rounds: u64,
    /// Of the probes `hit`, `alloc` and `raise`.
    hits: [u64; 3],
}

/// The counts of all workers, read while they wait between two rounds. Asserts that no
/// value was corrupted: neither one that lives across a site nor one that a handler has made.
fn report(talker: &mut Talker) -> Vec<Counts> {
    talker.send("report");
    let mut workers = Vec::new();
    loop {
        let line = talker.line().expect("a report");
        if line == "report end" {
            return workers;
        }
        let numbers: Vec<u64> = line
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('=')?.1.parse().ok())
            .collect();
        let [rounds, hit, alloc, raised, broken] = numbers[..] else {
            panic!("{line}")
        };
        assert_eq!(broken, 0, "{line}");
        workers.push(Counts {
            rounds,
            hits: [hit, alloc, raised],
        });
    }
}

/// The reports at the start and end of a time in which every worker has done some rounds.
fn span(talker: &mut Talker) -> Vec<(Counts, Counts)> {
    let first = report(talker);
    eventually("every worker runs on", || {
        let last = report(talker);
        let spans: Vec<_> = first.iter().copied().zip(last).collect();
        let all = spans
            .iter()
            .all(|(first, last)| last.rounds > first.rounds + 1);
        all.then_some(spans)
    })
}

/// Enables and disables all probes `cycles` times, every second time live, and checks some of these
/// cycles closely: with the probes on, each round hits each probe once; with them off, it hits
/// none.
fn switch(file: &Path, args: &[&str], workers: usize, cycles: usize) {
    let ChrootProgram {
        mut talker, pid, ..
    } = ChrootProgram::start(Isolation::Chroot, file, args);
    let target = Target::open(pid).unwrap();
    let options = Options {
        time_limit: DEADLINE,
        ..Options::default()
    };
    let update = |action, live| {
        let options = Options { live, ..options };
        let actions = Actions::of(action, Selector::All);
        let report = target.update_with(&actions, options).unwrap();
        assert_eq!(report.changed.len(), 3);
    };
    for cycle in 0..cycles {
        let live = cycle % 2 == 1;
        let looks_closely = cycle % 50 < 2;
        update(Action::Enable, live);
        if looks_closely {
            let spans = span(&mut talker);
            assert_eq!(spans.len(), workers);
            for (first, last) in spans {
                let rounds = last.rounds - first.rounds;
                let hits = [0, 1, 2].map(|probe| last.hits[probe] - first.hits[probe]);
                assert_eq!(hits, [rounds; 3], "on, cycle {cycle}: {first:?} {last:?}");
            }
        }
        update(Action::Disable, live);
        if looks_closely {
            for (first, last) in span(&mut talker) {
                assert_eq!(first.hits, last.hits, "off, cycle {cycle}");
            }
        }
    }
    for Counts { rounds, hits } in report(&mut talker) {
        assert!(hits.iter().all(|&hits| 0 < hits && hits < rounds));
    }
    talker.close_input();
    assert!(talker.guard().wait().success());
}

// promise: OCaml 5: Domains run on while probes are switched; each round is one hit in each domain
//    with a probe on, none with it off (2 × 1,000 updates, half of them with `-live`)
#[test]
fn eight_domains_count_every_round_while_switched() {
    for file in program_forms("ocaml5/domains") {
        switch(&file, &["8", "1"], 8, 500);
    }
}

// promise: OCaml 5: System threads in domains run on while probes are switched (2 × 600 updates)
#[test]
fn system_threads_in_domains_are_switched() {
    for file in program_forms("ocaml5/domains") {
        switch(&file, &["3", "3"], 9, 300);
    }
}

// promise: OCaml 5: What handlers allocate, and what lives across a site, survives collections and
//    compactions (2 × 200 updates)
#[test]
fn handlers_allocate_while_the_heap_is_compacted() {
    for file in program_forms("ocaml5/domains") {
        switch(&file, &["8", "1", "collect"], 8, 100);
    }
}
