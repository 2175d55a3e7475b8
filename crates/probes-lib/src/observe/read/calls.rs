//! [`FunctionLatency`]: how long the calls of a function lasted, from what the trampolines have recorded of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Deref;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::functions::ObservedFunctions;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::calls::{CallsLayout, call_slot, function_data, sums};
use crate::observe::plan::ObservationPlan;
use crate::observe::read::callers::{CallerLatency, RecordedCallers};
use crate::observe::read::data_source;
use crate::observe::read::ring::word;
use crate::observe::read::times::Times;
use crate::observe::role::StackKind;
use crate::patch_plan::displaced::ExitKind;
use crate::ticks::TickMeasurement;

/// How long the calls of a function lasted, from entry to exit.
///
/// If more than 128 functions are timed, quantiles are accurate to 1 %, not to 0.2 %; if more than 512, to 3 %; if more
/// than 2,048, to 12 %. The sum and the mean are those of the histogram, except of self times, whose sum is exact.
///
/// ```no_run
/// use probes_lib::{FunctionSelector, Observation, Options, Target};
///
/// let handlers = FunctionSelector::Glob("Http.handle*".parse().unwrap());
/// let observation = Observation::new().time_functions(handlers);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for function in observer.function_latencies()? {
///     println!("{}: p99 {:?}", function.name(), function.quantile(0.99));
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct FunctionLatency {
    functions: Arc<ObservedFunctions>,
    /// Its index there.
    index: usize,
    /// How many functions before it have its name.
    namesakes: usize,
    times: Times,
    total: Option<Duration>,
    callers: Option<Vec<CallerLatency>>,
    figures: Figures,
}

/// What is counted of the calls of a function, besides their times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    running: u64,
    unwound: u64,
    unmatched: u64,
    lost: u64,
    doubtful: u64,
    untyped: u64,
}

