//! What is recorded of a hold, as text: pure, from any bytes.
//!
//! ```text
//! ocaml-probes hold 1
//! process PID START NAMESPACE RANDOM      whose probes; see ProcessKey
//! holder PID NAMESPACE BEGUN COMMAND      the tool that holds them
//! intent N                                what is about to be written, a line for each counter
//! NAME STAGE ADDRESS BEFORE AFTER HELD_BEFORE HELD_AFTER
//! end
//! settled aab?                            what became of each: (a)fter, (b)efore, (?) unknown
//! ```
//!
//! A record only grows. A change of the counters is recorded as an `intent` before its first write, and
//! as `settled` after the last. If the holder is killed between the two, the counters tell which were written: see
//! [`ParsedRecord::outcomes_by`]. An `intent` says everything that is held, so the last one counts, with the last
//! `settled` after it. What was cut off at the end counts as not written.

use std::fmt::Write;

use crate::address::LiveAddr;
use crate::process::tool::{own_command, own_namespace, since_boot};

const MAGIC: &str = "ocaml-probes hold 1";

/// How many characters of a command are recorded.
const MAX_COMMAND: usize = 200;

/// Which process a record is about, and which of the programs that it executes one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessKey {
    /// Its pid in the pid namespace of the holder.
    pub(crate) pid: i32,
    /// When it was started, in clock ticks since boot.
    pub(crate) start: u64,
    /// The inode of that pid namespace.
    pub(crate) namespace: u64,
    /// The 16 random bytes that the kernel gives to each executed program: `AT_RANDOM` of getauxval(3).
    pub(crate) random: u128,
}

/// The tool that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HolderRecord {
    pub(crate) pid: i32,
    /// The inode of its pid namespace.
    pub(crate) namespace: u64,
    /// When it began, in nanoseconds since boot.
    pub(crate) begun: u64,
    pub(crate) command: String,
}

impl HolderRecord {
    /// Returns what is recorded of us.
    pub(crate) fn own() -> HolderRecord {
        HolderRecord {
            pid: std::process::id() as i32,
            namespace: own_namespace(),
            begun: since_boot().as_nanos() as u64,
            command: own_command().chars().take(MAX_COMMAND).collect(),
        }
    }
}

/// A counter of a probe, and how its change changes what is held of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CounterEntry {
    pub(crate) name: String,
    /// The stage of the choice that took the hold: lower ones were written first.
    pub(crate) stage: u8,
    pub(crate) at: LiveAddr,
    pub(crate) before: u16,
    pub(crate) after: u16,
    pub(crate) held_before: i32,
    pub(crate) held_after: i32,
}

/// What became of the change of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryOutcome {
    /// It was not written, or restored.
    Before,
    /// It was written.
    After,
    /// It cannot be known: nothing of it is held.
    Unknown,
}

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParsedRecord {
    pub(crate) process: ProcessKey,
    pub(crate) holder: HolderRecord,
    pub(crate) entries: Vec<CounterEntry>,
    /// `None` if the holder has not said what became of the entries.
    pub(crate) outcomes: Option<Vec<EntryOutcome>>,
    /// How many of the bytes are complete parts.
    pub(crate) complete: usize,
    /// Where the last of the `settled` parts begins, if it comes after the last `intent`.
    pub(crate) settled_at: Option<usize>,
}

/// An amount that is held of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held<'r> {
    pub(crate) entry: &'r CounterEntry,
    pub(crate) amount: i32,
}

impl ParsedRecord {
    /// Reads a record; returns `None` if its first lines are not those of a record.
    pub(crate) fn parse(bytes: &[u8]) -> Option<ParsedRecord> {
        let mut lines = Lines { bytes, at: 0 };
        if lines.next()? != MAGIC {
            return None;
        }
        let process = parse_process(lines.next()?)?;
        let holder = parse_holder(lines.next()?)?;
        let mut record = ParsedRecord {
            process,
            holder,
            entries: Vec::new(),
            outcomes: Some(Vec::new()),
            complete: lines.at,
            settled_at: None,
        };
        while record.read_part(&mut lines).is_some() {
            record.complete = lines.at;
        }
        Some(record)
    }

