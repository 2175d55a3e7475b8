//! OCaml's frametables: for each return address, what the garbage collector and backtraces have to know, with `-g`
//! also the file, the line and the function. strip(1) keeps them, because they are data; it removes only the symbols
//! that say where they are. Here they are recognised by their shape.
//!
//! A table is a count (8 bytes) and that many descriptors, aligned to 8 bytes (caml/stack.h of OCaml 4.11 to 4.14,
//! caml/frame_descriptors.h of 5.0 to 5.4):
//!
//! ```text
//! return address     8 bytes; position independent files have relocations for it
//! frame size         2 bytes; bit 0: has debuginfo, bit 1: allocates; 0xffff: a return to C, with neither
//! number of roots    2 bytes
//! roots              2 bytes each: an offset in the frame, or 2 × a register + 1
//! if it allocates    1 byte n, and n bytes: the lengths of the allocations
//! if it has debuginfo, aligned to 4: 4 bytes, or n times 4 bytes if it allocates: the distance to a debuginfo
//! ```
//!
//! A debuginfo is two words of 4 bytes (runtime/backtrace_nat.c). If bit 0 of the first is set, another one follows,
//! for the function that this one was inlined into: the last is for the function that exists. Bits 2 to 25 of its first
//! word are the distance to 4 bytes, the distance from there to the file's name, which the function's name follows. The
//! second word, and the last six bits of the first one, have the line and columns, in one of two formats (asmcomp/emitaux.ml), from the
//! highest bit to the lowest:
//!
//! ```text
//! one line     OCaml 4   line 20   column 8   end's column 10
//! both lines   OCaml 5   0    line 12   lines more 3   column 6   end's column 7   from the first line to the end's 9
//!                        1    line 19   lines more 18            the columns are before the name
//! ```
//!
//! No field says which it is. Most words make sense in one of them only: an end is not before its beginning, and on the
//! same line the distance is 0. If the words of a file do not tell, it has names and no lines.

use std::collections::HashMap;

use crate::address::{CodeRange, FileAddr};
use crate::elf::relocations::Relocation;
use crate::elf::segment_index::SegmentIndex;
use crate::elf::{ElfFile, Linking, Segment};
use crate::numbers::{u16_at, u32_at, u64_at};
use crate::site::{LONGEST_CALL, ends_with_call};

/// The shortest descriptor.
const SHORTEST: usize = 16;

/// How many functions may be inlined into each other at one place.
const MAX_INLINED: usize = 256;

/// A call in OCaml code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallSite {
    pub(super) return_address: FileAddr,
    /// The function that makes the call, as it exists in the code.
    pub(super) function: TextPlace,
    pub(super) file: TextPlace,
    /// From 1; `None` if it is not known in which format it is.
    pub(super) line: Option<u32>,
}

/// A text in the data of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TextPlace {
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The data of a file with the calls that its frametables describe, in the order of their addresses.
#[derive(Default)]
pub(super) struct Frametables {
    pub(super) data: Vec<u8>,
    pub(super) calls: Vec<CallSite>,
}

/// Reads the frametables of a file; what is damaged is not recognised.
pub(super) fn frametables(elf: &ElfFile) -> Frametables {
    let Some((address, _)) = elf.section_range(".data") else {
        return Frametables::default();
    };
    let Some(mut data) = elf.whole_section(".data") else {
        return Frametables::default();
    };
    relocate(&mut data, address, elf.relocations());
    let calls = calls_in(&data, &CodeSegments::of(elf));
    Frametables { data, calls }
}

