mod model;

use std::io;

use super::*;
use crate::error::{ErrorKind, ProcessError};
use crate::memory::double::{SliceMemory, WriteFault};
use crate::select::{Action, Actions, Selector};
use crate::testing::{PID, SimulatedProcess};

/// A process in which `single` is enabled, and an update that disables it and enables `many`, whose
/// sites are in the same page: several steps with several writes.
fn mixed() -> (SimulatedProcess, Actions) {
    let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
    simulated.set("single", 1);
    let actions = Actions::of(Action::Disable, Selector::name("single"));
    (simulated, actions.enable(Selector::name("many")))
}

/// Updates of several steps, pages and counters.
fn updates() -> Vec<(SimulatedProcess, Actions)> {
    let pair = Selector::Pair {
        start: "single".to_owned(),
        stop: "many".to_owned(),
    };
    let mut borders = SimulatedProcess::of("page_borders.nopie");
    borders.set("across", 2);
    borders.set("left", 1);
    vec![
        mixed(),
        (
            SimulatedProcess::of("multi_semaphore.nopie"),
            Actions::of(Action::Enable, pair),
        ),
        (
            SimulatedProcess::of("segments.pie"),
            Actions::of(Action::Enable, Selector::All),
        ),
        (
            borders,
            Actions::of(Action::Disable, Selector::All).force(true),
        ),
    ]
}

/// Returns how many writes an update takes.
fn writes_of(simulated: &SimulatedProcess, actions: &Actions) -> usize {
    let (layout, plan) = simulated.plan(actions).unwrap();
    let mut memory = simulated.memory.failing(0..0, WriteFault::Refused);
    let outcome = apply(&plan, &layout, PID, &mut memory).unwrap();
    assert_eq!(outcome, PatchOutcome::Done);
    memory.writes
}

/// The result of an update some of whose writes fail, and the memory after it.
fn apply_with_failing_writes(
    simulated: &SimulatedProcess,
    actions: &Actions,
    writes: std::ops::Range<usize>,
    fault: WriteFault,
) -> (Result<PatchOutcome>, SliceMemory) {
    let (layout, plan) = simulated.plan(actions).unwrap();
    let mut memory = simulated.memory.failing(writes, fault);
    (apply(&plan, &layout, PID, &mut memory), memory)
}

#[test]
fn update_writes_exactly_its_plan() {
    let (mut simulated, actions) = mixed();
    assert_eq!(simulated.update(&actions).unwrap(), PatchOutcome::Done);
    let mut expected = SimulatedProcess::of("multi_semaphore.pie");
    expected.set("many", 1);
    expected.set("single", 0);
    assert_eq!(simulated.memory.differences(&expected.memory), []);
}

#[test]
fn alternating_sites_in_a_page_update_as_pair() {
    // The write for the sites of `many` spans the site of `single`, which has a write of its own, before it
    // or after it.
    for (action, before, after) in [(Action::Enable, 0, 1), (Action::Disable, 1, 0)] {
        for (start, stop) in [("single", "many"), ("many", "single")] {
            let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
            for name in [start, stop] {
                simulated.set(name, before);
            }
            let (start, stop) = (start.to_owned(), stop.to_owned());
            let pair = Selector::Pair { start, stop };
            assert_eq!(
                simulated.update(&Actions::of(action, pair)).unwrap(),
                PatchOutcome::Done
            );
            for name in ["single", "many"] {
                let reading = simulated.snapshot().reading(simulated.merged_probe(name));
                assert_eq!(reading.counter, after);
            }
        }
    }
}

// promise: All or nothing: If a write fails, in whole or in part, every byte is restored (every
//    write of each kind of update × 2 kinds of failure)
#[test]
fn any_failed_write_restores_all_bytes() {
    for (simulated, actions) in updates() {
        let writes = writes_of(&simulated, &actions);
        assert!(writes >= 4, "{writes}");
        for number in 0..writes {
            for fault in [WriteFault::Refused, WriteFault::Torn] {
                let (result, memory) =
                    apply_with_failing_writes(&simulated, &actions, number..number + 1, fault);
                let error = result.unwrap_err();
                let what = format!("write {number} {fault:?} of {actions:?}: {error}");
                assert!(
                    matches!(error.kind(), ErrorKind::Memory(MemoryError::Write { .. }))
                        && error.pid() == Some(PID),
                    "{what}"
                );
                assert_eq!(error.effect(), Effect::Restored, "{what}");
                assert_eq!(memory.differences(&simulated.memory), [], "{what}");
            }
        }
    }
}

