//! Plans for few functions, for which most code is not swept, compared with those for all of it.

use std::fs;
use std::path::PathBuf;

use test_support::program_forms;

use super::*;
use crate::elf::ElfFile;
use crate::elf::functions::FunctionTable;
use crate::patch_plan::EntryPlanner;

/// The C library of the tests.
fn libc() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let is_libc = |path: &&str| {
        path.contains("/libc.so") || path.contains("/libc-") || path.contains("/ld-musl")
    };
    paths.find(is_libc).unwrap().into()
}

/// How many functions of each file are compared.
const COMPARED: usize = 400;

// promise: Observations: Patches of few functions are planned as with all code of the file decoded (3 files × 400 functions)
#[test]
fn plans_of_few_functions_are_the_same() {
    let [pie, fixed] = program_forms("service");
    for file in [pie, fixed, libc()] {
        let elf = ElfFile::open(&file).unwrap();
        let table = FunctionTable::of(&elf).unwrap();
        let all = PatchPlanner::read(&elf, &table).unwrap();
        let mut ranges: Vec<CodeRange> = table.functions().map(|it| it.range()).collect();
        // In an order that is not that of their addresses.
        ranges.sort_by_key(|range| range.start.0.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        ranges.truncate(COMPARED);
        let mut left_out = 0;
        let (mut compared, mut rest, mut count) = (0, &ranges[..], 1);
        while !rest.is_empty() {
            let (wanted, others) = rest.split_at(count.min(rest.len()));
            (rest, count) = (others, count * 3 % 65);
            let few = EntryPlanner::read(&elf, &table, wanted).unwrap();
            if wanted.len() == 1 {
                let ends =
                    |planner: &PatchPlanner| planner.swept.targets.after_ends(0..u64::MAX).count();
                left_out += usize::from(ends(&few.planner) < ends(&all) / 2);
            }
            for &range in wanted {
                let what = format!("{} at {}", file.display(), range.start);
                assert_eq!(few.entry(range), all.entry(range), "{what}");
                let Ok(body) = all.swept.body(range) else {
                    continue;
                };
                for instruction in body.instructions.iter().take(100) {
                    let at = FileAddr(instruction.ip());
                    let [one, other] = [few.instruction(range, at), all.instruction(range, at)];
                    assert_eq!(one, other, "{what}: {at}");
                    compared += 1;
                }
            }
        }
        assert!(compared > COMPARED, "{}: {compared}", file.display());
        // Tables of the C library may be anywhere, so all of its code may have to be swept.
        assert!(left_out > 0 || file == libc(), "{}", file.display());
    }
}
