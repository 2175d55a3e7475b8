//! Files whose symbols, unwind tables, frametables, line tables and code are arbitrary bytes.

use std::path::PathBuf;

use proptest::prelude::*;

use crate::testing::{memory_file, properties};
use crate::{FunctionSelector, Functions};

use super::any_bytes::check_plans;
use super::*;

include!("../../../../../fuzz/fuzz_targets/sections_input.rs");
include!("../../../../../fuzz/fuzz_targets/names_input.rs");

/// Returns the seeds and findings of a fuzz target.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus"));
    let files = std::fs::read_dir(root.join(target)).unwrap();
    let mut files: Vec<PathBuf> = files.map(|it| it.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect()
}

/// Reads all that is known of the functions of a file with these sections; returns how many functions and names there
/// are, at how many places line 4 of a.c begins, and how many functions can be counted.
fn read(input: &[u8]) -> [usize; 4] {
    let Some(bytes) = sections_input(input) else {
        return [0; 4];
    };
    let file = memory_file(&bytes);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let functions = match Functions::of_file(path) {
        Ok(functions) => functions,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return [0; 4];
        }
    };
    let line = FunctionSelector::Line {
        file: "a.c".into(),
        line: 4,
    };
    let lines = functions.select(&[line]).map_or(0, |found| found.len());
    let object = &functions.objects()[0];
    let table = object.table();
    let names = table.functions().flat_map(|function| function.names());
    let names: Vec<_> = names.collect();
    for name in &names {
        assert!(!name.text.is_empty() && name.text.len() <= name.symbol.len().max(8 << 10));
    }
    let mut plans = 0;
    if let Ok(planner) = object.patch_planner() {
        let ranges: Vec<CodeRange> = table.functions().map(|it| it.range()).collect();
        check_plans(&planner, &ranges, &[]);
        let can_be_counted = |range: &&CodeRange| planner.function(**range).entry.is_ok();
        plans = ranges.iter().filter(can_be_counted).count();
    }
    [table.functions().len(), names.len(), lines, plans]
}

// promise: Bad input: Any symbols, unwind tables, frametables and line tables give functions, their lines and plans, or
//    an error (the corpus, 512 damaged files, and two fuzz targets)
#[test]
fn tables_of_the_corpus_are_read() {
    let seed = |name: &str| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/sections/");
        read(&std::fs::read(root.to_owned() + name).unwrap())
    };
    // Of C, with a line; of OCaml, with its symbol or with its frametable only.
    assert_eq!(seed("c"), [1, 1, 1, 1]);
    assert_eq!(seed("ocaml"), [1, 1, 0, 1]);
    assert_eq!(seed("stripped"), [1, 1, 0, 1]);
    for input in corpus("sections") {
        read(&input);
    }
}

#[test]
fn names_of_the_corpus_are_demangled() {
    let mut read_names = 0;
    for symbol in corpus("names") {
        read_names += read(&names_input(&symbol))[1];
    }
    assert!(read_names >= 7);
}

proptest! {
    #![proptest_config(properties(512))]

    #[test]
    fn damaged_tables_are_read_or_refused(
        seed in any::<prop::sample::Index>(),
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let seeds = corpus("sections");
        let mut input = seed.get(&seeds).clone();
        for (at, byte) in damages {
            let at = at.index(input.len());
            input[at] = byte;
        }
        if let Some(cut) = cut {
            input.truncate(cut.index(input.len()));
        }
        read(&input);
    }

    #[test]
    fn any_symbol_is_demangled(symbol in prop::collection::vec(any::<u8>(), 0..80), prefix in 0..5) {
        let prefix = [&b"_Z"[..], b"_R", b"caml", b"_Caml", b"_ZN"][prefix as usize];
        let symbol = [prefix, &symbol].concat();
        read(&names_input(&symbol));
    }
}
