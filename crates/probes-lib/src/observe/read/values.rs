//! [`ValueHistogram`]: what an expression was at the hits of a probe or function, from what the trampolines have recorded of it.

mod recorder;

pub use recorder::ValueRecorder;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::buckets::Linear;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::values::{ValuesLayout, copy, order};
use crate::observe::plan::ObservationPlan;
use crate::observe::read::counts::read_hits;
use crate::observe::read::data_source;
use crate::observe::read::ring::word;

/// What an expression was at the hits of a probe or function ([`Observation::histogram_of`](crate::Observation::histogram_of)).
///
/// Each value is in one bucket, and the counts of buckets are exact. Unless there is a [`Linear`] range, buckets have
/// one value each up to 1,024, of either sign, and are at most 0.2 % of their least value wide; if there are more than
/// 128 histograms, 256 and 0.8 %; if there are more than 512, 64 and 3 %. The greatest and the least value are exact.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::name("req_end")).histogram_of("arg1".parse()?);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for histogram in observer.histograms()? {
///     println!("{}: {} values, mean {:?}", histogram.name(), histogram.count(), histogram.mean());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ValueHistogram {
    name: String,
    function: Option<(PathBuf, LiveAddr)>,
    untyped: u64,
    /// Those that have any, the least first.
    buckets: Vec<ValueBucket>,
    /// The least and the greatest value.
    extremes: Option<(i128, i128)>,
    sum: Option<i128>,
}

/// A histogram without values.
impl Default for ValueHistogram {
    fn default() -> ValueHistogram {
        ValueHistogram {
            name: String::new(),
            function: None,
            untyped: 0,
            buckets: Vec::new(),
            extremes: None,
            sum: Some(0),
        }
    }
}

/// How many values are in a bucket of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValueBucket {
    /// The least value that belongs to it; `None` of all that is below a range.
    pub least: Option<i128>,
    /// The greatest value that belongs to it; `None` of all that is above a range.
    pub most: Option<i128>,
    /// How many there were.
    pub count: u64,
}

/// A quantile of values, as far as the buckets tell it: a range that it is certainly in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quantile {
    /// The least value that it can be.
    pub least: i128,
    /// The greatest value that it can be.
    pub most: i128,
}

impl Quantile {
    /// Returns the middle of what it can be, rounded down.
    pub fn value(self) -> i128 {
        self.least + (self.most - self.least) / 2
    }

    /// Returns by how much it differs from [`Quantile::value`] at most; 0 if it is exact.
    pub fn error(self) -> u128 {
        (self.most - self.value()).unsigned_abs()
    }
}

