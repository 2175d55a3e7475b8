use super::*;
use crate::error::Error;
use crate::error::ErrorKind;
use crate::select::{Actions, Selector};
use crate::site::INT3;
use crate::testing::World;

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

fn plan(world: &World, actions: &Actions) -> UpdatePlan {
    world.plan(actions).unwrap().1
}

fn refusal(world: &World, actions: &Actions) -> Error {
    world.plan(actions).unwrap_err()
}

/// The steps in words: how many opcodes become which, how many counters.
fn steps(plan: &UpdatePlan) -> Vec<String> {
    let text = |step: &Step| match step {
        Step::Code(writes) => {
            let opcode_changes = writes.iter().flat_map(|write| opcode_changes(plan, write));
            let news: Vec<u8> = opcode_changes.map(|(_, new)| new).collect();
            assert!(news.iter().all(|new| *new == news[0]));
            format!("{} x {:02x}", news.len(), news[0])
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
    let plan = plan(&World::of(FIXTURE), &enable("many"));
    assert_eq!(steps(&plan), ["7 x e8", "0->1 0->1 0->1"]);
}

// promise: All or nothing: Counters are disabled before their sites, so that every prefix of the
//    writes is safe
#[test]
fn counters_are_disabled_before_their_sites() {
    let mut world = World::of(FIXTURE);
    world.set("many", 1);
    let plan = plan(&world, &disable("many"));
    assert_eq!(steps(&plan), ["1->0 1->0 1->0", "7 x 3d"]);
}

#[test]
fn pair_enables_stop_first_and_disables_start_first() {
    let mut world = World::of(FIXTURE);
    let on = plan(&world, &pair(Action::Enable));
    assert_eq!(steps(&on), ["7 x e8", "0->1 0->1 0->1", "1 x e8", "0->1"]);

    world.set("single", 1);
    world.set("many", 1);
    let off = plan(&world, &pair(Action::Disable));
    assert_eq!(steps(&off), ["1->0", "1 x 3d", "1->0 1->0 1->0", "7 x 3d"]);
}

#[test]
fn disabling_comes_before_enabling() {
    let mut world = World::of(FIXTURE);
    world.set("single", 1);
    let both = enable("many").disable(Selector::name("single"));
    let plan = plan(&world, &both);
    assert_eq!(steps(&plan), ["1->0", "1 x 3d", "7 x e8", "0->1 0->1 0->1"]);
    // The changes are in the order in which they were asked for.
    let names: Vec<_> = plan
        .changes
        .iter()
        .map(|change| world.table.by_id(change.probe).name())
        .collect();
    assert_eq!(names, ["many", "single"]);
}

#[test]
fn each_step_expects_the_bytes_written_before() {
    let mut world = World::of(FIXTURE);
    world.set("single", 1);
    let plan = plan(&world, &enable("many").disable(Selector::name("single")));
    let single = world.opcodes("single")[0];
    let writes: Vec<&CodeWrite> = code_writes(&plan).collect();
    assert_eq!(writes[0].at, single);
    assert_eq!(code(&plan, writes[0]), (vec![0xe8], vec![0x3d]));
    let offset = (single.0 - writes[1].at.0) as usize;
    let (old, new) = code(&plan, writes[1]);
    assert_eq!((old[offset], new[offset]), (0x3d, 0x3d));
}

#[test]
fn sites_change_only_when_counters_leave_0() {
    let mut world = World::of(FIXTURE);
    for (actions, expected, changed) in [
        (enable("single"), &["1 x e8", "0->1"][..], (0, 1, 1)),
        (enable("single"), &["1->2"], (1, 2, 0)),
        (disable("single"), &["2->1"], (2, 1, 0)),
        (disable("single"), &["1->0", "1 x 3d"], (1, 0, 1)),
    ] {
        let plan = plan(&world, &actions);
        assert_eq!(steps(&plan), expected);
        let change = &plan.changes[0];
        assert_eq!((change.before, change.after, change.sites), changed);
        world.set("single", change.after);
    }
    assert_eq!(world.memory, world.loaded);
}

/// Returns the plan that undoes `applied`, which has been carried out.
fn back(world: &World, applied: &UpdatePlan) -> UpdatePlan {
    world.plan_for(&world.undo(applied), false).unwrap().1
}

#[test]
fn pair_is_undone_in_the_opposite_order() {
    let mut world = World::of(FIXTURE);
    let on = plan(&world, &pair(Action::Enable));
    world.update(&pair(Action::Enable)).unwrap();
    let off = plan(&world, &pair(Action::Disable));
    assert_eq!(steps(&back(&world, &on)), steps(&off));

    world.update(&pair(Action::Disable)).unwrap();
    assert_eq!(steps(&back(&world, &off)), steps(&on));
}

#[test]
fn counts_of_other_tools_are_kept() {
    let mut world = World::of(FIXTURE);
    let on = plan(&world, &enable("single"));
    // Somebody else has enabled it as well.
    world.set("single", 2);
    assert_eq!(steps(&back(&world, &on)), ["2->1"]);
    // Somebody else has disabled it: nothing is below zero.
    world.set("single", 0);
    let nothing = back(&world, &on);
    assert!(nothing.steps.is_empty() && nothing.changes.is_empty());
    assert_eq!(nothing.skipped, [world.member("single").id()]);
}

#[test]
fn breakpoint_keeps_its_probe_others_are_undone() {
    let mut world = World::of(FIXTURE);
    let all = Actions::new().enable(Selector::All);
    let on = plan(&world, &all);
    world.update(&all).unwrap();
    let opcode = world.opcodes("many")[2];
    world.memory.poke(opcode, &[INT3]);
    let back = back(&world, &on);
    assert_eq!(steps(&back), ["1->0", "1 x 3d"]);
    assert_eq!(back.not_undone, [world.member("many").id()]);
    assert!(back.skipped.is_empty());
}

#[test]
fn forced_counters_are_undone_one_by_one() {
    let mut world = World::of(FIXTURE);
    world.set("many", 1);
    let counters = world.counters("many");
    world.memory.poke(counters[1], &3u16.to_le_bytes());
    world.memory.poke(counters[2], &0u16.to_le_bytes());

    let forced = enable("many").force(true);
    let on = plan(&world, &forced);
    world.update(&forced).unwrap();
    world.update_for(&world.undo(&on)).unwrap();

    let snapshot = world.snapshot();
    let many = world.probe("many");
    assert_eq!(snapshot.counters[many.semaphore_range()], [1, 3, 0]);
    // Each site goes by its own counter.
    for (site, index) in many.sites().zip(many.site_range()) {
        let counter = snapshot.counters[site.semaphore_index()];
        assert_eq!(snapshot.sites[index].enabled(), Some(counter > 0));
    }
}

#[test]
fn probe_without_sites_is_only_counted() {
    let world = World::of("gen_ocaml_2.pie");
    assert_eq!(steps(&plan(&world, &enable("flag"))), ["0->1"]);
}

#[test]
fn full_counter_is_refused_the_step_before_allowed() {
    let mut world = World::of(FIXTURE);
    world.set("single", u16::MAX - 1);
    assert_eq!(steps(&plan(&world, &enable("single"))), ["65534->65535"]);
    world.set("single", u16::MAX);
    let error = refusal(&world, &enable("single"));
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::CounterFull { name }) if name == "single")
    );

    // One of three is enough, and none of them is counted then.
    world.set("many", 1);
    let last = world.counters("many")[2];
    world.memory.poke(last, &u16::MAX.to_le_bytes());
    let error = refusal(&world, &enable("many"));
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::CounterFull { name }) if name == "many")
    );
    assert_eq!(steps(&plan(&world, &disable("single"))), ["65535->65534"]);
}