impl FunctionLatency {
    /// Adds up what was measured in several processes, by the names of functions, in the order in which they come
    /// first. If several functions of a process have one name, its first is added to the first of that name in other
    /// processes, and so on. [Object](FunctionLatency::object), address and stack are those of the first process that
    /// has the function; callers are not distinguished, because their addresses differ.
    ///
    /// ```no_run
    /// # fn add(one: &mut probes_lib::Observer, other: &mut probes_lib::Observer) -> probes_lib::Result<()> {
    /// let (one, other) = (one.function_latencies()?, other.function_latencies()?);
    /// for function in probes_lib::FunctionLatency::of_processes([&one[..], &other[..]]) {
    ///     println!("{}: {} calls", function.name(), function.count());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn of_processes<'l>(
        each: impl IntoIterator<Item = &'l [FunctionLatency]>,
    ) -> Vec<FunctionLatency> {
        let mut all: Vec<FunctionLatency> = Vec::new();
        // An index, because there may be thousands.
        let mut indexes: HashMap<(&str, usize), usize> = HashMap::new();
        for process in each {
            for function in process {
                match indexes.entry((function.name(), function.namesakes)) {
                    Entry::Occupied(index) => all[*index.get()].add(function),
                    Entry::Vacant(vacant) => {
                        vacant.insert(all.len());
                        all.push(FunctionLatency {
                            callers: None,
                            ..function.clone()
                        });
                    }
                }
            }
        }
        all
    }

    fn add(&mut self, other: &FunctionLatency) {
        self.times.add(&other.times);
        let total = self.total.zip(other.total);
        self.total = total.map(|(one, other)| one.saturating_add(other));
        let (figures, others) = (&mut self.figures, other.figures);
        for (to, number) in [
            (&mut figures.running, others.running),
            (&mut figures.unwound, others.unwound),
            (&mut figures.unmatched, others.unmatched),
            (&mut figures.lost, others.lost),
            (&mut figures.doubtful, others.doubtful),
            (&mut figures.untyped, others.untyped),
        ] {
            *to = to.saturating_add(number);
        }
    }

    /// Returns its name as in the source, or its address if it has none.
    pub fn name(&self) -> &str {
        &self.functions.functions[self.index].wanted.name
    }

    /// Returns the path of the file that it is in.
    pub fn object(&self) -> &Path {
        &self.functions.functions[self.index].wanted.object
    }

    /// Returns where it begins in the process.
    pub fn address(&self) -> LiveAddr {
        self.functions.functions[self.index].wanted.address
    }

    /// Returns the sum of the times of its calls from entry to exit, if its times are self times
    /// ([`Observation::self_times`](crate::Observation::self_times)); otherwise `None`: it is [`sum`](Times::sum) then.
    pub fn total(&self) -> Option<Duration> {
        self.total
    }

    /// Returns the callers of its calls that ended with an exit, those with the most time first, and last all those for
    /// which there was no room, together. `None` if they are not distinguished
    /// ([`Observation::by_caller`](crate::Observation::by_caller)).
    pub fn callers(&self) -> Option<&[CallerLatency]> {
        self.callers.as_deref()
    }

    /// Returns how many self times may be too long: the time of a call made meanwhile, of a function that is timed,
    /// could not be subtracted, because that call was unwound or lost.
    pub fn doubtful(&self) -> u64 {
        self.figures.doubtful
    }

    /// Returns how many calls are left out because
    /// [`Observation::only_starts_where`](crate::Observation::only_starts_where) has no answer for them.
    pub fn untyped(&self) -> u64 {
        self.figures.untyped
    }

    /// Returns at how many places in its code it returns.
    pub fn returns(&self) -> usize {
        self.functions.functions[self.index].count_exits(ExitKind::Return)
    }

    /// Returns at how many places in its code it is left with a jump to another function, a call in tail position. The
    /// time of a call that ends there is without that of the other function.
    pub fn jumps(&self) -> usize {
        self.functions.functions[self.index].count_exits(ExitKind::Jump)
    }

    /// Returns whether it is called on the stack of a fiber of OCaml 5; otherwise on that of a thread.
    pub fn is_on_fiber(&self) -> bool {
        let timing = self.functions.functions[self.index].timing();
        timing.is_some_and(|timing| timing.stack != StackKind::OfThread)
    }

    /// Returns how many calls have not ended. Some of them may have been unwound, which is noticed when their
    /// stack is used again.
    pub fn running(&self) -> u64 {
        self.figures.running
    }

    /// Returns how many calls did not end with an exit, but with an exception, longjmp(3) or the end of their thread:
    /// the stack was used again where their frames were.
    pub fn unwound(&self) -> u64 {
        self.figures.unwound
    }

    /// Returns how many exits belong to no call that is known: to calls that had begun before the observation, mostly.
    pub fn unmatched_exits(&self) -> u64 {
        self.figures.unmatched
    }

    /// Returns how many calls were not recorded: those within 500 others on the same stack, those on stacks beyond
    /// about a thousand, those of threads without thread-local storage in a program that is observed from its first
    /// instruction, and a few for which registers could not be saved.
    pub fn lost(&self) -> u64 {
        self.figures.lost
    }
}

impl Deref for FunctionLatency {
    type Target = Times;

    /// The times of the calls that ended with an exit.
    fn deref(&self) -> &Times {
        &self.times
    }
}

/// What has been recorded of the calls of each function that is timed.
#[derive(Default)]
pub(crate) struct RecordedCalls {
    functions: Vec<RecordedFunction>,
    /// If they are distinguished.
    callers: Option<RecordedCallers>,
}

struct RecordedFunction {
    /// Times by bucket.
    counts: HashMap<u64, u64>,
    longest: u64,
    /// If self times are measured: their sum, and that of the times from entry to exit.
    sums: Option<(u64, u64)>,
    figures: Figures,
}

