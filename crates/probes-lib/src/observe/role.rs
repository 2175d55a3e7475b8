//! [`Role`]: what is recorded of each hit of a point. Only computes: no access to processes or files.

use std::num::NonZeroU64;
use std::sync::Arc;

use iced_x86::Register;

use crate::address::LiveAddr;
use crate::elf::arguments::{Argument, Operand};
use crate::expression::typed::KeyPart;
use crate::expression::{Filter, IntegerExpression, ParameterKind};
use crate::observe::buckets::Linear;
use crate::observe::frame_id::FrameId;

/// What the trampoline of a point records before it does what the displaced bytes did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Role {
    pub(crate) is_counted: bool,
    /// Which hits are counted, watched, timed or in the histogram; ends of pairs have `pair_filter`.
    pub(crate) filter: Option<Arc<FilterRole>>,
    /// The histogram of a value of each hit.
    pub(crate) histogram: Option<HistogramRole>,
    /// The keys by which the hits of a point are counted; the point's own counter has the hits of keys for which there
    /// is no room. If the point has a histogram, each key has one.
    pub(crate) keys: Option<Arc<KeyRole>>,
    /// Which ends of pairs it is: stops come before starts.
    pub(crate) ends: Vec<PairEnd>,
    /// The marks that show that a stop belongs to another start, if it is an end of a pair.
    pub(crate) marks: Marks,
    /// The key by which a stop finds its start, in whichever thread, if it is an end of a pair. `None`: a stop
    /// belongs to the last start of its thread.
    pub(crate) pair_key: Option<Arc<KeyRole>>,
    pub(crate) pair_filter: PairFilter,
    /// The keys by which times are distinguished, if it is the stop of a pair, or in a function that is timed. The
    /// last part is the name; that of a pair is its number.
    pub(crate) time_keys: Option<Arc<KeyRole>>,
    /// What is recorded here of slow times, if these are reported, and it is an end of a pair, or in a
    /// function that is timed.
    pub(crate) reported: Option<WatchRole>,
    pub(crate) watched: Option<WatchRole>,
    /// What is recorded of calls, if it is an entry or an exit of a function that is timed.
    pub(crate) timed: Option<TimedRole>,
    /// Whether only times of a range are recorded, if it is an end of a pair, or in a function that is
    /// timed ([`TIMES_FROM`](crate::observe::layout::shared::TIMES_FROM)).
    pub(crate) is_in_range: bool,
    /// Set if it is the entry of the function that frees the stacks of fibers, and functions are timed on these.
    pub(crate) freed_stack: Option<FreedStackRole>,
    /// Set if the hits are the returns of a function: it is counted or has a histogram, and results are asked for.
    pub(crate) exits: Option<ExitsRole>,
}

/// What is known of a function whose hits are its returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ExitsRole {
    /// Whether it is of OCaml, which does not use the x87 unit.
    pub(crate) is_ocaml: bool,
}

/// Which hits of a point are recorded.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct FilterRole {
    pub(crate) filter: Filter,
    /// Where the arguments are.
    pub(crate) arguments: Vec<ArgumentSource>,
}

/// An integer of each hit of a point.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct IntegerRole {
    pub(crate) integer: IntegerExpression,
    /// Where the arguments are.
    pub(crate) arguments: Vec<ArgumentSource>,
}

/// The keys by which the hits of a point are counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyRole {
    pub(crate) parts: Vec<KeyPart>,
    /// Where each argument is.
    pub(crate) arguments: Vec<ArgumentSource>,
    /// The number of the point's name.
    pub(crate) name: u32,
}

/// What a part of a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Integer,
    Text,
    Thread,
    Caller,
    Probe,
}

impl KeyRole {
    /// Returns the same keys, with the name as the last part.
    pub(crate) fn with_name(mut self) -> KeyRole {
        self.parts.push(KeyPart::Probe);
        self
    }

    pub(crate) fn kinds(&self) -> Vec<KeyKind> {
        let kinds = self.parts.iter().map(|part| match part {
            KeyPart::Number(..) => KeyKind::Integer,
            KeyPart::Text(_) => KeyKind::Text,
            KeyPart::Thread => KeyKind::Thread,
            KeyPart::Caller => KeyKind::Caller,
            KeyPart::Probe => KeyKind::Probe,
        });
        kinds.collect()
    }

