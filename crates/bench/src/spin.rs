//! [`Spin`]: the benchmark target at work. It executes sites without a pause and notes, by its own
//! clock, the longest time in which it did not get on.
//!
//! The shared file is laid out as `test-programs/fixtures/spin.h` says; it is read and written like
//! any file, which shows the same bytes as the target's shared mapping of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use test_support::{Talker, eventually};

use crate::failure::{Failure, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"camlspin");

// Offsets in bytes: of the header's fields, and of those of the first thread's slot.
const HITS: u64 = 40;
const ITERATIONS: u64 = 64;
const LONGEST_GAP: u64 = 72;
const RESET_REQUEST: u64 = 80;
const RESET_ACK: u64 = 88;

/// How many sites it executes.
const HOT: u64 = 64;

/// A program that spins; killed when dropped.
pub(crate) struct Spin {
    talker: Talker,
    shared: File,
    path: PathBuf,
    resets: u64,
}

impl Spin {
    pub(crate) fn start(program: &Path) -> Result<Spin> {
        let path = shared_path();
        let talker = Talker::start_with(program, [&path]);
        let open = File::options().read(true).write(true).open(&path);
        let shared = open.map_err(Failure::of("cannot open the target's shared file"))?;
        let spin = Spin {
            talker,
            shared,
            path,
            resets: 0,
        };
        if spin.read(0)? != MAGIC {
            let name = program.display();
            return Err(Failure::new(format!("{name} is not the benchmark target")));
        }
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
    /// has seen meanwhile.
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
        // A thread that was stopped adds the gap in its first iteration afterwards.
        self.goes_on()?;
        let gap = Duration::from_nanos(self.read(LONGEST_GAP)?);
        Ok((result, gap))
    }

    /// Waits until every site it executes has been reached again.
    fn goes_on(&self) -> Result<()> {
        let goal = self.read(ITERATIONS)? + 2 * HOT;
        self.wait_until("it has gone on", |spin| Ok(spin.read(ITERATIONS)? > goal))
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
