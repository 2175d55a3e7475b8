use std::process::Command;

use test_support::{Scratch, fixture};

use super::*;
use crate::error::{ErrorKind, Subject};
use crate::testing::{NoteSpec, ProgramSpec, memory_file};

const E_TYPE: usize = 16;
const E_MACHINE: usize = 18;
const E_SHOFF: usize = 40;
const E_PHENTSIZE: usize = 54;
const E_SHENTSIZE: usize = 58;
const E_SHNUM: usize = 60;
const E_SHSTRNDX: usize = 62;

/// Offset of a field of a section's header in the made file.
fn section_field(index: usize, field: usize) -> usize {
    64 + 2 * 56 + index * 64 + field
}
const SH_TYPE: usize = 4;
const SH_OFFSET: usize = 24;
const SH_SIZE: usize = 32;
const SH_LINK: usize = 40;

fn file() -> Vec<u8> {
    let note = NoteSpec::new("ocaml_2", "tick", "").at(ProgramSpec::TEXT, ProgramSpec::PROBES);
    ProgramSpec::new(&[note], &[0x90, 0x3d, 1, 2, 3, 4]).bytes()
}

fn edited(edits: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = file();
    for (at, new) in edits {
        bytes[*at..at + new.len()].copy_from_slice(new);
    }
    bytes
}

fn read(bytes: &[u8]) -> Result<ElfFile> {
    ElfFile::read(memory_file(bytes), "/srv/server.exe".into())
}

fn defect_of(result: Result<ElfFile>) -> ElfDefect {
    let Err(error) = result else {
        panic!("it was read");
    };
    assert_eq!(error.subject(), &Subject::File("/srv/server.exe".into()));
    match error.kind() {
        ErrorKind::File(FileError::Elf(defect)) => defect.clone(),
        _ => panic!("{error}"),
    }
}

fn defect(edits: &[(usize, &[u8])]) -> ElfDefect {
    defect_of(read(&edited(edits)))
}

#[test]
fn good_file_has_its_sections_and_segments() {
    let elf = read(&file()).unwrap();
    assert_eq!(elf.linking(), Linking::Fixed);
    assert_eq!(elf.entry(), FileAddr(ProgramSpec::TEXT));
    assert_eq!(
        elf.section_range(".probes"),
        Some((FileAddr(ProgramSpec::PROBES), 16))
    );
    assert!(elf.contents(".note.stapsdt").unwrap().is_some());
    // A prefix or a suffix of a section's name does not match.
    assert!(elf.contents(".note").unwrap().is_none());
    assert!(elf.section_range("probes").is_none());

    let segments: Vec<Segment> = elf.loaded().collect();
    assert_eq!(segments.len(), 2);
    assert!(segments[0].executable && !segments[0].writable);
    let mut code = [0; 6];
    elf.read_loaded(&segments[0], FileAddr(ProgramSpec::TEXT), &mut code)
        .unwrap();
    assert_eq!(code, [0x90, 0x3d, 1, 2, 3, 4]);
}

#[test]
fn files_that_are_not_regular_are_refused() {
    for path in ["/", "/dev/null"] {
        let error = ElfFile::open(Path::new(path)).err().unwrap();
        assert_eq!(error.to_string(), format!("{path} is not a regular file"));
    }
    let error = ElfFile::open(Path::new("/no/such/file")).err().unwrap();
    assert!(matches!(
        error.kind(),
        ErrorKind::File(FileError::Open { .. })
    ));
    assert_eq!(
        error.to_string(),
        "cannot open /no/such/file: No such file or directory"
    );
}

#[test]
fn files_of_other_kinds_are_refused_with_reason() {
    for (edit, expected) in [
        ((0, &b"\x7fELG"[..]), ElfDefect::NotElf),
        ((EI_CLASS, &[1]), ElfDefect::Class32),
        ((EI_CLASS, &[3]), ElfDefect::UnknownClass(3)),
        ((EI_DATA, &[2]), ElfDefect::BigEndian),
        ((E_MACHINE, &[0xb7, 0]), ElfDefect::Machine(0xb7)),
        ((E_TYPE, &[1, 0]), ElfDefect::NotAProgram(1)),
        ((E_TYPE, &[4, 0]), ElfDefect::NotAProgram(4)),
    ] {
        assert_eq!(defect(&[edit]), expected);
    }
    for (bytes, expected) in [
        (&b""[..], ElfDefect::NotElf),
        (b"\x7fELF", ElfDefect::NotElf),
        (b"#!/bin/sh\nexec service\n", ElfDefect::NotElf),
    ] {
        assert_eq!(defect_of(read(bytes)), expected);
    }
    let message = read(&edited(&[(E_MACHINE, &[0xb7, 0])])).err().unwrap();
    assert_eq!(
        message.to_string(),
        "/srv/server.exe is a program for AArch64; only x86-64 programs are supported"
    );
}

#[test]
fn tables_with_wrong_entry_size_are_refused() {
    for (at, what) in [
        (E_PHENTSIZE, "the program headers"),
        (E_SHENTSIZE, "the section headers"),
    ] {
        for size in [0u16, 1, 40, 65, u16::MAX] {
            let found = defect(&[(at, &size.to_le_bytes())]);
            assert_eq!(found, ElfDefect::Table(what));
        }
    }
}

#[test]
fn missing_section_headers_give_no_sections() {
    let elf = read(&edited(&[(E_SHOFF, &[0; 8])])).unwrap();
    assert!(!elf.has_sections());
    assert!(elf.contents(".note.stapsdt").unwrap().is_none());
    assert_eq!(elf.build_id(), None);
    assert_eq!(elf.loaded().count(), 2);
}