    /// Returns a bit for each part that may be negative.
    pub(crate) fn signs(&self) -> u8 {
        let parts = self.parts.iter().enumerate();
        let signed = parts.filter(|(_, part)| matches!(part, KeyPart::Number(_, true)));
        signed.fold(0, |signs, (index, _)| signs | 1 << index)
    }

    /// Returns whether the kernel is asked if memory can be read: of a C string, or of an argument
    /// in memory.
    fn asks_kernel(&self) -> bool {
        self.parts.iter().any(|part| {
            matches!(part, KeyPart::Text(text) if text.is_of_c())
                || part.has_argument(&|index| is_in_memory(&self.arguments, index))
        })
    }

    /// Returns whether the key reads memory, the stack included.
    pub(crate) fn reads_memory(&self) -> bool {
        self.parts.iter().any(|part| {
            part.reads_memory() || part.has_argument(&|index| is_in_memory(&self.arguments, index))
        })
    }
}

/// A histogram to which each hit of a point adds a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HistogramRole {
    /// Its index.
    pub(crate) number: u32,
    pub(crate) integer: Arc<IntegerRole>,
    /// Its buckets, if they are not those of powers of two.
    pub(crate) linear: Option<Linear>,
}

impl HistogramRole {
    /// Returns whether its values may be negative.
    pub(crate) fn is_signed(&self) -> bool {
        self.integer.integer.is_signed()
    }
}

/// Which pairs are timed, by a filter of their starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum PairFilter {
    #[default]
    All,
    /// The point is a start: the pairs for which this is true at the start.
    Starts(Arc<FilterRole>),
    /// The point is only a stop: the filter was evaluated at the start.
    Stops,
}

/// What is recorded where calls of a function begin or end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TimedRole {
    /// The index of the function among those that are timed.
    pub(crate) function: u32,
    pub(crate) stack: StackKind,
    /// Whether it is of OCaml, which does not use the x87 unit.
    pub(crate) is_ocaml: bool,
    /// Whether the point is the entry, whose displaced instructions may have exits, too. If not, they have exits
    /// only.
    pub(crate) is_entry: bool,
    /// Whether it is timed from the program's first instruction on, when its thread has no control block yet.
    pub(crate) is_from_start: bool,
}

/// What is done where OCaml 5 frees the stack of a fiber: the calls that are left on it are counted as unwound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FreedStackRole {
    /// The code that moves a stack that grows, and then frees the old one: where it begins, and its length in bytes.
    pub(crate) moves_stacks: (LiveAddr, u64),
    /// Whether only some calls of the functions that are timed are meant.
    pub(crate) are_filtered: bool,
    /// Whether functions are timed from the program's first instruction on.
    pub(crate) is_from_start: bool,
}

/// Which stack a function is called on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StackKind {
    /// That of its thread.
    OfThread,
    /// That of a fiber of OCaml 5.
    OfFiber {
        /// The offset of the address of the fiber's stack in the state of the domain, to which r14 points, in
        /// bytes.
        current_stack: u8,
    },
}

/// The marks by which trampolines recognize that a stop belongs to another start than the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Marks {
    /// The general register of the argument that has the same name at both ends, or of the first
    /// argument if none has.
    pub(crate) argument: Option<Register>,
    /// Whether that argument is an integer or a pointer of C, and not a value of OCaml.
    pub(crate) is_word: bool,
    pub(crate) frame: FrameId,
}

/// An end of the pair of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairEnd {
    Start(u32),
    Stop(u32),
}

