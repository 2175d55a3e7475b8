//! What is said when an observation begins, and when it ends.

use std::time::Duration;

use probes_lib::{Observer, Target};

use super::closures::warn_of_refused_closures;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::WarningKind;
use crate::progress::LongWork;
use crate::text::join_first_few;

/// Observes a process by `observe`. Notes how long that stopped the process, and whether the process is in a job
/// control stop.
pub(super) fn observe_by(
    target: &Target,
    messages: &Messages,
    observe: impl FnOnce() -> probes_lib::Result<Observer>,
) -> Result<Observer, Failure> {
    let pid = target.pid();
    // An error means that it has exited, which `observe` reports.
    let is_stopped = target.is_stopped().unwrap_or(false);
    let preparing = LongWork::begin(format!("preparing to observe process {pid}"), messages);
    let observer = observe();
    drop(preparing);
    let observer = observer.map_err(Failure::of_process(pid))?;
    warn_of_refused_closures(messages, pid, observer.code_digest());
    messages.note(&format!("stopped {} us", observer.stopped().as_micros()));
    note_sites_without_nop(messages, &observer);
    if is_stopped {
        messages.note(&format!(
            "process {pid} is stopped (state T): it executes nothing until `kill -CONT {pid}`"
        ));
    }
    Ok(observer)
}

/// Notes the sites of USDT probes that no other tool may begin to trace meanwhile.
pub(super) fn note_sites_without_nop(messages: &Messages, observer: &Observer) {
    let mut sites: Vec<&str> = observer.sites_without_nop().map(|(name, _)| name).collect();
    sites.sort_unstable();
    sites.dedup();
    if let Some(names) = join_first_few(&sites) {
        messages.note(&format!(
            "do not attach bpftrace or perf to {names} until this command ends: the nop there is overwritten, and the program would crash"
        ));
    }
}

/// Warns of the hits that are missing of a process that has exited or exec'd after it was observed for `lasted`.
/// `subject` says which of the two.
pub(super) fn warn_of_unread_end(
    messages: &Messages,
    subject: &str,
    read_at: Option<Duration>,
    lasted: Duration,
) {
    let missing = match read_at {
        None => "it was not read before that, so it has no results".to_owned(),
        Some(at) => format!(
            "the last reading is {} ms old, and hits since then are missing",
            lasted.saturating_sub(at).as_millis()
        ),
    };
    messages.warning(
        WarningKind::UnreadEnd,
        &format!("{subject}: {missing}"),
        "results are kept in the memory of the process; a program that `trace` or `record -prog` starts is observed to its last hit",
    );
}

/// Says that memory stays mapped in a process that is not observed any more.
pub(super) fn warn_of_still_mapped(messages: &Messages, pid: i32, bytes: u64) {
    if bytes > 0 {
        let why = "a thread may still return there, or does not run (it is frozen, for example), or the process has installed a seccomp \
                   filter meanwhile";
        messages.warning(
            WarningKind::StillMapped,
            &format!("{bytes} bytes stay mapped in process {pid} (harmless): {why}"),
            &format!("`ocaml-probes observe -clean -pid {pid}` unmaps them later"),
        );
    }
}
