//! [`ArgumentNames`]: what the arguments of sites are called, from the notes that ppx_probe writes beside those of the sites.
//!
//! ```text
//! section .note.ocaml_probes   owner "ocaml-probes\0"   type 0x100
//! desc:  u64 pc   u64 base   then for each argument: name\0
//! ```
//!
//! Updates do not depend on them, so a note that is too short is no error: it and the notes after it are left out.

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::elf::note::{self, RawNote};

use super::gather::{base_address, prelink_shift, printable};

const SECTION: &str = ".note.ocaml_probes";
const OWNER: &[u8] = b"ocaml-probes\0";
const KIND: u32 = 0x100;
/// The length of the addresses, in bytes.
const ADDRESSES_LEN: usize = 16;

/// The names of the arguments of sites.
#[derive(Debug, Default)]
pub(super) struct ArgumentNames {
    /// The site of each note and where its names begin in `strings`, by address.
    starts: Vec<(FileAddr, u32)>,
    /// The names, each followed by a NUL; an empty name marks the end of those of a note.
    strings: Vec<u8>,
}

impl ArgumentNames {
    /// Reads the notes of a file.
    pub(super) fn read(elf: &ElfFile) -> ArgumentNames {
        let section = elf.whole_section(SECTION).unwrap_or_default();
        ArgumentNames::of_section(&section, base_address(elf))
    }

    /// Reads the notes in the bytes of a section, of a file whose `.stapsdt.base` is at `base`.
    fn of_section(section: &[u8], base: Option<FileAddr>) -> ArgumentNames {
        let mut names = ArgumentNames::default();
        for note in note::raw_notes(section).filter(is_ours) {
            let Some((addresses, strings)) = note.description.split_at_checked(ADDRESSES_LEN)
            else {
                break;
            };
            let (pc, noted_base) = (note::long(addresses, 0), note::long(addresses, 8));
            let shift = prelink_shift(noted_base, base);
            let start = names.strings.len() as u32;
            names.strings.extend_from_slice(strings);
            // The first NUL ends the last name if it has none of its own; the second one is the empty name after it.
            names.strings.extend([0, 0]);
            let site = FileAddr(pc.wrapping_add(shift));
            names.starts.push((site, start));
        }
        names.starts.sort_unstable();
        names
    }

    /// Returns the names of the arguments of a site, in order, up to the first that cannot be printed; none if the site has no note.
    pub(super) fn of(&self, site: FileAddr) -> impl Iterator<Item = &str> {
        let found = self.starts.binary_search_by_key(&site, |(site, _)| *site);
        let start = found.ok().map(|index| self.starts[index].1);
        let strings = start.map_or(&[][..], |start| &self.strings[start as usize..]);
        let names = strings.split(|byte| *byte == 0);
        names
            .take_while(|name| !name.is_empty())
            .map_while(printable)
    }
}

fn is_ours(note: &RawNote<'_>) -> bool {
    (note.kind, note.owner) == (KIND, OWNER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::properties;

    /// Where `.stapsdt.base` was when the notes below were written, and is in the file.
    const BASE: u64 = 0x20e0;

    fn note(owner: &[u8], pc: u64, strings: &[u8]) -> Vec<u8> {
        let description = [&pc.to_le_bytes(), &BASE.to_le_bytes(), strings].concat();
        let mut bytes = Vec::new();
        for word in [owner.len() as u32, description.len() as u32, KIND] {
            bytes.extend(word.to_le_bytes());
        }
        for part in [owner, &description] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn names(section: &[u8], site: u64) -> Vec<String> {
        let names = ArgumentNames::of_section(section, Some(FileAddr(BASE)));
        names.of(FileAddr(site)).map(str::to_owned).collect()
    }

    #[test]
    fn each_site_has_its_names() {
        let section = [
            note(OWNER, 0x3000, b"x\0M.y\0"),
            note(b"other\0", 0x2000, b"z\0"),
            note(OWNER, 0x1000, b"request\0"),
            note(OWNER, 0x4000, b""),
        ]
        .concat();
        assert_eq!(names(&section, 0x3000), ["x", "M.y"]);
        assert_eq!(names(&section, 0x1000), ["request"]);
        for without in [0x2000, 0x4000, 0x5000] {
            assert!(names(&section, without).is_empty());
        }
        // Prelinked.
        let moved = ArgumentNames::of_section(&section, Some(FileAddr(BASE + 0x100)));
        assert_eq!(moved.of(FileAddr(0x1100)).next(), Some("request"));
    }

    #[test]
    fn malformed_names_are_left_out() {
        let good = note(OWNER, 0x1000, b"x\0");
        let unended = note(OWNER, 0x2000, b"y");
        let control = note(OWNER, 0x3000, b"a\0\x1b[31m\0b\0");
        let section = [unended, control, good.clone()].concat();
        assert_eq!(names(&section, 0x2000), ["y"]);
        assert_eq!(names(&section, 0x3000), ["a"]);
        assert_eq!(names(&section, 0x1000), ["x"]);
        let cut = &good[..good.len() - 8];
        assert!(names(cut, 0x1000).is_empty());
    }

    proptest::proptest! {
        #![proptest_config(properties(256))]

        #[test]
        fn any_bytes_give_names_or_none(section: Vec<u8>, strings: Vec<u8>) {
            names(&section, 0x1000);
            let found = names(&note(OWNER, 0x1000, &strings), 0x1000);
            proptest::prop_assert!(found.iter().all(|name| !name.contains(char::is_control)));
        }
    }
}
