use super::*;
use crate::Argument;
use crate::testing::{NoteSpec, properties};

fn ocaml(name: &str) -> NoteSpec {
    NoteSpec::new("ocaml_2", name, "8@%rdx 8@16(%rsp)")
}

fn section(notes: &[NoteSpec]) -> Vec<u8> {
    notes.iter().flat_map(NoteSpec::bytes).collect()
}

/// All notes; none may be malformed.
fn good(section: &[u8]) -> Vec<Note<'_>> {
    notes(section).collect::<Result<_, _>>().unwrap()
}

/// The malformed note, which must be the last, after how many good ones.
fn bad(section: &[u8]) -> (usize, MalformedNote) {
    let mut all: Vec<_> = notes(section).collect();
    let last = all.pop().unwrap().unwrap_err();
    assert!(all.iter().all(Result::is_ok));
    (all.len(), last)
}

fn set_word(section: &mut [u8], at: usize, value: u32) {
    section[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn note_has_its_addresses_strings_and_position() {
    let bytes = section(&[ocaml("first"), ocaml("second").at(0, 0x4072)]);
    let found = good(&bytes);
    assert_eq!(found.len(), 2);

    let first = &found[0];
    assert_eq!((first.index, first.offset), (0, 0));
    assert_eq!(
        (first.pc, first.base, first.semaphore),
        (0x561ee, 0x20e0, 0x4070)
    );
    assert_eq!(
        (first.provider, first.name),
        (&b"ocaml_2"[..], &b"first"[..])
    );
    assert_eq!(first.arguments, b"8@%rdx 8@16(%rsp)");

    let second = &found[1];
    assert_eq!(
        (second.index, second.offset),
        (1, ocaml("first").bytes().len())
    );
    assert_eq!((second.pc, second.semaphore), (0, 0x4072));
    assert_eq!(second.name, b"second");
}

#[test]
fn empty_section_has_no_notes() {
    assert_eq!(notes(b"").next(), None);
}

#[test]
fn notes_of_every_provider_are_returned_and_counted() {
    let bytes = section(&[
        NoteSpec::new("libc", "setjmp", "8@%rdi -4@%esi 8@%rax"),
        ocaml("tick"),
        NoteSpec::new("", "", ""),
    ]);
    let found: Vec<_> = good(&bytes)
        .iter()
        .map(|note| (note.index, note.provider, note.arguments.len()))
        .collect();
    assert_eq!(
        found,
        [
            (0, &b"libc"[..], 21),
            (1, &b"ocaml_2"[..], 17),
            (2, &b""[..], 0)
        ]
    );
}

#[test]
fn strings_need_not_be_text() {
    let mut note = ocaml("x");
    note.strings = b"\xff\0\xfe\xfd\0\xfc\0".to_vec();
    let bytes = note.bytes();
    let found = good(&bytes);
    assert_eq!(
        (found[0].provider, found[0].name),
        (&b"\xff"[..], &b"\xfe\xfd"[..])
    );
    assert_eq!(found[0].arguments, b"\xfc");
}

#[test]
fn foreign_notes_are_skipped_but_counted() {
    let owners: [&[u8]; 4] = [b"GNU\0", b"stapsdt", b"stapsdt\0\0", b""];
    let mut all: Vec<NoteSpec> = owners
        .into_iter()
        .map(|owner| NoteSpec {
            owner,
            ..ocaml("of_another_owner")
        })
        .collect();
    all.push(NoteSpec {
        kind: 4,
        ..ocaml("of_another_type")
    });
    // Defects in a note of another owner or type are not reported.
    all.push(NoteSpec {
        kind: 0,
        strings: Vec::new(),
        ..ocaml("short")
    });
    all.push(ocaml("ours"));
    let bytes = section(&all);
    let found = good(&bytes);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].index, found[0].name), (6, &b"ours"[..]));
}

#[test]
fn last_note_may_lack_its_padding() {
    // A description of 24 + 14 bytes, padded by 2.
    let one = NoteSpec::new("ocaml_2", "abcd", "").bytes();
    assert_eq!(one.len(), 12 + 8 + 40);
    for missing in 1..=2 {
        let cut = &one[..one.len() - missing];
        assert_eq!(good(cut)[0].name, b"abcd", "{missing} bytes missing");
    }
    let (before, malformed) = bad(&one[..one.len() - 3]);
    let defect = NoteDefect::BodyCut {
        needed: 46,
        left: 45,
    };
    assert_eq!((before, malformed.defect), (0, defect));
}

