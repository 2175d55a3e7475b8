//! Rings that are written as the runtime does it, while they are read.

use std::cell::RefCell;
use std::fs;

use super::*;
use crate::runtime_events::item::{UserValue, tests as item_tests};
use crate::runtime_events::{RuntimeEventKind, RuntimeEvents, header};

/// Pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A file of runtime events with two rings, of which one is written.
struct Writer {
    file: Vec<u8>,
    header: Header,
    /// How many events were written; each is a custom event whose words are its number.
    events: u64,
    /// The words of each event, and those of all padding.
    lens: Vec<u64>,
    padding: u64,
    random: Random,
}

const WRITTEN: u32 = 1;

impl Writer {
    fn new(ring_words: u64, seed: u64) -> Writer {
        let (mut words, _) = header::tests::header(2, ring_words);
        // Without names, the file ends here.
        let len = std::mem::take(&mut words[7]);
        let mut file = words.map(u64::to_le_bytes).concat();
        file.resize(len as usize, 0);
        let header = Header::parse(file.first_chunk().unwrap(), len).unwrap();
        Writer {
            file,
            header,
            events: 0,
            lens: Vec::new(),
            padding: 0,
            random: Random(seed),
        }
    }

    fn word(&mut self, at: u64) -> &mut [u8; 8] {
        self.file[at as usize..].first_chunk_mut().unwrap()
    }

    fn get(&mut self, at: u64) -> u64 {
        u64::from_le_bytes(*self.word(at))
    }

    fn set(&mut self, at: u64, value: u64) {
        *self.word(at) = value.to_le_bytes();
    }

    fn head_at(&self) -> u64 {
        self.header.headers_at + u64::from(WRITTEN) * RING_HEADER_LEN
    }

    fn slot(&self, position: u64) -> u64 {
        let words = self.header.ring_words;
        self.header.data_at + (u64::from(WRITTEN) * words + (position & (words - 1))) * 8
    }

    /// Does what `write_to_ring` of runtime/runtime_events.c does.
    fn write(&mut self) {
        let ring_words = self.header.ring_words;
        let len = 2 + self.random.below(12);
        let (head_at, tail_at) = (self.head_at(), self.head_at() + 8);
        let (mut head, mut tail) = (self.get(head_at), self.get(tail_at));
        let left = ring_words - (tail & (ring_words - 1));
        let padding = if left < len { left } else { 0 };
        while tail + len + padding - head >= ring_words {
            head += item::item_len(self.get(self.slot(head))) as u64;
            self.set(head_at, head);
        }
        if padding > 0 {
            self.set(self.slot(tail), item_tests::header(padding, false, 0, 0));
            tail += padding;
            self.set(tail_at, tail);
        }
        self.set(self.slot(tail), item_tests::header(len, true, 0, 3));
        self.set(self.slot(tail + 1), self.events);
        for at in 2..len {
            self.set(self.slot(tail + at), self.events);
        }
        self.set(tail_at, tail + len);
        self.events += 1;
        self.lens.push(len);
        self.padding += padding;
    }
}

/// A ring of which items are written before, between and after the words that are read.
struct Racing {
    writer: RefCell<Writer>,
    /// One is written before a word with a probability of 1 in so many; none if it is 0.
    seldom: u64,
}

impl RingBytes for Racing {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut writer = self.writer.borrow_mut();
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            while self.seldom > 0 && writer.random.below(self.seldom) == 0 {
                writer.write();
            }
            word.copy_from_slice(writer.word(at + index as u64 * 8));
        }
        Ok(())
    }
}

fn names() -> Names {
    Names::of("5.3.0").unwrap()
}

#[test]
fn racing_writer_loses_exactly_what_is_reported() {
    let mut rings_with_losses = 0;
    for seed in 1..400 {
        let seldom = [2, 5, 20, 100, 1000, 0][seed as usize % 6];
        let ring_words = [64, 256, 4096][seed as usize % 3];
        let ring = Racing {
            writer: RefCell::new(Writer::new(ring_words, seed)),
            seldom,
        };
        let header = ring.writer.borrow().header;
        let mut reader = RingReader {
            domain: WRITTEN,
            position: 0,
        };
        let (mut last, mut lost, mut begun) = (None, 0, 0);
        for _ in 0..60 {
            (0..20).for_each(|_| ring.writer.borrow_mut().write());
            let tail = tails(&ring, &header).unwrap()[WRITTEN as usize];
            begun = begun.max(tail);
            let before = last;
            let mut seen = Vec::new();
            let read = reader.read(
                &ring,
                &header,
                &names(),
                tail,
                &mut CopyBuffer::default(),
                |found| match found {
                    RingEntry::Lost { words, .. } => lost += words,
                    RingEntry::Event {
                        time, kind: event, ..
                    } => {
                        assert_eq!(event, RuntimeEventKind::User(3, UserValue::Unit));
                        seen.push(time);
                    }
                },
            );
            read.unwrap();
            assert!(reader.position >= tail);
            // Each event is read at most once, and in order.
            assert!(
                seen.is_sorted_by(|one, other| one < other),
                "{seed}: {seen:?}"
            );
            assert!(seen.first() > before.as_ref() || seen.is_empty());
            last = seen.last().copied().or(before);
            if seldom == 0 && ring_words == 4096 {
                assert_eq!(seen.len(), 20, "{seed}");
            }
        }
        if seldom == 0 && ring_words == 4096 {
            assert_eq!(lost, 0);
        }
        rings_with_losses += u32::from(seldom > 0 && lost > 0);
    }
    assert!(rings_with_losses > 100, "{rings_with_losses}");
}

