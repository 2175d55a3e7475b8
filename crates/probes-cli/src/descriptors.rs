//! How many files we may have open.

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

/// Enough for as many processes as a command is about: each of them takes several.
const OF_PROCESSES: rlim_t = 1 << 16;

/// Raises our limit of open files before running processes are opened. Commands that start a program do not call it
/// before: the program would inherit the limit.
pub(crate) fn raise_limit_for_processes() {
    raise_limit(OF_PROCESSES);
}

/// Raises our limit of open files to `wanted`, as far as we may. What we start afterwards inherits the limit.
pub(crate) fn raise_limit(wanted: rlim_t) {
    if let Ok((now, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // If it cannot be raised, what needs more files fails, with the reason.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most.min(wanted).max(now), most);
    }
}
