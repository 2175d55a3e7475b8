//! The two layouts of semaphores of the provider `ocaml`.

use super::*;

/// Where OCaml's counter is in a semaphore: of 2 bytes, which OCaml and SystemTap share; of 4
/// bytes, a pair.
const SHARED: u64 = 0;
const PAIR: u64 = 2;

/// Notes: the provider, the name, and the offset of the semaphore in `.probes`.
type Notes<'a> = &'a [(&'a str, &'a str, u64)];

fn program_of(notes: Notes<'_>, len: usize) -> ProgramSpec {
    let notes: Vec<NoteSpec> = (0..)
        .zip(notes)
        .map(|(site, (provider, name, offset))| {
            NoteSpec::new(provider, name, "")
                .at(ProgramSpec::TEXT + 6 * site, ProgramSpec::PROBES + offset)
        })
        .collect();
    let mut made = ProgramSpec::new(&notes, &SITE.repeat(notes.len()));
    made.probes = len;
    made
}

fn symbols(of: &[(&str, u64)]) -> Vec<(String, u64)> {
    let symbol = |&(name, offset): &(&str, u64)| (name.to_owned(), ProgramSpec::PROBES + offset);
    of.iter().map(symbol).collect()
}

/// Checks the counters of a name, as offsets in the section.
#[track_caller]
fn assert_counters(made: &ProgramSpec, name: &str, expected: &[u64]) {
    let table = read_table(&made.bytes()).unwrap();
    let found = counters(table.probe(name).unwrap());
    let found: Vec<u64> = found.iter().map(|at| at - ProgramSpec::PROBES).collect();
    assert_eq!(found, expected);
}

#[track_caller]
fn assert_unknown(made: &ProgramSpec, probe: &str) {
    let error = read_table(&made.bytes()).unwrap_err();
    match error.kind() {
        ErrorKind::File(FileError::UnknownLayout { name, .. }) => assert_eq!(name, probe),
        _ => panic!("{error}"),
    }
}

const ONE: Notes<'_> = &[("ocaml", "tick", 4)];

#[test]
fn symbol_tells_the_layout() {
    for (symbol, offset) in [
        ("camlServer__semaphore_tick", SHARED),
        ("camlLib__Server__semaphore_tick", SHARED),
        ("caml_probes_semaphore_tick", PAIR),
    ] {
        let mut made = program_of(ONE, 16);
        made.symbols = symbols(&[("camlServer__code_begin", 4), (symbol, 4)]);
        assert_counters(&made, "tick", &[4 + offset]);
        (made.exported, made.symbols) = (made.symbols, Vec::new());
        assert_counters(&made, "tick", &[4 + offset]);
    }
}

#[test]
fn other_symbols_tell_nothing() {
    for (symbol, at) in [
        ("caml_probes_semaphore_tock", 4),
        ("caml_probes_semaphore_tick", 8),
        ("caml_probes_semaphore_ticks", 4),
        ("camlServer__semaphore_", 4),
        ("camlServer__tick", 4),
        ("Server__semaphore_tick", 4),
        ("", 4),
    ] {
        let mut made = program_of(ONE, 16);
        made.symbols = symbols(&[(symbol, at)]);
        assert_unknown(&made, "tick");
    }
}

#[test]
fn symbols_that_disagree_are_refused() {
    let mut made = program_of(ONE, 16);
    made.symbols = symbols(&[
        ("caml_probes_semaphore_tick", 4),
        ("camlServer__semaphore_tick", 4),
    ]);
    assert_unknown(&made, "tick");
    // A pair does not fit into the last two bytes of the section.
    let mut made = program_of(ONE, 6);
    made.symbols = symbols(&[("caml_probes_semaphore_tick", 4)]);
    assert_unknown(&made, "tick");
}

#[test]
fn adjacent_semaphores_have_one_counter() {
    let made = program_of(
        &[("ocaml", "a", 0), ("ocaml", "b", 2), ("ocaml", "c", 4)],
        6,
    );
    for (name, at) in [("a", 0), ("b", 2), ("c", 4)] {
        assert_counters(&made, name, &[at]);
    }
    let made = program_of(
        &[("ocaml", "a", 0), ("python", "b", 2), ("ocaml_2", "c", 4)],
        8,
    );
    assert_counters(&made, "a", &[0]);
    assert_counters(&made, "c", &[6]);
}

