//! Relocations: the words of a file to which the dynamic loader writes addresses.
//!
//! Source: elf(5), `Elf64_Rela`; the generic ABI, `SHT_RELR`.

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::numbers::u64_at;

/// The length of an entry: offset, type and symbol, addend.
const RELA_LEN: usize = 24;

/// The type of an entry whose word becomes the load bias plus the addend.
const R_X86_64_RELATIVE: u32 = 8;

/// An entry of `.rela.dyn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Relocation {
    /// The word that the loader writes.
    pub(crate) at: FileAddr,
    /// What is added to the load bias, or to the address of a symbol.
    pub(crate) addend: FileAddr,
    /// Whether it is added to the load bias.
    pub(crate) is_relative: bool,
}

impl ElfFile {
    /// Returns the entries of `.rela.dyn`; none if there is no such section, or it cannot be read.
    pub(crate) fn relocations(&self) -> impl Iterator<Item = Relocation> + use<> {
        let bytes = self.whole_section(".rela.dyn").unwrap_or_default();
        let count = bytes.len() / RELA_LEN;
        (0..count).map(move |index| Relocation::of(&bytes[index * RELA_LEN..]))
    }

    /// Returns the addresses of the words that `.relr.dyn` names: the loader adds the load bias to what they hold. A
    /// file can name the same word many times.
    pub(crate) fn packed_relocations(&self) -> impl Iterator<Item = FileAddr> + use<> {
        packed(self.whole_section(".relr.dyn").unwrap_or_default())
    }
}

impl Relocation {
    fn of(entry: &[u8]) -> Relocation {
        Relocation {
            at: FileAddr(word_at(entry, 0)),
            addend: FileAddr(word_at(entry, 16)),
            is_relative: word_at(entry, 8) as u32 == R_X86_64_RELATIVE,
        }
    }
}

/// Returns the addresses that entries of `.relr.dyn` name. An even entry is an address; an odd one is a bitmap of which
/// of the next 63 words are relocated as well.
fn packed(entries: Vec<u8>) -> impl Iterator<Item = FileAddr> {
    let mut next = 0_u64;
    (0..entries.len() / 8).flat_map(move |index| {
        let entry = word_at(&entries, index * 8);
        let is_address = entry % 2 == 0;
        let first = if is_address { entry } else { next };
        let count = if is_address { 1 } else { 63 };
        next = first.wrapping_add(8 * count);
        let is_named = move |bit: &u64| is_address || entry & 2 << bit != 0;
        let named = (0..count).filter(is_named);
        named.map(move |bit| FileAddr(first.wrapping_add(8 * bit)))
    })
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    u64_at(bytes, at).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_name_the_next_words() {
        let words = [0x1000_u64, 0b1011, 1 | 1 << 63, 3, 0x9000, 1, 3];
        let entries: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
        let cut = &entries[..entries.len() - 1];
        let second = 0x1008 + 63 * 8;
        let mut expected = vec![0x1000, 0x1008, 0x1018, second + 62 * 8, second + 63 * 8];
        expected.push(0x9000);
        let found = |entries: &[u8]| packed(entries.to_vec()).map(|it| it.0).collect::<Vec<_>>();
        assert_eq!(found(cut), expected);
        expected.push(0x9008 + 63 * 8);
        assert_eq!(found(&entries), expected);
        assert_eq!(found(&u64::MAX.to_le_bytes()).len(), 63);
    }

    #[test]
    fn relative_relocations_are_distinguished() {
        for (info, is_relative) in [(8_u64, true), (1, false), (1 << 32 | 6, false)] {
            let entry: Vec<u8> = [0x1008, info, 0x77]
                .iter()
                .flat_map(|it| it.to_le_bytes())
                .collect();
            let expected = Relocation {
                at: FileAddr(0x1008),
                addend: FileAddr(0x77),
                is_relative,
            };
            assert_eq!(Relocation::of(&entry), expected);
        }
    }
}