impl RecordedFunction {
    /// Parses the data of a function.
    fn of(bytes: &[u8], counts: HashMap<u64, u64>, sums: Option<(u64, u64)>) -> RecordedFunction {
        let lost = word(bytes, function_data::LOST);
        RecordedFunction {
            counts,
            longest: word(bytes, function_data::MAX),
            sums,
            figures: Figures {
                running: 0,
                unwound: word(bytes, function_data::UNWOUND),
                // The exits of calls that are lost are unmatched.
                unmatched: word(bytes, function_data::UNMATCHED).saturating_sub(lost),
                lost,
                doubtful: word(bytes, function_data::DOUBTFUL),
                untyped: word(bytes, function_data::UNTYPED),
            },
        }
    }
}

impl RecordedCalls {
    /// Reads it.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or the process has exited.
    pub(crate) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<RecordedCalls> {
        let (Some(sharing), true) = (arenas.first(), plan.shared.calls.functions > 0) else {
            return Ok(RecordedCalls::default());
        };
        let layout = sharing.shared.calls;
        let from = sharing.shared_at().plus(sharing.shared.calls());
        let read = |offset, len| data_source::read(pid, source, from.plus(offset), len);
        let read_pieces =
            |places: &[(u64, u64)]| data_source::read_pieces_from(pid, source, from, places);
        // First the callers: read later, they could have calls that the functions do not have yet.
        let callers = RecordedCallers::read(layout, read)?;
        let functions = read(0, layout.functions_len())?;
        let functions = functions.chunks_exact(function_data::LEN as usize);
        let counted = functions.clone().map(|bytes| Counted {
            octaves: word(bytes, function_data::OCTAVES),
            groups: word(bytes, function_data::GROUPS),
        });
        let counted: Vec<Counted> = counted.collect();
        let (mut all_counts, mut all_sums) = (Vec::new(), Vec::new());
        // A few at a time: little time passes between the reading of the times and that of their sum.
        for (functions, counted) in (0..)
            .step_by(READ_AT_ONCE)
            .zip(counted.chunks(READ_AT_ONCE))
        {
            all_counts.extend(counts(layout, functions, counted, read_pieces)?);
            let functions = functions..functions + counted.len() as u32;
            all_sums.extend(sums_of(layout, functions, read_pieces)?);
        }
        let recorded = functions.zip(all_counts).enumerate();
        let recorded = recorded.map(|(index, (bytes, counts))| {
            RecordedFunction::of(bytes, counts, all_sums.get(index).copied())
        });
        let mut recorded = RecordedCalls {
            functions: recorded.collect(),
            callers,
        };
        count_running(layout, &mut recorded.functions, read_pieces)?;
        recorded.add_lost_exits(pid, source, plan, arenas)?;
        Ok(recorded)
    }

