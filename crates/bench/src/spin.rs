//! [`Spin`]: the benchmark target at work. Its threads execute sites without a pause, and it notes,
//! by its own clock, the longest time in which none of them got on.
//!
//! The shared file is laid out as `test-programs/fixtures/spin.h` says; it is read and written like
//! any file, which shows the same bytes as the target's shared mapping of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use test_support::{Talker, eventually};

use crate::failure::{Failure, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"camlspin");

// Offsets in bytes: of the header's fields, of those of the program's slot, and of the first
// thread's slot, which begins with its iterations.
const HITS: u64 = 40;
const ITERATIONS: u64 = 64;
const LONGEST_GAP: u64 = 72;
const RESET_REQUEST: u64 = 80;
const RESET_ACK: u64 = 88;
const FIRST_THREAD: u64 = 128;
const SLOT_LEN: u64 = 64;

/// How many sites it executes.
const HOT: u64 = 64;

/// The threads of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threads {
    /// Those that execute sites without a pause.
    pub(crate) spinning: u64,
    /// Those that wait in the kernel.
    pub(crate) waiting: u64,
}

impl Threads {
    /// One, which spins.
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
    _ahead: Option<Ahead>,
}

impl Spin {
    pub(crate) fn start(program: &Path) -> Result<Spin> {
        Spin::start_with(program, Threads::ONE)
    }

    /// Returns when all its threads are at work.
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
            // Not before it was started: it would be ahead as well.
            _ahead: (spinning > 1).then(Ahead::new),
        };
        if spin.read(0)? != MAGIC {
            let name = program.display();
            return Err(Failure::new(format!("{name} is not the benchmark target")));
        }
        spin.every_thread_goes_on()?;
        Ok(spin)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.talker.pid()
    }

    /// Whether handlers run now.
    pub(crate) fn runs_handlers(&self) -> Result<bool> {
        self.goes_on()?;
        let before = self.read(HITS)?;
        self.goes_on()?;
        Ok(self.read(HITS)? > before)
    }

    /// Does something to the target, and returns with its result the longest gap that the target
    /// has seen meanwhile, in which none of its threads got on. One of them has to spin.
    pub(crate) fn watch<T>(
        &mut self,
        something: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Duration)> {
        self.resets += 1;
        let asked = self.resets;
        self.write(RESET_REQUEST, asked)?;
        self.wait_until("it has begun anew", |spin| {
            Ok(spin.read(RESET_ACK)? == asked)
        })?;
        let result = something()?;
        // The gap is added in the first iteration afterwards.
        self.goes_on()?;
        let gap = Duration::from_nanos(self.read(LONGEST_GAP)?);
        Ok((result, gap))
    }

    /// Waits until every site it executes has been reached again.
    fn goes_on(&self) -> Result<()> {
        let goal = self.read(ITERATIONS)? + 2 * HOT;
        self.wait_until("it has gone on", |spin| Ok(spin.read(ITERATIONS)? > goal))
    }

    /// Waits until every thread that spins has executed a site again: none was left stopped.
    pub(crate) fn every_thread_goes_on(&self) -> Result<()> {
        let before = self.iterations()?;
        self.wait_until("every thread has gone on", |spin| {
            let mut pairs = before.iter().zip(spin.iterations()?);
            Ok(pairs.all(|(&before, now)| now > before))
        })
    }

    /// Of each thread that spins.
    fn iterations(&self) -> Result<Vec<u64>> {
        let threads = 0..self.threads.spinning;
        threads
            .map(|thread| self.read(FIRST_THREAD + thread * SLOT_LEN))
            .collect()
    }

    fn wait_until(&self, what: &str, so: impl Fn(&Spin) -> Result<bool>) -> Result<()> {
        eventually(what, || match so(self) {
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

/// While this lives, this thread and those it starts have real-time priority: behind 256 busy
/// threads, it would take a second to do anything. Without the privilege it does.
struct Ahead;

impl Ahead {
    fn new() -> Ahead {
        schedule(["--fifo", "1"]);
        Ahead
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        schedule(["--other", "0"]);
    }
}

fn schedule([policy, priority]: [&str; 2]) {
    let own = std::process::id().to_string();
    let mut command = Command::new("chrt");
    command.args([policy, "--pid", priority, &own]);
    // Where it cannot be had, measuring only takes longer.
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// In memory if there is such a file system: where files go to a disk, the kernel write-protects
/// their pages now and then, and the target would stand still for that.
fn shared_path() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    };
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("probes-bench.{}.{number}", std::process::id()))
}
