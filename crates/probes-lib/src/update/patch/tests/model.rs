//! Compares plan and patch with a model, which is a map from names to counters. Makes sequences of
//! arbitrary updates, in some of which a write fails, on the layouts of real files.

use std::collections::{BTreeMap, HashSet};
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::address::LiveAddr;
use crate::error::Effect;
use crate::memory::double::{SliceMemory, WriteFault};
use crate::select::{Action, Actions, Selector, choose};
use crate::site::INT3;
use crate::testing::{PID, SimulatedProcess, properties, set};
use crate::update::patch::{PatchOutcome, apply};
use crate::update::plan::{Step, UpdatePlan};

/// What the probes' counters are. A site calls its handler iff the counter is above 0.
type Model = BTreeMap<String, u16>;

/// The fixtures whose layouts are tried: several semaphores, interleaved probes, two generations,
/// sites across pages and in segments far apart, notes without a site, a semaphore at the end of its mapping.
const FIXTURES: [&str; 9] = [
    "multi_semaphore.pie",
    "mixed_generations.nopie",
    "page_borders.pie",
    "segments.nopie",
    "gen_ocaml_2.pie",
    "prelinked.pie",
    "edge_semaphore_ocaml.pie",
    "spin_10.nopie",
    "spin_1000.pie",
];

static SIMULATED: LazyLock<Vec<(SimulatedProcess, Vec<LiveAddr>)>> = LazyLock::new(|| {
    let with_gaps = |name| {
        let simulated = SimulatedProcess::of(name);
        let gaps = gaps(&simulated);
        (simulated, gaps)
    };
    FIXTURES.into_iter().map(with_gaps).collect()
});

/// Addresses of the bytes of code that belong to no site and are not `cc` in the file.
fn gaps(simulated: &SimulatedProcess) -> Vec<LiveAddr> {
    let names = simulated.table.probes().map(|probe| probe.name());
    let opcodes = names.flat_map(|name| simulated.opcodes(name));
    let sites: HashSet<u64> = opcodes.flat_map(|at| at.0 - 1..at.0 + 5).collect();
    let code = simulated.snapshot().code.into_iter();
    let bytes = code.flat_map(|run| (run.start.0..).zip(run.bytes));
    bytes
        .filter(|(at, byte)| *byte != INT3 && !sites.contains(at))
        .map(|(at, _)| LiveAddr(at))
        .collect()
}

/// Which probes, with indices that fit every file.
#[derive(Clone, Debug)]
enum Pick {
    All,
    Name(Index),
    Unknown,
    Pair(Index, Index),
    /// A regular expression: the first letters of a name.
    Prefix(Index, usize),
    /// A predicate: names of an even or odd length.
    Length(bool),
}

#[derive(Clone, Debug)]
struct Update {
    actions: Vec<(bool, Pick)>,
    force: bool,
    /// Whether each opcode is written by itself.
    live: bool,
    /// The number of a write that goes wrong, and how it goes wrong; without effect if the
    /// update makes fewer writes.
    fault: Option<(usize, WriteFault)>,
}

fn pick() -> impl Strategy<Value = Pick> {
    prop_oneof![
        2 => Just(Pick::All),
        6 => any::<Index>().prop_map(Pick::Name),
        1 => Just(Pick::Unknown),
        3 => any::<(Index, Index)>().prop_map(|(start, stop)| Pick::Pair(start, stop)),
        3 => (any::<Index>(), 0..4usize).prop_map(|(name, len)| Pick::Prefix(name, len)),
        1 => any::<bool>().prop_map(Pick::Length),
    ]
}

fn update() -> impl Strategy<Value = Update> {
    let faults = [WriteFault::REPORTED.as_slice(), &WriteFault::SILENT].concat();
    let faults: Vec<WriteFault> = faults
        .into_iter()
        .filter(|f| *f != WriteFault::Gone)
        .collect();
    (
        prop::collection::vec((any::<bool>(), pick()), 1..4),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.3),
        prop::option::weighted(0.3, (0..12usize, select(faults))),
    )
        .prop_map(|(actions, force, live, fault)| Update {
            actions,
            force,
            live,
            fault,
        })
}

/// Mostly small counters, and those at the upper end.
fn counter() -> impl Strategy<Value = u16> {
    prop_oneof![4 => 0..4u16, 1 => u16::MAX - 1..=u16::MAX]
}

impl Pick {
    fn selector(&self, names: &[String]) -> Selector {
        let name = |index: &Index| index.get(names).clone();
        match self {
            Pick::All => Selector::All,
            Pick::Name(index) => Selector::Name(name(index)),
            Pick::Unknown => Selector::name("not a probe"),
            Pick::Pair(start, stop) => Selector::Pair {
                start: name(start),
                stop: name(stop),
            },
            Pick::Prefix(..) => Selector::regexp(self.prefix(names)).unwrap(),
            &Pick::Length(even) => Selector::predicate(move |name| (name.len() % 2 == 0) == even),
        }
    }

    fn prefix<'n>(&self, names: &'n [String]) -> &'n str {
        match self {
            Pick::Prefix(index, len) => {
                let name = index.get(names);
                &name[..name.len().min(*len)]
            }
            _ => "",
        }
    }

    /// The names that are meant, and whether they were named one by one.
    fn names<'n>(&self, names: &'n [String]) -> (Vec<&'n String>, bool) {
        let matching = |wanted: &dyn Fn(&str) -> bool| names.iter().filter(|n| wanted(n)).collect();
        match self {
            Pick::All => (matching(&|_| true), false),
            Pick::Name(index) => (vec![index.get(names)], true),
            Pick::Unknown => (Vec::new(), true),
            Pick::Pair(one, other) => (vec![one.get(names), other.get(names)], false),
            Pick::Prefix(..) => {
                let prefix = self.prefix(names);
                (matching(&|name| name.starts_with(prefix)), false)
            }
            Pick::Length(even) => (matching(&|name| (name.len() % 2 == 0) == *even), false),
        }
    }
}

