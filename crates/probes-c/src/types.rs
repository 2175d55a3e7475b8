//! The constants and structures of probes.h.

use std::ffi::c_char;

/// The probe is disabled: its sites do not call its handler.
pub const PROBES_DISABLED: i32 = 0;
/// The probe is enabled: its sites call its handler.
pub const PROBES_ENABLED: i32 = 1;
/// The sites of the probe and its counters disagree: an update was interrupted, or an object that also
/// has the probe was loaded later. probes_set() repairs it.
pub const PROBES_INCONSISTENT: i32 = 2;
/// The state could not be read.
pub const PROBES_FAILED: i32 = -1;

/// The state of one probe.
#[repr(C)]
pub struct ProbesState {
    /// Its name.
    pub name: *const c_char,
    /// PROBES_DISABLED, PROBES_ENABLED or PROBES_INCONSISTENT.
    pub state: i32,
    /// Its counter, the smallest if it has several: how many enables are in effect, of this program and of tools.
    pub counter: u16,
}

/// The states of all probes.
#[repr(C)]
pub struct ProbesStates {
    /// The number of probes.
    pub len: usize,
    /// `len` states, sorted by name.
    pub probes: *const ProbesState,
}
