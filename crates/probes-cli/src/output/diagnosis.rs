//! What a machine and a process allow, in one shape for all formats. The field names are those of the JSON output.

use std::fmt::Write;

use probes_lib::{Check, Diagnosis};
use serde::Serialize;

use super::format::{Format, VERSION, json};
use super::table::wrapped_table;
use crate::failure::Failure;
use crate::text::Escaped;

/// The checks, and which commands work.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "diagnosis")]
pub(crate) struct DiagnosisReport {
    version: u32,
    pid: Option<i32>,
    program: Option<String>,
    checks: Vec<CheckView>,
    commands: Vec<CommandAnswer>,
}

#[derive(Debug, Serialize)]
struct CheckView {
    name: &'static str,
    result: &'static str,
    finding: String,
    hint: Option<String>,
}

/// Whether a command has what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ability {
    /// It has everything.
    Works,
    /// Only a part of what it does is possible: which part, or why.
    Limited(String),
    /// It does not work: why.
    Fails(String),
}

/// Whether a command works, and why not.
#[derive(Debug, Serialize)]
pub(crate) struct CommandAnswer {
    name: &'static str,
    result: CommandResult,
    /// Without duplicates.
    reasons: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
enum CommandResult {
    Works,
    Limited,
    Fails,
}

impl CommandAnswer {
    /// A command that works, until [`CommandAnswer::add`] adds that something is missing.
    pub(crate) fn of(name: &'static str) -> CommandAnswer {
        CommandAnswer {
            name,
            result: CommandResult::Works,
            reasons: Vec::new(),
        }
    }

    /// Adds whether one of the things that the command needs is there. Only the reasons of the worst result are kept:
    /// if it does not work, its limits do not matter.
    pub(crate) fn add(&mut self, ability: Ability) {
        let (result, reason) = match ability {
            Ability::Works => return,
            Ability::Limited(reason) => (CommandResult::Limited, reason),
            Ability::Fails(reason) => (CommandResult::Fails, reason),
        };
        if result > self.result {
            self.result = result;
            self.reasons.clear();
        }
        if result == self.result && !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }

    fn why(&self) -> String {
        Escaped(&self.reasons.join("; ")).to_string()
    }

    pub(crate) fn fails(&self) -> bool {
        self.result == CommandResult::Fails
    }
}

impl DiagnosisReport {
    /// `hint` says what to do about a check.
    pub(crate) fn of(
        diagnosis: &Diagnosis,
        hint: impl Fn(&Check) -> Option<String>,
        commands: Vec<CommandAnswer>,
    ) -> DiagnosisReport {
        let checks = diagnosis.checks().iter().map(|check| CheckView {
            name: check.kind().name(),
            result: check.result().into(),
            finding: check.finding().to_owned(),
            hint: hint(check),
        });
        DiagnosisReport {
            version: VERSION,
            pid: diagnosis.pid(),
            program: diagnosis.program().map(|it| it.display().to_string()),
            checks: checks.collect(),
            commands,
        }
    }

    pub(crate) fn has_failed_commands(&self) -> bool {
        let mut commands = self.commands.iter();
        commands.any(CommandAnswer::fails)
    }

    /// `is_terminal`: whether a terminal shows it.
    pub(crate) fn text(&self, format: Format, is_terminal: bool) -> Result<String, Failure> {
        match format {
            Format::Plain => Ok(self.plain()),
            Format::Table => Ok(self.table(is_terminal)),
            Format::Json => json(self),
        }
    }

    fn plain(&self) -> String {
        let mut text = String::new();
        for check in &self.checks {
            let CheckView {
                name,
                result,
                finding,
                ..
            } = check;
            // Writing to a String cannot fail.
            let _ = writeln!(text, "check {name} {result} {}", Escaped(finding));
            if let Some(hint) = &check.hint {
                let _ = writeln!(text, "hint {name} {}", Escaped(hint));
            }
        }
        for command in &self.commands {
            let result: &str = command.result.into();
            let line = format!("command {} {result} {}", command.name, command.why());
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    /// A row for each check, followed by one for its hint, if it has one; then a row for each command.
    fn table(&self, is_terminal: bool) -> String {
        let rows = self.checks.iter().flat_map(|check| {
            let row = vec![
                check.name.to_owned(),
                check.result.to_owned(),
                Escaped(&check.finding).to_string(),
            ];
            let hint = check.hint.as_ref().map(|hint| {
                vec![
                    String::new(),
                    String::new(),
                    format!("hint: {}", Escaped(hint)),
                ]
            });
            [Some(row), hint].into_iter().flatten()
        });
        let checks = wrapped_table(is_terminal, &["check", "result", "finding"], rows);
        let rows = self.commands.iter().map(|command| {
            let result: &str = command.result.into();
            vec![command.name.to_owned(), result.to_owned(), command.why()]
        });
        checks + "\n" + &wrapped_table(is_terminal, &["command", "result", "why"], rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_fails_for_the_worst_reasons() {
        let mut answer = CommandAnswer::of("count");
        answer.add(Ability::Works);
        assert_eq!(answer.result, CommandResult::Works);
        answer.add(Ability::Limited("slow".to_owned()));
        answer.add(Ability::Limited("slow".to_owned()));
        assert_eq!(answer.reasons, ["slow"]);
        answer.add(Ability::Fails("traced".to_owned()));
        answer.add(Ability::Limited("slower".to_owned()));
        assert_eq!(answer.result, CommandResult::Fails);
        assert_eq!(answer.reasons, ["traced"]);
    }
}
