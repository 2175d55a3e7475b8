//! Decodes strings of OCaml and text of C, and cuts them off. Pure.

use super::Value;
use crate::observe::layout::shared::record;

/// How much of a string is shown, in bytes.
const SHOWN: usize = 64;

/// Returns the bytes of the string of OCaml in a block: its last byte is the number of bytes before that byte that do not
/// belong to the string.
pub(crate) fn string_in(block: &[u8]) -> Option<&[u8]> {
    let (&unused, others) = block.split_last()?;
    others.get(..others.len().checked_sub(unused.into())?)
}

/// Returns the string in a block of this size, from the first words of the block.
pub(super) fn string(words: &[u8], size: u64) -> Option<Value> {
    let is_copied = size <= record::COPY_WORDS;
    let bytes = if is_copied { string_in(words)? } else { words };
    let is_whole = is_copied && bytes.len() <= SHOWN;
    let shown = if is_whole { bytes.len() } else { cut(bytes) };
    let bytes = bytes[..shown].to_vec();
    Some(Value::String { bytes, is_whole })
}

/// Returns the text up to the first null byte, or all of `bytes` if there is none; `None` if it is empty, or cannot be
/// printed.
pub(super) fn text(bytes: &[u8]) -> Option<Value> {
    let end = bytes.iter().position(|&byte| byte == 0);
    let bytes = &bytes[..end.unwrap_or(bytes.len())];
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        // The last character is cut off.
        Err(error) if end.is_none() && error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let is_printable = |char: char| !char.is_control() || matches!(char, '\t' | '\n' | '\r');
    if text.is_empty() || !text.chars().all(is_printable) {
        return None;
    }
    let is_whole = end.is_some() && text.len() <= SHOWN;
    let shown = cut(text.as_bytes());
    let bytes = text.as_bytes()[..shown].to_vec();
    Some(Value::String { bytes, is_whole })
}

/// Returns how many bytes of a longer string are shown: [`SHOWN`], or up to three less, if a character of UTF-8 would
/// be split.
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
