//! `count -by stack`: how often hits have which stack. Each hit is recorded with its stack; those that come faster than they can be read are
//! counted without.

use std::path::Path;
use std::time::Duration;

use probes_lib::{Events, Observation, Stacks, Target};

use crate::commands::observe_loop::{ActiveObservation, Display};
use crate::commands::picture_file::PictureFile;
use crate::commands::uncounted::warn_of_uncounted;
use crate::commands::watch;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::Next;
use crate::output::{CountedStacks, WarningKind};

/// What is asked.
pub(super) struct Asked<'a> {
    pub(super) observation: Observation,
    pub(super) has_functions: bool,
    pub(super) shown: usize,
    pub(super) picture: Option<&'a Path>,
}

/// Counts the hits of a process.
pub(super) fn run<'t>(
    asked: &Asked<'_>,
    target: &'t Target,
    begin: impl FnOnce(&Observation) -> Result<ActiveObservation<'t>, Failure>,
    output: &'t Output,
) -> Result<(), Failure> {
    // Before anything is observed, because it may take long, or fail.
    let mut stacks = Stacks::of_process(target.pid()).map_err(Failure::of_process(target.pid()))?;
    let picture_file = asked.picture.map(PictureFile::create).transpose()?;
    let active = begin(&asked.observation)?;
    if asked.has_functions {
        warn_of_uncounted(&output.messages, active.observer(), "counted");
    }
    let mut counted = CountedStacks::new(target.pid(), stacks.program());
    let display = Display {
        interval: Some(watch::READ_INTERVAL),
        table: None,
    };
    let mut outcome = active.run(
        display,
        |observer| observer.events(),
        |shown, _| {
            add(&mut counted, &mut stacks, &shown.reading);
            Ok(Next::Continue)
        },
    );
    if let Some((events, _)) = outcome.last.take() {
        add(&mut counted, &mut stacks, &events);
    }
    if let Some(observed) = outcome.observed.take() {
        add(&mut counted, &mut stacks, &observed.events);
    }
    counted.finish(outcome.lasted);
    outcome.print(output, counted.text(output.format, asked.shown));
    if let Some(file) = picture_file {
        let drawn = counted.picture(asked.picture.is_some_and(is_folded));
        outcome.failures.add(drawn.and_then(|it| file.write(it)));
    }
    if outcome.was_read {
        warn_of_others(&counted, outcome.lasted, output);
    }
    outcome.finish(&output.messages)
}

fn is_folded(path: &Path) -> bool {
    path.extension().is_some_and(|it| it == "folded")
}

fn add(counted: &mut CountedStacks, stacks: &mut Stacks, events: &Events) {
    for event in &events.events {
        match &event.stack {
            Some(copied) => counted.add(&stacks.of_hit(copied)),
            None => counted.add_others(1),
        }
    }
    counted.add_others(events.dropped);
    counted.add_untyped(events.untyped.unwrap_or(0));
}

/// Says if hits are among the others.
fn warn_of_others(counted: &CountedStacks, lasted: Duration, output: &Output) {
    let others = counted.others();
    if others == 0 {
        return;
    }
    let text = format!(
        "{others} of {} hits in {:.1} s are without a stack: they came faster than they could be read",
        counted.all(),
        lasted.as_secs_f64()
    );
    let remedy =
        "choose fewer with -where; `profile -on-cpu` tells from where a function is called often";
    output
        .messages
        .warning(WarningKind::LostHits, &text, remedy);
}
