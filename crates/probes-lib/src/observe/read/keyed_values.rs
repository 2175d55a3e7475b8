//! [`KeyedHistograms`]: what an expression was at the hits of each key, from what the trampolines have recorded of it.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::keys::{histograms, slot};
use crate::observe::plan::ObservationPlan;
use crate::observe::read::counts::read_keyed_hits;
use crate::observe::read::data_source;
use crate::observe::read::keys::{Key, key};
use crate::observe::read::ring::word;
use crate::observe::read::values::{RecordedValues, ValueHistogram};

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
#[derive(Clone, Debug, Default)]
pub struct KeyedHistograms {
    keys: Vec<KeyedHistogram>,
    other: ValueHistogram,
    untyped: u64,
}

/// What an expression was at the hits of a key.
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
            for keyed in &of_process.keys {
                let process = distinguished.then_some(Key::Process(pid));
                let key = process.into_iter().chain(keyed.key.iter().cloned());
                add(&mut all, key.collect(), &keyed.values);
            }
        }
        sum.of(all)
    }

    /// Returns the same with these keys, those with most values first.
    fn of(self, all: HashMap<Vec<Key>, ValueHistogram>) -> KeyedHistograms {
        let keys = all.into_iter().filter(|(_, values)| values.count() > 0);
        let keys = keys.map(|(key, values)| KeyedHistogram { key, values });
        let mut keys: Vec<KeyedHistogram> = keys.collect();
        keys.sort_by(|one, other| {
            let place = |it: &KeyedHistogram| Reverse(it.values.count());
            let by_count = place(one).cmp(&place(other));
            by_count.then_with(|| one.key.cmp(&other.key))
        });
        KeyedHistograms { keys, ..self }
    }

    /// Returns the keys, those with most values first.
    pub fn keys(&self) -> &[KeyedHistogram] {
        &self.keys
    }

    /// Returns the values of keys for which there was no room: more than about 1,024 are not distinguished.
    pub fn other(&self) -> &ValueHistogram {
        &self.other
    }

    /// Returns how many hits have no value or no key, because an argument does not have the type that the expression
    /// needs, or memory could not be read; or of how many it is not known whether they are meant.
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
        let Some(read) = ReadHistograms::of(pid, source, plan, arenas) else {
            return Ok(None);
        };
        let mut sum = KeyedHistograms::default();
        (_, sum.untyped) = read_keyed_hits(pid, source, plan, arenas)?;
        sum.other = read.histogram(histograms::OTHER, false)?;
        let signed = read.histogram(histograms::OTHER_SIGNED, true)?;
        sum.other.add(&signed);
        Ok(Some(sum.of(read.of_keys()?)))
    }
}

/// Reads the histograms of keys.
pub(super) struct ReadHistograms<'s, S> {
    pid: i32,
    source: &'s S,
    plan: &'s ObservationPlan,
    sharing: &'s Arena,
}

impl<'s, S: ReadMemory> ReadHistograms<'s, S> {
    /// `None` if there are none.
    pub(super) fn of(
        pid: i32,
        source: &'s S,
        plan: &'s ObservationPlan,
        arenas: &'s [Arena],
    ) -> Option<ReadHistograms<'s, S>> {
        let sharing = arenas.first()?;
        let reads = ReadHistograms {
            pid,
            source,
            plan,
            sharing,
        };
        plan.shared.keys.has_histograms.then_some(reads)
    }

    /// Reads the histogram with this number.
    pub(super) fn histogram(&self, number: u32, is_signed: bool) -> Result<ValueHistogram> {
        let (layout, linear) = (self.plan.shared.values, self.plan.linear);
        let values = self.sharing.shared_at();
        let values = values.plus(self.sharing.shared.values());
        let read = |offset, len| data_source::read(self.pid, self.source, values.plus(offset), len);
        let recorded = RecordedValues::read(layout, number, is_signed, linear, read)?;
        Ok(recorded.histogram(layout, linear))
    }

    /// Reads the histogram of each key.
    pub(super) fn of_keys(&self) -> Result<HashMap<Vec<Key>, ValueHistogram>> {
        let keys = self.plan.shared.keys;
        let table = self.sharing.shared_at().plus(self.sharing.shared.keys());
        let slots = data_source::read(self.pid, self.source, table, keys.copy_len())?;
        let slots = slots.chunks_exact(keys.slot_len() as usize);
        let format = self.plan.key_format();
        let mut all: HashMap<Vec<Key>, ValueHistogram> = HashMap::new();
        for (number, slot) in (0..histograms::OF_SLOTS).zip(slots) {
            if let Some(key) = key(slot, &format) {
                let is_signed = word(slot, slot::STATE) >> slot::SIGN_OF_VALUES_AT & 1 == 1;
                add(&mut all, key, &self.histogram(number, is_signed)?);
            }
        }
        Ok(all)
    }
}

/// Adds values to those of a key.
fn add(all: &mut HashMap<Vec<Key>, ValueHistogram>, key: Vec<Key>, values: &ValueHistogram) {
    all.entry(key).or_default().add(values);
}