/// Whether the frametables may have calls of one of these functions, which do not overlap and are in order: only if
/// some word of the data is the address after a call in one of them.
pub(super) fn may_have_calls(elf: &ElfFile, functions: &[CodeRange]) -> bool {
    /// So many addresses are looked at, each in a read of its own; with more, the answer is yes.
    const MAX_READS: usize = 256;
    let (Some(first), Some(last)) = (functions.first(), functions.last()) else {
        return false;
    };
    let (first, last) = (first.start, last.end());
    let is_inside = |address: u64| {
        let next = functions.partition_point(|it| it.start.0 < address);
        let before = next.checked_sub(1).map(|at| functions[at]);
        // The call may be the last instruction.
        before.is_some_and(|it| address <= it.end())
    };
    let mut left = MAX_READS;
    let mut is_return = |address: FileAddr| {
        if address <= first || address.0 > last || !is_inside(address.0) {
            return false;
        }
        left = left.saturating_sub(1);
        left == 0 || is_after_call(elf, address)
    };
    let mut relocations = elf.relocations().filter(|it| it.is_relative);
    if relocations.any(|it| is_return(it.addend)) {
        return true;
    }
    // Otherwise the words of the file are no addresses.
    let has_addresses = elf.linking() == Linking::Fixed || elf.has_section(".relr.dyn");
    let data = has_addresses.then(|| elf.whole_section(".data")).flatten();
    let data = data.unwrap_or_default();
    let mut words = (0..data.len()).step_by(8);
    words.any(|at| u64_at(&data, at).is_some_and(|word| is_return(FileAddr(word))))
}

/// Whether a call may end at `address`, as the file has it.
fn is_after_call(elf: &ElfFile, address: FileAddr) -> bool {
    let Some(start) = address.0.checked_sub(LONGEST_CALL as u64) else {
        return true;
    };
    let mut bytes = [0; LONGEST_CALL];
    let read = elf.read_address(FileAddr(start), &mut bytes);
    read.is_none() || ends_with_call(&bytes)
}

/// The calls that tables in `data` describe, in the order of their addresses.
fn calls_in(data: &[u8], code: &CodeSegments) -> Vec<CallSite> {
    let places = find_debuginfos(data, code);
    let raw: Vec<RawCall> = places.iter().filter_map(|place| place.call(data)).collect();
    // A program has one runtime, and so one format.
    let format = LineFormat::of(raw.iter().map(|call| call.location));
    let mut texts = Texts::of(data);
    let calls = raw
        .iter()
        .filter_map(|call| call.resolve(&mut texts, format));
    let mut calls: Vec<CallSite> = calls.collect();
    calls.sort_by_key(|call| call.return_address);
    calls
}

/// Writes addresses of the file where the loader will write addresses of the process.
fn relocate(data: &mut [u8], address: FileAddr, relocations: impl Iterator<Item = Relocation>) {
    for Relocation { at, addend, .. } in relocations.filter(|it| it.is_relative) {
        let at = (at.0.checked_sub(address.0)).and_then(|at| usize::try_from(at).ok());
        let field = at.and_then(|at| data.get_mut(at..)?.get_mut(..8));
        if let Some(field) = field {
            field.copy_from_slice(&addend.0.to_le_bytes());
        }
    }
}

/// The code of a file, without the segments that [`ElfFile::read_wanted`] leaves out.
struct CodeSegments {
    each: Vec<(Segment, Vec<u8>)>,
    index: SegmentIndex,
}

impl CodeSegments {
    fn of(elf: &ElfFile) -> CodeSegments {
        CodeSegments::new(elf.read_wanted(|it| it.executable).collect())
    }

    fn new(each: Vec<(Segment, Vec<u8>)>) -> CodeSegments {
        let segments: Vec<Segment> = each.iter().map(|(segment, _)| *segment).collect();
        let index = SegmentIndex::of_code(&segments);
        CodeSegments { each, index }
    }

    /// Whether a call ends at `address`.
    fn is_after_call(&self, address: u64) -> bool {
        let before = || {
            let index = self.index.find(FileAddr(address.checked_sub(1)?), 1)?;
            let (segment, bytes) = self.each.get(index)?;
            let end = usize::try_from(address - segment.start.0).ok()?;
            let code = bytes.get(..end)?;
            Some(&code[end.saturating_sub(LONGEST_CALL)..])
        };
        before().is_some_and(ends_with_call)
    }
}

/// Where a descriptor says that the debuginfo of its return address is.
struct DebuginfoPlace {
    return_address: u64,
    offset: usize,
}

