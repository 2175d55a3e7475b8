//! Answers an expression for a hit whose arguments and memory can be read: what the compiled code does, step by step.

use std::cmp::Ordering;

use super::typed::{
    DOUBLE_ARRAY_TAG, DOUBLE_TAG, Float, INT_TAG, KeyPart, MAX_COMPARED, NO_SCAN_TAG, Number,
    STRING_TAG, Signedness, Test, Text, Word, block_of, last_compared, words_of,
};

/// A hit: what its arguments are, and what is in memory. `None`: it cannot be read, or is not known.
///
/// [`Expression`](super::Expression) has an example.
pub trait Hit {
    /// Returns what the place of an argument holds: a register, or a word of the stack.
    fn argument(&self, index: usize) -> Option<u64>;

    /// Returns the eight bytes at an address.
    fn word_at(&self, address: u64) -> Option<u64>;

    /// Returns the id of the thread.
    fn thread(&self) -> Option<u32> {
        None
    }

    /// Returns the return address of the called function, in the process.
    fn caller(&self) -> Option<u64> {
        None
    }
}

/// What an expression says of a hit.
///
/// [`Expression`](crate::Expression) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is true.
    True,
    /// It is false.
    False,
    /// Neither: a value does not have the type that the expression needs (a block, not an `int`), or cannot be read.
    Untyped,
}

pub(super) fn answer(test: &Test, hit: &impl Hit) -> Answer {
    match holds(test, hit) {
        Some(true) => Answer::True,
        Some(false) => Answer::False,
        None => Answer::Untyped,
    }
}

fn holds(test: &Test, hit: &impl Hit) -> Option<bool> {
    Some(match test {
        Test::Constant(holds) => *holds,
        Test::Compare(relation, signedness, one, other) => {
            let (one, other) = (number(one, hit)?, number(other, hit)?);
            let order = match signedness {
                Signedness::Signed => (one as i64).cmp(&(other as i64)),
                Signedness::Unsigned => one.cmp(&other),
            };
            relation.holds(Some(order))
        }
        Test::CompareFloats(relation, one, other) => {
            let order: Option<Ordering> = float(one, hit)?.partial_cmp(&float(other, hit)?);
            relation.holds(order)
        }
        Test::IsString(Text::C(of), text) => {
            let bytes = bytes_of_c(of, last_compared(text, true), hit)?;
            bytes.strip_prefix(&text[..]) == Some(&[0])
        }
        Test::BeginsWith(Text::C(of), text) => {
            bytes_of_c(of, last_compared(text, false), hit)?.starts_with(text)
        }
        Test::IsString(Text::Ocaml(of), text) => {
            let at = word(of, hit)?;
            let (tag, size) = header(at, hit)?;
            let expected = block_of(text);
            if tag != STRING_TAG {
                return None;
            }
            size == expected.len() as u64 && words(at, expected.len(), hit)? == expected
        }
        Test::BeginsWith(Text::Ocaml(of), text) => {
            let at = word(of, hit)?;
            let (tag, size) = header(at, hit)?;
            let expected = words_of(text);
            if tag != STRING_TAG {
                return None;
            }
            let needed = expected.len() as u64;
            if size < needed {
                return Some(false);
            }
            let words = words(at, expected.len(), hit)?;
            let bytes = words.iter().flat_map(|word| word.to_le_bytes());
            let begins = bytes.take(text.len()).eq(text.iter().copied());
            let unused = words.last()? >> 56;
            // In a longer block, the string is certainly long enough.
            let is_long = size > needed || unused <= 7 - text.len() as u64 % 8;
            begins && is_long
        }
        Test::Not(test) => !holds(test, hit)?,
        Test::And(one, other) => holds(one, hit)? && holds(other, hit)?,
        Test::Or(one, other) => holds(one, hit)? || holds(other, hit)?,
    })
}

