//! The items of a ring: words → [`RuntimeEventKind`]. Pure, and total: any words are events or an error.

use super::names::{Names, lifecycle};

/// What has happened.
///
/// ```no_run
/// use probes_lib::{RingEntry, RuntimeEventKind, RuntimeEvents};
///
/// let mut events = RuntimeEvents::of_process(4242)?;
/// events.read(|entry| {
///     if let RingEntry::Event { domain, kind: RuntimeEventKind::Counter(name, value), .. } = entry {
///         println!("domain {domain}: {name} is {value}");
///     }
/// })?;
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RuntimeEventKind<'w> {
    /// A phase of the collector has begun, such as `minor`.
    Begin(&'static str),
    /// It has ended.
    End(&'static str),
    /// A counter of the collector, such as `minor_allocated`, and its value.
    Counter(&'static str, u64),
    /// Something has happened to the ring or a domain, such as `domain_spawn`. What the number means, if there is one,
    /// depends on the name.
    Lifecycle(&'static str, Option<i64>),
    /// How many blocks were allocated, by their sizes; only runtimes that were built for it write these.
    Allocations(&'w [u64]),
    /// An event that the program itself has written, with the number of its name.
    User(u16, UserValue<'w>),
}

/// The value of an event that the program itself has written.
///
/// ```
/// use probes_lib::UserValue;
///
/// fn show(value: UserValue) -> String {
///     match value {
///         UserValue::Int(number) => number.to_string(),
///         UserValue::Custom(bytes) => format!("{:?}", bytes.to_vec()),
///         other => format!("{other:?}"),
///     }
/// }
/// assert_eq!(show(UserValue::Int(42)), "42");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UserValue<'w> {
    /// `Runtime_events.Type.unit`.
    Unit,
    /// `Runtime_events.Type.int`.
    Int(i64),
    /// The beginning of a `Runtime_events.Type.span`.
    SpanBegin,
    /// Its end.
    SpanEnd,
    /// A type of the program's own, as the bytes that the program has written.
    Custom(CustomBytes<'w>),
}

/// The bytes of an event, in words as they are in the ring.
///
/// [`UserValue`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CustomBytes<'w> {
    words: &'w [u64],
    len: usize,
}

impl CustomBytes<'_> {
    /// Returns the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let bytes = self.words.iter().flat_map(|word| word.to_le_bytes());
        bytes.take(self.len).collect()
    }
}

/// An item of a ring.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item<'w> {
    /// Its time in nanoseconds of CLOCK_MONOTONIC.
    Event(u64, RuntimeEventKind<'w>),
    /// Nothing, up to the end of the ring.
    Padding,
}

/// `ev_runtime_message_type` and `ev_user_message_type`.
const INTERNAL: u64 = 0;
const LIFECYCLE: u64 = 1;
const BEGIN: u64 = 2;
const END: u64 = 3;
const COUNTER: u64 = 4;
const ALLOCATIONS: u64 = 5;
const UNIT: u64 = 0;
const INT: u64 = 1;
const SPAN_BEGIN: u64 = 2;
const SPAN_END: u64 = 3;
const CUSTOM: u64 = 4;

/// Returns how many words an item has, by its first word.
pub(super) fn item_len(header: u64) -> usize {
    (header >> 54) as usize
}

/// Returns what an item is; `words` are all of its words.
///
/// # Errors
///
/// What is wrong with it, as the end of a sentence.
pub(super) fn parse<'w>(words: &'w [u64], names: &Names) -> Result<Item<'w>, String> {
    let wrong = || {
        let header = words.first().copied().unwrap_or_default();
        format!("an event begins with {header:#x}, which no runtime writes")
    };
    let (&header, rest) = words.split_first().ok_or_else(wrong)?;
    let is_user = header >> 53 & 1 == 1;
    let kind = header >> 49 & 0xf;
    let id = (header >> 36 & 0x1fff) as u16;
    if !is_user && kind == INTERNAL {
        return Ok(Item::Padding);
    }
    let (&time, payload) = rest.split_first().ok_or_else(wrong)?;
    let first = payload.first().copied();
    let event = if is_user {
        let value = match (kind, first) {
            (UNIT, _) => UserValue::Unit,
            (INT, Some(value)) => UserValue::Int(value as i64),
            (SPAN_BEGIN, _) => UserValue::SpanBegin,
            (SPAN_END, _) => UserValue::SpanEnd,
            (CUSTOM, Some(_)) => UserValue::Custom(custom(payload).ok_or_else(wrong)?),
            _ => return Err(wrong()),
        };
        RuntimeEventKind::User(id, value)
    } else {
        let phase = || names.phase(id).ok_or_else(wrong);
        match (kind, first) {
            (LIFECYCLE, data) => {
                let name = lifecycle(id).ok_or_else(wrong)?;
                RuntimeEventKind::Lifecycle(name, data.map(|data| data as i64))
            }
            (BEGIN, _) => RuntimeEventKind::Begin(phase()?),
            (END, _) => RuntimeEventKind::End(phase()?),
            (COUNTER, Some(value)) => {
                RuntimeEventKind::Counter(names.counter(id).ok_or_else(wrong)?, value)
            }
            (ALLOCATIONS, _) => RuntimeEventKind::Allocations(payload),
            _ => return Err(wrong()),
        }
    };
    Ok(Item::Event(time, event))
}

