//! What an expression asks of a point, in terms of words and memory: each part says how it is read, so that nothing is
//! left to choose when it is evaluated or compiled.

use crate::numbers::words;

/// Something that is true or false.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Test {
    Constant(bool),
    Compare(Relation, Signedness, Number, Number),
    CompareFloats(Relation, Float, Float),
    /// Whether a string is this one.
    IsString(Text, Vec<u8>),
    /// Whether a string begins with this one.
    BeginsWith(Text, Vec<u8>),
    Not(Box<Test>),
    And(Box<Test>, Box<Test>),
    Or(Box<Test>, Box<Test>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Relation {
    Equal,
    NotEqual,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

impl Relation {
    /// Returns whether two things that have this order are in this relation; `None`: they have none, as one is a NaN.
    pub(crate) fn holds(self, order: Option<std::cmp::Ordering>) -> bool {
        let Some(order) = order else {
            return self == Relation::NotEqual;
        };
        match self {
            Relation::Equal => order.is_eq(),
            Relation::NotEqual => order.is_ne(),
            Relation::Less => order.is_lt(),
            Relation::AtMost => order.is_le(),
            Relation::Greater => order.is_gt(),
            Relation::AtLeast => order.is_ge(),
        }
    }
}

impl Relation {
    /// Returns the relation with the sides exchanged.
    pub(crate) fn reversed(self) -> Relation {
        match self {
            Relation::Less => Relation::Greater,
            Relation::AtMost => Relation::AtLeast,
            Relation::Greater => Relation::Less,
            Relation::AtLeast => Relation::AtMost,
            Relation::Equal | Relation::NotEqual => self,
        }
    }
}

/// Whether the bits of a number are compared, shifted and extended as those of a signed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Signedness {
    Signed,
    Unsigned,
}

impl Signedness {
    pub(crate) fn of(is_signed: bool) -> Signedness {
        if is_signed {
            Signedness::Signed
        } else {
            Signedness::Unsigned
        }
    }
}

impl Test {
    /// Returns whether it needs memory to be read, apart from arguments that are there.
    pub(crate) fn reads_memory(&self) -> bool {
        match self {
            Test::Constant(_) => false,
            Test::Compare(_, _, one, other) => one.reads_memory() || other.reads_memory(),
            Test::CompareFloats(_, one, other) => [one, other].iter().any(|it| match it {
                Float::Literal(_) => false,
                Float::Word(word) | Float::Single(word) => word.is_in_block(),
                Float::Boxed(_) => true,
            }),
            Test::IsString(..) | Test::BeginsWith(..) => true,
            Test::Not(test) => test.reads_memory(),
            Test::And(one, other) | Test::Or(one, other) => {
                one.reads_memory() || other.reads_memory()
            }
        }
    }

    /// Returns whether it reads a string of C, for which the kernel is asked.
    pub(crate) fn reads_text_of_c(&self) -> bool {
        match self {
            Test::IsString(text, _) | Test::BeginsWith(text, _) => text.is_of_c(),
            Test::Not(test) => test.reads_text_of_c(),
            Test::And(one, other) | Test::Or(one, other) => {
                one.reads_text_of_c() || other.reads_text_of_c()
            }
            Test::Constant(_) | Test::Compare(..) | Test::CompareFloats(..) => false,
        }
    }

    /// Returns whether it asks for an argument for which `is_it` is true.
    pub(crate) fn has_argument(&self, is_it: &impl Fn(u8) -> bool) -> bool {
        match self {
            Test::Constant(_) => false,
            Test::Compare(_, _, one, other) => one.has_argument(is_it) || other.has_argument(is_it),
            Test::CompareFloats(_, one, other) => [one, other].iter().any(|it| match it {
                Float::Literal(_) => false,
                Float::Word(word) | Float::Single(word) | Float::Boxed(word) => {
                    is_it(word.argument())
                }
            }),
            Test::IsString(text, _) | Test::BeginsWith(text, _) => is_it(text.word().argument()),
            Test::Not(test) => test.has_argument(is_it),
            Test::And(one, other) | Test::Or(one, other) => {
                one.has_argument(is_it) || other.has_argument(is_it)
            }
        }
    }
}

/// A number of 64 bits. What it is calculated from is truncated to as many.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Number {
    Literal(u64),
    /// The whole word.
    Word(Word),
    /// An OCaml `int`.
    Int(Word),
    /// So many bits of a word, at most 32, extended by their sign or by zeros.
    Narrow(Word, u8, Signedness),
    /// The length of a string in bytes, or of another block in fields.
    Len(Word),
    /// The tag of a block, or 1000 for an `int`, as OCaml's `Obj.tag` returns it.
    Tag(Word),
    /// The id of the thread.
    Thread,
    /// The return address of the function that is called.
    Caller,
    Calculated(Calculation, Box<Number>, Box<Number>),
    Shifted(Box<Number>, u8, Signedness),
}

