//! Flags whose values are durations or numbers.

use std::time::Duration;

use crate::text::{is_number, unsigned};

// How long an observation lasts.
#[derive(Debug, clap::Args)]
pub(crate) struct DurationFlag {
    /// Stop after 10s, 5m, 1h30m; otherwise on Ctrl-C
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub(crate) duration: Option<Duration>,
}

/// Reads a duration, which must be longer than zero.
pub(crate) fn duration(typed: &str) -> Result<Duration, String> {
    // humantime's M is a month, and people who type it mean minutes.
    if typed.contains('M') {
        return Err(format!("\"{typed}\" means months; minutes are m"));
    }
    match humantime::parse_duration(typed) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        Ok(_) => Err(format!(
            "\"{typed}\" is not a duration: it has to be longer than 0"
        )),
        Err(humantime::DurationError::NumberOverflow) => Err(format!(
            "\"{typed}\" is too long, or finer than a nanosecond"
        )),
        Err(_) if positive(typed).is_ok() => {
            Err(format!("\"{typed}\" has no unit; did you mean {typed}s?"))
        }
        Err(_) => Err(format!(
            "\"{typed}\" is not a duration, such as 30s, 5m or 1h30m"
        )),
    }
}

/// Reads a duration, which may be zero.
pub(crate) fn bound(typed: &str) -> Result<Duration, String> {
    let zero = || typed == "0" || humantime::parse_duration(typed) == Ok(Duration::ZERO);
    if positive(typed).is_ok() {
        return Err(format!(
            "\"{typed}\" has no unit; did you mean {typed}ms or {typed}s?"
        ));
    }
    duration(typed).or_else(|why| if zero() { Ok(Duration::ZERO) } else { Err(why) })
}

/// Reads a number of things, at least one.
pub(crate) fn positive(typed: &str) -> Result<u64, String> {
    match unsigned(typed) {
        Some(number) if number > 0 => Ok(number),
        None if is_number(typed) => Err(format!("\"{typed}\" is too large")),
        _ => Err(format!("\"{typed}\" is not a whole number above 0")),
    }
}
