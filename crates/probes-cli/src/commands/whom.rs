//! Which processes are meant, by their pids and by the names of their programs.

use probes_lib::survey;

use super::Failure;
use crate::request::Whom;

/// The processes that are meant, each once.
pub(super) fn pids(whom: &Whom) -> Result<Vec<i32>, Failure> {
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
    if pids.is_empty() {
        return Err(Failure::NobodyCalled(name.as_str().to_owned()));
    }
    Ok(pids)
}
