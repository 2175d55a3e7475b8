//! [`KeyedCounts`]: how often hits had each key, from what the trampolines have recorded.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::keys::{self, slot, text};
use crate::observe::plan::{KeyFormat, ObservationPlan};
use crate::observe::read::counts::{Counts, read_keyed_hits};
use crate::observe::read::data_source;
use crate::observe::read::ring::word;
use crate::observe::read::value::strings::string_in;
use crate::observe::role::KeyKind;

/// How often hits had each key ([`Observation::by`](crate::Observation::by)). The hits of all keys, those of other keys
/// and those without a key add up to all hits, except those that a filter excludes.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::All).by("probe, arg0".parse()?);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let counts = observer.keyed_counts()?.unwrap_or_default();
/// for keyed in counts.keys() {
///     println!("{:?}: {}", keyed.key, keyed.hits);
/// }
/// println!("{} of other keys, {} without", counts.other(), counts.untyped());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct KeyedCounts {
    table: Option<KeyTable>,
    /// The keys in the table, once they are asked for.
    keys: OnceLock<Vec<KeyedCount>>,
    other: u64,
    untyped: u64,
}

/// The table of keys as it was in a process. It is decoded only when it is shown: a process is read often, in case it
/// exits.
#[derive(Clone)]
pub(super) struct KeyTable {
    slots: Vec<u8>,
    slot_len: usize,
    format: KeyFormat,
}

/// A key, and how many hits had it.
///
/// [`KeyedCounts`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyedCount {
    /// The value of each expression.
    pub key: Vec<Key>,
    /// How many hits there were.
    pub hits: u64,
}

/// The value of an expression of a key at a hit.
///
/// ```
/// use probes_lib::Key;
///
/// fn show(key: &Key) -> String {
///     match key {
///         Key::Integer(number) => number.to_string(),
///         Key::Text { bytes, .. } => String::from_utf8_lossy(bytes).into_owned(),
///         other => format!("{other:?}"),
///     }
/// }
/// assert_eq!(show(&Key::Integer(42)), "42");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Key {
    /// An integer, with a sign or without.
    Integer(i128),
    /// The first 64 bytes of a string.
    Text {
        /// Its bytes.
        bytes: Vec<u8>,
        /// Whether it has no more.
        is_whole: bool,
    },
    /// The id of a thread, as the process itself knows it.
    Thread(u32),
    /// Where a call returns to.
    Caller(LiveAddr),
    /// The name of a probe or function.
    Probe(String),
    /// The pid of a process, if the hits of several are counted together ([`KeyedCounts::of_processes`]).
    Process(i32),
}

impl KeyedCounts {
    /// Returns the hits by the names of probes and functions.
    ///
    /// ```no_run
    /// # let observer: probes_lib::Observer = unimplemented!();
    /// let by_name = probes_lib::KeyedCounts::by_name(&observer.counts()?);
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn by_name(counts: &Counts) -> KeyedCounts {
        let functions = counts.functions().map(|it| (it.name, it.hits));
        let named = counts.probes().chain(functions);
        let keys = named.map(|(name, hits)| KeyedCount {
            key: vec![Key::Probe(name.to_owned())],
            hits,
        });
        KeyedCounts {
            untyped: counts.total_untyped().unwrap_or(0),
            ..KeyedCounts::of(keys)
        }
    }

    /// Returns the hits of several processes, each with its pid. If they are not `distinguished`, hits of the same key
    /// in several processes add up; else the pid is the first part of each key.
    ///
    /// ```no_run
    /// # let counts: Vec<(i32, probes_lib::KeyedCounts)> = unimplemented!();
    /// let each = counts.iter().map(|(pid, counts)| (*pid, counts));
    /// let all = probes_lib::KeyedCounts::of_processes(each, false);
    /// ```
    pub fn of_processes<'c>(
        each: impl IntoIterator<Item = (i32, &'c KeyedCounts)>,
        distinguished: bool,
    ) -> KeyedCounts {
        let mut keys = Vec::new();
        let (mut other, mut untyped) = (0_u64, 0_u64);
        for (pid, counts) in each {
            other = other.saturating_add(counts.other);
            untyped = untyped.saturating_add(counts.untyped);
            let process = distinguished.then_some(Key::Process(pid));
            keys.extend(counts.keys().iter().map(|counted| KeyedCount {
                key: process.iter().chain(&counted.key).cloned().collect(),
                hits: counted.hits,
            }));
        }
        KeyedCounts {
            other,
            untyped,
            ..KeyedCounts::of(keys.into_iter())
        }
    }

