//! [`EventDecoder`]: makes events of records.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use super::watched_points::{ArgumentShape, WatchedPoint, watched_points};
use super::{CallFrame, Event, EventKind, EventOrigin, PairKey, Watched};
use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::observe::install::thread_ids::ThreadIds;
use crate::observe::layout::shared::{SharedLayout, fields, record};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::copied_stack::CopiedStack;
use crate::observe::read::ring::word;
use crate::observe::read::value::{CustomKind, RecordedArgument};
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::ticks::Clock;

/// How many kinds of custom blocks are remembered at most: more than any program has.
const MAX_KINDS: usize = 1024;

/// The process whose records are decoded.
#[derive(Clone, Copy)]
pub(super) struct RecordedProcess<'p> {
    pub(super) process: &'p Process,
    /// `None` if it has exited.
    pub(super) memory: Option<&'p ProcessMemory>,
    /// When the records were read.
    pub(super) clock: &'p Clock,
}

/// Makes events of records.
#[derive(Debug)]
pub(super) struct EventDecoder {
    within: Arc<Watched>,
    pub(super) layout: SharedLayout,
    /// How each point of the plan is watched.
    pub(super) points: Vec<Option<WatchedPoint>>,
    kinds: CustomKinds,
    threads: ThreadIdMap,
}

/// The kinds of custom blocks, by the address of their operations.
#[derive(Debug, Default)]
struct CustomKinds(HashMap<u64, CustomKind>);

/// Finds the ids of threads in our pid namespace.
#[derive(Debug)]
struct ThreadIdMap {
    ids: ThreadIds,
    /// The ids by those in the namespace of the process; `None` if a thread is not found.
    known: HashMap<i32, Option<i32>>,
}

impl EventDecoder {
    pub(super) fn of(plan: &ObservationPlan, thread_ids: ThreadIds) -> EventDecoder {
        EventDecoder {
            within: Arc::new(Watched {
                program: plan.program.clone(),
                functions: plan.functions.clone(),
            }),
            layout: plan.shared,
            points: watched_points(plan),
            kinds: CustomKinds::default(),
            threads: ThreadIdMap {
                ids: thread_ids,
                known: HashMap::new(),
            },
        }
    }

    /// Whether records may have custom blocks, so that decoding them may need the memory of the process.
    pub(super) fn may_need_memory(&self) -> bool {
        let points = self.points.iter().flatten();
        let mut shapes = points.flat_map(|it| it.arguments.iter().chain(&it.result));
        shapes.any(|shape| !shape.is_c)
    }

    /// Forgets the ids of threads, so that they are looked for again: another thread may have the id
    /// of one that has exited.
    pub(super) fn forget_threads(&mut self) {
        self.threads.known.clear();
    }

    /// Returns an event for records to be decoded into.
    pub(super) fn blank(&self) -> Event {
        Event {
            time: SystemTime::UNIX_EPOCH,
            monotonic: 0,
            thread: None,
            kind: EventKind::Hit,
            arguments: Vec::new(),
            frame: None,
            pair_key: None,
            stack: None,
            within: self.within.clone(),
            of: EventOrigin::Function(0),
        }
    }

    /// Decodes a record into an event; returns `None` if it is not one that a trampoline writes.
    #[inline]
    pub(super) fn decode(
        &mut self,
        of: RecordedProcess<'_>,
        record: &[u8],
        event: &mut Event,
    ) -> Option<()> {
        // With its length known, the compiler checks no field again.
        if record.len() < record::ARGUMENTS as usize {
            return None;
        }
        let point = (word(record, record::TID) >> 32) as u32;
        let ends = record::RETURN | record::JUMP;
        let watched = self.points.get((point & !ends) as usize)?.as_ref()?;
        let kind = match point & ends {
            0 => EventKind::Hit,
            record::RETURN => EventKind::Return,
            record::JUMP => EventKind::Jump,
            _ => return None,
        };
        let is_possible = match kind {
            EventKind::Hit => true,
            EventKind::Return => watched.has_frames || watched.has_results,
            EventKind::Jump => watched.has_frames,
        };
        if !watched.is_watched || !is_possible {
            return None;
        }
        let (tid, shapes) = (tid(record), watched.shapes(kind));
        event.of = watched.of;
        event.frame = watched.has_frames.then(|| frame(record));
        event.pair_key = watched.pair_key.as_ref().and_then(|key| {
            let has_threads = self.threads.ids != ThreadIds::Unknown;
            let recorded: Vec<_> = all_recorded(record, self.layout, shapes).collect();
            PairKey::of(&key.parts, &recorded, has_threads.then_some(tid))
        });
        let layout = self.layout;
        decode_hit(&mut self.kinds, of, (record, layout), (kind, shapes), event);
        event.thread = self.threads.get(of.process, tid);
        if self.layout.stacks != StackCopies::None {
            event.stack = self.stack(record, event);
        }
        Some(())
    }