#[test]
fn failed_write_error_says_what_and_where() {
    let (simulated, actions) = mixed();
    let places = [
        (MemoryPart::Semaphore, simulated.counters("single")[0]),
        (MemoryPart::Site, simulated.opcodes("single")[0]),
        (MemoryPart::Site, simulated.opcodes("many")[0]),
        (MemoryPart::Semaphore, simulated.counters("many")[0]),
        (MemoryPart::Semaphore, simulated.counters("many")[1]),
        (MemoryPart::Semaphore, simulated.counters("many")[2]),
    ];
    assert_eq!(writes_of(&simulated, &actions), places.len());
    for (number, place) in places.into_iter().enumerate() {
        let (result, _) = apply_with_failing_writes(
            &simulated,
            &actions,
            number..number + 1,
            WriteFault::Refused,
        );
        let error = result.unwrap_err();
        let ErrorKind::Memory(MemoryError::Write { part, address, .. }) = error.kind() else {
            panic!("{error}");
        };
        assert_eq!((*part, *address), place);
        assert!(error.to_string().ends_with("; every change was undone"));
    }
}

// promise: All or nothing: A write that did not take effect is noticed
#[test]
fn lost_write_is_noticed_and_all_restored() {
    for (simulated, actions) in updates() {
        let (_, updated) =
            apply_with_failing_writes(&simulated, &actions, 0..0, WriteFault::Refused);
        for number in 0..writes_of(&simulated, &actions) {
            for fault in WriteFault::SILENT {
                let (result, memory) =
                    apply_with_failing_writes(&simulated, &actions, number..number + 1, fault);
                let Err(error) = result else {
                    // A later write of the same page wrote the same bytes.
                    assert_eq!(memory.differences(&updated), [], "write {number} {fault:?}");
                    continue;
                };
                let what = format!("write {number} {fault:?} of {actions:?}: {error}");
                assert!(
                    matches!(
                        error.kind(),
                        ErrorKind::Memory(MemoryError::NotAsWritten { .. })
                    ) && error.pid() == Some(PID),
                    "{what}"
                );
                assert_eq!(error.effect(), Effect::Restored, "{what}");
                assert_eq!(memory.differences(&simulated.memory), [], "{what}");
            }
        }
    }
}

// promise: All or nothing: If restoring fails, the error says that the process is half changed
//    (every write)
#[test]
fn failed_restore_reports_half_changed() {
    for (simulated, actions) in updates() {
        let writes = writes_of(&simulated, &actions);
        for fault in [
            WriteFault::Refused,
            WriteFault::Torn,
            WriteFault::Dropped,
            WriteFault::Corrupted,
        ] {
            // The last write of the update fails, and so do the writes that restore: the first of
            // them, the first two, and so on.
            let first = writes - 1;
            for failures in 2..=2 * writes {
                let fail = first..first + failures;
                let (result, memory) = apply_with_failing_writes(&simulated, &actions, fail, fault);
                let error = result.unwrap_err();
                let left = memory.differences(&simulated.memory);
                let what = format!("{failures} {fault:?} of {actions:?}: {error} {left:?}");
                let expected = if left.is_empty() {
                    Effect::Restored
                } else {
                    Effect::HalfChanged
                };
                assert_eq!(error.effect(), expected, "{what}");
            }
        }
    }
}

#[test]
fn restoring_continues_after_a_failed_restore() {
    let (simulated, actions) = mixed();
    let writes = writes_of(&simulated, &actions);
    assert_eq!(writes, 6);
    // The last write of the update fails, that of the third counter of `many`: all is restored.
    let (result, memory) =
        apply_with_failing_writes(&simulated, &actions, 5..6, WriteFault::Refused);
    assert_eq!(result.unwrap_err().effect(), Effect::Restored);
    let restoring = memory.writes - writes;

    let mut still_wrong = Vec::new();
    for number in 0..restoring {
        // Two writes fail: the last of the update, then one of those that restore.
        let (layout, plan) = simulated.plan(&actions).unwrap();
        let mut memory = FailingTwice {
            memory: simulated.memory.failing(5..6, WriteFault::Refused),
            second: 6 + number,
        };
        let error = apply(&plan, &layout, PID, &mut memory).unwrap_err();
        let left = memory.memory.differences(&simulated.memory);
        assert_eq!(
            error.effect() == Effect::Restored,
            left.is_empty(),
            "{left:?}"
        );
        still_wrong.push(left.len());
    }
    // How many bytes stay wrong, by the write that fails: 1 for each of two counters of `many`, 7
    // for the opcodes of `many`, 1 each for the opcode and the counter of `single`, and 0 for the
    // counter that was never changed.
    still_wrong.sort_unstable();
    assert_eq!(still_wrong, [0, 1, 1, 1, 1, 7]);
}

