use super::*;
use crate::address::LoadBias;
use crate::error::Error;
use crate::error::ErrorKind;
use crate::memory::double::SliceMemory;
use crate::select::{Actions, Selector};
use crate::site::INT3;
use crate::testing::{PID, ProgramSpec, SimulatedProcess, loaded_twice, program_with_probes};
use crate::update::snapshot::Layout;

// Seven sites and three counters of `many`, and between them one site and counter of `single`.
const FIXTURE: &str = "multi_semaphore.pie";

fn enable(name: &str) -> Actions {
    Actions::of(Action::Enable, Selector::name(name))
}

fn disable(name: &str) -> Actions {
    Actions::of(Action::Disable, Selector::name(name))
}

fn pair(action: Action) -> Actions {
    let (start, stop) = ("single".to_owned(), "many".to_owned());
    Actions::of(action, Selector::Pair { start, stop })
}

fn plan(simulated: &SimulatedProcess, actions: &Actions) -> UpdatePlan {
    simulated.plan(actions).unwrap().1
}

fn refusal(simulated: &SimulatedProcess, actions: &Actions) -> Error {
    simulated.plan(actions).unwrap_err()
}

/// The steps as text: how many opcodes become which byte, and how each counter changes.
fn steps(plan: &UpdatePlan) -> Vec<String> {
    let text = |step: &Step| match step {
        Step::Code(writes) => {
            let opcode_changes = writes.iter().flat_map(|write| opcode_changes(plan, write));
            let new_bytes: Vec<u8> = opcode_changes.map(|(_, new)| new).collect();
            assert!(new_bytes.iter().all(|new| *new == new_bytes[0]));
            format!("{} x {:02x}", new_bytes.len(), new_bytes[0])
        }
        Step::Counters(writes) => {
            let text = |write: &CounterWrite| format!("{}->{}", write.old, write.new);
            writes.iter().map(text).collect::<Vec<_>>().join(" ")
        }
    };
    plan.steps.iter().map(text).collect()
}

/// The bytes of a write that change: where, and what they become.
fn opcode_changes(plan: &UpdatePlan, write: &CodeWrite) -> Vec<(LiveAddr, u8)> {
    let (old, new) = code(plan, write);
    let bytes = old.into_iter().zip(new).zip(write.at.0..);
    bytes
        .filter(|((old, new), _)| old != new)
        .map(|((_, new), at)| (LiveAddr(at), new))
        .collect()
}

/// What is at the place of a write before and after it.
fn code(plan: &UpdatePlan, write: &CodeWrite) -> (Vec<u8>, Vec<u8>) {
    let (mut old, mut new) = (Vec::new(), Vec::new());
    plan.old_code(write, &mut old);
    plan.new_code(write, &mut new);
    assert_eq!((old.len(), new.len()), (write.len, write.len));
    (old, new)
}

fn code_writes(plan: &UpdatePlan) -> impl Iterator<Item = &CodeWrite> {
    plan.steps.iter().flat_map(|step| match step {
        Step::Code(writes) => writes.as_slice(),
        Step::Counters(_) => &[],
    })
}

// promise: All or nothing: Sites are enabled before their counters, so that every prefix of the
//    writes is safe
#[test]
fn sites_are_enabled_before_their_counters() {
    let plan = plan(&SimulatedProcess::of(FIXTURE), &enable("many"));
    assert_eq!(steps(&plan), ["7 x e8", "0->1 0->1 0->1"]);
}

// promise: All or nothing: Counters are disabled before their sites, so that every prefix of the
//    writes is safe
#[test]
fn counters_are_disabled_before_their_sites() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("many", 1);
    let plan = plan(&simulated, &disable("many"));
    assert_eq!(steps(&plan), ["1->0 1->0 1->0", "7 x 3d"]);
}

#[test]
fn pair_enables_stop_first_and_disables_start_first() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    let on = plan(&simulated, &pair(Action::Enable));
    assert_eq!(steps(&on), ["7 x e8", "0->1 0->1 0->1", "1 x e8", "0->1"]);

    simulated.set("single", 1);
    simulated.set("many", 1);
    let off = plan(&simulated, &pair(Action::Disable));
    assert_eq!(steps(&off), ["1->0", "1 x 3d", "1->0 1->0 1->0", "7 x 3d"]);
}

