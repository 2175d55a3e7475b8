//! [`HistogramCopies`]: histograms of values as they were in a process, not added up yet; and those of probes and
//! functions.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::buckets::Linear;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::values::{ValuesLayout, header, order};
use crate::observe::plan::ObservationPlan;
use crate::observe::read::counts::read_hits;
use crate::observe::read::data_source;
use crate::observe::read::ring::word;
use crate::observe::read::values::ValueHistogram;

/// Histograms of values as they were in a process: of each, what each group of threads has recorded.
#[derive(Clone, Default)]
pub(super) struct HistogramCopies {
    layout: ValuesLayout,
    linear: Option<Linear>,
    /// The copies with values, in the order in which their histograms were asked for.
    copies: Vec<HistogramCopy>,
    /// The bytes that were read at once, in which their buckets are.
    read: Vec<Vec<u8>>,
}

#[derive(Clone)]
struct HistogramCopy {
    /// The number of the histogram.
    number: u32,
    extremes: (i128, i128),
    /// The sum of the values in buckets of several values, cut off to 64 bits.
    sum: u64,
    /// The number of its first bucket.
    first: u64,
    /// Where its buckets are: the index of the bytes that were read at once, and the range in them.
    read: usize,
    bytes: Range<usize>,
}

/// How many copies are read at once: little time passes between the reading of a header and that of its buckets.
const READ_AT_ONCE: usize = 64;

/// Which histograms are read, and where they are.
pub(super) struct HistogramSource<'s, S> {
    pub(super) pid: i32,
    pub(super) source: &'s S,
    /// Where the first one begins.
    pub(super) at: LiveAddr,
    pub(super) layout: ValuesLayout,
    pub(super) linear: Option<Linear>,
}

impl<S: ReadMemory> HistogramSource<'_, S> {
    /// Reads the histograms with these numbers, each given with whether its values have a sign. For each group of
    /// threads, the buckets from that of its least value to that of its greatest are read.
    pub(super) fn read(&self, wanted: &[(u32, bool)]) -> Result<HistogramCopies> {
        let layout = self.layout;
        let groups = 0..1 << layout.group_bits();
        let wanted = wanted.iter().flat_map(|(number, is_signed)| {
            let groups = groups.clone();
            groups.map(|group| (*number, group, *is_signed))
        });
        let wanted: Vec<(u32, u64, bool)> = wanted.collect();
        let mut all = HistogramCopies {
            layout,
            linear: self.linear,
            ..HistogramCopies::default()
        };
        for wanted in wanted.chunks(READ_AT_ONCE) {
            self.read_copies(wanted, &mut all)?;
        }
        Ok(all)
    }

    /// Reads these copies: the number of a histogram, a group of threads, and whether its values have a sign.
    fn read_copies(&self, wanted: &[(u32, u64, bool)], all: &mut HistogramCopies) -> Result<()> {
        let layout = self.layout;
        let headers = wanted.iter().map(|it| layout.header(it.0, it.1));
        let (Some(first), Some(last)) = (headers.clone().min(), headers.max()) else {
            return Ok(());
        };
        let len = last + header::LEN - first;
        let headers = data_source::read(self.pid, self.source, self.at.plus(first), len)?;
        let mut copies = Vec::new();
        let mut places = Vec::new();
        let mut end = 0;
        for &(number, group, is_signed) in wanted {
            let field = |at| word(&headers, layout.header(number, group) - first + at);
            let (greatest, least) = (field(header::GREATEST), field(header::LEAST));
            if (greatest, least) == (0, 0) {
                continue;
            }
            let (least, most) = (value(!least, is_signed), value(greatest, is_signed));
            let bucket = |value| layout.bucket(value, self.linear);
            let (first, last) = (bucket(least), bucket(most));
            let len = 8 * (last + 1).saturating_sub(first);
            let offset = layout.first_bucket(number, group) + 8 * first;
            let start = end;
            end += len as usize;
            places.push((self.at.plus(offset), len));
            copies.push(HistogramCopy {
                number,
                extremes: (least, most),
                sum: field(header::SUM),
                first,
                read: all.read.len(),
                bytes: start..end,
            });
        }
        // The buckets are parsed only if they are asked for: most readings are replaced by another one before that.
        let read = data_source::read_pieces(self.pid, self.source, &places)?;
        all.read.push(read);
        all.copies.append(&mut copies);
        Ok(())
    }
}

/// Returns the value that [`order`] has mapped to this number.
fn value(ordered: u64, is_signed: bool) -> i128 {
    let value = order(ordered, is_signed);
    if is_signed {
        i128::from(value as i64)
    } else {
        i128::from(value)
    }
}