/// The debuginfos of all descriptors in `data`.
fn find_debuginfos(data: &[u8], code: &CodeSegments) -> Vec<DebuginfoPlace> {
    let mut found = Vec::new();
    // In bytes. Each descriptor is read once; more is read only of hostile data, with many tables that are valid
    // almost to their ends.
    let mut budget = 4 * data.len();
    let mut at = 0;
    while let Some(count) = u64_at(data, at) {
        let is_possible = (1..=data.len() as u64 / SHORTEST as u64).contains(&count);
        let table = is_possible
            .then(|| read_table(data, at + 8, count as usize, code, &mut budget))
            .flatten();
        match table {
            Some((places, end)) => {
                found.extend(places);
                at = end;
            }
            None => at += 8,
        }
        if budget == 0 {
            break;
        }
    }
    found
}

/// Reads a table's descriptors, which begin at `at`; returns what they say and where they end. `None` if it is none.
fn read_table(
    data: &[u8],
    mut at: usize,
    count: usize,
    code: &CodeSegments,
    budget: &mut usize,
) -> Option<(Vec<DebuginfoPlace>, usize)> {
    let mut places = Vec::new();
    for _ in 0..count {
        let descriptor = Descriptor::read(data, at, code, budget)?;
        if let Some(offset) = descriptor.debuginfo {
            places.push(DebuginfoPlace {
                return_address: descriptor.return_address,
                offset,
            });
        }
        at = descriptor.end;
    }
    Some((places, at))
}

struct Descriptor {
    return_address: u64,
    /// Where its debuginfo is in the data.
    debuginfo: Option<usize>,
    /// Where the next descriptor begins.
    end: usize,
}

impl Descriptor {
    /// Takes from `budget` how many bytes it reads, once it looks like a descriptor.
    fn read(
        data: &[u8],
        start: usize,
        code: &CodeSegments,
        budget: &mut usize,
    ) -> Option<Descriptor> {
        const RETURN_TO_C: u16 = 0xffff;
        let return_address = u64_at(data, start)?;
        let frame = u16_at(data, start + 8)?;
        let roots = usize::from(u16_at(data, start + 10)?);
        if frame != RETURN_TO_C && (frame & !3) % 8 != 0 || !code.is_after_call(return_address) {
            return None;
        }
        let Some(rest) = budget.checked_sub(SHORTEST + 2 * roots) else {
            *budget = 0;
            return None;
        };
        *budget = rest;
        let mut at = start + 12;
        for _ in 0..roots {
            let root = u16_at(data, at)?;
            if root & 1 == 0 && (root % 8 != 0 || root >= frame) {
                return None;
            }
            at += 2;
        }
        let mut debuginfo = None;
        if frame != RETURN_TO_C {
            let mut debuginfos = 1;
            if frame & 2 != 0 {
                debuginfos = usize::from(*data.get(at)?);
                at += 1 + debuginfos;
            }
            if frame & 1 != 0 {
                at = at.next_multiple_of(4);
                for _ in 0..debuginfos {
                    let distance = u32_at(data, at)? as usize;
                    if distance != 0 {
                        debuginfo = debuginfo.or(at.checked_add(distance));
                    }
                    at += 4;
                }
            }
        }
        let end = at.next_multiple_of(8);
        (end <= data.len().next_multiple_of(8)).then_some(Descriptor {
            return_address,
            debuginfo,
            end,
        })
    }
}

/// A call as its debuginfo has it.
struct RawCall {
    return_address: u64,
    location: Location,
}

/// The two words of a debuginfo.
#[derive(Clone, Copy)]
struct Location {
    /// Where it is in the data.
    offset: usize,
    words: [u32; 2],
}

impl DebuginfoPlace {
    /// Returns the debuginfo of the function that exists, which is the last.
    fn call(&self, data: &[u8]) -> Option<RawCall> {
        let mut offset = self.offset;
        for _ in 0..MAX_INLINED {
            let words = [u32_at(data, offset)?, u32_at(data, offset.checked_add(4)?)?];
            if words[0] & 1 == 0 {
                return Some(RawCall {
                    return_address: self.return_address,
                    location: Location { offset, words },
                });
            }
            offset = offset.checked_add(8)?;
        }
        None
    }
}

/// How lines and columns are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineFormat {
    OneLine,
    BothLines,
    Unknown,
}

