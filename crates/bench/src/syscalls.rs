//! How many system calls `attach -enable-all` makes, counted by strace.

use std::path::Path;
use std::process::Command;

use crate::commands::{ENABLE_ALL, arguments};
use crate::cost::SET_BY_CARGO;
use crate::document::Table;
use crate::failure::{Failure, Result};
use crate::prepare::Program;
use crate::spin::Spin;

/// How many system calls a row names.
const SHOWN: usize = 5;

pub(crate) fn table(programs: &[Program], tool: &Path) -> Result<String> {
    if Command::new("strace").arg("-V").output().is_err() {
        return Ok("Not counted: strace is not installed.\n".to_owned());
    }
    let mut table = Table::new(&["program", "sites", "system calls", "most frequent"]);
    for program in programs {
        eprintln!("bench: {}: system calls", program.name);
        let calls = count(program, tool)?;
        let shown: Vec<String> = calls
            .iter()
            .take(SHOWN)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        table.row([
            format!("`{}`", program.name),
            program.sites.to_string(),
            calls
                .iter()
                .map(|(_, count)| count)
                .sum::<u64>()
                .to_string(),
            shown.join(", "),
        ]);
    }
    Ok(table.finish())
}

/// Returns how often one run makes each system call, the most frequent first.
fn count(program: &Program, tool: &Path) -> Result<Vec<(String, u64)>> {
    let spin = Spin::start(&program.path)?;
    let mut strace = Command::new("strace");
    strace.env_remove(SET_BY_CARGO);
    strace.args(["-f", "-c", "-U", "name,calls", "-o", "/dev/stdout"]);
    strace.arg(tool).args(arguments(ENABLE_ALL, spin.pid()));
    let output = test_support::output(&mut strace);
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Failure::new(format!("strace: {why}")));
    }
    let mut calls = parse(&String::from_utf8_lossy(&output.stdout));
    if calls.is_empty() {
        return Err(Failure::new("strace counted nothing"));
    }
    calls.sort_by_key(|(name, count)| (u64::MAX - count, name.clone()));
    Ok(calls)
}

/// Parses the summary of strace: a name and a number a line, between two lines of dashes.
fn parse(summary: &str) -> Vec<(String, u64)> {
    let rule = |line: &&str| line.starts_with("---");
    summary
        .lines()
        .skip_while(|line| !rule(line))
        .skip(1)
        .take_while(|line| !rule(line))
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn strace_summary_is_parsed_without_head_and_total() {
        let summary = "\
syscall              calls
---------------- ---------
process_vm_writev         2
read                     17
---------------- ---------
total                    19
";
        let calls = [("process_vm_writev".to_owned(), 2), ("read".to_owned(), 17)];
        assert_eq!(parse(summary), calls);
        assert_eq!(parse("nothing of the kind\n"), []);
    }
}
