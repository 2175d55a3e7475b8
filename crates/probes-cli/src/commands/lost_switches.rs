//! What is said where the kernel has not recorded every switch of a thread.

use crate::messages::Messages;
use crate::output::WarningKind;
use crate::text::number_of;

/// Warns of records that were lost, and of processors that have come online, where nothing was recorded.
pub(super) fn warn_of_lost_switches(lost: u64, unrecorded_processors: usize, messages: &Messages) {
    if lost > 0 {
        messages.warning(
            WarningKind::LostSwitches,
            "the kernel has lost records of when threads ran: some times are missing, or too short",
            "give the tool a processor that is less busy, such as by taskset or nice",
        );
    }
    if unrecorded_processors > 0 {
        messages.warning(
            WarningKind::LostSwitches,
            &format!(
                "{} came online meanwhile, where nothing was recorded: some times are missing, or too long",
                number_of(unrecorded_processors, "processor")
            ),
            "run the same command again",
        );
    }
}