/// The last byte says how many bytes before it belong to no value, as in a string of OCaml.
fn custom(words: &[u64]) -> Option<CustomBytes<'_>> {
    let unused = (words.last()? >> 56) as usize + 1;
    let len = (words.len() * 8).checked_sub(unused)?;
    (unused <= 8).then_some(CustomBytes { words, len })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The first word of an item.
    pub(in crate::runtime_events) fn header(len: u64, is_user: bool, kind: u64, id: u64) -> u64 {
        len << 54 | u64::from(is_user) << 53 | kind << 49 | id << 36
    }

    fn parsed(words: &[u64]) -> Result<Item<'_>, String> {
        let names = Names::of("5.3.0").unwrap();
        assert_eq!(item_len(words[0]), words.len());
        parse(words, &names)
    }

    #[test]
    fn events_of_the_runtime_are_decoded() {
        let event = |words: &[u64], expected: RuntimeEventKind<'_>| {
            assert_eq!(parsed(words), Ok(Item::Event(7, expected)));
        };
        event(
            &[header(2, false, BEGIN, 11), 7],
            RuntimeEventKind::Begin("minor"),
        );
        event(
            &[header(2, false, END, 11), 7],
            RuntimeEventKind::End("minor"),
        );
        let counter = RuntimeEventKind::Counter("minor_allocated", 99);
        event(&[header(3, false, COUNTER, 5), 7, 99], counter);
        // At the exit of a process, without a number.
        let stop = RuntimeEventKind::Lifecycle("ring_stop", None);
        event(&[header(2, false, LIFECYCLE, 1), 7], stop);
        let spawn = RuntimeEventKind::Lifecycle("domain_spawn", Some(2));
        event(&[header(3, false, LIFECYCLE, 6), 7, 2], spawn);
        let sizes = RuntimeEventKind::Allocations(&[1, 2]);
        event(&[header(4, false, ALLOCATIONS, 0), 7, 1, 2], sizes);
        assert_eq!(parsed(&[header(1, false, INTERNAL, 0)]), Ok(Item::Padding));
        assert_eq!(
            parsed(&[header(3, false, INTERNAL, 0), 5, 6]),
            Ok(Item::Padding)
        );
    }

    #[test]
    fn events_of_the_program_are_decoded() {
        let event = |words: &[u64], expected: UserValue<'_>| {
            let expected = RuntimeEventKind::User(8191, expected);
            assert_eq!(parsed(words), Ok(Item::Event(7, expected)));
        };
        event(&[header(2, true, UNIT, 8191), 7], UserValue::Unit);
        event(
            &[header(3, true, INT, 8191), 7, u64::MAX],
            UserValue::Int(-1),
        );
        event(
            &[header(2, true, SPAN_BEGIN, 8191), 7],
            UserValue::SpanBegin,
        );
        event(&[header(2, true, SPAN_END, 8191), 7], UserValue::SpanEnd);
        let words = [
            u64::from_le_bytes(*b"abcdefgh"),
            u64::from_le_bytes(*b"ij\0\0\0\0\0\x05"),
        ];
        let item = [&[header(4, true, CUSTOM, 1), 7], words.as_slice()].concat();
        let Ok(Item::Event(7, RuntimeEventKind::User(1, UserValue::Custom(bytes)))) = parsed(&item)
        else {
            panic!("no custom event");
        };
        assert_eq!(bytes.to_vec(), b"abcdefghij");
    }

    #[test]
    fn items_that_no_runtime_writes_are_refused() {
        for words in [
            vec![header(1, false, BEGIN, 11)],
            vec![header(2, false, BEGIN, 48), 7],
            vec![header(2, false, COUNTER, 0), 7],
            vec![header(3, false, COUNTER, 26), 7, 0],
            vec![header(2, false, LIFECYCLE, 8), 7],
            vec![header(3, false, LIFECYCLE, 8), 7, 0],
            vec![header(2, false, 7, 0), 7],
            vec![header(2, true, 5, 0), 7],
            vec![header(2, true, INT, 0), 7],
            vec![header(2, true, CUSTOM, 0), 7],
            vec![header(3, true, CUSTOM, 0), 7, 8 << 56],
        ] {
            let error = parsed(&words).unwrap_err();
            assert!(error.contains("which no runtime writes"), "{error}");
        }
        assert!(parse(&[], &Names::of("5.3.0").unwrap()).is_err());
    }
}
