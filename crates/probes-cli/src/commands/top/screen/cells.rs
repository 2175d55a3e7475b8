//! The text of cells: names, numbers and sparklines that fit into their columns.

use ratatui::symbols::bar;
use ratatui::text::Line;

use crate::text::Escaped;

/// The space between two columns.
pub(super) const GAP: u16 = 2;

/// A name cut to `width` terminal columns: if it is cut, it ends with an ellipsis.
pub(super) fn clipped(name: &str, width: usize) -> String {
    // Four characters, combining marks (accents) included, are taken to be at least one column wide, so what is cut off
    // here would not fit.
    let beginning: String = name.chars().take(4 * width + 4).collect();
    let mut text = Escaped(&beginning).to_string();
    if Line::from(text.as_str()).width() <= width && beginning.len() == name.len() {
        return text;
    }
    while Line::from(text.as_str()).width() >= width.max(1) {
        text.pop();
    }
    text + "…"
}

/// `1,234,567`; a number too wide for its column gets a unit: G, T, P or E.
pub(super) fn grouped(number: u64) -> String {
    if number >= 10_000_000_000 {
        let mut scaled = number as f64 / 1e9;
        let mut units = ["G", "T", "P", "E"].into_iter();
        let mut unit = units.next();
        while scaled >= 999.9995 {
            scaled /= 1000.0;
            unit = units.next();
        }
        return format!("{scaled:.3}{}", unit.unwrap_or_default());
    }
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(super) fn rate_text(rate: f64) -> String {
    match rate {
        rate if rate < 999.95 => format!("{rate:.1}"),
        // Rounded. A rate of 2^64 or slightly more becomes `u64::MAX`: `as` saturates.
        rate => grouped(rate.round() as u64),
    }
}

/// A bar for each of the last `width` rates, scaled to their highest; a space where nothing was counted.
pub(super) fn sparkline(rates: impl ExactSizeIterator<Item = f64> + Clone, width: usize) -> String {
    const BARS: [&str; 8] = [
        bar::ONE_EIGHTH,
        bar::ONE_QUARTER,
        bar::THREE_EIGHTHS,
        bar::HALF,
        bar::FIVE_EIGHTHS,
        bar::THREE_QUARTERS,
        bar::SEVEN_EIGHTHS,
        bar::FULL,
    ];
    let latest = rates.clone().skip(rates.len().saturating_sub(width));
    let highest = latest.clone().fold(0.0, f64::max);
    let bars = latest.map(|rate| match rate {
        rate if rate > 0.0 => {
            let level = (rate / highest * BARS.len() as f64).ceil() as usize;
            BARS[level.clamp(1, BARS.len()) - 1]
        }
        _ => " ",
    });
    bars.collect()
}
