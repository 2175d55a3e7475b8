//! The only modules of this crate with `unsafe` code: raw system calls and instructions behind safe functions. None of
//! them depends on probes.

#![allow(unsafe_code)]

pub(crate) mod code_page;
pub(crate) mod fork;
pub(crate) mod heap;
pub(crate) mod kcmp;
pub(crate) mod loaded;
pub(crate) mod packet_socket;
pub(crate) mod perf;
pub(crate) mod pidfd;
pub(crate) mod priority;
pub(crate) mod ptrace;
pub(crate) mod robust_list;
pub(crate) mod signals;
pub(crate) mod spawn;
pub(crate) mod tsc;
pub(crate) mod xattr;

/// Precedes a system call that the chaos suite can make fail: the calling function then returns the
/// error of that call. Expands to nothing without the feature `fault-injection`.
macro_rules! fault_point {
    ($call:ident) => {
        #[cfg(feature = "fault-injection")]
        $crate::faults::before($crate::faults::Call::$call)?;
    };
}

/// Precedes a write of `$len` units that succeeds as a whole or fails, and can be made to fail
/// after `$write(part)` has written the first `part` of them. Expands to nothing without the feature `fault-injection`.
macro_rules! fault_point_within {
    ($call:ident, $len:expr, $write:expr) => {
        #[cfg(feature = "fault-injection")]
        {
            use $crate::faults::{Call, before_write, cut_short};
            if let Some(part) = before_write(Call::$call, $len)? {
                let _ = $write(part);
                cut_short(Call::$call)?;
            }
        }
    };
}

/// Precedes a write that returns how much it has written, and can be made to write a part only, or
/// to fail. Expands to nothing without the feature `fault-injection`.
macro_rules! short_write_point {
    ($call:ident, $len:expr, $write:expr) => {
        #[cfg(feature = "fault-injection")]
        {
            use $crate::faults::{Call, before_write, cut_short, made_in_part};
            match before_write(Call::$call, $len)? {
                Some(0) => cut_short(Call::$call)?,
                Some(part) => return made_in_part(Call::$call, $write(part)?),
                None => {}
            }
        }
    };
}

pub(crate) use {fault_point, fault_point_within, short_write_point};
