//! The code that counts a hit by its key, in a table of the thread's group ([`layout`](crate::observe::layout::keys)).
//!
//! ```text
//! calculate what arguments make of the key, in r8 and rcx; its hash in rdx
//! slot of the hash    the same state and the same key: count a hit there
//!                     free: claim it, write the key, then the state, and count
//!                     else the next one, a few times; then elsewhere, as one of the others
//! ```
//!
//! Where each key has a histogram, no hit is counted in the slot: its number is that of the histogram.
//!
//! A signal handler that interrupts this finds a claimed slot at most, and passes it over. Strings of OCaml cannot move
//! meanwhile; another domain or thread may write to one, and then its hit has a key that is a mixture.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmMemoryOperand, AsmRegister64, CodeAssembler, CodeLabel, al, byte_ptr, dword_ptr, eax, edi,
    esi, qword_ptr, r8, r8d, r9, r9d, rax, rbx, rdi, rdx, rsi, rsp,
};

use super::at_point::PointContext;
use super::emit::{load, offset, spread_of, word_at};
use super::filter;
use crate::expression::typed::{KeyPart, Text};
use crate::observe::layout::keys::{self, KeysLayout, TRIED, histograms, slot, text};
use crate::observe::layout::rows::STACK_PART_BITS;
use crate::observe::layout::shared::TID_AT;
use crate::observe::role::KeyRole;

/// An odd number near 2⁶⁴ divided by the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// By how many bits a hash is rotated after each word, so that its well mixed bits are multiplied next.
const ROTATED: u32 = 29;

/// The last word of the block of a string of 64 bytes: it holds no byte of the string. Its last byte says that the 7
/// bytes before it are padding.
const LAST_OF_WHOLE: u64 = 7 << 56;

/// Emits the code that makes the hash of a key in rdx; no two keys of a single integer have the same. Goes to `untyped`
/// if a hit has no key. Changes all registers that are saved where hits are timed.
pub(super) fn hash(
    a: &mut CodeAssembler,
    role: &KeyRole,
    context: PointContext,
    untyped: CodeLabel,
) -> Result<(), IcedError> {
    KeyCode::begin(a, role, false, context, untyped)?.hash()
}

/// Emits the code that counts a hit by its key; goes to `untyped` if it has none, and to `other` if there is no room
/// for it. Changes all registers that are saved where hits are timed.
pub(super) fn count(
    a: &mut CodeAssembler,
    role: &KeyRole,
    context: PointContext,
    untyped: CodeLabel,
    other: CodeLabel,
) -> Result<(), IcedError> {
    let mut code = KeyCode::begin(a, role, false, context, untyped)?;
    code.hash()?;
    code.find(0, other)?;
    a.lock().inc(word_at(rbx, slot::HITS))
}

/// Emits the code that puts in r8 the number of the histogram of a hit's key: that of other keys if there is no room
/// for it. The values of the histogram may be negative if `is_signed`. Goes to `untyped` if the hit has no key. Changes
/// all registers that are saved where hits are timed.
pub(super) fn histogram(
    a: &mut CodeAssembler,
    role: &KeyRole,
    is_signed: bool,
    context: PointContext,
    untyped: CodeLabel,
) -> Result<(), IcedError> {
    let mut other = a.create_label();
    let mut found = a.create_label();
    let mut code = KeyCode::begin(a, role, false, context, untyped)?;
    code.hash()?;
    code.find(u64::from(is_signed) << slot::SIGN_OF_VALUES_AT, other)?;
    number(a, context)?;
    a.mov(r8, rax)?;
    a.jmp(found)?;
    a.set_label(&mut other)?;
    let of_other = if is_signed {
        histograms::OTHER_SIGNED
    } else {
        histograms::OTHER
    };
    a.mov(r8d, of_other)?;
    a.set_label(&mut found)?;
    a.nop()
}

/// Emits the code that puts in rax the number of the histogram of the key of a time: that of other keys if there is no
/// room for it, that of times without a key if it has none. Keeps r8, where the time is.
pub(super) fn histogram_of_time(
    a: &mut CodeAssembler,
    role: &KeyRole,
    context: PointContext,
) -> Result<(), IcedError> {
    let (mut other, mut untyped) = (a.create_label(), a.create_label());
    let mut found = a.create_label();
    let mut code = KeyCode::begin(a, role, true, context, untyped)?;
    code.hash()?;
    code.find(0, other)?;
    number(a, context)?;
    a.jmp(found)?;
    a.set_label(&mut other)?;
    a.mov(eax, histograms::OTHER)?;
    a.jmp(found)?;
    a.set_label(&mut untyped)?;
    a.mov(eax, histograms::UNTYPED_TIMES)?;
    a.set_label(&mut found)?;
    a.nop()
}