    /// Returns the hit at an end of a slow pair or, of a call, its entry if `of_function` is [`EventKind::Hit`], and
    /// otherwise its exit, whose kind the record says.
    pub(super) fn end(
        &mut self,
        of: RecordedProcess<'_>,
        record: &[u8],
        of_function: EventKind,
    ) -> Option<Event> {
        let mut event = self.blank();
        let point = (word(record, record::TID) >> 32) as u32;
        let index = point & !(record::SLOW | record::RETURN);
        let watched = self.points.get(index as usize)?.as_ref()?;
        let kind = match of_function {
            _ if watched.is_pair_end => EventKind::Hit,
            EventKind::Hit => EventKind::Hit,
            _ if point & record::RETURN == 0 => EventKind::Jump,
            _ => EventKind::Return,
        };
        event.of = watched.of;
        let shapes = watched.shapes(kind);
        let layout = self.layout;
        decode_hit(
            &mut self.kinds,
            of,
            (record, layout),
            (kind, shapes),
            &mut event,
        );
        event.thread = self.threads.get(of.process, tid(record));
        Some(event)
    }

    /// Returns the stack that a record has of its hit, if stacks are copied.
    pub(super) fn stack(&self, record: &[u8], event: &Event) -> Option<CopiedStack> {
        if self.layout.stacks == StackCopies::None {
            return None;
        }
        let copied = record.get(self.layout.stack_at() as usize..)?;
        CopiedStack::parse(copied, event.address())
    }
}

impl CustomKinds {
    /// Returns the kind of a custom block, from the address of its operations: the first word there
    /// is the address of a name.
    fn get(&mut self, memory: Option<&ProcessMemory>, operations: u64) -> CustomKind {
        if let Some(known) = self.0.get(&operations) {
            return known.clone();
        }
        let read_kind = || {
            let at = memory?.read_word(LiveAddr(operations)).ok()?;
            CustomKind::of(&name_at(memory?, LiveAddr(at))?)
        };
        let Some(custom) = read_kind() else {
            return CustomKind::Unknown;
        };
        if self.0.len() < MAX_KINDS {
            self.0.insert(operations, custom.clone());
        }
        custom
    }
}

impl ThreadIdMap {
    /// Returns the id in our pid namespace of the thread with this id in its own.
    #[inline]
    fn get(&mut self, process: &Process, tid: i32) -> Option<i32> {
        match self.ids {
            ThreadIds::Unknown => None,
            ThreadIds::OfOurNamespace => Some(tid),
            ThreadIds::OfAnotherNamespace => self.find(process, tid),
        }
    }

    /// The same, if the process is in another namespace.
    fn find(&mut self, process: &Process, tid: i32) -> Option<i32> {
        if let Some(known) = self.known.get(&tid) {
            return *known;
        }
        for thread in process.threads().and_then(|mut list| list.read()).ok()? {
            if let Ok(status) = process.thread_status(thread) {
                self.known.insert(status.innermost, Some(thread));
            }
        }
        // A thread that has exited is not found. Its id is looked for again only after the table of
        // pages is renewed.
        *self.known.entry(tid).or_insert(None)
    }
}