#[test]
fn section_names_are_found_or_refused() {
    let beyond = defect(&[(E_SHSTRNDX, &[9, 0])]);
    assert_eq!(beyond, ElfDefect::Table("the section names"));
    // elf(5): if e_shnum is 0 and e_shstrndx is SHN_XINDEX, sh_size and sh_link of section 0 have
    // the values.
    let numbers = [
        (E_SHNUM, &[0, 0][..]),
        (section_field(0, SH_SIZE), &[9]),
        (E_SHSTRNDX, &[0xff, 0xff]),
        (section_field(0, SH_LINK), &[4]),
    ];
    let elf = read(&edited(&numbers)).unwrap();
    assert!(elf.section_range(".probes").is_some());
    assert_eq!(
        defect(&[
            numbers[0],
            numbers[1],
            numbers[2],
            (section_field(0, SH_LINK), &[9])
        ]),
        ElfDefect::Table("the section names")
    );
}

#[test]
fn section_without_file_content_is_empty() {
    let nobits = edited(&[(section_field(1, SH_TYPE), &[8])]);
    let elf = read(&nobits).unwrap();
    let contents = elf.contents(".note.stapsdt").unwrap();
    assert_eq!(contents.map(|contents| contents.len), Some(0));
}

#[test]
fn impossible_sizes_are_refused_before_any_allocation() {
    for value in [1u64 << 20, 1 << 40, 1 << 63, u64::MAX - 1, u64::MAX] {
        let value = value.to_le_bytes();
        for (edits, what) in [
            (&[(E_SHOFF, &value[..])][..], "the section headers"),
            (
                &[(E_SHNUM, &[0, 0]), (section_field(0, SH_SIZE), &value)],
                "the section headers",
            ),
            (
                &[(section_field(4, SH_OFFSET), &value)],
                "the section names",
            ),
            (&[(section_field(4, SH_SIZE), &value)], "the section names"),
        ] {
            let found = defect(edits);
            assert!(
                matches!(found, ElfDefect::Truncated { what: w, .. } if w == what),
                "{found:?}"
            );
        }
        for field in [SH_OFFSET, SH_SIZE] {
            let elf = read(&edited(&[(section_field(1, field), &value)])).unwrap();
            let error = elf.contents(".note.stapsdt").err().unwrap();
            let ErrorKind::File(FileError::Elf(defect)) = error.kind() else {
                panic!("{error}");
            };
            assert!(matches!(
                defect,
                ElfDefect::Truncated {
                    what: ".note.stapsdt",
                    ..
                }
            ));
        }
    }
}

#[test]
fn sparse_file_causes_no_large_allocation() {
    const LONG: u64 = 1 << 42;
    let size = (LONG / 2).to_le_bytes();
    let sparse = |edits: &[(usize, &[u8])]| {
        let file = memory_file(&edited(edits));
        file.set_len(LONG).unwrap();
        ElfFile::read(file, "/srv/server.exe".into())
    };
    let names = defect_of(sparse(&[(section_field(4, SH_SIZE), &size)]));
    assert!(matches!(
        names,
        ElfDefect::TooLarge {
            what: "the section names",
            ..
        }
    ));
    let headers = defect_of(sparse(&[
        (E_SHNUM, &[0, 0]),
        (section_field(0, SH_SIZE), &(LONG / 128).to_le_bytes()),
    ]));
    assert!(matches!(
        headers,
        ElfDefect::TooLarge {
            what: "the section headers",
            ..
        }
    ));

    let elf = sparse(&[(section_field(1, SH_SIZE), &size)]).unwrap();
    let error = elf.contents(".note.stapsdt").err().unwrap();
    assert_eq!(
        error.to_string(),
        "/srv/server.exe has 2199023255552 bytes of .note.stapsdt: at most 134217728 can be read"
    );
}

#[test]
fn build_id_equals_the_one_of_readelf() {
    let path = test_support::fixture("gen_ocaml_2.pie");
    let id = ElfFile::open(&path)
        .unwrap()
        .build_id()
        .unwrap()
        .to_string();
    let output = std::process::Command::new("readelf")
        .arg("-n")
        .arg(&path)
        .output()
        .unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.contains(&format!("Build ID: {id}\n")),
        "{id}\n{output}"
    );
}

#[test]
fn range_checks_do_not_wrap() {
    let top = FileAddr(u64::MAX - 7);
    assert!(within(FileAddr(16), 8, FileAddr(18), 6));
    assert!(!within(FileAddr(16), 8, FileAddr(19), 6));
    assert!(!within(FileAddr(16), 8, FileAddr(15), 6));
    assert!(!within(FileAddr(16), 8, top, 6));
    assert!(within(top, 7, top, 6));
    assert!(!within(top, u64::MAX, FileAddr(u64::MAX - 3), 6));
    assert!(!within(
        FileAddr(16),
        u64::MAX,
        FileAddr(u64::MAX),
        u64::MAX
    ));
}

#[test]
fn code_of_go_is_recognised() {
    let scratch = Scratch::new();
    let (file, with_go) = (fixture("passing.pie"), scratch.file("with_go"));
    for (section, has_go) in [
        (".gopclntab", true),
        (".note.go.buildid", true),
        (".go", false),
    ] {
        let mut objcopy = Command::new("objcopy");
        let section = format!("{section}=/proc/self/comm");
        objcopy.arg("--add-section").arg(&section);
        assert!(objcopy.arg(&file).arg(&with_go).status().unwrap().success());
        assert_eq!(
            ElfFile::open(&with_go).unwrap().has_go(),
            has_go,
            "{section}"
        );
    }
    assert!(!ElfFile::open(&file).unwrap().has_go());
}
