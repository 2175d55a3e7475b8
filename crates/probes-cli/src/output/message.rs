//! Messages beside the answer as JSON: errors, warnings, notes and steps, an object each.

use serde::Serialize;

use super::format::{VERSION, json};

/// What a message reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind<'m> {
    /// Why a command failed: [`Failure::kind`](crate::failure::Failure::kind).
    Error(&'m str),
    /// What is unusual, though the command succeeds.
    Warning(WarningKind),
    /// What was done that is not a part of the answer.
    Note,
    /// What is being done.
    Step,
}

/// What is unusual. Each variant is a `kind` in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WarningKind {
    /// Other processes refuse, or may refuse, closures that the process marshals.
    ClosuresRefused,
    /// Memory of an observation that has ended stays mapped.
    StillMapped,
    /// Figures are too low, because the process has discarded pages with observed sites.
    Discarded,
    /// Hits or times of forked processes are missing, or a forked process could not be restored.
    Forked,
    /// The process has loaded a file with functions that were asked for: they are not observed.
    LoadedLater,
    /// The process writes no runtime events now: they are off, or paused.
    EventsPaused,
    /// A followed process does not have the probes that were asked for, so far.
    MissingProbes,
    /// A process is not followed any more, because it receives signals too fast.
    Unfollowed,
    /// Probes that were disabled stay on, because others have enabled them too.
    StillEnabled,
    /// A file cannot be read: its probes, its source lines, or what can be observed of its functions, are missing.
    UnreadableFile,
    /// Counters and sites of probes disagree.
    Inconsistent,
    /// Sites are observed, but the observer was killed or is not known.
    NoObserver,
    /// The answer is cut off, because its reader did not read it when the command was asked to end.
    UnreadAnswer,
    /// The process has exited, or executed a program, and hits since it was read last are missing.
    UnreadEnd,
    /// Of several processes, some were observed for longer than others, and have more hits for that.
    UnevenTimes,
    /// Hits came faster than they could be read, or had more stacks than are kept.
    LostHits,
    /// A recording reaches back less far than was asked for.
    ShortRecording,
    /// Runtime events were overwritten before they were read: the figures are those of the others.
    LostEvents,
    /// A domain was in a pause that had begun before the events were read, or had not ended: it is left out.
    PauseLeftOut,
    /// The file of runtime events that were switched on is left.
    LeftFile,
    /// Functions, or sites of USDT probes, that were selected cannot be counted or timed, or results cannot be
    /// recorded.
    Uncounted,
    /// Not all calls that are observed for `-gc stw` are stop-the-world sections.
    FailedSections,
    /// Calls of functions that are timed were not recorded: their figures are those of the others.
    LostCalls,
    /// Times of pairs were not measured, because their starts found no room: the figures are those of the others.
    LostTimes,
    /// Times cannot be trusted, because pairs interleave in a thread, or may do so.
    Interleaved,
    /// Self times include calls on another stack.
    SeparateStacks,
    /// Probes are held by a command that was killed.
    DeadHolder,
    /// A record of the holders of probes cannot be read.
    UnreadableHold,
    /// It cannot be recorded that this command holds probes.
    UnrecordedHold,
    /// Stacks of threads were not read.
    UnreadStacks,
    /// Other machines can read what is served.
    NotLoopback,
    /// Probes, pairs or functions are not served, because there are too many.
    LeftOut,
    /// Stacks end before their outermost frames, or frames were guessed.
    CutStacks,
    /// The kernel has lost records of switches, or has none of a processor that came online meanwhile, so that waits
    /// are missing.
    LostSwitches,
    /// Threads have waited for a processor, and the stacks of a profile do not distinguish that from running.
    ProcessorsBusy,
    /// No hit has an answer: an argument does not have the type that an expression needs, or a function has no result.
    Untyped,
    /// Keys found no room: their hits are `other`, and the lines of other keys may lack hits.
    OtherKeys,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum MessageView<'m> {
    Error(WithHint<'m, &'m str>),
    Warning(WithHint<'m, WarningKind>),
    Note(Plain<'m>),
    Step(Plain<'m>),
}

#[derive(Serialize)]
struct WithHint<'m, K> {
    version: u32,
    kind: K,
    message: &'m str,
    hint: Option<&'m str>,
    pid: Option<i32>,
}

#[derive(Serialize)]
struct Plain<'m> {
    version: u32,
    message: &'m str,
    pid: Option<i32>,
}

/// A message as a line of JSON.
pub(crate) fn message(
    kind: MessageKind<'_>,
    message: &str,
    hint: Option<&str>,
    pid: Option<i32>,
) -> String {
    let version = VERSION;
    let plain = Plain {
        version,
        message,
        pid,
    };
    let view = match kind {
        MessageKind::Error(kind) => MessageView::Error(WithHint {
            version,
            kind,
            message,
            hint,
            pid,
        }),
        MessageKind::Warning(kind) => MessageView::Warning(WithHint {
            version,
            kind,
            message,
            hint,
            pid,
        }),
        MessageKind::Note => MessageView::Note(plain),
        MessageKind::Step => MessageView::Step(plain),
    };
    // Text and numbers can always be written as JSON.
    json(&view).unwrap_or_default()
}
