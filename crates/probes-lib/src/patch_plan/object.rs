//! What a planner is made of, read from an ELF file: its code, its functions and their cold parts, and the
//! addresses of code that its data hold.

use std::borrow::Cow;
use std::ops::Range;

use crate::address::{CodeRange, FileAddr};
use crate::elf::functions::FunctionTable;
use crate::elf::symbols::SymbolTable;
use crate::elf::table::noted_sites;
use crate::elf::{ElfFile, Linking, MAX_LOADED, Segment};
use crate::error::{ElfDefect, Error, FileError, Result};
use crate::numbers::u64_at;
use crate::patch_plan::code::{Code, Contents};
use crate::patch_plan::place::Swept;
use crate::patch_plan::{EntryPlanner, PatchPlanner};

impl PatchPlanner {
    /// Reads the code of a file, whose functions are those of `table`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is damaged.
    pub(crate) fn read(elf: &ElfFile, table: &FunctionTable) -> Result<PatchPlanner> {
        let swept = sweep(elf, table, None)?;
        Ok(PatchPlanner { swept })
    }
}

impl EntryPlanner<'static> {
    /// Reads the code of a file, to plan patches of the entries and instructions of `wanted` functions.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is damaged.
    pub(crate) fn read(
        elf: &ElfFile,
        table: &FunctionTable,
        wanted: &[CodeRange],
    ) -> Result<EntryPlanner<'static>> {
        let swept = sweep(elf, table, Some(wanted))?;
        let planner = Cow::Owned(PatchPlanner { swept });
        Ok(EntryPlanner { planner })
    }
}

/// Reads the code of a file, and sweeps what matters for `wanted` functions, or all.
fn sweep(elf: &ElfFile, table: &FunctionTable, wanted: Option<&[CodeRange]>) -> Result<Swept> {
    let mut code = Code::default();
    // Segments in the upper half of the address space are a kernel's.
    let segments = || elf.loaded().filter(|it| it.start.0 < 1 << 63);
    let len = segments().fold(0_u64, |len, it| len.saturating_add(it.file_len));
    if len > MAX_LOADED {
        let most = MAX_LOADED;
        let defect = ElfDefect::TooMuchCode { size: len, most };
        return Err(Error::of_file(elf.path(), FileError::Elf(defect)));
    }
    for segment in segments() {
        for (piece, contents) in pieces_of(elf, &segment) {
            let bytes = elf.read_segment(&piece)?;
            if !code.add_contents(piece.start, bytes, contents) {
                let defect = ElfDefect::TooManySegments(elf.loaded().count());
                return Err(Error::of_file(elf.path(), FileError::Elf(defect)));
            }
        }
    }
    let mut extra = relocated(elf, &mut code, len);
    if elf.linking() == Linking::Fixed {
        code.set_fixed();
    }
    for site in noted_sites(elf)? {
        code.add_foreign(site);
    }
    for sequence in restartable_sequences(elf, &code) {
        code.add_restartable(sequence);
    }
    for table in [SymbolTable::Static, SymbolTable::Dynamic] {
        if let Some(symbols) = elf.symbols(table)? {
            symbols.each(|symbol| {
                extra.push(FileAddr(symbol.st_value));
                Ok(())
            })?;
        }
    }
    let functions: Vec<CodeRange> = table.functions().map(|it| it.range()).collect();
    Ok(Swept::new(code, &functions, &table.parts(), extra, wanted))
}

/// Returns the code and the data of a segment apart: without `-z separate-code`, linkers put both into one.
fn pieces_of(elf: &ElfFile, segment: &Segment) -> Vec<(Segment, Contents)> {
    if !segment.executable {
        return vec![(*segment, Contents::Data)];
    }
    let inside = elf
        .code_sections()
        .filter(|(_, start, len)| *len > 0 && segment.holds_in_file(*start, *len));
    let mut sections: Vec<_> = inside.map(|(_, start, len)| (start.0, len)).collect();
    sections.sort_unstable();
    let end = segment.start.0.saturating_add(segment.file_len);
    let piece = |(range, contents): (Range<u64>, Contents)| {
        let piece = Segment {
            start: FileAddr(range.start),
            offset: segment.offset.saturating_add(range.start - segment.start.0),
            file_len: range.end - range.start,
            ..*segment
        };
        (piece, contents)
    };
    let ranges = ranges_of(segment.start.0..end, &sections);
    ranges.into_iter().map(piece).collect()
}

/// Returns the code and the data of a segment. The `sections` of code in it are pairs of an address and a length, in
/// order.
fn ranges_of(segment: Range<u64>, sections: &[(u64, u64)]) -> Vec<(Range<u64>, Contents)> {
    /// Of code, in one segment; real ones have about five.
    const MAX_SECTIONS: usize = 8;
    if sections.is_empty() || sections.len() > MAX_SECTIONS {
        return vec![(segment, Contents::Both)];
    }
    let mut at = segment.start;
    let mut ranges = Vec::new();
    for &(start, len) in sections {
        ranges.push((at..start, Contents::Data));
        ranges.push((at.max(start)..start.saturating_add(len), Contents::Code));
        at = at.max(start.saturating_add(len));
    }
    ranges.push((at..segment.end, Contents::Data));
    ranges.retain(|(range, _)| !range.is_empty());
    ranges
}