    fn of(keys: impl Iterator<Item = KeyedCount>) -> KeyedCounts {
        KeyedCounts {
            keys: OnceLock::from(most_first(keys)),
            ..KeyedCounts::default()
        }
    }

    /// Returns the keys, those with most hits first.
    pub fn keys(&self) -> &[KeyedCount] {
        self.keys
            .get_or_init(|| most_first(self.table.iter().flat_map(KeyTable::counts)))
    }

    /// Returns how many hits had keys for which there was no room: more than about 4,096 are not distinguished.
    pub fn other(&self) -> u64 {
        self.other
    }

    /// Returns how many hits have no key, because an argument does not have the type that the expression needs, or
    /// memory could not be read. Those for which a filter has no answer are among them.
    pub fn untyped(&self) -> u64 {
        self.untyped
    }

    /// Returns how many hits there are.
    pub fn total(&self) -> u64 {
        let hits = self.keys().iter().map(|it| it.hits);
        hits.chain([self.other, self.untyped])
            .fold(0, u64::saturating_add)
    }

    /// Reads them; `None` if hits are not counted by keys.
    pub(crate) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<Option<KeyedCounts>> {
        let (Some(sharing), false) = (arenas.first(), !plan.counts_by_key()) else {
            return Ok(None);
        };
        let mut counts = KeyedCounts::default();
        // Read before the keys: a hit that comes in between is counted if it has a key, and otherwise the next time.
        (counts.other, counts.untyped) = read_keyed_hits(pid, source, plan, arenas)?;
        counts.table = Some(KeyTable::read(pid, source, plan, sharing)?);
        Ok(Some(counts))
    }
}

impl fmt::Debug for KeyedCounts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("KeyedCounts");
        fields.field("keys", &self.keys());
        fields.field("other", &self.other);
        fields.field("untyped", &self.untyped);
        fields.finish()
    }
}

impl KeyTable {
    /// Reads it.
    pub(super) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        sharing: &Arena,
    ) -> Result<KeyTable> {
        let layout = sharing.shared.keys;
        let at = sharing.shared_at().plus(sharing.shared.keys());
        Ok(KeyTable {
            slots: data_source::read(pid, source, at, layout.len())?,
            slot_len: layout.slot_len() as usize,
            format: plan.key_format(),
        })
    }

    /// Returns the slots that hold a key, each with its number.
    pub(super) fn held(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let slots = (0..).zip(self.slots.chunks_exact(self.slot_len));
        slots.filter(|(_, slot)| holds_key(slot))
    }

    /// Returns the key in the slot with this number, if it holds one.
    pub(super) fn key(&self, number: u32) -> Option<Vec<Key>> {
        let slot = self
            .slots
            .chunks_exact(self.slot_len)
            .nth(number as usize)?;
        key(slot, &self.format)
    }

    /// Returns the hits of each slot: a key is in several, if several threads had it.
    fn counts(&self) -> impl Iterator<Item = KeyedCount> {
        self.held().filter_map(|(_, slot)| {
            let key = key(slot, &self.format)?;
            let hits = word(slot, slot::HITS);
            Some(KeyedCount { key, hits })
        })
    }
}

/// Adds up the hits of equal keys. Returns those that have any: those with most hits first, those with equally many in
/// the order of the keys.
fn most_first(counts: impl Iterator<Item = KeyedCount>) -> Vec<KeyedCount> {
    let mut sums: HashMap<Vec<Key>, u64> = HashMap::new();
    for KeyedCount { key, hits } in counts.filter(|it| it.hits > 0) {
        let sum = sums.entry(key).or_default();
        *sum = sum.saturating_add(hits);
    }
    let sums = sums.into_iter();
    let mut keys: Vec<_> = sums.map(|(key, hits)| KeyedCount { key, hits }).collect();
    keys.sort_unstable_by(|one, other| {
        (Reverse(one.hits), &one.key).cmp(&(Reverse(other.hits), &other.key))
    });
    keys
}

fn holds_key(slot: &[u8]) -> bool {
    word(slot, slot::STATE) & 3 == slot::HELD
}