impl ValueHistogram {
    /// Returns the histograms of several processes together: those of one name are added up, and have no
    /// [`function`](Self::function), whose address differs between processes. Where processes have buckets of different
    /// widths, the wider ones are kept.
    ///
    /// ```no_run
    /// # let (one, other): (probes_lib::Observer, probes_lib::Observer) = unimplemented!();
    /// let (one, other) = (one.histograms()?, other.histograms()?);
    /// let both = probes_lib::ValueHistogram::of_processes([&one[..], &other[..]]);
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn of_processes<'h>(
        each: impl IntoIterator<Item = &'h [ValueHistogram]>,
    ) -> Vec<ValueHistogram> {
        let mut all: Vec<ValueHistogram> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for histogram in each.into_iter().flatten() {
            let place = *places.entry(&histogram.name).or_insert(all.len());
            match all.get_mut(place) {
                Some(sum) => sum.add(histogram),
                None => all.push(ValueHistogram {
                    function: None,
                    ..histogram.clone()
                }),
            }
        }
        all
    }

    /// Adds the values of another one.
    pub(super) fn add(&mut self, other: &ValueHistogram) {
        self.untyped = self.untyped.saturating_add(other.untyped);
        self.sum = self.sum.and_then(|sum| sum.checked_add(other.sum?));
        self.extremes = match (self.extremes, other.extremes) {
            (Some((least, most)), Some((low, high))) => Some((least.min(low), most.max(high))),
            (one, other) => one.or(other),
        };
        self.buckets.extend(&other.buckets);
        // What is below a range comes first, as `None` does.
        self.buckets.sort_by_key(|it| it.least);
        let mut joined: Vec<ValueBucket> = Vec::new();
        for bucket in self.buckets.drain(..) {
            match joined.last_mut() {
                Some(last)
                    if last
                        .most
                        .is_none_or(|most| bucket.least.is_none_or(|it| it <= most)) =>
                {
                    // What is above a range has no end.
                    last.most = last
                        .most
                        .zip(bucket.most)
                        .map(|(one, other)| one.max(other));
                    last.count = last.count.saturating_add(bucket.count);
                }
                _ => joined.push(bucket),
            }
        }
        self.buckets = joined;
    }

    /// Returns the name of the probe or function.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns, of a function, the path of the file that it is in, and its address in the process.
    pub fn function(&self) -> Option<(&std::path::Path, LiveAddr)> {
        let function = self.function.as_ref();
        function.map(|(object, address)| (object.as_path(), *address))
    }

    /// Returns how many values there are.
    pub fn count(&self) -> u64 {
        let counts = self.buckets.iter().map(|it| it.count);
        counts.fold(0, u64::saturating_add)
    }

    /// Returns how many hits have no value, because an argument does not have the type that the expression needs, or
    /// memory could not be read; and those for which the filter has no answer
    /// ([`Observation::only_where`](crate::Observation::only_where)).
    pub fn untyped(&self) -> u64 {
        self.untyped
    }

    /// Returns the buckets that have values, the least first.
    pub fn buckets(&self) -> &[ValueBucket] {
        &self.buckets
    }

    /// Returns the least value.
    pub fn min(&self) -> Option<i128> {
        self.extremes.map(|(least, _)| least)
    }

    /// Returns the greatest value.
    pub fn max(&self) -> Option<i128> {
        self.extremes.map(|(_, most)| most)
    }

    /// Returns the exact sum of all values; `None` if it is so large that it is not known.
    pub fn sum(&self) -> Option<i128> {
        self.sum
    }

    /// Returns the mean: that of the exact sum, or if that is not known, of the middles of the buckets. `None` without values.
    pub fn mean(&self) -> Option<f64> {
        let extremes = self.extremes?;
        let sum = self.sum.map(|sum| sum as f64).unwrap_or_else(|| {
            let middles = self.buckets.iter().map(|it| {
                let quantile = within(it, extremes);
                quantile.value() as f64 * it.count as f64
            });
            middles.sum()
        });
        Some(sum / self.count() as f64)
    }

    /// Returns what a `share` (0 to 1) of all values does not exceed. `None` without values.
    pub fn quantile(&self, share: f64) -> Option<Quantile> {
        let extremes = self.extremes?;
        let rank = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut before = 0_u64;
        let bucket = self.buckets.iter().find(|it| {
            before = before.saturating_add(it.count);
            before >= rank
        });
        let bucket = bucket.or_else(|| self.buckets.last())?;
        Some(within(bucket, extremes))
    }
}

/// Returns which values those in a bucket may have, if all values are between these extremes.
fn within(bucket: &ValueBucket, (least, most): (i128, i128)) -> Quantile {
    let low = bucket.least.unwrap_or(least).max(least);
    Quantile {
        least: low,
        most: bucket.most.unwrap_or(most).min(most).max(low),
    }
}

/// What was recorded in a histogram.
#[derive(Debug, Default)]
pub(super) struct RecordedValues {
    /// By bucket.
    counts: BTreeMap<u64, u64>,
    extremes: Option<(i128, i128)>,
    /// Of the values in buckets of several values, cut off to 64 bits.
    sum: u64,
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
    let from = sharing.shared_at().plus(sharing.shared.values());
    let read = |offset, len| data_source::read(pid, source, from.plus(offset), len);
    let mut untyped = vec![0_u64; layout.histograms as usize];
    let mut signs = vec![true; layout.histograms as usize];
    let mut points = plan.points.iter();
    for arena in arenas {
        let hits = read_hits(pid, source, arena)?;
        for ((_, of_point), planned) in hits.into_iter().zip(points.by_ref()) {
            if let Some(role) = &planned.role.histogram {
                let number = role.number as usize;
                untyped[number] = untyped[number].saturating_add(of_point);
                signs[number] = role.is_signed();
            }
        }
    }
    let probes = plan.histograms.iter().map(|it| (it.name.clone(), None));
    let functions = plan.functions.with_histogram().map(|index| {
        let wanted = &plan.functions.functions[index].wanted;
        let function = (wanted.object.to_path_buf(), wanted.address);
        (wanted.name.clone(), Some(function))
    });
    let named = (0..layout.histograms).zip(probes.chain(functions));
    named
        .map(|(number, (name, function))| {
            let is_signed = signs[number as usize];
            let recorded = RecordedValues::read(layout, number, is_signed, plan.linear, read)?;
            Ok(ValueHistogram {
                name,
                function,
                untyped: untyped[number as usize],
                ..recorded.histogram(layout, plan.linear)
            })
        })
        .collect()
}

