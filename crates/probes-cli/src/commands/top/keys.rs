//! Keys, as a terminal sends them: bytes in, keys out.
//!
//! Decoded here and not by crossterm, whose loop never returns when the terminal is gone (its issue
//! 793) or if it has read only a part of an escape sequence. No signal could interrupt it then,
//! because the termination signals are blocked.

use std::str;

/// No key of a terminal sends a longer escape sequence.
const LONGEST: usize = 32;

const ESCAPE: u8 = 0x1b;

/// A key that was pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyPress {
    Character(char),
    /// A letter with Ctrl, in lower case.
    Control(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

/// Decodes what a terminal sends, in whatever pieces it comes.
#[derive(Debug, Default)]
pub(super) struct KeyDecoder {
    /// The beginning of a sequence or of a character.
    pending: Vec<u8>,
}

impl KeyDecoder {
    /// The keys that `bytes` complete.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Vec<KeyPress> {
        let mut keys = Vec::new();
        for &byte in bytes {
            self.pending.push(byte);
            self.decode_pending(&mut keys);
        }
        keys
    }

    /// Whether the last bytes are an incomplete key.
    pub(super) fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Drops the pending bytes; to be called when no more arrive. Returns [`KeyPress::Escape`] if they are
    /// a single ESC byte, which also begins every escape sequence.
    pub(super) fn flush(&mut self) -> Option<KeyPress> {
        let is_escape = self.pending == [ESCAPE];
        self.pending.clear();
        is_escape.then_some(KeyPress::Escape)
    }

    fn decode_pending(&mut self, keys: &mut Vec<KeyPress>) {
        match Decoded::of(&self.pending) {
            Decoded::Incomplete if self.pending.len() < LONGEST => return,
            Decoded::Incomplete | Decoded::Ignored => {}
            Decoded::KeyPress(key) => keys.push(key),
            // The second one may begin a sequence.
            Decoded::EscapeTwice => {
                keys.push(KeyPress::Escape);
                self.pending = vec![ESCAPE];
                return;
            }
        }
        self.pending.clear();
    }
}

/// What bytes mean.
enum Decoded {
    KeyPress(KeyPress),
    EscapeTwice,
    /// A key without a meaning here.
    Ignored,
    /// An incomplete key.
    Incomplete,
}

impl Decoded {
    fn of(bytes: &[u8]) -> Decoded {
        match bytes {
            [] | [ESCAPE] | [ESCAPE, b'[' | b'O'] => Decoded::Incomplete,
            [ESCAPE, ESCAPE] => Decoded::EscapeTwice,
            // The function keys of the Linux console have one more.
            [ESCAPE, b'[', b'['] => Decoded::Incomplete,
            [ESCAPE, b'[', b'[', ..] => Decoded::Ignored,
            // ECMA-48, 5.4: parameters and intermediate bytes, then a final one.
            [ESCAPE, b'[', .., 0x20..=0x3f] => Decoded::Incomplete,
            [ESCAPE, b'[', parameters @ .., end @ 0x40..=0x7e] => {
                Decoded::sequence(parameters, *end)
            }
            [ESCAPE, b'O', end] => Decoded::sequence(&[], *end),
            // A key with Alt, or an unknown escape sequence.
            [ESCAPE, ..] => Decoded::Ignored,
            [b'\r' | b'\n'] => Decoded::KeyPress(KeyPress::Enter),
            [0x7f | 0x08] => Decoded::KeyPress(KeyPress::Backspace),
            [byte @ 1..=26] => Decoded::KeyPress(KeyPress::Control(char::from(byte - 1 + b'a'))),
            [0..=0x1f] => Decoded::Ignored,
            bytes => match str::from_utf8(bytes) {
                Ok(text) => text
                    .chars()
                    .next()
                    .map_or(Decoded::Ignored, Decoded::character),
                Err(error) if error.error_len().is_none() => Decoded::Incomplete,
                Err(_) => Decoded::Ignored,
            },
        }
    }

    fn character(character: char) -> Decoded {
        if character.is_control() {
            Decoded::Ignored
        } else {
            Decoded::KeyPress(KeyPress::Character(character))
        }
    }

    /// The sequences of xterm and of the Linux console. Modifier keys (`1;5A`) are ignored.
    fn sequence(parameters: &[u8], end: u8) -> Decoded {
        let number = parameters.split(|&byte| byte == b';').next();
        Decoded::KeyPress(match (end, number) {
            (b'A', _) => KeyPress::Up,
            (b'B', _) => KeyPress::Down,
            (b'H', _) | (b'~', Some(b"1" | b"7")) => KeyPress::Home,
            (b'F', _) | (b'~', Some(b"4" | b"8")) => KeyPress::End,
            (b'~', Some(b"5")) => KeyPress::PageUp,
            (b'~', Some(b"6")) => KeyPress::PageDown,
            (b'M', _) if parameters.is_empty() => KeyPress::Enter,
            _ => return Decoded::Ignored,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(bytes: &[u8]) -> Vec<KeyPress> {
        let mut keys = KeyDecoder::default();
        let mut pressed = keys.feed(bytes);
        pressed.extend(keys.flush());
        assert!(!keys.is_waiting());
        pressed
    }

    #[test]
    fn split_escape_sequences_and_characters_become_keys() {
        let typed = "a\x1b[A\x1bOB\x1b[5~\x1b[6;5~\x1b[H\x1b[4~é日\r\x7f\x03\x1a".as_bytes();
        let expected = [
            KeyPress::Character('a'),
            KeyPress::Up,
            KeyPress::Down,
            KeyPress::PageUp,
            KeyPress::PageDown,
            KeyPress::Home,
            KeyPress::End,
            KeyPress::Character('é'),
            KeyPress::Character('日'),
            KeyPress::Enter,
            KeyPress::Backspace,
            KeyPress::Control('c'),
            KeyPress::Control('z'),
        ];
        assert_eq!(keys(typed), expected);
        let mut one_by_one = KeyDecoder::default();
        let pieces = typed.iter().flat_map(|&byte| one_by_one.feed(&[byte]));
        assert_eq!(pieces.collect::<Vec<KeyPress>>(), expected);
    }

    #[test]
    fn lone_escape_is_a_key_if_nothing_follows() {
        assert_eq!(keys(b"\x1b"), [KeyPress::Escape]);
        assert_eq!(keys(b"\x1b\x1b"), [KeyPress::Escape, KeyPress::Escape]);
        assert_eq!(keys(b"\x1b\x1b[A"), [KeyPress::Escape, KeyPress::Up]);
        let mut half = KeyDecoder::default();
        assert!(half.feed(b"\x1b[").is_empty() && half.is_waiting());
        assert_eq!(half.flush(), None);
    }

    #[test]
    fn unknown_sequences_are_skipped_and_do_not_accumulate() {
        assert_eq!(keys(b"\x1bx\x1b[200~\x1b[Zq"), [KeyPress::Character('q')]);
        assert_eq!(keys(b"\xff\xc3(\x00q"), [KeyPress::Character('q')]);
        // F1 of the Linux console.
        assert_eq!(keys(b"\x1b[[Aq"), [KeyPress::Character('q')]);
        let mut keys = KeyDecoder::default();
        for byte in 0..=255u8 {
            keys.feed(&[byte]);
        }
        keys.feed(b"\x1b[");
        keys.feed(&[b'0'; 100_000]);
        assert!(keys.pending.len() < LONGEST);
    }
}
