//! Which processes are meant, by their pids and by the names of their programs.

use std::fs;

use probes_lib::{Error, ErrorKind, survey};

use super::Failure;
use crate::messages::Messages;
use crate::request::Whom;

/// The processes that are meant, each once.
pub(super) fn pids(whom: &Whom, messages: &Messages) -> Result<Vec<i32>, Failure> {
    let mut pids = whom.pids.clone();
    let Some(name) = &whom.name else {
        return Ok(pids);
    };
    let survey = survey().map_err(Failure::Survey)?;
    for process in survey.processes {
        let program = process.program.file_name().unwrap_or_default();
        // As all regular expressions here, it matches from the start: a match there is found first.
        let found = name
            .find(&program.to_string_lossy())
            .map(|found| found.start());
        if found == Some(0) && !pids.contains(&process.pid) {
            pids.push(process.pid);
        }
    }
    for pid in survey.denied {
        // As far as the kernel tells names: 15 characters.
        let called = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if name.find(&called).map(|found| found.start()) == Some(0) {
            let called = called.trim_end();
            messages.note(&format!("{pid} ({called}) could not be looked into"));
        }
    }
    if pids.is_empty() {
        return Err(Failure::NobodyCalled(name.as_str().to_owned()));
    }
    Ok(pids)
}

/// Whether a process that was picked by its name is not there any more: nobody has asked for it.
pub(super) fn has_ended_since(whom: &Whom, pid: i32, error: &Error) -> bool {
    let has_ended = matches!(
        error.kind(),
        ErrorKind::NoSuchProcess { .. } | ErrorKind::Exited { .. } | ErrorKind::Zombie { .. }
    );
    has_ended && !whom.pids.contains(&pid)
}
