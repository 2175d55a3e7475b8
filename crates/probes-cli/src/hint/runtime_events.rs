//! Hints about runtime events: that a process does not write, or that are not known.

use std::path::Path;

use probes_lib::RuntimeEventsError;

/// What to do about the events of an OCaml that is not known.
const LATER_TOOL: &str = "a later version of ocaml-probes may know them";

/// The hint about events that a process does not write, or that are not known.
pub(super) fn of_runtime_events(kind: &RuntimeEventsError, pid: Option<i32>) -> Option<String> {
    if let (RuntimeEventsError::UnknownVersion { .. }, None) = (kind, pid) {
        return Some(LATER_TOOL.to_owned());
    }
    let pid = pid?;
    let instead = format!(
        "`ocaml-probes gc -pid {pid}` times the functions of its collector, if they have symbols"
    );
    match kind {
        RuntimeEventsError::NotOn => Some(format!(
            "start it with OCAML_RUNTIME_EVENTS_START=1 in its environment; `ocaml-probes gc -pid {pid}` switches them on while it \
             observes it"
        )),
        RuntimeEventsError::CannotSwitchOn { .. } => Some(format!(
            "start it with OCAML_RUNTIME_EVENTS_START=1 in its environment, and with OCAML_RUNTIME_EVENTS_DIR if it cannot \
             create files where it works; {instead}"
        )),
        RuntimeEventsError::NoRoom { .. } => Some(
            "make room there, or start it with OCAML_RUNTIME_EVENTS_DIR in its environment, a directory on another disk"
                .to_owned(),
        ),
        RuntimeEventsError::Idle => Some(
            "a program that does not run, or is in C code all the time, does not collect either: nothing was changed"
                .to_owned(),
        ),
        RuntimeEventsError::UnknownEvent { .. } => Some(format!(
            "`ocaml-probes count -pid {pid} -events all -for 5s` shows which events occur; a program registers its own \
             before it writes them"
        )),
        RuntimeEventsError::UnknownVersion { .. } => Some(format!("{LATER_TOOL}; {instead}")),
        RuntimeEventsError::Ocaml4 | RuntimeEventsError::NoVersion => Some(instead),
        _ => None,
    }
}

/// The hint of `gc` about a program that writes no runtime events when it is started.
pub(crate) const ANOTHER_PROGRAM: &str = "only programs of OCaml 5 write them: is it a script, or a program that executes another? give the pid of the OCaml \
     process with -pid";

/// What to do about a program that writes no runtime events when it is started.
pub(crate) fn without_events(program: &Path) -> String {
    format!(
        "only programs of OCaml 5 write them; `ocaml-probes gc -prog {}` times the functions of the collector of OCaml 4, if they have symbols",
        program.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_version_says_what_to_do() {
        let unknown = RuntimeEventsError::UnknownVersion {
            version: "5.9.0".to_owned(),
        };
        assert_eq!(
            unknown.to_string(),
            "was compiled by OCaml 5.9.0, whose runtime events this ocaml-probes does not know: it knows those of OCaml \
             5.0 to 5.4"
        );
        assert_eq!(
            of_runtime_events(&unknown, None).as_deref(),
            Some(LATER_TOOL)
        );
        let with_pid = of_runtime_events(&unknown, Some(7)).unwrap();
        assert!(with_pid.starts_with(LATER_TOOL) && with_pid.contains("gc -pid 7"));
    }
}
