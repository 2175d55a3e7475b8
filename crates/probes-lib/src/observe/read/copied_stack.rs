//! [`CopiedStack`]: the stack of a thread at one moment, such as that of a hit.

use crate::address::LiveAddr;
use crate::observe::layout::stack_copies::{
    BYTES, COUNT, MAX_BYTES, PART_LIST, PARTS, R12, R13, R14, R15, RBP, RBX, STACK_POINTER,
};
use crate::observe::read::ring::word;
use crate::unwind::memory::StackMemory;
use crate::unwind::registers::{self, FrameRegisters};

/// DWARF's numbers of the registers that are recorded, and where they are.
const RECORDED: [(usize, u64); 7] = [
    (registers::RSP, STACK_POINTER),
    (registers::RBX, RBX),
    (registers::RBP, RBP),
    (12, R12),
    (13, R13),
    (14, R14),
    (15, R15),
];

/// The stack of a hit, as it was then: registers and bytes. [`Stacks::of_hit`](crate::Stacks::of_hit) finds its frames.
///
/// [`HitStack`](crate::HitStack) has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedStack {
    /// In a place of their own, so that events are small.
    registers: Box<FrameRegisters>,
    /// What is copied: an address, and the bytes there.
    parts: Vec<(u64, Vec<u8>)>,
}

impl CopiedStack {
    /// Reads what the trampoline of the point `at` has recorded, which ends with the bytes that it has copied, or later;
    /// `None` if no trampoline writes such a record.
    pub(crate) fn parse(record: &[u8], at: LiveAddr) -> Option<CopiedStack> {
        let count = word(record, COUNT) as u32;
        let mut bytes = record.get(BYTES as usize..)?;
        if u64::from(count) > PARTS {
            return None;
        }
        let mut parts = Vec::new();
        for index in 0..u64::from(count) {
            let entry = PART_LIST + 16 * index;
            let len = word(record, entry + 8);
            if len > MAX_BYTES {
                return None;
            }
            let (part, rest) = bytes.split_at_checked(len as usize)?;
            parts.push((word(record, entry), part.to_vec()));
            bytes = rest;
        }
        let mut registers = FrameRegisters::new(at.0, 0);
        for (register, offset) in RECORDED {
            registers.set(register, Some(word(record, offset)));
        }
        Some(CopiedStack {
            registers: Box::new(registers),
            parts,
        })
    }

    /// The registers of a thread, and the bytes from its stack pointer on.
    pub(crate) fn of_thread(registers: FrameRegisters, stack: &[u8]) -> CopiedStack {
        let top = registers.get(registers::RSP);
        CopiedStack {
            registers: Box::new(registers),
            parts: top.map(|top| (top, stack.to_vec())).into_iter().collect(),
        }
    }

    /// The registers at the hit.
    pub(crate) fn registers(&self) -> FrameRegisters {
        *self.registers
    }

    /// Returns whether this is the word that was last popped.
    pub(crate) fn is_popped(&self, at: LiveAddr) -> bool {
        let top = self.registers.get(registers::RSP);
        top.and_then(|top| top.checked_sub(8)) == Some(at.0)
    }

    /// Returns the stack with the word that was last popped.
    pub(crate) fn with_popped(&self, word: u64) -> CopiedStack {
        let mut copied = self.clone();
        let top = self.registers.get(registers::RSP);
        if let Some(at) = top.and_then(|top| top.checked_sub(8)) {
            copied.parts.push((at, word.to_le_bytes().to_vec()));
        }
        copied
    }

    /// Returns the stack as memory; what is not on it is read from `code`, if it is code.
    pub(crate) fn over<'c, M>(&'c self, code: M) -> OverCode<'c, M> {
        OverCode {
            stack: self,
            words: Vec::new(),
            code,
        }
    }
}

/// A copied stack as memory, and what is read elsewhere: code that has not changed since.
pub(crate) struct OverCode<'c, M> {
    stack: &'c CopiedStack,
    /// The words of it that were read: their addresses, and what they are.
    words: Vec<(u64, u64)>,
    code: M,
}

impl<M> OverCode<'_, M> {
    /// Returns the words of the stack that were read: their addresses, and what they are.
    pub(crate) fn words(&self) -> &[(u64, u64)] {
        &self.words
    }
}

impl<M: StackMemory> StackMemory for OverCode<'_, M> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        for (start, part) in &self.stack.parts {
            let offset = at
                .checked_sub(*start)
                .and_then(|it| usize::try_from(it).ok());
            let Some(rest) = offset.and_then(|offset| part.get(offset..)) else {
                continue;
            };
            if let Some(found) = rest.get(..bytes.len()) {
                bytes.copy_from_slice(found);
                if let Ok(word) = found.try_into() {
                    self.words.push((at, u64::from_le_bytes(word)));
                }
                return Some(());
            }
        }
        self.code.read(at, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::layout::stack_copies::LEN;

    struct Nothing;

    impl StackMemory for Nothing {
        fn read(&mut self, _: u64, _: &mut [u8]) -> Option<()> {
            None
        }
    }

    fn record(parts: &[(u64, u64)]) -> Vec<u8> {
        let mut record = vec![0; LEN as usize];
        let mut put = |at: u64, word: u64| {
            record[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        };
        put(STACK_POINTER, 0x7000);
        put(R15, 15);
        put(COUNT - 4, (parts.len() as u64) << 32);
        for (index, (at, len)) in (0..).zip(parts) {
            put(PART_LIST + 16 * index, *at);
            put(PART_LIST + 16 * index + 8, *len);
        }
        for at in 0..MAX_BYTES / 8 {
            put(BYTES + 8 * at, at);
        }
        record
    }

    #[test]
    fn parts_are_read_where_they_were() {
        let record = record(&[(0x7000, 16), (0x100, 8)]);
        let stack = CopiedStack::parse(&record, LiveAddr(0x4000)).unwrap();
        assert_eq!(stack.registers().ip, 0x4000);
        assert_eq!(stack.registers().get(registers::RSP), Some(0x7000));
        assert_eq!(stack.registers().get(15), Some(15));
        let mut memory = stack.over(Nothing);
        assert_eq!(memory.word(0x7000), Some(0));
        assert_eq!(memory.word(0x7008), Some(1));
        assert_eq!(memory.word(0x100), Some(2));
        for not_copied in [0x6ff8, 0x700c, 0x7010, 0xf8, 0x108, u64::MAX - 3] {
            assert_eq!(memory.word(not_copied), None);
        }
    }

    #[test]
    fn any_record_can_be_read() {
        let parse = |record: &[u8]| CopiedStack::parse(record, LiveAddr(0));
        assert!(parse(&record(&[(0, MAX_BYTES)])).is_some());
        assert!(parse(&record(&[(u64::MAX, 8); 64])).is_some());
        assert!(parse(&record(&[(0, 8); 65])).is_none());
        assert!(parse(&record(&[(0, MAX_BYTES + 1)])).is_none());
        assert!(parse(&record(&[(0, MAX_BYTES), (0, 8)])).is_none());
        assert!(parse(&record(&[(0, u64::MAX)])).is_none());
        assert!(parse(&[]).is_none());
        assert!(parse(&[0xff; LEN as usize]).is_none());
    }
}
