//! [`Value`]: an argument of a hit, decoded as an OCaml value or as a word of C. Pure.

mod custom;
mod fields;
pub(crate) mod strings;

use std::ops::Range;
use std::sync::Arc;

pub(crate) use self::custom::CustomKind;
use self::custom::of_custom;
use self::strings::{string, text};
use crate::numbers::u64_at;
use crate::observe::layout::shared::fields::{
    CUSTOM_TAG, DOUBLE_TAG, FORWARD_TAG, GREATEST_TAG, OBJECT_TAG, STRING_TAG,
};
use crate::observe::layout::shared::record;
use crate::observe::role::ArgumentSource;

/// An argument of a hit.
///
/// ```
/// use probes_lib::Value;
///
/// fn show(value: &Value) -> String {
///     match value {
///         Value::Int(number) => number.to_string(),
///         Value::String { bytes, .. } => String::from_utf8_lossy(bytes).into_owned(),
///         other => format!("{other:?}"),
///     }
/// }
/// assert_eq!(show(&Value::Int(42)), "42");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An immediate: an `int`, a `bool`, a `char`, `()`, a constructor without arguments. Of C, a word that is no
    /// address.
    Int(i64),
    /// Of C, an unsigned number of 64 bits that is more than an `i64` holds.
    Unsigned(u64),
    /// A `float`.
    Float(f64),
    /// A `string` or `bytes`. Of C, what a word points to, if that is text.
    String {
        /// The whole string, or its first bytes, without a character of UTF-8 that would be split: 64, or 32 of a
        /// string that is a field of a block. Of C, fewer if the page ends before.
        bytes: Vec<u8>,
        /// Whether `bytes` is the whole string.
        is_whole: bool,
    },
    /// An `int32`.
    Int32(i32),
    /// An `int64`.
    Int64(i64),
    /// A `nativeint`.
    Nativeint(i64),
    /// An array of floats, or a record of floats.
    Floats {
        /// The first of them, nine at most.
        numbers: Vec<f64>,
        /// How many there are.
        size: u64,
    },
    /// A list of two elements and more: blocks with tag 0 and two fields, the second of which is the next block. (A
    /// list of one element is the same as a pair with 0.)
    List {
        /// The first of them.
        elements: Vec<Value>,
        /// Whether these are all.
        is_whole: bool,
    },
    /// An exception, or another value of an extensible type. (A tuple that begins with an exception is the same.)
    Exception {
        /// Its constructor, with the path of its module.
        name: Vec<u8>,
        /// The first of its arguments.
        arguments: Vec<Value>,
        /// Whether these are the whole name and all arguments.
        is_whole: bool,
    },
    /// A Bigarray.
    Bigarray {
        /// The kind of its elements, as in `Bigarray`: `float64`, `int8_unsigned`.
        kind: &'static str,
        /// Whether its layout is that of Fortran.
        is_fortran: bool,
        /// The first dimensions, four at most.
        dimensions: Vec<u64>,
        /// How many dimensions there are.
        rank: u64,
    },
    /// Another custom block.
    Custom {
        /// The identifier of its operations.
        identifier: Arc<str>,
    },
    /// Any other block.
    Block {
        /// Its tag: the number of a constructor, or one that caml/mlvalues.h defines.
        tag: u8,
        /// Its size in words.
        size: u64,
        /// The first of its fields; empty for a block that is itself a field, except a pair at the end of a pair.
        fields: Vec<Value>,
    },
    /// Not an OCaml value, or a block in memory that may not be read. Of C, any other address.
    Unread(u64),
    /// Passed neither in a register nor on the stack.
    Unknown,
}

/// Other tags that caml/mlvalues.h defines.
const LAZY_TAG: u8 = 246;
const CLOSURE_TAG: u8 = 247;
const INFIX_TAG: u8 = 249;
const ABSTRACT_TAG: u8 = 251;
const DOUBLE_ARRAY_TAG: u8 = 254;

impl Value {
    /// Returns what blocks with this tag are; `None` if it may be the number of a constructor, or [`Value`] has a
    /// variant for them. A lazy value that has been evaluated is `forced`.
    ///
    /// ```
    /// assert_eq!(probes_lib::Value::kind_of_block(247), Some("closure"));
    /// assert_eq!(probes_lib::Value::kind_of_block(0), None);
    /// ```
    pub fn kind_of_block(tag: u8) -> Option<&'static str> {
        Some(match tag {
            LAZY_TAG => "lazy",
            CLOSURE_TAG | INFIX_TAG => "closure",
            OBJECT_TAG => "object",
            FORWARD_TAG => "forced",
            ABSTRACT_TAG => "abstract",
            CUSTOM_TAG => "custom",
            _ => return None,
        })
    }
}

