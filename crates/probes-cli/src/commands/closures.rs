//! Warns that other processes may refuse closures that a process marshals.

use probes_lib::CodeDigest;

use crate::hint;
use crate::messages::Messages;
use crate::output::WarningKind;

/// Warns if closures that the process marshals from now on are refused, or if that cannot be known.
pub(super) fn warn_of_refused_closures(messages: &Messages, pid: i32, digest: CodeDigest) {
    let what = match digest {
        CodeDigest::Pending => {
            "if the OCaml runtime computes the digest of the code of the process while that is patched, other processes of \
             the program will refuse closures that it marshals, and it will refuse theirs"
        }
        CodeDigest::OfPatchedCode => {
            "the digest of the OCaml code of the process was computed while that was patched: until the process exits, other \
             processes of the program refuse closures that it marshals, and it refuses theirs"
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
