//! Bar charts as text.

use std::fmt::Write;

/// The width of the longest bar, in columns.
const LONGEST: u64 = 50;

/// A line for each bar, given as its label and its count: `[1K, 2K) 123 |@@@@   |`.
pub(super) fn chart(bars: &[(String, u64)]) -> String {
    let most = bars.iter().map(|(_, count)| *count).max();
    let most = most.unwrap_or(0).max(1);
    let width = most.to_string().len();
    let labels = bars.iter().map(|(label, _)| label.chars().count());
    let label_width = labels.max().unwrap_or(0);
    let mut text = String::new();
    for (label, count) in bars {
        let len = (u128::from(*count) * u128::from(LONGEST)).div_ceil(u128::from(most));
        let bar = "@".repeat(len as usize);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{label:<label_width$} {count:>width$} |{bar:<longest$}|",
            longest = LONGEST as usize
        );
    }
    text
}
