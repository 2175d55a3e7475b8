mod damage;
mod layouts;
mod oracle;

use super::*;
use crate::error::Error;
use crate::error::{ErrorKind, ProbeDefect, ProbeError};
use crate::testing::{NoteSpec, ProgramSpec, read_table};

const SITE: [u8; 6] = [0x90, 0x3d, 1, 0, 0, 0];

/// A note whose site is number `site` in a .text that consists of sites, and whose semaphore is
/// number `semaphore` in a .probes section that consists of semaphores of four bytes.
fn note(provider: &str, name: &str, site: u64, semaphore: u64) -> NoteSpec {
    NoteSpec::new(provider, name, "8@%rax").at(
        ProgramSpec::TEXT + 6 * site,
        ProgramSpec::PROBES + 4 * semaphore,
    )
}

fn without_site(provider: &str, name: &str, semaphore: u64) -> NoteSpec {
    let spec = note(provider, name, 0, semaphore);
    let address = spec.semaphore;
    spec.at(0, address)
}

fn program(notes: &[NoteSpec]) -> ProgramSpec {
    ProgramSpec::new(notes, &SITE.repeat(4))
}

fn read(notes: &[NoteSpec]) -> Result<ProbeTable> {
    read_table(&program(notes).bytes())
}

fn wrong_note(result: Result<ProbeTable>) -> (usize, ProbeDefect) {
    let error = result.unwrap_err();
    match error.kind() {
        ErrorKind::File(FileError::WrongNote { index, defect, .. }) => (*index, defect.clone()),
        _ => panic!("{error}"),
    }
}

fn contradiction(result: Result<ProbeTable>) -> String {
    let error = result.unwrap_err();
    match error.kind() {
        ErrorKind::File(FileError::Elf(ElfDefect::Contradiction(text))) => text.clone(),
        _ => panic!("{error}"),
    }
}

fn counters(probe: Probe<'_>) -> Vec<u64> {
    let counters = probe.semaphores().map(|semaphore| semaphore.counter().0);
    counters.collect()
}

#[test]
fn probes_are_sorted_by_name_sites_by_address() {
    let table = read(&[
        note("ocaml_2", "zeta", 3, 1),
        note("ocaml_2", "alpha", 2, 0),
        note("ocaml_2", "zeta", 0, 1),
        note("ocaml_2", "alpha", 1, 0),
    ])
    .unwrap();
    let sites: Vec<_> = table
        .probes()
        .map(|probe| {
            let sites = probe
                .sites()
                .map(|site| site.address().0 - ProgramSpec::TEXT);
            (probe.name(), sites.collect::<Vec<_>>())
        })
        .collect();
    assert_eq!(sites, [("alpha", vec![6, 12]), ("zeta", vec![0, 18])]);
    assert_eq!(
        counters(table.probe("zeta").unwrap()),
        [ProgramSpec::PROBES + 6]
    );
    assert!(table.probe("alph").is_none() && table.probe("zetaa").is_none());
    let site = table.probe("alpha").unwrap().sites().next().unwrap();
    assert_eq!(site.code(), SiteCode(SITE));
    assert_eq!(site.argument_texts().collect::<Vec<_>>(), ["8@%rax"]);
}

#[test]
fn each_generation_has_its_counter_at_its_offset() {
    for (provider, offset) in [("ocaml", 0), ("ocaml.1", 2), ("ocaml_1", 2), ("ocaml_2", 2)] {
        let mut made = program(&[note(provider, "tick", 0, 1)]);
        let symbol = "camlServer__semaphore_tick".to_owned();
        made.symbols = vec![(symbol, ProgramSpec::PROBES + 4)];
        let table = read_table(&made.bytes()).unwrap();
        let probe = table.probe("tick").unwrap();
        assert_eq!(counters(probe), [ProgramSpec::PROBES + 4 + offset]);
        let site = probe.sites().next().unwrap();
        assert_eq!(site.generation().provider(), provider);
        let semaphore = probe.semaphores().next().unwrap();
        assert_eq!(semaphore.generation(), site.generation());
    }
}