impl RecordedValues {
    /// Reads the copies of a histogram, each from the bucket of its least value to that of its greatest.
    pub(super) fn read(
        layout: ValuesLayout,
        number: u32,
        is_signed: bool,
        linear: Option<Linear>,
        read: impl Fn(u64, u64) -> Result<Vec<u8>>,
    ) -> Result<RecordedValues> {
        let value = |ordered: u64| {
            let value = order(ordered, is_signed);
            if is_signed {
                i128::from(value as i64)
            } else {
                i128::from(value)
            }
        };
        let mut all = RecordedValues::default();
        for group in 0..1 << layout.group_bits() {
            let at = layout.copy(number, group);
            let header = read(at, copy::HEADER_LEN)?;
            let (greatest, least) = (word(&header, copy::GREATEST), word(&header, copy::LEAST));
            if (greatest, least) == (0, 0) {
                continue;
            }
            let (least, most) = (value(!least), value(greatest));
            all.sum = all.sum.wrapping_add(word(&header, copy::SUM));
            let (first, last) = (layout.bucket(least, linear), layout.bucket(most, linear));
            let many = (last + 1).saturating_sub(first);
            let bytes = read(at + copy::HEADER_LEN + 8 * first, 8 * many)?;
            let mut is_empty = true;
            for (bucket, count) in (first..).zip(bytes.chunks_exact(8)) {
                let count = word(count, 0);
                if count > 0 {
                    is_empty = false;
                    let sum = all.counts.entry(bucket).or_default();
                    *sum = sum.saturating_add(count);
                }
            }
            if !is_empty {
                let (before, until) = all.extremes.unwrap_or((least, most));
                all.extremes = Some((before.min(least), until.max(most)));
            }
        }
        Ok(all)
    }

    /// Returns the histogram, without a name.
    pub(super) fn histogram(self, layout: ValuesLayout, linear: Option<Linear>) -> ValueHistogram {
        let buckets: Vec<ValueBucket> = self
            .counts
            .into_iter()
            .map(|(bucket, count)| {
                let (least, most) = layout.values_of(bucket, linear);
                ValueBucket { least, most, count }
            })
            .collect();
        let sum = sum(&buckets, self.extremes.unwrap_or_default(), self.sum);
        ValueHistogram {
            buckets,
            extremes: self.extremes,
            sum,
            ..ValueHistogram::default()
        }
    }
}

