//! Messages about hits that are missing: of sites that record nothing any more, because the process has discarded its
//! patched pages; of processes that it has forked; and of functions in files that it has loaded since.

use std::collections::HashSet;
use std::path::PathBuf;

use probes_lib::{DiscardedPatches, ForkedChildren, Observer};

use crate::messages::Messages;
use crate::output::WarningKind;
use crate::text::{join_first_few, number_of};

/// What an observation misses.
#[derive(Clone, Debug, Default)]
pub(super) struct Gaps {
    /// One for each observed process, as is `forked`.
    discarded: Vec<DiscardedPatches>,
    forked: Vec<ForkedChildren>,
    /// The pids of forked processes that have an observation of their own.
    observed_separately: HashSet<i32>,
    loaded_later: Vec<PathBuf>,
}

impl Gaps {
    pub(super) fn of(observer: &Observer) -> Gaps {
        Gaps::of_all([observer])
    }

    /// What the observations of several processes miss.
    pub(super) fn of_all<'o>(observers: impl IntoIterator<Item = &'o Observer>) -> Gaps {
        let mut gaps = Gaps::default();
        for observer in observers {
            gaps.discarded.push(observer.discarded());
            gaps.forked.push(observer.forked());
            gaps.loaded_later.extend(observer.loaded_later());
        }
        gaps
    }

    /// The same gaps, without those of forked processes that have an observation of their own.
    pub(super) fn without_separate(self, observed_separately: &HashSet<i32>) -> Gaps {
        Gaps {
            observed_separately: observed_separately.clone(),
            ..self
        }
    }

    /// How many sites and functions record nothing any more.
    fn discarded_patches(&self) -> usize {
        self.discarded.iter().map(DiscardedPatches::patches).sum()
    }

    fn discarded_cautions(&self) -> impl Iterator<Item = String> {
        self.discarded.iter().filter_map(discarded_caution)
    }

    fn forked_cautions(&self) -> impl Iterator<Item = String> {
        let of_each = self.forked.iter();
        of_each.filter_map(|forked| forked_caution(forked, &self.observed_separately))
    }

    /// Why figures are wrong, if any are.
    pub(super) fn caution(&self) -> Option<String> {
        let cautions = self.discarded_cautions().chain(self.forked_cautions());
        let cautions = cautions.chain(loaded_caution(&self.loaded_later));
        let cautions: Vec<String> = cautions.collect();
        (!cautions.is_empty()).then(|| cautions.join("; "))
    }
}

/// Warns of gaps that have been found since the last warning.
#[derive(Debug, Default)]
pub(super) struct GapWarning {
    /// How many discarded patches the last warning was about.
    patches: usize,
    /// Whether a warning was about forked processes. One is enough: a server may fork a process for each request.
    of_forked: bool,
    /// How many files that were loaded later have been named.
    files: usize,
}

impl GapWarning {
    pub(super) fn update(&mut self, messages: &Messages, gaps: &Gaps) {
        let later = gaps.loaded_later.get(self.files..).unwrap_or_default();
        self.files = gaps.loaded_later.len();
        if let Some(caution) = loaded_caution(later) {
            messages.warning(
                WarningKind::LoadedLater,
                &caution,
                "run the command again with -pid to observe them, too",
            );
        }
        if !self.of_forked {
            for caution in gaps.forked_cautions() {
                self.of_forked = true;
                messages.warning(
                    WarningKind::Forked,
                    &caution,
                    "`-pid CHILD` observes one of them, and `-pid PID -follow` a process with all that it forks",
                );
            }
        }
        if gaps.discarded_patches() <= self.patches {
            return;
        }
        self.patches = gaps.discarded_patches();
        for caution in gaps.discarded_cautions() {
            messages.warning(
                WarningKind::Discarded,
                &caution,
                "a new observation records them again; patches are discarded by madvise(MADV_DONTNEED), by a new \
                 mapping of the file, if a library is loaded again, and by breakpoints of other tools",
            );
        }
    }
}

/// Says which files have functions that are not observed.
fn loaded_caution(files: &[PathBuf]) -> Option<String> {
    let names: Vec<String> = files.iter().map(|it| it.display().to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let them = if files.len() == 1 { "it" } else { "them" };
    let names = join_first_few(&names)?;
    Some(format!(
        "functions in {names} are not observed: the process has loaded {them} since the observation began"
    ))
}

/// Names the forked processes of which hits or times are missing or wrong.
fn forked_caution(forked: &ForkedChildren, observed_separately: &HashSet<i32>) -> Option<String> {
    let pids = forked
        .pids()
        .iter()
        .filter(|pid| !observed_separately.contains(pid));
    let pids: Vec<String> = pids.map(|pid| format!("pid {pid}")).collect();
    let pids: Vec<&str> = pids.iter().map(String::as_str).collect();
    let what = if forked.are_recorded() {
        "times in forked processes are missing or wrong, and their hits are counted"
    } else {
        "hits in forked processes are missing"
    };
    Some(format!(
        "{what}: the process has forked {}",
        join_first_few(&pids)?
    ))
}

/// Says which figures are too low.
fn discarded_caution(discarded: &DiscardedPatches) -> Option<String> {
    let names: Vec<&str> = discarded.probes().chain(discarded.functions()).collect();
    let names = join_first_few(&names)?;
    let functions = discarded.functions().count();
    let numbers = [
        (discarded.patches() - functions, "site"),
        (functions, "function"),
    ];
    let numbers = numbers.into_iter().filter(|(number, _)| *number > 0);
    let numbers: Vec<String> = numbers
        .map(|(number, noun)| number_of(number, noun))
        .collect();
    let patches = numbers.join(" and ");
    Some(format!(
        "the figures of {names} are too low: the process has discarded the patches of {patches}, where no more hits are \
         recorded"
    ))
}