#[test]
fn disabling_comes_before_enabling() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("single", 1);
    let both = enable("many").disable(Selector::name("single"));
    let plan = plan(&simulated, &both);
    assert_eq!(steps(&plan), ["1->0", "1 x 3d", "7 x e8", "0->1 0->1 0->1"]);
    // The changes are in the order in which they were asked for.
    let names: Vec<_> = plan
        .changes
        .iter()
        .map(|change| simulated.table.by_index(change.probe).name())
        .collect();
    assert_eq!(names, ["many", "single"]);
}

#[test]
fn each_step_expects_the_bytes_written_before() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("single", 1);
    let plan = plan(
        &simulated,
        &enable("many").disable(Selector::name("single")),
    );
    let single = simulated.opcodes("single")[0];
    let writes: Vec<&CodeWrite> = code_writes(&plan).collect();
    assert_eq!(writes[0].at, single);
    assert_eq!(code(&plan, writes[0]), (vec![0xe8], vec![0x3d]));
    let offset = (single.0 - writes[1].at.0) as usize;
    let (old, new) = code(&plan, writes[1]);
    assert_eq!((old[offset], new[offset]), (0x3d, 0x3d));
}

#[test]
fn sites_change_only_when_counters_leave_0() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    for (actions, expected, changed) in [
        (enable("single"), &["1 x e8", "0->1"][..], (0, 1, 1)),
        (enable("single"), &["1->2"], (1, 2, 0)),
        (disable("single"), &["2->1"], (2, 1, 0)),
        (disable("single"), &["1->0", "1 x 3d"], (1, 0, 1)),
    ] {
        let plan = plan(&simulated, &actions);
        assert_eq!(steps(&plan), expected);
        let change = &plan.changes[0];
        assert_eq!((change.before, change.after, change.sites), changed);
        simulated.set("single", change.after);
    }
    assert_eq!(simulated.memory, simulated.loaded);
}

/// Returns the plan that undoes `applied`, which has been carried out.
fn undo_plan(simulated: &SimulatedProcess, applied: &UpdatePlan) -> UpdatePlan {
    simulated
        .plan_for(&simulated.undo(applied), false)
        .unwrap()
        .1
}

#[test]
fn pair_is_undone_in_the_opposite_order() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    let on = plan(&simulated, &pair(Action::Enable));
    simulated.update(&pair(Action::Enable)).unwrap();
    let off = plan(&simulated, &pair(Action::Disable));
    assert_eq!(steps(&undo_plan(&simulated, &on)), steps(&off));

    simulated.update(&pair(Action::Disable)).unwrap();
    assert_eq!(steps(&undo_plan(&simulated, &off)), steps(&on));
}

#[test]
fn counts_of_other_tools_are_kept() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    let on = plan(&simulated, &enable("single"));
    // Another tool has enabled it as well.
    simulated.set("single", 2);
    let counted = undo_plan(&simulated, &on);
    assert_eq!(steps(&counted), ["2->1"]);
    assert_eq!((counted.changes.len(), counted.skipped.len()), (1, 0));
    // Another tool has disabled it: a counter does not go below zero.
    simulated.set("single", 0);
    let nothing = undo_plan(&simulated, &on);
    assert!(nothing.steps.is_empty() && nothing.changes.is_empty());
    assert_eq!(nothing.skipped, [simulated.merged_probe("single").id()]);
}

#[test]
fn probe_with_breakpoint_is_not_undone_others_are() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    let all = Actions::new().enable(Selector::All);
    let on = plan(&simulated, &all);
    simulated.update(&all).unwrap();
    let opcode = simulated.opcodes("many")[2];
    simulated.memory.poke(opcode, &[INT3]);
    let undo = undo_plan(&simulated, &on);
    assert_eq!(steps(&undo), ["1->0", "1 x 3d"]);
    assert_eq!(undo.not_undone, [simulated.merged_probe("many").id()]);
    assert!(undo.skipped.is_empty());
}

#[test]
fn forced_counters_are_undone_one_by_one() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("many", 1);
    let counters = simulated.counters("many");
    simulated.memory.poke(counters[1], &3u16.to_le_bytes());
    simulated.memory.poke(counters[2], &0u16.to_le_bytes());

    let forced = enable("many").force(true);
    let on = plan(&simulated, &forced);
    simulated.update(&forced).unwrap();
    // The counter that becomes 0 is written before its sites.
    let undone = steps(&undo_plan(&simulated, &on));
    let place = |of: &str| undone.iter().position(|step| step.contains(of)).unwrap();
    assert!(place("1->0") < place("x 3d"), "{undone:?}");
    simulated.update_for(&simulated.undo(&on)).unwrap();

    let snapshot = simulated.snapshot();
    let many = simulated.probe("many");
    assert_eq!(snapshot.counters[many.semaphore_range()], [1, 3, 0]);
    // Each site is enabled if its own counter is above zero.
    for (site, index) in many.sites().zip(many.site_range()) {
        let counter = snapshot.counters[site.semaphore_index()];
        assert_eq!(snapshot.sites[index].enabled(), Some(counter > 0));
    }
}