impl Number {
    /// Returns whether it needs memory to be read, apart from arguments that are there.
    pub(crate) fn reads_memory(&self) -> bool {
        match self {
            Number::Literal(_) | Number::Thread | Number::Caller => false,
            Number::Word(word) | Number::Int(word) | Number::Narrow(word, ..) => word.is_in_block(),
            Number::Len(_) | Number::Tag(_) => true,
            Number::Calculated(_, one, other) => one.reads_memory() || other.reads_memory(),
            Number::Shifted(of, ..) => of.reads_memory(),
        }
    }

    /// Returns whether it asks for an argument for which `is_it` is true.
    pub(crate) fn has_argument(&self, is_it: &impl Fn(u8) -> bool) -> bool {
        match self {
            Number::Literal(_) | Number::Thread | Number::Caller => false,
            Number::Word(word)
            | Number::Int(word)
            | Number::Narrow(word, ..)
            | Number::Len(word)
            | Number::Tag(word) => is_it(word.argument()),
            Number::Calculated(_, one, other) => {
                one.has_argument(is_it) || other.has_argument(is_it)
            }
            Number::Shifted(of, ..) => of.has_argument(is_it),
        }
    }

    /// See [`KeyPart::is_recorded`].
    fn is_recorded(&self) -> bool {
        match self {
            Number::Literal(_) | Number::Thread => true,
            Number::Word(word)
            | Number::Int(word)
            | Number::Narrow(word, ..)
            | Number::Tag(word) => !word.is_in_inner_block(),
            Number::Len(_) | Number::Caller => false,
            Number::Calculated(_, one, other) => one.is_recorded() && other.is_recorded(),
            Number::Shifted(of, ..) => of.is_recorded(),
        }
    }

    /// Returns how many registers it takes to calculate it, if the part that takes more registers is calculated first.
    pub(crate) fn registers(&self) -> usize {
        match self {
            // With one to calculate an address.
            Number::Len(_) | Number::Thread => 2,
            Number::Calculated(_, one, other) => Number::registers_of_both(one, other),
            Number::Shifted(of, ..) => of.registers(),
            _ => 1,
        }
    }

    /// Returns how many registers it takes to have both.
    pub(crate) fn registers_of_both(one: &Number, other: &Number) -> usize {
        let (one, other) = (one.registers(), other.registers());
        one.max(other).max(one.min(other) + 1)
    }
}

/// How many registers a trampoline has to calculate in.
pub(crate) const MAX_REGISTERS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Calculation {
    Add,
    Subtract,
    Multiply,
    And,
}

