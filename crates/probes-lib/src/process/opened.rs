//! [`OpenedProcess`]: a process and what is known of its memory: its [`Image`], renewed when objects have
//! been loaded or unloaded.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::build_id::BuildId;
use crate::elf::ElfFile;
use crate::error::{Error, ErrorKind, MemoryError, Operation, ProcessError, Result};
use crate::process::denial;
use crate::process::image::{Image, open_executable};
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::objects::Files;
use crate::process::{EXECUTE_CHECK_INTERVAL, Process, status};
use crate::sys::loaded::{load_biases, while_nothing_is_unloaded};

/// How long a process may keep executing new programs before opening it fails.
const EXECUTING: Duration = Duration::from_secs(1);

/// A process that has been opened.
pub(crate) struct OpenedProcess {
    process: Process,
    program: PathBuf,
    /// The pid that getpid(2) returned, if this is the current process.
    own: Option<u32>,
    image: Mutex<Arc<Image>>,
}

impl OpenedProcess {
    /// Opens a process, which must have probes. If it has none, but was forked within the last
    /// second and has not exec'd since, waits until it has, or is older.
    ///
    /// # Errors
    ///
    /// See [`Target::open`](crate::Target::open).
    pub(crate) fn open(pid: i32) -> Result<OpenedProcess> {
        let process = open_with_program(pid)?;
        let begun = Instant::now();
        let mut is_last_try = false;
        loop {
            match Image::of(&process, Arc::default()) {
                Ok(image) => return Ok(OpenedProcess::new(process, image, None)),
                Err(error) if error.is_exec() && begun.elapsed() < EXECUTING => {}
                // Read once more: it may have exec'd a program with probes just before this check.
                Err(error) if error.has_no_sites() && !is_last_try => {
                    is_last_try =
                        !process.was_just_forked() || begun.elapsed() >= status::JUST_FORKED;
                }
                Err(error) => return Err(error),
            }
            thread::sleep(EXECUTE_CHECK_INTERVAL);
        }
    }

    /// Opens a process that may have no probes. If it was forked within the last second and has not exec'd since,
    /// waits until it has, or is older.
    ///
    /// # Errors
    ///
    /// See [`Target::open_any`](crate::Target::open_any).
    pub(crate) fn open_any(pid: i32) -> Result<OpenedProcess> {
        let process = open_with_program(pid)?;
        let begun = Instant::now();
        loop {
            process.wait_until_executed();
            match Image::even_without_probes(&process, Arc::default()) {
                Err(error) if error.is_exec() && begun.elapsed() < EXECUTING => {
                    thread::sleep(EXECUTE_CHECK_INTERVAL);
                }
                image => return Ok(OpenedProcess::new(process, image?, None)),
            }
        }
    }

    /// Opens a process, without reading `files` again: for callers that open many processes.
    ///
    /// # Errors
    ///
    /// See [`Target::open`](crate::Target::open).
    pub(crate) fn open_with_files(pid: i32, files: Arc<Files>) -> Result<OpenedProcess> {
        let process = open_with_program(pid)?;
        let image = Image::of(&process, files)?;
        Ok(OpenedProcess::new(process, image, None))
    }

    /// Opens a process that this one has forked, at once: does not wait whether it executes another program.
    ///
    /// # Errors
    ///
    /// See [`Target::open_forked`](crate::Target::open_forked).
    pub(crate) fn open_forked(&self, pid: i32) -> Result<OpenedProcess> {
        let child = open_with_program(pid)?;
        let image = self.image().of_child(&child)?;
        Ok(OpenedProcess::new(child, image, None))
    }

    /// Opens the current process.
    ///
    /// # Errors
    ///
    /// See [`Target::current`](crate::Target::current).
    pub(crate) fn current() -> Result<OpenedProcess> {
        let process = Process::own()?;
        let image = Image::of_own(&process, Arc::default())?;
        let opened = OpenedProcess::new(process, image, Some(std::process::id()));
        opened.while_nothing_unloads(|| opened.current_image())?;
        Ok(opened)
    }