#[test]
fn probe_without_sites_is_only_counted() {
    let simulated = SimulatedProcess::of("gen_ocaml_2.pie");
    assert_eq!(steps(&plan(&simulated, &enable("flag"))), ["0->1"]);
}

#[test]
fn counter_may_reach_65535_but_not_exceed_it() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("single", u16::MAX - 1);
    assert_eq!(
        steps(&plan(&simulated, &enable("single"))),
        ["65534->65535"]
    );
    simulated.set("single", u16::MAX);
    let error = refusal(&simulated, &enable("single"));
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::CounterFull { name }) if name == "single")
    );

    // One full counter of three is enough for a refusal, which counts up none of them.
    simulated.set("many", 1);
    let last = simulated.counters("many")[2];
    simulated.memory.poke(last, &u16::MAX.to_le_bytes());
    let error = refusal(&simulated, &enable("many"));
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::CounterFull { name }) if name == "many")
    );
    assert_eq!(
        steps(&plan(&simulated, &disable("single"))),
        ["65535->65534"]
    );
}

#[test]
fn force_sets_counters_and_sites_whatever_they_were() {
    for counter in [0, 1, 2, u16::MAX] {
        for sites_on in 0..=7 {
            for action in [Action::Enable, Action::Disable] {
                let mut simulated = SimulatedProcess::of(FIXTURE);
                simulated.set("many", counter);
                for (i, opcode) in simulated.opcodes("many").into_iter().enumerate() {
                    simulated
                        .memory
                        .poke(opcode, &[Opcode::of(i < sites_on).byte()]);
                }
                let wanted = u16::from(action == Action::Enable);
                let flipped = if wanted == 1 { 7 - sites_on } else { sites_on };

                let named = Actions::of(action, Selector::name("many")).force(true);
                let plan = plan(&simulated, &named);
                let mut expected = Vec::new();
                if flipped > 0 {
                    expected.push(format!(
                        "{flipped} x {:02x}",
                        Opcode::of(wanted == 1).byte()
                    ));
                }
                if counter != wanted {
                    let text = format!("{counter}->{wanted}");
                    expected.push([&text[..]; 3].join(" "));
                }
                if wanted == 0 {
                    expected.reverse();
                }
                assert_eq!(steps(&plan), expected, "{counter} {sites_on} {action:?}");
                let change = &plan.changes[0];
                assert_eq!((change.before, change.after), (counter, wanted));
                assert_eq!(change.sites, flipped);
            }
        }
    }
}

#[test]
fn smallest_of_differing_counters_is_reported() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("many", 5);
    let counter = simulated.counters("many")[1];
    simulated.memory.poke(counter, &2u16.to_le_bytes());
    let plan = plan(&simulated, &enable("many"));
    assert_eq!(steps(&plan), ["5->6 2->3 5->6"]);
    let change = &plan.changes[0];
    assert_eq!((change.before, change.after), (2, 3));
}

#[test]
fn partly_enabled_result_is_refused_unless_forced() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("many", 1);
    let counter = simulated.counters("many")[1];
    simulated.memory.poke(counter, &3u16.to_le_bytes());
    assert_eq!(
        refusal(&simulated, &disable("many")).to_string(),
        "probe \"many\" has counters that differ (1 to 3): another tool, such as SystemTap, has enabled some of \
         its sites, and disabling it would leave those sites enabled"
    );
    let off = plan(&simulated, &disable("many").force(true));
    assert_eq!(steps(&off), ["1->0 3->0 1->0", "7 x 3d"]);
}

#[test]
fn force_makes_differing_counters_equal() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    for (counter, value) in simulated.counters("many").into_iter().zip([0u16, 1, 3]) {
        simulated.memory.poke(counter, &value.to_le_bytes());
    }
    let on = plan(&simulated, &enable("many").force(true));
    assert_eq!(steps(&on), ["7 x e8", "0->1 3->1"]);
    let off = plan(&simulated, &disable("many").force(true));
    assert_eq!(steps(&off), ["1->0 3->0"]);
}

