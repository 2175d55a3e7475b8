//! The states of all probes in C's representation.

use std::ffi::{CString, NulError};

use probes_lib::{ProbeStates, State};

use crate::types::{
    PROBES_DISABLED, PROBES_ENABLED, PROBES_INCONSISTENT, ProbesState, ProbesStates,
};

/// The allocation behind C's `ProbesStates *`: C sees only its first field.
#[repr(C)]
pub(crate) struct List {
    pub(crate) states: ProbesStates,
    /// The rows that `states` points to.
    _rows: Box<[ProbesState]>,
    /// The names that the rows point to.
    _names: Box<[CString]>,
}

impl List {
    /// # Errors
    ///
    /// Never: the names in notes end at a NUL.
    pub(crate) fn of(states: &ProbeStates) -> Result<List, NulError> {
        let names: Box<[CString]> = states
            .probes()
            .map(|probe| CString::new(probe.name()))
            .collect::<Result<_, _>>()?;
        let rows: Box<[ProbesState]> = states
            .probes()
            .zip(&names)
            .map(|(probe, name)| ProbesState {
                name: name.as_ptr(),
                state: number(probe.state()),
                counter: probe.counter(),
            })
            .collect();
        Ok(List {
            states: ProbesStates {
                len: rows.len(),
                probes: rows.as_ptr(),
            },
            _rows: rows,
            _names: names,
        })
    }
}

/// Returns the constant of a state.
pub(crate) fn number(state: State) -> i32 {
    match state {
        State::Disabled => PROBES_DISABLED,
        State::Enabled => PROBES_ENABLED,
        State::Inconsistent => PROBES_INCONSISTENT,
    }
}
