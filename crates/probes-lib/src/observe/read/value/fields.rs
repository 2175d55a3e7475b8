//! Decodes what was copied of the fields of a block; [`fields`] has the format. It may be anything: the program can
//! overwrite it. Pure.

use super::custom::{CustomKind, of_custom};
use super::strings::string_in;
use super::{Value, size_of, word};
use crate::observe::layout::shared::fields;

/// Decodes a block of this tag and size, from the words that were copied of it.
pub(super) fn block(
    tag: u8,
    size: u64,
    words: &[u8],
    custom: &mut dyn FnMut(u64) -> CustomKind,
) -> Value {
    let mut reader = Fields { words, at: 1 };
    let mut values: Vec<Value> = std::iter::from_fn(|| reader.next(custom)).collect();
    let is_exception = matches!(values.first(), Some(Value::Exception { .. }));
    if tag == fields::OBJECT_TAG {
        return match values.into_iter().next() {
            Some(exception) if is_exception => exception,
            _ => Value::Block {
                tag,
                size,
                fields: Vec::new(),
            },
        };
    }
    let cells = word(words, 0).unwrap_or(0);
    if cells > 0 && (tag, size) == (0, 2) {
        return cells_of(values, cells);
    }
    values.truncate(usize::try_from(size).unwrap_or(usize::MAX));
    let has_all = values.len() as u64 == size;
    if is_exception && tag == 0 && !values.is_empty() {
        let rest = values.split_off(1);
        if let Some(Value::Exception { name, is_whole, .. }) = values.pop() {
            return Value::Exception {
                name,
                arguments: rest,
                is_whole: is_whole && has_all,
            };
        }
    }
    Value::Block {
        tag,
        size,
        fields: values,
    }
}

/// Returns the value whose first cell is followed by `cells` others: a list or, if the second field of the last cell is
/// not the empty list, pairs in pairs.
fn cells_of(mut values: Vec<Value>, cells: u64) -> Value {
    let elements = usize::try_from(cells).map_or(usize::MAX, |cells| cells.saturating_add(1));
    let end = (values.len() > elements).then(|| values.swap_remove(elements));
    values.truncate(elements);
    match end {
        None | Some(Value::Int(0)) => Value::List {
            elements: values,
            is_whole: end.is_some(),
        },
        Some(end) => values
            .into_iter()
            .rev()
            .fold(end, |rest, element| Value::Block {
                tag: 0,
                size: 2,
                fields: vec![element, rest],
            }),
    }
}

/// Returns the words of the first fields of a block of this tag and size, from what was copied of it, each with the
/// header of the block that it points to; 0 if that is not known.
pub(super) fn words_of_fields(tag: u8, size: u64, words: &[u8]) -> Vec<(u64, u64)> {
    let mut reader = Fields { words, at: 1 };
    let mut fields = Vec::new();
    // Of a list, the first fields of the next cells follow.
    let is_list = word(words, 0).unwrap_or(0) > 0 && (tag, size) == (0, 2);
    let most = if is_list { 1 } else { size };
    while (fields.len() as u64) < most {
        let at = reader.at;
        let Some(value) = reader.word() else {
            break;
        };
        let header = if value & 7 == 0 { reader.word() } else { None };
        fields.push((value, header.unwrap_or(0)));
        // What was copied of the block that it points to is skipped.
        reader.at = at;
        if reader.next(&mut |_| CustomKind::Unknown).is_none() {
            break;
        }
    }
    fields
}

/// Words that are being decoded.
struct Fields<'r> {
    words: &'r [u8],
    /// The index of the next word.
    at: u64,
}

