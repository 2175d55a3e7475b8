//! Damaged files: each gives its error, and none a panic.

use std::fs::File;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::testing::{memory_file, properties};

/// Files of the fixtures' directory `corrupt`, and what the error message of each contains.
const CORRUPT: &[(&str, &[&str])] = &[
    ("elf_32_bit", &["is a 32-bit program; only x86-64"]),
    ("elf_aarch64", &["is a program for AArch64; only x86-64"]),
    ("elf_big_endian", &["is a big-endian program; only x86-64"]),
    (
        "elf_header_truncated",
        &["is truncated", "the ELF header (64 bytes at 0x0)", "0x28"],
    ),
    ("elf_truncated", &["is truncated", "the section headers ("]),
    ("empty", &["is not an ELF file"]),
    ("not_elf", &["is not an ELF file"]),
    (
        "note_descsz_9",
        &["probe note 1 at 0x40 is malformed (descsz 9 < 24)"],
    ),
    (
        "note_descsz_huge",
        &["probe note 1 at 0x40 is malformed (needs 4294967301 bytes, "],
    ),
    (
        "note_namesz_huge",
        &["probe note 1 at 0x40 is malformed (needs 4294967340 bytes, "],
    ),
    (
        "note_pc_in_data",
        &[
            "note 1 at 0x40 (many) has its site at 0x",
            ", outside the executable segments",
        ],
    ),
    (
        "note_pc_outside_segments",
        &["note 1 at 0x40 (many) has its site at 0x7fff00000000, outside"],
    ),
    (
        "note_pc_twice",
        &["the sites of probes many and many overlap at 0x"],
    ),
    (
        "note_random_bytes",
        &["probe note 0 at 0x0 is malformed (needs "],
    ),
    (
        "note_section_beyond_file",
        &["is truncated", ".note.stapsdt ("],
    ),
    (
        "note_section_removed",
        &["no OCaml probes in ", " (build-id "],
    ),
    (
        "note_semaphore_half_outside_probes",
        &[
            "note 1 at 0x40 (many) has its semaphore at 0x",
            ", outside .probes",
        ],
    ),
    (
        "note_semaphore_outside_probes",
        &[
            "note 1 at 0x40 (many) has its semaphore at 0x",
            ", outside .probes",
        ],
    ),
    (
        "note_semaphore_outside_segments",
        &["(many) has its semaphore at 0x7fff00000002, outside .probes"],
    ),
    (
        "note_semaphore_zero",
        &["note 1 at 0x40 (many) has no semaphore"],
    ),
    (
        "note_strings_without_nul",
        &["note 1 at 0x40 is malformed (its provider does not end within the note)"],
    ),
    (
        "note_truncated",
        &["note 8 at 0x1f4 is malformed (needs 46 bytes, 40 left)"],
    ),
    (
        "probes_section_renamed",
        &[
            "note 0 at 0x0 (many) has its semaphore at 0x",
            ", outside .probes",
        ],
    ),
    (
        "section_headers_beyond_file",
        &["is truncated", "the section headers ("],
    ),
    (
        "section_headers_stripped",
        &["has no section headers", "so its probes cannot be found"],
    ),
    (
        "section_names_out_of_range",
        &["is corrupt: the section names cannot be read"],
    ),
    (
        "site_nop_66",
        &[
            "(broken) has its site at 0x",
            "found 66 3d ",
            "expected 90 3d or 90 e8",
        ],
    ),
    (
        "site_nop_cc",
        &[
            "(broken) has its site at 0x",
            "found cc 3d ",
            "expected 90 3d or 90 e8",
        ],
    ),
    (
        "site_opcode_0f",
        &[
            "(broken) has its site at 0x",
            "found 90 0f ",
            "expected 90 3d or 90 e8",
        ],
    ),
    (
        "site_opcode_cc",
        &[
            "(broken) has its site at 0x",
            "found 90 cc ",
            "expected 90 3d or 90 e8",
        ],
    ),
];

/// The one file of the directory that gives no error: its renamed section is needed only to read
/// prelinked files.
const HARMLESS: &str = "base_section_renamed";

fn corrupt_files() -> Vec<std::path::PathBuf> {
    let directory = test_support::fixture("corrupt");
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| match path.extension().and_then(|e| e.to_str()) {
            Some(form) => form == "pie" || form == "nopie",
            None => path.file_name().unwrap() != "dune",
        })
        .collect()
}

fn stem(path: &Path) -> &str {
    path.file_stem().unwrap().to_str().unwrap()
}

#[test]
fn every_corrupt_file_gives_its_own_error() {
    let mut files = 0;
    for path in corrupt_files() {
        let result = ProbeTable::read(&path);
        if stem(&path) == HARMLESS {
            let original = test_support::fixture("multi_semaphore.pie");
            let original = original.with_extension(path.extension().unwrap());
            let compared = |table: ProbeTable| format!("{:?} {:?}", table.sites, table.semaphores);
            let original = ProbeTable::read(original).unwrap();
            assert_eq!(compared(result.unwrap()), compared(original));
            continue;
        }
        let Some((_, parts)) = CORRUPT.iter().find(|(name, _)| *name == stem(&path)) else {
            panic!("no expectation for {}", path.display());
        };
        let message = result.unwrap_err().to_string();
        assert!(message.contains(path.to_str().unwrap()), "{message}");
        for part in *parts {
            assert!(message.contains(part), "{message} lacks {part}");
        }
        files += 1;
    }
    assert!(files >= CORRUPT.len());
}