/// What is recorded of each hit of a point that is watched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct WatchRole {
    /// The index of the point in its plan, which identifies its records.
    pub(crate) point: u32,
    pub(crate) arguments: Vec<ArgumentSource>,
    /// The formats of the arguments of a USDT probe, and of a C function if they are known. Those of OCaml's probes are
    /// in the note of the site; all other arguments are words.
    pub(crate) formats: Vec<ArgumentFormat>,
    /// What the result of a function is; `None` if it has none, or one that is not in a general register.
    pub(crate) result_format: Option<ArgumentFormat>,
    /// One in this many hits is recorded; `None`: all.
    pub(crate) sample: Option<NonZeroU64>,
    /// What is recorded of a point in a function; `None` for a site.
    pub(crate) function: Option<WatchedFunction>,
    /// Whether it is executed by OCaml code, or called by it directly: r14 has the state of a domain, in OCaml 5.
    pub(crate) is_ocaml: bool,
}

impl WatchRole {
    /// Returns whether the kernel is asked which of the memory that is recorded can be read.
    pub(crate) fn asks_kernel(&self) -> bool {
        match self.function {
            Some(function) => function.asks_kernel(),
            None => self.arguments.iter().any(|it| it.is_in_memory()),
        }
    }

    /// Returns what its records need room for beside each argument, and beside the result.
    pub(crate) fn argument_room(&self) -> ArgumentRoom {
        let Some(function) = self.function else {
            return ArgumentRoom::Fields;
        };
        let format = |index| self.formats.get(index).copied();
        let mut arguments = self.arguments.iter().enumerate();
        let has_pointers = arguments.any(|(index, it)| it.may_be_pointer(format(index)));
        let result = self.result_format.filter(|_| function.has_results);
        let is_pointer = result.is_some_and(|it| ArgumentSource::RESULT.may_be_pointer(Some(it)));
        let of_arguments = has_pointers.then_some(function.words);
        let of_result = is_pointer.then_some(function.result);
        let pointers = of_arguments.into_iter().chain(of_result);
        let room = pointers.map(WordKind::argument_room).max();
        room.unwrap_or(ArgumentRoom::Nothing)
    }
}

/// What is recorded of a point in a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WatchedFunction {
    /// What its arguments are; `result` is the same for its result.
    pub(crate) words: WordKind,
    pub(crate) result: WordKind,
    /// Whether its results are recorded: then there are points at its returns.
    pub(crate) has_results: bool,
    /// Whether only its results are recorded, not its calls.
    pub(crate) has_only_results: bool,
    /// The stack that it is called on, if all of its exits are recorded, with the place of each call on that stack.
    pub(crate) exits_on: Option<StackKind>,
    pub(crate) part: FunctionPart,
    /// Whether it is of OCaml, which does not use the x87 unit.
    pub(crate) is_ocaml: bool,
    /// Whether the program is observed from its first instruction: the thread may have no control block yet.
    pub(crate) is_from_start: bool,
}

/// Where in a function a point is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FunctionPart {
    /// At its entry, where the red zone below the stack pointer is unused.
    Entry,
    /// At an instruction within it.
    Inside,
    /// At a return or another exit, but not at its entry.
    Exit,
}

/// What words of a function may be, and so how the memory that they point to is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WordKind {
    /// Values of OCaml.
    Values,
    /// Values of OCaml, or anything: the kernel is asked before memory is read.
    MaybeValues,
    /// Words of C: integers, and addresses of text. The kernel is asked before memory is read.
    Text,
    /// Any words; no memory is read.
    Numbers,
}

/// What there is room for in the records of an observation, beside each argument.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ArgumentRoom {
    /// Nothing: no argument points to memory.
    Nothing,
    /// The first words of what it points to.
    Words,
    /// The fields of a value of OCaml.
    #[default]
    Fields,
}

impl WordKind {
    /// Whether the kernel is asked before memory is read.
    fn ask_kernel(self) -> bool {
        matches!(self, WordKind::MaybeValues | WordKind::Text)
    }

    /// Returns what a record needs room for beside such a word.
    fn argument_room(self) -> ArgumentRoom {
        match self {
            WordKind::Values => ArgumentRoom::Fields,
            WordKind::MaybeValues | WordKind::Text => ArgumentRoom::Words,
            WordKind::Numbers => ArgumentRoom::Nothing,
        }
    }
}

impl WatchedFunction {
    /// Returns whether the kernel is asked what can be read of the words of a call or a return.
    pub(crate) fn asks_kernel(&self) -> bool {
        self.words.ask_kernel() || (self.has_results && self.result.ask_kernel())
    }
}