#[test]
fn inconsistent_probe_is_refused_unless_forced() {
    // As a tool that was killed in an update leaves them: see the fixture.
    let simulated = SimulatedProcess::of("interrupted.pie");
    for (name, expected) in [
        ("part", (1, 3, 1)),
        ("counter", (0, 1, 1)),
        ("site", (1, 1, 0)),
    ] {
        for actions in [enable(name), disable(name)] {
            let error = refusal(&simulated, &actions);
            let ErrorKind::Probe(ProbeError::Inconsistent {
                name: found,
                enabled,
                sites,
                counter,
            }) = error.kind()
            else {
                panic!("{error}");
            };
            assert_eq!((&found[..], (*enabled, *sites, *counter)), (name, expected));
            plan(&simulated, &actions.force(true));
        }
    }
    let error = refusal(&simulated, &enable("part"));
    assert_eq!(
        error.to_string(),
        "1 of 3 sites of \"part\" are enabled and its counter is 1 (was an update cut off?)"
    );
    assert_eq!(
        steps(&plan(&simulated, &enable("whole"))),
        ["1 x e8", "0->1"]
    );
}

#[test]
fn one_inconsistent_probe_among_all_refuses_all() {
    let simulated = SimulatedProcess::of("interrupted.pie");
    let all = Actions::new().enable(Selector::All);
    assert!(matches!(
        refusal(&simulated, &all).kind(),
        ErrorKind::Probe(ProbeError::Inconsistent { .. })
    ));
    let forced = plan(&simulated, &all.force(true));
    assert_eq!(steps(&forced), ["4 x e8", "0->1 0->1"]);
}

#[test]
fn disabling_a_named_disabled_probe_is_refused() {
    let mut simulated = SimulatedProcess::of(FIXTURE);
    simulated.set("single", 1);
    let error = refusal(&simulated, &disable("many"));
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::NotEnabled { name }) if name == "many")
    );
    assert_eq!(error.to_string(), "probe \"many\" is not enabled");

    let many = simulated.merged_probe("many").id();
    for actions in [
        Actions::new().disable(Selector::All),
        Actions::new().disable(Selector::regexp(".").unwrap()),
        Actions::new().disable(Selector::predicate(|_| true)),
        pair(Action::Disable),
    ] {
        let plan = plan(&simulated, &actions);
        assert_eq!(steps(&plan), ["1->0", "1 x 3d"], "{actions:?}");
        assert_eq!(plan.skipped, [many], "{actions:?}");
        assert_eq!(plan.changes.len(), 1, "{actions:?}");
    }
    // Forced, no probe is skipped, and nothing has to be written.
    let forced = plan(&simulated, &disable("many").force(true));
    assert!(forced.steps.is_empty() && forced.skipped.is_empty());
}

#[test]
fn foreign_byte_refuses_the_update_even_if_forced() {
    let pristine = SimulatedProcess::of(FIXTURE);
    let site = LiveAddr(pristine.opcodes("many")[3].0 - OPCODE_OFFSET);
    for (offset, byte) in [
        (0, INT3),
        (0, 0x66),
        (1, INT3),
        (1, 0x0f),
        (2, 0xfe),
        (5, 0xfe),
    ] {
        let mut simulated = SimulatedProcess::of(FIXTURE);
        simulated.memory.poke(site.plus(offset), &[byte]);
        for actions in [
            enable("many"),
            enable("many").force(true),
            disable("many").force(true),
            Actions::new().enable(Selector::All),
        ] {
            let error = refusal(&simulated, &actions);
            let ErrorKind::Probe(ProbeError::UnexpectedSite {
                name,
                address,
                found,
                expected,
            }) = error.kind()
            else {
                panic!("{error}");
            };
            assert_eq!((&name[..], *address), ("many", site));
            assert_eq!(found.0[offset as usize], byte);
            assert_eq!(
                Some(*expected),
                simulated.probe("many").sites().nth(3).map(|s| s.code())
            );
            let breakpoint = error
                .to_string()
                .ends_with("(gdb, perf, bpftrace) is there");
            assert_eq!(breakpoint, byte == INT3, "{error}");
        }
        // Updates of other probes are not refused.
        assert_eq!(
            steps(&plan(&simulated, &enable("single"))),
            ["1 x e8", "0->1"]
        );
    }
}

