//! How many files we may have open.

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

/// Raises our limit of open files to `wanted`, as far as we may. What we start afterwards inherits the limit.
pub(crate) fn raise_limit(wanted: rlim_t) {
    if let Ok((now, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // If it cannot be raised, what needs more files fails, with the reason.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most.min(wanted).max(now), most);
    }
}
