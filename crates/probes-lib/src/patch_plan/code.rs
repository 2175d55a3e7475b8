//! [`Code`]: the bytes of an object as they are loaded from its file, by address; and [`Body`], the
//! instructions of one function.

use std::ops::{Range, RangeInclusive};

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};

use crate::address::{CodeRange, FileAddr};
use crate::error::Refusal;
use crate::numbers::words;
use crate::patch_plan::address_set::AddressSet;
use crate::patch_plan::instruction::{ends_flow, has_near_target, is_call, is_straight};
use crate::patch_plan::mmx;

/// How many segments an object may have; real ones have four to ten.
const MAX_SEGMENTS: usize = 64;

/// The bytes of an object as its file has them, at the addresses of the file.
///
/// ```
/// use probes_lib::{Code, FileAddr};
///
/// // A function that only returns.
/// let mut code = Code::default();
/// code.add(FileAddr(0x1000), vec![0xc3], true);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Code {
    segments: Vec<CodeSegment>,
    /// Whether the object is loaded exactly where it was linked.
    is_fixed: bool,
    /// The bytes that others change.
    foreign: Vec<CodeRange>,
    /// See [`Code::add_restartable`].
    restartable: Vec<CodeRange>,
}

#[derive(Clone, Debug)]
struct CodeSegment {
    start: u64,
    bytes: Vec<u8>,
    contents: Contents,
}

/// What the bytes at some addresses are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    Data,
    Code,
    /// Executable, perhaps with jump tables among the code.
    Both,
}

impl CodeSegment {
    fn range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.bytes.len() as u64)
    }
}

impl Code {
    /// Adds bytes that are loaded at `start`. If segments overlap, the first one counts. Returns false, and leaves
    /// them out, after the 64th segment and in the upper half of the address space: functions there cannot be
    /// patched.
    ///
    /// ```
    /// use probes_lib::{Code, FileAddr};
    ///
    /// assert!(Code::default().add(FileAddr(0x1000), vec![0xc3], true));
    /// assert!(!Code::default().add(FileAddr(u64::MAX), vec![0xc3], true));
    /// ```
    pub fn add(&mut self, start: FileAddr, bytes: Vec<u8>, is_executable: bool) -> bool {
        let contents = if is_executable {
            Contents::Both
        } else {
            Contents::Data
        };
        self.add_contents(start, bytes, contents)
    }

    pub(super) fn add_contents(
        &mut self,
        start: FileAddr,
        bytes: Vec<u8>,
        contents: Contents,
    ) -> bool {
        let end = start.0.checked_add(bytes.len() as u64);
        if self.segments.len() == MAX_SEGMENTS || end.is_none_or(|end| end > 1 << 63) {
            return false;
        }
        self.segments.push(CodeSegment {
            start: start.0,
            bytes,
            contents,
        });
        true
    }

    /// Writes an address into data, as the dynamic loader does.
    pub(super) fn relocate(&mut self, at: FileAddr, address: FileAddr) {
        let Some(segment) = self
            .segments
            .iter_mut()
            .find(|it| it.range().contains(&at.0))
        else {
            return;
        };
        if segment.contents == Contents::Data {
            let offset = (at.0 - segment.start) as usize;
            if let Some(word) = segment.bytes.get_mut(offset..offset.saturating_add(8)) {
                word.copy_from_slice(&address.0.to_le_bytes());
            }
        }
    }

    /// Marks bytes that other tools change while the object is loaded, such as the sites of probes: they are neither
    /// displaced nor part of a jump.
    ///
    /// ```
    /// use probes_lib::{Code, CodeRange, FileAddr, PatchPlanner};
    ///
    /// // nop; mov $1,%eax; ret
    /// let mut code = Code::default();
    /// code.add(FileAddr(0x1000), b"\x90\xb8\x01\0\0\0\xc3".to_vec(), true);
    /// code.add_foreign(CodeRange { start: FileAddr(0x1000), len: 1 });
    /// let function = CodeRange { start: FileAddr(0x1000), len: 7 };
    /// let refusal = PatchPlanner::new(code, &[function], &[], []).function(function).entry;
    /// assert_eq!(refusal.unwrap_err().name(), "unmovable");
    /// ```
    pub fn add_foreign(&mut self, range: CodeRange) {
        self.foreign.push(range);
    }

    /// Marks a restartable sequence (rseq(2)): the kernel aborts it if a thread is interrupted in it, and does not
    /// recognize a copy elsewhere.
    pub(super) fn add_restartable(&mut self, range: CodeRange) {
        self.restartable.push(range);
    }

    /// Returns the bytes that others change.
    pub(super) fn foreign(&self) -> AddressSet {
        self.set_of(&self.foreign)
    }

    /// Returns the bytes of restartable sequences.
    pub(super) fn restartable(&self) -> AddressSet {
        self.set_of(&self.restartable)
    }

