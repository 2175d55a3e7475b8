//! What is said about closures that a process marshals, which other processes may refuse.

use probes_lib::CodeDigest;

use crate::hint;
use crate::messages::Messages;
use crate::output::WarningKind;

/// Warns if closures that the process marshals from now on are refused, or if that cannot be known.
pub(super) fn warn_of_refused_closures(messages: &Messages, pid: i32, digest: CodeDigest) {
    let what = match digest {
        CodeDigest::Pending => {
            "other processes of the program will refuse closures that it marshals, and it will \
             refuse theirs, if its OCaml runtime computes the digest of its code while sites are \
             patched"
        }
        CodeDigest::OfPatchedCode => {
            "other processes of the program refuse closures that it marshals, and it theirs, until it exits: \
             the digest of its OCaml code was computed while sites in it were patched"
        }
        CodeDigest::Unknown => {
            "cannot tell whether other processes of the program accept closures that it marshals: \
             its OCaml runtime is not one that ocaml-probes knows"
        }
        _ => return,
    };
    messages.warning(
        WarningKind::ClosuresRefused,
        what,
        &hint::closures(pid, digest),
    );
}
