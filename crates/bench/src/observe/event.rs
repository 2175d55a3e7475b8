//! [`Event`]: a probe as an event of perf.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};

use test_support::Guard;

use crate::cost::SET_BY_CARGO;
use crate::failure::{Failure, Result};

/// An event that perf can count. The kernel has it, for all users, until it is removed.
pub(super) struct Event {
    name: String,
    cache: PathBuf,
    remover: Guard,
    /// The input of the shell [`ADD_AND_REMOVE`], which removes the event when this is closed.
    input: Option<ChildStdin>,
}

/// Adds an event, and removes it when the input ends. A shell does this, so that the event is
/// removed even if this program is killed. If an event of that name exists already, perf chooses
/// another name.
const ADD_AND_REMOVE: &str = r#"
trap '' HUP INT TERM
perf --buildid-dir "$1" buildid-cache --add "$2"
output=$(perf --buildid-dir "$1" probe "$3" 2>&1)
event=$(echo "$output" | sed -n 's/^ *\(sdt_[^ ]*\) .*(on .*/\1/p')
if [ -z "$event" ]; then
    echo "failed $(echo "$output" | tail -n 1)"
    exit
fi
echo "added $event"
read -r _
perf probe --quiet --del "$event"
"#;

impl Event {
    /// Adds the event of a file's probe, or returns why that is not possible. `cache` is a directory for
    /// perf's files.
    pub(super) fn add(
        file: &Path,
        probe: &str,
        cache: &Path,
    ) -> Result<std::result::Result<Event, String>> {
        let perf = Command::new("perf").arg("--version").output();
        if perf.is_err() {
            return Ok(Err("perf is not installed".to_owned()));
        }
        let event = format!("sdt_ocaml_2:{}", probe);
        let mut shell = Command::new("sh");
        shell.args(["-c", ADD_AND_REMOVE, "sh"]);
        shell.args([cache, file]).arg(event);
        shell.env_remove(SET_BY_CARGO).stderr(Stdio::null());
        let mut remover = Guard::spawn(shell.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let input = remover.child().stdin.take();
        let mut line = String::new();
        if let Some(output) = remover.child().stdout.take() {
            let read = BufReader::new(output).read_line(&mut line);
            read.map_err(Failure::of("cannot add an event to perf"))?;
        }
        Ok(match line.trim_end().split_once(' ') {
            Some(("added", name)) => Ok(Event {
                name: name.to_owned(),
                cache: cache.to_owned(),
                remover,
                input,
            }),
            _ => Err(format!(
                "perf probe: {}",
                line.trim_start_matches("failed").trim()
            )),
        })
    }

    /// Returns a command that counts the event until the command is interrupted.
    pub(super) fn count(&self, pid: i32) -> Command {
        let mut command = Command::new("perf");
        command.arg("--buildid-dir").arg(&self.cache);
        command.args(["stat", "-e", &self.name, "-p", &pid.to_string()]);
        command
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.input = None;
        self.remover.wait();
    }
}
