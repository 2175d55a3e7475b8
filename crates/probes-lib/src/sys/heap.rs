//! The memory that this process itself allocates, where it is limited.

/// Keeps all threads of this process on one heap. To be called before there is a second thread, and only by a program
/// whose threads allocate little, such as a command: it slows down others.
///
/// glibc otherwise gives each thread a heap for which it reserves 64 MiB of addresses. Where it cannot, because
/// addresses are limited (`ulimit -v`), each allocation of the thread takes pages of its own, and soon none are left.
///
/// ```
/// probes_lib::keep_one_heap();
/// ```
pub fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) changes only how later allocations are made.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