impl HistogramCopies {
    /// Returns each histogram that has values, without a name, with its number.
    pub(super) fn histograms(&self) -> impl Iterator<Item = (u32, ValueHistogram)> {
        let copies = self.copies.chunk_by(|one, next| one.number == next.number);
        copies.map(|copies| (copies[0].number, self.sum(copies)))
    }

    /// Returns the histogram with this number, without a name.
    pub(super) fn histogram(&self, number: u32) -> ValueHistogram {
        let copies = self.copies.iter().filter(|it| it.number == number);
        self.sum(&copies.cloned().collect::<Vec<_>>())
    }

    /// Adds up the copies of a histogram.
    fn sum(&self, copies: &[HistogramCopy]) -> ValueHistogram {
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        let mut extremes: Option<(i128, i128)> = None;
        let mut sum = 0_u64;
        for copy in copies {
            sum = sum.wrapping_add(copy.sum);
            let read = self.read.get(copy.read).map_or(&[][..], Vec::as_slice);
            let bytes = read.get(copy.bytes.clone()).unwrap_or_default();
            let buckets = bytes.chunks_exact(8).map(|count| word(count, 0));
            let buckets = (copy.first..).zip(buckets).filter(|(_, count)| *count > 0);
            let mut is_empty = true;
            for (bucket, count) in buckets {
                let sum = counts.entry(bucket).or_default();
                *sum = sum.saturating_add(count);
                is_empty = false;
            }
            if !is_empty {
                let (least, most) = copy.extremes;
                let (before, until) = extremes.unwrap_or(copy.extremes);
                extremes = Some((before.min(least), until.max(most)));
            }
        }
        let counts = counts.into_iter();
        let buckets = counts.map(|(bucket, count)| {
            let (least, most) = self.layout.values_of(bucket, self.linear);
            (least, most, count)
        });
        ValueHistogram::of_buckets(buckets, extremes, sum)
    }
}