/// Decodes what every record has of a hit: its time and arguments.
#[inline]
fn decode_hit(
    kinds: &mut CustomKinds,
    of: RecordedProcess<'_>,
    (record, layout): (&[u8], SharedLayout),
    (kind, shapes): (EventKind, &[ArgumentShape]),
    event: &mut Event,
) {
    (event.time, event.monotonic) = of.clock.times(word(record, record::TIME));
    event.kind = kind;
    event.arguments.clear();
    let recorded = all_recorded(record, layout, shapes);
    let decode = |it: RecordedArgument<'_>| it.decode(&mut |at| kinds.get(of.memory, at));
    event.arguments.extend(recorded.map(decode));
}

/// Returns the bytes of a name before the null byte that ends it; `None` if it cannot be read, or is longer than names
/// are.
fn name_at(memory: &impl ReadMemory, at: LiveAddr) -> Option<Vec<u8>> {
    const MAX_NAME_LEN: usize = 64;
    let mut name = Vec::new();
    let mut at = at;
    while name.len() <= MAX_NAME_LEN {
        // Not across the end of a page.
        let mut bytes = [0; 8];
        let bytes = &mut bytes[..8 - at.0 as usize % 8];
        memory.read(at, bytes).ok()?;
        let end = bytes.iter().position(|byte| *byte == 0);
        name.extend(&bytes[..end.unwrap_or(bytes.len())]);
        if end.is_some() {
            return Some(name);
        }
        at = LiveAddr(at.0.checked_add(bytes.len() as u64)?);
    }
    None
}

/// Returns the id of the thread in a record.
#[inline]
fn tid(record: &[u8]) -> i32 {
    word(record, record::TID) as i32
}

/// Returns where the call in a record is.
#[inline]
fn frame(record: &[u8]) -> CallFrame {
    let fiber = word(record, record::FIBER);
    CallFrame {
        fiber: (fiber != 0).then_some(fiber >> 1),
        place: word(record, record::FRAME) as i64,
    }
}

/// Returns the arguments in a record.
#[inline]
fn all_recorded<'r>(
    record: &'r [u8],
    layout: SharedLayout,
    shapes: &[ArgumentShape],
) -> impl Iterator<Item = RecordedArgument<'r>> {
    let shapes = shapes.iter().enumerate();
    shapes.map(move |(index, shape)| recorded(record, layout, index, *shape))
}