/// Where a trampoline takes an argument from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArgumentSource {
    /// A general register.
    Register(Register),
    /// The low 8 bytes of a vector register.
    Vector(Register),
    /// In memory; of probes of OCaml [on the stack](ArgumentSource::on_stack).
    Memory(MemorySource),
    /// A number; only of USDT probes.
    Constant(u64),
    /// Somewhere else: it is not read.
    Unknown,
}

/// An operand in memory: the sum of registers and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MemorySource {
    pub(crate) base: Option<Register>,
    /// A register, and by what it is multiplied.
    pub(crate) index: Option<(Register, u8)>,
    /// The number. Without registers, it is the address of data in the object that has the point: they are mapped as
    /// long as the point is.
    pub(crate) displacement: i64,
    /// How many bytes it has: 1, 2, 4 or 8.
    pub(crate) size: u8,
}

impl MemorySource {
    pub(crate) fn is_static(self) -> bool {
        self.base.is_none() && self.index.is_none()
    }

    /// Returns whether it usually is in the frame of the point: relative to the stack pointer, or to the frame pointer.
    pub(crate) fn is_near_stack(self) -> bool {
        matches!(self.base, Some(Register::RSP | Register::RBP))
    }

    /// Returns whether it certainly is near the stack pointer.
    pub(crate) fn is_in_frame(self) -> bool {
        let is_near = (0..i64::from(STACK_OFFSET_LIMIT - 256)).contains(&self.displacement);
        self.base == Some(Register::RSP) && self.index.is_none() && is_near
    }

    /// Returns whether it may be at any address, also one that is not mapped.
    pub(crate) fn is_anywhere(self) -> bool {
        !self.is_static() && !self.is_near_stack()
    }
}

/// What an argument of a function is, or its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ArgumentFormat {
    /// How many bytes it has.
    pub(crate) size: u8,
    pub(crate) signed: bool,
    pub(crate) is_float: bool,
}

impl ArgumentFormat {
    /// A word of an unknown type: if it is a number, it may be negative.
    pub(crate) const WORD: ArgumentFormat = ArgumentFormat {
        size: 8,
        signed: true,
        is_float: false,
    };

    /// Returns what expressions can ask of it.
    pub(crate) fn kind(self) -> ParameterKind {
        match self.size {
            4 if self.is_float => ParameterKind::Single,
            _ if self.is_float => ParameterKind::Float,
            8 => ParameterKind::Word,
            size => ParameterKind::Number {
                bits: 8 * size,
                signed: self.signed,
            },
        }
    }
}

impl Default for ArgumentFormat {
    fn default() -> ArgumentFormat {
        ArgumentFormat::WORD
    }
}

/// Only offsets from the stack pointer below this many bytes are read: frames are smaller.
pub(crate) const STACK_OFFSET_LIMIT: i32 = 1 << 16;

impl FilterRole {
    /// Returns whether the filter reads memory, the stack included.
    pub(crate) fn reads_memory(&self) -> bool {
        let test = &self.filter.test;
        test.reads_memory() || test.has_argument(&|index| is_in_memory(&self.arguments, index))
    }

    fn asks_kernel(&self) -> bool {
        let test = &self.filter.test;
        test.reads_text_of_c() || test.has_argument(&|index| is_in_memory(&self.arguments, index))
    }
}

impl IntegerRole {
    /// Returns whether the integer reads memory, the stack included.
    pub(crate) fn reads_memory(&self) -> bool {
        let number = &self.integer.number;
        number.reads_memory() || number.has_argument(&|index| is_in_memory(&self.arguments, index))
    }

    fn asks_kernel(&self) -> bool {
        let number = &self.integer.number;
        number.has_argument(&|index| is_in_memory(&self.arguments, index))
    }
}

/// Returns [`ArgumentSource::is_in_memory`] of an argument.
fn is_in_memory(arguments: &[ArgumentSource], index: u8) -> bool {
    let source = arguments.get(usize::from(index));
    source.is_some_and(|it| it.is_in_memory())
}

