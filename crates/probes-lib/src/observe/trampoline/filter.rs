//! The code that evaluates an expression ([`Filter`](crate::expression::Filter)) at a hit: it goes on if the answer
//! is yes, and jumps elsewhere if it is no, or untyped; the code that loads an integer
//! ([`IntegerExpression`](crate::expression::IntegerExpression)); and the code that loads the parts of a key. Its
//! loops, the search of the runtime's table and the shift of a denormal float, are bounded.
//!
//! Memory is read only where a table of pages says so ([`ValuePages`]): that of the runtime, or the observer's while it
//! is valid. What cannot be read is untyped. Integers in registers need neither table. Where the runtime's is used for
//! values, the observer's is used for the stack, valid or not: the frame of the point is mapped; where the table lacks
//! it, the kernel is asked. Strings of C, and arguments that may be anywhere in memory, need the observer's, valid, and
//! the consent of the kernel.

use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, byte_ptr, di, dil, dword_ptr, eax, ecx, edi, get_xmm,
    qword_ptr, r8, r9, r9b, r9d, rax, rbx, rcx, rdi, rdx, rsi, rsp, word_ptr,
};
use iced_x86::{IcedError, Register};

use super::at_point::{PointContext, low};
use super::emit::{load, offset, time};
use super::readable::{check_validity, unless_kernel_reads, unless_listed, unless_of_values};
use super::{SAVED_IF_COUNTED, SAVED_IF_TIMED, SavedRegister};
use crate::address::PAGE;
use crate::expression::typed::{
    Calculation, DOUBLE_ARRAY_TAG, DOUBLE_TAG, Float, INT_TAG, KeyPart, NO_SCAN_TAG, Number,
    Relation, STRING_TAG, Signedness, Test, Text, Word, block_of, last_compared, words_of,
};
use crate::observe::layout::keys::text;
use crate::observe::layout::shared::TID_AT;
use crate::observe::role::{ArgumentSource, FilterRole, IntegerRole, KeyRole};
use crate::observe::value_pages::ValuePages;

/// The registers that hold numbers. The first two are those that counting uses as well.
const POOL: [AsmRegister64; 5] = [rcx, rdx, rax, rsi, r8];

/// A jump of a test; where it does not jump, the code falls through.
#[derive(Clone, Copy)]
struct Branch {
    /// Whether it jumps if the test is true, or if it is false.
    when: bool,
    to: CodeLabel,
}

/// The code of a filter, being emitted.
struct FilterCode<'p, 'a> {
    a: &'a mut CodeAssembler,
    arguments: &'p [ArgumentSource],
    context: PointContext,
    untyped: CodeLabel,
}

/// Returns the registers that the code of a filter uses, which have to be saved before.
pub(super) fn saved(role: &FilterRole) -> &'static [SavedRegister] {
    saved_for(role.reads_memory(), registers(&role.filter.test))
}

/// Returns the registers that the code of an integer uses, which have to be saved before.
pub(super) fn saved_of_integer(role: &IntegerRole) -> &'static [SavedRegister] {
    saved_for(role.reads_memory(), role.integer.number.registers())
}

fn saved_for(reads_memory: bool, registers: usize) -> &'static [SavedRegister] {
    if reads_memory || registers > SAVED_IF_COUNTED.len() {
        &SAVED_IF_TIMED
    } else {
        &SAVED_IF_COUNTED
    }
}

/// Emits the code of a filter, which goes on if the answer is yes. Changes the [`saved`] registers.
pub(super) fn filter(
    a: &mut CodeAssembler,
    role: &FilterRole,
    context: PointContext,
    is_false: CodeLabel,
    untyped: CodeLabel,
) -> Result<(), IcedError> {
    let reads_memory = role.reads_memory();
    let mut code = FilterCode::begin(a, &role.arguments, reads_memory, context, untyped)?;
    let jump = Branch {
        when: false,
        to: is_false,
    };
    code.test(&role.filter.test, jump)?;
    // A label needs an instruction.
    code.a.nop()
}