impl LineFormat {
    /// Finds out in which format these are: nearly all of them make sense in it, and some do not in the other one.
    fn of(locations: impl Iterator<Item = Location>) -> LineFormat {
        /// How many times more locations must make no sense in the other format: those that a preprocessor has made may
        /// make sense in neither.
        const TIMES_WORSE: usize = 8;
        let (mut against_one, mut against_both) = (0_usize, 0_usize);
        for location in locations {
            if location.is_partly_packed() {
                return LineFormat::BothLines;
            }
            against_one += usize::from(!location.makes_sense_with_one_line());
            against_both += usize::from(!location.makes_sense_with_both_lines());
        }
        if against_both > against_one * TIMES_WORSE {
            LineFormat::OneLine
        } else if against_one > against_both * TIMES_WORSE {
            LineFormat::BothLines
        } else {
            LineFormat::Unknown
        }
    }
}

impl Location {
    /// Whether the end is not before its beginning, in the format with one line.
    fn makes_sense_with_one_line(self) -> bool {
        let [low, high] = self.words;
        let (line, column) = (high >> 12, high >> 4 & 0xff);
        let end = (high & 0xf) << 6 | low >> 26;
        line > 0 && column <= end
    }

    /// Whether the end is not before its beginning, in the format with both lines, if it is not partly packed.
    fn makes_sense_with_both_lines(self) -> bool {
        let [low, high] = self.words;
        let (line, more) = (high >> 19, high >> 16 & 7);
        let (column, end) = (high >> 10 & 0x3f, high >> 3 & 0x7f);
        let distance = (high & 7) << 6 | low >> 26;
        // Each line has an end of its own.
        line > 0
            && match more {
                0 => distance == 0 && column <= end,
                _ => distance >= more,
            }
    }

    /// Whether the columns did not fit into the two words, which OCaml 5 marks in the last bit. In OCaml 4 it is
    /// the first bit of the line, and no file has so many lines.
    fn is_partly_packed(self) -> bool {
        self.words[1] >> 31 == 1
    }
}

impl RawCall {
    fn resolve(&self, texts: &mut Texts<'_>, format: LineFormat) -> Option<CallSite> {
        let Location { offset, words } = self.location;
        let info = offset.checked_add((words[0] & 0x03ff_fffc) as usize)?;
        // The columns, 8 bytes, come before the name if they are not in the words.
        let columns = if self.location.is_partly_packed() {
            8
        } else {
            0
        };
        let name = info.checked_add(4 + columns)?;
        let line = match format {
            LineFormat::OneLine => Some(words[1] >> 12),
            LineFormat::BothLines if columns > 0 => Some(words[1] >> 12 & 0x7_ffff),
            LineFormat::BothLines => Some(words[1] >> 19),
            LineFormat::Unknown => None,
        };
        if line == Some(0) {
            return None;
        }
        let distance = u32_at(texts.data, info)? as i32;
        let file = info.checked_add_signed(distance as isize)?;
        Some(CallSite {
            return_address: FileAddr(self.return_address),
            function: texts.at(name)?,
            file: texts.at(file)?,
            line,
        })
    }
}

/// The texts of the data.
struct Texts<'d> {
    data: &'d [u8],
    /// Those that were looked for, by their offsets: many calls are in one function, and in one file.
    known: HashMap<usize, Option<TextPlace>>,
    /// How many bytes may still be read. Texts of real data do not overlap.
    left: usize,
}

impl Texts<'_> {
    fn of(data: &[u8]) -> Texts<'_> {
        Texts {
            data,
            known: HashMap::new(),
            left: 4 * data.len(),
        }
    }

    /// The text at an offset, up to its NUL: a name that can be shown.
    fn at(&mut self, offset: usize) -> Option<TextPlace> {
        if let Some(known) = self.known.get(&offset) {
            return *known;
        }
        let rest = self.data.get(offset..)?;
        let rest = &rest[..rest.len().min(super::MAX_SYMBOL).min(self.left)];
        let end = memchr::memchr(0, rest);
        self.left -= end.unwrap_or(rest.len());
        let text = end.filter(|&len| len > 0).and_then(|len| {
            let text = std::str::from_utf8(&rest[..len]).ok()?;
            let is_shown = !text.chars().any(char::is_control);
            is_shown.then_some(TextPlace { offset, len })
        });
        self.known.insert(offset, text);
        text
    }
}

#[cfg(test)]
mod tests;