pub(super) fn number(of: &Number, hit: &impl Hit) -> Option<u64> {
    Some(match of {
        Number::Literal(number) => *number,
        Number::Word(of) => word(of, hit)?,
        Number::Int(of) => {
            let value = word(of, hit)?;
            if value & 1 == 0 {
                return None;
            }
            (value as i64 >> 1) as u64
        }
        Number::Narrow(of, bits, signedness) => {
            let unused = 64 - u32::from(*bits);
            let high = word(of, hit)? << unused;
            match signedness {
                Signedness::Signed => (high as i64 >> unused) as u64,
                Signedness::Unsigned => high >> unused,
            }
        }
        Number::Len(of) => {
            let at = word(of, hit)?;
            let (tag, size) = header(at, hit)?;
            match tag {
                tag if tag < NO_SCAN_TAG || tag == DOUBLE_ARRAY_TAG => size,
                STRING_TAG if size > 0 => {
                    let last = hit.word_at(at.wrapping_add(size * 8).wrapping_sub(8))?;
                    let unused = last >> 56;
                    if unused > 7 {
                        return None;
                    }
                    size * 8 - 1 - unused
                }
                _ => return None,
            }
        }
        Number::Tag(of) => {
            let at = word(of, hit)?;
            if at & 1 == 1 {
                INT_TAG
            } else {
                header(at, hit)?.0
            }
        }
        Number::Thread => hit.thread()?.into(),
        Number::Caller => hit.caller()?,
        Number::Calculated(calculation, one, other) => {
            calculation.apply(number(one, hit)?, number(other, hit)?)
        }
        Number::Shifted(of, by, Signedness::Signed) => (number(of, hit)? as i64 >> by) as u64,
        Number::Shifted(of, by, Signedness::Unsigned) => number(of, hit)? >> by,
    })
}

/// Returns the keys of a hit as words. Two hits have the same words if, and only if, all of their keys are the same; of
/// a string, the first [`MAX_COMPARED`] bytes count, and whether there are more. `None`: a key is untyped, or of a kind
/// that is not known here.
pub(crate) fn key_words(parts: &[KeyPart], hit: &impl Hit) -> Option<Box<[u64]>> {
    let mut key = Vec::with_capacity(parts.len());
    for part in parts {
        match part {
            KeyPart::Number(of, _) => key.push(number(of, hit)?),
            KeyPart::Text(Text::Ocaml(of)) => {
                let at = word(of, hit)?;
                let (tag, size) = header(at, hit)?;
                if tag != STRING_TAG {
                    return None;
                }
                // The word after the longest whole string says that this is its end.
                const WHOLE: usize = MAX_COMPARED / 8;
                let many = WHOLE.min(usize::try_from(size).ok()?);
                let end = WHOLE as u64 + 1;
                let is_whole = size < end
                    || size == end && {
                        let last = hit.word_at(at.wrapping_add(MAX_COMPARED as u64))?;
                        block_of(&[0; MAX_COMPARED]).last() == Some(&last)
                    };
                key.push(if is_whole { size } else { u64::MAX });
                key.extend(words(at, many, hit)?);
            }
            KeyPart::Thread => key.push(hit.thread()?.into()),
            KeyPart::Caller => key.push(hit.caller()?),
            KeyPart::Text(Text::C(_)) | KeyPart::Probe => return None,
        }
    }
    Some(key.into())
}

fn float(of: &Float, hit: &impl Hit) -> Option<f64> {
    let bits = match of {
        Float::Literal(bits) => *bits,
        Float::Word(of) => word(of, hit)?,
        Float::Single(of) => return Some(f32::from_bits(word(of, hit)? as u32).into()),
        Float::Boxed(of) => {
            let at = word(of, hit)?;
            let (DOUBLE_TAG, 1) = header(at, hit)? else {
                return None;
            };
            hit.word_at(at)?
        }
    };
    Some(f64::from_bits(bits))
}

fn word(of: &Word, hit: &impl Hit) -> Option<u64> {
    match of {
        Word::Argument(index) => hit.argument((*index).into()),
        Word::Field(of, field) => {
            let at = word(of, hit)?;
            let (tag, size) = header(at, hit)?;
            let field = u64::from(*field);
            if tag >= NO_SCAN_TAG || field >= size {
                return None;
            }
            hit.word_at(at.wrapping_add(8 * field))
        }
    }
}

/// Returns the bytes that a word points to, up to the one with the index `last`. All of them have to be readable.
fn bytes_of_c(of: &Word, last: usize, hit: &impl Hit) -> Option<Vec<u8>> {
    let at = word(of, hit)?;
    let bytes = (0..=last as u64).map(|index| {
        let at = at.wrapping_add(index);
        let bytes = hit.word_at(at & !7)?.to_le_bytes();
        bytes.get((at & 7) as usize).copied()
    });
    bytes.collect()
}

/// Returns the tag of the block at an address, and its size in words.
fn header(at: u64, hit: &impl Hit) -> Option<(u64, u64)> {
    // Blocks are aligned to words; odd values are integers.
    if at & 7 != 0 {
        return None;
    }
    let header = hit.word_at(at.wrapping_sub(8))?;
    // The size is in bits 10 to 55; those above may be set to something else.
    Some((header & 0xff, header << 8 >> 18))
}

fn words(at: u64, many: usize, hit: &impl Hit) -> Option<Vec<u64>> {
    let addresses = (0..many as u64).map(|index| at.wrapping_add(8 * index));
    addresses.map(|at| hit.word_at(at)).collect()
}
