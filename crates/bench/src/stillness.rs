//! How long a program stands still while its probes are switched through the library.

use std::time::{Duration, Instant};

use probes_lib::{Action, Actions, Options, Report, Selector, Target};

use crate::document::{Table, median_p99};
use crate::failure::{Failure, Result};
use crate::prepare::Program;
use crate::spin::Spin;
use crate::stats::Samples;

/// The gaps of one program, in ns.
pub(crate) struct Stillness {
    pub(crate) program: &'static str,
    /// Nobody does anything to it: what the machine itself takes.
    pub(crate) quiet: Samples,
    /// Programs that nothing was ever written to: all enabled for the first time.
    pub(crate) first: Switch,
    /// One program, round after round.
    pub(crate) enable: Switch,
    pub(crate) disable: Switch,
}

/// One way of switching.
#[derive(Default)]
pub(crate) struct Switch {
    /// By the clock of the program that stood still.
    pub(crate) gap: Samples,
    /// By the library's own account.
    pub(crate) reported: Samples,
}

impl Switch {
    pub(crate) fn take(&mut self, (report, gap): (Report, Duration)) {
        self.push(report.stopped, gap);
    }

    pub(crate) fn push(&mut self, reported: Duration, gap: Duration) {
        self.gap.push_time(gap);
        self.reported.push_time(reported);
    }
}

pub(crate) fn measure(programs: &[Program], rounds: usize) -> Result<Vec<Stillness>> {
    programs.iter().map(|one| of(one, rounds)).collect()
}

fn of(program: &Program, rounds: usize) -> Result<Stillness> {
    eprintln!("bench: {}: how long it stands still", program.name);
    let mut stillness = Stillness {
        program: program.name,
        quiet: Samples::default(),
        first: Switch::default(),
        enable: Switch::default(),
        disable: Switch::default(),
    };
    let options = Options::default();
    for _ in 0..rounds {
        let mut spin = Spin::start(&program.path)?;
        let target = Target::open(spin.pid())?;
        let switched = switch(&mut spin, &target, Action::Enable, program.sites, options)?;
        stillness.first.take(switched);
    }
    let mut spin = Spin::start(&program.path)?;
    let target = Target::open(spin.pid())?;
    for _ in 0..rounds {
        let begun = Instant::now();
        let enabled = switch(&mut spin, &target, Action::Enable, program.sites, options)?;
        let round = begun.elapsed();
        stillness.enable.take(enabled);
        let disabled = switch(&mut spin, &target, Action::Disable, program.sites, options)?;
        stillness.disable.take(disabled);
        let ((), gap) = spin.watch(|| {
            std::thread::sleep(round);
            Ok(())
        })?;
        stillness.quiet.push_time(gap);
    }
    Ok(stillness)
}

/// Switches all probes and makes sure that it was done.
pub(crate) fn switch(
    spin: &mut Spin,
    target: &Target,
    action: Action,
    sites: u64,
    options: Options,
) -> Result<(Report, Duration)> {
    let actions = Actions::of(action, Selector::All);
    let (report, gap) = spin.watch(|| Ok(target.update_with(&actions, options)?))?;
    let switched: usize = report.changed.iter().map(|change| change.sites).sum();
    if switched as u64 == sites {
        Ok((report, gap))
    } else {
        let text = format!("{switched} sites of {sites} were switched");
        Err(Failure::new(text))
    }
}

pub(crate) fn table(all: &[Stillness]) -> String {
    let mut table = Table::new(&[
        "program",
        "nobody attaches",
        "first enable",
        "enable",
        "disable",
        "enable, as reported",
    ]);
    for one in all {
        table.row([
            format!("`{}`", one.program),
            median_p99(&one.quiet),
            median_p99(&one.first.gap),
            median_p99(&one.enable.gap),
            median_p99(&one.disable.gap),
            median_p99(&one.enable.reported),
        ]);
    }
    table.finish()
}