/// Emits the code that loads an integer into rcx, or goes to `untyped`. Changes the [`saved_of_integer`] registers, but
/// not r8 if `beside_r8`: the number of a histogram is there.
pub(super) fn integer(
    a: &mut CodeAssembler,
    role: &IntegerRole,
    beside_r8: bool,
    context: PointContext,
    untyped: CodeLabel,
) -> Result<(), IcedError> {
    let reads_memory = role.reads_memory();
    let mut code = FilterCode::begin(a, &role.arguments, reads_memory, context, untyped)?;
    let number = &role.integer.number;
    code.unless_operands_readable(|index| number.has_argument(&|it| it == index))?;
    code.number(number, pool(beside_r8))
}

/// Emits the code that loads the parts of a key that arguments make, or goes to `untyped`. For a string it loads the
/// address of its block, for a string of C that of its first byte: as much of the string as a key has can be read.
/// Returns the register that holds each part. Changes the registers of [`SAVED_IF_TIMED`], but not r8 if `beside_r8`;
/// then arguments make at most one part.
pub(super) fn key(
    a: &mut CodeAssembler,
    role: &KeyRole,
    beside_r8: bool,
    context: PointContext,
    untyped: CodeLabel,
) -> Result<Vec<Option<AsmRegister64>>, IcedError> {
    let reads_memory = role.reads_memory();
    let mut code = FilterCode::begin(a, &role.arguments, reads_memory, context, untyped)?;
    let held = role.parts.iter().filter(|it| it.is_held()).count();
    let mut holders = holders(held).iter();
    let mut pool = pool(beside_r8).to_vec();
    let mut all = Vec::new();
    for part in &role.parts {
        // No more than one part is held yet, in r8.
        code.unless_operands_readable(|index| part.has_argument(&|it| it == index))?;
        match part {
            KeyPart::Number(number, _) => code.number(number, &pool)?,
            KeyPart::Text(Text::Ocaml(word)) => code.text(word, &pool)?,
            KeyPart::Text(Text::C(word)) => code.text_of_c(word, text::MAX_READ)?,
            KeyPart::Thread | KeyPart::Caller | KeyPart::Probe => {
                all.push(None);
                continue;
            }
        }
        let holder = holders.next().copied();
        if let Some(holder) = holder.filter(|holder| *holder != pool[0]) {
            code.a.mov(holder, pool[0])?;
            pool.retain(|it| *it != holder);
        }
        all.push(holder);
    }
    Ok(all)
}

/// The registers that hold numbers, with or without r8, which is the last of them.
fn pool(beside_r8: bool) -> &'static [AsmRegister64] {
    &POOL[..POOL.len() - usize::from(beside_r8)]
}

/// The registers that hold the parts of a key that arguments make, so many.
fn holders(many: usize) -> &'static [AsmRegister64] {
    const BOTH: [AsmRegister64; 2] = [r8, rcx];
    &BOTH[BOTH.len().saturating_sub(many)..]
}

/// Emits the code that loads the address of the shared data, which has the table of readable pages, into rbx; or 0 if
/// the table is needed for values, and is not valid now. Uses rax and rdx.
fn find_pages(a: &mut CodeAssembler, context: PointContext) -> Result<(), IcedError> {
    let mut is_valid = a.create_label();
    load(a, rbx, context.shared)?;
    if context.layout.value_pages != ValuePages::TableOfObserver {
        return Ok(());
    }
    time(a, rdx)?;
    check_validity(a, context.layout, [rdx, rax])?;
    a.jb(is_valid)?;
    // Nothing can be read.
    a.xor(rbx, rbx)?;
    a.set_label(&mut is_valid)?;
    a.nop()
}

/// Emits a jump to `untyped` unless the observer's table of pages is valid, as [`find_pages`] has found out if values
/// need it. Uses rax and rdx.
fn unless_valid(
    a: &mut CodeAssembler,
    context: PointContext,
    untyped: CodeLabel,
) -> Result<(), IcedError> {
    if context.layout.value_pages == ValuePages::TableOfObserver {
        a.test(rbx, rbx)?;
        return a.je(untyped);
    }
    time(a, rdx)?;
    check_validity(a, context.layout, [rdx, rax])?;
    a.jae(untyped)
}

/// Returns how many registers of the pool a test needs.
fn registers(test: &Test) -> usize {
    match test {
        Test::Constant(_) => 0,
        Test::Compare(_, _, one, other) => registers_of_both(one, other),
        // With what the table of pages needs, or the largest float.
        Test::CompareFloats(..) | Test::IsString(..) | Test::BeginsWith(..) => POOL.len(),
        Test::Not(test) => registers(test),
        Test::And(one, other) | Test::Or(one, other) => registers(one).max(registers(other)),
    }
}

