//! Runs the criterion benchmarks of probes-lib and reads their results.

use std::path::Path;

use crate::document::{Table, us};
use crate::failure::{Failure, Result};
use crate::prepare;

/// Criterion's groups: name, what an element is, and the numbers of elements.
const GROUPS: [(&str, &str, &[u64]); 3] = [
    ("notes", "note", &[10, 100, 1_000, 10_000, 100_000]),
    ("table", "site", &[10, 1_000, 10_000]),
    // Four full rings.
    ("runtime-events", "event", &[112_344]),
];

/// Runs the benchmarks; `targets` is the directory of the built `test-programs`.
pub(crate) fn run(root: &Path, targets: &Path) -> Result<()> {
    prepare::run(
        prepare::cargo(root)
            .args(["bench", "-p", "probes-lib", "--bench", "parsing"])
            .env(test_support::TARGETS_VARIABLE, targets),
    )
}

pub(crate) fn table() -> Result<String> {
    let release = prepare::own_directory()?;
    let mut table = Table::new(&["what", "number", "median", "each"]);
    for (group, element, counts) in GROUPS {
        for &count in counts {
            let file = format!("../criterion/{group}/{count}/new/estimates.json");
            let median = median(&release.join(file))?;
            table.row([
                operation(group).to_owned(),
                format!("{count} {element}s"),
                us(median),
                format!("{:.0} ns", median / count as f64),
            ]);
        }
    }
    Ok(table.finish())
}

fn operation(group: &str) -> &'static str {
    match group {
        "notes" => "parse the notes",
        "runtime-events" => "read runtime events",
        _ => "read a file's table",
    }
}

/// Returns the median in ns from one of criterion's files.
fn median(file: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(file);
    let text = text.map_err(Failure::of("cannot read criterion's result"))?;
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(Failure::of("criterion's result is no JSON"))?;
    value["median"]["point_estimate"]
        .as_f64()
        .ok_or_else(|| Failure::new("criterion's result has no median"))
}
