//! [`PairKey`]: the key of a pair at one of its ends, from the words that were recorded of the hit. Pure.

use crate::expression::Hit;
use crate::expression::interpret::key_words;
use crate::expression::typed::KeyPart;
use crate::observe::read::value::RecordedArgument;

/// The key of a pair ([`Observation::match_by`](crate::Observation::match_by)) at a hit: a stop belongs to the start
/// with the same key, in whichever thread.
///
/// ```no_run
/// use std::collections::HashMap;
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new()
///     .watch(Selector::name("req_start"))
///     .watch(Selector::name("req_end"))
///     .time("req_start", "req_end")
///     .match_by("request".parse()?)
///     .with_pair_keys();
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let mut began = HashMap::new();
/// for event in observer.events()?.events {
///     let Some(key) = event.pair_key.clone() else {
///         continue;
///     };
///     if event.name() == "req_start" {
///         began.insert(key, event.monotonic);
///     } else if let Some(began) = began.remove(&key) {
///         println!("a request took {} ns", event.monotonic.saturating_sub(began));
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PairKey(Box<[u64]>);

impl PairKey {
    /// Returns the key of these parts at a hit with these recorded arguments; `None` if it has no value.
    pub(super) fn of(
        parts: &[KeyPart],
        arguments: &[RecordedArgument<'_>],
        thread: Option<i32>,
    ) -> Option<PairKey> {
        let reads_memory = parts.iter().any(KeyPart::reads_memory);
        let memory = arguments.iter().filter(|_| reads_memory);
        let hit = RecordedWords {
            arguments,
            memory: memory.flat_map(RecordedArgument::memory).collect(),
            thread: thread.map(|tid| tid as u32),
        };
        key_words(parts, &hit).map(PairKey)
    }
}

/// What was recorded of a hit.
struct RecordedWords<'r> {
    arguments: &'r [RecordedArgument<'r>],
    /// Words of the process, by their addresses.
    memory: Vec<(u64, u64)>,
    thread: Option<u32>,
}

impl Hit for RecordedWords<'_> {
    fn argument(&self, index: usize) -> Option<u64> {
        self.arguments.get(index)?.passed()
    }

    fn word_at(&self, address: u64) -> Option<u64> {
        let found = self.memory.iter().find(|(at, _)| *at == address);
        found.map(|(_, word)| *word)
    }

    fn thread(&self) -> Option<u32> {
        self.thread
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expression::{Keys, Parameter, ParameterKind, Scope};
    use crate::observe::read::value::tests::passed as argument;
    use crate::observe::role::ArgumentSource;

    const AT: u64 = 0x7f00_0000_0008;
    const STRING: u64 = 252;

    fn int(number: u64) -> u64 {
        number << 1 | 1
    }

    fn parts(keys: &str) -> Vec<KeyPart> {
        let keys: Keys = keys.parse().unwrap();
        let value = || Parameter {
            name: None,
            kind: ParameterKind::Value,
        };
        let scope = Scope::of("probe p", "p", vec![value(), value()]);
        keys.parts_of_recorded_pair(&scope).unwrap()
    }

    fn key(keys: &str, argument: RecordedArgument<'_>) -> Option<PairKey> {
        PairKey::of(&parts(keys), &[argument], Some(7))
    }

    /// The words of a string, as many as are copied.
    fn string(text: &[u8]) -> (u64, Vec<u8>) {
        let size = text.len() / 8 + 1;
        let mut bytes = text.to_vec();
        bytes.resize(8 * size - 1, 0);
        bytes.push(7 - (text.len() % 8) as u8);
        bytes.truncate(8 * 9);
        ((size as u64) << 10 | STRING, bytes)
    }

    fn key_of_text(text: &[u8]) -> PairKey {
        let (header, words) = string(text);
        let key = key("str(arg0)", argument(AT, header, Some(&words)));
        key.unwrap()
    }

    #[test]
    fn keys_are_the_same_for_the_same_numbers() {
        let of = |number| key("arg0, tid", argument(int(number), 0, None)).unwrap();
        assert_eq!(of(5), of(5));
        assert_ne!(of(5), of(6));
        assert_eq!(key("arg0", argument(AT, 0, None)), None, "no int");
        assert_eq!(
            PairKey::of(&parts("tid"), &[], None),
            None,
            "an unknown thread"
        );
        let unread = RecordedArgument {
            source: ArgumentSource::Unknown,
            ..argument(int(5), 0, None)
        };
        assert_eq!(key("arg0", unread), None);
        assert_eq!(key("arg1", argument(int(5), 0, None)), None);
    }

    #[test]
    fn strings_count_with_their_first_64_bytes() {
        assert_eq!(key_of_text(b"seven77"), key_of_text(b"seven77"));
        assert_ne!(key_of_text(b"seven77"), key_of_text(b"seven7"));
        assert_ne!(key_of_text(b""), key_of_text(b"\0"));
        let long = [b'x'; 80];
        let all: Vec<PairKey> = (62..80).map(|len| key_of_text(&long[..len])).collect();
        // Up to 64 bytes each is its own, and all longer ones are the same.
        for (index, one) in all.iter().enumerate() {
            for (other, key) in all.iter().enumerate() {
                let are_same = index == other || index > 2 && other > 2;
                assert_eq!(one == key, are_same, "{index} {other}");
            }
        }
        let (header, words) = string(&long);
        assert_eq!(
            key("str(arg0)", argument(AT, header, Some(&words[..40]))),
            None
        );
        assert_eq!(key("str(arg0)", argument(AT, header, None)), None);
    }

    #[test]
    fn ints_in_fields_are_found_after_copied_blocks() {
        let block = 3 << 10;
        let words =
            |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|it| it.to_le_bytes()).collect() };
        // No cells; a string of a word, a block of which only the header is known, an int.
        let fields = words(&[0, 0x8000, 1 << 10 | STRING, 0x0700, 0x9000, 5 << 10, int(9)]);
        let of = |keys| key(keys, argument(AT, block, Some(&fields)));
        assert_eq!(of("arg0.2"), key("arg0", argument(int(9), 0, None)));
        assert_eq!(of("arg0.1"), None, "no int");
        assert_eq!(of("arg0.3"), None, "no such field");
        assert!(of("tag(arg0.0)").is_some());
        // Of a list, only the first field is that of the first block.
        let cells = words(&[2, int(4), int(5), int(6), int(0)]);
        let of = |keys| key(keys, argument(AT, 2 << 10, Some(&cells)));
        assert_eq!(of("arg0.0"), key("arg0", argument(int(4), 0, None)));
        assert_eq!(of("arg0.1"), None);
    }

    #[test]
    fn what_is_not_recorded_is_refused() {
        let value = || Parameter {
            name: None,
            kind: ParameterKind::Value,
        };
        let scope = Scope::of("probe p", "p", (0..8).map(|_| value()).collect());
        for text in [
            "len(arg0)",
            "arg0.1.2",
            "str(arg0.1)",
            "arg6",
            "arg0 + arg7 - 1",
        ] {
            let keys: Keys = text.parse().unwrap();
            let refused = keys.parts_of_recorded_pair(&scope).unwrap_err();
            assert!(
                refused.to_string().starts_with("this is not recorded"),
                "{text}"
            );
        }
        for text in [
            "arg5",
            "str(arg0)",
            "arg0.1 & 7",
            "tag(arg0)",
            "tid,arg0",
            "u64(arg0)",
        ] {
            let keys: Keys = text.parse().unwrap();
            assert!(keys.parts_of_recorded_pair(&scope).is_ok(), "{text}");
        }
    }
}
