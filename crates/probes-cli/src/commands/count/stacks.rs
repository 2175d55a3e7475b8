//! `count -by stack`: how many hits each stack has. Each hit is recorded with its stack; hits that come faster than
//! they can be read are counted without their stack.

use std::path::Path;
use std::time::Duration;

use probes_lib::{Events, Observation, Stacks, Target};

use crate::commands::observe_loop::{Display, ObservationLoop};
use crate::commands::report_file::ReportFile;
use crate::commands::uncounted::warn_of_uncounted;
use crate::commands::watch;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::Next;
use crate::output::{CountedStacks, WarningKind};
use crate::text::number_of;

/// The checked arguments of `count -by stack`.
pub(super) struct StackCountRequest<'a> {
    pub(super) observation: Observation,
    pub(super) has_functions: bool,
    /// How many stacks are printed at most.
    pub(super) top: usize,
    /// The file for a flame graph, or for folded stacks if its extension is `folded`.
    pub(super) graph_path: Option<&'a Path>,
}

/// Counts the hits of a process.
pub(super) fn run<'t>(
    asked: &StackCountRequest<'_>,
    target: &'t Target,
    begin: impl FnOnce(&Observation) -> Result<ObservationLoop<'t>, Failure>,
    output: &'t Output,
) -> Result<(), Failure> {
    // Before anything is observed, because it may take long, or fail.
    let mut stacks = Stacks::of_process(target.pid()).map_err(Failure::of_process(target.pid()))?;
    let report_file = asked.graph_path.map(ReportFile::create).transpose()?;
    let active = begin(&asked.observation)?;
    if asked.has_functions {
        warn_of_uncounted(&output.messages, active.observer(), "counted");
    }
    let mut counted = CountedStacks::new(target.pid(), stacks.program());
    let display = Display {
        interval: Some(watch::HITS_INTERVAL),
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
    outcome.print(output, counted.text(output.format, asked.top));
    if let Some(file) = report_file {
        let drawn = counted.picture(asked.graph_path.is_some_and(is_folded));
        outcome.failures.add(drawn.and_then(|it| file.write(it)));
    }
    if outcome.output_was_read {
        warn_of_hits_without_stack(&counted, outcome.lasted, output);
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

/// Warns if hits were counted without their stack.
fn warn_of_hits_without_stack(counted: &CountedStacks, lasted: Duration, output: &Output) {
    let warning = |text: &str, remedy: &str| {
        let kind = WarningKind::LostHits;
        output.messages.warning(kind, text, remedy);
    };
    let without_room = counted.without_room();
    if without_room > 0 {
        let text = format!(
            "{without_room} of {} are shown as other: there are more stacks than are kept",
            number_of(counted.all(), "hit")
        );
        warning(
            &text,
            "select fewer hits with -where, or count for a shorter time",
        );
    }
    let without_stack = counted.without_stack();
    if without_stack == 0 {
        return;
    }
    let text = format!(
        "{without_stack} of {} in {:.1} s have no stack: they came faster than they could be read",
        number_of(counted.all(), "hit"),
        lasted.as_secs_f64()
    );
    let remedy = "select fewer hits with -where, or use `profile -on-cpu`, which shows the callers of a function that is called often";
    warning(&text, remedy);
}