#[test]
fn force_sets_counters_and_sites_whatever_they_were() {
    for counter in [0, 1, 2, u16::MAX] {
        for sites_on in 0..=7 {
            for action in [Action::Enable, Action::Disable] {
                let mut world = World::of(FIXTURE);
                world.set("many", counter);
                for (i, opcode) in world.opcodes("many").into_iter().enumerate() {
                    world
                        .memory
                        .poke(opcode, &[Opcode::of(i < sites_on).byte()]);
                }
                let wanted = u16::from(action == Action::Enable);
                let flipped = if wanted == 1 { 7 - sites_on } else { sites_on };

                let named = Actions::of(action, Selector::name("many")).force(true);
                let plan = plan(&world, &named);
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
    let mut world = World::of(FIXTURE);
    world.set("many", 5);
    let counter = world.counters("many")[1];
    world.memory.poke(counter, &2u16.to_le_bytes());
    let plan = plan(&world, &enable("many"));
    assert_eq!(steps(&plan), ["5->6 2->3 5->6"]);
    let change = &plan.changes[0];
    assert_eq!((change.before, change.after), (2, 3));
}

#[test]
fn partly_enabled_result_is_refused_unless_forced() {
    let mut world = World::of(FIXTURE);
    world.set("many", 1);
    let counter = world.counters("many")[1];
    world.memory.poke(counter, &3u16.to_le_bytes());
    assert_eq!(
        refusal(&world, &disable("many")).to_string(),
        "probe \"many\" has counters that differ (1 to 3): another tool, such as SystemTap, counts some of \
         its sites, and disabling it would leave those on"
    );
    let off = plan(&world, &disable("many").force(true));
    assert_eq!(steps(&off), ["1->0 3->0 1->0", "7 x 3d"]);
}

#[test]
fn force_makes_differing_counters_equal() {
    let mut world = World::of(FIXTURE);
    for (counter, value) in world.counters("many").into_iter().zip([0u16, 1, 3]) {
        world.memory.poke(counter, &value.to_le_bytes());
    }
    let on = plan(&world, &enable("many").force(true));
    assert_eq!(steps(&on), ["7 x e8", "0->1 3->1"]);
    let off = plan(&world, &disable("many").force(true));
    assert_eq!(steps(&off), ["1->0 3->0"]);
}

#[test]
fn inconsistent_probe_is_refused_unless_forced() {
    // As an interrupted run leaves them: see the fixture.
    let world = World::of("interrupted.pie");
    for (name, expected) in [
        ("part", (1, 3, 1)),
        ("counter", (0, 1, 1)),
        ("site", (1, 1, 0)),
    ] {
        for actions in [enable(name), disable(name)] {
            let error = refusal(&world, &actions);
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
            plan(&world, &actions.force(true));
        }
    }
    let error = refusal(&world, &enable("part"));
    assert_eq!(
        error.to_string(),
        "1 of 3 sites of \"part\" are enabled and its counter is 1 (an interrupted run?)"
    );
    assert_eq!(steps(&plan(&world, &enable("whole"))), ["1 x e8", "0->1"]);
}

#[test]
fn one_inconsistent_probe_among_all_refuses_all() {
    let world = World::of("interrupted.pie");
    let all = Actions::new().enable(Selector::All);
    assert!(matches!(
        refusal(&world, &all).kind(),
        ErrorKind::Probe(ProbeError::Inconsistent { .. })
    ));
    let forced = plan(&world, &all.force(true));
    assert_eq!(steps(&forced), ["4 x e8", "0->1 0->1"]);
}

#[test]
fn disabling_a_named_disabled_probe_is_refused() {
    let mut world = World::of(FIXTURE);
    world.set("single", 1);
    let error = refusal(&world, &disable("many"));
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::NotEnabled { name }) if name == "many")
    );
    assert_eq!(error.to_string(), "probe \"many\" is not enabled");

    let many = world.member("many").id();
    for actions in [
        Actions::new().disable(Selector::All),
        Actions::new().disable(Selector::regexp(".").unwrap()),
        Actions::new().disable(Selector::predicate(|_| true)),
        pair(Action::Disable),
    ] {
        let plan = plan(&world, &actions);
        assert_eq!(steps(&plan), ["1->0", "1 x 3d"], "{actions:?}");
        assert_eq!(plan.skipped, [many], "{actions:?}");
        assert_eq!(plan.changes.len(), 1, "{actions:?}");
    }
    // Forced, no probe is skipped, and nothing has to be written.
    let forced = plan(&world, &disable("many").force(true));
    assert!(forced.steps.is_empty() && forced.skipped.is_empty());
}