#[test]
fn bytes_after_the_last_string_are_ignored() {
    let mut note = ocaml("x");
    note.strings.extend(b"more\0and more");
    let bytes = section(&[note, ocaml("next")]);
    assert_eq!(good(&bytes)[1].name, b"next");
}

#[test]
fn truncated_header_is_reported_with_remaining_length() {
    let mut bytes = section(&[ocaml("whole")]);
    let offset = bytes.len();
    for left in 1..12 {
        bytes.push(0);
        let (before, malformed) = bad(&bytes);
        assert_eq!(before, 1);
        assert_eq!((malformed.index, malformed.offset), (1, offset));
        assert_eq!(malformed.defect, NoteDefect::HeaderCut { left });
    }
    let message = bad(&bytes).1.to_string();
    assert_eq!(
        message,
        format!("probe note 1 at {offset:#x} is malformed (its header needs 12 bytes, 11 left)")
    );
}

#[test]
fn oversized_notes_are_reported_even_if_rounding_wraps() {
    let one = ocaml("whole").bytes();
    let good_len = one.len();
    for (at, size, needed) in [
        (4, 1000, 8 + 1000),
        (4, u32::MAX, 8 + 0xffff_ffff),
        (4, 0xffff_fffd, 8 + 0xffff_fffd),
        (0, u32::MAX, 0x1_0000_0000 + 56),
        (0, 0xffff_fffd, 0x1_0000_0000 + 56),
    ] {
        let mut bytes = section(&[ocaml("whole"), ocaml("whole")]);
        assert_eq!(word(&bytes, good_len + 4), 56);
        set_word(&mut bytes, good_len + at, size);
        let (before, malformed) = bad(&bytes);
        assert_eq!(
            (before, malformed.index, malformed.offset),
            (1, 1, good_len)
        );
        let left = good_len - 12;
        assert_eq!(
            malformed.defect,
            NoteDefect::BodyCut { needed, left },
            "{size:#x}"
        );
    }
}

#[test]
fn too_short_description_is_reported() {
    for descsz in [0, 9, 23] {
        let mut bytes = ocaml("x").bytes();
        set_word(&mut bytes, 4, descsz);
        let (_, malformed) = bad(&bytes);
        assert_eq!(malformed.defect, NoteDefect::ShortDescription(descsz));
    }
    let mut bytes = ocaml("x").bytes();
    set_word(&mut bytes, 4, 9);
    let message = bad(&bytes).1.to_string();
    assert_eq!(message, "probe note 0 at 0x0 is malformed (descsz 9 < 24)");
}

#[test]
fn unterminated_string_is_reported_by_its_name() {
    for (strings, what) in [
        (&b""[..], "provider"),
        (b"ocaml_2", "provider"),
        (b"ocaml_2\0", "name"),
        (b"ocaml_2\0tick", "name"),
        (b"ocaml_2\0tick\0", "argument string"),
        (b"ocaml_2\0tick\x008@%rax", "argument string"),
    ] {
        let mut note = ocaml("x");
        note.strings = strings.to_vec();
        let (_, malformed) = bad(&note.bytes());
        assert_eq!(
            malformed.defect,
            NoteDefect::Unterminated(what),
            "{strings:?}"
        );
        let message = malformed.to_string();
        assert!(message.ends_with(&format!("(its {what} does not end within the note)")));
    }
}

/// What has to hold for any bytes; the fuzz target `notes` checks the same.
fn check_any(section: &[u8]) {
    let mut ended = false;
    let mut last = None;
    for note in notes(section) {
        assert!(!ended, "a note after a malformed one");
        let (index, offset) = match &note {
            Ok(note) => (note.index, note.offset),
            Err(malformed) => (malformed.index, malformed.offset),
        };
        assert!(offset < section.len());
        assert!(last < Some((index, offset)));
        last = Some((index, offset));
        match note {
            Ok(note) => {
                let arguments = note.arguments;
                assert!(!arguments.contains(&0));
                for text in String::from_utf8_lossy(arguments).split_ascii_whitespace() {
                    if let Some(argument) = Argument::parse(text) {
                        let written = argument.to_string();
                        assert_eq!(Argument::parse(&written), Some(argument));
                    }
                }
            }
            Err(_) => ended = true,
        }
    }
}