#[test]
fn generations_with_the_same_semaphore_share_one_counter() {
    let table = read(&[
        note("ocaml.1", "tick", 0, 1),
        note("ocaml_2", "tick", 1, 1),
        without_site("ocaml_2", "tick", 1),
        note("ocaml_1", "tick", 2, 2),
    ])
    .unwrap();
    let probe = table.probe("tick").unwrap();
    assert_eq!(
        counters(probe),
        [ProgramSpec::PROBES + 6, ProgramSpec::PROBES + 10]
    );
    let of_site: Vec<_> = probe.sites().map(|site| site.semaphore_index()).collect();
    assert_eq!(of_site, [0, 0, 1]);
    let generations: Vec<_> = probe.sites().map(|site| site.generation()).collect();
    assert_eq!(
        generations,
        [
            Generation::OcamlDot1,
            Generation::Ocaml2,
            Generation::Ocaml1
        ]
    );
}

#[test]
fn only_ocaml_2_notes_may_lack_a_site() {
    let table = read(&[without_site("ocaml_2", "flag", 0)]).unwrap();
    let flag = table.probe("flag").unwrap();
    assert_eq!((flag.sites().len(), flag.semaphores().len()), (0, 1));
    for provider in ["ocaml", "ocaml.1", "ocaml_1"] {
        let result = read(&[
            note("ocaml_2", "tick", 0, 0),
            without_site(provider, "flag", 1),
        ]);
        assert_eq!(wrong_note(result), (1, ProbeDefect::NoSite));
    }
}

#[test]
fn prelinked_note_is_shifted_unless_pc_is_0() {
    let shifted = |spec: NoteSpec, by: u64| {
        let (pc, semaphore) = (spec.pc, spec.semaphore);
        let moved = |address: u64| address.wrapping_add(by);
        let pc = if pc == 0 { 0 } else { moved(pc) };
        let mut spec = spec.at(pc, moved(semaphore));
        spec.base = moved(ProgramSpec::BASE);
        spec
    };
    for by in [0x1_0000, 0x30_0000_0000, 0u64.wrapping_sub(0x1000)] {
        let mut made = program(&[]);
        made.notes = [
            shifted(note("ocaml_2", "moved", 1, 0), by),
            shifted(without_site("ocaml_2", "flag", 1), by),
            // Notes of one file may have different bases: this one was not moved.
            shifted(note("ocaml", "still", 2, 2), 0),
        ]
        .iter()
        .flat_map(NoteSpec::bytes)
        .collect();
        let symbol = "camlServer__semaphore_still".to_owned();
        made.symbols = vec![(symbol, ProgramSpec::PROBES + 8)];
        let table = read_table(&made.bytes()).unwrap();
        let moved = table.probe("moved").unwrap();
        assert_eq!(
            moved.sites().next().unwrap().address().0,
            ProgramSpec::TEXT + 6
        );
        assert_eq!(counters(moved), [ProgramSpec::PROBES + 2]);
        let flag = table.probe("flag").unwrap();
        assert_eq!(
            (flag.sites().len(), counters(flag)),
            (0, vec![ProgramSpec::PROBES + 6])
        );
        let still = table.probe("still").unwrap();
        assert_eq!(
            still.sites().next().unwrap().address().0,
            ProgramSpec::TEXT + 12
        );
    }
}

#[test]
fn site_must_be_in_executable_file_bytes() {
    let last = ProgramSpec::TEXT + 18;
    for pc in [
        1,
        ProgramSpec::TEXT - 1,
        last + 1,
        ProgramSpec::PROBES,
        u64::MAX,
        1 << 63,
    ] {
        let spec = note("ocaml_2", "tick", 0, 0).at(pc, ProgramSpec::PROBES);
        let (index, defect) = wrong_note(read(&[note("ocaml_2", "tick", 0, 0), spec]));
        assert_eq!((index, defect), (1, ProbeDefect::SiteOutside(FileAddr(pc))));
    }
    let spec = note("ocaml_2", "tick", 0, 0).at(last, ProgramSpec::PROBES);
    assert_eq!(read(&[spec]).unwrap().site_count(), 1);
}