fn registers_of_both(one: &Number, other: &Number) -> usize {
    if immediate(other).is_some() {
        return one.registers();
    }
    Number::registers_of_both(one, other)
}

/// Returns a literal that can be an operand of an instruction.
fn immediate(number: &Number) -> Option<i32> {
    match number {
        Number::Literal(number) => i32::try_from(*number as i64).ok(),
        _ => None,
    }
}

impl<'p, 'a> FilterCode<'p, 'a> {
    /// Emits what comes first if the code `reads_memory`.
    fn begin(
        a: &'a mut CodeAssembler,
        arguments: &'p [ArgumentSource],
        reads_memory: bool,
        context: PointContext,
        untyped: CodeLabel,
    ) -> Result<FilterCode<'p, 'a>, IcedError> {
        if reads_memory {
            find_pages(a, context)?;
        }
        Ok(FilterCode {
            a,
            arguments,
            context,
            untyped,
        })
    }

    /// Emits the code of a test, which falls through or jumps.
    fn test(&mut self, test: &Test, jump: Branch) -> Result<(), IcedError> {
        if !matches!(test, Test::Not(_) | Test::And(..) | Test::Or(..)) {
            self.unless_operands_readable(|index| test.has_argument(&|it| it == index))?;
        }
        let otherwise = |to| Branch {
            when: !jump.when,
            to,
        };
        match test {
            Test::Constant(holds) => {
                if *holds == jump.when {
                    self.a.jmp(jump.to)?;
                }
                Ok(())
            }
            Test::Not(test) => self.test(test, otherwise(jump.to)),
            Test::And(one, other) if !jump.when => {
                self.test(one, jump)?;
                self.test(other, jump)
            }
            Test::Or(one, other) if jump.when => {
                self.test(one, jump)?;
                self.test(other, jump)
            }
            Test::And(one, other) | Test::Or(one, other) => {
                let mut over = self.a.create_label();
                self.test(one, otherwise(over))?;
                self.test(other, jump)?;
                self.a.set_label(&mut over)?;
                self.a.nop()
            }
            Test::Compare(relation, signedness, one, other) => {
                self.compare(*relation, *signedness, one, other, jump)
            }
            Test::CompareFloats(relation, one, other) => {
                self.compare_floats(*relation, one, other, jump)
            }
            Test::IsString(Text::Ocaml(of), text) => self.is_string(of, text, jump),
            Test::BeginsWith(Text::Ocaml(of), text) => self.begins_with(of, text, jump),
            Test::IsString(Text::C(of), text) => self.compare_text_of_c(of, text, true, jump),
            Test::BeginsWith(Text::C(of), text) => self.compare_text_of_c(of, text, false, jump),
        }
    }

    fn compare(
        &mut self,
        relation: Relation,
        signedness: Signedness,
        one: &Number,
        other: &Number,
        jump: Branch,
    ) -> Result<(), IcedError> {
        if let Some(literal) = immediate(other) {
            self.number(one, &POOL)?;
            self.a.cmp(POOL[0], literal)?;
        } else {
            let (one, other) = self.both(one, other, &POOL)?;
            self.a.cmp(one, other)?;
        }
        self.jump_if(relation, signedness, jump)
    }

    /// Emits the jump after a comparison.
    fn jump_if(
        &mut self,
        relation: Relation,
        signedness: Signedness,
        Branch { when, to }: Branch,
    ) -> Result<(), IcedError> {
        let relation = if when { relation } else { inverse(relation) };
        let a = &mut self.a;
        match (relation, signedness) {
            (Relation::Equal, _) => a.je(to),
            (Relation::NotEqual, _) => a.jne(to),
            (Relation::Less, Signedness::Signed) => a.jl(to),
            (Relation::AtMost, Signedness::Signed) => a.jle(to),
            (Relation::Greater, Signedness::Signed) => a.jg(to),
            (Relation::AtLeast, Signedness::Signed) => a.jge(to),
            (Relation::Less, Signedness::Unsigned) => a.jb(to),
            (Relation::AtMost, Signedness::Unsigned) => a.jbe(to),
            (Relation::Greater, Signedness::Unsigned) => a.ja(to),
            (Relation::AtLeast, Signedness::Unsigned) => a.jae(to),
        }
    }

