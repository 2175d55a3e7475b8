//! Generates probe notes, and the smallest ELF files that contain them.

use std::fs::File;
use std::io::Write;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// A note as a compiler would write it.
#[derive(Clone, Debug)]
pub(crate) struct NoteSpec {
    pub(crate) owner: &'static [u8],
    pub(crate) kind: u32,
    pub(crate) pc: u64,
    pub(crate) base: u64,
    pub(crate) semaphore: u64,
    /// Provider, name and arguments, with their NULs.
    pub(crate) strings: Vec<u8>,
}

impl NoteSpec {
    pub(crate) fn new(provider: &str, name: &str, arguments: &str) -> NoteSpec {
        NoteSpec {
            owner: b"stapsdt\0",
            kind: 3,
            pc: 0x561ee,
            base: 0x20e0,
            semaphore: 0x4070,
            strings: format!("{provider}\0{name}\0{arguments}\0").into_bytes(),
        }
    }

    pub(crate) fn at(mut self, pc: u64, semaphore: u64) -> NoteSpec {
        (self.pc, self.semaphore) = (pc, semaphore);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut desc = Vec::new();
        for address in [self.pc, self.base, self.semaphore] {
            desc.extend(address.to_le_bytes());
        }
        desc.extend(&self.strings);
        let mut note = Vec::new();
        for word in [self.owner.len() as u32, desc.len() as u32, self.kind] {
            note.extend(word.to_le_bytes());
        }
        for part in [self.owner, &desc] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }
}

/// An ELF file of these parts:
///
/// ```text
/// header, 2 segments, 9 sections, their names | notes | base | .probes | text | symbols
/// ```
#[derive(Clone, Debug)]
pub(crate) struct ProgramSpec {
    pub(crate) notes: Vec<u8>,
    /// Length of `.probes` in bytes; its address is [`ProgramSpec::PROBES`].
    pub(crate) probes: usize,
    pub(crate) text: Vec<u8>,
    pub(crate) text_address: u64,
    /// The length of the text segment in its program header; that of `text`, if `None`.
    pub(crate) text_len: Option<u64>,
    /// Symbols of `.symtab`, which a stripped file does not have, and their addresses.
    pub(crate) symbols: Vec<(String, u64)>,
    /// Symbols of `.dynsym`, which the file exports, and their addresses.
    pub(crate) exported: Vec<(String, u64)>,
}

impl ProgramSpec {
    pub(crate) const TEXT: u64 = 0x40_1000;
    pub(crate) const PROBES: u64 = 0x40_3000;
    pub(crate) const BASE: u64 = 0x40_2000;

    const NAMES: &[u8] = b"\0.note.stapsdt\0.stapsdt.base\0.probes\0.shstrtab\0\
        .symtab\0.strtab\0.dynsym\0.dynstr\0";
    const HEADERS: usize = 64 + 2 * 56 + 9 * 64;

    pub(crate) fn new(notes: &[NoteSpec], text: &[u8]) -> ProgramSpec {
        let notes_with_base = notes.iter().map(|note| NoteSpec {
            base: ProgramSpec::BASE,
            ..note.clone()
        });
        ProgramSpec {
            notes: notes_with_base.flat_map(|note| note.bytes()).collect(),
            probes: 16,
            text: text.to_vec(),
            text_address: ProgramSpec::TEXT,
            text_len: None,
            symbols: Vec::new(),
            exported: Vec::new(),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let name = |name: &[u8]| {
            let position = ProgramSpec::NAMES
                .windows(name.len())
                .position(|part| part == name);
            position.unwrap() as u64
        };
        let names_at = ProgramSpec::HEADERS as u64;
        let notes_at = names_at + ProgramSpec::NAMES.len() as u64;
        let base_at = notes_at + self.notes.len() as u64;
        let probes_at = base_at + 1;
        let text_at = probes_at + self.probes as u64;
        let text_len = self.text_len.unwrap_or(self.text.len() as u64);
        let tables = [&self.symbols, &self.exported].map(|symbols| symbol_table(symbols));
        let mut table_at = text_at + self.text.len() as u64;
        let table_ranges = tables.each_ref().map(|parts| {
            parts.each_ref().map(|part| {
                table_at += part.len() as u64;
                (table_at - part.len() as u64, part.len() as u64)
            })
        });

        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]); // ET_EXEC, x86-64, version 1
        for word in [ProgramSpec::TEXT, 64, 64 + 2 * 56] {
            file.extend(u64::to_le_bytes(word));
        }
        file.extend([0, 0, 0, 0]);
        for half in [64u16, 56, 2, 64, 9, 4] {
            file.extend(half.to_le_bytes());
        }
        // PT_LOAD, flags, offset, address twice, length in the file and in memory, alignment
        for (flags, offset, address, len) in [
            (5u32, text_at, self.text_address, text_len),
            (6, probes_at, ProgramSpec::PROBES, self.probes as u64),
        ] {
            file.extend([1, 0, 0, 0]);
            file.extend(flags.to_le_bytes());
            for word in [offset, address, address, len, len, 1] {
                file.extend(word.to_le_bytes());
            }
        }
        file.resize(file.len() + 64, 0);
        let probes = self.probes as u64;
        let [symtab, dynsym] = table_ranges;
        let without_address = |(at, len)| [0, at, len];
        let sections: [(&[u8], u32, [u64; 3]); 8] = [
            (
                b".note.stapsdt\0",
                7,
                [0, notes_at, self.notes.len() as u64],
            ),
            (b".stapsdt.base\0", 1, [ProgramSpec::BASE, base_at, 1]),
            (b".probes\0", 1, [ProgramSpec::PROBES, probes_at, probes]),
            (
                b".shstrtab\0",
                3,
                [0, names_at, ProgramSpec::NAMES.len() as u64],
            ),
            (b".symtab\0", 2, without_address(symtab[0])),
            (b".strtab\0", 3, without_address(symtab[1])),
            (b".dynsym\0", 11, without_address(dynsym[0])),
            (b".dynstr\0", 3, without_address(dynsym[1])),
        ];
        for (label, kind, [address, offset, len]) in sections {
            file.extend((name(label) as u32).to_le_bytes());
            file.extend(kind.to_le_bytes());
            for word in [0, address, offset, len, 0, 1, 0] {
                file.extend(u64::to_le_bytes(word));
            }
        }
        assert_eq!(file.len(), ProgramSpec::HEADERS);
        file.extend(ProgramSpec::NAMES);
        file.extend(&self.notes);
        file.push(0);
        file.resize(file.len() + self.probes, 0);
        file.extend(&self.text);
        file.extend(tables.iter().flatten().flatten());
        file
    }
}

/// Returns the bytes of a table of absolute symbols, and of its string table; both are empty if there are no symbols.
fn symbol_table(symbols: &[(String, u64)]) -> [Vec<u8>; 2] {
    if symbols.is_empty() {
        return [Vec::new(), Vec::new()];
    }
    let (mut table, mut names) = (vec![0; 24], vec![0]);
    for (name, address) in symbols {
        table.extend((names.len() as u32).to_le_bytes());
        table.extend([0, 0, 0xf1, 0xff]);
        table.extend(address.to_le_bytes());
        table.extend([0; 8]);
        names.extend(name.as_bytes());
        names.push(0);
    }
    [table, names]
}

/// Returns a memfd that contains these bytes.
pub(crate) fn memory_file(bytes: &[u8]) -> File {
    let mut file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
    file.write_all(bytes).unwrap();
    file
}