impl<'r> Fields<'r> {
    fn next(&mut self, custom: &mut dyn FnMut(u64) -> CustomKind) -> Option<Value> {
        let value = self.word()?;
        if value & 1 == 1 {
            return Some(Value::Int(value as i64 >> 1));
        }
        if value & 7 != 0 {
            return Some(Value::Unread(value));
        }
        let header = self.word()?;
        if header == 0 {
            return Some(Value::Unread(value));
        }
        let (tag, size) = (header as u8, size_of(header));
        let read = match tag {
            fields::OBJECT_TAG => self.exception()?,
            fields::STRING_TAG => string(self.opaque(tag, size)?, size),
            fields::DOUBLE_TAG if size == 1 => {
                let bits = word(self.opaque(tag, size)?, 0);
                bits.map(|bits| Value::Float(f64::from_bits(bits)))
            }
            fields::CUSTOM_TAG => of_custom(self.opaque(tag, size)?, size, custom),
            _ => {
                self.opaque(tag, size)?;
                None
            }
        };
        Some(read.unwrap_or(Value::Block {
            tag,
            size,
            fields: Vec::new(),
        }))
    }

    /// Decodes an object: an exception without arguments, or the constructor of one with arguments. Returns
    /// `Some(None)` if it is another object, `None` if the words end before.
    fn exception(&mut self) -> Option<Option<Value>> {
        let header = self.word()?;
        if header as u8 != fields::STRING_TAG {
            return Some(None);
        }
        let size = size_of(header);
        let name = string(self.take(fields::NAME_WORDS, size)?, size);
        Some(match name {
            Some(Value::String { bytes, is_whole }) => Some(Value::Exception {
                name: bytes,
                arguments: Vec::new(),
                is_whole,
            }),
            _ => None,
        })
    }

    fn word(&mut self) -> Option<u64> {
        let word = word(self.words, self.at)?;
        self.at += 1;
        Some(word)
    }

    /// Returns the words that were copied of a field that is a block of this tag and size.
    fn opaque(&mut self, tag: u8, size: u64) -> Option<&'r [u8]> {
        let limits = fields::OPAQUE_WORDS.into_iter();
        let mut of_tag = limits.filter(|(other, _)| *other == tag);
        self.take(of_tag.next().map_or(0, |(_, words)| words), size)
    }

    /// Returns the first words of a block of this size: at most `most`, and as many as there was room for.
    fn take(&mut self, most: u64, size: u64) -> Option<&'r [u8]> {
        let room = fields::WORDS.checked_sub(self.at)?;
        let many = most.min(size).min(room);
        let start = self.at as usize * 8;
        let words = self.words.get(start..start + many as usize * 8)?;
        self.at += many;
        Some(words)
    }
}

/// Decodes the string in a block of this size, from the first words of the block.
fn string(words: &[u8], size: u64) -> Option<Value> {
    let is_whole = words.len() as u64 == size.checked_mul(8)?;
    let bytes = if is_whole {
        string_in(words)?
    } else {
        words.get(..words.len() - split_at_end(words))?
    };
    Some(Value::String {
        bytes: bytes.to_vec(),
        is_whole,
    })
}