/// Returns the sum of all values. `cut` is the sum of those in buckets of several values, cut off to 64 bits: what was
/// cut off follows from the bounds of these buckets, unless they are too far apart.
fn sum(buckets: &[ValueBucket], extremes: (i128, i128), cut: u64) -> Option<i128> {
    let (mut known, mut least, mut most) = (0_i128, 0_i128, 0_i128);
    for bucket in buckets {
        let count = i128::from(bucket.count);
        match (bucket.least, bucket.most) {
            (Some(only), Some(same)) if only == same => {
                known = known.checked_add(only.checked_mul(count)?)?;
            }
            _ => {
                let range = within(bucket, extremes);
                least = least.checked_add(range.least.checked_mul(count)?)?;
                most = most.checked_add(range.most.checked_mul(count)?)?;
            }
        }
    }
    if most.checked_sub(least)? >= 1 << 62 {
        return None;
    }
    let beyond = cut.wrapping_sub(least as u64) as i64;
    known.checked_add(least)?.checked_add(i128::from(beyond))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use test_support::{Talker, fixture};

    use super::*;
    use crate::memory::double::SliceMemory;
    use crate::observe::functions::ObservedFunctions;
    use crate::observe::observation::Observation;
    use crate::observe::plan::PlannedPoint;
    use crate::select::Selector;
    use crate::select::function::FunctionSelector;
    use crate::testing::{RecordedData, program_with_arguments};

    /// Returns the histogram of values, recorded in two copies as the trampolines do it.
    fn histogram(values: &[i128], is_signed: bool, linear: Option<Linear>) -> ValueHistogram {
        let layout = ValuesLayout {
            histograms: 1,
            steps: linear.map_or(0, Linear::steps),
        };
        let mut bytes = vec![0; layout.len() as usize];
        for (group, value) in [3, 12].into_iter().cycle().zip(values) {
            let at = layout.copy(0, group) as usize;
            let mut change = |of: u64, with: &dyn Fn(u64) -> u64| {
                let field = &mut bytes[at + of as usize..][..8];
                let before = u64::from_le_bytes((&*field).try_into().unwrap());
                field.copy_from_slice(&with(before).to_le_bytes());
            };
            let word = *value as u64;
            let ordered = order(word, is_signed);
            change(copy::GREATEST, &|most| most.max(ordered));
            change(copy::LEAST, &|most| most.max(!ordered));
            let bucket = layout.bucket(*value, linear);
            let (least, most) = layout.values_of(bucket, linear);
            if least.is_none() || least != most {
                change(copy::SUM, &|sum| sum.wrapping_add(word));
            }
            change(copy::HEADER_LEN + 8 * bucket, &|count| count + 1);
        }
        let read =
            |offset: u64, len: u64| Ok(bytes[offset as usize..(offset + len) as usize].to_vec());
        let recorded = RecordedValues::read(layout, 0, is_signed, linear, read).unwrap();
        recorded.histogram(layout, linear)
    }

    #[test]
    fn figures_are_those_of_the_values() {
        let values = [-5000, -1, 0, 0, 7, 1023, 1024, 1_000_000_007, -3];
        let all = histogram(&values, true, None);
        assert_eq!((all.count(), all.sum()), (9, Some(values.iter().sum())));
        assert_eq!((all.min(), all.max()), (Some(-5000), Some(1_000_000_007)));
        let exact = |share| {
            let quantile = all.quantile(share).unwrap();
            (quantile.error() == 0).then(|| quantile.value())
        };
        assert_eq!(all.quantile(0.0).map(|it| it.least), Some(-5000));
        assert_eq!(
            [exact(0.2), exact(0.5), exact(0.6)],
            [Some(-3), Some(0), Some(7)]
        );
        let last = all.quantile(1.0).unwrap();
        assert!(last.least <= 1_000_000_007 && last.most == 1_000_000_007);
        assert!(last.error() <= 1_000_000);
        let zeros = all.buckets().iter().find(|it| it.least == Some(0));
        assert_eq!(zeros.map(|it| (it.most, it.count)), Some((Some(0), 2)));
    }

    #[test]
    fn ranges_have_counts_below_and_above() {
        let range = "0,100,10".parse().ok();
        let all = histogram(&[-5, 0, 9, 10, 99, 100, 1 << 40], true, range);
        let buckets = all.buckets().iter();
        let buckets: Vec<_> = buckets.map(|it| (it.least, it.most, it.count)).collect();
        let expected = [
            (None, Some(-1), 1),
            (Some(0), Some(9), 2),
            (Some(10), Some(19), 1),
            (Some(90), Some(99), 1),
            (Some(100), None, 2),
        ];
        assert_eq!(buckets, expected);
        assert_eq!(all.sum(), Some(-5 + 9 + 10 + 99 + 100 + (1 << 40)));
    }

    #[test]
    fn sums_beyond_a_word_are_exact_or_unknown() {
        // More than 64 bits hold, in sum.
        let most = i128::from(i64::MAX);
        let all = histogram(&[most; 9], true, None);
        assert_eq!(all.sum(), Some(9 * most));
        let all = histogram(&[i128::from(i64::MIN); 7], true, None);
        assert_eq!(all.sum(), Some(7 * i128::from(i64::MIN)));
        let all = histogram(&[(1 << 64) - 1, 1 << 63], false, None);
        assert_eq!(all.sum(), Some((1 << 64) - 1 + (1 << 63)));
        assert_eq!(all.max(), Some((1 << 64) - 1));
        let range = "0,10,1".parse().ok();
        let all = histogram(&[most, most - 5, 12], true, range);
        assert_eq!((all.sum(), all.count()), (None, 3));
        // That of the middles of the buckets.
        let mean = all.mean().unwrap();
        assert!((mean / most as f64 - 0.5).abs() < 0.01, "{mean}");
    }

    #[test]
    fn histograms_of_processes_add_up() {
        let range: Option<Linear> = "0,100,10".parse().ok();
        for linear in [None, range] {
            let (one, other) = ([-5000, 7, 12, 1 << 20], [7, 13, 99, (1 << 20) + 5, 1 << 33]);
            let each = [&one[..], &other].map(|it| [histogram(it, true, linear)]);
            let sum = ValueHistogram::of_processes(each.iter().map(|it| &it[..]));
            let both: Vec<i128> = one.into_iter().chain(other).collect();
            let expected = histogram(&both, true, linear);
            assert_eq!(sum.len(), 1);
            assert_eq!(sum[0].buckets(), expected.buckets());
            assert_eq!((sum[0].sum(), sum[0].count()), (expected.sum(), 9));
            assert_eq!(sum[0].extremes, expected.extremes);
        }
    }

    #[test]
    fn wider_buckets_of_a_process_are_kept() {
        let with = |buckets: &[(i128, i128, u64)]| ValueHistogram {
            buckets: buckets
                .iter()
                .map(|(least, most, count)| ValueBucket {
                    least: Some(*least),
                    most: Some(*most),
                    count: *count,
                })
                .collect(),
            ..histogram(&[], true, None)
        };
        let narrow = [with(&[(0, 0, 1), (2, 3, 2), (6, 7, 3), (8, 9, 4)])];
        let wide = [with(&[(0, 0, 10), (4, 7, 20), (8, 11, 30)])];
        let both = with(&[(0, 0, 11), (2, 3, 2), (4, 7, 23), (8, 11, 34)]);
        for each in [[&narrow[..], &wide], [&wide, &narrow]] {
            let sum = ValueHistogram::of_processes(each);
            assert_eq!(sum[0].buckets(), both.buckets());
        }
    }

    #[test]
    fn nothing_recorded_has_no_figures() {
        let all = histogram(&[], true, None);
        assert_eq!((all.count(), all.sum()), (0, Some(0)));
        assert_eq!(
            (all.min(), all.max(), all.quantile(0.5)),
            (None, None, None)
        );
        assert_eq!(all.mean(), None);
    }

    #[test]
    fn any_recorded_bytes_can_be_read() {
        for linear in [None, "0,100,10".parse().ok()] {
            let layout = ValuesLayout {
                histograms: 200,
                steps: linear.map_or(0, Linear::steps),
            };
            for byte in [0xff, 0x80, 1] {
                let read = |_: u64, len: u64| Ok(vec![byte; len as usize]);
                for is_signed in [false, true] {
                    let recorded =
                        RecordedValues::read(layout, 7, is_signed, linear, read).unwrap();
                    let all = recorded.histogram(layout, linear);
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
        let plan = ObservationPlan::of(&asked, program, Arc::new(functions)).unwrap();
        let mut data = RecordedData::of(&plan);
        for (number, group, value, is_signed) in [
            (0, 0, -5, true),
            (0, 3, 6, true),
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
            .map(|it| (it.name(), it.min(), it.max(), it.count(), it.untyped()))
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
            ("a", Some(-5), Some(6), 2, untyped("a")),
            ("b", Some(9), Some(9), 1, untyped("b")),
            ("leaf", Some(40), Some(40), 1, untyped("leaf")),
        ];
        assert_eq!(figures, expected);
        let place = |it: &ValueHistogram| it.function().map(|(_, address)| address);
        let leaf = plan.functions.functions[0].wanted.address;
        let places: Vec<_> = read.iter().map(place).collect();
        assert_eq!(places, [None, None, Some(leaf)]);
        let sum = ValueHistogram::of_processes([&read[..], &read]);
        assert!(sum.iter().all(|it| it.function().is_none()));
        assert_eq!(
            (sum.len(), sum[0].count(), sum[0].untyped()),
            (3, 4, 2 * untyped("a"))
        );
        // Those of keys are read in another way, and without expressions there are none.
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

    #[test]
    fn middles_of_quantiles_are_within_them() {
        let quantile = Quantile {
            least: 10,
            most: 15,
        };
        assert_eq!((quantile.value(), quantile.error()), (12, 3));
        let exact = Quantile {
            least: -7,
            most: -7,
        };
        assert_eq!((exact.value(), exact.error()), (-7, 0));
    }
}