    /// Reads an `intent` or a `settled`; returns `None` at the end, and where it is damaged or cut off.
    fn read_part(&mut self, lines: &mut Lines<'_>) -> Option<()> {
        let at = lines.at;
        let line = lines.next()?;
        if let Some(outcomes) = line.strip_prefix("settled ") {
            let outcomes: Option<Vec<EntryOutcome>> = outcomes.bytes().map(parse_outcome).collect();
            let outcomes = outcomes.filter(|outcomes| outcomes.len() == self.entries.len())?;
            self.outcomes = Some(outcomes);
            self.settled_at = Some(at);
            return Some(());
        }
        let count: usize = line.strip_prefix("intent ")?.parse().ok()?;
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(parse_entry(lines.next()?)?);
        }
        if lines.next()? != "end" {
            return None;
        }
        (self.entries, self.outcomes) = (entries, None);
        self.settled_at = None;
        Some(())
    }

    /// Returns what became of the entries, provided that nothing but the holder has written the counters since its
    /// intent. `counter` returns the present value of a counter; `None` if it cannot be read.
    pub(crate) fn outcomes_by(
        &self,
        counter: impl Fn(LiveAddr) -> Option<u16>,
    ) -> Vec<EntryOutcome> {
        let outcome = |entry: &CounterEntry| {
            if entry.before == entry.after {
                return EntryOutcome::After;
            }
            match counter(entry.at) {
                Some(value) if value == entry.after => EntryOutcome::After,
                Some(value) if value == entry.before => EntryOutcome::Before,
                _ => EntryOutcome::Unknown,
            }
        };
        self.entries.iter().map(outcome).collect()
    }

    /// Returns what is held of each counter; nothing if that is not settled.
    pub(crate) fn held(&self) -> impl Iterator<Item = Held<'_>> {
        let outcomes = self.outcomes.as_deref().unwrap_or_default();
        self.entries.iter().zip(outcomes).map(|(entry, outcome)| {
            let amount = match outcome {
                EntryOutcome::Before => entry.held_before,
                EntryOutcome::After => entry.held_after,
                EntryOutcome::Unknown => 0,
            };
            Held { entry, amount }
        })
    }

    /// Whether anything is held.
    pub(crate) fn holds_anything(&self) -> bool {
        self.held().any(|held| held.amount != 0)
    }
}

/// Returns the first lines of a record.
pub(crate) fn head(process: &ProcessKey, holder: &HolderRecord) -> String {
    let ProcessKey {
        pid,
        start,
        namespace,
        random,
    } = process;
    format!(
        "{MAGIC}\nprocess {pid} {start} {namespace} {random:032x}\nholder {} {} {} {}\n",
        holder.pid,
        holder.namespace,
        holder.begun,
        encode(&holder.command)
    )
}

/// Returns the part that tells of an intended change.
pub(crate) fn intent(entries: &[CounterEntry]) -> String {
    let mut text = format!("intent {}\n", entries.len());
    for entry in entries {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{} {} {:x} {} {} {} {}",
            encode(&entry.name),
            entry.stage,
            entry.at.0,
            entry.before,
            entry.after,
            entry.held_before,
            entry.held_after
        );
    }
    text + "end\n"
}

/// Returns the part that tells what became of a change.
pub(crate) fn settled(outcomes: &[EntryOutcome]) -> String {
    let letter = |outcome: &EntryOutcome| match outcome {
        EntryOutcome::After => 'a',
        EntryOutcome::Before => 'b',
        EntryOutcome::Unknown => '?',
    };
    let letters: String = outcomes.iter().map(letter).collect();
    format!("settled {letters}\n")
}

/// Returns how long that part is for so many entries.
pub(crate) fn settled_len(entries: usize) -> usize {
    "settled \n".len() + entries
}

