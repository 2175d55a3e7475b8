//! Opens a process and reports its objects, and those that could not be read.

use probes_lib::{Effect, Object, Result, SourceMap, Target, UnreadableObject};

use crate::destination::Output;
use crate::failure::{Failure, is_deleted_or_replaced};
use crate::hint::{self, CommandTarget};
use crate::messages::Messages;
use crate::output::{Detail, Format, PathForm, WarningKind};
use crate::text::{join_first_few, number_of};

/// Opens a process in order to observe it, and describes it. Without `needs_probes`, it may have none.
pub(super) fn open_to_observe(
    pid: i32,
    needs_probes: bool,
    messages: &Messages,
) -> std::result::Result<Target, Failure> {
    let target = if needs_probes {
        Target::open(pid)
    } else {
        Target::open_any(pid)
    };
    let target = target.map_err(|error| error.with_effect_if_none(Effect::NothingChanged));
    let target = target.map_err(Failure::of_process(pid))?;
    describe(messages, &target);
    Ok(target)
}

/// Reports the program and the objects of a process.
pub(super) fn describe(messages: &Messages, target: &Target) {
    let (pid, program) = (target.pid(), target.program().display());
    messages.step(format_args!("process {pid} runs {program}"));
    for object in target.objects() {
        messages.step(format_args!(
            "{} has {}; load bias {}",
            object.path().display(),
            number_of(object.table().probes().len(), "probe"),
            object.load_bias()
        ));
    }
    warn_of_unreadable(messages, &target.unreadable(), pid, "probes");
}

/// Warns of mapped files that could not be read: what they have of `what` (probes or functions) is missing.
pub(super) fn warn_of_unreadable(
    messages: &Messages,
    unreadable: &[UnreadableObject],
    pid: i32,
    what: &str,
) {
    let (deleted_or_replaced, others): (Vec<_>, Vec<_>) = unreadable
        .iter()
        .partition(|file| is_deleted_or_replaced(&file.why));
    let warn = |why: &str, file: &UnreadableObject| {
        let hint = hint::of(&file.why, &CommandTarget::Process(pid));
        let hint = hint.unwrap_or_else(|| format!("the {what} of all other files are available"));
        messages.warning(
            WarningKind::UnreadableFile,
            &format!("skipped: {why}"),
            &hint,
        );
    };
    for file in &others {
        warn(&file.why.to_string(), file);
    }
    match deleted_or_replaced.as_slice() {
        [] => {}
        [file] => warn(&file.why.to_string(), file),
        // After a system upgrade, these may be all libraries of the program.
        [first, ..] => {
            let paths = deleted_or_replaced
                .iter()
                .map(|file| file.path.display().to_string());
            let mut paths: Vec<String> = paths.collect();
            paths.sort();
            let names = join_first_few(&paths).unwrap_or_default();
            let why = format!("cannot open files that were deleted or replaced: {names}");
            warn(&why, first);
        }
    }
}

/// The source lines of each object.
pub(super) fn sources(target: &Target) -> Vec<Option<SourceMap>> {
    let source = |object: &Object| object.source_map().ok();
    target.objects().iter().map(source).collect()
}

/// What to show of each probe. Source lines are read only if they are shown, because that takes longer than everything
/// else; if they cannot be read, the command goes on without them.
pub(super) fn detail(
    output: &Output,
    sites: bool,
    paths: PathForm,
    source_maps: impl IntoIterator<Item = Result<SourceMap>>,
) -> Detail {
    if !sites && output.format != Format::Json {
        return Detail::default();
    }
    let or_none = |source_map: Result<SourceMap>| {
        source_map
            .inspect_err(|error| {
                output.messages.step(format_args!(
                    "functions and source lines are left out: {error}"
                ));
            })
            .ok()
    };
    Detail {
        sites: true,
        paths,
        sources: source_maps.into_iter().map(or_none).collect(),
        ..Detail::default()
    }
}
