//! What is said about sites that record nothing any more, because the process has discarded its patched pages.

use probes_lib::DiscardedPatches;

use crate::messages::Messages;
use crate::output::WarningKind;
use crate::text::{join_first_few, number_of};

/// Warns of sites that have been discarded since the last warning.
#[derive(Debug, Default)]
pub(super) struct DiscardWarning {
    /// How many sites the last warning was about.
    warned: usize,
}

impl DiscardWarning {
    pub(super) fn update(&mut self, messages: &Messages, discarded: &DiscardedPatches) {
        if discarded.sites() <= self.warned {
            return;
        }
        self.warned = discarded.sites();
        if let Some(caution) = caution(discarded) {
            messages.warning(
                WarningKind::Discarded,
                &caution,
                "a new observation records them again; patches are discarded by madvise(MADV_DONTNEED), by a new \
                 mapping of the file, if a library is loaded again, and by breakpoints of other tools",
            );
        }
    }
}

/// Why figures are wrong, if any are.
pub(super) fn caution(discarded: &DiscardedPatches) -> Option<String> {
    let names: Vec<&str> = discarded.probes().chain(discarded.functions()).collect();
    let names = join_first_few(&names)?;
    let functions = discarded.functions().count();
    let numbers = [
        (discarded.sites() - functions, "site"),
        (functions, "function"),
    ];
    let numbers = numbers.into_iter().filter(|(number, _)| *number > 0);
    let numbers: Vec<String> = numbers
        .map(|(number, noun)| number_of(number, noun))
        .collect();
    let patches = numbers.join(" and ");
    Some(format!(
        "the figures of {names} are too low: the process has discarded the patches of {patches}, which \
         record nothing any more"
    ))
}