/// The complete lines of a record.
struct Lines<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Lines<'b> {
    /// Returns the next line; `None` at the end, and if it is not UTF-8.
    fn next(&mut self) -> Option<&'b str> {
        let rest = self.bytes.get(self.at..)?;
        let end = memchr::memchr(b'\n', rest)?;
        let line = std::str::from_utf8(&rest[..end]).ok()?;
        self.at += end + 1;
        Some(line)
    }
}

/// Returns the words of a line that has exactly `N`.
fn words<const N: usize>(line: &str) -> Option<[&str; N]> {
    let mut words = line.split(' ');
    let mut found = [""; N];
    for word in &mut found {
        *word = words.next()?;
    }
    words.next().is_none().then_some(found)
}

fn parse_process(line: &str) -> Option<ProcessKey> {
    let ["process", pid, start, namespace, random] = words(line)? else {
        return None;
    };
    Some(ProcessKey {
        pid: pid.parse().ok()?,
        start: start.parse().ok()?,
        namespace: namespace.parse().ok()?,
        random: u128::from_str_radix(random, 16).ok()?,
    })
}

fn parse_holder(line: &str) -> Option<HolderRecord> {
    let ["holder", pid, namespace, begun, command] = words(line)? else {
        return None;
    };
    Some(HolderRecord {
        pid: pid.parse().ok()?,
        namespace: namespace.parse().ok()?,
        begun: begun.parse().ok()?,
        command: decode(command)?,
    })
}

fn parse_entry(line: &str) -> Option<CounterEntry> {
    let [name, stage, at, before, after, held_before, held_after] = words(line)?;
    // More than a counter can hold is not held.
    let amount = |word: &str| {
        let amount: i32 = word.parse().ok()?;
        (amount.unsigned_abs() <= u32::from(u16::MAX)).then_some(amount)
    };
    Some(CounterEntry {
        name: decode(name)?,
        stage: stage.parse().ok()?,
        at: LiveAddr(u64::from_str_radix(at, 16).ok()?),
        before: before.parse().ok()?,
        after: after.parse().ok()?,
        held_before: amount(held_before)?,
        held_after: amount(held_after)?,
    })
}

fn parse_outcome(letter: u8) -> Option<EntryOutcome> {
    match letter {
        b'a' => Some(EntryOutcome::After),
        b'b' => Some(EntryOutcome::Before),
        b'?' => Some(EntryOutcome::Unknown),
        _ => None,
    }
}

/// Writes a text as one word: spaces, control characters and `%` as `%XX`.
fn encode(text: &str) -> String {
    let mut word = String::with_capacity(text.len());
    for char in text.chars() {
        if char <= ' ' || char == '%' || char == '\x7f' {
            // Writing to a string does not fail.
            let _ = write!(word, "%{:02x}", u32::from(char));
        } else {
            word.push(char);
        }
    }
    word
}

