//! [`KeyedCounts`]: how often hits had each key, from what the trampolines have recorded.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::keys::{self, slot, text};
use crate::observe::plan::ObservationPlan;
use crate::observe::point::KeyKind;
use crate::observe::read::counts::{Counts, read_hits};
use crate::observe::read::data_source;
use crate::observe::read::ring::word;

/// How often hits had each key ([`Observation::by`](crate::Observation::by)). All that is counted adds up to all hits that are meant.
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
#[derive(Clone, Debug, Default)]
pub struct KeyedCounts {
    keys: Vec<KeyedCount>,
    other: u64,
    untyped: u64,
}

/// How many hits had a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyedCount {
    /// What each expression was.
    pub key: Vec<Key>,
    /// How many hits there were.
    pub hits: u64,
}

/// What an expression was at a hit.
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
        let mut hits: HashMap<Vec<Key>, u64> = HashMap::new();
        for (name, many) in counts.probes().chain(functions) {
            let sum = hits.entry(vec![Key::Probe(name.to_owned())]).or_default();
            *sum = sum.saturating_add(many);
        }
        KeyedCounts {
            untyped: counts.total_untyped().unwrap_or(0),
            ..KeyedCounts::of(hits)
        }
    }

    /// Returns the hits of several processes, by their pids. If they are not `distinguished`, hits of the same key in several processes
    /// add up; else the pid is the first part of each key.
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
        let mut hits: HashMap<Vec<Key>, u64> = HashMap::new();
        let (mut other, mut untyped) = (0_u64, 0_u64);
        for (pid, counts) in each {
            other = other.saturating_add(counts.other);
            untyped = untyped.saturating_add(counts.untyped);
            for counted in &counts.keys {
                let process = distinguished.then_some(Key::Process(pid));
                let key = process.into_iter().chain(counted.key.iter().cloned());
                let sum = hits.entry(key.collect()).or_default();
                *sum = sum.saturating_add(counted.hits);
            }
        }
        KeyedCounts {
            other,
            untyped,
            ..KeyedCounts::of(hits)
        }
    }

    fn of(hits: HashMap<Vec<Key>, u64>) -> KeyedCounts {
        let keys = hits.into_iter().filter(|(_, hits)| *hits > 0);
        let keys = keys.map(|(key, hits)| KeyedCount { key, hits });
        let mut keys: Vec<KeyedCount> = keys.collect();
        keys.sort_by(|one, other| {
            (Reverse(one.hits), &one.key).cmp(&(Reverse(other.hits), &other.key))
        });
        KeyedCounts {
            keys,
            ..KeyedCounts::default()
        }
    }

    /// Returns the keys, those with most hits first.
    pub fn keys(&self) -> &[KeyedCount] {
        &self.keys
    }

    /// Returns how many hits had keys for which there was no room: more than about 4,096 are not distinguished.
    pub fn other(&self) -> u64 {
        self.other
    }

    /// Returns how many hits have no key, because an argument does not have the type that the expression needs, or memory could not be
    /// read; or of how many it is not known whether they are meant.
    pub fn untyped(&self) -> u64 {
        self.untyped
    }

    /// Returns how many hits there are.
    pub fn total(&self) -> u64 {
        let hits = self.keys.iter().map(|it| it.hits);
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
        // Before the keys: what is counted meanwhile is of a key.
        for arena in arenas {
            for (other, untyped) in read_hits(pid, source, arena)? {
                counts.other = counts.other.saturating_add(other);
                counts.untyped = counts.untyped.saturating_add(untyped);
            }
        }
        let layout = sharing.shared.keys;
        let table = sharing.shared_at().plus(sharing.shared.keys());
        let mut hits: HashMap<Vec<Key>, u64> = HashMap::new();
        for group in 0..1 << layout.group_bits() {
            let at = table.plus(layout.copy_len() * group);
            let slots = data_source::read(pid, source, at, layout.copy_len())?;
            for slot in slots.chunks_exact(layout.slot_len() as usize) {
                if let Some(key) = key(slot, plan) {
                    let sum = hits.entry(key).or_default();
                    *sum = sum.saturating_add(word(slot, slot::HITS));
                }
            }
        }
        counts.keys = KeyedCounts::of(hits).keys;
        Ok(Some(counts))
    }
}

/// Returns the key in a slot, if it holds one.
pub(super) fn key(slot: &[u8], plan: &ObservationPlan) -> Option<Vec<Key>> {
    let state = word(slot, slot::STATE);
    if state & 3 != slot::HELD {
        return None;
    }
    let parts = plan.key_kinds.iter().zip(keys::parts(&plan.key_kinds));
    let parts = parts.enumerate().map(|(index, (kind, place))| {
        let first = word(slot, place.start);
        Some(match kind {
            KeyKind::Integer if state >> (slot::SIGNS_AT + index as u32) & 1 == 1 => {
                Key::Integer((first as i64).into())
            }
            KeyKind::Integer => Key::Integer(first.into()),
            KeyKind::Thread => Key::Thread(first as u32),
            KeyKind::Caller => Key::Caller(LiveAddr(first)),
            KeyKind::Probe => Key::Probe(plan.key_name(first as u32)?.to_owned()),
            KeyKind::Text => {
                let words = slot.get(place.start as usize + 8..place.end as usize)?;
                string(first, words)
            }
        })
    });
    parts.collect()
}

/// Returns the string in a slot. Its last word says how many bytes are not used, unless more follow.
fn string(many: u64, words: &[u8]) -> Key {
    let mut bytes = words.to_vec();
    if let Some(len) = many.checked_sub(text::OF_C) {
        bytes.truncate(len.min(text::MOST_READ) as usize);
        let is_whole = len <= text::MOST_READ;
        return Key::Text { bytes, is_whole };
    }
    if many <= text::WORDS {
        bytes.truncate(8 * many as usize);
        let unused = usize::from(bytes.last().copied().unwrap_or(0)) + 1;
        bytes.truncate(bytes.len().saturating_sub(unused));
    }
    Key::Text {
        bytes,
        is_whole: many <= text::WHOLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_of_processes_add_up_or_are_distinguished() {
        let counts = |hits: &[(&str, u64)], other| KeyedCounts {
            other,
            ..KeyedCounts::of(
                hits.iter()
                    .map(|(name, hits)| (vec![Key::Probe((*name).to_owned())], *hits))
                    .collect(),
            )
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
}
