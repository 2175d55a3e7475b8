//! What the kernel permits a profile of a process to record.

use std::time::Duration;

use super::refusal;
use super::switches::{SAMPLED_STACK, SwitchRecorder};
use crate::process::Process;
use crate::sys::perf::ClockSamples;

/// How often the kernel samples a thread in a second, at most. It takes no samples that are much closer.
const MAX_HZ: u32 = 10_000;

/// How often it is tried whether the kernel samples a thread.
const TRIED_HZ: u32 = 99;

/// Tries whether the kernel would record the waits of a process; if not, says why.
pub(crate) fn try_to_record_waits(process: &Process) -> std::result::Result<(), String> {
    SwitchRecorder::try_out(process, None).map_err(|why| refusal::text(&why, false))
}

/// Where the kernel would sample the threads of a process.
#[derive(Debug)]
pub(crate) enum PermittedSamples {
    Everywhere,
    /// While they execute their own code; why not in the kernel.
    InUserSpace(String),
    /// Nowhere; why.
    Nowhere(String),
}

/// Tries which samples the kernel would take of a process, in the order in which a profile does.
pub(crate) fn try_to_sample(process: &Process) -> PermittedSamples {
    let mut refusals = Vec::new();
    for samples in clock_samples_of(TRIED_HZ, false) {
        match SwitchRecorder::try_out(process, Some(samples)) {
            Err(why) => refusals.push(refusal::text(&why, samples.in_kernel)),
            Ok(()) if samples.in_kernel => return PermittedSamples::Everywhere,
            Ok(()) => return PermittedSamples::InUserSpace(refusals.concat()),
        }
    }
    PermittedSamples::Nowhere(refusals.pop().unwrap_or_default())
}

/// The samples to ask the kernel for, the best first.
pub(super) fn clock_samples_of(hz: u32, wake_reader: bool) -> [ClockSamples; 2] {
    [true, false].map(|in_kernel| ClockSamples {
        period: Duration::from_secs(1) / hz.clamp(1, MAX_HZ),
        stack_len: SAMPLED_STACK,
        in_kernel,
        wake_reader,
    })
}