#[test]
fn counter_must_be_in_the_semaphore_section() {
    for (semaphore, counter) in [
        (1, 3),
        (ProgramSpec::PROBES - 3, ProgramSpec::PROBES - 1),
        (ProgramSpec::PROBES + 13, ProgramSpec::PROBES + 15),
        (ProgramSpec::TEXT, ProgramSpec::TEXT + 2),
        (u64::MAX, 1),
        (u64::MAX - 1, 0),
    ] {
        let spec = note("ocaml_2", "tick", 0, 0).at(ProgramSpec::TEXT, semaphore);
        let defect = ProbeDefect::SemaphoreOutside(FileAddr(counter));
        assert_eq!(wrong_note(read(&[spec])), (0, defect));
    }
    let spec = note("ocaml_2", "tick", 0, 0).at(ProgramSpec::TEXT, 0);
    assert_eq!(wrong_note(read(&[spec])), (0, ProbeDefect::NoSemaphore));
    // The last two bytes of the section are enough.
    let spec = note("ocaml_2", "tick", 0, 0).at(ProgramSpec::TEXT, ProgramSpec::PROBES + 12);
    assert_eq!(read(&[spec]).unwrap().semaphore_count(), 1);
}

#[test]
fn counter_must_be_in_writable_memory() {
    let counter = FileAddr(ProgramSpec::PROBES + 2);
    let mut bytes = program(&[note("ocaml_2", "tick", 0, 0)]).bytes();
    // p_flags and p_memsz of the second program header.
    for (at, value) in [(64 + 56 + 4, 4), (64 + 56 + 40, 3)] {
        let good = std::mem::replace(&mut bytes[at], value);
        let defect = ProbeDefect::SemaphoreNotWritable(counter);
        assert_eq!(wrong_note(read_table(&bytes)), (0, defect));
        bytes[at] = good;
    }
    read_table(&bytes).unwrap();
}

#[test]
fn names_and_arguments_must_be_printable() {
    let with = |provider: &str, strings: &[u8]| {
        let mut spec = note(provider, "x", 0, 0);
        spec.strings = strings.to_vec();
        spec
    };
    for name in [
        &b""[..],
        b"a b",
        b"a\n",
        b"a\x1b[0m",
        b"\xff",
        b"a\xc2\xa0",
        b"\xc2\x9b",
    ] {
        let strings = [b"ocaml_2\0", name, b"\0\0"].concat();
        let error = read(&[with("ocaml_2", &strings)]).unwrap_err();
        assert!(!error.to_string().contains(char::is_control));
        assert_eq!(wrong_note(Err(error)), (0, ProbeDefect::Name), "{name:?}");
        // Names of other providers are not checked.
        let foreign = [b"python\0", name, b"\0\xff\0"].concat();
        read(&[with("python", &foreign), note("ocaml_2", "tick", 0, 0)]).unwrap();
    }
    let result = read(&[with("ocaml_2", b"ocaml_2\0tick\0\xff\0")]);
    assert_eq!(wrong_note(result), (0, ProbeDefect::Arguments));
    let table = read(&[with("ocaml_2", "ocaml_2\0überlauf\0\0".as_bytes())]).unwrap();
    assert!(table.probe("überlauf").is_some());
}

#[test]
fn bytes_that_are_no_site_are_reported() {
    let mut made = program(&[note("ocaml_2", "tick", 0, 0), note("ocaml_2", "tock", 1, 1)]);
    made.text[7] = 0x0f;
    let error = read_table(&made.bytes()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/srv/server.exe is corrupt: probe note 1 at 0x40 (tock) has its site at 0x401006: \
         found 90 0f 01 00 00 00, expected 90 3d or 90 e8 and four more bytes"
    );
}

