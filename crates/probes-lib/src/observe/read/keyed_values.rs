//! [`KeyedHistograms`]: what an expression was at the hits of each key, from what the trampolines have recorded of it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::keys::{histograms, slot};
use crate::observe::plan::ObservationPlan;
use crate::observe::read::counts::read_keyed_hits;
use crate::observe::read::histograms::{HistogramCopies, HistogramSource};
use crate::observe::read::keys::{Key, KeyTable};
use crate::observe::read::ring::word;
use crate::observe::read::values::ValueHistogram;

/// What an expression was at the hits of each key ([`Observation::histogram_of`](crate::Observation::histogram_of) and
/// [`Observation::by`](crate::Observation::by)). All values are in one of the histograms.
///
/// Unless there is a [`Linear`](crate::Linear) range, buckets have one value each up to 64, of either sign, and are at
/// most 3 % of their least value wide.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::name("req_end"));
/// let observation = observation.histogram_of("arg1".parse()?).by("arg0".parse()?);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let histograms = observer.keyed_histograms()?.unwrap_or_default();
/// for keyed in histograms.keys() {
///     println!("{:?}: {} values, mean {:?}", keyed.key, keyed.values.count(), keyed.values.mean());
/// }
/// println!("{} of other keys, {} without", histograms.other().count(), histograms.untyped());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct KeyedHistograms {
    recorded: Option<RecordedHistograms>,
    /// The keys of `recorded`, once they are asked for.
    keys: OnceLock<Vec<KeyedHistogram>>,
    other: ValueHistogram,
    untyped: u64,
}

/// What an expression was at the hits of a key.
///
/// [`KeyedHistograms`] has an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyedHistogram {
    /// What each expression of the key was.
    pub key: Vec<Key>,
    /// The values; they have no name.
    pub values: ValueHistogram,
}

impl KeyedHistograms {
    /// Returns the histograms of several processes together; each is given with its pid. If they are `distinguished`,
    /// the pid is the first part of each key; if not, values of the same key in several processes are in one histogram.
    ///
    /// ```no_run
    /// # let each: Vec<(i32, probes_lib::KeyedHistograms)> = unimplemented!();
    /// let each = each.iter().map(|(pid, histograms)| (*pid, histograms));
    /// let all = probes_lib::KeyedHistograms::of_processes(each, false);
    /// ```
    pub fn of_processes<'h>(
        each: impl IntoIterator<Item = (i32, &'h KeyedHistograms)>,
        distinguished: bool,
    ) -> KeyedHistograms {
        let mut all: HashMap<Vec<Key>, ValueHistogram> = HashMap::new();
        let mut sum = KeyedHistograms::default();
        for (pid, of_process) in each {
            sum.untyped = sum.untyped.saturating_add(of_process.untyped);
            sum.other.add(&of_process.other);
            for keyed in of_process.keys() {
                let process = distinguished.then_some(Key::Process(pid));
                let key = process.into_iter().chain(keyed.key.iter().cloned());
                add(&mut all, key.collect(), &keyed.values);
            }
        }
        sum.keys = OnceLock::from(most_first(all));
        sum
    }

    /// Returns the keys, those with most values first.
    pub fn keys(&self) -> &[KeyedHistogram] {
        self.keys.get_or_init(|| {
            let recorded = self.recorded.as_ref();
            recorded
                .map(|it| most_first(it.of_keys()))
                .unwrap_or_default()
        })
    }

    /// Returns the values of keys for which there was no room: more than about 1,024 are not distinguished.
    pub fn other(&self) -> &ValueHistogram {
        &self.other
    }

    /// Returns how many hits have no value or no key, because an argument does not have the type that the expression
    /// needs, or memory could not be read. Those for which a filter has no answer are among them.
    pub fn untyped(&self) -> u64 {
        self.untyped
    }

    /// Reads them; `None` if there are none by key.
    pub(crate) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<Option<KeyedHistograms>> {
        if plan.times_by_key {
            return Ok(None);
        }
        let Some(recorded) = RecordedHistograms::read(pid, source, plan, arenas)? else {
            return Ok(None);
        };
        let (_, untyped) = read_keyed_hits(pid, source, plan, arenas)?;
        let mut other = recorded.histograms.histogram(histograms::OTHER);
        other.add(&recorded.histograms.histogram(histograms::OTHER_SIGNED));
        Ok(Some(KeyedHistograms {
            recorded: Some(recorded),
            other,
            untyped,
            ..KeyedHistograms::default()
        }))
    }
}

impl fmt::Debug for KeyedHistograms {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("KeyedHistograms");
        fields.field("keys", &self.keys());
        fields.field("other", &self.other);
        fields.field("untyped", &self.untyped);
        fields.finish()
    }
}

/// The histograms of keys as they were in a process.
#[derive(Clone)]
pub(super) struct RecordedHistograms {
    table: KeyTable,
    /// The histograms of slots, and those that belong to no slot.
    pub(super) histograms: HistogramCopies,
}

impl RecordedHistograms {
    /// Reads them; `None` if keys have none.
    pub(super) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<Option<RecordedHistograms>> {
        let (Some(sharing), true) = (arenas.first(), plan.shared.keys.has_histograms) else {
            return Ok(None);
        };
        let table = KeyTable::read(pid, source, plan, sharing)?;
        let held = table
            .held()
            .filter(|(number, _)| *number < histograms::OF_SLOTS);
        let held = held.map(|(number, slot)| {
            let is_signed = word(slot, slot::STATE) >> slot::SIGN_OF_VALUES_AT & 1 == 1;
            (number, is_signed)
        });
        let all = HistogramSource {
            pid,
            source,
            at: sharing.shared_at().plus(sharing.shared.values()),
            layout: plan.shared.values,
            linear: plan.linear,
        };
        // Times have no sign.
        let is_signed = !plan.times_by_key;
        let others = [
            (histograms::OTHER, false),
            (histograms::OTHER_SIGNED, is_signed),
        ];
        let wanted: Vec<_> = held.chain(others).collect();
        Ok(Some(RecordedHistograms {
            histograms: all.read(&wanted)?,
            table,
        }))
    }

    /// Returns the histogram of each key.
    pub(super) fn of_keys(&self) -> HashMap<Vec<Key>, ValueHistogram> {
        let mut all: HashMap<Vec<Key>, ValueHistogram> = HashMap::new();
        for (number, values) in self.histograms.histograms() {
            // Histograms that belong to no slot have no key.
            if let Some(key) = self.table.key(number) {
                add(&mut all, key, &values);
            }
        }
        all
    }
}

/// Returns those that have values, those with most values first.
fn most_first(all: HashMap<Vec<Key>, ValueHistogram>) -> Vec<KeyedHistogram> {
    let keys = all.into_iter().filter(|(_, values)| values.count() > 0);
    let keys = keys.map(|(key, values)| KeyedHistogram { key, values });
    let mut keys: Vec<KeyedHistogram> = keys.collect();
    keys.sort_by(|one, other| {
        let place = |it: &KeyedHistogram| Reverse(it.values.count());
        let by_count = place(one).cmp(&place(other));
        by_count.then_with(|| one.key.cmp(&other.key))
    });
    keys
}

/// Adds values to those of a key.
fn add(all: &mut HashMap<Vec<Key>, ValueHistogram>, key: Vec<Key>, values: &ValueHistogram) {
    all.entry(key).or_default().add(values);
}