/// Memory in which a second write fails: one of those that restore.
struct FailingTwice {
    memory: SliceMemory,
    second: usize,
}

impl FailingTwice {
    fn prepare(&mut self) {
        if self.memory.writes > self.memory.fail.start {
            self.memory.fail = self.second..self.second + 1;
        }
    }
}

impl crate::memory::ReadMemory for FailingTwice {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read(at, bytes)
    }
}

impl WriteMemory for FailingTwice {
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        self.prepare();
        self.memory.write_code(at, bytes)
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        self.prepare();
        self.memory.write_counters(writes)
    }
}

#[test]
fn exit_during_an_update_is_reported() {
    let (simulated, actions) = mixed();
    for number in 0..writes_of(&simulated, &actions) {
        let (result, _) =
            apply_with_failing_writes(&simulated, &actions, number..usize::MAX, WriteFault::Gone);
        let error = result.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Process(ProcessError::Exited))
                && error.pid() == Some(PID),
            "{error}"
        );
    }
}

// promise: All or nothing: Nothing is written to a process that has changed since the update was
//    planned
#[test]
fn changed_process_is_not_written_to() {
    let (simulated, actions) = mixed();
    let (layout, plan) = simulated.plan(&actions).unwrap();
    let site = simulated.opcodes("many")[1];
    let gap = LiveAddr(simulated.opcodes("many")[2].0 - 2);
    let places = [
        (site, 0xe8),
        (LiveAddr(site.0 - 1), 0xcc),
        (LiveAddr(site.0 + 4), 0x77),
        (gap, 0xcc),
        (simulated.counters("many")[2], 1),
        (simulated.counters("single")[0].plus(1), 1),
    ];
    for (at, byte) in places {
        assert_ne!(simulated.memory.byte(at), byte);
        let mut memory = simulated.memory.clone();
        memory.poke(at, &[byte]);
        let changed = memory.clone();
        let outcome = apply(&plan, &layout, PID, &mut memory).unwrap();
        assert_eq!(outcome, PatchOutcome::Outdated, "{at}");
        assert_eq!(memory.writes, 0);
        assert_eq!(memory.differences(&changed), []);
    }
}

#[test]
fn memory_that_became_unreadable_is_not_written() {
    let (simulated, actions) = mixed();
    let (layout, plan) = simulated.plan(&actions).unwrap();
    let mut unmapped = SliceMemory::new([(0x1000, vec![0; 16])]);
    let error = apply(&plan, &layout, PID, &mut unmapped).unwrap_err();
    assert!(matches!(
        error.kind(),
        ErrorKind::Memory(MemoryError::Read { .. })
    ));
    assert_eq!(error.effect(), Effect::NothingChanged);
    assert_eq!(unmapped.writes, 0);
}

// promise: All or nothing: The counter of another tool (SystemTap) beside ours is never written
#[test]
fn counter_of_another_tool_is_never_touched() {
    // SystemTap's counters are changed by the kernel even while all threads are stopped.
    for fixture in ["edge_semaphore_ocaml_2.pie", "gen_ocaml_2.nopie"] {
        let mut simulated = SimulatedProcess::of(fixture);
        let names: Vec<String> = simulated
            .table
            .probes()
            .map(|p| p.name().to_owned())
            .collect();
        let counters: Vec<LiveAddr> = names.iter().flat_map(|n| simulated.counters(n)).collect();
        for &counter in &counters {
            simulated.memory.poke(LiveAddr(counter.0 - 2), &[7, 7]);
        }
        simulated
            .update(&Actions::of(Action::Enable, Selector::All))
            .unwrap();
        for &counter in &counters {
            let mut found = [0; 4];
            let pair = LiveAddr(counter.0 - 2);
            crate::memory::ReadMemory::read(&simulated.memory, pair, &mut found).unwrap();
            assert_eq!(found, [7, 7, 1, 0], "{fixture} {counter}");
        }
    }
}