#[test]
fn overlapping_sites_are_a_contradiction() {
    let near =
        |by: u64| note("ocaml_2", "tock", 0, 1).at(ProgramSpec::TEXT + by, ProgramSpec::PROBES + 4);
    let mut made = program(&[note("ocaml_2", "tick", 0, 0), near(4)]);
    made.text[4..10].copy_from_slice(&SITE);
    assert_eq!(
        contradiction(read_table(&made.bytes())),
        "the sites of probes tick and tock overlap at 0x401004"
    );
    let same = contradiction(read(&[note("ocaml_2", "tick", 0, 0), near(0)]));
    assert_eq!(
        same,
        "the sites of probes tick and tock overlap at 0x401000"
    );
    read(&[note("ocaml_2", "tick", 0, 0), near(6)]).unwrap();
}

#[test]
fn duplicate_notes_of_a_site_must_agree() {
    let one = note("ocaml_2", "tick", 0, 0);
    let table = read(&[one.clone(), note("ocaml_2", "tick", 1, 0), one.clone()]).unwrap();
    assert_eq!(table.site_count(), 2);

    let other_counter = note("ocaml_2", "tick", 0, 1);
    let mut other_arguments = one.clone();
    other_arguments.strings = b"ocaml_2\0tick\x008@%rbx\0".to_vec();
    for other in [other_counter, other_arguments] {
        for pair in [[one.clone(), other.clone()], [other.clone(), one.clone()]] {
            assert_eq!(
                contradiction(read(&pair)),
                "the sites of probes tick and tick overlap at 0x401000"
            );
        }
    }
}

#[test]
fn counters_that_share_a_byte_are_a_contradiction() {
    let at = |provider: &str, name: &str, site: u64, semaphore: u64| {
        note(provider, name, site, 0).at(
            ProgramSpec::TEXT + 6 * site,
            ProgramSpec::PROBES + semaphore,
        )
    };
    for (provider, semaphore) in [("ocaml_2", 0), ("ocaml_2", 1), ("ocaml", 2), ("ocaml", 3)] {
        let pair = [
            at("ocaml_2", "tick", 0, 0),
            at(provider, "tock", 1, semaphore),
        ];
        let mut made = program(&pair);
        let symbol = "camlServer__semaphore_tock".to_owned();
        made.symbols = vec![(symbol, ProgramSpec::PROBES + semaphore)];
        let text = contradiction(read_table(&made.bytes()));
        assert!(text.starts_with("the semaphores of probes ti"), "{text}");
    }
    // Counters that are next to each other share no byte.
    read(&[
        at("ocaml_2", "tick", 0, 0),
        at("ocaml", "tock", 1, 4),
        at("ocaml", "tack", 2, 6),
        at("ocaml_2", "toll", 3, 8),
    ])
    .unwrap();
}

#[test]
fn wrapping_segment_holds_no_site_across_its_end() {
    let top = u64::MAX - 4;
    let specs = [0, 1].map(|i| {
        let name = if i == 0 { "tick" } else { "tock" };
        NoteSpec::new("ocaml_2", name, "").at(top + i, ProgramSpec::PROBES + 4 * i)
    });
    let mut made = program(&specs);
    made.text_address = top;
    made.text = [0x90, 0x3d].repeat(12);
    let (index, defect) = wrong_note(read_table(&made.bytes()));
    assert_eq!(
        (index, defect),
        (0, ProbeDefect::SiteOutside(FileAddr(top)))
    );
}

#[test]
fn file_without_ocaml_notes_has_no_probes() {
    let none = |result: Result<ProbeTable>| -> Error {
        let error = result.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::NoProbes { .. })),
            "{error}"
        );
        error
    };
    none(read(&[]));
    let lookalikes = [
        "ocaml_20", "ocaml_", "Ocaml", "ocaml.2", "ocaml.", "", "libc",
    ];
    let error = none(read(
        &lookalikes.map(|provider| note(provider, "tick", 0, 0)),
    ));
    assert_eq!(error.to_string(), "no OCaml probes in /srv/server.exe");
}
