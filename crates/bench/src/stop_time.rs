//! How long a program is stopped while the library enables and disables its probes.

use std::time::{Duration, Instant};

use probes_lib::{Action, Actions, Options, Report, Selector, Target};

use crate::document::{Table, median_p99};
use crate::failure::{Failure, Result};
use crate::prepare::Program;
use crate::spin::Spin;
use crate::stats::Samples;

/// How long one program was stopped, in ns: the longest gaps between its own clock readings, and what updates
/// reported.
pub(crate) struct StopTimes {
    pub(crate) program: &'static str,
    /// With no tool attached: the noise of the machine.
    pub(crate) unattached: Samples,
    /// Enabling all probes of a program that was never patched before.
    pub(crate) first: MeasuredStops,
    /// Enabling, and then disabling, all probes of one running program again and again.
    pub(crate) enable: MeasuredStops,
    pub(crate) disable: MeasuredStops,
}

/// How long one kind of update stopped the program.
#[derive(Default)]
pub(crate) struct MeasuredStops {
    /// Measured by the program itself.
    pub(crate) gap: Samples,
    /// Reported by the library.
    pub(crate) reported: Samples,
}

impl MeasuredStops {
    pub(crate) fn push_report(&mut self, (report, gap): (Report, Duration)) {
        self.push(report.stopped, gap);
    }

    pub(crate) fn push(&mut self, reported: Duration, gap: Duration) {
        self.gap.push_time(gap);
        self.reported.push_time(reported);
    }
}

pub(crate) fn measure(programs: &[Program], rounds: usize) -> Result<Vec<StopTimes>> {
    programs
        .iter()
        .map(|one| measure_one(one, rounds))
        .collect()
}

fn measure_one(program: &Program, rounds: usize) -> Result<StopTimes> {
    eprintln!("bench: {}: how long it is stopped", program.name);
    let mut stop_times = StopTimes {
        program: program.name,
        unattached: Samples::default(),
        first: MeasuredStops::default(),
        enable: MeasuredStops::default(),
        disable: MeasuredStops::default(),
    };
    let options = Options::default();
    for _ in 0..rounds {
        let mut spin = Spin::start(&program.path)?;
        let target = Target::open(spin.pid())?;
        let switched = switch(&mut spin, &target, Action::Enable, program.sites, options)?;
        stop_times.first.push_report(switched);
    }
    let mut spin = Spin::start(&program.path)?;
    let target = Target::open(spin.pid())?;
    for _ in 0..rounds {
        let begun = Instant::now();
        let enabled = switch(&mut spin, &target, Action::Enable, program.sites, options)?;
        let enable_time = begun.elapsed();
        stop_times.enable.push_report(enabled);
        let disabled = switch(&mut spin, &target, Action::Disable, program.sites, options)?;
        stop_times.disable.push_report(disabled);
        let ((), gap) = spin.longest_gap_during(|| {
            std::thread::sleep(enable_time);
            Ok(())
        })?;
        stop_times.unattached.push_time(gap);
    }
    Ok(stop_times)
}

/// Switches all probes and checks the number of sites.
pub(crate) fn switch(
    spin: &mut Spin,
    target: &Target,
    action: Action,
    sites: u64,
    options: Options,
) -> Result<(Report, Duration)> {
    let actions = Actions::of(action, Selector::All);
    let (report, gap) = spin.longest_gap_during(|| Ok(target.update_with(&actions, options)?))?;
    let switched: usize = report.changed.iter().map(|change| change.sites).sum();
    if switched as u64 == sites {
        Ok((report, gap))
    } else {
        let text = format!("{switched} sites of {sites} were switched");
        Err(Failure::new(text))
    }
}

pub(crate) fn table(all: &[StopTimes]) -> String {
    let mut table = Table::new(&[
        "program",
        "no tool attached",
        "first enable",
        "enable",
        "disable",
        "enable, as reported",
    ]);
    for one in all {
        table.row([
            format!("`{}`", one.program),
            median_p99(&one.unattached),
            median_p99(&one.first.gap),
            median_p99(&one.enable.gap),
            median_p99(&one.disable.gap),
            median_p99(&one.enable.reported),
        ]);
    }
    table.finish()
}