#[test]
fn foreign_byte_refuses_the_update_even_if_forced() {
    let pristine = World::of(FIXTURE);
    let site = LiveAddr(pristine.opcodes("many")[3].0 - OPCODE_OFFSET);
    for (offset, byte) in [
        (0, INT3),
        (0, 0x66),
        (1, INT3),
        (1, 0x0f),
        (2, 0xfe),
        (5, 0xfe),
    ] {
        let mut world = World::of(FIXTURE);
        world.memory.poke(site.plus(offset), &[byte]);
        for actions in [
            enable("many"),
            enable("many").force(true),
            disable("many").force(true),
            Actions::new().enable(Selector::All),
        ] {
            let error = refusal(&world, &actions);
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
                world.probe("many").sites().nth(3).map(|s| s.code())
            );
            let breakpoint = error
                .to_string()
                .ends_with("(gdb, perf, bpftrace) is there");
            assert_eq!(breakpoint, byte == INT3, "{error}");
        }
        // Updates of other probes are not refused.
        assert_eq!(steps(&plan(&world, &enable("single"))), ["1 x e8", "0->1"]);
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
        let world = World::of(fixture);
        let plan = plan(&world, &Actions::new().enable(Selector::All));
        let names = world.table.probes().map(|probe| probe.name());
        let mut opcodes: Vec<LiveAddr> = names.flat_map(|name| world.opcodes(name)).collect();
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
        // One for each page, and one more where what is read at once ends within a page.
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
    let mut world = World::of(FIXTURE);
    // Between sites of `many`: the last byte of a site that is not touched.
    let between = world.opcodes("single")[0].plus(4);
    assert_eq!(code_writes(&plan(&world, &enable("many"))).count(), 1);

    world.memory.poke(between, &[INT3]);
    let split = plan(&world, &enable("many"));
    assert_eq!(code_writes(&split).count(), 2);
    assert!(!covers(&split, between));
    assert_eq!(steps(&split), ["7 x e8", "0->1 0->1 0->1"]);

    // The same byte, but the file has it.
    let offset = world.offset(between);
    let world = World::edited(FIXTURE, |file| file[offset] = INT3);
    let whole = plan(&world, &enable("many"));
    assert_eq!(code_writes(&whole).count(), 1);
    assert!(covers(&whole, between));
}
