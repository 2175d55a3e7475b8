//! [`WaitRecorder`]: each wait of the threads of a process, by itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Profiler;
use super::activity::Activity;
use super::kernel_records::processor_time;
use super::thread_looks::CHECK_INTERVAL;
use super::threads::name_in;
use crate::error::{Error, ProcessError, Result};
use crate::numbers::nanoseconds;
use crate::stacks::StackFrame;
use crate::unwind::StackEnd;

/// Records the waits of all threads of a process, with their stacks, from now on. Nothing is stopped or changed.
///
/// ```no_run
/// use probes_lib::WaitRecorder;
///
/// let mut recorder = WaitRecorder::of_process(4242)?;
/// for _ in 0..100 {
///     std::thread::sleep(recorder.pause());
///     for wait in recorder.read()? {
///         let time = wait.until - wait.since;
///         println!("thread {} waited for {time} ns", wait.tid);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct WaitRecorder {
    profiler: Profiler,
    /// When it was last checked which threads there are.
    checked_at: Instant,
}

/// A time in which a thread waited, and not only for a processor.
///
/// [`WaitRecorder`] has an example.
#[derive(Clone, Debug)]
pub struct RecordedWait {
    /// The thread.
    pub tid: i32,
    /// Its name, as the kernel has it; empty if it was not looked at so far.
    pub thread_name: Arc<str>,
    /// When it began to wait, in nanoseconds of CLOCK_MONOTONIC.
    pub since: u64,
    /// When it had a processor again.
    pub until: u64,
    /// Whether these are the true begin and end of the wait. Otherwise it began before it was recorded, has not ended, or records were
    /// lost meanwhile.
    pub is_whole: bool,
    /// What it waited in; [`Activity::Unseen`] if the wait was over before it was looked at.
    pub activity: Activity,
    /// The innermost first; none if it was not looked at.
    pub frames: Vec<Arc<StackFrame>>,
    /// Why there are no more frames; `None` if they were not read.
    pub end: Option<StackEnd>,
}

impl WaitRecorder {
    /// Begins to record.
    ///
    /// # Errors
    ///
    /// If there is no such process, it may not be read, or the kernel does not permit its waits to be recorded
    /// ([`ProcessError::WaitsNotRecorded`]).
    pub fn of_process(pid: i32) -> Result<WaitRecorder> {
        let mut profiler = Profiler::of_process(pid, true)?;
        profiler.record(None)?;
        match &mut profiler.recorded {
            Some(recorded) => recorded.kept = Some(Vec::new()),
            None => {
                let why = profiler.not_recorded.unwrap_or_default();
                return Err(Error::of_process(
                    pid,
                    ProcessError::WaitsNotRecorded { why },
                ));
            }
        }
        // The names of these frames are looked up now: what has to be read for that takes long the first time, and later
        // waits would be over before they are looked at. If it fails, the first reading says why.
        let _ = profiler.stacks.read(true);
        Ok(WaitRecorder {
            profiler,
            checked_at: Instant::now(),
        })
    }

    /// Returns the waits that have ended since the last call, those of each thread in their order, and reads the stacks of the threads
    /// that have begun to wait.
    ///
    /// # Errors
    ///
    /// If the process has exited, or exec'd another program, or may not be read any more. What was recorded is still returned by [`WaitRecorder::read_rest`].
    pub fn read(&mut self) -> Result<Vec<RecordedWait>> {
        let now = Instant::now();
        self.profiler.look_at_waits()?;
        self.profiler.check_program(now)?;
        if now.saturating_duration_since(self.checked_at) >= CHECK_INTERVAL {
            self.checked_at = now;
            self.profiler.forget_gone()?;
        }
        let waits = self.take();
        if let Some(recorded) = &mut self.profiler.recorded {
            // Each name is looked up once, and makes no pause longer.
            recorded.ran_until = processor_time();
        }
        Ok(waits)
    }

    /// Returns how long to wait before the next [`WaitRecorder::read`], so that it takes no more than 2.5 % of a processor, beside the
    /// names of functions that are looked up for the first time; less if records would be lost.
    pub fn pause(&self) -> Duration {
        self.profiler.wait_pause().unwrap_or_default()
    }

    /// Returns the rest, when the recording is over: also the waits that last, up to now.
    pub fn read_rest(&mut self) -> Vec<RecordedWait> {
        self.profiler.collect(true);
        self.take()
    }

    /// Returns how many of the kernel's records were lost so far: waits are missing then, or are parts.
    pub fn lost(&self) -> u64 {
        self.profiler
            .recorded
            .as_ref()
            .map_or(0, |it| it.waits.lost)
    }

    /// Returns how many processors have come online meanwhile: what happens there is not recorded.
    pub fn unrecorded_processors(&self) -> usize {
        let recorded = self.profiler.recorded.as_ref();
        recorded.map_or(0, |it| it.switches.unrecorded_processors())
    }

    fn take(&mut self) -> Vec<RecordedWait> {
        let recorded = self.profiler.recorded.as_mut();
        let kept = recorded.and_then(|recorded| recorded.kept.as_mut());
        let waits = kept.map(std::mem::take).unwrap_or_default();
        let (stacks, threads) = (&mut self.profiler.stacks, &self.profiler.threads);
        let unloaded = &mut self.profiler.unloaded;
        let waits = waits.into_iter().map(|wait| {
            let (since, until, is_whole) = (wait.since, wait.until, wait.is_whole);
            let mut key = wait.key(|tid| name_in(threads, tid));
            key.stack = key.stack.filter(|_| key.activity != Activity::Unseen);
            let frames = unloaded.frames(stacks, &key);
            RecordedWait {
                tid: key.tid,
                thread_name: key.name,
                since: nanoseconds(since),
                until: nanoseconds(until),
                is_whole,
                activity: key.activity,
                frames,
                end: key.stack.map(|stack| stack.end),
            }
        });
        waits.collect()
    }
}
