use std::io;

use super::*;
use crate::error::{ErrorKind, MemoryError, ProcessError};
use crate::select::{Actions, Selector};
use crate::testing::{PID, SimulatedProcess};

fn reading(simulated: &SimulatedProcess, name: &str) -> ProbeReading {
    simulated.snapshot().reading(simulated.merged_probe(name))
}

fn state(simulated: &SimulatedProcess, name: &str) -> State {
    reading(simulated, name).state
}

/// A simulated process, and the address of the third site of `many`.
fn simulated() -> (SimulatedProcess, LiveAddr) {
    let simulated = SimulatedProcess::of("multi_semaphore.pie");
    let opcode = simulated.opcodes("many")[2];
    (simulated, LiveAddr(opcode.0 - 1))
}

#[test]
fn state_is_clear_if_sites_and_counters_agree() {
    let (mut simulated, _) = simulated();
    let off = ProbeReading {
        state: State::Disabled,
        counter: 0,
        enabled_sites: 0,
    };
    assert_eq!(reading(&simulated, "many"), off);
    simulated.set("many", 3);
    let on = ProbeReading {
        state: State::Enabled,
        counter: 3,
        enabled_sites: 7,
    };
    assert_eq!(reading(&simulated, "many"), on);
    assert_eq!(reading(&simulated, "single"), off);
}

#[test]
fn one_disagreeing_site_or_counter_makes_it_inconsistent() {
    let (mut simulated, site) = simulated();
    simulated.memory.poke(site.plus(1), &[0xe8]);
    let reading_off = reading(&simulated, "many");
    assert_eq!(
        (reading_off.state, reading_off.enabled_sites),
        (State::Inconsistent, 1)
    );

    simulated.set("many", 1);
    simulated.memory.poke(site.plus(1), &[0x3d]);
    let reading_on = reading(&simulated, "many");
    assert_eq!(
        (reading_on.state, reading_on.enabled_sites),
        (State::Inconsistent, 6)
    );

    for (value, others) in [(0u16, 2), (1, 0)] {
        simulated.set("many", others);
        let counter = simulated.counters("many")[1];
        simulated.memory.poke(counter, &value.to_le_bytes());
        let found = reading(&simulated, "many");
        assert_eq!((found.state, found.counter), (State::Inconsistent, 0));
    }
}

#[test]
fn unequal_positive_counters_give_the_smallest() {
    let (mut simulated, _) = simulated();
    simulated.set("many", 5);
    let counter = simulated.counters("many")[1];
    simulated.memory.poke(counter, &0x0102_u16.to_le_bytes());
    assert_eq!(state(&simulated, "many"), State::Enabled);
    assert_eq!(reading(&simulated, "many").counter, 5);
    simulated.memory.poke(counter, &2u16.to_le_bytes());
    assert_eq!(reading(&simulated, "many").counter, 2);
}

#[test]
fn probe_without_sites_goes_by_its_counter() {
    let mut simulated = SimulatedProcess::of("gen_ocaml_2.pie");
    assert_eq!(state(&simulated, "flag"), State::Disabled);
    simulated.set("flag", 1);
    assert_eq!(state(&simulated, "flag"), State::Enabled);
}

#[test]
fn breakpoint_on_the_nop_leaves_state_readable() {
    for (counter, expected) in [(0, State::Disabled), (1, State::Enabled)] {
        let (mut simulated, site) = simulated();
        simulated.set("many", counter);
        simulated.memory.poke(site, &[0xcc]);
        assert_eq!(state(&simulated, "many"), expected);
    }
}

#[test]
fn foreign_bytes_make_a_probe_inconsistent() {
    let foreign: [(u64, &[u8]); 7] = [
        (1, &[0xcc]),
        (0, &[0xcc, 0xcc]),
        (0, &[0x66, 0xcc]),
        (0, &[0x66]),
        (1, &[0x0f]),
        (2, &[0xfe]),
        (5, &[0xfe]),
    ];
    for counter in [0, 1] {
        for (offset, bytes) in foreign {
            let (mut simulated, site) = simulated();
            simulated.set("many", counter);
            simulated.memory.poke(site.plus(offset), bytes);
            assert_eq!(
                state(&simulated, "many"),
                State::Inconsistent,
                "{offset} {bytes:x?}"
            );
            assert_eq!(state(&simulated, "single"), State::Disabled);
        }
    }
    // A foreign operand is noticed, too, if there is a breakpoint on the nop.
    let (mut simulated, site) = simulated();
    simulated.memory.poke(site, &[0xcc]);
    simulated.memory.poke(site.plus(2), &[0xfe]);
    assert_eq!(state(&simulated, "many"), State::Inconsistent);
}