    fn set_of(&self, ranges: &[CodeRange]) -> AddressSet {
        if ranges.is_empty() {
            return AddressSet::new(std::iter::empty());
        }
        let mut set = AddressSet::new(self.executable());
        for code in self.executable() {
            for range in ranges {
                let inside = range.start.0.max(code.start)..range.end().min(code.end);
                inside.for_each(|address| set.insert(address));
            }
        }
        set
    }

    /// Marks the object as loaded at the addresses of its file, where nothing can be mapped in the first 64 KiB.
    pub fn set_fixed(&mut self) {
        self.is_fixed = true;
    }

    /// Returns the bytes from `address` on, `len` at most; fewer at the end of a segment.
    pub(super) fn bytes(&self, address: u64, len: u64) -> &[u8] {
        let segment = self
            .segments
            .iter()
            .find(|it| it.range().contains(&address));
        let rest = segment.and_then(|it| it.bytes.get((address - it.start) as usize..));
        let rest = rest.unwrap_or_default();
        &rest[..rest.len().min(usize::try_from(len).unwrap_or(usize::MAX))]
    }

    pub(super) fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    /// Returns the number of bytes of code.
    pub(super) fn len(&self) -> u64 {
        self.executable().map(|it| it.end - it.start).sum()
    }

    /// Returns the aligned words of all data.
    pub(super) fn data_words(&self) -> impl Iterator<Item = FileAddr> {
        let data = self
            .segments
            .iter()
            .filter(|it| it.contents != Contents::Code);
        data.flat_map(|it| {
            let unaligned = (it.start.wrapping_neg() % 8) as usize;
            let bytes = it.bytes.get(unaligned..).unwrap_or_default();
            words(bytes).map(FileAddr)
        })
    }

    /// Returns the ranges of the executable segments.
    pub(super) fn executable(&self) -> impl Iterator<Item = Range<u64>> {
        let executable = self
            .segments
            .iter()
            .filter(|it| it.contents != Contents::Data);
        executable.map(CodeSegment::range)
    }

    pub(super) fn is_executable(&self, address: u64) -> bool {
        self.executable().any(|range| range.contains(&address))
    }

    /// Returns whether an address is in code, or at the end of code, which is never reached.
    pub(super) fn is_label(&self, address: u64) -> bool {
        self.executable()
            .any(|range| (range.start..=range.end).contains(&address))
    }

    /// Returns whether tables may be at an address.
    pub(super) fn is_data(&self, address: u64) -> bool {
        let mut segments = self.segments.iter();
        let segment = segments.find(|it| it.range().contains(&address));
        segment.is_some_and(|it| it.contents != Contents::Code)
    }

    /// Returns whether memory might be mapped somewhere in these addresses, beside the object itself.
    pub(super) fn may_have_room(&self, window: &Range<i128>) -> bool {
        /// The addresses of user space, if `vm.mmap_min_addr` is 64 KiB, its default.
        const USER: Range<i128> = 0x1_0000..(1 << 47) - 0x1000;
        if self.is_fixed && (window.end <= USER.start || window.start >= USER.end) {
            return false;
        }
        let is_taken = |segment: &CodeSegment| {
            let range = segment.range();
            i128::from(range.start) <= window.start && window.end <= i128::from(range.end)
        };
        !self.segments.iter().any(is_taken)
    }

    /// Returns the instructions of a function.
    ///
    /// # Errors
    ///
    /// If it is too long, or some of its bytes are not executable bytes of the file, or no instruction.
    pub(super) fn body(&self, range: CodeRange) -> Result<Body, Refusal> {
        /// Of one function; the largest real ones, of interpreters and generated parsers, have less than 1 MiB.
        const MAX_LEN: u64 = 4 << 20;
        if range.len > MAX_LEN {
            return Err(Refusal::TooLarge { len: range.len });
        }
        let bytes = self.bytes(range.start.0, range.len);
        if bytes.is_empty() || (bytes.len() as u64) < range.len {
            return Err(Refusal::NotCode);
        }
        if !self.is_executable(range.start.0) {
            return Err(Refusal::NotCode);
        }
        let mut instructions = Vec::with_capacity(bytes.len() / 4);
        let (mut uses_mmx, mut has_calls) = (false, false);
        for instruction in decode_function(bytes, range.start.0) {
            if instruction.is_invalid() {
                let offset = instruction.ip() - range.start.0;
                return Err(Refusal::Undecodable { offset });
            }
            uses_mmx |= mmx::is_used_by(&instruction);
            has_calls |= is_call(&instruction);
            instructions.push(instruction);
        }
        Ok(Body {
            range,
            instructions,
            uses_mmx,
            with_owner: None,
            has_calls,
        })
    }
}