/// Emits the code that puts in rax the number of the slot in rbx: its distance from the first one, in units of its
/// length.
fn number(a: &mut CodeAssembler, context: PointContext) -> Result<(), IcedError> {
    load(a, rax, context.shared)?;
    a.add(rax, offset(context.layout.keys()))?;
    a.sub(rbx, rax)?;
    a.imul_3(rax, rbx, reciprocal(context.layout.keys))?;
    a.shr(rax, RECIPROCAL_BITS)
}

/// A distance times the reciprocal of the length of a slot, shifted by so many bits, is the number of the slot.
const RECIPROCAL_BITS: u32 = 26;

fn reciprocal(layout: KeysLayout) -> i32 {
    ((1 << RECIPROCAL_BITS) / layout.slot_len().max(1) + 1) as i32
}

struct KeyCode<'r, 'a> {
    a: &'a mut CodeAssembler,
    role: &'r KeyRole,
    context: PointContext,
    untyped: CodeLabel,
    /// What holds each part, if a register does.
    held: Vec<Option<AsmRegister64>>,
    /// Where each part is in a slot.
    places: Vec<i32>,
}

impl<'r, 'a> KeyCode<'r, 'a> {
    /// Emits the code that loads what arguments make of the key.
    fn begin(
        a: &'a mut CodeAssembler,
        role: &'r KeyRole,
        beside_r8: bool,
        context: PointContext,
        untyped: CodeLabel,
    ) -> Result<KeyCode<'r, 'a>, IcedError> {
        let kinds = role.kinds();
        let places = keys::parts(&kinds).map(|it| it.start as i32).collect();
        let held = filter::key(a, role, beside_r8, context, untyped)?;
        Ok(KeyCode {
            a,
            role,
            context,
            untyped,
            held,
            places,
        })
    }

    /// The parts, each with what holds it and where it is.
    fn parts(&self) -> Vec<(KeyPart, Option<AsmRegister64>, i32)> {
        let parts = self.role.parts.iter().cloned();
        let parts = parts.zip(self.held.iter().copied());
        let parts = parts.zip(&self.places);
        parts.map(|((part, held), at)| (part, held, *at)).collect()
    }

    /// Emits the code that makes the hash of the key in rdx. Uses rax, rsi, rdi and r9.
    fn hash(&mut self) -> Result<(), IcedError> {
        self.a.mov(rsi, SPREAD)?;
        // Not 0, so that a first 0 makes a difference.
        self.a.mov(rdx, rsi)?;
        for (part, held, _) in self.parts() {
            match (&part, held) {
                // The same at each hit of the point.
                (KeyPart::Probe, _) => {
                    self.a.mov(eax, self.role.name)?;
                    self.mix(rax)?;
                }
                (KeyPart::Text(text), Some(block)) => {
                    self.words(text, block)?;
                    self.mix(r9)?;
                    self.for_each_word(text, block, |code| code.mix(rax))?;
                }
                (_, Some(held)) => self.mix(held)?,
                (part, None) => {
                    self.load(part)?;
                    self.mix(rax)?;
                }
            }
        }
        // The highest bits choose the slot: back to where they depend on all bits of the last word.
        self.a.rol(rdx, 64 - ROTATED)
    }

    /// Emits the code that adds a word to the hash.
    fn mix(&mut self, word: AsmRegister64) -> Result<(), IcedError> {
        self.a.xor(rdx, word)?;
        self.a.imul_2(rdx, rsi)?;
        // A bit of the product depends only on bits of the word up to its own: so the highest ones are rotated down.
        self.a.rol(rdx, ROTATED)
    }

    /// Emits the code that loads a part that no register holds into rax.
    fn load(&mut self, part: &KeyPart) -> Result<(), IcedError> {
        match part {
            KeyPart::Caller => self.a.mov(rax, qword_ptr(rsp + self.context.pushed)),
            KeyPart::Thread => {
                // There may be no thread control block.
                self.a.rdfsbase(rax)?;
                self.a.test(rax, rax)?;
                self.a.je(self.untyped)?;
                load(self.a, rdi, self.context.shared)?;
                self.a.mov(edi, dword_ptr(rdi + offset(TID_AT)))?;
                self.a.mov(eax, dword_ptr(rax + rdi))
            }
            _ => self.a.mov(eax, self.role.name),
        }
    }

