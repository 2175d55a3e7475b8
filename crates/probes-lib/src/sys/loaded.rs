//! What the dynamic loader has loaded into our own process, and that it stays.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use libc::dl_phdr_info;

use crate::address::LoadBias;

/// What is called, and what came of it.
struct Errand<'w, T> {
    work: &'w mut dyn FnMut() -> T,
    outcome: Option<Result<T, Box<dyn Any + Send>>>,
}

/// Calls `work` once, while no other thread can load or unload an object: within dl_iterate_phdr(3),
/// during which glibc holds the lock that dlclose(3) takes to unmap. (musl never unmaps.)
pub(crate) fn while_nothing_is_unloaded<T>(mut work: impl FnMut() -> T) -> T {
    let mut errand = Errand {
        work: &mut work,
        outcome: None,
    };
    // A thread's first use of its thread-local storage takes another lock of the loader's, that of
    // dlopen(3), under which that one takes ours: so this thread has it first.
    let _ = thread::current();
    // SAFETY: `run` has the type that is asked for, and takes the pointer for what it is: the errand
    // lives, and nobody else uses it, until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(run::<T>), (&raw mut errand).cast()) };
    match errand.outcome {
        Some(Ok(result)) => result,
        Some(Err(panic)) => resume_unwind(panic),
        // There is no object at all that could be unloaded.
        None => work(),
    }
}

/// Called for the first object, which is the program, and for no other.
unsafe extern "C" fn run<T>(_object: *mut dl_phdr_info, _len: usize, errand: *mut c_void) -> c_int {
    // SAFETY: it is what `while_nothing_is_unloaded` has given, with the same type.
    let errand = unsafe { &mut *errand.cast::<Errand<'_, T>>() };
    // A panic must not unwind through the loader's own code.
    errand.outcome = Some(catch_unwind(AssertUnwindSafe(&mut *errand.work)));
    1
}

/// What is added to the addresses of each object that is loaded as a whole: those of which only a part
/// is mapped yet are not among them, nor those of another namespace than ours (dlmopen(3)).
pub(crate) fn loaded() -> Vec<LoadBias> {
    let mut loaded: Vec<LoadBias> = Vec::new();
    // SAFETY: `note` has the type that is asked for, and takes the pointer for what it is: a list that
    // lives, and that nobody else uses, until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut loaded).cast()) };
    loaded
}

unsafe extern "C" fn note(object: *mut dl_phdr_info, _len: usize, loaded: *mut c_void) -> c_int {
    // SAFETY: the first is the loader's, the second what `loaded` has given.
    let (object, loaded) = unsafe { (&*object, &mut *loaded.cast::<Vec<LoadBias>>()) };
    loaded.push(LoadBias(object.dlpi_addr));
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closure_runs_once_and_its_panic_propagates() {
        let mut times = 0;
        assert_eq!(
            while_nothing_is_unloaded(|| {
                times += 1;
                "done"
            }),
            "done"
        );
        assert_eq!(times, 1);
        let panic = catch_unwind(|| while_nothing_is_unloaded(|| panic!("within")));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"within"));
        // The lock is free again.
        assert_eq!(while_nothing_is_unloaded(|| 7), 7);
    }
}