fn decode(word: &str) -> Option<String> {
    let mut parts = word.split('%');
    let mut text = parts.next()?.to_owned();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        text.push(char::from(u8::from_str_radix(code, 16).ok()?));
        text += rest;
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some_record(entries: &[CounterEntry]) -> String {
        let process = ProcessKey {
            pid: 42,
            start: 777,
            namespace: 4_026_531_836,
            random: 0xabc,
        };
        let holder = HolderRecord {
            pid: 43,
            namespace: 4_026_531_836,
            begun: 5,
            command: "ocaml-probes attach -for 1m\n-enable a%b".to_owned(),
        };
        head(&process, &holder) + &intent(entries)
    }

    fn entry(name: &str, at: u64, before: u16, after: u16) -> CounterEntry {
        CounterEntry {
            name: name.to_owned(),
            stage: 0,
            at: LiveAddr(at),
            before,
            after,
            held_before: 0,
            held_after: i32::from(after) - i32::from(before),
        }
    }

    fn amounts(record: &ParsedRecord) -> Vec<i32> {
        record.held().map(|held| held.amount).collect()
    }

    #[test]
    fn record_is_read_as_it_was_written() {
        let entries = [entry("req start", 0x10, 0, 1), entry("é%", 0x20, 3, 2)];
        let text = some_record(&entries);
        let pending = ParsedRecord::parse(text.as_bytes()).unwrap();
        assert_eq!(pending.entries, entries);
        assert_eq!(
            pending.holder.command,
            "ocaml-probes attach -for 1m\n-enable a%b"
        );
        assert_eq!((pending.process.pid, pending.process.random), (42, 0xabc));
        assert_eq!(
            (pending.outcomes.as_ref(), amounts(&pending)),
            (None, vec![])
        );
        let settle = |outcomes: &[EntryOutcome]| {
            let text = text.clone() + &settled(outcomes);
            amounts(&ParsedRecord::parse(text.as_bytes()).unwrap())
        };
        use EntryOutcome::{After, Before, Unknown};
        assert_eq!(settle(&[After, After]), [1, -1]);
        assert_eq!(settle(&[Before, After]), [0, -1]);
        assert_eq!(settle(&[After, Unknown]), [1, 0]);
        // Another number of outcomes belongs to another intent.
        assert!(settle(&[After]).is_empty());
        let holds = |outcomes: &[EntryOutcome]| {
            let text = text.clone() + &settled(outcomes);
            let record = ParsedRecord::parse(text.as_bytes()).unwrap();
            record.holds_anything()
        };
        assert!(holds(&[Before, After]) && holds(&[After, Unknown]));
        assert!(!holds(&[Before, Before]) && !pending.holds_anything());
    }

    #[test]
    fn counters_tell_what_a_killed_holder_wrote() {
        let text = some_record(&[
            entry("written", 1, 0, 1),
            entry("not_written", 2, 4, 5),
            entry("foreign", 3, 0, 1),
            entry("unreadable", 4, 0, 1),
            entry("same", 5, 1, 1),
        ]);
        let record = ParsedRecord::parse(text.as_bytes()).unwrap();
        let counter = |at: LiveAddr| [None, Some(1), Some(4), Some(2), None][at.0 as usize % 5];
        use EntryOutcome::{After, Before, Unknown};
        assert_eq!(
            record.outcomes_by(counter),
            [After, Before, Unknown, Unknown, After]
        );
    }

    #[test]
    fn cut_off_part_counts_as_not_written() {
        let whole = some_record(&[entry("a", 1, 0, 1)]) + "settled a\n";
        let giving = intent(&[CounterEntry {
            held_before: 1,
            held_after: 0,
            ..entry("a", 1, 1, 0)
        }]);
        let text = whole.clone() + &giving;
        for cut in whole.len()..text.len() {
            let record = ParsedRecord::parse(&text.as_bytes()[..cut]).unwrap();
            assert_eq!((amounts(&record), record.complete), (vec![1], whole.len()));
            let settled = whole.find("settled");
            assert_eq!(record.settled_at, settled);
        }
        let record = ParsedRecord::parse(text.as_bytes()).unwrap();
        assert_eq!((record.outcomes, record.complete), (None, text.len()));
        assert_eq!(record.settled_at, None);
    }

    #[test]
    fn amount_beyond_any_counter_is_refused() {
        let text = some_record(&[entry("a", 1, 0, 1)]);
        let hostile = text.replace(" 0 1 0 1\n", " 0 1 0 99999\n");
        assert_ne!(hostile, text);
        assert!(
            ParsedRecord::parse(hostile.as_bytes())
                .unwrap()
                .entries
                .is_empty()
        );
        // The number of entries alone allocates nothing.
        let hostile = text.replace("intent 1", "intent 18446744073709551615");
        assert!(
            ParsedRecord::parse(hostile.as_bytes())
                .unwrap()
                .entries
                .is_empty()
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = ParsedRecord::parse(&bytes);
            let text = some_record(&[entry("a", 1, 0, 1)]);
            let mut after_head = text.into_bytes();
            after_head.extend(bytes);
            prop_assert!(ParsedRecord::parse(&after_head).is_some());
        }

        #[test]
        fn any_name_is_one_word(name in any::<String>()) {
            let word = encode(&name);
            prop_assert!(!word.contains([' ', '\n']));
            prop_assert_eq!(decode(&word), Some(name));
        }
    }
}