/// Returns the word with this index.
fn word(words: &[u8], index: u64) -> Option<u64> {
    let start = usize::try_from(index.checked_mul(8)?).ok()?;
    u64_at(words, start)
}

/// Returns the size in words that a header says: bits 10 to 55; other bits may be set above.
fn size_of(header: u64) -> u64 {
    header << 8 >> 18
}

/// An argument as it was recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedArgument<'r> {
    pub(crate) source: ArgumentSource,
    /// Its size in bytes.
    pub(crate) size: u8,
    pub(crate) signed: bool,
    /// Whether it is a float of this size; what is in a vector register always is one.
    pub(crate) is_float: bool,
    /// Whether it is a word of C.
    pub(crate) is_c: bool,
    pub(crate) value: u64,
    /// The header of the block.
    pub(crate) header: u64,
    /// The first words of the block, or what was copied of its fields. Of C, the words that `value` points to, from the
    /// last multiple of 8 on. `None` if nothing could be read there.
    pub(crate) words: Option<&'r [u8]>,
}

impl RecordedArgument<'_> {
    /// Decodes it; `custom` returns the kind of a custom block, from the address of its operations.
    pub(crate) fn decode(&self, custom: &mut dyn FnMut(u64) -> CustomKind) -> Value {
        match self.source {
            ArgumentSource::Unknown => return Value::Unknown,
            // `value` is the address of the argument then.
            ArgumentSource::Memory(_) if self.header == record::UNREAD => {
                return Value::Unread(self.value);
            }
            _ if self.is_float && self.size == 4 => {
                return Value::Float(f32::from_bits(self.value as u32).into());
            }
            ArgumentSource::Vector(_) => return Value::Float(f64::from_bits(self.value)),
            _ if self.is_float => return Value::Float(f64::from_bits(self.value)),
            _ => {}
        }
        if self.size < 8 {
            return Value::Int(self.narrow());
        }
        if self.is_c {
            return self.word();
        }
        if self.value & 1 == 1 {
            return Value::Int(self.value as i64 >> 1);
        }
        let Some(words) = self.words else {
            return Value::Unread(self.value);
        };
        let (tag, size) = (self.header as u8, size_of(self.header));
        if tag <= GREATEST_TAG || [OBJECT_TAG, FORWARD_TAG].contains(&tag) {
            return fields::block(tag, size, words, custom);
        }
        let words = &words[..words.len().min(8 * record::COPY_WORDS as usize)];
        let read = match tag {
            STRING_TAG => string(words, size),
            DOUBLE_TAG if size == 1 => {
                word(words, 0).map(|bits| Value::Float(f64::from_bits(bits)))
            }
            DOUBLE_ARRAY_TAG => floats(words, size),
            CUSTOM_TAG => of_custom(words, size, custom),
            _ => None,
        };
        read.unwrap_or(Value::Block {
            tag,
            size,
            fields: Vec::new(),
        })
    }

    /// Returns the word of the argument itself, if that is known.
    pub(crate) fn passed(&self) -> Option<u64> {
        let is_known = match self.source {
            ArgumentSource::Unknown => false,
            ArgumentSource::Memory(_) => self.header != record::UNREAD,
            _ => true,
        };
        is_known.then_some(self.value)
    }

    /// Returns the words of the process that were recorded of an OCaml value, by their addresses.
    pub(crate) fn memory(&self) -> Vec<(u64, u64)> {
        let Some(words) = self.words.filter(|_| !self.is_c && self.value & 7 == 0) else {
            return Vec::new();
        };
        let (tag, size) = (self.header as u8, size_of(self.header));
        let at = |index: usize| self.value.wrapping_add(8 * index as u64);
        let mut memory = vec![(self.value.wrapping_sub(8), self.header)];
        if tag <= GREATEST_TAG || tag == FORWARD_TAG {
            let fields = fields::words_of_fields(tag, size, words);
            for (index, (field, header)) in fields.into_iter().enumerate() {
                memory.push((at(index), field));
                if header != 0 {
                    memory.push((field.wrapping_sub(8), header));
                }
            }
        } else if tag != OBJECT_TAG {
            let words = (0..size).map_while(|index| word(words, index));
            memory.extend(words.enumerate().map(|(index, word)| (at(index), word)));
        }
        memory
    }

    /// Decodes a word of C.
    fn word(&self) -> Value {
        /// The addresses that programs usually have.
        const ADDRESSES: Range<u64> = 1 << 32..1 << 47;
        let skipped = self.value as usize % 8;
        match self.words {
            Some(words) => text(words.get(skipped..).unwrap_or_default()),
            None if ADDRESSES.contains(&self.value) => None,
            None if self.signed => Some(Value::Int(self.value as i64)),
            None => Some(i64::try_from(self.value).map_or(Value::Unsigned(self.value), Value::Int)),
        }
        .unwrap_or(Value::Unread(self.value))
    }

    /// Returns the number in the low `size` bytes of `value`, extended to 64 bits.
    fn narrow(&self) -> i64 {
        let unused = 64 - 8 * u32::from(self.size.max(1));
        let high = self.value << unused;
        if self.signed {
            high as i64 >> unused
        } else {
            (high >> unused) as i64
        }
    }
}

