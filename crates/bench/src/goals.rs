//! The goals: what stop times and CPU times have to be, and what those of the reference tool are.

use crate::commands::{Command, ENABLE_ALL, INFO};
use crate::document::{Table, ms};
use crate::failure::{Failure, Result};
use crate::programs::LARGE;
use crate::stop_time::StopTimes;

/// Returns the table that compares measured figures with their goals and with the reference tool's figures.
pub(crate) fn table(stop_times: &[StopTimes], commands: &[Command]) -> Result<String> {
    const NORMAL: &str = "spin_10000.pie";
    let stop_time = |program: &str| {
        let one = stop_times.iter().find(|one| one.program == program);
        let one = one.ok_or_else(|| Failure::new(format!("{program} was not measured")))?;
        Ok::<_, Failure>((one.enable.gap.median(), one.first.gap.median()))
    };
    let cpu = |program: &str, command: &str| {
        let mut all = commands.iter();
        all.find(|one| one.program == program && one.command == command)
            .map(|one| one.cpu_ns.median())
            .ok_or_else(|| Failure::new(format!("{command} was not measured on {program}")))
    };
    let ((again, first), (again_large, first_large)) = (stop_time(NORMAL)?, stop_time(LARGE)?);
    let attach = (cpu(NORMAL, ENABLE_ALL)?, cpu(LARGE, ENABLE_ALL)?);
    let info = (cpu(NORMAL, INFO)?, cpu(LARGE, INFO)?);
    let lines = [
        ("stop time, enable all", again, again_large, 3.0, 27.0),
        (
            "stop time, enable all for the first time",
            first,
            first_large,
            3.0,
            27.0,
        ),
        (
            "CPU of `attach -enable-all`",
            attach.0,
            attach.1,
            10.0,
            35.0,
        ),
        ("CPU of `info`", info.0, info.1, 3.0, 9.0),
    ];
    let mut table = Table::new(&[
        "10,000 sites, 1,000 names; medians",
        "measured",
        "goal",
        "reached",
        "reference tool",
        "reference / measured",
        "padded to 1 GiB",
        "padded / measured",
    ]);
    for (what, normal, large, goal, reference) in lines {
        let measured = normal as f64 / 1e6;
        let reference_text = match reference {
            27.0 => "27 to 29 ms",
            35.0 => "35 to 40 ms",
            _ => "9 ms",
        };
        table.row([
            what.to_owned(),
            ms(normal),
            format!("{goal} ms"),
            if measured <= goal { "yes" } else { "no" }.to_owned(),
            reference_text.to_owned(),
            format!("{:.0}", reference / measured),
            ms(large),
            format!("{:.2}", large as f64 / normal as f64),
        ]);
    }
    Ok(table.finish())
}