/// Returns how many bytes at the end are the beginning of a character of UTF-8 that is cut off.
fn split_at_end(bytes: &[u8]) -> usize {
    let lens = 1..=3.min(bytes.len());
    let is_split = |len: &usize| {
        let end = std::str::from_utf8(&bytes[bytes.len() - len..]);
        end.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    lens.rev().find(is_split).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use crate::observe::read::value::Value;
    use crate::observe::read::value::tests::{AT, block, bytes, described};

    fn int(number: i64) -> u64 {
        (number << 1 | 1) as u64
    }

    fn header(tag: u8, size: u64) -> u64 {
        size << 10 | 0x300 | u64::from(tag)
    }

    fn text(text: &str, is_whole: bool) -> Value {
        Value::String {
            bytes: text.as_bytes().to_vec(),
            is_whole,
        }
    }

    #[test]
    fn fields_are_decoded_one_level_deep() {
        let hello = u64::from_le_bytes(*b"hello\0\0\x02");
        let words = [
            0,
            int(-7),
            AT,
            header(252, 1),
            hello,
            AT,
            header(253, 1),
            1.5_f64.to_bits(),
            AT,
            header(255, 3),
            2,
            99,
            AT,
            header(1, 4),
            AT,
            0,
            6,
        ];
        let fields = vec![
            Value::Int(-7),
            text("hello", true),
            Value::Float(1.5),
            Value::Int64(99),
            described(1, 4),
            Value::Unread(AT),
            Value::Unread(6),
        ];
        let of = |tag, size, fields: &[Value]| Value::Block {
            tag,
            size,
            fields: fields.to_vec(),
        };
        assert_eq!(block(0, 7, &bytes(&words)), of(0, 7, &fields));
        // The block has more, or the record has.
        assert_eq!(block(3, 900, &bytes(&words)), of(3, 900, &fields));
        assert_eq!(block(0, 2, &bytes(&words)), of(0, 2, &fields[..2]));
        assert_eq!(
            block(250, 1, &bytes(&[0, int(6)])),
            of(250, 1, &[Value::Int(6)])
        );
        // Of a long string there are four words, and characters are not split.
        let long = b"123456789 123456789 123456789 1\xc3";
        let words = [&bytes(&[0, AT, header(252, 9)]), &long[..]].concat();
        let cut = text(std::str::from_utf8(&long[..31]).unwrap(), false);
        assert_eq!(block(0, 1, &words), of(0, 1, &[cut]));
    }

    #[test]
    fn cells_are_lists_if_they_end_like_one() {
        let [one, two, three] = [1, 2, 3].map(Value::Int);
        let list = |elements: &[&Value], is_whole| Value::List {
            elements: elements.iter().copied().cloned().collect(),
            is_whole,
        };
        let words = [2, int(1), int(2), int(3), int(0)];
        let decoded = |many: usize| block(0, 2, &bytes(&words[..many]));
        assert_eq!(decoded(5), list(&[&one, &two, &three], true));
        assert_eq!(decoded(4), list(&[&one, &two, &three], false));
        assert_eq!(decoded(2), list(&[&one], false));
        // Pairs in pairs, and a pair that may be a list of one element.
        let pair = |one: &Value, other: Value| Value::Block {
            tag: 0,
            size: 2,
            fields: vec![one.clone(), other],
        };
        let nested = pair(&one, pair(&two, three.clone()));
        let words = [1, int(1), int(2), int(3)];
        assert_eq!(block(0, 2, &bytes(&words)), nested);
        let words = [0, int(1), int(0)];
        assert_eq!(block(0, 2, &bytes(&words)), pair(&one, Value::Int(0)));
        // A number of elements that cannot be right.
        let words = [u64::MAX, int(1), int(2)];
        assert_eq!(block(0, 2, &bytes(&words)), list(&[&one, &two], false));
    }

    #[test]
    fn exceptions_are_known_by_name() {
        let failure = u64::from_le_bytes(*b"Failure\0");
        let exception = |name: &str, arguments: &[Value], is_whole| Value::Exception {
            name: name.as_bytes().to_vec(),
            arguments: arguments.to_vec(),
            is_whole,
        };
        let words = [0, AT, header(248, 2), header(252, 1), failure, int(3)];
        let with_three = exception("Failure", &[Value::Int(3)], true);
        assert_eq!(block(0, 2, &bytes(&words)), with_three);
        let cut = exception("Failure", &[Value::Int(3)], false);
        assert_eq!(block(0, 3, &bytes(&words)), cut);
        // A block without fields has none, whatever was written to the ring.
        assert_eq!(block(0, 0, &bytes(&words)), described(0, 0));
        let alone = exception("Failure", &[], true);
        assert_eq!(block(248, 2, &bytes(&words[..5])), alone);
        // An object, whose first field is no string.
        assert_eq!(
            block(248, 3, &bytes(&[0, AT, header(248, 3), 0])),
            described(248, 3)
        );
        // Of a long name there are eight words.
        let name = ["A"; 64].concat();
        let words = [
            &bytes(&[0, AT, header(248, 2), header(252, 20)]),
            name.as_bytes(),
        ]
        .concat();
        assert_eq!(block(248, 2, &words), exception(&name, &[], false));
    }
}
