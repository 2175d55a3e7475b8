//! [`Value`]: an argument of a hit, decoded as an OCaml value or as a word of C. Pure.

use std::ops::Range;

use crate::observe::layout::shared::record;
use crate::observe::point::ArgumentSource;

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
    /// An immediate: an `int`, a `bool`, a `char`, `()`, a constructor without arguments. Of C, a word that is no address.
    Int(i64),
    /// A `float`.
    Float(f64),
    /// A `string` or `bytes`. Of C, what a word points to, if that is text.
    String {
        /// The whole string, or its first 64 bytes, without a character of UTF-8 that would be split.
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
    /// Any other block.
    Block {
        /// Its tag: the number of a constructor, or one that caml/mlvalues.h defines.
        tag: u8,
        /// Its size in words.
        size: u64,
    },
    /// Not an OCaml value, or a block in memory that may not be read. Of C, any other address.
    Unread(u64),
    /// Passed neither in a register nor on the stack.
    Unknown,
}

/// The tags of blocks whose words are not values (caml/mlvalues.h).
const STRING: u8 = 252;
const DOUBLE: u8 = 253;
const CUSTOM: u8 = 255;

/// How much of a string is shown, in bytes.
const SHOWN: usize = 64;

/// The kind of a custom block, by the name of its operations (runtime/ints.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Custom {
    Int32,
    Int64,
    Nativeint,
    Other,
}

impl Custom {
    /// Returns the kind of this name, which ends with a null byte.
    pub(crate) fn of(name: &[u8]) -> Custom {
        match name {
            [b'_', b'i', 0, ..] => Custom::Int32,
            [b'_', b'j', 0, ..] => Custom::Int64,
            [b'_', b'n', 0, ..] => Custom::Nativeint,
            _ => Custom::Other,
        }
    }
}

/// An argument as it was recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recorded<'r> {
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
    /// The first words of the block, or of C those from the last multiple of 8 on; `None` if it is not a block, or not an
    /// address, that could be read.
    pub(crate) words: Option<&'r [u8]>,
}

