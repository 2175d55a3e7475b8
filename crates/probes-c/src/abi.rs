//! The functions of probes.h, and the only module of this crate with `unsafe` code. It checks every
//! argument from C; no panic unwinds into C.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use probes_lib::{Action, Actions, Selector, Target};

use crate::list::{List, number};
use crate::types::{PROBES_FAILED, ProbesStates};

/// The version of this header: a library whose probes_abi() returns another number must not be used with
/// it. The number changes if something here is changed or removed, not if something is added.
pub const PROBES_ABI: u32 = 1;

/// The probes of this process, opened by probes_current().
pub struct Probes(Target);

/// Returns the version of the interface of this library: PROBES_ABI of the header that it was built
/// with.
#[unsafe(no_mangle)]
pub extern "C" fn probes_abi() -> u32 {
    PROBES_ABI
}

/// Opens the probes of this process: of the program, and of all objects that are loaded when one of the
/// functions below is called. Returns NULL if there are none, or if /proc is missing or not readable.
///
/// A child after fork() has probes of its own, and must open them itself: in the child, every
/// function that is given probes opened by the parent fails.
///
/// # Safety
///
/// `error` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_current(error: *mut *mut c_char) -> *mut Probes {
    let open = || {
        let target = Target::current().map_err(text)?;
        Ok(Box::into_raw(Box::new(Probes(target))))
    };
    // SAFETY: the same as for this function.
    unsafe { or_set_error(error, ptr::null_mut(), open) }
}

/// Frees the result of probes_current(); the probes keep their states. Does nothing with NULL.
///
/// # Safety
///
/// `probes` is NULL or from probes_current(), and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_free(probes: *mut Probes) {
    if !probes.is_null() {
        // SAFETY: it was a box, and has no other owner.
        drop(unsafe { Box::from_raw(probes) });
    }
}

/// Adds one to the counter of the probe `name`, and enables its sites if it was disabled. Returns
/// false if that fails; then nothing has changed, unless the message says what has.
///
/// # Safety
///
/// `probes` is NULL or from probes_current(), `name` is NULL or a NUL-terminated string, and
/// `error` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_enable(
    probes: *const Probes,
    name: *const c_char,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function.
    unsafe { update(probes, Action::Enable, name, named, false, error) }
}

/// Subtracts one from the counter of the probe `name`, and disables its sites when the counter
/// reaches 0. Returns false if that fails, as it does if the probe is disabled.
///
/// # Safety
///
/// Same as for probes_enable().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_disable(
    probes: *const Probes,
    name: *const c_char,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function.
    unsafe { update(probes, Action::Disable, name, named, false, error) }
}

/// Same as probes_enable(), for all probes whose name the regular expression (syntax of Rust's
/// regex crate) matches from its start. Fails if there is no such probe.
///
/// # Safety
///
/// Same as for probes_enable().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_enable_regexp(
    probes: *const Probes,
    regexp: *const c_char,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function.
    unsafe { update(probes, Action::Enable, regexp, matching, false, error) }
}

/// Same as probes_disable(), for all probes whose name the regular expression matches from its
/// start; probes that are disabled already are skipped.
///
/// # Safety
///
/// Same as for probes_enable().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_disable_regexp(
    probes: *const Probes,
    regexp: *const c_char,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function.
    unsafe { update(probes, Action::Disable, regexp, matching, false, error) }
}

/// Same as probes_enable(), for all probes.
///
/// # Safety
///
/// `probes` is NULL or from probes_current(), and `error` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_enable_all(probes: *const Probes, error: *mut *mut c_char) -> bool {
    // SAFETY: the same as for this function; the literal is a string.
    unsafe { update(probes, Action::Enable, c"".as_ptr(), every, false, error) }
}

/// Same as probes_disable(), for all probes; probes that are disabled already are skipped.
///
/// # Safety
///
/// Same as for probes_enable_all().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_disable_all(
    probes: *const Probes,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function; the literal is a string.
    unsafe { update(probes, Action::Disable, c"".as_ptr(), every, false, error) }
}

/// Sets the counters of the probe `name` to 1 or 0 and enables or disables all its sites, whatever
/// their state: this repairs a probe that is PROBES_INCONSISTENT, for example because an object
/// that also has a probe of this name was loaded while the probe was enabled.
///
/// # Safety
///
/// Same as for probes_enable().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_set(
    probes: *const Probes,
    name: *const c_char,
    on: bool,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function.
    unsafe { update(probes, action_of(on), name, named, true, error) }
}

/// Same as probes_set(), for all probes.
///
/// # Safety
///
/// Same as for probes_enable_all().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_set_all(
    probes: *const Probes,
    on: bool,
    error: *mut *mut c_char,
) -> bool {
    // SAFETY: the same as for this function; the literal is a string.
    unsafe { update(probes, action_of(on), c"".as_ptr(), every, true, error) }
}