/// Returns the argument of this index in a record.
#[inline]
fn recorded(
    record: &[u8],
    layout: SharedLayout,
    index: usize,
    shape: ArgumentShape,
) -> RecordedArgument<'_> {
    let at = layout.argument_at(index as u64);
    let copied = record
        .get(record::COPIED as usize + index)
        .copied()
        .unwrap_or(0);
    let words = u64::from(copied).saturating_sub(1).min(fields::WORDS);
    let start = (at + record::COPY) as usize;
    let bytes = record.get(start..start + 8 * words as usize);
    RecordedArgument {
        source: shape.source,
        size: shape.size,
        signed: shape.signed,
        is_float: shape.is_float,
        is_c: shape.is_c,
        value: word(record, at + record::VALUE),
        header: word(record, at + record::BLOCK_HEADER),
        words: bytes.filter(|_| copied > 0),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use nix::fcntl::OFlag;
    use nix::unistd::gettid;
    use test_support::{Talker, fixture};

    use super::*;
    use crate::address::LoadBias;
    use crate::observe::functions::ObservedFunctions;
    use crate::observe::observation::Observation;
    use crate::observe::read::value::Value;
    use crate::observe::role::{ArgumentRoom, ArgumentSource};
    use crate::select::Selector;
    use crate::select::function::FunctionSelector;
    use crate::testing::{ProgramSpec, loaded_twice, program_with_arguments};
    use crate::ticks::TickMeasurement;

    const AGAIN: LoadBias = LoadBias(0x1000_0000);

    /// A plan of two probes with a site in each of two objects: the points 1 and 3 are watched.
    pub(in super::super) fn plan() -> ObservationPlan {
        let program = program_with_arguments(&[("a", ""), ("b", "8@%rdi -4@8(%rsp)")]);
        let observation = Observation::new()
            .count(Selector::name("a"))
            .watch(Selector::name("b"));
        ObservationPlan::of(
            &observation,
            Arc::new(loaded_twice(&program, AGAIN)),
            Arc::default(),
        )
        .unwrap()
    }

    fn decoder(thread_ids: ThreadIds) -> EventDecoder {
        EventDecoder::of(&plan(), thread_ids)
    }

    /// Returns the event of a record of our own process, if it is one.
    fn decoded(decoder: &mut EventDecoder, clock: &Clock, record: &[u8]) -> Option<Event> {
        let process = Process::own().unwrap();
        let of = RecordedProcess {
            process: &process,
            memory: None,
            clock,
        };
        let mut event = decoder.blank();
        decoder.decode(of, record, &mut event).map(|()| event)
    }

    /// Returns a record with these words at these offsets.
    pub(in super::super) fn record_of(words: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; record::len(2, ArgumentRoom::Fields) as usize];
        for (at, word) in words {
            bytes[*at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(in super::super) fn function(name: &str) -> FunctionSelector {
        FunctionSelector::Glob(name.parse().unwrap())
    }

    /// Returns a plan of functions of a program that is running, with the probes `a` and `b`.
    pub(in super::super) fn plan_of_functions(observation: &Observation) -> ObservationPlan {
        let target = Talker::start(&fixture("calls.pie"));
        let functions = ObservedFunctions::find(target.pid(), observation).unwrap();
        let program = program_with_arguments(&[("a", "8@%rdi"), ("b", "8@%rdi")]);
        ObservationPlan::of(observation, Arc::new(program), Arc::new(functions)).unwrap()
    }

    #[test]
    fn event_has_the_fields_of_its_record() {
        let clock = TickMeasurement::begin().clock();
        let mut decoder = decoder(ThreadIds::OfOurNamespace);
        let mut event = |point: u64| {
            let bytes = record_of(&[
                (record::TIME, 1 << 40),
                (record::TID, point << 32 | 77),
                (record::ARGUMENTS + record::VALUE, 85),
                (SharedLayout::default().argument_at(1), 0xffff_ffff),
            ]);
            decoded(&mut decoder, &clock, &bytes)
        };
        for (point, object) in [(1, 0), (3, 1)] {
            let event = event(point).unwrap();
            assert_eq!((event.name(), event.thread), ("b", Some(77)));
            assert_eq!(event.time, clock.times(1 << 40).0);
            assert_eq!(event.arguments, [Value::Int(42), Value::Int(-1)]);
            assert_eq!(event.object_index(), Some(object));
            let address = ProgramSpec::TEXT + 8;
            assert_eq!(event.site().unwrap().address().0, address);
            assert_eq!(event.address().0, address + object as u64 * AGAIN.0);
            assert_eq!(
                event.object().unwrap().load_bias().0,
                object as u64 * AGAIN.0
            );
        }
        for point in [0, 2, 4, u64::from(u32::MAX)] {
            assert!(event(point).is_none(), "{point}");
        }
    }

    #[test]
    fn recorded_argument_has_its_copied_words() {
        let shape = ArgumentShape {
            source: ArgumentSource::on_stack(8),
            size: 4,
            signed: true,
            is_float: false,
            is_c: false,
        };
        let at = SharedLayout::default().argument_at(1);
        let mut words = vec![
            (at + record::VALUE, 11),
            (at + record::BLOCK_HEADER, 22),
            (at + record::COPY, 33),
            (at + record::COPY + 8 * 8, 44),
        ];
        // All words of the argument before it were copied.
        for (copied, len) in [(0, None), (1, Some(0)), (3, Some(2)), (255, Some(22))] {
            words.push((record::COPIED, copied << 8 | 10));
            let bytes = record_of(&words);
            let recorded = recorded(&bytes, SharedLayout::default(), 1, shape);
            assert_eq!((recorded.value, recorded.header), (11, 22));
            assert_eq!((recorded.size, recorded.signed), (4, true));
            assert_eq!(recorded.words.map(|words| words.len() / 8), len);
            if let Some(words @ [first, ..]) = recorded.words {
                assert_eq!((*first, words.len() % 8), (33, 0));
            }
        }
    }

    #[test]
    fn custom_blocks_are_known_by_name() {
        let name = *b"_j\0";
        let operations = [name.as_ptr() as u64];
        let at = operations.as_ptr() as u64;
        let process = Process::own().unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDONLY).unwrap();
        let mut kinds = CustomKinds::default();
        assert_eq!(kinds.get(None, at), CustomKind::Unknown);
        assert_eq!(kinds.get(Some(&memory), 0), CustomKind::Unknown);
        assert!(kinds.0.is_empty());
        assert_eq!(kinds.get(Some(&memory), at), CustomKind::Int64);
        // Now it is known without reading memory.
        assert_eq!(kinds.get(None, at), CustomKind::Int64);
        // No more than a certain number are remembered.
        kinds.0 = (1..=MAX_KINDS as u64)
            .map(|at| (at, CustomKind::Unknown))
            .collect();
        assert_eq!(kinds.get(Some(&memory), at), CustomKind::Int64);
        assert_eq!(kinds.0.len(), MAX_KINDS);
    }

    #[test]
    fn threads_are_named_by_our_namespace() {
        let process = Process::own().unwrap();
        let tid = gettid().as_raw();
        let mut foreign = decoder(ThreadIds::OfAnotherNamespace);
        assert_eq!(foreign.threads.get(&process, tid), Some(tid));
        assert_eq!(foreign.threads.get(&process, i32::MAX), None);
        // They are looked for again after the table is renewed: an id may be another thread's then.
        assert!(foreign.threads.known.contains_key(&i32::MAX));
        foreign.forget_threads();
        assert!(foreign.threads.known.is_empty());
        let unknown = |thread_ids| decoder(thread_ids).threads.get(&process, i32::MAX);
        assert_eq!(unknown(ThreadIds::OfOurNamespace), Some(i32::MAX));
        assert_eq!(unknown(ThreadIds::Unknown), None);
    }

    #[test]
    fn exits_of_functions_are_events_if_asked_for() {
        let watching = || Observation::new().watch_functions(function("leaf"));
        let clock = TickMeasurement::begin().clock();
        let event = |observation: &Observation, ends: u32| {
            let plan = plan_of_functions(observation);
            let mut decoder = EventDecoder::of(&plan, ThreadIds::OfOurNamespace);
            let mut bytes = vec![0; plan.shared.record_len as usize];
            for (at, word) in [
                (record::TID, u64::from(ends) << 32 | 77),
                (record::ARGUMENTS + record::VALUE, 85),
                (record::FRAME, -0x40_i64 as u64),
                (record::FIBER, 2 * 9 + 1),
            ] {
                bytes[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
            }
            let event = decoded(&mut decoder, &clock, &bytes)?;
            assert_eq!(event.name(), "leaf");
            Some((event.kind, event.arguments, event.frame))
        };
        let frame = Some(CallFrame {
            fiber: Some(9),
            place: -0x40,
        });
        // A word of C.
        let word = vec![Value::Int(85)];
        let (results, exits) = (watching().watch_results(), watching().watch_exits());
        let (returned, jumped) = (record::RETURN, record::JUMP);
        for (observation, ends, expected) in [
            (&watching(), 0, Some((EventKind::Hit, word.clone(), None))),
            (&watching(), returned, None),
            (&results, 0, Some((EventKind::Hit, word.clone(), None))),
            (
                &results,
                returned,
                Some((EventKind::Return, word.clone(), None)),
            ),
            (&results, jumped, None),
            (&exits, 0, Some((EventKind::Hit, word, frame))),
            (&exits, returned, Some((EventKind::Return, vec![], frame))),
            (&exits, jumped, Some((EventKind::Jump, vec![], frame))),
            (&exits, returned | jumped, None),
        ] {
            assert_eq!(event(observation, ends), expected, "{ends:x}");
        }
    }
}
