//! The time stamp counter (TSC) of the processors.

/// Reads the counter.
pub(crate) fn now() -> u64 {
    // SAFETY: every x86-64 processor has this instruction. Where prctl(PR_SET_TSC) forbids it, not
    // even the vDSO's clock_gettime(2) works, which the standard library calls.
    unsafe { std::arch::x86_64::_rdtsc() }
}