#[test]
fn section_of_pairs_has_pairs() {
    let made = program_of(&[("ocaml", "a", 4), ("ocaml", "b", 0)], 8);
    assert_counters(&made, "a", &[4 + PAIR]);
    assert_counters(&made, "b", &[PAIR]);
    let made = program_of(&[("ocaml", "a", 0), ("ocaml_1", "b", 4)], 8);
    assert_counters(&made, "a", &[PAIR]);
}

#[test]
fn unaccounted_bytes_make_the_layout_unknown() {
    // Bytes at the end, between and before.
    for (notes, len) in [
        (&[("ocaml", "a", 0), ("ocaml", "b", 4)], 10),
        (&[("ocaml", "a", 0), ("ocaml", "b", 4)], 12),
        (&[("ocaml", "a", 0), ("ocaml", "b", 8)], 12),
        (&[("ocaml", "a", 4), ("ocaml", "b", 8)], 12),
    ] {
        assert_unknown(&program_of(notes, len), "a");
    }
}

#[test]
fn semaphore_of_two_bytes_makes_others_unknown() {
    assert_unknown(&program_of(&[("ocaml", "a", 0), ("ocaml", "b", 2)], 6), "b");
    let foreign: Notes<'_> = &[("ocaml", "a", 0), ("ocaml", "b", 4), ("python", "c", 8)];
    assert_unknown(&program_of(foreign, 10), "a");
    // The 0 in a note without a semaphore is not the address of one. The field follows a header of 20 bytes and two
    // addresses.
    let mut made = program_of(
        &[("ocaml", "a", 0), ("ocaml", "b", 4), ("python", "c", 0)],
        8,
    );
    let last = made.notes.len() - NoteSpec::new("python", "c", "").bytes().len();
    made.notes[last + 20 + 16..][..8].fill(0);
    assert_counters(&made, "a", &[PAIR]);
}

#[test]
fn section_of_one_semaphore_tells_nothing() {
    let made = program_of(&[("ocaml", "tick", 0)], 4);
    assert_unknown(&made, "tick");
    assert_eq!(
        read_table(&made.bytes()).unwrap_err().to_string(),
        "/srv/server.exe has no symbol for the semaphore of probe tick at 0x403000, so its \
         size (2 or 4 bytes) is unknown"
    );
}

#[test]
fn unit_exported_without_its_semaphore_has_a_pair() {
    let mut made = program_of(ONE, 16);
    made.exported = symbols(&[("camlServer__code_begin", 0x1000)]);
    assert_counters(&made, "tick", &[4 + PAIR]);
    // Those that are not exported tell nothing.
    (made.symbols, made.exported) = (made.exported, Vec::new());
    assert_unknown(&made, "tick");
    made.exported = symbols(&[("server__code_begin", 0x1000)]);
    assert_unknown(&made, "tick");
}

#[test]
fn semaphore_of_a_later_generation_is_a_pair() {
    let made = program_of(&[("ocaml", "tick", 4), ("ocaml_1", "tick", 4)], 16);
    let table = read_table(&made.bytes()).unwrap();
    let probe = table.probe("tick").unwrap();
    assert_eq!(counters(probe), [ProgramSpec::PROBES + 4 + PAIR]);
    assert_eq!(probe.sites().len(), 2);
    let made = program_of(&[("ocaml", "tick", 4), ("ocaml_1", "tick", 8)], 16);
    assert_unknown(&made, "tick");
}

#[test]
fn one_name_has_semaphores_of_both_layouts() {
    let mut made = program_of(&[("ocaml", "tick", 0), ("ocaml", "tick", 4)], 8);
    made.symbols = symbols(&[
        ("camlOld__semaphore_tick", 0),
        ("caml_probes_semaphore_tick", 4),
    ]);
    assert_counters(&made, "tick", &[0, 4 + PAIR]);
}

#[test]
fn truncated_symbol_table_is_ignored() {
    let mut made = program_of(&[("ocaml", "a", 0), ("ocaml", "b", 2)], 4);
    made.symbols = symbols(&[("camlServer__semaphore_a", 0)]);
    let whole = made.bytes();
    let cut = &whole[..whole.len() - 30];
    assert_eq!(read_table(cut).unwrap().semaphore_count(), 2);
}
