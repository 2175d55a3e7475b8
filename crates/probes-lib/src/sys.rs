//! The only modules with `unsafe` code: raw system calls and instructions behind safe functions. They
//! know nothing of processes with probes.

#![allow(unsafe_code)]

pub(crate) mod code_page;
pub(crate) mod fork;
pub(crate) mod loaded;
pub(crate) mod pidfd;
pub(crate) mod ptrace;
pub(crate) mod signals;
pub(crate) mod spawn;
pub(crate) mod ticks;

/// Precedes a system call that the chaos suite can make fail: returns its error. Expands to nothing
/// without the feature `fault-injection`.
macro_rules! can_fail {
    ($call:ident) => {
        #[cfg(feature = "fault-injection")]
        $crate::faults::before($crate::faults::Call::$call)?;
    };
}

/// Precedes a write of `$len` parts that succeeds as a whole or fails, and can be made to fail after
/// `$make(part)` has written a part of it.
macro_rules! can_fail_within {
    ($call:ident, $len:expr, $make:expr) => {
        #[cfg(feature = "fault-injection")]
        {
            use $crate::faults::{Call, before_write, cut_short};
            if let Some(part) = before_write(Call::$call, $len)? {
                let _ = $make(part);
                cut_short(Call::$call)?;
            }
        }
    };
}

/// Precedes a write that returns how much it has written.
macro_rules! can_end_early {
    ($call:ident, $len:expr, $make:expr) => {
        #[cfg(feature = "fault-injection")]
        {
            use $crate::faults::{Call, before_write, cut_short, made_in_part};
            match before_write(Call::$call, $len)? {
                Some(0) => cut_short(Call::$call)?,
                Some(part) => return made_in_part(Call::$call, $make(part)?),
                None => {}
            }
        }
    };
}

pub(crate) use {can_end_early, can_fail, can_fail_within};