    /// Emits the code that puts in r9 the length of a string, as a slot has it ([`text`]). Uses rdi.
    fn words(&mut self, text: &Text, block: AsmRegister64) -> Result<(), IcedError> {
        match text {
            Text::Ocaml(_) => self.words_of_block(block),
            Text::C(_) => self.bytes_of_c(block),
        }
    }

    /// Emits the code of [`KeyCode::words`] for a string of C. The string may become longer meanwhile.
    fn bytes_of_c(&mut self, first: AsmRegister64) -> Result<(), IcedError> {
        let mut next = self.a.create_label();
        let mut known = self.a.create_label();
        self.a.xor(r9d, r9d)?;
        self.a.set_label(&mut next)?;
        self.a.cmp(byte_ptr(first + r9), 0)?;
        self.a.je(known)?;
        self.a.inc(r9d)?;
        self.a.cmp(r9d, text::MAX_READ as i32)?;
        self.a.jbe(next)?;
        self.a.set_label(&mut known)?;
        self.a.add(r9d, text::OF_C as i32)
    }

    /// Emits the code of [`KeyCode::words`] for a string of OCaml.
    fn words_of_block(&mut self, block: AsmRegister64) -> Result<(), IcedError> {
        let mut known = self.a.create_label();
        let mut longer = self.a.create_label();
        self.a.mov(r9, qword_ptr(block - 8))?;
        self.a.shl(r9, 8)?;
        self.a.shr(r9, 18)?;
        self.a.cmp(r9, text::WORDS as i32)?;
        self.a.jbe(known)?;
        self.a.cmp(r9, text::WHOLE as i32)?;
        self.a.jne(longer)?;
        self.a.mov(rdi, LAST_OF_WHOLE)?;
        self.a.cmp(qword_ptr(block + 8 * text::WORDS as i32), rdi)?;
        self.a.je(known)?;
        self.a.set_label(&mut longer)?;
        self.a.mov(r9d, text::LONGER as u32)?;
        self.a.set_label(&mut known)?;
        self.a.nop()
    }

    /// Emits a loop over the words of a string that a slot has, as many as r9 says: `word` finds each in rax, and its
    /// number in rdi.
    fn for_each_word(
        &mut self,
        text: &Text,
        block: AsmRegister64,
        word: impl Fn(&mut Self) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        match text {
            Text::Ocaml(_) => self.for_each_word_of_block(block, word),
            Text::C(_) => self.for_each_word_of_c(block, word),
        }
    }

    /// Emits the code of [`KeyCode::for_each_word`] for a string of C. No byte after the end of the string is read.
    fn for_each_word_of_c(
        &mut self,
        first: AsmRegister64,
        word: impl Fn(&mut Self) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let mut next = self.a.create_label();
        let mut last = self.a.create_label();
        let mut next_byte = self.a.create_label();
        let mut end = self.a.create_label();
        self.a.sub(r9d, text::OF_C as i32)?;
        self.a.mov(edi, text::MAX_READ as u32)?;
        self.a.cmp(r9d, edi)?;
        self.a.cmova(r9d, edi)?;
        self.a.xor(edi, edi)?;
        self.a.set_label(&mut next)?;
        self.a.lea(eax, dword_ptr(rdi * 8 + 8))?;
        self.a.cmp(eax, r9d)?;
        self.a.ja(last)?;
        self.a.mov(rax, qword_ptr(first + rdi * 8))?;
        word(self)?;
        self.a.inc(edi)?;
        self.a.jmp(next)?;

        self.a.set_label(&mut last)?;
        self.a.shl(edi, 3)?;
        self.a.sub(r9d, edi)?;
        self.a.je(end)?;
        self.a.add(rdi, first)?;
        self.a.xor(eax, eax)?;
        self.a.set_label(&mut next_byte)?;
        self.a.shl(rax, 8)?;
        self.a.mov(al, byte_ptr(rdi + r9 - 1))?;
        self.a.dec(r9d)?;
        self.a.jne(next_byte)?;
        self.a.sub(rdi, first)?;
        self.a.shr(edi, 3)?;
        word(self)?;
        self.a.set_label(&mut end)?;
        self.a.nop()
    }

    /// Emits the code of [`KeyCode::for_each_word`] for a string of OCaml.
    fn for_each_word_of_block(
        &mut self,
        block: AsmRegister64,
        word: impl Fn(&mut Self) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let mut next = self.a.create_label();
        self.a.mov(edi, text::WORDS as u32)?;
        self.a.cmp(r9d, edi)?;
        self.a.cmova(r9d, edi)?;
        self.a.xor(edi, edi)?;
        self.a.set_label(&mut next)?;
        self.a.mov(rax, qword_ptr(block + rdi * 8))?;
        word(self)?;
        self.a.inc(edi)?;
        self.a.cmp(edi, r9d)?;
        self.a.jb(next)
    }

