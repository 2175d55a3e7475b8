//! The objects that the dynamic loader has loaded into our own process, and a lock that keeps them
//! loaded.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use libc::dl_phdr_info;

use crate::address::LoadBias;

/// A closure to call under the loader's lock, and its result.
struct LockedCall<'w, T> {
    work: &'w mut dyn FnMut() -> T,
    result: Option<Result<T, Box<dyn Any + Send>>>,
}

/// Calls `work` once, while no other thread can unload an object: within dl_iterate_phdr(3), during
/// which glibc holds the lock that dlclose(3) takes to unmap. (musl never unmaps.)
pub(crate) fn while_nothing_is_unloaded<T>(mut work: impl FnMut() -> T) -> T {
    let mut call = LockedCall {
        work: &mut work,
        result: None,
    };
    // A thread's first use of its thread-local storage takes a lock of the loader. dlopen(3) takes the
    // same lock first, and then the lock of dl_iterate_phdr. The reverse order could deadlock, so
    // this thread uses its storage before the call.
    let _ = thread::current();
    // SAFETY: `run` has the required type and casts the pointer back to the type of `call`, which
    // lives, and which no other code uses, until dl_iterate_phdr returns.
    unsafe { libc::dl_iterate_phdr(Some(run::<T>), (&raw mut call).cast()) };
    match call.result {
        Some(Ok(result)) => result,
        Some(Err(panic)) => resume_unwind(panic),
        // It was not called: there is no object that could be unloaded.
        None => work(),
    }
}

/// Called once, for the first object: the program.
unsafe extern "C" fn run<T>(_object: *mut dl_phdr_info, _len: usize, call: *mut c_void) -> c_int {
    // SAFETY: it is what `while_nothing_is_unloaded` has passed, with the same type.
    let call = unsafe { &mut *call.cast::<LockedCall<'_, T>>() };
    // A panic must not unwind through the loader's own code.
    call.result = Some(catch_unwind(AssertUnwindSafe(&mut *call.work)));
    1
}

/// Returns the load bias of each object that is mapped completely, except those in another namespace of
/// the loader than ours (dlmopen(3)).
pub(crate) fn load_biases() -> Vec<LoadBias> {
    let mut loaded: Vec<LoadBias> = Vec::new();
    // SAFETY: `add` has the required type and casts the pointer back to the type of `loaded`, which
    // lives, and which no other code uses, until dl_iterate_phdr returns.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut loaded).cast()) };
    loaded
}

unsafe extern "C" fn add(object: *mut dl_phdr_info, _len: usize, loaded: *mut c_void) -> c_int {
    // SAFETY: the first pointer is the loader's, the second is what `load_biases` has passed.
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
