//! [`OpenPhases`]: the phases of the collector's work that a domain is in. Pure.

/// More nested phases than any runtime has: if there are more, ends of some were not written.
pub(super) const MAX_OPEN: usize = 64;

/// A phase that has begun and has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenPhase {
    pub(super) name: &'static str,
    /// In nanoseconds of CLOCK_MONOTONIC.
    pub(super) began: u64,
}

/// The phases of one domain that have begun and have not ended, each with what is known of it.
#[derive(Clone, Debug)]
pub(super) struct OpenPhases<T>(Vec<(OpenPhase, T)>);

impl<T> Default for OpenPhases<T> {
    fn default() -> OpenPhases<T> {
        OpenPhases(Vec::new())
    }
}

impl<T> OpenPhases<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns them, the outermost first.
    pub(super) fn each(&self) -> impl Iterator<Item = &(OpenPhase, T)> {
        self.0.iter()
    }

    /// Whether there are so many that ends of some were not written.
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MAX_OPEN
    }

    /// Adds a phase within the others, which are forgotten if they are too many.
    pub(super) fn begin(&mut self, phase: OpenPhase, about: T) {
        if self.is_full() {
            self.forget();
        }
        self.0.push((phase, about));
    }

    /// Ends the innermost phase. Returns `None`, and forgets all of them, if that has another name or began later: an
    /// event between them was not read.
    pub(super) fn end(&mut self, name: &str, time: u64) -> Option<(OpenPhase, T)> {
        let ended = self.0.pop();
        let ended = ended.filter(|(phase, _)| phase.name == name && phase.began <= time);
        if ended.is_none() {
            self.0.clear();
        }
        ended
    }

    pub(super) fn forget(&mut self) {
        self.0.clear();
    }
}