fn read_file(file: &File) -> Result<ProbeTable> {
    let file = file.try_clone().unwrap();
    ProbeTable::of(&ElfFile::read(file, "/srv/server.exe".into())?)
}

#[test]
fn real_file_cut_at_any_length_is_refused() {
    // The section headers are at the end of this file, so that every cut damages them.
    let path = test_support::fixture("gen_ocaml_2_stripped.pie");
    let bytes = std::fs::read(path).unwrap();
    let file = memory_file(&bytes);
    read_file(&file).unwrap();
    for len in (0..bytes.len()).rev() {
        file.set_len(len as u64).unwrap();
        let error = read_file(&file).unwrap_err();
        let ErrorKind::File(FileError::Elf(defect)) = error.kind() else {
            panic!("{len}: {error}");
        };
        let expected = match len {
            0..16 => matches!(defect, ElfDefect::NotElf),
            _ => matches!(defect, ElfDefect::Truncated { .. }),
        };
        assert!(expected, "{len}: {error}");
    }
}

#[test]
fn cut_file_is_readable_if_needed_parts_remain() {
    let made = program(&[note("ocaml_2", "tick", 0, 0), note("ocaml_2", "tock", 2, 1)]);
    let mut bytes = made.bytes();
    // The file ends with one more site, of six bytes, that no note names: it is not needed.
    let needed = bytes.len() - 6;
    bytes.extend([0; 16]);
    let file = memory_file(&bytes);
    let whole = format!("{:?}", read_file(&file).unwrap().sites);
    for len in (0..bytes.len()).rev() {
        file.set_len(len as u64).unwrap();
        match read_file(&file) {
            Ok(table) => {
                assert!(len >= needed, "{len} < {needed}");
                assert_eq!(format!("{:?}", table.sites), whole);
            }
            Err(error) => {
                assert!(len < needed, "{len}: {error}");
                assert!(
                    matches!(error.kind(), ErrorKind::File(FileError::Elf(_))),
                    "{error}"
                );
            }
        }
    }
}

/// What has to hold of a table of any file; the fuzz target `elf` checks the same, as far as it is public.
fn check_any(bytes: &[u8]) {
    let Ok(table) = read_table(bytes) else {
        return;
    };
    assert!(table.probes().len() > 0);
    for probe in table.probes() {
        assert!(probe.semaphores().len() > 0);
        assert_eq!(table.probe(probe.name()).unwrap().index, probe.index);
        for site in probe.sites() {
            assert!(site.code().is_pristine());
            assert!(probe.semaphore_range().contains(&site.semaphore_index()));
            site.arguments().for_each(drop);
        }
    }
}

// promise: Bad input: Any file gives a table or an error (the corpus, and a fuzz target)
#[test]
fn file_corpus_is_read_without_a_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/elf");
    let mut tables = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        check_any(&bytes);
        tables += usize::from(read_table(&bytes).is_ok());
    }
    assert!(tables > 0, "no seed is a good file");
}

/// Arbitrary values, small ones, and values at the limits of integers, addresses and segments.
fn edge() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..0x5000u64,
        prop::sample::select(vec![
            0,
            1,
            1 << 31,
            1 << 32,
            1 << 47,
            1 << 62,
            1 << 63,
            u64::MAX - 5,
            u64::MAX,
            ProgramSpec::TEXT,
            ProgramSpec::PROBES
        ]),
    ]
}

proptest! {
    #![proptest_config(properties(2000))]

    #[test]
    fn altered_synthetic_file_gives_table_or_error(
        damage in prop::collection::vec((any::<prop::sample::Index>(), edge(), 1..=8usize), 1..5),
    ) {
        let specs = [note("ocaml_2", "tick", 0, 0), note("ocaml", "tock", 2, 1)];
        let mut bytes = program(&specs).bytes();
        for (at, value, len) in damage {
            let at = at.index(bytes.len() / 2) * 2;
            let len = len.min(bytes.len() - at);
            bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        }
        check_any(&bytes);
    }

    #[test]
    fn altered_real_file_gives_table_or_error(
        damage in prop::collection::vec((any::<prop::sample::Index>(), edge(), 1..=8usize), 1..4),
    ) {
        static BYTES: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| {
            std::fs::read(test_support::fixture("gen_ocaml_2_stripped.pie")).unwrap()
        });
        let mut bytes = BYTES.clone();
        // The ELF header, the program headers, the section headers.
        let sections = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
        let places: Vec<usize> = (0..64 + 13 * 56).chain(sections..bytes.len()).collect();
        for (at, value, len) in damage {
            let at = *at.get(&places) / 2 * 2;
            let len = len.min(bytes.len() - at);
            bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        }
        check_any(&bytes);
    }
}