impl Calculation {
    pub(crate) fn apply(self, one: u64, other: u64) -> u64 {
        match self {
            Calculation::Add => one.wrapping_add(other),
            Calculation::Subtract => one.wrapping_sub(other),
            Calculation::Multiply => one.wrapping_mul(other),
            Calculation::And => one & other,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Float {
    /// Its bits. It is not a NaN.
    Literal(u64),
    /// An argument of 8 bytes.
    Word(Word),
    /// The lower 4 bytes of an argument.
    Single(Word),
    /// An OCaml `float`.
    Boxed(Word),
}

/// What hits are counted by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KeyPart {
    /// A number, and whether it may be negative.
    Number(Number, bool),
    /// A string.
    Text(Text),
    /// The id of the thread.
    Thread,
    /// The return address of the function that is called.
    Caller,
    /// Which point it is, by its name.
    Probe,
}

impl KeyPart {
    /// Returns whether a register holds it.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self, KeyPart::Number(..) | KeyPart::Text(_))
    }

    /// Returns how many registers it takes to calculate it.
    pub(crate) fn registers(&self) -> usize {
        match self {
            KeyPart::Number(number, _) => number.registers(),
            // To find its end.
            KeyPart::Text(Text::Ocaml(_)) => 2,
            // With those that the kernel is asked with.
            KeyPart::Text(Text::C(_)) => 4,
            KeyPart::Thread | KeyPart::Caller | KeyPart::Probe => 0,
        }
    }

    /// Returns whether it needs memory to be read, apart from arguments that are there.
    pub(crate) fn reads_memory(&self) -> bool {
        match self {
            KeyPart::Number(number, _) => number.reads_memory(),
            KeyPart::Text(_) => true,
            KeyPart::Thread | KeyPart::Caller | KeyPart::Probe => false,
        }
    }

    /// Returns whether the record of a hit, with so many arguments, has what it asks for. Recorded are the word of each
    /// argument, the first bytes of a string, and the first fields of a block; not the length of a long string, nor
    /// strings in fields.
    pub(crate) fn is_recorded(&self, arguments: usize) -> bool {
        let is_left_out = |index: u8| usize::from(index) >= arguments;
        !self.has_argument(&is_left_out)
            && match self {
                KeyPart::Number(number, _) => number.is_recorded(),
                KeyPart::Text(Text::Ocaml(Word::Argument(_))) | KeyPart::Thread => true,
                KeyPart::Text(_) | KeyPart::Caller | KeyPart::Probe => false,
            }
    }

    /// Returns whether it asks for an argument for which `is_it` is true.
    pub(crate) fn has_argument(&self, is_it: &impl Fn(u8) -> bool) -> bool {
        match self {
            KeyPart::Number(number, _) => number.has_argument(is_it),
            KeyPart::Text(text) => is_it(text.word().argument()),
            KeyPart::Thread | KeyPart::Caller | KeyPart::Probe => false,
        }
    }
}

/// A string of the process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Text {
    /// A block of OCaml.
    Ocaml(Word),
    /// What the word points to, up to a byte that is 0.
    C(Word),
}

impl Text {
    /// The word that points to it.
    pub(crate) fn word(&self) -> &Word {
        match self {
            Text::Ocaml(word) | Text::C(word) => word,
        }
    }

    pub(crate) fn is_of_c(&self) -> bool {
        matches!(self, Text::C(_))
    }
}

/// Returns which byte of a string of C is the last one that is read to compare it; the first one, even if none is
/// compared.
pub(crate) fn last_compared(text: &[u8], is_whole: bool) -> usize {
    (text.len() + usize::from(is_whole)).saturating_sub(1)
}

/// A word of the process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Word {
    /// The argument with this number.
    Argument(u8),
    /// This field of an OCaml block, which the word points to.
    Field(Box<Word>, u32),
}

impl Word {
    fn is_in_block(&self) -> bool {
        matches!(self, Word::Field(..))
    }

    /// Returns whether it is a field of a block that is a field itself.
    fn is_in_inner_block(&self) -> bool {
        matches!(self, Word::Field(of, _) if of.is_in_block())
    }

    /// Returns the number of the argument from which it is read.
    fn argument(&self) -> u8 {
        match self {
            Word::Argument(index) => *index,
            Word::Field(of, _) => of.argument(),
        }
    }
}

/// The least tag of blocks whose words are not values (caml/mlvalues.h): `No_scan_tag`.
pub(crate) const NO_SCAN_TAG: u64 = 251;
pub(crate) const STRING_TAG: u64 = 252;
pub(crate) const DOUBLE_TAG: u64 = 253;
pub(crate) const DOUBLE_ARRAY_TAG: u64 = 254;
/// What `Obj.tag` returns of an `int` (stdlib/obj.ml): `Obj.int_tag`.
pub(crate) const INT_TAG: u64 = 1000;

/// The longest string that is compared, in bytes.
pub(crate) const MAX_COMPARED: usize = 64;

/// Returns the words of a string as they are in its block, up to and including the one that holds what follows its last
/// byte; that one has zeros there.
pub(crate) fn words_of(text: &[u8]) -> Vec<u64> {
    let mut bytes = text.to_vec();
    bytes.resize((text.len() / 8 + 1) * 8, 0);
    words(&bytes).collect()
}

/// Returns the words of the block of a whole string: its last byte says how many unused ones are before it.
pub(crate) fn block_of(text: &[u8]) -> Vec<u64> {
    let mut words = words_of(text);
    let unused = 7 - text.len() as u64 % 8;
    if let Some(last) = words.last_mut() {
        *last |= unused << 56;
    }
    words
}