impl Role {
    /// Returns whether an expression reads memory.
    pub(crate) fn filters_memory(&self) -> bool {
        let filter = self.filter.as_ref();
        let histogram = self.histogram.as_ref();
        filter.is_some_and(|filter| filter.reads_memory())
            || histogram.is_some_and(|histogram| histogram.integer.reads_memory())
            || self.keys.as_ref().is_some_and(|keys| keys.reads_memory())
            || self.pair_key.as_ref().is_some_and(|key| key.reads_memory())
            || self.time_keys.as_ref().is_some_and(|it| it.reads_memory())
            || matches!(&self.pair_filter, PairFilter::Starts(filter) if filter.reads_memory())
    }

    /// Returns whether an expression asks the kernel which memory can be read.
    pub(crate) fn expressions_ask_kernel(&self) -> bool {
        let starts = match &self.pair_filter {
            PairFilter::Starts(filter) => Some(filter),
            _ => None,
        };
        let mut filters = self.filter.iter().chain(starts);
        let keys = [&self.keys, &self.pair_key, &self.time_keys];
        let mut keys = keys.into_iter().flatten();
        let histogram = self.histogram.as_ref();
        filters.any(|it| it.asks_kernel())
            || keys.any(|it| it.asks_kernel())
            || histogram.is_some_and(|it| it.integer.asks_kernel())
    }

    /// Returns whether expressions are evaluated at the point.
    pub(crate) fn has_expressions(&self) -> bool {
        self.filter.is_some()
            || self.histogram.is_some()
            || self.keys.is_some()
            || self.pair_key.is_some()
            || self.time_keys.is_some()
            || matches!(self.pair_filter, PairFilter::Starts(_))
    }

    /// Returns whether the hits for which an expression has no answer are counted.
    pub(crate) fn may_be_untyped(&self) -> bool {
        self.filter.is_some() || self.histogram.is_some() || self.keys.is_some()
    }

    /// Returns whether nothing is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Role::default()
    }

    /// Returns whether hits are counted, all of them, and nothing else is recorded.
    pub(crate) fn is_only_counted(&self) -> bool {
        let counted = Role {
            is_counted: true,
            ..Role::default()
        };
        *self == counted
    }

    /// Returns whether only the hits for which a filter is true are watched.
    pub(crate) fn chooses_records(&self) -> bool {
        self.watched.is_some() && self.filter.is_some()
    }

    /// Returns whether hits are watched, and nothing else is recorded of them.
    pub(crate) fn is_only_watched(&self) -> bool {
        let others = !self.ends.is_empty() || self.timed.is_some() || self.histogram.is_some();
        self.watched.is_some() && !self.is_counted && !others
    }

    /// Returns whether the trampoline reads the time stamp counter.
    pub(crate) fn reads_time(&self) -> bool {
        !self.ends.is_empty() || self.watched.is_some() || self.timed.is_some()
    }
}

impl ArgumentSource {
    /// Where a function leaves its result.
    pub(crate) const RESULT: ArgumentSource = ArgumentSource::Register(Register::RAX);

    /// Returns whether a value of this format may be an address of memory that is recorded, too. Without a format, it is a
    /// word.
    pub(crate) fn may_be_pointer(self, format: Option<ArgumentFormat>) -> bool {
        let format = format.unwrap_or(ArgumentFormat::WORD);
        let is_read = !matches!(self, ArgumentSource::Vector(_) | ArgumentSource::Unknown);
        is_read && format.size == 8 && !format.is_float
    }

    /// Returns whether it is in memory of which the kernel may have to be asked before it is read.
    fn is_in_memory(self) -> bool {
        matches!(self, ArgumentSource::Memory(memory) if !memory.is_static())
    }

    /// Returns the source of the 8 bytes at this offset from the stack pointer at the point.
    pub(crate) const fn on_stack(offset: i32) -> ArgumentSource {
        ArgumentSource::Memory(MemorySource {
            base: Some(Register::RSP),
            index: None,
            displacement: offset as i64,
            size: 8,
        })
    }

    /// Returns its general register, if a number of `size` bytes there may distinguish events: this takes at least 4
    /// bytes.
    pub(crate) fn register_of_number(self, size: u8) -> Option<Register> {
        match self {
            ArgumentSource::Register(register) if size >= 4 => Some(register),
            _ => None,
        }
    }