/// Returns the state of the probe `name`: PROBES_DISABLED, PROBES_ENABLED, PROBES_INCONSISTENT, or PROBES_FAILED.
///
/// # Safety
///
/// Same as for probes_enable().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_state(
    probes: *const Probes,
    name: *const c_char,
    error: *mut *mut c_char,
) -> i32 {
    let state = || {
        // SAFETY: the same as for this function.
        let (target, name) = unsafe { (target(probes)?, string(name)?) };
        let states = target.states().map_err(text)?;
        match states.probe(name) {
            Some(probe) => Ok(number(probe.state())),
            None => Err(format!("no probe \"{name}\"")),
        }
    };
    // SAFETY: the same as for this function.
    unsafe { or_set_error(error, PROBES_FAILED, state) }
}

/// Returns the states of all probes, to be freed with probes_states_free(), or NULL if they cannot be read.
///
/// # Safety
///
/// Same as for probes_enable_all().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_states(
    probes: *const Probes,
    error: *mut *mut c_char,
) -> *mut ProbesStates {
    let states = || {
        // SAFETY: the same as for this function.
        let states = unsafe { target(probes)? }.states().map_err(text)?;
        let list = List::of(&states).map_err(text)?;
        Ok(Box::into_raw(Box::new(list)).cast())
    };
    // SAFETY: the same as for this function.
    unsafe { or_set_error(error, ptr::null_mut(), states) }
}

/// Frees the result of probes_states(). Does nothing with NULL.
///
/// # Safety
///
/// `states` is NULL or from probes_states(), and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_states_free(states: *mut ProbesStates) {
    if !states.is_null() {
        // SAFETY: it is the first field of a list that was a box, and has no other owner.
        drop(unsafe { Box::from_raw(states.cast::<List>()) });
    }
}

/// Frees an error message that a function has set through `error`. Does nothing with NULL.
///
/// # Safety
///
/// `error` is NULL or was set by one of these functions, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probes_error_free(error: *mut c_char) {
    if !error.is_null() {
        // SAFETY: it was made by `or_set_error`, and has no other owner.
        drop(unsafe { CString::from_raw(error) });
    }
}

fn action_of(on: bool) -> Action {
    if on { Action::Enable } else { Action::Disable }
}

fn named(name: &str) -> Result<Selector, String> {
    Ok(Selector::name(name))
}

fn matching(regexp: &str) -> Result<Selector, String> {
    Selector::regexp(regexp).map_err(text)
}

fn every(_: &str) -> Result<Selector, String> {
    Ok(Selector::All)
}

/// Applies `action` to the probes that `selector` selects by `which`.
///
/// # Safety
///
/// Same as for `probes_enable`.
unsafe fn update(
    probes: *const Probes,
    action: Action,
    which: *const c_char,
    selector: fn(&str) -> Result<Selector, String>,
    force: bool,
    error: *mut *mut c_char,
) -> bool {
    let update = || {
        // SAFETY: the same as for this function.
        let (target, which) = unsafe { (target(probes)?, string(which)?) };
        let actions = Actions::of(action, selector(which)?).force(force);
        target.update(&actions).map(|_| true).map_err(text)
    };
    // SAFETY: the same as for this function.
    unsafe { or_set_error(error, false, update) }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

/// # Safety
///
/// `probes` is NULL or from `probes_current`, and is valid while the result is used.
unsafe fn target<'p>(probes: *const Probes) -> Result<&'p Target, String> {
    // SAFETY: the same as for this function.
    let probes = unsafe { probes.as_ref() };
    let opened = probes.map(|Probes(target)| target);
    opened
        .ok_or_else(|| "the probes are NULL: probes_current() was not called, or failed".to_owned())
}

/// # Safety
///
/// `string` is NULL or a NUL-terminated string, and is valid while the result is used.
unsafe fn string<'s>(string: *const c_char) -> Result<&'s str, String> {
    if string.is_null() {
        return Err("the name is NULL".to_owned());
    }
    // SAFETY: the same as for this function.
    let string = unsafe { CStr::from_ptr(string) };
    let text = string.to_str();
    text.map_err(|_| {
        format!(
            "the name \"{}\" is not UTF-8",
            string.to_bytes().escape_ascii()
        )
    })
}

/// Returns the result of `work`. If it fails or panics, sets the message and returns `failed`.
///
/// # Safety
///
/// `error` is NULL or can be written.
unsafe fn or_set_error<T>(
    error: *mut *mut c_char,
    failed: T,
    work: impl FnOnce() -> Result<T, String>,
) -> T {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let message = match outcome {
        Ok(Ok(done)) => return done,
        Ok(Err(message)) => message,
        Err(_) => "internal error: libprobes panicked".to_owned(),
    };
    if !error.is_null() {
        let message = CString::new(message.replace('\0', "\\0")).unwrap_or_default();
        // SAFETY: the same as for this function.
        unsafe { error.write(message.into_raw()) };
    }
    failed
}