#[test]
fn words_read_and_lost_are_all_words_written() {
    for seed in 1..200 {
        let mut writer = Writer::new(256, seed);
        let header = writer.header;
        let mut reader = RingReader {
            domain: WRITTEN,
            position: 0,
        };
        let (mut read, mut lost) = (0, 0);
        for _ in 0..50 {
            for _ in 0..writer.random.below(60) {
                writer.write();
            }
            let lens = writer.lens.clone();
            let ring = Racing {
                writer: RefCell::new(writer),
                seldom: 0,
            };
            let tail = tails(&ring, &header).unwrap()[WRITTEN as usize];
            let copied = &mut CopyBuffer::default();
            let visit = |found: RingEntry<'_>| match found {
                RingEntry::Lost { words, .. } => lost += words,
                RingEntry::Event { time, .. } => read += lens[time as usize],
            };
            let done = reader.read(&ring, &header, &names(), tail, copied, visit);
            done.unwrap();
            assert_eq!(reader.position, tail);
            writer = ring.writer.into_inner();
        }
        // Padding is read, or lost with the events around it.
        let events: u64 = writer.lens.iter().sum();
        assert_eq!(reader.position, events + writer.padding);
        let padding_read = reader.position - read - lost;
        assert!(padding_read <= writer.padding, "{seed}");
    }
}

#[test]
fn lost_words_come_before_what_follows_them() {
    let mut writer = Writer::new(64, 5);
    let header = writer.header;
    let mut reader = RingReader {
        domain: WRITTEN,
        position: 0,
    };
    let mut found = Vec::new();
    for round in 0..2 {
        (0..40 * round + 3).for_each(|_| writer.write());
        let ring = Hostile(writer.file.clone());
        let tail = tails(&ring, &header).unwrap()[WRITTEN as usize];
        let copied = &mut CopyBuffer::default();
        let visit = |it: RingEntry<'_>| {
            found.push(match it {
                RingEntry::Lost { words, .. } => Err(words),
                RingEntry::Event { time: number, .. } => Ok(number),
            });
        };
        let read = reader.read(&ring, &header, &names(), tail, copied, visit);
        read.unwrap();
    }
    let (before, after) = found.split_at(3);
    assert_eq!(before, [Ok(0), Ok(1), Ok(2)]);
    let (lost, after) = after.split_first().unwrap();
    assert!(matches!(lost, Err(1..)), "{lost:?}");
    assert!(after.len() > 3 && after.iter().all(Result::is_ok));
}

/// A file of runtime events with any contents.
struct Hostile(Vec<u8>);

