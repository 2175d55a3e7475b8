//! The scheduling priority of this thread.

/// The best ordinary priority.
const BEST_NICE: i32 = -20;

/// Gives this thread a real-time priority, or else the best ordinary one, as far as that is permitted. Threads and
/// programs that it starts inherit only the latter.
pub(crate) fn make_real_time() {
    let param = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` outlives the call; 0 is the calling thread.
    let is_real_time = unsafe { libc::sched_setscheduler(0, policy, &raw const param) } == 0;
    if !is_real_time {
        set_nice(BEST_NICE);
    }
}

/// Gives this thread the best ordinary priority, if that is permitted; threads and programs that it starts inherit it.
/// Returns the nice value that it had before.
pub(crate) fn make_best() -> i32 {
    // SAFETY: takes no pointer; 0 is the calling thread, which is there.
    let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    set_nice(BEST_NICE);
    before
}

/// Sets the nice value of this thread, if that is permitted, as it always is if it is higher than before.
pub(crate) fn set_nice(nice: i32) {
    // SAFETY: takes no pointer; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}