    /// Returns the source of an argument of a note; `None` stands for one that could not be parsed.
    pub(crate) fn of(argument: Option<&Argument<'_>>) -> ArgumentSource {
        match argument.map(|argument| &argument.operand) {
            Some(Operand::Register(name)) => register_source(name),
            Some(&Operand::Memory {
                offset,
                base: "rsp",
            }) if (0..STACK_OFFSET_LIMIT).contains(&offset) => ArgumentSource::on_stack(offset),
            _ => ArgumentSource::Unknown,
        }
    }
}

/// Returns the 64-bit register of this name, the stack pointer included.
pub(crate) fn base_register(name: &str) -> Option<Register> {
    if name == "rsp" {
        return Some(Register::RSP);
    }
    let is_whole = name.starts_with('r') && !name.ends_with(['d', 'w', 'b']);
    general(name).filter(|_| is_whole)
}

/// Returns the source for a register of this name.
pub(crate) fn register_source(name: &str) -> ArgumentSource {
    if let Some(register) = general(name) {
        return ArgumentSource::Register(register);
    }
    let number = ["xmm", "ymm", "zmm"]
        .iter()
        .find_map(|kind| name.strip_prefix(kind)?.parse::<u32>().ok());
    match number {
        Some(number @ 0..16) => ArgumentSource::Vector(Register::XMM0 + number),
        _ => ArgumentSource::Unknown,
    }
}

