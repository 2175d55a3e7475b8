//! Resets the signals that a test binary inherits in an unusual state: ignored (under nohup, in a
//! script's background job, or by a `trap ""` of a shell) or blocked (by a careless parent).
//! Otherwise, the programs under test would inherit that state in turn.
//!
//! execve(2): "the dispositions of any signals that are being caught are reset to the default ...
//! ignored signals ... are left unchanged". So what is ignored is caught instead, by a handler that
//! does nothing: such a signal still does not end a test binary, and its children start with the default.
#![allow(unsafe_code, reason = "sigaction(2) has no safe form")]

use nix::libc::c_int;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// Executed by the loader before `main`, while there is one thread.
#[used]
// SAFETY: the section is an array of such functions, and this one calls only system calls.
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = normalize;

extern "C" fn normalize() {
    extern "C" fn nothing(_: c_int) {}

    let catch = SigAction::new(
        SigHandler::Handler(nothing),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in Signal::iterator() {
        // SAFETY: the handler does nothing, and no other thread changes dispositions meanwhile.
        // Those of SIGKILL and SIGSTOP cannot be changed, and are never ignored.
        unsafe {
            if let Ok(old) = sigaction(signal, &catch) {
                if !matches!(old.handler(), SigHandler::SigIgn) {
                    let _ = sigaction(signal, &old);
                }
            }
        }
    }
    let _ = SigSet::empty().thread_set_mask();
}