    /// Emits the code that loads two numbers into the first registers of a pool; returns which is where.
    fn both(
        &mut self,
        one: &Number,
        other: &Number,
        pool: &[AsmRegister64],
    ) -> Result<(AsmRegister64, AsmRegister64), IcedError> {
        // Of the first one, only the result is kept while the second one is calculated.
        if other.registers() > one.registers() {
            self.number(other, pool)?;
            self.number(one, &pool[1..])?;
            return Ok((pool[1], pool[0]));
        }
        self.number(one, pool)?;
        self.number(other, &pool[1..])?;
        Ok((pool[0], pool[1]))
    }

    /// Emits the code that loads a number into the first register of a pool.
    fn number(&mut self, number: &Number, pool: &[AsmRegister64]) -> Result<(), IcedError> {
        let to = pool[0];
        match number {
            Number::Literal(number) => self.a.mov(to, *number),
            Number::Word(word) => self.word(word, to),
            Number::Int(word) => {
                self.word(word, to)?;
                // The lowest bit, that of integers, is shifted into the carry flag.
                self.a.sar(to, 1)?;
                self.a.jnc(self.untyped)
            }
            Number::Narrow(word, bits, signedness) => {
                self.word(word, to)?;
                let unused = 64 - u32::from(*bits);
                self.a.shl(to, unused)?;
                self.shift_right(to, unused, *signedness)
            }
            Number::Len(word) => self.len(word, to, pool[1]),
            Number::Tag(word) => self.tag(word, to),
            Number::Thread => self.thread(to, pool[1]),
            Number::Caller => self.a.mov(to, qword_ptr(rsp + self.context.pushed)),
            Number::Calculated(calculation, one, other) => {
                if let Some(literal) = immediate(other) {
                    self.number(one, pool)?;
                    return match calculation {
                        Calculation::Add => self.a.add(to, literal),
                        Calculation::Subtract => self.a.sub(to, literal),
                        Calculation::Multiply => self.a.imul_3(to, to, literal),
                        Calculation::And => self.a.and(to, literal),
                    };
                }
                let (one, other) = self.both(one, other, pool)?;
                match calculation {
                    Calculation::Add => self.a.add(one, other)?,
                    Calculation::Subtract => self.a.sub(one, other)?,
                    Calculation::Multiply => self.a.imul_2(one, other)?,
                    Calculation::And => self.a.and(one, other)?,
                }
                if one != to {
                    self.a.mov(to, one)?;
                }
                Ok(())
            }
            Number::Shifted(of, by, signedness) => {
                self.number(of, pool)?;
                self.shift_right(to, u32::from(*by), *signedness)
            }
        }
    }

    /// Emits the code that loads the id of the thread; `other` is changed, too.
    fn thread(&mut self, to: AsmRegister64, other: AsmRegister64) -> Result<(), IcedError> {
        // There may be no thread control block.
        self.a.rdfsbase(to)?;
        self.a.test(to, to)?;
        self.a.je(self.untyped)?;
        load(self.a, other, self.context.shared)?;
        let at = dword_ptr(other + offset(TID_AT));
        self.a.mov(low(other), at)?;
        self.a.mov(low(to), dword_ptr(to + other))
    }

    fn shift_right(
        &mut self,
        register: AsmRegister64,
        by: u32,
        signedness: Signedness,
    ) -> Result<(), IcedError> {
        match signedness {
            Signedness::Signed => self.a.sar(register, by),
            Signedness::Unsigned => self.a.shr(register, by),
        }
    }

    /// Emits the code that loads a word. Where memory is read, it uses rdi and r9.
    fn word(&mut self, word: &Word, to: AsmRegister64) -> Result<(), IcedError> {
        match word {
            Word::Argument(index) => {
                let source = self.arguments.get(usize::from(*index));
                match source.copied().unwrap_or(ArgumentSource::Unknown) {
                    ArgumentSource::Register(register) => self.register(register, to),
                    ArgumentSource::Vector(register) => match get_xmm(register) {
                        Some(register) => self.a.movq(to, register),
                        None => self.a.jmp(self.untyped),
                    },
                    ArgumentSource::Memory(memory) => self.context.operand(self.a, to, memory),
                    ArgumentSource::Constant(number) => self.a.mov(to, number),
                    ArgumentSource::Unknown => self.a.jmp(self.untyped),
                }
            }
            Word::Field(of, field) => {
                self.word(of, to)?;
                self.header(to)?;
                self.a.cmp(r9b, NO_SCAN_TAG as u32)?;
                self.a.jae(self.untyped)?;
                self.size()?;
                self.a.cmp(r9, *field as i32)?;
                self.a.jbe(self.untyped)?;
                let at = 8 * *field as i32;
                self.unless_readable_value(to, at)?;
                self.a.mov(to, qword_ptr(to + at))
            }
        }
    }