/// Returns the key in a slot, if it holds one.
fn key(slot: &[u8], format: &KeyFormat) -> Option<Vec<Key>> {
    if !holds_key(slot) {
        return None;
    }
    let state = word(slot, slot::STATE);
    let parts = format.kinds.iter().zip(keys::parts(&format.kinds));
    let parts = parts.enumerate().map(|(index, (kind, place))| {
        let first = word(slot, place.start);
        Some(match kind {
            KeyKind::Integer if state >> (slot::SIGNS_AT + index as u32) & 1 == 1 => {
                Key::Integer((first as i64).into())
            }
            KeyKind::Integer => Key::Integer(first.into()),
            KeyKind::Thread => Key::Thread(first as u32),
            KeyKind::Caller => Key::Caller(LiveAddr(first)),
            KeyKind::Probe => Key::Probe(format.name(first as u32)?.to_owned()),
            KeyKind::Text => {
                let words = slot.get(place.start as usize + 8..place.end as usize)?;
                string(first, words)
            }
        })
    });
    parts.collect()
}

/// Returns the string in a slot, from its first word ([`text`]) and the words after it. Of a long one of OCaml, the last
/// word is not in the slot.
fn string(length: u64, words: &[u8]) -> Key {
    let mut bytes = words.to_vec();
    if let Some(len) = length.checked_sub(text::OF_C) {
        bytes.truncate(len.min(text::MAX_READ) as usize);
        let is_whole = len <= text::MAX_READ;
        return Key::Text { bytes, is_whole };
    }
    if length <= text::WORDS {
        bytes.truncate(8 * length as usize);
        bytes.truncate(string_in(&bytes).map_or(0, <[u8]>::len));
    }
    Key::Text {
        bytes,
        is_whole: length <= text::WHOLE,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::expression::Keys;
    use crate::observe::layout::keys::histograms;
    use crate::observe::observation::Observation;
    use crate::observe::read::keyed_times::KeyedTimes;
    use crate::observe::read::keyed_values::KeyedHistograms;
    use crate::observe::read::values::ValueHistogram;
    use crate::select::Selector;
    use crate::testing::{RecordedData, program_with_arguments};
    use crate::ticks::TickMeasurement;

    #[test]
    fn hits_of_processes_add_up_or_are_distinguished() {
        let counts = |hits: &[(&str, u64)], other| KeyedCounts {
            other,
            ..KeyedCounts::of(hits.iter().map(|(name, hits)| KeyedCount {
                key: vec![Key::Probe((*name).to_owned())],
                hits: *hits,
            }))
        };
        let (one, two) = (counts(&[("a", 3), ("b", 1)], 5), counts(&[("b", 4)], 6));
        let both = [(7, &one), (8, &two)];
        let sum = KeyedCounts::of_processes(both, false);
        assert_eq!(sum.keys(), counts(&[("b", 5), ("a", 3)], 0).keys());
        assert_eq!((sum.other(), sum.total()), (11, 19));
        let by_pid = KeyedCounts::of_processes(both, true);
        let first = &by_pid.keys()[0];
        let key = [Key::Process(8), Key::Probe("b".to_owned())];
        assert_eq!(
            (&first.key[..], first.hits, by_pid.keys().len()),
            (&key[..], 4, 3)
        );
    }

    #[test]
    fn strings_end_before_their_last_bytes() {
        let block = |text: &[u8]| -> (u64, Vec<u8>) {
            let mut bytes = text.to_vec();
            let unused = 7 - text.len() % 8;
            bytes.resize(text.len() + unused, 0);
            bytes.push(unused as u8);
            let many = bytes.len() as u64 / 8;
            bytes.resize(bytes.len().max(64), 0xee);
            (many, bytes)
        };
        for len in [0, 1, 7, 8, 55, 63] {
            let whole = vec![b'x'; len];
            let (many, words) = block(&whole);
            let expected = Key::Text {
                bytes: whole,
                is_whole: true,
            };
            assert_eq!(string(many, &words), expected, "{len}");
        }
        let bytes = vec![b'y'; 64];
        for (many, is_whole) in [(text::WHOLE, true), (text::LONGER, false)] {
            let expected = Key::Text {
                bytes: bytes.clone(),
                is_whole,
            };
            assert_eq!(string(many, &bytes), expected);
        }
        for (len, is_whole) in [(0, true), (3, true), (64, true), (65, false)] {
            let expected = Key::Text {
                bytes: bytes[..len.min(64)].to_vec(),
                is_whole,
            };
            assert_eq!(string(text::OF_C + len as u64, &bytes), expected, "{len}");
        }
        // Whatever the memory holds.
        assert!(matches!(string(1, &[0xff; 64]), Key::Text { bytes, .. } if bytes.is_empty()));
    }

    fn plan(observation: &Observation) -> ObservationPlan {
        let program = program_with_arguments(&[("a", "8@%rdi"), ("b", "8@%rdi")]);
        ObservationPlan::of(observation, Arc::new(program), Arc::default()).unwrap()
    }

    #[test]
    fn strings_of_ocaml_and_c_are_equal_keys() {
        let counted = Observation::new().count(Selector::All);
        let mut plan = plan(&counted.by("arg0".parse().unwrap()));
        plan.key_kinds = vec![KeyKind::Text];
        plan.shared.keys = keys::KeysLayout::of(&plan.key_kinds);
        let mut data = RecordedData::of(&plan);
        let text = u64::from_le_bytes(*b"abc\0\0\0\0\x04");
        data.put_key((0, 3), &[1, text], 0, 10);
        data.put_key((1, 3), &[text::OF_C + 3, text & 0xff_ffff], 0, 5);
        data.put_key((2, 3), &[1, text], 0, 1);
        let arenas = [data.arena];
        let counts = KeyedCounts::read(1, &data.memory, &plan, &arenas).unwrap();
        let key = vec![Key::Text {
            bytes: b"abc".to_vec(),
            is_whole: true,
        }];
        assert_eq!(counts.unwrap().keys(), [KeyedCount { key, hits: 16 }]);
    }

    #[test]
    fn keys_are_read_from_tables_of_all_groups() {
        let counted = Observation::new().count(Selector::All);
        let plan = plan(&counted.by("probe, arg0, tid".parse().unwrap()));
        let mut data = RecordedData::of(&plan);
        let signed = 1 << (slot::SIGNS_AT + 1);
        let (one, other) = ([1, -7_i64 as u64, 4711], [0, 7, 4712]);
        data.put_key((0, 3), &one, signed, 10);
        data.put_key((15, 4111), &one, signed, 20);
        data.put_key((15, 5), &other, 0, 4);
        // Its hit is not counted yet.
        data.put_key((1, 5), &[0, 8, 4713], 0, 0);
        data.put_key((2, 5), &[9, 9, 9], 0, 1000);
        // Claimed, but not held yet; and with no name that is known, above.
        let layout = data.arena.shared.keys;
        let table = data.shared().plus(data.arena.shared.keys());
        let claimed = table.plus(layout.copy_len() * 7);
        data.put(
            claimed.plus(slot::STATE),
            0xabcd << slot::HASH_AT | slot::CLAIMED,
        );
        data.put(claimed.plus(slot::HITS), 1000);
        for point in 0..2 {
            data.hit(point, 100);
            data.hit(data.arena.untyped_counter(point), 7);
        }
        let arenas = [data.arena];
        let counts = KeyedCounts::read(1, &data.memory, &plan, &arenas).unwrap();
        let counts = counts.unwrap();
        let key = |name: &str, number, tid| {
            let name = Key::Probe(name.to_owned());
            vec![name, Key::Integer(number), Key::Thread(tid)]
        };
        let first = KeyedCount {
            key: key("b", -7, 4711),
            hits: 30,
        };
        let second = KeyedCount {
            key: key("a", 7, 4712),
            hits: 4,
        };
        assert_eq!(counts.keys(), [first, second]);
        let sums = (counts.other(), counts.untyped(), counts.total());
        assert_eq!(sums, (200, 14, 248));
        // Of functions, the caller can be a key.
        let callers = ObservationPlan {
            key_kinds: vec![KeyKind::Caller],
            ..plan
        };
        let words = [slot::HELD, 3, 0x5555_0000].map(u64::to_le_bytes);
        let expected = vec![Key::Caller(LiveAddr(0x5555_0000))];
        assert_eq!(
            super::key(&words.concat(), &callers.key_format()),
            Some(expected)
        );
    }

    #[test]
    fn strings_are_read_as_keys() {
        let counted = Observation::new().count(Selector::All);
        let plan = plan(&counted.by("str(arg0), tid".parse().unwrap()));
        let mut data = RecordedData::of(&plan);
        let mut words = [0; 10];
        words[0] = 1;
        words[1] = u64::from_le_bytes(*b"abc\0\0\0\0\x04");
        words[9] = 8;
        data.put_key((1, 1), &words, 0, 3);
        let arenas = [data.arena];
        let counts = KeyedCounts::read(1, &data.memory, &plan, &arenas).unwrap();
        let text = Key::Text {
            bytes: b"abc".to_vec(),
            is_whole: true,
        };
        let expected = KeyedCount {
            key: vec![text, Key::Thread(8)],
            hits: 3,
        };
        assert_eq!(counts.unwrap().keys(), [expected]);
    }

    #[test]
    fn hits_of_watched_points_are_not_keyed() {
        let observed = |keyed: Observation| {
            let watched = keyed.watch(Selector::name("b"));
            let watched = watched.only_where("arg0 == 1".parse().unwrap());
            let plan = plan(&watched.by("tid".parse().unwrap()));
            let mut data = RecordedData::of(&plan);
            for point in 0..plan.points.len() {
                data.hit(point, 10);
                data.hit(data.arena.untyped_counter(point), 1);
            }
            let keyed = plan.points.iter().filter(|it| it.role.keys.is_some());
            let keyed = keyed.count() as u64;
            assert!(keyed > 0 && keyed < plan.points.len() as u64);
            (plan, data, keyed)
        };
        let counted = || Observation::new().count(Selector::name("a"));
        let (plan, data, keyed) = observed(counted());
        let counts = KeyedCounts::read(1, &data.memory, &plan, &[data.arena]).unwrap();
        let counts = counts.unwrap();
        assert_eq!((counts.other(), counts.untyped()), (10 * keyed, keyed));
        let (plan, data, keyed) = observed(counted().histogram_of("arg0".parse().unwrap()));
        let values = KeyedHistograms::read(1, &data.memory, &plan, &[data.arena]).unwrap();
        assert_eq!(values.unwrap().untyped(), keyed);
    }

    #[test]
    fn nothing_is_read_without_keys() {
        let counted = || Observation::new().count(Selector::All);
        let read = |observation: Observation| {
            let plan = plan(&observation);
            let data = RecordedData::of(&plan);
            let arenas = [data.arena];
            let counts = KeyedCounts::read(1, &data.memory, &plan, &arenas).unwrap();
            assert!(
                KeyedCounts::read(1, &data.memory, &plan, &[])
                    .unwrap()
                    .is_none()
            );
            let histograms = KeyedHistograms::read(1, &data.memory, &plan, &arenas).unwrap();
            let ticks = TickMeasurement::begin();
            let times = KeyedTimes::read(1, &data.memory, &plan, &arenas, &ticks).unwrap();
            [counts.is_some(), histograms.is_some(), times.is_some()]
        };
        let keys: Keys = "tid".parse().unwrap();
        assert_eq!(read(counted()), [false; 3]);
        assert_eq!(read(counted().by(keys.clone())), [true, false, false]);
        let values = counted().histogram_of("arg0".parse().unwrap());
        assert_eq!(read(values.by(keys.clone())), [false, true, false]);
        let times = Observation::new().time("a", "b").time_by(keys);
        assert_eq!(read(times), [false, false, true]);
    }

    /// Returns the values in a histogram that have buckets of their own, each with its count.
    fn values(histogram: &ValueHistogram) -> Vec<(i128, u64)> {
        let buckets = histogram.buckets().iter();
        buckets.map(|it| (it.least.unwrap(), it.count)).collect()
    }

    #[test]
    fn histograms_of_keys_are_read() {
        let counted = Observation::new().count(Selector::All);
        let counted = counted.histogram_of("arg0".parse().unwrap());
        let plan = plan(&counted.by("tid".parse().unwrap()));
        let mut data = RecordedData::of(&plan);
        let signed = 1 << slot::SIGN_OF_VALUES_AT;
        data.put_key((0, 2), &[11], signed, 0);
        data.put_key((0, 1039), &[12], 0, 0);
        data.put_key((0, 5), &[13], 0, 0);
        for value in [-3, 7, 7] {
            data.add_value((2, 0), value, true, None);
        }
        data.add_value((1039, 0), 20, false, None);
        data.add_value((histograms::OTHER, 0), 30, false, None);
        data.add_value((histograms::OTHER_SIGNED, 0), -30, true, None);
        data.hit(data.arena.untyped_counter(0), 4);
        data.hit(data.arena.untyped_counter(1), 5);
        let arenas = [data.arena];
        let read = KeyedHistograms::read(1, &data.memory, &plan, &arenas).unwrap();
        let read = read.unwrap();
        let keys = |all: &KeyedHistograms| -> Vec<_> {
            let keys = all.keys().iter();
            keys.map(|it| (it.key.clone(), values(&it.values)))
                .collect()
        };
        let [one, other] = [11, 12].map(|tid| vec![Key::Thread(tid)]);
        let expected = [(one.clone(), vec![(-3, 1), (7, 2)]), (other, vec![(20, 1)])];
        assert_eq!(keys(&read), expected);
        assert_eq!(
            (values(read.other()), read.untyped()),
            (vec![(-30, 1), (30, 1)], 9)
        );
        // Of two processes.
        let both = KeyedHistograms::of_processes([(7, &read), (8, &read)], false);
        assert_eq!(keys(&both)[0], (one, vec![(-3, 2), (7, 4)]));
        assert_eq!(
            (both.keys().len(), both.untyped(), both.other().count()),
            (2, 18, 4)
        );
        let by_pid = KeyedHistograms::of_processes([(7, &read), (8, &read)], true);
        let first = &by_pid.keys()[0];
        assert_eq!((by_pid.keys().len(), &first.key[0]), (4, &Key::Process(7)));
    }

    #[test]
    fn times_of_keys_are_read() {
        let timed = Observation::new().time("a", "b").time("b", "a");
        let plan = plan(&timed.time_by("arg0".parse().unwrap()));
        let mut data = RecordedData::of(&plan);
        data.put_key((0, 2), &[77, 1], 0, 0);
        data.put_key((0, 3), &[78, 0], 0, 0);
        data.put_key((0, 4), &[79, 0], 0, 0);
        let unit = 1_i128 << 40;
        for (number, value) in [
            (2, 4 * unit),
            (2, 2 * unit),
            (3, 60 * unit),
            (histograms::OTHER, unit),
            (histograms::UNTYPED_TIMES, 3 * unit),
        ] {
            data.add_value((number, 0), value, false, None);
        }
        let ticks = TickMeasurement::begin();
        let arenas = [data.arena];
        let read = KeyedTimes::read(1, &data.memory, &plan, &arenas, &ticks).unwrap();
        let read = read.unwrap();
        let names = |times: &KeyedTimes| -> Vec<_> {
            let keys = times.keys().iter();
            keys.map(|it| (it.name.clone(), it.key.clone(), it.times.count()))
                .collect()
        };
        let (one, other) = (Key::Integer(78), Key::Integer(77));
        let expected = [
            ("a,b".to_owned(), vec![one.clone()], 1),
            ("b,a".to_owned(), vec![other], 2),
        ];
        assert_eq!(names(&read), expected);
        let is = |time: Duration, units: f64| {
            let ratio = time.as_secs_f64() / read.other().sum().as_secs_f64();
            assert!((ratio - units).abs() < 0.001, "{ratio}");
        };
        is(read.untyped().sum(), 3.0);
        is(read.keys()[0].times.sum(), 60.0);
        is(read.keys()[1].times.sum(), 6.0);
        is(read.keys()[1].times.max(), 4.0);
        assert_eq!((read.other().count(), read.untyped().count()), (1, 1));
        // Quantiles are in buckets.
        let middle = read.keys()[0].times.quantile(0.5).as_secs_f64();
        let longest = read.keys()[0].times.max().as_secs_f64();
        assert!((0.96..=1.0).contains(&(middle / longest)), "{middle}");
        let both = [(7, &read), (8, &read)];
        let sum = KeyedTimes::of_processes(both, false).unwrap();
        assert_eq!((sum.keys().len(), sum.keys()[1].times.count()), (2, 4));
        is(sum.other().sum(), 2.0);
        is(sum.untyped().sum(), 6.0);
        let by_pid = KeyedTimes::of_processes(both, true).unwrap();
        assert_eq!(by_pid.keys()[0].key, [Key::Process(7), one]);
        assert_eq!(by_pid.keys().len(), 4);
        assert!(KeyedTimes::of_processes([], true).is_none());
    }
}
