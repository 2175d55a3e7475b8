//! Plans patches of arbitrary bytes that are taken for code. The first byte is the number of functions; each has a
//! byte for its start and one for its length, in units of four bytes; the rest is code, of which
//! the last eighth is data. The tests of the library check the corpus in the same way.

#![no_main]

use libfuzzer_sys::fuzz_target;
use probes_lib::{Code, CodeRange, FileAddr, LoadBias, PatchPlanner};

fuzz_target!(|bytes: &[u8]| {
    const AT: u64 = 0x40_1000;
    let Some((count, rest)) = bytes.split_first() else {
        return;
    };
    let (ranges, rest) = rest.split_at(rest.len().min(2 * usize::from(*count)));
    let range = |pair: &[u8]| CodeRange {
        start: FileAddr(AT + 4 * u64::from(pair[0])),
        len: 4 * u64::from(pair[1]),
    };
    let ranges: Vec<CodeRange> = ranges.chunks_exact(2).map(range).collect();
    let (text, data) = rest.split_at(rest.len() - rest.len() / 8);
    let mut code = Code::default();
    code.add(FileAddr(AT), text.to_vec(), true);
    code.add(FileAddr(AT + 0x1000), data.to_vec(), false);
    let planner = PatchPlanner::new(code, &ranges, &ranges[ranges.len() / 2..], []);
    for function in &ranges {
        let plan = planner.function(*function);
        let exits = plan.exits.iter().flat_map(|it| it.sites.iter().chain([&it.entry]));
        for site in plan.entry.iter().flatten().chain(exits) {
            assert!(!site.displaced().is_empty());
            let to = site.trampolines(LoadBias::NONE).start;
            if site.writes(LoadBias::NONE, to).is_some() {
                let _ = site.copy_at(LoadBias::NONE, to);
            }
        }
        for reason in plan.entry.err().iter().chain(plan.exits.err().iter()) {
            // Writing the message must not panic.
            drop(reason.to_string());
        }
    }
});