    /// Adds the exits that were not recorded, because no registers could be saved: later, their calls seem to be
    /// unwound.
    fn add_lost_exits(
        &mut self,
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<()> {
        for (arena, points) in plan.points_by_arena(arenas) {
            let len = 8 * points.len() as u64;
            let lost = data_source::read(pid, source, arena.locked_counter(0), len)?;
            for (lost, planned) in lost.chunks_exact(8).zip(points) {
                let timed = planned.role.timed.as_ref();
                let function = timed.and_then(|it| self.functions.get_mut(it.function as usize));
                if let Some(RecordedFunction { figures, .. }) = function {
                    let lost = word(lost, 0);
                    figures.lost = figures.lost.saturating_add(lost);
                    figures.unwound = figures.unwound.saturating_sub(lost);
                }
            }
        }
        Ok(())
    }

    /// Returns the latency of each function, but not of those that could not be patched.
    pub(crate) fn latencies(
        self,
        plan: &ObservationPlan,
        ticks: &TickMeasurement,
    ) -> Vec<FunctionLatency> {
        if self.functions.is_empty() {
            return Vec::new();
        }
        let nanoseconds = ticks.nanoseconds_per_tick();
        let mut callers = self.callers.map(|it| it.latencies(nanoseconds).into_iter());
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let namesakes = plan.functions.timed_indices().map(|index| {
            let name = &*plan.functions.functions[index].wanted.name;
            let seen = seen.entry(name).or_default();
            *seen += 1;
            *seen - 1
        });
        let namesakes: Vec<usize> = namesakes.collect();
        let recorded = plan.functions.timed_indices().zip(self.functions);
        let recorded = recorded.zip(namesakes);
        let latencies = recorded.map(|((index, recorded), namesakes)| FunctionLatency {
            namesakes,
            callers: callers
                .as_mut()
                .map(|callers| callers.next().unwrap_or_default()),
            functions: plan.functions.clone(),
            index,
            times: Times::of(
                recorded.counts.into_iter(),
                plan.shared.calls.precision(),
                recorded.longest,
                recorded.sums.map(|(own, _)| own),
                nanoseconds,
            ),
            total: recorded
                .sums
                .map(|(_, all)| Duration::from_nanos((all as f64 * nanoseconds) as u64)),
            figures: recorded.figures,
        });
        let is_patched = |it: &FunctionLatency| !plan.functions.not_patched.contains(&it.index);
        latencies.filter(is_patched).collect()
    }
}

/// How many functions, or stacks of calls, are read at once.
const READ_AT_ONCE: usize = 64;

/// Where times of a function were counted.
#[derive(Clone, Copy)]
struct Counted {
    /// A bit for each octave.
    octaves: u64,
    /// A bit for each group of threads, if there are several.
    groups: u64,
}

impl Counted {
    /// Returns the octaves from the first that has times to the last.
    fn octaves(self, layout: CallsLayout) -> Range<u64> {
        let first = u64::from(self.octaves.trailing_zeros());
        first..u64::from(u64::BITS - self.octaves.leading_zeros()).min(layout.octaves())
    }

    fn groups(self, layout: CallsLayout) -> impl Iterator<Item = u64> + Clone {
        let bits = layout.group_bits();
        let is_counted = move |group: &u64| bits == 0 || self.groups >> group & 1 == 1;
        (0..1 << bits).filter(is_counted)
    }