#[test]
fn layout_reads_the_chosen_probes_and_no_others() {
    let (mut simulated, _) = simulated();
    simulated.set("many", 1);
    simulated.set("single", 1);
    let one = [simulated.merged_probe("single")];
    let layout = Layout::of(&simulated.program, one.into_iter());
    let snapshot = layout.read(PID, &simulated.memory).unwrap();
    assert_eq!(snapshot.code.len(), 1);
    assert_eq!(snapshot.code[0].bytes.len(), SITE_LEN);
    let counters = &snapshot.counters;
    assert_eq!(counters.iter().sum::<u16>(), 1, "{counters:?}");
    assert_eq!(
        snapshot.reading(simulated.merged_probe("single")).state,
        State::Enabled
    );

    let ranges: Vec<_> = layout.ranges().collect();
    let site = LiveAddr(simulated.opcodes("single")[0].0 - 1);
    let counter = simulated.counters("single")[0];
    assert_eq!(
        ranges,
        [
            (site, 6, MemoryPart::Site),
            (counter, 2, MemoryPart::Semaphore)
        ]
    );
}

#[test]
fn code_is_found_within_one_run_only() {
    let simulated = SimulatedProcess::of("segments.pie");
    let snapshot = simulated.snapshot();
    assert!(snapshot.code.len() >= 3);
    for run in &snapshot.code {
        let len = run.bytes.len();
        assert_eq!(snapshot.code_at(run.start, len), Some(&run.bytes[..]));
        assert_eq!(snapshot.code_at(run.start.plus(1), len), None);
        assert_eq!(snapshot.code_at(LiveAddr(run.start.0 - 1), 1), None);
        assert_eq!(
            snapshot.code_at(run.start.plus(len as u64), 0),
            Some(&[][..])
        );
    }
}

#[test]
fn unreadable_memory_is_reported_with_its_purpose() {
    struct Unreadable(io::ErrorKind, u64);
    impl ReadMemory for Unreadable {
        fn read(&self, at: LiveAddr, _: &mut [u8]) -> io::Result<()> {
            if at.0 >= self.1 {
                return Err(self.0.into());
            }
            Ok(())
        }
    }
    let (simulated, _) = simulated();
    let layout = Layout::of(&simulated.program, simulated.program.probes());
    let read = |kind, from: LiveAddr| {
        let unreadable = Unreadable(kind, from.0);
        layout.read(PID, &unreadable).unwrap_err()
    };
    let site = LiveAddr(simulated.opcodes("many")[0].0 - 1);
    let counter = simulated.counters("many")[0];
    for (from, at, kind) in [
        (LiveAddr(0), site, MemoryPart::Site),
        (counter, counter, MemoryPart::Semaphore),
    ] {
        let error = read(io::ErrorKind::Other, from);
        let ErrorKind::Memory(MemoryError::Read { part, address, .. }) = error.kind() else {
            panic!("{error}");
        };
        assert_eq!((error.pid(), *part, *address), (Some(PID), kind, at));
        let gone = read(io::ErrorKind::UnexpectedEof, from);
        assert!(matches!(
            gone.kind(),
            ErrorKind::Process(ProcessError::Exited)
        ));
        assert_eq!(gone.pid(), Some(PID));
    }
}

#[test]
fn last_counter_of_a_mapping_is_read_exactly() {
    for fixture in ["edge_semaphore_ocaml.pie", "edge_semaphore_ocaml_2.nopie"] {
        let mut simulated = SimulatedProcess::of(fixture);
        simulated.set("last", 0xbeef);
        assert_eq!(reading(&simulated, "last").counter, 0xbeef);
        let on = Actions::new().enable(Selector::name("last"));
        simulated.update(&on).unwrap();
        assert_eq!(reading(&simulated, "last").counter, 0xbef0);
    }
}