impl Update {
    fn actions(&self, names: &[String]) -> Actions {
        let all = self
            .actions
            .iter()
            .fold(Actions::new(), |all, (enable, pick)| {
                let action = if *enable {
                    Action::Enable
                } else {
                    Action::Disable
                };
                all.and(action, pick.selector(names))
            });
        all.force(self.force)
    }

    /// What the counters are afterwards; `None` if the update has to be refused.
    fn apply(&self, model: &Model) -> Option<Model> {
        let names: Vec<String> = model.keys().cloned().collect();
        let mut after = model.clone();
        let mut seen: Vec<&String> = Vec::new();
        for (enable, pick) in &self.actions {
            let (chosen, named) = pick.names(&names);
            if chosen.is_empty() {
                return None;
            }
            for name in chosen {
                if seen.contains(&name) {
                    return None;
                }
                seen.push(name);
                let counter = after.get_mut(name).unwrap();
                *counter = match (self.force, enable) {
                    (true, enable) => u16::from(*enable),
                    (false, true) => counter.checked_add(1)?,
                    (false, false) if *counter == 0 && named => return None,
                    (false, false) => counter.saturating_sub(1),
                };
            }
        }
        Some(after)
    }
}

/// The memory that agrees with a model: that of the file, except for the opcodes and counters.
fn image(simulated: &SimulatedProcess, model: &Model) -> SliceMemory {
    let mut memory = simulated.loaded.clone();
    for (name, counter) in model {
        set(
            &simulated.table,
            simulated.bias,
            &mut memory,
            name,
            *counter,
        );
    }
    memory
}

fn check(
    (simulated, gaps): &(SimulatedProcess, Vec<LiveAddr>),
    start: &[u16],
    int3: &[Index],
    updates: &[Update],
) {
    let names: Vec<String> = simulated
        .table
        .probes()
        .map(|p| p.name().to_owned())
        .collect();
    let counters = start.iter().copied().cycle();
    let mut model: Model = names.iter().cloned().zip(counters).collect();

    // Breakpoints of another tool, on code that belongs to no site.
    let breakpoints: Vec<LiveAddr> = int3
        .iter()
        .filter(|_| !gaps.is_empty())
        .map(|index| *index.get(gaps))
        .collect();
    let image = |model: &Model| {
        let mut memory = image(simulated, model);
        for at in &breakpoints {
            memory.poke(*at, &[INT3]);
        }
        memory
    };

    let mut current = simulated.with_memory(image(&model));
    for update in updates {
        let actions = update.actions(&names);
        let Some(after) = update.apply(&model) else {
            current.plan(&actions).unwrap_err();
            continue;
        };
        let choices = choose(&current.program, &actions).unwrap();
        let (layout, plan) = current.plan_for(&choices, update.live).unwrap();
        for step in &plan.steps {
            if let Step::Code(writes) = step {
                for write in writes {
                    let written = write.at.0..write.at.0 + write.len as u64;
                    assert!(breakpoints.iter().all(|at| !written.contains(&at.0)));
                }
            }
        }
        let (failing_writes, fault) = match update.fault {
            Some((number, fault)) => (number..number + 1, fault),
            None => (0..0, WriteFault::Refused),
        };
        let mut memory = current.memory.failing(failing_writes.clone(), fault);
        let result = apply(&plan, &layout, PID, &mut memory);
        let reached = memory.writes > failing_writes.start && !failing_writes.is_empty();
        match result {
            // A later write of the same page may have written what an earlier one failed to.
            Ok(outcome) if !reached || WriteFault::SILENT.contains(&fault) => {
                assert_eq!(outcome, PatchOutcome::Done);
                check_undo(&current, &memory, &plan, &image(&model));
                model = after;
            }
            Ok(_) => panic!("a write failed, and that was not reported"),
            Err(error) => {
                assert!(reached, "{error}");
                assert_eq!(error.effect(), Effect::Restored);
            }
        }
        assert_eq!(memory.differences(&image(&model)), []);
        current.memory = memory;
    }
}

/// Checks that an undo of the update `done` in `memory` gives the memory `before`.
fn check_undo(
    simulated: &SimulatedProcess,
    memory: &SliceMemory,
    done: &UpdatePlan,
    before: &SliceMemory,
) {
    let mut after_undo = simulated.with_memory(memory.failing(0..0, WriteFault::Refused));
    after_undo.update_for(&after_undo.undo(done)).unwrap();
    assert_eq!(after_undo.memory.differences(before), []);
}

proptest! {
    #![proptest_config(properties(192))]

    // promise: All or nothing: Memory always agrees with the counters, after any sequence of
    //    updates and faults (192 sequences)
    #[test]
    fn memory_always_agrees_with_the_model(
        fixture in 0..FIXTURES.len(),
        start in prop::collection::vec(counter(), 1..10),
        int3 in prop::collection::vec(any::<Index>(), 0..4),
        updates in prop::collection::vec(update(), 1..10),
    ) {
        check(&SIMULATED[fixture], &start, &int3, &updates);
    }
}
