//! What is said about closures that a process marshals, which other processes may refuse.

use probes_lib::CodeDigest;

use crate::hint;
use crate::output::WarningKind;
use crate::say::Messages;

/// Warns if closures that the process marshals from now on are refused, or if that cannot be known.
pub(super) fn warn_of_refused_closures(messages: &Messages, pid: i32, digest: CodeDigest) {
    let what = match digest {
        CodeDigest::Pending => {
            "other processes of the program will refuse closures that it marshals, and it theirs, if it \
             first does so now: its OCaml code, of which a digest is computed then, has patched sites"
        }
        CodeDigest::OfPatchedCode => {
            "other processes of the program refuse closures that it marshals, and it theirs, until it exits: \
             the digest of its OCaml code was computed while sites in it were patched"
        }
        CodeDigest::Unknown => {
            "whether other processes of the program accept closures that it marshals cannot be known: its \
             OCaml runtime is none that is known"
        }
        _ => return,
    };
    messages.warning(
        WarningKind::ClosuresRefused,
        what,
        &hint::closures(pid, digest),
    );
}
