use proptest::prelude::*;

use super::*;
use crate::testing::properties;

const CODE: u64 = 0x1000;

/// Code with a call that ends at each multiple of 8.
fn code() -> CodeSegments {
    let bytes = [0x90, 0x90, 0x90, 0xe8, 1, 2, 3, 4].repeat(64);
    let segment = Segment {
        start: FileAddr(CODE),
        offset: 0,
        file_len: bytes.len() as u64,
        len: bytes.len() as u64,
        executable: true,
        writable: false,
    };
    CodeSegments::new(vec![(segment, bytes)])
}

/// Data that is built part by part.
#[derive(Default)]
struct Data(Vec<u8>);

impl Data {
    fn words(&mut self, words: &[u64]) -> &mut Data {
        self.0
            .extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self
    }

    fn halves(&mut self, halves: &[u32]) -> &mut Data {
        self.0
            .extend(halves.iter().flat_map(|half| half.to_le_bytes()));
        self
    }

    fn quarters(&mut self, quarters: &[u16]) -> &mut Data {
        self.0
            .extend(quarters.iter().flat_map(|it| it.to_le_bytes()));
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Data {
        self.0.extend(bytes);
        self
    }

    fn align(&mut self) -> &mut Data {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        self
    }
}

/// A table of three descriptors, of which the second has a debuginfo at an offset of 0x58, and the third allocates
/// twice and has one at 0x60 and one at 0x58.
fn table() -> Data {
    let mut data = Data::default();
    // No table, although its first word could be a count.
    data.words(&[2, 3]);
    data.words(&[3, CODE + 8]).quarters(&[0xffff, 0]).align();
    // At 0x28.
    data.words(&[CODE + 16])
        .quarters(&[17, 2, 8, 5])
        .halves(&[0x58 - 0x38])
        .align();
    // At 0x40.
    data.words(&[CODE + 24])
        .quarters(&[19, 0])
        .bytes(&[2, 1, 1])
        .align();
    data.0.truncate(0x4f);
    data.bytes(&[0]);
    data.halves(&[0x60 - 0x50, 0x58 - 0x54]);
    assert_eq!(data.0.len(), 0x58);
    data
}

/// The function, file and line of each call.
fn calls(data: &[u8]) -> Vec<(u64, String, String, u32)> {
    let calls = calls_in(data, &code());
    let text = |text: TextPlace| {
        let bytes = &data[text.offset..text.offset + text.len];
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    let view = |call: CallSite| {
        (
            call.return_address.0,
            text(call.function),
            text(call.file),
            call.line.unwrap_or(0),
        )
    };
    calls.into_iter().map(view).collect()
}

#[test]
fn last_debuginfo_is_of_the_function_itself() {
    let mut data = table();
    // At 0x58 one that is inlined into the one at 0x60; line 9 as in OCaml 4.
    data.halves(&[0x68 - 0x58 + 1, 7 << 12, 0x68 - 0x60, 9 << 12]);
    data.halves(&[10]).bytes(b"A.go\0\0a.ml\0");
    let expected = |at| (CODE + at, "A.go".to_owned(), "a.ml".to_owned(), 9);
    assert_eq!(calls(&data.0), [expected(16), expected(24)]);
}

#[test]
fn lines_of_both_formats_are_read() {
    let mut data = table();
    // Fully packed, as in OCaml 5, and one whose columns come before its name.
    data.halves(&[
        0x68 - 0x58,
        9 << 19,
        0x78 - 0x60,
        1 << 31 | 300_000 << 12 | 5,
    ]);
    data.halves(&[0x6e - 0x68]).bytes(b"B\0b.ml\0").align();
    data.0.truncate(0x78);
    data.halves(&[0x70_u32.wrapping_sub(0x78), 1, 2])
        .bytes(b"C\0");
    let mut found = calls(&data.0);
    assert_eq!(
        found.remove(0),
        (CODE + 16, "B".to_owned(), "b.ml".to_owned(), 9)
    );
    let (address, function, _, line) = found.remove(0);
    assert_eq!((address, &*function, line), (CODE + 24, "C", 300_000));
}

/// The lines of two calls with these second words; 0 where they are not known.
fn lines(words: [u32; 2]) -> Vec<u32> {
    let mut data = table();
    let [one, other] = words;
    data.halves(&[0x68 - 0x58, one, 0x68 - 0x60, other]);
    data.halves(&[10]).bytes(b"A.go\0\0a.ml\0");
    let calls = calls(&data.0);
    assert!(
        calls
            .iter()
            .all(|(_, function, file, _)| function == "A.go" && file == "a.ml")
    );
    calls.into_iter().map(|(.., line)| line).collect()
}

#[test]
fn few_lines_tell_their_format() {
    let one_line = |line: u32, column: u32, end: u32| line << 12 | column << 4 | end >> 6;
    let both_lines = |line: u32, column: u32, end: u32| line << 19 | column << 10 | end << 3;
    assert_eq!(lines([one_line(9, 2, 64), one_line(300, 7, 640)]), [9, 300]);
    assert_eq!(
        lines([both_lines(9, 5, 12), both_lines(300, 4, 11)]),
        [9, 300]
    );
    // It could be either: line 9, or line 1153.
    assert_eq!(lines([both_lines(9, 4, 11), both_lines(9, 4, 11)]), [0, 0]);
    assert!(lines([0, 0]).iter().all(|line| *line == 0));
}

#[test]
fn data_of_another_shape_is_no_table() {
    let mut data = table();
    data.halves(&[0x68 - 0x58 + 1, 7 << 12, 0x68 - 0x60, 9 << 12]);
    data.halves(&[10]).bytes(b"A.go\0\0a.ml\0");
    for (offset, byte) in [
        // The count, a return address, a frame size, a root.
        (0x10, 4),
        (0x28, 0x11),
        (0x30, 20),
        (0x34, 9 << 1),
    ] {
        let mut damaged = data.0.clone();
        damaged[offset] = byte;
        assert_eq!(calls(&damaged), [], "{offset:#x}");
    }
}

#[test]
fn reading_of_texts_without_end_is_limited() {
    let mut data = b"known\0".to_vec();
    data.resize(1 << 18, b'x');
    let mut texts = Texts::of(&data);
    let known = TextPlace { offset: 0, len: 5 };
    assert_eq!(texts.at(0), Some(known));
    let all = texts.left;
    assert!((6..data.len()).all(|offset| texts.at(offset).is_none()));
    assert!(all > data.len() && texts.left == 0);
    // A text that was read before needs no more reading.
    assert_eq!(texts.at(0), Some(known));
}

#[test]
fn relocations_give_addresses_of_the_file() {
    let mut data = Data::default();
    data.words(&[0; 4]);
    let relocation = |at, addend, is_relative| Relocation {
        at: FileAddr(at),
        addend: FileAddr(addend),
        is_relative,
    };
    let table = [
        relocation(0x1008, 0x77, true),
        relocation(0x1010, 0x78, false),
        // Before the data, and across their end.
        relocation(0xfff, 1, true),
        relocation(0x101c, 1, true),
    ];
    relocate(&mut data.0, FileAddr(0x1000), table.into_iter());
    let mut expected = Data::default();
    expected.words(&[0, 0x77, 0, 0]);
    assert_eq!(data.0, expected.0);
}

#[test]
fn calls_of_every_form_are_recognised() {
    for call in [
        &[0xe8, 1, 2, 3, 4][..],
        &[0xff, 0x15, 1, 2, 3, 4],
        &[0xff, 0xd0],
        &[0x41, 0xff, 0xd4],
        &[0xff, 0x53, 8],
        &[0x41, 0xff, 0x94, 0x24, 1, 0, 0, 0],
    ] {
        assert!(ends_with_call(call), "{call:x?}");
    }
    for other in [&[][..], &[0xe8], &[0x90; 8], &[0xff, 0xe0], &[0xff]] {
        assert!(!ends_with_call(other), "{other:x?}");
    }
}

proptest! {
    #![proptest_config(properties(500))]

    #[test]
    fn any_data_are_read_or_skipped(
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
        len in any::<prop::sample::Index>(),
    ) {
        let mut data = table();
        data.halves(&[0x68 - 0x58 + 1, 7 << 12, 0x68 - 0x60, 9 << 12]);
        data.halves(&[10]).bytes(b"A.go\0\0a.ml\0");
        for (index, byte) in damages {
            let at = index.index(data.0.len());
            data.0[at] = byte;
        }
        data.0.truncate(len.index(data.0.len() + 1));
        for call in calls_in(&data.0, &code()) {
            prop_assert!(call.function.offset + call.function.len <= data.0.len());
            prop_assert!(call.file.offset + call.file.len <= data.0.len());
        }
    }
}
