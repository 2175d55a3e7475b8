//! What keeps the memory of an observation mapped when it is over: words on stacks that lead there, as
//! they would from the handler of a signal.

use std::fs;

use probes_lib::{Counts, Observation, Selector, Target};
use test_support::process::{Image, peek, poke};
use test_support::{Talker, fixture_forms};

use crate::observe::{options, strange_code};

/// Where the stub is that an observed site of a probe calls.
fn stub_of(pid: i32, counts: &Counts, name: &str) -> u64 {
    let site = counts.sites(name).next().unwrap().address.0;
    let bytes = peek(pid, site, 6);
    assert_eq!(bytes[1], 0xe8);
    let displacement = i32::from_le_bytes(bytes[2..].try_into().unwrap());
    (site + 6).wrapping_add_signed(displacement.into())
}

/// The first bytes of the stacks of threads, which nobody has come to yet: they lie behind their guards.
fn unused_ends_of_stacks(pid: i32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines: Vec<&str> = maps.lines().collect();
    let two = lines.windows(2);
    let is_stack = |two: &&[&str]| two[0].contains(" ---p ") && two[1].contains(" rw-p ");
    two.filter(is_stack)
        .filter(|two| two[0].contains(" 00:00 0") && two[1].contains(" 00:00 0"))
        .map(|two| u64::from_str_radix(two[1].split_once('-').unwrap().0, 16).unwrap())
        .collect()
}

#[test]
fn what_lies_on_the_stack_of_a_neighbour_keeps_nothing_mapped() {
    for file in fixture_forms("idle_threads") {
        let mut talker = Talker::start_with(&file, ["8"]);
        let pid = talker.pid();
        let before = Image::of(pid).text();
        let target = Target::open(pid).unwrap();
        let observer = target
            .observe(&Observation::new().count(Selector::All), options())
            .unwrap();
        let stub = stub_of(pid, &observer.counts().unwrap(), "ping") + 1;
        let ends = unused_ends_of_stacks(pid);
        assert!(ends.len() >= 8, "{ends:x?}");
        for end in ends {
            poke(pid, end, &stub.to_le_bytes());
        }
        observer.remove().unwrap();
        assert_eq!(strange_code(pid), [""; 0]);
        before.assert_same(&Image::of(pid).text(), "the program");
        talker.ask("round", "round");
    }
}