#[test]
fn sites_of_a_page_are_one_write() {
    for fixture in [
        "page_borders.pie",
        "segments.nopie",
        "spin_1000.pie",
        FIXTURE,
    ] {
        let simulated = SimulatedProcess::of(fixture);
        let plan = plan(&simulated, &Actions::new().enable(Selector::All));
        let names = simulated.table.probes().map(|probe| probe.name());
        let mut opcodes: Vec<LiveAddr> = names.flat_map(|name| simulated.opcodes(name)).collect();
        opcodes.sort_unstable();

        let writes: Vec<&CodeWrite> = code_writes(&plan).collect();
        for write in &writes {
            let last = write.at.0 + write.len as u64 - 1;
            assert_eq!(write.at.0 / PAGE, last / PAGE, "{fixture}: {write:x?}");
        }
        let flipped = writes.iter().flat_map(|write| opcode_changes(&plan, write));
        let flipped: Vec<LiveAddr> = flipped.map(|change| change.0).collect();
        assert_eq!(flipped, opcodes, "{fixture}");

        let mut pages: Vec<u64> = opcodes.iter().map(|opcode| opcode.0 / PAGE).collect();
        pages.dedup();
        // One write for each page, and one more where two ranges that are read separately share a
        // page.
        let borders = plan.before.code.len() - 1;
        let expected = pages.len()..=pages.len() + borders;
        assert!(
            expected.contains(&writes.len()),
            "{fixture}: {}",
            writes.len()
        );
    }
}

#[test]
fn write_ends_before_a_foreign_breakpoint() {
    let covers = |plan: &UpdatePlan, at: LiveAddr| {
        code_writes(plan).any(|write| (write.at.0..write.at.0 + write.len as u64).contains(&at.0))
    };
    let mut simulated = SimulatedProcess::of(FIXTURE);
    // Between sites of `many`: the last byte of a site that is not touched.
    let between = simulated.opcodes("single")[0].plus(4);
    assert_eq!(code_writes(&plan(&simulated, &enable("many"))).count(), 1);

    simulated.memory.poke(between, &[INT3]);
    let split = plan(&simulated, &enable("many"));
    assert_eq!(code_writes(&split).count(), 2);
    assert!(!covers(&split, between));
    assert_eq!(steps(&split), ["7 x e8", "0->1 0->1 0->1"]);

    // The same byte, but the file has it.
    let offset = simulated.offset(between);
    let simulated = SimulatedProcess::edited(FIXTURE, |file| file[offset] = INT3);
    let whole = plan(&simulated, &enable("many"));
    assert_eq!(code_writes(&whole).count(), 1);
    assert!(covers(&whole, between));
}

#[test]
fn sites_follow_the_counter_of_their_object() {
    let bias = LoadBias(0x1000_0000);
    let program = loaded_twice(&program_with_probes(&["a"]), bias);
    let site = [0x90, 0x3d, 1, 0, 0, 0];
    let pieces = [0, bias.0].into_iter().flat_map(|bias| {
        [
            (bias + ProgramSpec::TEXT, site.to_vec()),
            (bias + ProgramSpec::PROBES, vec![0; 4]),
        ]
    });
    let mut memory = SliceMemory::new(pieces);
    // It is enabled in the second object by its counter, but not by its site.
    memory.poke(program.counter(1), &1u16.to_le_bytes());
    let before = Layout::of(&program, program.probes()).read(PID, &memory);
    let inputs = PlanInputs {
        program: &program,
        breakpoints: &[],
        one_by_one: false,
    };
    let choice = Choice {
        probe: program.probe("a").unwrap().id(),
        counter_change: CounterChange::Undo(Box::new([])),
        fails_if_disabled: false,
        stage: 0,
    };
    let plan = inputs.plan(&[choice], before.unwrap()).unwrap();
    let [write] = code_writes(&plan).collect::<Vec<_>>()[..] else {
        panic!("{plan:?}");
    };
    let opcode = bias.0 + ProgramSpec::TEXT + OPCODE_OFFSET;
    assert_eq!(opcode_changes(&plan, write), [(LiveAddr(opcode), 0xe8)]);
}

#[test]
fn breakpoint_range_is_half_open() {
    let program = program_with_probes(&["a"]);
    let inputs = PlanInputs {
        program: &program,
        breakpoints: &[LiveAddr(10), LiveAddr(20)],
        one_by_one: false,
    };
    let holds = |start, end| inputs.holds_breakpoint(LiveAddr(start), LiveAddr(end));
    assert!(holds(10, 11) && holds(11, 21) && holds(0, 30));
    assert!(!holds(0, 10) && !holds(11, 20) && !holds(21, 30) && !holds(10, 10));
}