impl Recorded<'_> {
    /// Decodes it; `custom` returns the kind of a custom block, from the address of its operations.
    pub(crate) fn decode(&self, custom: impl FnOnce(u64) -> Custom) -> Value {
        match self.source {
            ArgumentSource::Unknown => return Value::Unknown,
            // It holds the address instead.
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
        let tag = self.header as u8;
        // Bits 10 to 55; other bits may be set above.
        let size = self.header << 8 >> 18;
        let word = |index: usize| {
            let bytes = words.get(8 * index..8 * index + 8)?.try_into().ok()?;
            Some(u64::from_le_bytes(bytes))
        };
        let of_custom = || {
            let number = word(1)?;
            Some(match custom(word(0)?) {
                Custom::Int32 => Value::Int32(number as i32),
                Custom::Int64 => Value::Int64(number as i64),
                Custom::Nativeint => Value::Nativeint(number as i64),
                Custom::Other => return None,
            })
        };
        let read = match tag {
            STRING => string(words, size),
            DOUBLE if size == 1 => word(0).map(|bits| Value::Float(f64::from_bits(bits))),
            CUSTOM => of_custom(),
            _ => None,
        };
        read.unwrap_or(Value::Block { tag, size })
    }

    /// Decodes a word of C.
    fn word(&self) -> Value {
        /// Between them are the addresses that programs usually have.
        const ADDRESSES: Range<u64> = 1 << 32..1 << 47;
        let skipped = self.value as usize % 8;
        match self.words {
            Some(words) => text(words.get(skipped..).unwrap_or_default()),
            None if ADDRESSES.contains(&self.value) => None,
            None => Some(Value::Int(self.value as i64)),
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

/// Returns a string. The last byte of a string's block is the number of bytes before that byte
/// that do not belong to the string.
fn string(words: &[u8], size: u64) -> Option<Value> {
    let &unused = words.last()?;
    let is_copied = size <= record::COPY_WORDS;
    let len = if is_copied {
        words.len().checked_sub(1 + usize::from(unused))?
    } else {
        words.len()
    };
    let bytes = words.get(..len)?;
    let is_whole = is_copied && len <= SHOWN;
    let shown = if is_whole { len } else { cut(bytes) };
    let bytes = bytes[..shown].to_vec();
    Some(Value::String { bytes, is_whole })
}

/// Returns the text that ends with a null byte, or is longer than `bytes`; `None` if it is empty, or cannot be printed.
fn text(bytes: &[u8]) -> Option<Value> {
    let end = bytes.iter().position(|&byte| byte == 0);
    let bytes = &bytes[..end.unwrap_or(bytes.len())];
    let mut chunks = bytes.utf8_chunks();
    let first = chunks.next()?;
    // The last character may be cut off.
    let is_text = chunks.next().is_none() && (first.invalid().is_empty() || end.is_none());
    let is_shown = |shown: char| !shown.is_control() || matches!(shown, '\t' | '\n' | '\r');
    let text = first.valid();
    if text.is_empty() || !is_text || !text.chars().all(is_shown) {
        return None;
    }
    let is_whole = end.is_some() && text.len() <= SHOWN;
    let shown = cut(text.as_bytes());
    let bytes = text.as_bytes()[..shown].to_vec();
    Some(Value::String { bytes, is_whole })
}

/// Returns how many bytes of a longer string are shown: [`SHOWN`], or up to three less, if a character of UTF-8 would be
/// split.
fn cut(bytes: &[u8]) -> usize {
    const LONGEST: usize = 4;
    if bytes.len() <= SHOWN {
        return bytes.len();
    }
    let splits = |&start: &usize| {
        let end = (start + LONGEST).min(bytes.len());
        let first = bytes[start..end].utf8_chunks().next();
        let first = first.and_then(|chunk| chunk.valid().chars().next());
        first.is_some_and(|first| start + first.len_utf8() > SHOWN)
    };
    (SHOWN - LONGEST + 1..SHOWN).find(splits).unwrap_or(SHOWN)
}

#[cfg(test)]
mod tests {
    use iced_x86::Register;

    use super::*;

    fn decode(value: u64, header: u64, words: Option<&[u8]>) -> Value {
        let recorded = Recorded {
            source: ArgumentSource::Register(Register::RDI),
            size: 8,
            signed: false,
            is_float: false,
            is_c: false,
            value,
            header,
            words,
        };
        recorded.decode(|operations| match operations {
            1 => Custom::of(b"_i\0rest"),
            2 => Custom::of(b"_j\0"),
            3 => Custom::of(b"_n\0"),
            _ => Custom::of(b"_bigarr02\0"),
        })
    }

    fn block(tag: u8, size: u64, words: &[u8]) -> Value {
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
            let recorded = Recorded {
                source: ArgumentSource::Stack(8),
                size,
                signed,
                is_float: false,
                is_c: false,
                value,
                header: 0,
                words: None,
            };
            recorded.decode(|_| Custom::Other)
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
        let (tag, size) = (252, 1);
        assert_eq!(block(252, 1, &[0xff; 8]), Value::Block { tag, size });
        assert_eq!(block(252, 1, &[]), Value::Block { tag, size });
    }

    #[test]
    fn words_of_c_are_numbers_text_or_addresses() {
        let word = |value: u64, words: Option<&[u8]>| {
            let recorded = Recorded {
                source: ArgumentSource::Register(Register::RDI),
                size: 8,
                signed: false,
                is_float: false,
                is_c: true,
                value,
                header: 0,
                words,
            };
            recorded.decode(|_| Custom::Other)
        };
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
        // At a multiple of 8, and 3 behind one.
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
        assert_eq!(custom(9, 7), Value::Block { tag: 255, size: 2 });
        assert_eq!(block(0, 3, &[]), Value::Block { tag: 0, size: 3 });
        assert_eq!(block(247, 5, &[]), Value::Block { tag: 247, size: 5 });
        assert_eq!(decode(0x1000, 0, None), Value::Unread(0x1000));
    }
}