/// Returns the 64-bit register that `name` is or is a part of, unless it is the stack pointer.
fn general(name: &str) -> Option<Register> {
    if let Some(number) = name.strip_prefix('r') {
        let number = number.trim_end_matches(['d', 'w', 'b']);
        if let Ok(number @ 8..16) = number.parse::<u32>() {
            return Some(Register::RAX + number);
        }
    }
    Some(match name {
        "rax" | "eax" | "ax" | "al" => Register::RAX,
        "rbx" | "ebx" | "bx" | "bl" => Register::RBX,
        "rcx" | "ecx" | "cx" | "cl" => Register::RCX,
        "rdx" | "edx" | "dx" | "dl" => Register::RDX,
        "rsi" | "esi" | "si" | "sil" => Register::RSI,
        "rdi" | "edi" | "di" | "dil" => Register::RDI,
        "rbp" | "ebp" | "bp" | "bpl" => Register::RBP,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expression::{Expression, Keys, Parameter, Scope};

    #[test]
    fn arguments_are_read_from_their_noted_places() {
        let of = |text| ArgumentSource::of(Argument::parse(text).as_ref());
        assert_eq!(of("8@%rdi"), ArgumentSource::Register(Register::RDI));
        assert_eq!(of("4@%edi"), ArgumentSource::Register(Register::RDI));
        assert_eq!(of("1@%al"), ArgumentSource::Register(Register::RAX));
        assert_eq!(of("8@%r15"), ArgumentSource::Register(Register::R15));
        assert_eq!(of("4@%r15d"), ArgumentSource::Register(Register::R15));
        assert_eq!(of("8@%xmm3"), ArgumentSource::Vector(Register::XMM3));
        assert_eq!(of("16@%xmm15"), ArgumentSource::Vector(Register::XMM15));
        assert_eq!(of("8@(%rsp)"), ArgumentSource::on_stack(0));
        assert_eq!(of("8@24(%rsp)"), ArgumentSource::on_stack(24));
        for text in [
            "8@-8(%rsp)",
            "8@65536(%rsp)",
            "8@8(%rbp)",
            "8@%rsp",
            "8@%xmm16",
            "8@%xyz",
            "8@$5",
            "nothing",
        ] {
            assert_eq!(of(text), ArgumentSource::Unknown, "{text}");
        }
    }

    #[test]
    fn register_is_known_by_all_its_names() {
        for (names, register) in [
            ("rax eax ax al", Register::RAX),
            ("rbx ebx bx bl", Register::RBX),
            ("rcx ecx cx cl", Register::RCX),
            ("rdx edx dx dl", Register::RDX),
            ("rsi esi si sil", Register::RSI),
            ("rdi edi di dil", Register::RDI),
            ("rbp ebp bp bpl", Register::RBP),
            ("r8 r8d r8w r8b", Register::R8),
            ("r15 r15d r15w r15b", Register::R15),
        ] {
            for name in names.split(' ') {
                assert_eq!(general(name), Some(register), "{name}");
            }
        }
        for name in ["r7", "r16", "rsp", "esp", "r", ""] {
            assert_eq!(general(name), None, "{name}");
        }
        assert_eq!(
            register_source("ymm0"),
            ArgumentSource::Vector(Register::XMM0)
        );
        assert_eq!(
            register_source("zmm15"),
            ArgumentSource::Vector(Register::XMM15)
        );
    }

    #[test]
    fn role_tells_if_it_is_empty_or_timed() {
        let counted = Role {
            is_counted: true,
            ..Role::default()
        };
        let timed = Role {
            ends: vec![PairEnd::Start(0)],
            ..Role::default()
        };
        let watched = Role {
            watched: Some(WatchRole::default()),
            ..Role::default()
        };
        let what = |role: &Role| (role.is_empty(), role.reads_time());
        assert_eq!(what(&Role::default()), (true, false));
        assert_eq!(what(&counted), (false, false));
        assert_eq!(what(&timed), (false, true));
        assert_eq!(what(&watched), (false, true));
    }

    #[test]
    fn watched_point_may_record_something_else_too() {
        let watched = || Role {
            watched: Some(WatchRole::default()),
            ..Role::default()
        };
        let timed = TimedRole {
            function: 0,
            stack: StackKind::OfThread,
            is_ocaml: false,
            is_entry: true,
            is_from_start: false,
        };
        assert!(watched().is_only_watched() && !Role::default().is_only_watched());
        let histogram = HistogramRole {
            number: 0,
            integer: integer("arg0", ArgumentSource::Register(Register::RDI)),
            linear: None,
        };
        for other in [
            Role {
                is_counted: true,
                ..watched()
            },
            Role {
                ends: vec![PairEnd::Start(0)],
                ..watched()
            },
            Role {
                timed: Some(timed),
                ..watched()
            },
            Role {
                histogram: Some(histogram),
                ..watched()
            },
        ] {
            assert!(!other.is_only_watched(), "{other:?}");
        }
    }

    const VALUE: Parameter = Parameter {
        name: None,
        kind: ParameterKind::Value,
    };

    /// The scope of a point with one argument of this kind.
    fn scope(kind: ParameterKind) -> Scope {
        let parameter = Parameter { kind, ..VALUE };
        Scope::of("probe a", "a", vec![parameter]).asking_kernel_if(true)
    }

    fn filter(text: &str, kind: ParameterKind, source: ArgumentSource) -> Arc<FilterRole> {
        let expression: Expression = text.parse().unwrap();
        Arc::new(FilterRole {
            filter: expression.filter(&scope(kind)).unwrap(),
            arguments: vec![source],
        })
    }

    fn integer(text: &str, source: ArgumentSource) -> Arc<IntegerRole> {
        let expression: Expression = text.parse().unwrap();
        Arc::new(IntegerRole {
            integer: expression.integer(&scope(ParameterKind::Value)).unwrap(),
            arguments: vec![source],
        })
    }

    fn keys(text: &str, kind: ParameterKind, source: ArgumentSource) -> Option<Arc<KeyRole>> {
        let keys: Keys = text.parse().unwrap();
        Some(Arc::new(KeyRole {
            parts: keys.parts(&scope(kind)).unwrap(),
            arguments: vec![source],
            name: 0,
        }))
    }

    /// Returns roles with one expression each: `test` as a filter and as a filter of starts, `key` as the key of hits,
    /// of pairs and of times.
    fn asking(test: &str, key: &str, kind: ParameterKind, source: ArgumentSource) -> [Role; 5] {
        [
            Role {
                filter: Some(filter(test, kind, source)),
                ..Role::default()
            },
            Role {
                pair_filter: PairFilter::Starts(filter(test, kind, source)),
                ..Role::default()
            },
            Role {
                keys: keys(key, kind, source),
                ..Role::default()
            },
            Role {
                pair_key: keys(key, kind, source),
                ..Role::default()
            },
            Role {
                time_keys: keys(key, kind, source),
                ..Role::default()
            },
        ]
    }

    #[test]
    fn expressions_may_read_memory() {
        let in_register = ArgumentSource::Register(Register::RDI);
        let memory = |base: Option<Register>, index| {
            ArgumentSource::Memory(MemorySource {
                base,
                index,
                displacement: 8,
                size: 8,
            })
        };
        let rbx = Some(Register::RBX);
        for (source, reads) in [
            (in_register, false),
            (ArgumentSource::on_stack(8), true),
            (memory(rbx, None), true),
            (memory(None, Some((Register::RBX, 8))), true),
            // Static data of the object that has the point, which are always readable.
            (memory(None, None), false),
        ] {
            for role in asking("arg0 == 1", "arg0", ParameterKind::Value, source) {
                assert_eq!(role.filters_memory(), reads, "{role:?}");
                assert!(role.has_expressions(), "{role:?}");
            }
            let histogram = Role {
                histogram: Some(HistogramRole {
                    number: 0,
                    integer: integer("arg0", source),
                    linear: None,
                }),
                ..Role::default()
            };
            assert_eq!(histogram.filters_memory(), reads, "{source:?}");
            assert!(histogram.may_be_untyped() && histogram.has_expressions());
        }
        // What an argument points to.
        let kind = ParameterKind::Value;
        for role in asking("str(arg0) == \"x\"", "str(arg0)", kind, in_register) {
            assert!(
                role.filters_memory() && !role.expressions_ask_kernel(),
                "{role:?}"
            );
        }
        let none = Role::default();
        assert!(!none.filters_memory() && !none.has_expressions());
    }

    #[test]
    fn questions_to_the_kernel_are_recognized() {
        let in_register = ArgumentSource::Register(Register::RDI);
        let memory = |base: Register| {
            ArgumentSource::Memory(MemorySource {
                base: Some(base),
                index: None,
                displacement: 8,
                size: 8,
            })
        };
        for (test, key, source, asks) in [
            ("str(arg0) == \"x\"", "str(arg0)", in_register, true),
            ("arg0 == 1", "arg0", in_register, false),
            ("arg0 == 1", "arg0", memory(Register::RSP), true),
            ("arg0 == 1", "arg0", memory(Register::RDX), true),
        ] {
            for role in asking(test, key, ParameterKind::Word, source) {
                assert_eq!(role.expressions_ask_kernel(), asks, "{role:?}");
            }
            if key == "arg0" {
                let histogram = Role {
                    histogram: Some(HistogramRole {
                        number: 0,
                        integer: integer(key, source),
                        linear: None,
                    }),
                    ..Role::default()
                };
                assert_eq!(histogram.expressions_ask_kernel(), asks, "{source:?}");
            }
        }
    }

    #[test]
    fn operands_near_the_stack_are_recognized() {
        let memory = |base| MemorySource {
            base,
            index: None,
            displacement: 0,
            size: 8,
        };
        for (base, is_near, is_anywhere) in [
            (Some(Register::RSP), true, false),
            (Some(Register::RBP), true, false),
            (Some(Register::RBX), false, true),
            (None, false, false),
        ] {
            assert_eq!(memory(base).is_near_stack(), is_near, "{base:?}");
            assert_eq!(memory(base).is_anywhere(), is_anywhere, "{base:?}");
        }
    }

    #[test]
    fn kernel_is_asked_about_calls_or_results() {
        let asks = |words, result, has_results| {
            let function = WatchedFunction {
                words,
                result,
                has_results,
                has_only_results: false,
                exits_on: None,
                part: FunctionPart::Entry,
                is_ocaml: false,
                is_from_start: false,
            };
            function.asks_kernel()
        };
        let (none, values) = (WordKind::Numbers, WordKind::Values);
        for words in [WordKind::MaybeValues, WordKind::Text] {
            assert!(asks(words, none, false) && asks(none, words, true));
            assert!(!asks(values, words, false));
        }
        assert!(!asks(none, values, true) && !asks(values, none, true));
    }
}
