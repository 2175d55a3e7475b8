//! `count -by stack`: how many hits each stack has. Each hit is recorded with its stack; hits that come faster than
//! they can be read are counted without their stack.

use std::path::Path;
use std::time::Duration;

use probes_lib::{Events, ObservationReport, Observer, Stacks};

use crate::commands::observations::Observations;
use crate::commands::readings::{Display, ReadingHandler, ShownReadings};
use crate::commands::report_file::ReportFile;
use crate::commands::untyped::warn_of_untyped;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{CountedStacks, WarningKind, why_lost};
use crate::text::number_of;

/// Counts the hits of a process by their stacks.
pub(super) struct StackCounting {
    counted: CountedStacks,
    stacks: Stacks,
    /// How many stacks are printed at most.
    top: usize,
    /// The file, and whether it gets folded stacks (its extension is `folded`) instead of a flame graph.
    graph: Option<(ReportFile, bool)>,
    /// How many hits have found no room for their stack.
    without_place: u64,
}

impl StackCounting {
    /// Made before anything is observed, because it may take long, or fail.
    pub(super) fn new(
        pid: i32,
        top: usize,
        graph: Option<&Path>,
        messages: &Messages,
    ) -> Result<StackCounting, Failure> {
        let stacks = Stacks::of_process(pid).map_err(Failure::of_process(pid))?;
        let create = |path| Ok((ReportFile::create(path, messages)?, is_folded(path)));
        Ok(StackCounting {
            counted: CountedStacks::new(pid, stacks.program()),
            stacks,
            top,
            graph: graph.map(create).transpose()?,
            without_place: 0,
        })
    }

    /// Counts until the end, and prints what was counted.
    pub(super) fn run(mut self, active: Observations<'_>, output: &Output) -> Result<(), Failure> {
        let mut outcome = active.run(Display::default(), &mut self);
        let mut counted = self.counted;
        counted.finish(outcome.lasted);
        let is_terminal = output.destination.is_terminal_on_stdout();
        outcome.print(output, counted.text(output.format, self.top, is_terminal));
        // If nothing was read, the file keeps the picture that it has.
        let graph = self.graph.filter(|_| !outcome.last.is_empty());
        if let Some((file, is_folded)) = graph {
            let drawn = counted.picture(is_folded);
            outcome.failures.add(drawn.and_then(|it| file.write(it)));
        }
        if outcome.output_was_read {
            warn_of_untyped(&output.messages, counted.only_untyped(), outcome.of_results);
            let lasted = outcome.lasted;
            warn_of_hits_without_stack(&counted, self.without_place, lasted, output);
        }
        outcome.finish(&output.messages)
    }

    fn add(&mut self, events: &Events) {
        for event in &events.events {
            match &event.stack {
                Some(copied) => self.counted.add(&self.stacks.of_hit(copied)),
                None => self.counted.add_others(1),
            }
        }
        self.counted.add_others(events.dropped);
        self.without_place = self.without_place.saturating_add(events.without_place);
        self.counted.add_untyped(events.untyped.unwrap_or(0));
    }
}

impl ReadingHandler for StackCounting {
    /// Nothing: hits are counted when they are read.
    type Reading = ();

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<()>> {
        self.add(&observer.events()?);
        Ok(Some(()))
    }

    fn last(&mut self, _: i32, report: ObservationReport, _: Duration) {
        self.add(&report.events);
    }

    fn next_read(&self, observer: &Observer) -> Option<Duration> {
        Some(observer.next_read())
    }

    fn show(
        &mut self,
        _: ShownReadings<'_, ()>,
        _: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        Ok(Next::Continue)
    }
}

fn is_folded(path: &Path) -> bool {
    path.extension().is_some_and(|it| it == "folded")
}

/// Warns if hits were counted without their stack.
fn warn_of_hits_without_stack(
    counted: &CountedStacks,
    without_place: u64,
    lasted: Duration,
    output: &Output,
) {
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
        "{without_stack} of {} in {:.1} s have no stack: {}",
        number_of(counted.all(), "hit"),
        lasted.as_secs_f64(),
        why_lost(without_place)
    );
    let remedy = "select fewer hits with -where, give bursts more room (-buffer, up to 64), or use `profile -on-cpu`, which shows the \
                  callers of a function that is called often";
    warning(&text, remedy);
}
