use std::fs;
use std::process::Command;

use gimli::SectionId;
use test_support::{Scratch, fixture, program_forms};

use super::*;
use crate::elf::functions::FunctionTable;
use crate::elf::source::SourceMap;
use crate::testing::{compile, properties, unit_with_indexed_address};

/// The addresses in a file at which a source line begins, and the search that found them.
fn places(file: &std::path::Path, path: &str, line: u32) -> (Vec<FileAddr>, LineSearch) {
    let elf = ElfFile::open(file).unwrap();
    let table = FunctionTable::of(&elf).unwrap();
    let start = |address| table.function_at(address).map(|it| it.address());
    let mut search = LineSearch::new(path, line);
    (search.places_in(&elf, start), search)
}

#[test]
fn addr2line_says_the_same_line() {
    let path = "test-programs/calls.ml";
    for file in program_forms("calls") {
        let sources = SourceMap::read(&file).unwrap();
        let mut found = 0;
        for line in 1..70 {
            let (places, search) = places(&file, path, line);
            assert_eq!(search.paths.len(), 1, "{path}");
            for place in &places {
                let (source, said) = sources.line(*place);
                assert!(source.unwrap().ends_with(path), "{path} {place}");
                // A line without code has the address of another line, and addr2line may name that one.
                let begins = |line| self::places(&file, path, line).0.contains(place);
                assert!(
                    said == Some(line) || begins(said.unwrap()),
                    "{path} {place}"
                );
            }
            found += places.len();
            let (before, after) = search.neighbours;
            assert!(before.is_none_or(|near| near < line), "{path}:{line}");
            assert!(after.is_none_or(|near| near > line), "{path}:{line}");
        }
        assert!(found > 20, "{path}: {found}");
    }
}

/// Assembles two functions, with this code and its line directives.
fn assembled(scratch: &Scratch, f: &str, g: &str) -> std::path::PathBuf {
    let (source, file) = (scratch.file("lines.s"), scratch.file("lines"));
    let function = |name: &str, code: &str| {
        format!(
            ".globl {name}\n.type {name}, @function\n{name}:\n{code}\nret\n.size {name}, . - {name}\n"
        )
    };
    let text = format!(
        ".file 1 \"src/lines.c\"\n.text\n{}{}",
        function("_start", f),
        function("g", g)
    );
    fs::write(&source, text).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-nostdlib", "-static", "-no-pie", "-o"]);
    assert!(gcc.arg(&file).arg(&source).status().unwrap().success());
    file
}

/// The addresses at which line 5 begins, as offsets from the first function.
fn offsets(f: &str, g: &str) -> Vec<u64> {
    let scratch = Scratch::new();
    let file = assembled(&scratch, f, g);
    let (places, _) = places(&file, "lines.c", 5);
    let table = FunctionTable::read(&file).unwrap();
    let first = table.functions().next().unwrap().address();
    places.iter().map(|place| place.0 - first.0).collect()
}

#[test]
fn each_stretch_of_a_line_begins_once() {
    let (five, six) = (".loc 1 5\nnop", ".loc 1 6\nnop");
    let again = format!("{five}\n{five}\n{six}\n{five}");
    assert_eq!(offsets(&again, "nop"), [0, 3]);
    // Line 6 does not begin here (`is_stmt 0`): the stretch of line 5 goes on.
    let within = format!("{five}\n.loc 1 6 is_stmt 0\nnop\n.loc 1 5 is_stmt 1\nnop");
    assert_eq!(offsets(&within, "nop"), [0]);
    // Each function begins a stretch of its own.
    assert_eq!(offsets(five, five), [0, 2]);
}

#[test]
fn line_without_code_begins_where_no_other_does() {
    let empty = ".loc 1 5\n.loc 1 6\nnop";
    assert_eq!(offsets(empty, "nop"), [0]);
    assert_eq!(offsets(&format!("{empty}\n.loc 1 5\nnop"), "nop"), [1]);
}

#[test]
fn ends_of_paths_tell_files_apart() {
    for (path, suffix, is_it) in [
        ("/src/lib/list.ml", "list.ml", true),
        ("/src/lib/list.ml", "lib/list.ml", true),
        ("/src/lib/list.ml", "./x/../lib//list.ml", true),
        ("/src/lib/../list.ml", "src/list.ml", true),
        ("/src/lib/list.ml", "/src/lib/list.ml", true),
        ("list.ml", "list.ml", true),
        ("../list.ml", "../list.ml", true),
        ("/src/lib/list.ml", "ist.ml", false),
        ("/src/lib/list.ml", "/list.ml", false),
        ("/src/lib/list.ml", "src/list.ml", false),
        ("list.ml", "lib/list.ml", false),
    ] {
        let said = has_suffix(&normalised(path), &normalised(suffix));
        assert_eq!(said, is_it, "{path} {suffix}");
    }
}

proptest::proptest! {
    #![proptest_config(properties(300))]

    #[test]
    fn any_tables_are_searched(
        damage in proptest::collection::vec((0..3usize, 0..usize::MAX, 0..=255u8), 0..12),
        line in 1..80u32,
    ) {
        let elf = ElfFile::open(&fixture("calls.pie")).unwrap();
        let damaged = [SectionId::DebugInfo, SectionId::DebugAbbrev, SectionId::DebugLine];
        let section = |id: SectionId| {
            let mut bytes = elf.whole_section(id.name()).unwrap_or_default();
            let len = bytes.len();
            for (_, at, byte) in damage.iter().filter(|it| damaged[it.0] == id) {
                bytes[at % len] = *byte;
            }
            bytes
        };
        let len = section(SectionId::DebugLine).len();
        let mut search = LineSearch::new("calls.c", line);
        let places = search.places(&LineTables::in_sections(section), |address| Some(FileAddr(address.0 & !0xff)));
        proptest::prop_assert!(places.len() <= len);
    }
}

#[test]
fn units_with_indexed_addresses_are_searched() {
    let scratch = Scratch::new();
    let program = unit_with_indexed_address(&scratch, false);
    let (places, search) = places(&program, "indexed.c", 2);
    assert_eq!((places.len(), search.paths.len()), (1, 1));
}

#[test]
fn compressed_tables_are_searched() {
    let scratch = Scratch::new();
    let text = "int main(void)\n{\n  return 0;\n}\n";
    for flag in ["-gz=none", "-gz=zlib", "-gz=zlib-gnu"] {
        let program = compile(&scratch, "program.c", text, &["-g", flag]);
        let (places, search) = places(&program, "program.c", 3);
        assert_eq!((places.len(), search.paths.len()), (1, 1), "{flag}");
    }
}

#[test]
fn paths_beyond_the_limit_are_not_searched() {
    let path = "test-programs/calls.ml";
    let elf = ElfFile::open(&program_forms("calls")[0]).unwrap();
    let mut search = LineSearch::new(path, 1);
    search.paths_left = 1;
    assert_eq!(search.places_in(&elf, Some), []);
    assert!(search.paths.is_empty(), "{:?}", search.paths);
}