impl RingBytes for Hostile {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(at).map_err(io::Error::other)?;
        let found = self.0.get(start..).and_then(|rest| rest.get(..bytes.len()));
        bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

fn read_all(file: Vec<u8>) -> Result<u64, RingError> {
    let ring = Hostile(file);
    let mut start = [0; 64];
    ring.read(0, &mut start)?;
    let header = Header::parse(&start, ring.0.len() as u64).map_err(RingError::Malformed)?;
    let mut words = 0;
    for (domain, tail) in (0..).zip(tails(&ring, &header)?) {
        let mut reader = RingReader {
            domain,
            position: 0,
        };
        reader.read(
            &ring,
            &header,
            &names(),
            tail,
            &mut CopyBuffer::default(),
            |_| words += 1,
        )?;
    }
    Ok(words)
}

#[test]
fn last_positions_of_all_are_read() {
    let mut writer = Writer::new(64, 9);
    for position in 0..64 {
        let slot = writer.slot(position);
        writer.set(slot, item_tests::header(1, false, 0, 0));
    }
    let head_at = writer.head_at();
    writer.set(head_at, u64::MAX - 10);
    writer.set(head_at + 8, u64::MAX);
    // What was overwritten, and nothing else.
    assert_eq!(read_all(writer.file).unwrap(), 1);
}

#[test]
fn hostile_rings_are_refused() {
    let mut writer = Writer::new(64, 9);
    (0..5).for_each(|_| writer.write());
    assert_eq!(read_all(writer.file.clone()).unwrap(), 5);
    let (head_at, first) = (writer.head_at(), writer.slot(0));
    for (at, value, why) in [
        (
            head_at + 8,
            65,
            "the ring of domain 1 holds more than it has room for",
        ),
        (
            head_at + 8,
            u64::MAX,
            "the ring of domain 1 holds more than it has room for",
        ),
        (first, 0, "the ring of domain 1 has an event without words"),
        (
            first,
            u64::MAX,
            "the ring of domain 1 has an event beyond its end",
        ),
        (
            first,
            2 << 54 | 9 << 49,
            "the ring of domain 1 is damaged: an event begins with 0x92000000000000",
        ),
    ] {
        let before = writer.get(at);
        writer.set(at, value);
        match read_all(writer.file.clone()) {
            Err(RingError::Malformed(found)) => assert!(found.starts_with(why), "{found}"),
            other => panic!("{why}: {other:?}"),
        }
        writer.set(at, before);
    }
    let mut reader = RingReader {
        domain: WRITTEN,
        position: 1 << 40,
    };
    let (header, ring) = (writer.header, Hostile(writer.file));
    let back = reader.read(
        &ring,
        &header,
        &names(),
        9,
        &mut CopyBuffer::default(),
        |_| {},
    );
    assert!(matches!(back, Err(RingError::Malformed(why)) if why.ends_with("goes back")));
}

#[test]
fn any_change_of_a_file_is_survived() {
    let mut random = Random(77);
    for seed in 1..20_000 {
        let mut writer = Writer::new(64, seed);
        let events = random.below(30);
        (0..events).for_each(|_| writer.write());
        let interesting = writer.header.data_at + 2 * 64 * 8;
        for _ in 0..=random.below(4) {
            let at = random.below(interesting / 8) * 8;
            let value = match random.below(3) {
                0 => random.below(200),
                1 => u64::MAX - random.below(200),
                _ => writer.get(at) ^ 1 << random.below(64),
            };
            writer.set(at, value);
        }
        if let Ok(words) = read_all(writer.file) {
            assert!(words <= 128, "each event has words of its own");
        }
    }
}

#[test]
fn truncated_files_are_refused() {
    let mut writer = Writer::new(64, 3);
    (0..20).for_each(|_| writer.write());
    for len in 0..writer.file.len().min(5000) {
        assert!(read_all(writer.file[..len].to_vec()).is_err(), "{len}");
    }
}

/// The events of a file with these contents, of a program of OCaml 5.4, and the file's path.
fn opened(scratch: &test_support::Scratch, contents: &[u8]) -> (RuntimeEvents, std::path::PathBuf) {
    let (program, file) = (scratch.file("program"), scratch.file("events"));
    fs::write(&program, program::bytes()).unwrap();
    fs::write(&file, contents).unwrap();
    (RuntimeEvents::of_file(&file, &program).unwrap(), file)
}

/// A file of events of two domains, each with the kind, number and time of each event.
fn file_of(domains: [&[(u64, u64, u64)]; 2]) -> Vec<u8> {
    let mut writer = Writer::new(64, 3);
    let header = writer.header;
    for (domain, events) in (0_u64..).zip(domains) {
        let slots = header.data_at + domain * header.ring_words * 8;
        for (index, &(kind, number, time)) in (0_u64..).zip(events) {
            let at = slots + index * 16;
            writer.set(at, item_tests::header(2, false, kind, number));
            writer.set(at + 8, time);
        }
        let tail = header.headers_at + domain * RING_HEADER_LEN + 8;
        writer.set(tail, 2 * events.len() as u64);
    }
    writer.file
}

#[test]
fn phases_under_way_are_those_without_ends() {
    const BEGIN: u64 = 2;
    const END: u64 = 3;
    const PAUSE: (u64, u64) = (1, 2);
    let scratch = test_support::Scratch::new();
    let open = |on_since, domains: [&[(u64, u64, u64)]; 2]| {
        let (mut events, _) = opened(&scratch, &file_of(domains));
        events.skip(on_since).unwrap();
        events
    };
    let found = |events: &RuntimeEvents| -> Vec<_> {
        let phases = events.under_way().iter();
        phases.map(|it| (it.domain, it.began)).collect()
    };
    let begun = [(BEGIN, 11, 10), (BEGIN, 12, 20), (END, 12, 30)];
    let events = open(0, [&begun, &[(BEGIN, 12, 40)]]);
    assert_eq!(found(&events), [(0, 10), (1, 40)]);
    // The end of what began while they were off was not written.
    assert_eq!(found(&open(11, [&begun, &[(BEGIN, 12, 40)]])), [(1, 40)]);
    // The end of the first may not have been written, though another domain was paused.
    let paused = [(PAUSE.0, PAUSE.1, 25), (BEGIN, 12, 40)];
    assert_eq!(found(&open(0, [&begun, &paused])), [(1, 40)]);
    // Read from the start, none is under way: its begin is read.
    assert_eq!(found(&events.from_start()), []);
}

#[test]
fn error_names_the_file_that_is_wrong() {
    let scratch = test_support::Scratch::new();
    let (program, file) = (scratch.file("program"), scratch.file("events"));
    fs::write(&file, "").unwrap();
    let said = || {
        let error = RuntimeEvents::of_file(&file, &program).unwrap_err();
        error.to_string()
    };
    let version = program::bytes();
    // 4 and 5 as integers of OCaml.
    let [minor, unknown] = [9_u64, 11].map(u64::to_le_bytes);
    let unknown = replaced(&replaced(&version, &minor, &unknown), b"5.4.1", b"5.5.1");
    let none = replaced(&version, b"5.4.1", b"?????");
    for (contents, why) in [
        (unknown, "was compiled by OCaml 5.5.1"),
        (none, "does not say by which version"),
    ] {
        fs::write(&program, contents).unwrap();
        let expected = format!("{} {why}", program.display());
        assert!(said().starts_with(&expected), "{}", said());
    }
    // Opening a pipe would wait for its writer.
    fs::write(&program, version).unwrap();
    fs::remove_file(&file).unwrap();
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let expected = format!("{} is not a regular file", file.display());
    assert_eq!(said(), expected);
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|it| it == from).unwrap();
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

fn count(events: &mut RuntimeEvents) -> crate::Result<u64> {
    let mut count = 0;
    events.read(|_| count += 1)?;
    Ok(count)
}

#[test]
fn file_that_is_truncated_later_is_refused() {
    let mut writer = Writer::new(64, 3);
    (0..5).for_each(|_| writer.write());
    let scratch = test_support::Scratch::new();
    let (mut events, path) = opened(&scratch, &writer.file);
    assert_eq!(count(&mut events).unwrap(), 5);
    (0..5).for_each(|_| writer.write());
    fs::write(&path, &writer.file).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for len in [300, 64, 0] {
        file.set_len(len).unwrap();
        let error = count(&mut events).unwrap_err().to_string();
        assert!(
            error.contains("it is shorter than its header says"),
            "{error}"
        );
    }
    // The same once it is whole again, and longer than before.
    fs::write(&path, [&writer.file[..], &[0xff; 5000]].concat()).unwrap();
    assert_eq!(count(&mut events).unwrap(), 5);
}

#[test]
fn file_that_is_removed_is_read_on() {
    let mut writer = Writer::new(64, 3);
    let scratch = test_support::Scratch::new();
    let (mut events, path) = opened(&scratch, &writer.file);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // Another one with its name is another file.
    fs::write(&path, b"").unwrap();
    (0..3).for_each(|_| writer.write());
    std::os::unix::fs::FileExt::write_all_at(&file, &writer.file, 0).unwrap();
    assert_eq!(count(&mut events).unwrap(), 3);
}

mod program {
    include!("../../../../../fuzz/fuzz_targets/runtime_events_input.rs");

