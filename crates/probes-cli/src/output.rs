//! Answers, on standard output: plain, as a table, or as JSON.

mod counted;
mod hits;
mod latencies;
mod plain;
mod svg;
mod table;
mod view;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;

use nix::fcntl::OFlag;

pub(crate) use counted::Counted;
pub(crate) use hits::Hits;
pub(crate) use latencies::{Latencies, in_words};
pub(crate) use view::{Changes, Detail, Listing, Processes};

use crate::commands::Failure;

/// How an answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Lines for programs to read.
    Plain,
    /// Columns for people to read.
    Table,
    /// One object, on one line.
    Json,
}

/// Writes the probes of a process or a file; which process it is, too, if there are several.
pub(crate) fn print_listing(
    format: Format,
    listing: &Listing<'_>,
    sites: bool,
    several: bool,
) -> Result<(), Failure> {
    let text = match format {
        Format::Plain => plain::listing(listing, several),
        Format::Table => table::listing(listing, sites, several),
        Format::Json => json(listing)?,
    };
    print(&text)
}

/// Writes which processes have probes.
pub(crate) fn print_processes(format: Format, processes: &Processes) -> Result<(), Failure> {
    let text = match format {
        Format::Plain => plain::processes(processes),
        Format::Table => table::processes(processes),
        Format::Json => json(processes)?,
    };
    print(&text)
}

/// Writes what was changed; which process it was, too, if there are several.
pub(crate) fn print_changes(
    format: Format,
    changes: &Changes<'_>,
    several: bool,
) -> Result<(), Failure> {
    let text = match format {
        Format::Plain => plain::changes(changes, several),
        Format::Table => table::changes(changes, several),
        Format::Json => json(changes)?,
    };
    print(&text)
}

/// What was counted.
pub(crate) fn counted(format: Format, counted: &Counted<'_>) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(counted.plain()),
        Format::Table => Ok(counted.table()),
        Format::Json => json(counted),
    }
}

/// Writes how many sites of a process were given their own code back.
pub(crate) fn print_cleaned(
    format: Format,
    pid: i32,
    cleaned: probes_lib::CleanReport,
) -> Result<(), Failure> {
    #[derive(serde::Serialize)]
    struct CleanReport {
        version: u32,
        pid: i32,
        sites: usize,
        still_mapped: u64,
    }
    let sites = cleaned.sites;
    let text = match format {
        Format::Plain => format!("{pid} {sites}\n"),
        Format::Table => table::table(
            &["pid", "sites"],
            std::iter::once(vec![pid.to_string(), sites.to_string()]),
        ),
        Format::Json => json(&CleanReport {
            version: view::VERSION,
            pid,
            sites,
            still_mapped: cleaned.still_mapped,
        })?,
    };
    print(&text)
}

/// What pairs took.
pub(crate) fn latencies(format: Format, latencies: &Latencies<'_>) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(latencies.plain()),
        Format::Table => Ok(latencies.charts()),
        Format::Json => json(latencies),
    }
}

/// Writes `text` as it is.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = BufWriter::new(stdout().lock());
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(Failure::Output)
}

/// Standard output, which is a terminal, opened once more, so that no write waits for it and nobody else's
/// are made not to. It may be another user's, as after su(1).
pub(crate) fn terminal() -> io::Result<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(flags.bits());
    match options.open("/proc/self/fd/1") {
        Ok(file) => Ok(file),
        Err(_) => Ok(stdout().as_fd().try_clone_to_owned()?.into()),
    }
}

/// Writes `text` where it is no answer: standard output is a program's, too.
pub(crate) fn print_beside(text: &str) -> Result<(), Failure> {
    std::io::stderr()
        .write_all(text.as_bytes())
        .map_err(Failure::Output)
}

fn json(answer: &impl serde::Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string(answer).map_err(io::Error::from);
    Ok(text.map_err(Failure::Output)? + "\n")
}

/// Text from a file that nobody vouches for: what could move the cursor, change colours or turn
/// the direction of writing is shown as an escape.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        if rest.bytes().all(|byte| (b' '..0x7f).contains(&byte)) {
            return f.write_str(rest);
        }
        while let Some((at, character)) = rest.char_indices().find(|&(_, c)| is_unprintable(c)) {
            write!(f, "{}{}", &rest[..at], character.escape_default())?;
            rest = &rest[at + character.len_utf8()..];
        }
        f.write_str(rest)
    }
}

/// Control characters, line and paragraph separators, marks and overrides of direction, zero-width
/// characters.
fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_letters_are_not() {
        let escaped = Escaped("a\u{1b}[31m\n\u{202e}é\u{7f}\u{9b} z").to_string();
        assert_eq!(escaped, "a\\u{1b}[31m\\n\\u{202e}é\\u{7f}\\u{9b} z");
    }
}
