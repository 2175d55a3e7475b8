//! Which processes an answer is about, in the shape of the JSON output.

use std::borrow::Cow;

use probes_lib::Target;
use serde::Serialize;

/// One process, or several.
#[derive(Debug, Serialize)]
pub(super) struct Subjects<'t> {
    /// `None` if there are several processes; so is `program`.
    pub(super) pid: Option<i32>,
    program: Option<Cow<'t, str>>,
    /// Empty if there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    processes: Vec<SubjectProcess<'t>>,
}

/// One of several processes.
#[derive(Debug, Serialize)]
struct SubjectProcess<'t> {
    pid: i32,
    program: Cow<'t, str>,
}

impl<'t> Subjects<'t> {
    pub(super) fn of(targets: &'t [Target]) -> Subjects<'t> {
        if let [target] = targets {
            return Subjects {
                pid: Some(target.pid()),
                program: Some(target.program().to_string_lossy()),
                processes: Vec::new(),
            };
        }
        let processes = targets.iter().map(|target| SubjectProcess {
            pid: target.pid(),
            program: target.program().to_string_lossy(),
        });
        Subjects {
            pid: None,
            program: None,
            processes: processes.collect(),
        }
    }
}
