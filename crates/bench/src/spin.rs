//! [`Spin`]: the running benchmark target. Its threads execute sites without a pause, and it measures,
//! by its own clock, the longest gap: the longest time in which none of them made progress.
//!
//! The layout of the shared file is that of `test-programs/fixtures/spin.h`. It is read and written with
//! pread(2) and pwrite(2), which see the same bytes as the target's shared mapping of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use test_support::{Talker, eventually};

use crate::failure::{Failure, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"camlspin");

// Offsets in bytes: of a field of the header (`HITS`), of the fields of the program's slot
// (`ITERATIONS` to `RESET_ACK`), and of the first thread's slot, which begins with its iterations.
const HITS: u64 = 40;
const ITERATIONS: u64 = 64;
const LONGEST_GAP: u64 = 72;
const RESET_REQUEST: u64 = 80;
const RESET_ACK: u64 = 88;
const FIRST_THREAD: u64 = 128;
const SLOT_LEN: u64 = 64;

/// The target executes at most this many of its sites, spread evenly (`HOT` in spin.c).
const HOT_SITES: u64 = 64;

/// How many threads a program has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threads {
    /// Those that execute sites without a pause.
    pub(crate) spinning: u64,
    /// Those that wait in the kernel.
    pub(crate) waiting: u64,
}

impl Threads {
    /// One spinning thread.
    pub(crate) const ONE: Threads = Threads {
        spinning: 1,
        waiting: 0,
    };

    pub(crate) fn count(self) -> u64 {
        self.spinning + self.waiting
    }
}

/// A program that spins; killed when dropped.
pub(crate) struct Spin {
    talker: Talker,
    threads: Threads,
    shared: File,
    path: PathBuf,
    resets: u64,
    _priority: Option<RealTimePriority>,
}

impl Spin {
    pub(crate) fn start(program: &Path) -> Result<Spin> {
        Spin::start_with(program, Threads::ONE)
    }

    /// Returns when all its threads have started.
    pub(crate) fn start_with(program: &Path, threads: Threads) -> Result<Spin> {
        let path = shared_path();
        let Threads { spinning, waiting } = threads;
        let args = [spinning, waiting].map(|number| number.to_string().into());
        let args = std::iter::once(path.clone().into_os_string()).chain(args);
        let talker = Talker::start_with(program, args);
        let open = File::options().read(true).write(true).open(&path);
        let shared = open.map_err(Failure::of("cannot open the target's shared file"))?;
        let spin = Spin {
            talker,
            threads,
            shared,
            path,
            resets: 0,
            // Only after the target was started, which would otherwise inherit it.
            _priority: (spinning > 1).then(RealTimePriority::new),
        };
        if spin.read(0)? != MAGIC {
            let name = program.display();
            return Err(Failure::new(format!("{name} is not the benchmark target")));
        }
        spin.wait_for_every_thread()?;
        Ok(spin)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.talker.pid()
    }

    /// Returns whether handlers run now.
    pub(crate) fn runs_handlers(&self) -> Result<bool> {
        self.wait_for_progress()?;
        let before = self.read(HITS)?;
        self.wait_for_progress()?;
        Ok(self.read(HITS)? > before)
    }

    /// Calls `something`, and returns its result and the longest gap that the target has measured
    /// meanwhile. At least one of its threads has to spin.
    pub(crate) fn longest_gap_during<T>(
        &mut self,
        something: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Duration)> {
        self.resets += 1;
        let asked = self.resets;
        self.write(RESET_REQUEST, asked)?;
        self.wait_until("the target resets its gap", |spin| {
            Ok(spin.read(RESET_ACK)? == asked)
        })?;
        let result = something()?;
        // The target records the gap in its first iteration afterwards.
        self.wait_for_progress()?;
        let gap = Duration::from_nanos(self.read(LONGEST_GAP)?);
        Ok((result, gap))
    }

    /// Waits for the iterations in which a single thread executes each of its sites twice.
    fn wait_for_progress(&self) -> Result<()> {
        let goal = self.read(ITERATIONS)? + 2 * HOT_SITES;
        self.wait_until("the target makes progress", |spin| {
            Ok(spin.read(ITERATIONS)? > goal)
        })
    }

    /// Waits until every spinning thread has executed a site again: none was left stopped.
    pub(crate) fn wait_for_every_thread(&self) -> Result<()> {
        let before = self.iterations()?;
        self.wait_until("every thread makes progress", |spin| {
            let mut pairs = before.iter().zip(spin.iterations()?);
            Ok(pairs.all(|(&before, now)| now > before))
        })
    }

    /// Returns the iterations of each spinning thread.
    fn iterations(&self) -> Result<Vec<u64>> {
        let threads = 0..self.threads.spinning;
        threads
            .map(|thread| self.read(FIRST_THREAD + thread * SLOT_LEN))
            .collect()
    }

    fn wait_until(&self, what: &str, condition: impl Fn(&Spin) -> Result<bool>) -> Result<()> {
        eventually(what, || match condition(self) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(failure) => Some(Err(failure)),
        })
    }

    fn read(&self, offset: u64) -> Result<u64> {
        let mut word = [0; 8];
        let read = self.shared.read_exact_at(&mut word, offset);
        read.map_err(Failure::of("cannot read the target's shared file"))?;
        Ok(u64::from_le_bytes(word))
    }

    fn write(&self, offset: u64, value: u64) -> Result<()> {
        let written = self.shared.write_all_at(&value.to_le_bytes(), offset);
        written.map_err(Failure::of("cannot write the target's shared file"))
    }
}

impl Drop for Spin {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Gives the first thread of this process, which runs the benchmarks, real-time priority until this value is dropped;
/// threads and processes that it starts meanwhile inherit it. Without it, beside 256 busy threads, any step takes a
/// second. Without the privilege for that, the priority stays as it is.
struct RealTimePriority;

impl RealTimePriority {
    fn new() -> RealTimePriority {
        schedule(["--fifo", "1"]);
        RealTimePriority
    }
}

impl Drop for RealTimePriority {
    fn drop(&mut self) {
        schedule(["--other", "0"]);
    }
}

fn schedule([policy, priority]: [&str; 2]) {
    let own = std::process::id().to_string();
    let mut command = Command::new("chrt");
    command.args([policy, "--pid", priority, &own]);
    // If it fails, measuring only takes longer.
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Returns a path on a tmpfs, if there is one: the kernel write-protects the pages of files on a disk
/// from time to time, and the target would wait in a page fault then.
fn shared_path() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    };
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    directory.join(format!("probes-bench.{}.{number}", std::process::id()))
}