/// Returns an array of floats, of which there may be more than were copied.
fn floats(words: &[u8], size: u64) -> Option<Value> {
    let numbers = (0..size).map_while(|index| word(words, index).map(f64::from_bits));
    let numbers: Vec<f64> = numbers.collect();
    (!numbers.is_empty()).then_some(Value::Floats { numbers, size })
}

#[cfg(test)]
pub(crate) mod tests {
    use iced_x86::Register;
    use proptest::prelude::*;

    use super::*;
    use crate::observe::role::MemorySource;

    /// An OCaml value that was passed in a register.
    pub(crate) fn passed(value: u64, header: u64, words: Option<&[u8]>) -> RecordedArgument<'_> {
        RecordedArgument {
            source: ArgumentSource::Register(Register::RDI),
            size: 8,
            signed: false,
            is_float: false,
            is_c: false,
            value,
            header,
            words,
        }
    }

    fn decode(value: u64, header: u64, words: Option<&[u8]>) -> Value {
        let recorded = passed(value, header, words);
        recorded.decode(&mut |operations| {
            let identifiers = ["", "_i", "_j", "_n", "_bigarr02", "_chan"];
            let identifier = identifiers.get(operations as usize);
            let known = identifier.and_then(|it| CustomKind::of(it.as_bytes()));
            known.unwrap_or(CustomKind::Unknown)
        })
    }

    pub(super) fn block(tag: u8, size: u64, words: &[u8]) -> Value {
        // With a garbage collector's colour, and with bits set above the size.
        let header = 0xff << 56 | size << 10 | 0x300 | u64::from(tag);
        decode(0x7f00_0000_0008, header, Some(words))
    }

    #[test]
    fn immediates_are_exact() {
        assert_eq!(decode(1, 0, None), Value::Int(0));
        assert_eq!(decode(85, 0, None), Value::Int(42));
        assert_eq!(decode(u64::MAX, 0, None), Value::Int(-1));
        assert_eq!(decode(1 << 63 | 1, 0, None), Value::Int(-(1 << 62)));
        assert_eq!(decode(u64::MAX >> 1, 0, None), Value::Int((1 << 62) - 1));
    }

    #[test]
    fn narrow_numbers_have_the_size_their_note_says() {
        let narrow = |size, signed, value| {
            let recorded = RecordedArgument {
                source: ArgumentSource::on_stack(8),
                size,
                signed,
                is_float: false,
                is_c: false,
                value,
                header: 0,
                words: None,
            };
            recorded.decode(&mut |_| CustomKind::Unknown)
        };
        assert_eq!(narrow(4, true, 0xffff_ffff), Value::Int(-1));
        assert_eq!(narrow(4, false, 0x1_ffff_fffe), Value::Int(0xffff_fffe));
        assert_eq!(narrow(1, true, 0x180), Value::Int(-128));
    }

    #[test]
    fn strings_end_where_their_last_byte_says() {
        let text = |bytes: &[u8]| Value::String {
            bytes: bytes.to_vec(),
            is_whole: true,
        };
        assert_eq!(block(252, 1, b"\0\0\0\0\0\0\0\x07"), text(b""));
        assert_eq!(block(252, 1, b"seven77\0"), text(b"seven77"));
        assert_eq!(
            block(252, 2, b"eight888\0\0\0\0\0\0\0\x07"),
            text(b"eight888")
        );
        let longer = [b'x'; 72];
        let bytes = longer[..64].to_vec();
        let cut = |is_whole| Value::String {
            bytes: bytes.clone(),
            is_whole,
        };
        assert_eq!(block(252, 10, &longer), cut(false));
        // Of 64 bytes, and of 65.
        let ends = |unused: u8| [&longer[..71], &[unused]].concat();
        assert_eq!(block(252, 9, &ends(7)), cut(true));
        assert_eq!(block(252, 9, &ends(6)), cut(false));
        // A character is not split, and what is none is cut anywhere.
        for (text, shown) in [
            ("x".repeat(62) + "é!", 64),
            ("x".repeat(63) + "é", 63),
            ("x".repeat(62) + "€", 62),
            ("x".repeat(61) + "🐫", 61),
            ("x".repeat(60) + "🐫!", 64),
        ] {
            let words = [text.as_bytes(), &[0; 8]].concat();
            let bytes = text.as_bytes()[..shown].to_vec();
            let is_whole = false;
            assert_eq!(
                block(252, 10, &words[..72.min(words.len())]),
                Value::String { bytes, is_whole }
            );
        }
        let invalid = [&[b'x'; 62][..], &[0xf0, 0x9f, b'x', 0x80], &[0x80; 6]].concat();
        let bytes = invalid[..64].to_vec();
        assert_eq!(
            block(252, 10, &invalid),
            Value::String {
                bytes,
                is_whole: false
            }
        );
        // A block that is not a valid string is returned as a block.
        assert_eq!(block(252, 1, &[0xff; 8]), described(252, 1));
        assert_eq!(block(252, 1, &[]), described(252, 1));
    }

    #[test]
    fn words_of_c_are_numbers_text_or_addresses() {
        let typed = |signed, value: u64, words: Option<&[u8]>| {
            let recorded = RecordedArgument {
                source: ArgumentSource::Register(Register::RDI),
                size: 8,
                signed,
                is_float: false,
                is_c: true,
                value,
                header: 0,
                words,
            };
            recorded.decode(&mut |_| CustomKind::Unknown)
        };
        let word = |value, words| typed(true, value, words);
        let text = |text: &str, is_whole| Value::String {
            bytes: text.as_bytes().to_vec(),
            is_whole,
        };
        for (value, expected) in [
            (0, Value::Int(0)),
            (7, Value::Int(7)),
            (u64::MAX, Value::Int(-1)),
            (1 << 32, Value::Unread(1 << 32)),
            (1 << 47, Value::Int(1 << 47)),
        ] {
            assert_eq!(word(value, None), expected);
        }
        for (value, expected) in [
            (7, Value::Int(7)),
            (u64::MAX >> 1, Value::Int(i64::MAX)),
            (1 << 63, Value::Unsigned(1 << 63)),
            (u64::MAX, Value::Unsigned(u64::MAX)),
            (1 << 32, Value::Unread(1 << 32)),
        ] {
            assert_eq!(typed(false, value, None), expected);
        }
        // At a multiple of 8, and 3 after one.
        assert_eq!(word(0x1000, Some(b"GET\0xxxx")), text("GET", true));
        assert_eq!(word(0x1003, Some(b"xxxG\tT\0x")), text("G\tT", true));
        let words = "x".repeat(72);
        let shown = text(&words[..64], false);
        assert_eq!(word(0x1000, Some(words.as_bytes())), shown);
        // A page ends there, with a part of a character.
        assert_eq!(
            word(0x1ff8, Some(b"12345\xf0\x9f\x90")),
            text("12345", false)
        );
        for no_text in [
            &b"\0xxxxxxx"[..],
            b"\x01xxxxxx\0",
            b"ab\xffcd\0xx",
            b"abcdef\xc3\0",
            b"",
        ] {
            assert_eq!(word(0x1000, Some(no_text)), Value::Unread(0x1000));
        }
    }

    #[test]
    fn boxed_numbers_are_decoded_other_blocks_described() {
        assert_eq!(block(253, 1, &1.5_f64.to_le_bytes()), Value::Float(1.5));
        let custom = |operations: u64, number: i64| {
            let mut words = operations.to_le_bytes().to_vec();
            words.extend(number.to_le_bytes());
            block(255, 2, &words)
        };
        assert_eq!(custom(1, -7), Value::Int32(-7));
        assert_eq!(custom(2, i64::MIN), Value::Int64(i64::MIN));
        assert_eq!(custom(3, 7), Value::Nativeint(7));
        assert_eq!(custom(9, 7), described(255, 2));
        let identifier = "_chan".into();
        assert_eq!(custom(5, 7), Value::Custom { identifier });
        assert_eq!(block(0, 3, &[]), described(0, 3));
        assert_eq!(block(247, 5, &[]), described(247, 5));
        assert_eq!(decode(0x1000, 0, None), Value::Unread(0x1000));
    }

    /// A block of which nothing else is known.
    pub(super) fn described(tag: u8, size: u64) -> Value {
        Value::Block {
            tag,
            size,
            fields: Vec::new(),
        }
    }

    /// The words of a block, as they are copied.
    pub(super) fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    pub(super) const AT: u64 = 0x7f00_0000_1000;

    #[test]
    fn arrays_of_floats_are_decoded() {
        let all: Vec<f64> = (0..9).map(f64::from).collect();
        let words: Vec<u64> = all.iter().map(|it| it.to_bits()).collect();
        let floats = |many: usize, size| Value::Floats {
            numbers: all[..many].to_vec(),
            size,
        };
        assert_eq!(block(254, 2, &bytes(&words[..2])), floats(2, 2));
        assert_eq!(block(254, 1000, &bytes(&words)), floats(9, 1000));
        // Not more than the block has.
        assert_eq!(block(254, 2, &bytes(&words)), floats(2, 2));
        assert_eq!(block(254, 2, &[]), described(254, 2));
    }

    proptest! {
        #[test]
        fn any_words_are_decoded_to_few_values(
            tag in any::<u8>(),
            size in prop_oneof![0_u64..30, any::<u64>()],
            words in proptest::collection::vec(
                prop_oneof![
                    any::<u64>(),
                    0_u64..64,
                    (0_u64..30, 240_u64..256).prop_map(|(size, tag)| size << 10 | tag),
                ],
                0..=22,
            ),
        ) {
            let value = block(tag, size & 0x3fff_ffff_ffff, &bytes(&words));
            prop_assert!(values_in(&value) <= 44, "{value:?}");
        }
    }

    fn values_in(value: &Value) -> usize {
        let inner = match value {
            Value::Block { fields, .. } => fields,
            Value::List { elements, .. } => elements,
            Value::Exception { arguments, .. } => arguments,
            Value::Floats { numbers, .. } => return numbers.len(),
            Value::Bigarray { dimensions, .. } => return dimensions.len(),
            _ => return 1,
        };
        1 + inner.iter().map(values_in).sum::<usize>()
    }

    #[test]
    fn blocks_of_other_tags_have_a_kind() {
        for (tag, kind) in [
            (246, Some("lazy")),
            (247, Some("closure")),
            (248, Some("object")),
            (249, Some("closure")),
            (250, Some("forced")),
            (251, Some("abstract")),
            (255, Some("custom")),
            (0, None),
            (243, None),
            (252, None),
        ] {
            assert_eq!(Value::kind_of_block(tag), kind, "{tag}");
        }
    }

    #[test]
    fn sources_say_what_is_decoded() {
        let decode = |source, size, is_float, value, header| {
            let recorded = RecordedArgument {
                source,
                size,
                signed: false,
                is_float,
                is_c: false,
                value,
                header,
                words: None,
            };
            recorded.decode(&mut |_| CustomKind::Unknown)
        };
        let half = 0.5_f64.to_bits();
        let vector = ArgumentSource::Vector(Register::XMM1);
        let register = ArgumentSource::Register(Register::RDI);
        let memory = ArgumentSource::Memory(MemorySource {
            base: Some(Register::RBX),
            index: None,
            displacement: 0,
            size: 8,
        });
        assert_eq!(
            decode(ArgumentSource::Unknown, 8, false, 85, 0),
            Value::Unknown
        );
        assert_eq!(decode(vector, 8, false, half, 0), Value::Float(0.5));
        let single = u64::from(0.25_f32.to_bits());
        assert_eq!(decode(vector, 4, true, single, 0), Value::Float(0.25));
        assert_eq!(decode(register, 4, true, single, 0), Value::Float(0.25));
        assert_eq!(decode(register, 8, true, half, 0), Value::Float(0.5));
        // What is no float, or has another size.
        assert_eq!(decode(register, 4, false, 77, 0), Value::Int(77));
        assert_eq!(decode(register, 8, false, 85, 0), Value::Int(42));
        // Only of an operand in memory, the header says that it was not read.
        assert_eq!(
            decode(memory, 8, false, 85, record::UNREAD),
            Value::Unread(85)
        );
        assert_eq!(decode(memory, 8, false, 85, 0), Value::Int(42));
        assert_eq!(
            decode(register, 8, false, 85, record::UNREAD),
            Value::Int(42)
        );
    }
}