    pub(super) fn bytes() -> Vec<u8> {
        program_of_ocaml_5_4()
    }
}

#[test]
fn inputs_of_the_fuzzer_are_survived() {
    let corpus = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/corpus/runtime_events"
    );
    let scratch = test_support::Scratch::new();
    let program = scratch.file("program");
    fs::write(&program, program::bytes()).unwrap();
    let mut read = Vec::new();
    for input in fs::read_dir(corpus).unwrap() {
        let input = input.unwrap();
        let mut events = RuntimeEvents::of_file(input.path(), &program).unwrap();
        assert_eq!(events.version(), "5.4.1");
        let mut entries = 0;
        events.read(|_| entries += 1).unwrap();
        read.push((input.file_name().into_string().unwrap(), entries));
    }
    read.sort();
    let expected = [("runtime", 5), ("user", 5), ("wrapped", 6)];
    assert_eq!(
        read,
        expected.map(|(name, entries)| (name.to_owned(), entries))
    );
}

#[test]
fn ring_with_an_impossible_end_is_refused() {
    let scratch = test_support::Scratch::new();
    let mut writer = Writer::new(64, 3);
    let tail = writer.header.headers_at + 8;
    writer.set(tail, u64::MAX);
    let (mut events, _) = opened(&scratch, &writer.file);
    let error = events.skip(0).unwrap_err().to_string();
    let why = "the ring of domain 0 holds more than it has room for";
    assert!(error.contains(why), "{error}");
}