/// Returns the restartable sequences (rseq(2)) that a file has descriptors of, in the section that tcmalloc and
/// librseq use.
fn restartable_sequences(elf: &ElfFile, code: &Code) -> Vec<CodeRange> {
    /// Of a `struct rseq_cs`: the version (32 bits) and flags, the start, the length, where an interrupted thread
    /// continues.
    const LEN: u64 = 32;
    /// Real ones have some dozens of bytes, and a program some hundreds of them.
    const MAX_LEN: u64 = 4096;
    const MAX_COUNT: u64 = 4096;
    let Some((start, len)) = elf.section_range("__rseq_cs") else {
        return Vec::new();
    };
    let bytes = code.bytes(start.0, len.min(MAX_COUNT * LEN));
    let sequence = |descriptor: &[u8]| {
        let word = |at: usize| u64_at(descriptor, at);
        let (start, len) = (FileAddr(word(8)?), word(16)?);
        (word(0)? as u32 == 0 && len <= MAX_LEN).then_some(CodeRange { start, len })
    };
    let descriptors = bytes.chunks_exact(LEN as usize);
    descriptors.filter_map(sequence).collect()
}

/// Returns the addends of all relocations, and writes into the data those that the dynamic loader adds the load bias
/// to. The object has `len` bytes.
fn relocated(elf: &ElfFile, code: &mut Code, len: u64) -> Vec<FileAddr> {
    let mut addresses = Vec::new();
    for relocation in elf.relocations() {
        addresses.push(relocation.addend);
        if relocation.is_relative {
            code.relocate(relocation.at, relocation.addend);
        }
    }
    // The words of packed relocations hold their addends already.
    addresses.extend(words_of(code, elf.packed_relocations(), len));
    addresses
}

/// Returns what the words at `places` hold, as many as an object of `len` bytes can have.
fn words_of(
    code: &Code,
    places: impl Iterator<Item = FileAddr>,
    len: u64,
) -> impl Iterator<Item = FileAddr> {
    let word = |at: FileAddr| u64_at(code.bytes(at.0, 8), 0);
    let places = places.take(len as usize / 8);
    places.filter_map(word).map(FileAddr)
}

#[cfg(test)]
mod tests {
    use test_support::fixture;

    use super::*;
    use crate::error::ErrorKind;
    use crate::testing::{ProgramSpec, memory_file};

    #[test]
    fn files_with_too_much_code_are_refused() {
        let table = FunctionTable::read(fixture("calls.pie")).unwrap();
        let refusal = |len: u64| {
            let spec = ProgramSpec {
                text_len: Some(len),
                ..ProgramSpec::new(&[], b"")
            };
            let file = memory_file(&spec.bytes());
            let elf = ElfFile::read(file, "/srv/server.exe".into()).unwrap();
            let error = PatchPlanner::read(&elf, &table).unwrap_err();
            match error.kind() {
                ErrorKind::File(FileError::Elf(defect)) => format!("{defect:?}"),
                other => panic!("{other:?}"),
            }
        };
        // With the segment of semaphores.
        let most = MAX_LOADED - 16;
        let too_much = ElfDefect::TooMuchCode {
            size: MAX_LOADED + 1,
            most: MAX_LOADED,
        };
        assert_eq!(refusal(most + 1), format!("{too_much:?}"));
        // The file has no such bytes.
        assert!(refusal(most).starts_with("Truncated"));
    }

    #[test]
    fn segments_in_the_upper_half_are_left_out() {
        let table = FunctionTable::read(fixture("calls.pie")).unwrap();
        for (start, len) in [(ProgramSpec::TEXT, 1), ((1 << 63) - 1, 1), (1 << 63, 0)] {
            let spec = ProgramSpec {
                text_address: start,
                ..ProgramSpec::new(&[], b"\xc3")
            };
            let elf = ElfFile::read(memory_file(&spec.bytes()), "/srv/server.exe".into());
            let planner = PatchPlanner::read(&elf.unwrap(), &table).unwrap();
            assert_eq!(planner.code(FileAddr(start), 16).len(), len, "{start:x}");
        }
    }

    #[test]
    fn sections_of_code_are_distinguished_from_data() {
        use Contents::{Both, Code, Data};
        let ranges = |sections: &[(u64, u64)]| ranges_of(0x1000..0x2000, sections);
        let apart = [
            (0x1000..0x1100, Data),
            (0x1100..0x1180, Code),
            (0x1180..0x1200, Code),
            (0x1200..0x2000, Data),
        ];
        assert_eq!(ranges(&[(0x1100, 0x80), (0x1140, 0xc0)]), apart);
        let whole = (0x1000..0x2000, Code);
        assert_eq!(ranges(&[(0x1000, 0x1000)]), [whole]);
        let many: Vec<(u64, u64)> = (0..9).map(|it| (0x1000 + it * 0x100, 0x100)).collect();
        assert_eq!(ranges(&many[..8]).len(), 9);
        assert_eq!(ranges(&[]), [(0x1000..0x2000, Both)]);
        assert_eq!(ranges(&many), ranges(&[]));
    }

    #[test]
    fn packed_words_are_as_many_as_fit() {
        let mut code = Code::default();
        let words: Vec<u8> = (1..=4_u64).flat_map(u64::to_le_bytes).collect();
        code.add(FileAddr(0x1000), words, false);
        let places = (0x1000_u64..).step_by(8).map(FileAddr);
        let found: Vec<u64> = words_of(&code, places, 31).map(|it| it.0).collect();
        assert_eq!(found, [1, 2, 3]);
        let outside = [FileAddr(0x101c), FileAddr(0x2000)];
        assert_eq!(words_of(&code, outside.into_iter(), 64).count(), 0);
    }
}