#[test]
fn note_corpus_is_read_without_a_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/notes");
    let mut files = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        check_any(&std::fs::read(entry.unwrap().path()).unwrap());
        files += 1;
    }
    assert!(files > 0);
}

proptest::proptest! {
    #![proptest_config(properties(256))]

    // promise: Bad input: Any bytes give notes or an error (256 cases, and a fuzz target)
    #[test]
    fn any_bytes_give_notes_or_an_error(bytes: Vec<u8>) {
        check_any(&bytes);
    }

    #[test]
    fn damaged_notes_give_notes_or_an_error(
        damage in proptest::collection::vec((0..200usize, 0..=255u8), 0..6),
        len in 0..=200usize,
    ) {
        let mut bytes = section(&[ocaml("first"), ocaml("second"), ocaml("third")]);
        for (at, byte) in damage {
            bytes[at] = byte;
        }
        check_any(&bytes[..len]);
    }

    #[test]
    fn written_notes_are_read_back(
        all in proptest::collection::vec(
            ("[a-z_.0-9]{0,9}", "[!-~]{0,40}", "[ -~]{0,40}", 0u64.., 0u64.., 0u64..), 0..8),
    ) {
        let specs: Vec<NoteSpec> = all
            .iter()
            .map(|(provider, name, arguments, pc, base, semaphore)| NoteSpec {
                base: *base,
                ..NoteSpec::new(provider, name, arguments).at(*pc, *semaphore)
            })
            .collect();
        let bytes = section(&specs);
        let found = good(&bytes);
        assert_eq!(found.len(), all.len());
        for (note, (provider, name, arguments, pc, base, semaphore)) in found.iter().zip(&all) {
            assert_eq!((note.pc, note.base, note.semaphore), (*pc, *base, *semaphore));
            assert_eq!(note.provider, provider.as_bytes());
            assert_eq!(note.name, name.as_bytes());
            assert_eq!(note.arguments, arguments.as_bytes());
        }
    }
}

/// The notes that `each_note` passes to its visitor, and the lengths of the parts that it reads.
fn by_parts(section: &[u8]) -> (Vec<String>, Vec<usize>) {
    let (mut seen, mut parts) = (Vec::new(), Vec::new());
    let read = |offset: usize, bytes: &mut [u8]| {
        parts.push(bytes.len());
        bytes.copy_from_slice(&section[offset..offset + bytes.len()]);
        Ok(())
    };
    let done: Result<(), MalformedNote> = each_note(section.len(), read, |note| {
        seen.push(format!("{note:?}"));
        note.map(drop)
    });
    assert_eq!(
        done.is_err(),
        seen.iter().any(|note| note.starts_with("Err"))
    );
    (seen, parts)
}

#[test]
fn reading_in_parts_equals_reading_the_whole() {
    let whole = |section: &[u8]| notes(section).map(|note| format!("{note:?}")).collect();
    // The lengths vary, so that notes straddle the boundaries of the parts in every way.
    let mut specs: Vec<_> = (0..3000).map(|i| ocaml(&"x".repeat(1 + i % 61))).collect();
    let many = section(&specs);
    let (seen, parts) = by_parts(&many);
    let expected: Vec<String> = whole(&many);
    assert_eq!(seen, expected);
    assert!(parts.len() > 3 && parts.iter().all(|&len| len <= PART));

    // One note is larger than a part, and the last is cut.
    specs[1500] = ocaml(&"y".repeat(3 * PART));
    let mut large = section(&specs);
    large.truncate(large.len() - 9);
    let (seen, _) = by_parts(&large);
    let expected: Vec<String> = whole(&large);
    assert_eq!(seen.len(), 3000);
    assert_eq!(seen, expected);
    assert!(
        seen[2999].starts_with("Err(MalformedNote { index: 2999"),
        "{}",
        seen[2999]
    );
}