    /// Emits a jump to where hits are untyped unless the operands in memory among these arguments can be read. Uses all
    /// registers of the pool but r8.
    fn unless_operands_readable(&mut self, is_used: impl Fn(u8) -> bool) -> Result<(), IcedError> {
        for (index, source) in (0..).zip(self.arguments) {
            match source {
                ArgumentSource::Memory(memory) if !memory.is_static() && is_used(index) => {
                    let (context, untyped) = (self.context, self.untyped);
                    // For the system call: a multiple of 8.
                    self.a.xor(ecx, ecx)?;
                    let unless_valid = |a: &mut CodeAssembler| unless_valid(a, context, untyped);
                    context.unless_operand_readable(self.a, *memory, unless_valid, untyped)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn register(&mut self, register: Register, to: AsmRegister64) -> Result<(), IcedError> {
        self.context.load(self.a, to, register)
    }

    /// Emits the code that loads the header of the block at `block` into r9.
    fn header(&mut self, block: AsmRegister64) -> Result<(), IcedError> {
        self.a.test(low(block), 7)?;
        self.a.jne(self.untyped)?;
        self.unless_readable_value(block, -8)?;
        self.a.mov(r9, qword_ptr(block - 8))
    }

    /// Emits the code that replaces the header in r9 by the size of the block in words: bits 10 to 55.
    fn size(&mut self) -> Result<(), IcedError> {
        self.a.shl(r9, 8)?;
        self.a.shr(r9, 18)
    }

    /// Emits the code that loads the size in words of the string at `block` into r9.
    fn string(&mut self, block: AsmRegister64) -> Result<(), IcedError> {
        self.header(block)?;
        self.a.cmp(r9b, STRING_TAG as u32)?;
        self.a.jne(self.untyped)?;
        self.size()
    }

    /// Emits the code that loads the address of the block of a string, whose first words, as many as a key has and one
    /// more, can be read.
    fn text(&mut self, of: &Word, pool: &[AsmRegister64]) -> Result<(), IcedError> {
        let (block, last) = (pool[0], pool[1]);
        let mut is_short = self.a.create_label();
        self.word(of, block)?;
        self.string(block)?;
        self.a.test(r9, r9)?;
        self.a.je(self.untyped)?;
        self.a.cmp(r9, text::WHOLE as i32)?;
        self.a.jbe(is_short)?;
        self.a.mov(r9d, text::WHOLE as u32)?;
        self.a.set_label(&mut is_short)?;
        self.a.lea(last, qword_ptr(block + r9 * 8 - 8))?;
        self.unless_readable_value(last, 0)
    }

    fn is_string(&mut self, of: &Word, text: &[u8], jump: Branch) -> Result<(), IcedError> {
        let mut over = self.a.create_label();
        let differs = if jump.when { over } else { jump.to };
        let [block, ..] = POOL;
        let words = block_of(text);
        self.word(of, block)?;
        self.string(block)?;
        self.a.cmp(r9, words.len() as i32)?;
        self.a.jne(differs)?;
        self.unless_readable_value(block, 8 * (words.len() as i32 - 1))?;
        for (index, word) in (0..).zip(&words) {
            self.a.mov(rdi, *word)?;
            self.a.cmp(qword_ptr(block + 8 * index), rdi)?;
            self.a.jne(differs)?;
        }
        self.end_of_string(jump, &mut over)
    }

    fn begins_with(&mut self, of: &Word, text: &[u8], jump: Branch) -> Result<(), IcedError> {
        let mut over = self.a.create_label();
        let mut is_long = self.a.create_label();
        let differs = if jump.when { over } else { jump.to };
        let [block, size, ..] = POOL;
        let words = words_of(text);
        let last = words.len() as i32 - 1;
        self.word(of, block)?;
        self.string(block)?;
        self.a.cmp(r9, words.len() as i32)?;
        self.a.jb(differs)?;
        self.a.mov(size, r9)?;
        self.unless_readable_value(block, 8 * last)?;
        for (index, word) in (0..last).zip(&words) {
            self.a.mov(rdi, *word)?;
            self.a.cmp(qword_ptr(block + 8 * index), rdi)?;
            self.a.jne(differs)?;
        }
        let rest = text.len() as u32 % 8;
        if let (Some(word), 1..) = (words.last(), rest) {
            let unused = 64 - 8 * rest;
            self.a.mov(r9, qword_ptr(block + 8 * last))?;
            self.a.shl(r9, unused)?;
            self.a.mov(rdi, word << unused)?;
            self.a.cmp(r9, rdi)?;
            self.a.jne(differs)?;
        }
        // In a longer block, the string is certainly long enough.
        self.a.cmp(size, words.len() as i32)?;
        self.a.jne(is_long)?;
        self.a.cmp(byte_ptr(block + 8 * last + 7), 7 - rest)?;
        self.a.ja(differs)?;
        self.a.set_label(&mut is_long)?;
        self.a.nop()?;
        self.end_of_string(jump, &mut over)
    }

    /// Emits the code that loads the address of a string of C into rcx, whose bytes 0 to `last` can be read: the table
    /// of pages and the kernel both say so. `last` is less than a page. Uses all registers of the pool but r8.
    fn text_of_c(&mut self, of: &Word, last: u64) -> Result<(), IcedError> {
        let mut is_in_page = self.a.create_label();
        unless_valid(self.a, self.context, self.untyped)?;
        self.word(of, rdx)?;
        self.unless_listed(rdx, 0)?;
        // In the system call, rcx has to be a multiple of 8, so that it is no valid `how`. The upper three bits of a
        // listed address are 0.
        self.a.mov(rcx, rdx)?;
        self.a.shl(rcx, 3)?;
        self.a.and(rdx, -8)?;
        self.unless_kernel_reads()?;
        if last > 0 {
            self.a.mov(rax, rcx)?;
            self.a.shr(rax, 3)?;
            self.a.lea(rdx, qword_ptr(rax + last as i32))?;
            self.a.xor(rax, rdx)?;
            self.a.test(eax, -(PAGE as i32))?;
            self.a.je(is_in_page)?;
            self.a.and(rdx, -8)?;
            self.unless_listed(rdx, 0)?;
            self.unless_kernel_reads()?;
            self.a.set_label(&mut is_in_page)?;
        }
        self.a.shr(rcx, 3)
    }

    /// Emits a jump to where hits are untyped unless the kernel may be asked, and reads the word at rdx.
    fn unless_kernel_reads(&mut self) -> Result<(), IcedError> {
        let PointContext { layout, shared, .. } = self.context;
        unless_kernel_reads(self.a, 0, layout, shared, self.untyped)
    }

    /// Emits the code that compares a string of C with this one: the whole, or how it begins.
    fn compare_text_of_c(
        &mut self,
        of: &Word,
        text: &[u8],
        is_whole: bool,
        jump: Branch,
    ) -> Result<(), IcedError> {
        let mut over = self.a.create_label();
        let differs = if jump.when { over } else { jump.to };
        self.text_of_c(of, last_compared(text, is_whole) as u64)?;
        let mut rest = text.to_vec();
        rest.extend(is_whole.then_some(0));
        let mut at = 0;
        // No byte more is read.
        while at < rest.len() {
            let left = rest.len() - at;
            let len = [8, 4, 2, 1].into_iter().find(|it| *it <= left);
            let len = len.unwrap_or(1);
            let mut bytes = [0; 8];
            bytes[..len].copy_from_slice(&rest[at..at + len]);
            let number = u64::from_le_bytes(bytes);
            self.a.mov(rdi, number)?;
            let place = rcx + at as i32;
            match len {
                8 => self.a.cmp(qword_ptr(place), rdi)?,
                4 => self.a.cmp(dword_ptr(place), edi)?,
                2 => self.a.cmp(word_ptr(place), di)?,
                _ => self.a.cmp(byte_ptr(place), dil)?,
            }
            self.a.jne(differs)?;
            at += len;
        }
        self.end_of_string(jump, &mut over)
    }

    /// Emits the end of the code that compares strings, which comes here if they are the same, or else jumps.
    fn end_of_string(&mut self, jump: Branch, over: &mut CodeLabel) -> Result<(), IcedError> {
        if jump.when {
            self.a.jmp(jump.to)?;
        }
        self.a.set_label(over)?;
        self.a.nop()
    }

    fn len(&mut self, of: &Word, to: AsmRegister64, size: AsmRegister64) -> Result<(), IcedError> {
        let mut is_string = self.a.create_label();
        let mut is_counted = self.a.create_label();
        let mut over = self.a.create_label();
        self.word(of, to)?;
        self.header(to)?;
        self.a.movzx(edi, r9b)?;
        self.size()?;
        self.a.mov(size, r9)?;
        self.a.cmp(edi, STRING_TAG as i32)?;
        self.a.je(is_string)?;
        self.a.cmp(edi, DOUBLE_ARRAY_TAG as i32)?;
        self.a.je(is_counted)?;
        self.a.cmp(edi, NO_SCAN_TAG as i32)?;
        self.a.jae(self.untyped)?;
        self.a.set_label(&mut is_counted)?;
        self.a.mov(to, size)?;
        self.a.jmp(over)?;
        self.a.set_label(&mut is_string)?;
        self.a.test(size, size)?;
        self.a.je(self.untyped)?;
        self.a.lea(to, qword_ptr(to + size * 8 - 8))?;
        self.unless_readable_value(to, 0)?;
        self.a.mov(to, qword_ptr(to))?;
        self.a.shr(to, 56)?;
        self.a.cmp(to, 7)?;
        self.a.ja(self.untyped)?;
        self.a.lea(size, qword_ptr(size * 8 - 1))?;
        self.a.sub(size, to)?;
        self.a.mov(to, size)?;
        self.a.set_label(&mut over)?;
        self.a.nop()
    }

    fn tag(&mut self, of: &Word, to: AsmRegister64) -> Result<(), IcedError> {
        let mut is_int = self.a.create_label();
        let mut over = self.a.create_label();
        self.word(of, to)?;
        self.a.test(low(to), 1)?;
        self.a.jne(is_int)?;
        self.header(to)?;
        self.a.movzx(low(to), r9b)?;
        self.a.jmp(over)?;
        self.a.set_label(&mut is_int)?;
        self.a.mov(to, INT_TAG)?;
        self.a.set_label(&mut over)?;
        self.a.nop()
    }

    /// The vector registers are the program's, and so are those of the x87 unit: floats are compared as integers of the
    /// same order.
    fn compare_floats(
        &mut self,
        relation: Relation,
        one: &Float,
        other: &Float,
        jump: Branch,
    ) -> Result<(), IcedError> {
        let mut no_number = self.a.create_label();
        let mut over = self.a.create_label();
        let [left, right, ..] = POOL;
        self.float(one, left)?;
        self.float(other, right)?;
        self.ordered(left, no_number)?;
        self.ordered(right, no_number)?;
        self.a.cmp(left, right)?;
        self.jump_if(relation, Signedness::Signed, jump)?;
        self.a.jmp(over)?;
        self.a.set_label(&mut no_number)?;
        self.a.nop()?;
        // It is unequal to everything, and neither less nor greater.
        if relation.holds(None) == jump.when {
            self.a.jmp(jump.to)?;
        }
        self.a.set_label(&mut over)?;
        self.a.nop()
    }

    fn float(&mut self, float: &Float, to: AsmRegister64) -> Result<(), IcedError> {
        match float {
            Float::Literal(bits) => self.a.mov(to, *bits),
            Float::Word(word) => self.word(word, to),
            Float::Single(word) => {
                self.word(word, to)?;
                self.widened(to)
            }
            Float::Boxed(word) => {
                self.word(word, to)?;
                self.header(to)?;
                self.a.cmp(r9b, DOUBLE_TAG as u32)?;
                self.a.jne(self.untyped)?;
                self.size()?;
                self.a.cmp(r9, 1)?;
                self.a.jne(self.untyped)?;
                self.unless_readable_value(to, 0)?;
                self.a.mov(to, qword_ptr(to))
            }
        }
    }

    /// Emits the code that converts the bits of a float of 4 bytes to those of the same float of 8 bytes. Uses rdi and
    /// r9.
    fn widened(&mut self, float: AsmRegister64) -> Result<(), IcedError> {
        /// How many bits the larger mantissa has, and how many more than the smaller one.
        const MANTISSA: u32 = 52;
        const MORE: u32 = 29;
        /// What is added to an exponent: the difference of the two biases.
        const BIAS: u64 = 1023 - 127;
        let mut normal = self.a.create_label();
        let mut finite = self.a.create_label();
        let mut shift = self.a.create_label();
        let mut signed = self.a.create_label();
        // The sign in r9; the exponent and the mantissa where they are in a larger one.
        self.a.mov(r9, float)?;
        self.a.shr(r9, 31)?;
        self.a.shl(r9, 63)?;
        self.a.shl(float, 33)?;
        self.a.shr(float, 33 - MORE)?;
        self.a.je(signed)?;
        self.a.mov(rdi, 1_u64 << MANTISSA)?;
        self.a.cmp(float, rdi)?;
        self.a.jae(normal)?;
        // A denormal: with the larger exponent it is normal, and its first bit becomes the implicit one.
        self.a.mov(edi, BIAS as u32)?;
        self.a.set_label(&mut shift)?;
        self.a.dec(rdi)?;
        self.a.shl(float, 1)?;
        self.a.bt(float, MANTISSA)?;
        self.a.jnc(shift)?;
        self.a.shl(rdi, MANTISSA)?;
        self.a.add(float, rdi)?;
        self.a.jmp(signed)?;
        self.a.set_label(&mut normal)?;
        // An infinity or a NaN has the largest exponent of either kind.
        self.a.mov(rdi, 255_u64 << MANTISSA)?;
        self.a.cmp(float, rdi)?;
        self.a.mov(rdi, BIAS << MANTISSA)?;
        self.a.jb(finite)?;
        self.a.add(float, rdi)?;
        self.a.set_label(&mut finite)?;
        self.a.add(float, rdi)?;
        self.a.set_label(&mut signed)?;
        self.a.or(float, r9)
    }

    /// Emits the code that converts the bits of a float to a signed integer, so that the integers have the order of
    /// the floats. Goes to `no_number` if it is a NaN.
    fn ordered(&mut self, float: AsmRegister64, no_number: CodeLabel) -> Result<(), IcedError> {
        let mut is_positive = self.a.create_label();
        let mut magnitude = self.a.create_label();
        self.a.mov(rdi, f64::INFINITY.to_bits())?;
        self.a.btr(float, 63)?;
        self.a.jnc(is_positive)?;
        self.a.cmp(float, rdi)?;
        self.a.ja(no_number)?;
        self.a.neg(float)?;
        self.a.jmp(magnitude)?;
        self.a.set_label(&mut is_positive)?;
        self.a.cmp(float, rdi)?;
        self.a.ja(no_number)?;
        self.a.set_label(&mut magnitude)?;
        self.a.nop()
    }

    /// Emits a jump to `untyped` unless the word `offset_of` bytes after `base`, to which a value points, may be read.
    /// Uses rdi and r9.
    fn unless_readable_value(
        &mut self,
        base: AsmRegister64,
        offset_of: i32,
    ) -> Result<(), IcedError> {
        match self.context.layout.value_pages {
            ValuePages::TableOfObserver => self.unless_listed(base, offset_of),
            ValuePages::TableOfRuntime(table) => {
                self.a.lea(r9, qword_ptr(base + offset_of))?;
                unless_of_values(self.a, table, [r9, rdi, rbx], self.untyped)?;
                load(self.a, rbx, self.context.shared)
            }
            ValuePages::NoTable => self.a.jmp(self.untyped),
        }
    }

    /// Emits a jump to `untyped` unless the table of readable pages has the word `offset_of` bytes after `base`. Uses
    /// rdi and r9.
    fn unless_listed(&mut self, base: AsmRegister64, offset_of: i32) -> Result<(), IcedError> {
        self.a.test(rbx, rbx)?;
        self.a.je(self.untyped)?;
        let layout = self.context.layout;
        unless_listed(self.a, layout, base, offset_of, self.untyped)
    }
}

fn inverse(relation: Relation) -> Relation {
    match relation {
        Relation::Equal => Relation::NotEqual,
        Relation::NotEqual => Relation::Equal,
        Relation::Less => Relation::AtLeast,
        Relation::AtMost => Relation::Greater,
        Relation::Greater => Relation::AtMost,
        Relation::AtLeast => Relation::Less,
    }
}

#[cfg(test)]
pub(super) mod tests;