    /// Returns the bytes of its histograms that have times: the offset of those of each group, and how many they are.
    fn places(
        self,
        layout: CallsLayout,
        function: u32,
    ) -> impl Iterator<Item = (u64, u64)> + Clone {
        let (len, Range { start, end }) = (layout.octave_len(), self.octaves(layout));
        let groups = self.groups(layout).filter(move |_| start < end);
        groups.map(move |group| {
            let at = layout.histogram(function, group) + start * len;
            (at, (end - start) * len)
        })
    }
}

/// Reads the histograms of functions, from this one on.
fn counts(
    layout: CallsLayout,
    functions: u32,
    counted: &[Counted],
    read_pieces: impl Fn(&[(u64, u64)]) -> Result<Vec<u8>>,
) -> Result<Vec<HashMap<u64, u64>>> {
    let counted = (functions..).zip(counted);
    let places = counted
        .clone()
        .flat_map(|(function, counted)| counted.places(layout, function));
    let bytes = read_pieces(&places.collect::<Vec<_>>())?;
    let mut rest = &bytes[..];
    let counts = counted.map(|(function, counted)| {
        let mut counts = HashMap::new();
        let first = counted.octaves(layout).start * layout.octave_len() / 8;
        for (_, len) in counted.places(layout, function) {
            let of_group;
            (of_group, rest) = rest.split_at(len as usize);
            for (bucket, count) in (first..).zip(of_group.chunks_exact(8)) {
                let count = word(count, 0);
                if count > 0 {
                    let sum: &mut u64 = counts.entry(bucket).or_default();
                    *sum = sum.saturating_add(count);
                }
            }
        }
        counts
    });
    Ok(counts.collect())
}

/// Reads, for each of these functions, the sum of its self times, and that of its times from entry to exit; none if
/// self times are not counted.
fn sums_of(
    layout: CallsLayout,
    functions: Range<u32>,
    read_pieces: impl Fn(&[(u64, u64)]) -> Result<Vec<u8>>,
) -> Result<Vec<(u64, u64)>> {
    if !layout.of_self {
        return Ok(Vec::new());
    }
    let groups = 0..1 << layout.group_bits();
    let places = functions.flat_map(|function| {
        let groups = groups.clone();
        groups.map(move |group| (layout.sums(function, group), sums::LEN))
    });
    let bytes = read_pieces(&places.collect::<Vec<_>>())?;
    let functions = bytes.chunks_exact((sums::LEN << layout.group_bits()) as usize);
    let sums = functions.map(|groups| {
        let groups = groups.chunks_exact(sums::LEN as usize);
        groups.fold((0_u64, 0_u64), |(own, all), bytes| {
            (
                own.saturating_add(word(bytes, sums::OWN)),
                all.saturating_add(word(bytes, sums::ALL)),
            )
        })
    });
    Ok(sums.collect())
}

/// Counts the calls that have not ended.
fn count_running(
    layout: CallsLayout,
    recorded: &mut [RecordedFunction],
    read_pieces: impl Fn(&[(u64, u64)]) -> Result<Vec<u8>>,
) -> Result<()> {
    let taken = read_pieces(&[(layout.taken(), call_slot::TAKEN_LEN)])?;
    let is_taken = |index: &u64| {
        let bit = index >> call_slot::SLOTS_OF_BIT;
        word(&taken, bit / 64 * 8) >> (bit % 64) & 1 == 1
    };
    let stacks = (0..call_slot::ALL).filter(is_taken);
    let stacks: Vec<u64> = stacks.map(|index| layout.slot(index)).collect();
    for stacks in stacks.chunks(READ_AT_ONCE) {
        let depths = stacks.iter().map(|at| (at + call_slot::DEPTH, 8));
        let depths = read_pieces(&depths.collect::<Vec<_>>())?;
        let depths = depths.chunks_exact(8).map(|depth| word(depth, 0));
        let calls = stacks.iter().zip(depths).filter(|(_, depth)| *depth > 0);
        let calls = calls.map(|(at, depth)| {
            let depth = depth.min(u64::from(call_slot::MAX_CALLS));
            (at + call_slot::CALLS, depth << layout.call_len_bits())
        });
        let calls = read_pieces(&calls.collect::<Vec<_>>())?;
        for call in calls.chunks_exact(1 << layout.call_len_bits()) {
            // The flags follow the function.
            let function = word(call, call_slot::FUNCTION);
            let (function, flags) = (function as u32, (function >> 32) as u32);
            if let Some(function) = recorded.get_mut(function as usize) {
                let is_meant = flags & call_slot::IS_LEFT_OUT == 0;
                let is_running = is_meant && word(call, call_slot::FRAME) != 0;
                function.figures.running += u64::from(is_running);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use test_support::{Talker, fixture};

    use super::*;
    use crate::error::Refusal;
    use crate::observe::layout::calls::caller;
    use crate::observe::observation::Observation;
    use crate::observe::plan::PlannedPoint;
    use crate::select::function::FunctionSelector;
    use crate::testing::{RecordedData, program_with_probes};

    const LAYOUT: CallsLayout = CallsLayout {
        functions: 2,
        of_self: false,
        by_caller: false,
        keeps_arguments: false,
    };

    fn recorded() -> Vec<RecordedFunction> {
        let function = || RecordedFunction {
            counts: HashMap::new(),
            longest: 0,
            sums: None,
            figures: Figures::default(),
        };
        vec![function(), function()]
    }

    /// Returns what reads several places, from what reads one.
    fn of_each(read: impl Fn(u64, u64) -> Vec<u8>) -> impl Fn(&[(u64, u64)]) -> Result<Vec<u8>> {
        move |places| {
            Ok(places
                .iter()
                .flat_map(|(at, len)| read(*at, *len))
                .collect())
        }
    }

    #[test]
    fn calls_not_ended_are_counted_by_function() {
        // On the second stack and the last, three calls: of function 1, of 0 without a frame, and of 1. The eighth was
        // never taken.
        let last = call_slot::ALL - 1;
        let stacks = [1, 7, last];
        let is_at = |at: u64, field: u64| stacks.iter().any(|it| at == LAYOUT.slot(*it) + field);
        let read = |at: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            if at == LAYOUT.taken() {
                for bit in [1, last].map(|stack| stack >> call_slot::SLOTS_OF_BIT) {
                    bytes[bit as usize / 8] |= 1 << (bit % 8);
                }
            }
            if is_at(at, call_slot::DEPTH) {
                bytes[0] = 3;
            }
            if is_at(at, call_slot::CALLS) {
                for (call, (function, frame)) in [(1, 0x7f), (0, 0), (1, 0x6f)].iter().enumerate() {
                    let call = call << LAYOUT.call_len_bits();
                    bytes[call + call_slot::FUNCTION as usize] = *function;
                    bytes[call + call_slot::FRAME as usize] = *frame;
                }
            }
            bytes
        };
        let mut recorded = recorded();
        count_running(LAYOUT, &mut recorded, of_each(read)).unwrap();
        let running = recorded.iter().map(|it| it.figures.running);
        assert_eq!(running.collect::<Vec<_>>(), [0, 4]);
    }

    #[test]
    fn times_of_counted_groups_are_summed() {
        // Bucket 5 of octaves 1 and 3, in each group; and of octave 5, which has no bit.
        let read = |at: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            for group in 0..1 << LAYOUT.group_bits() {
                let histogram = LAYOUT.histogram(1, group);
                for octave in [1, 3, 5] {
                    let bucket = histogram + octave * LAYOUT.octave_len() + 5 * 8;
                    if let Some(index) = bucket.checked_sub(at).filter(|it| *it < len) {
                        bytes[index as usize] = 2;
                    }
                }
            }
            bytes
        };
        let many = 1 << LAYOUT.precision();
        for (groups, each) in [(u64::MAX, 2 << LAYOUT.group_bits()), (0b101, 4)] {
            let of_first = Counted { octaves: 0, groups };
            let of_second = Counted {
                octaves: 0b1010,
                groups,
            };
            let counts = counts(LAYOUT, 0, &[of_first, of_second], of_each(read)).unwrap();
            let expected = HashMap::from([(many + 5, each), (3 * many + 5, each)]);
            assert_eq!(counts, [HashMap::new(), expected]);
        }
    }

    #[test]
    fn any_bytes_can_be_read() {
        let read = |_: u64, len: u64| vec![0xff; len as usize];
        let all = Counted {
            octaves: u64::MAX,
            groups: u64::MAX,
        };
        let counts = counts(LAYOUT, 0, &[all], of_each(read)).unwrap();
        assert_eq!(counts[0].len() as u64, LAYOUT.histogram_len() / 8);
        let times = Times::of(counts[0].clone().into_iter(), 9, u64::MAX, None, 1.0);
        assert!(times.count() > 0 && times.quantile(0.5) <= times.max());
        count_running(LAYOUT, &mut recorded(), of_each(read)).unwrap();
        assert_eq!((word(&[1; 8], 1), word(&[1; 8], u64::MAX)), (0, 0));
    }

    /// Returns the latencies of two functions of a running program, read from what `record` writes.
    fn latencies(
        observation: Observation,
        record: impl FnOnce(&mut RecordedData, &ObservationPlan),
    ) -> Vec<FunctionLatency> {
        latencies_of_patched(observation, &[], record)
    }

    /// The same, of which these functions could not be patched.
    fn latencies_of_patched(
        observation: Observation,
        not_patched: &[usize],
        record: impl FnOnce(&mut RecordedData, &ObservationPlan),
    ) -> Vec<FunctionLatency> {
        let target = Talker::start(&fixture("calls.pie"));
        let function = |name: &str| FunctionSelector::Glob(name.parse().unwrap());
        let observation = observation.time_functions(function("leaf"));
        let observation = observation.time_functions(function("outer"));
        let functions = ObservedFunctions::find(target.pid(), &observation).unwrap();
        let program = Arc::new(program_with_probes(&["a"]));
        let mut plan = ObservationPlan::of(&observation, program, Arc::new(functions)).unwrap();
        let mut data = RecordedData::of(&plan);
        record(&mut data, &plan);
        let refused = not_patched.iter().map(|it| (*it, Refusal::ChangedCode));
        Arc::make_mut(&mut plan.functions).add_refused(refused.collect());
        let arenas = [data.arena];
        let recorded = RecordedCalls::read(1, &data.memory, &plan, &arenas).unwrap();
        recorded.latencies(&plan, &TickMeasurement::begin())
    }

    /// Returns where data of functions are.
    fn calls_at(data: &RecordedData) -> LiveAddr {
        data.shared().plus(data.arena.shared.calls())
    }

    /// Records figures of the second function.
    fn record_figures(data: &mut RecordedData, plan: &ObservationPlan) {
        let layout = plan.shared.calls;
        let at = calls_at(data).plus(layout.function(1));
        for (field, number) in [
            (function_data::OCTAVES, 0b100),
            (function_data::MAX, 1 << 40),
            (function_data::UNWOUND, 20),
            (function_data::UNMATCHED, 17),
            (function_data::LOST, 3),
            (function_data::DOUBTFUL, 4),
            (function_data::UNTYPED, 5),
            (function_data::GROUPS, 1 << 2),
        ] {
            data.put(at.plus(field), number);
        }
        let histogram = calls_at(data).plus(layout.histogram(1, 2));
        data.put(histogram.plus(2 * layout.octave_len()), 6);
        // Two exits of the function could not be recorded.
        let of_second = |it: &PlannedPoint| it.role.timed.is_some_and(|it| it.function == 1);
        let point = plan.points.iter().position(of_second).unwrap();
        data.hit(point, 2);
        data.put(
            calls_at(data).plus(layout.taken()),
            1 << (9 >> call_slot::SLOTS_OF_BIT),
        );
        let stack = calls_at(data).plus(layout.slot(9));
        data.put(stack.plus(call_slot::DEPTH), 2);
        for (index, flags) in [(0, 0), (1, call_slot::IS_LEFT_OUT)] {
            let call = stack.plus(call_slot::CALLS + (index << layout.call_len_bits()));
            data.put(call.plus(call_slot::FRAME), 0x7fff_0000);
            data.put(call.plus(call_slot::FUNCTION), u64::from(flags) << 32 | 1);
        }
    }

    #[test]
    fn figures_of_functions_are_read() {
        let timing = Observation::new;
        let functions = latencies(timing(), record_figures);
        let [first, second] = &functions[..] else {
            panic!("{functions:?}");
        };
        assert_eq!(first.figures, Figures::default());
        assert_eq!((first.count(), first.max()), (0, Duration::ZERO));
        assert_eq!((second.count(), second.running()), (6, 1));
        assert_eq!((second.lost(), second.unwound()), (5, 18));
        assert_eq!(second.unmatched_exits(), 14);
        assert_eq!((second.doubtful(), second.untyped()), (4, 5));
        assert!(second.max() > Duration::ZERO);
        assert!(second.total().is_none() && second.callers().is_none());
        assert!(!second.is_on_fiber() && first.address() < second.address());
        let mut names = [first.name(), second.name()];
        names.sort_unstable();
        assert_eq!(names, ["leaf", "outer"]);
        assert!(first.object().ends_with("calls.pie"), "{first:?}");
    }

    #[test]
    fn functions_without_patch_have_no_figures() {
        let functions = latencies_of_patched(Observation::new(), &[0], record_figures);
        let counts = functions.iter().map(|it| it.count());
        assert_eq!(counts.collect::<Vec<_>>(), [6]);
    }

    #[test]
    fn figures_of_processes_add_up_by_name() {
        let functions = latencies(Observation::new().self_times(), record_figures);
        // Two of one name, in one process only.
        let mut second = [functions[1].clone(), functions[1].clone()];
        second[1].namesakes = 1;
        let all = FunctionLatency::of_processes([&functions[..], &second]);
        let names: Vec<&str> = all.iter().map(FunctionLatency::name).collect();
        let (one, other) = (functions[0].name(), functions[1].name());
        assert_eq!(names, [one, other, other]);
        assert_eq!(all[0].figures, Figures::default());
        assert_eq!((all[1].count(), all[2].count()), (12, 6));
        let doubled = Figures {
            running: 2,
            unwound: 36,
            unmatched: 28,
            lost: 10,
            doubtful: 8,
            untyped: 10,
        };
        assert_eq!(
            (all[1].figures, all[2].figures),
            (doubled, functions[1].figures)
        );
    }

    #[test]
    fn self_times_and_callers_are_read() {
        let asked = Observation::new().self_times().by_caller();
        let functions = latencies(asked, |data, plan| {
            let layout = plan.shared.calls;
            for group in [1, 3] {
                let sums = calls_at(data).plus(layout.sums(0, group));
                data.put(sums.plus(sums::OWN), 1 << 40);
                data.put(sums.plus(sums::ALL), 3 << 40);
            }
            for (at, calls) in [(layout.callers(), 7), (layout.other_callers(0), 2)] {
                let at = calls_at(data).plus(at);
                data.put(at.plus(caller::CALLS), calls);
                data.put(at.plus(caller::SUM), calls << 40);
                data.put(at.plus(caller::MAX), 1 << 41);
                data.put(at.plus(caller::ALL), calls << 42);
            }
            let key = 1 << caller::FUNCTION_AT | 0x5555_1234;
            data.put(calls_at(data).plus(layout.callers() + caller::KEY), key);
        });
        let [first, second] = &functions[..] else {
            panic!("{functions:?}");
        };
        let ratio = |one: Duration, other: Duration| one.as_secs_f64() / other.as_secs_f64();
        let is = |ratio: f64, expected: f64| (ratio - expected).abs() < 0.001;
        let total = first.total().unwrap();
        assert!(is(ratio(total, first.sum()), 3.0));
        assert_eq!(second.total(), Some(Duration::ZERO));
        let callers = first.callers().unwrap();
        let addresses: Vec<_> = callers.iter().map(CallerLatency::address).collect();
        assert_eq!(addresses, [Some(LiveAddr(0x5555_1234)), None]);
        let counts: Vec<u64> = callers.iter().map(CallerLatency::count).collect();
        assert_eq!(counts, [7, 2]);
        // All in units of 1 << 40 ticks.
        let unit = ratio(first.sum(), Duration::from_secs(2));
        let in_units = |time: Duration| time.as_secs_f64() / unit;
        assert!(is(in_units(callers[0].sum()), 7.0) && is(in_units(callers[0].mean()), 1.0));
        assert!(is(in_units(callers[1].max()), 2.0));
        assert!(is(in_units(callers[1].total().unwrap()), 8.0));
        assert_eq!(second.callers().map(<[_]>::len), Some(0));
        let both = FunctionLatency::of_processes([&functions[..], &functions]);
        assert!(is(ratio(both[0].total().unwrap(), total), 2.0));
        assert!(both.iter().all(|it| it.callers().is_none()));
    }
}