/// Decodes bytes that are at `address`, one instruction after the other. Bytes that are no instruction yield an invalid
/// one, and decoding goes on after it.
pub(super) fn decode(bytes: &[u8], address: u64) -> impl Iterator<Item = Instruction> {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    std::iter::from_fn(move || decoder.can_decode().then(|| decoder.decode()))
}

/// Same as [`decode`], for a function, which may have padding of one repeated byte after a call or jump. Decoded as
/// instructions, such bytes may run on into the code after the padding: if a jump leads to that code, decoding goes on
/// there.
pub(super) fn decode_function(bytes: &[u8], address: u64) -> impl Iterator<Item = Instruction> {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    let mut jumps = ForwardJumps::default();
    let mut padding_end = None;
    std::iter::from_fn(move || {
        if !decoder.can_decode() {
            return None;
        }
        let mut instruction = decoder.decode();
        if let Some(end) = padding_end {
            if instruction.ip() >= end {
                padding_end = None;
            } else if instruction.is_invalid() || instruction.next_ip() > end {
                padding_end = None;
                let position = usize::try_from(end - address).ok()?;
                decoder.set_position(position).ok()?;
                decoder.set_ip(end);
                instruction = decoder.decode();
            }
        }
        if is_call(&instruction) || ends_flow(&instruction) {
            let after = bytes.get(decoder.position()..).unwrap_or_default();
            let end = jumps.after_padding(after, instruction.next_ip());
            padding_end = end.or(padding_end);
        }
        jumps.add(&instruction);
        Some(instruction)
    })
}

/// The targets of the last few forward jumps.
#[derive(Default)]
struct ForwardJumps {
    targets: [u64; ForwardJumps::KEPT],
    next: usize,
}

impl ForwardJumps {
    const KEPT: usize = 16;

    fn add(&mut self, instruction: &Instruction) {
        if !has_near_target(instruction) || is_call(instruction) {
            return;
        }
        let target = instruction.near_branch_target();
        if target > instruction.next_ip() {
            self.targets[self.next % ForwardJumps::KEPT] = target;
            self.next += 1;
        }
    }

    /// Returns the nearest of these targets, if nothing but one repeated byte is between `address`, where `bytes`
    /// begin, and the target.
    fn after_padding(&self, bytes: &[u8], address: u64) -> Option<u64> {
        /// The least and the most bytes of padding.
        const LEN: RangeInclusive<u64> = 2..=63;
        let first = bytes.first()?;
        let bytes = bytes.iter().take(*LEN.end() as usize);
        let same = bytes.take_while(|it| *it == first).count() as u64;
        let is_padded = |target: &u64| {
            let len = target.wrapping_sub(address);
            LEN.contains(&len) && len <= same
        };
        self.targets.iter().copied().filter(is_padded).min()
    }
}

/// The instructions of a function, all of them valid. Padding between them may be left out.
#[derive(Clone, Debug)]
pub(super) struct Body {
    pub(super) range: CodeRange,
    pub(super) instructions: Vec<Instruction>,
    /// Whether any of them uses the MMX registers or the x87 unit.
    pub(super) uses_mmx: bool,
    /// For a part of a function: the instructions of the part and of the function, in order.
    with_owner: Option<Vec<Instruction>>,
    has_calls: bool,
}

impl Body {
    /// Makes this the body of a part of the function `owner`.
    pub(super) fn set_owner(&mut self, owner: &Body) {
        let mut both = [&owner.instructions[..], &self.instructions].concat();
        both.sort_unstable_by_key(Instruction::ip);
        self.with_owner = Some(both);
        // The rest of the function may have something in these registers.
        self.uses_mmx = true;
    }

    /// Returns the instructions that jumps within the function lead to, and the index among them of the one that has
    /// this `index` in the body.
    pub(super) fn flow(&self, index: usize) -> (&[Instruction], usize) {
        let (Some(both), Some(it)) = (&self.with_owner, self.instructions.get(index)) else {
            return (&self.instructions, index);
        };
        (both, both.partition_point(|other| other.ip() < it.ip()))
    }

    /// Returns the index of the instruction at `address`.
    pub(super) fn index_at(&self, address: u64) -> Option<usize> {
        let by_address = |it: &Instruction| it.ip().cmp(&address);
        self.instructions.binary_search_by(by_address).ok()
    }

    /// Returns whether the x87 unit may hold the result of a called function before this instruction: a function that
    /// does not use the unit may still return this result. Nothing is in the unit at its entry and at calls.
    pub(super) fn may_pass_on_result(&self, index: usize) -> bool {
        let (before, after) = self
            .instructions
            .split_at(index.min(self.instructions.len()));
        let is_entry = before.iter().all(|it| it.mnemonic() == Mnemonic::Endbr64);
        let next = after.iter().find(|it| !is_straight(it));
        !is_entry && !next.is_some_and(is_call) && self.has_calls
    }

    pub(super) fn offset(&self, instruction: &Instruction) -> u64 {
        instruction.ip() - self.range.start.0
    }
}