    /// Emits the code that puts in rbx the address of the slot for the hash in rdx, whose state has these bits as well.
    fn find(&mut self, bits: u64, other: CodeLabel) -> Result<(), IcedError> {
        let mut next = self.a.create_label();
        let mut is_other = self.a.create_label();
        let mut same = self.a.create_label();
        let mut found = self.a.create_label();
        let layout = self.context.layout.keys;
        let slot_len = layout.slot_len() as i32;
        let signs = u64::from(self.role.signs()) << slot::SIGNS_AT | bits;
        load(self.a, rbx, self.context.shared)?;
        if layout.group_bits() > 0 {
            self.a.mov(rax, rsp)?;
            self.a.shr(rax, STACK_PART_BITS)?;
            spread_of(self.a, eax, eax, layout.group_bits())?;
            self.a.imul_3(rax, rax, layout.copy_len() as i32)?;
            self.a.add(rbx, rax)?;
        }
        self.a.mov(rax, rdx)?;
        self.a.shr(rax, 64 - layout.slots_bits())?;
        self.a.imul_3(rax, rax, slot_len)?;
        let table = offset(self.context.layout.keys());
        self.a.lea(rbx, qword_ptr(rbx + rax + table))?;
        self.a.and(rdx, -(1 << slot::HASH_AT))?;
        self.a.or(rdx, (signs | slot::HELD) as i32)?;
        self.a.mov(esi, TRIED as u32)?;

        self.a.set_label(&mut next)?;
        self.a.mov(rax, word_at(rbx, slot::STATE))?;
        self.a.cmp(rax, rdx)?;
        self.a.je(same)?;
        self.a.test(rax, rax)?;
        self.a.jne(is_other)?;
        self.a
            .lea(rdi, qword_ptr(rdx - (slot::HELD - slot::CLAIMED)))?;
        self.a.lock().cmpxchg(word_at(rbx, slot::STATE), rdi)?;
        // Another thread was faster.
        self.a.jne(next)?;
        self.write()?;
        self.a.mov(word_at(rbx, slot::STATE), rdx)?;
        self.a.jmp(found)?;

        self.a.set_label(&mut is_other)?;
        self.a.add(rbx, slot_len)?;
        self.a.dec(esi)?;
        self.a.jne(next)?;
        self.a.jmp(other)?;

        self.a.set_label(&mut same)?;
        self.compare(is_other)?;
        // The code that follows is at this label.
        self.a.set_label(&mut found)
    }

    /// Emits the code that writes the key into the slot. Uses rax, rdi and r9.
    fn write(&mut self) -> Result<(), IcedError> {
        for (part, held, at) in self.parts() {
            match (&part, held) {
                (KeyPart::Text(text), Some(block)) => {
                    self.words(text, block)?;
                    self.a.mov(in_slot(at), r9)?;
                    self.for_each_word(text, block, |code| {
                        code.a.mov(qword_ptr(rbx + rdi * 8 + (at + 8)), rax)
                    })?;
                }
                (_, Some(held)) => self.a.mov(in_slot(at), held)?,
                (part, None) => {
                    self.load(part)?;
                    self.a.mov(in_slot(at), rax)?;
                }
            }
        }
        Ok(())
    }

    /// Emits the code that goes to `differs` if the slot has another key. Uses rax, rdi and r9.
    fn compare(&mut self, differs: CodeLabel) -> Result<(), IcedError> {
        for (part, held, at) in self.parts() {
            match (&part, held) {
                (KeyPart::Text(text), Some(block)) => {
                    self.words(text, block)?;
                    self.a.cmp(in_slot(at), r9)?;
                    self.a.jne(differs)?;
                    self.for_each_word(text, block, |code| {
                        code.a.cmp(qword_ptr(rbx + rdi * 8 + (at + 8)), rax)?;
                        code.a.jne(differs)
                    })?;
                }
                (_, Some(held)) => {
                    self.a.cmp(in_slot(at), held)?;
                    self.a.jne(differs)?;
                }
                (part, None) => {
                    self.load(part)?;
                    self.a.cmp(in_slot(at), rax)?;
                    self.a.jne(differs)?;
                }
            }
        }
        Ok(())
    }
}

fn in_slot(at: i32) -> AsmMemoryOperand {
    qword_ptr(rbx + at)
}

#[cfg(test)]
mod tests;