/// Reads the histograms: those of probes, then those of functions.
///
/// # Errors
///
/// If they cannot be read, or the process has exited.
pub(crate) fn read_histograms(
    pid: i32,
    source: &impl ReadMemory,
    plan: &ObservationPlan,
    arenas: &[Arena],
) -> Result<Vec<ValueHistogram>> {
    let layout = plan.shared.values;
    let (Some(sharing), true) = (
        arenas.first(),
        layout.histograms > 0 && !plan.shared.keys.has_histograms,
    ) else {
        return Ok(Vec::new());
    };
    let mut untyped = vec![0_u64; layout.histograms as usize];
    let mut signs = vec![true; layout.histograms as usize];
    for (planned, _, of_point) in read_hits(pid, source, plan, arenas)? {
        if let Some(role) = &planned.role.histogram {
            let number = role.number as usize;
            untyped[number] = untyped[number].saturating_add(of_point);
            signs[number] = role.is_signed();
        }
    }
    let probes = plan.histograms.iter();
    let probes = probes.map(|it| Some((it.name.clone(), None)));
    let functions = plan.functions.with_histogram().map(|index| {
        let wanted = &plan.functions.functions[index].wanted;
        let function = (wanted.object.to_path_buf(), wanted.address);
        let is_patched = !plan.functions.not_patched.contains(&index);
        is_patched.then(|| (wanted.name.clone(), Some(function)))
    });
    let wanted: Vec<_> = (0..layout.histograms).zip(signs).collect();
    let histograms = HistogramSource {
        pid,
        source,
        at: sharing.shared_at().plus(sharing.shared.values()),
        layout,
        linear: plan.linear,
    };
    let mut recorded: HashMap<u32, ValueHistogram> =
        histograms.read(&wanted)?.histograms().collect();
    let named = (0..layout.histograms).zip(probes.chain(functions));
    let named = named.filter_map(|(number, named)| {
        let (name, function) = named?;
        let values = recorded.remove(&number).unwrap_or_default();
        Some(values.named(name, function, untyped[number as usize]))
    });
    Ok(named.collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use test_support::{Talker, fixture};

    use super::*;
    use crate::error::Refusal;
    use crate::memory::double::SliceMemory;
    use crate::observe::functions::ObservedFunctions;
    use crate::observe::observation::Observation;
    use crate::observe::plan::PlannedPoint;
    use crate::select::Selector;
    use crate::select::function::FunctionSelector;
    use crate::testing::{RecordedData, program_with_arguments};

    #[test]
    fn any_recorded_bytes_can_be_read() {
        for linear in [None, "0,100,10".parse().ok()] {
            let layout = ValuesLayout {
                histograms: 200,
                steps: linear.map_or(0, Linear::steps),
            };
            for byte in [0xff, 0x80, 1] {
                for is_signed in [false, true] {
                    let bytes = vec![byte; layout.len() as usize];
                    let source = HistogramSource {
                        pid: 1,
                        source: &SliceMemory::new([(0x1000, bytes)]),
                        at: LiveAddr(0x1000),
                        layout,
                        linear,
                    };
                    let copies = source.read(&[(7, is_signed)]).unwrap();
                    let all = copies.histogram(7);
                    all.quantile(0.5);
                    all.mean();
                }
            }
        }
    }

    #[test]
    fn histograms_of_probes_and_functions_are_read() {
        let target = Talker::start(&fixture("calls.pie"));
        let leaf = FunctionSelector::Glob("leaf".parse().unwrap());
        let asked = Observation::new()
            .count(Selector::All)
            .count_functions(leaf);
        let asked = asked.histogram_of("arg0".parse().unwrap());
        let functions = ObservedFunctions::find(target.pid(), &asked).unwrap();
        let program = Arc::new(program_with_arguments(&[("a", "8@%rdi"), ("b", "4@%edi")]));
        let mut plan = ObservationPlan::of(&asked, program, Arc::new(functions)).unwrap();
        let mut data = RecordedData::of(&plan);
        for (number, group, value, is_signed) in [
            (0, 0, -5, true),
            (0, 3, 1 << 40, true),
            (1, 1, 9, true),
            (2, 2, 40, true),
        ] {
            data.add_value((number, group), value, is_signed, None);
        }
        for point in 0..3 {
            data.hit(data.arena.untyped_counter(point), point as u64 + 1);
        }
        let arenas = [data.arena];
        let read = read_histograms(1, &data.memory, &plan, &arenas).unwrap();
        let figures: Vec<_> = read
            .iter()
            .map(|it| (it.name(), it.min(), it.max(), it.sum(), it.untyped()))
            .collect();
        let untyped = |name: &str| {
            let is_it = |it: &PlannedPoint| it.site().is_some();
            let first = plan.points.iter().position(is_it).unwrap() as u64;
            match name {
                "a" => first + 1,
                "b" => first + 2,
                _ => {
                    if first == 0 {
                        3
                    } else {
                        1
                    }
                }
            }
        };
        let expected = [
            (
                "a",
                Some(-5),
                Some(1 << 40),
                Some((1 << 40) - 5),
                untyped("a"),
            ),
            ("b", Some(9), Some(9), Some(9), untyped("b")),
            ("leaf", Some(40), Some(40), Some(40), untyped("leaf")),
        ];
        assert_eq!(figures, expected);
        let counts: Vec<_> = read.iter().map(ValueHistogram::count).collect();
        assert_eq!(counts, [2, 1, 1]);
        let place = |it: &ValueHistogram| it.function().map(|(_, address)| address);
        let leaf = plan.functions.functions[0].wanted.address;
        let places: Vec<_> = read.iter().map(place).collect();
        assert_eq!(places, [None, None, Some(leaf)]);
        Arc::make_mut(&mut plan.functions).add_refused(vec![(0, Refusal::ChangedCode)]);
        let patched = read_histograms(1, &data.memory, &plan, &arenas).unwrap();
        let names: Vec<_> = patched.iter().map(ValueHistogram::name).collect();
        assert_eq!(names, ["a", "b"]);
        let sum = ValueHistogram::of_processes([&read[..], &read]);
        assert!(sum.iter().all(|it| it.function().is_none()));
        assert_eq!(
            (sum.len(), sum[0].count(), sum[0].untyped()),
            (3, 4, 2 * untyped("a"))
        );
        // Histograms of keys are read in another way, and without expressions there are none.
        for other in [Observation::new().count(Selector::All), asked_by_key()] {
            let program = Arc::new(program_with_arguments(&[("a", "8@%rdi")]));
            let plan = ObservationPlan::of(&other, program, Arc::default()).unwrap();
            let arenas = [RecordedData::of(&plan).arena];
            let unreadable = SliceMemory::new(Vec::new());
            let read = read_histograms(1, &unreadable, &plan, &arenas).unwrap();
            assert!(read.is_empty());
        }
    }

    fn asked_by_key() -> Observation {
        let asked = Observation::new().count(Selector::All);
        let asked = asked.histogram_of("arg0".parse().unwrap());
        asked.by("tid".parse().unwrap())
    }
}