    fn new(process: Process, image: Image, own: Option<u32>) -> OpenedProcess {
        OpenedProcess {
            process,
            program: image.program.path().to_owned(),
            own,
            image: Mutex::new(Arc::new(image)),
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the path of the executable, as the kernel names it.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the build-id of the executable, whether that has probes or not.
    pub(crate) fn build_id(&self) -> Option<BuildId> {
        let image = self.image();
        let mut objects = image.program.objects().iter();
        match objects.find(|object| object.path() == self.program) {
            Some(object) => object.table.build_id().cloned(),
            None => {
                let (_, file) = open_executable(&self.process).ok()?;
                ElfFile::read(file, self.program.clone()).ok()?.build_id()
            }
        }
    }

    /// Returns whether this is the current process.
    pub(crate) fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// Returns the image that was read last.
    pub(crate) fn image(&self) -> Arc<Image> {
        let image = self.image.lock();
        image.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the image of the process as it is now.
    pub(crate) fn current_image(&self) -> Result<Arc<Image>> {
        Ok(self.renew_image(&self.maps()?))
    }

    /// Returns the image of the process as it is now, with these mappings.
    pub(crate) fn renew_image(&self, maps: &[Mapping]) -> Arc<Image> {
        let before = self.image();
        let loaded = self.own.map(|_| load_biases());
        let Some(now) = before.renewed(&self.process, maps, loaded) else {
            return before;
        };
        let now = Arc::new(now);
        let mut image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        *image = now.clone();
        now
    }

    /// Reads the mappings.
    ///
    /// # Errors
    ///
    /// [`ProcessError::Forked`] if this was opened as the current process, and the caller is a
    /// child that this process has forked since: the child's probes are not its parent's.
    pub(crate) fn maps(&self) -> Result<Vec<Mapping>> {
        let current = std::process::id();
        if self.own.is_some_and(|own| own != current) {
            let (pid, child) = (self.pid(), current as i32);
            return Err(Error::of_process(pid, ProcessError::Forked { child }));
        }
        read_maps(&self.process)
    }

    /// Calls `work`; if this is the current process, while none of its objects can be unloaded.
    pub(crate) fn while_nothing_unloads<T>(&self, mut work: impl FnMut() -> T) -> T {
        if self.is_own() {
            while_nothing_is_unloaded(work)
        } else {
            work()
        }
    }

    /// Returns whether the cause of an error is that an object was unloaded; it may have been loaded again since.
    pub(crate) fn is_unloaded(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::Memory(MemoryError::NotMapped { object, .. }) => *object != self.program,
            ErrorKind::Memory(MemoryError::Read { address, .. }) => {
                let image = self.image();
                let object = image.program.object_at(*address);
                object.is_some_and(|object| image.program.can_unload(object))
            }
            _ => false,
        }
    }

    /// Returns whether the cause of an error is that the process has executed a new program.
    pub(crate) fn has_executed(&self, error: &Error) -> bool {
        error.is_exec() || self.image().is_replaced(&self.process)
    }

    /// Replaces an error by [`ProcessError::Executed`] if the process has executed a new program: to a tool that
    /// has opened the old one, an exec looks like an exit.
    pub(crate) fn executed_or(&self, error: Error) -> Error {
        if self.image().is_replaced(&self.process) {
            let pid = self.pid();
            return Error::of_process(pid, ProcessError::Executed)
                .with_effect_if_none(error.effect());
        }
        error
    }

    /// Opens the memory to write it. What was patched for observations is not hidden.
    pub(crate) fn unshadowed_memory(&self) -> Result<ProcessMemory> {
        self.unshadowed_memory_for(Operation::Attach, OFlag::O_RDWR)
    }

    /// Opens the memory to read it. What was patched for observations is not hidden.
    pub(crate) fn unshadowed_memory_to_read(&self) -> Result<ProcessMemory> {
        self.unshadowed_memory_for(Operation::Read, OFlag::O_RDONLY)
    }

    fn unshadowed_memory_for(&self, operation: Operation, flags: OFlag) -> Result<ProcessMemory> {
        let memory = ProcessMemory::open(&self.process, flags)
            .map_err(|source| denial::denied_or_exited(&self.process, operation, source))?;
        // Checked afterwards, so that the memory opened is that of the known program.
        if self.image().is_replaced(&self.process) {
            return Err(Error::of_process(self.pid(), ProcessError::Executed));
        }
        Ok(memory)
    }
}

/// Opens a process; refuses one without a program, such as a zombie or a kernel thread.
fn open_with_program(pid: i32) -> Result<Process> {
    let process = Process::open(pid)?;
    process.refuse_without_program()?;
    Ok(process)
}
