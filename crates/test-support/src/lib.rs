//! Live targets for tests: OCaml programs and fixtures that are built once and run under a guard
//! that kills and reaps them. Tests send them lines, and each answer has a deadline.
//!
//! Failures panic with what was expected of which program: this crate is for tests only.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

pub mod container;
pub mod gdb;
mod inherited;
pub mod process;
mod scratch;
mod symbol_file;
pub mod tmux;

pub use scratch::Scratch;
pub use symbol_file::SymbolFile;

/// How long a test waits for anything. Far longer than it takes on a busy machine: only a hang
/// should reach it.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Names the directory of targets built beforehand, for tests run where nothing can be built.
pub const TARGETS_VARIABLE: &str = "OCAML_PROBES_TARGETS";

/// An OCaml program of `test-programs`, by its name without `.exe`: `service`, `service_nopie`.
pub fn program(name: &str) -> PathBuf {
    existing(targets().join(format!("{name}.exe")))
}

/// A fixture, by its name with its form: `gen_ocaml.pie`, `corrupt/not_elf`.
pub fn fixture(name: &str) -> PathBuf {
    existing(targets().join("fixtures").join(name))
}

/// Both forms of a fixture: `name.pie`, which is position independent, and `name.nopie`, at fixed addresses.
pub fn fixture_forms(name: &str) -> [PathBuf; 2] {
    ["pie", "nopie"].map(|form| fixture(&format!("{name}.{form}")))
}

/// Both forms of a program: `name.exe`, which is position independent, and `name_nopie.exe`, at fixed addresses.
pub fn program_forms(name: &str) -> [PathBuf; 2] {
    [program(name), program(&format!("{name}_nopie"))]
}

fn existing(path: PathBuf) -> PathBuf {
    assert!(path.exists(), "no test target {}", path.display());
    path
}

/// The directory with the built `test-programs`, which are built if they have to be.
fn targets() -> &'static Path {
    static TARGETS: OnceLock<PathBuf> = OnceLock::new();
    TARGETS.get_or_init(|| match std::env::var_os(TARGETS_VARIABLE) {
        Some(directory) => directory.into(),
        None => build_targets(),
    })
}

fn build_targets() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root
        .canonicalize()
        .expect("the workspace is where it was built");
    // Test binaries may run side by side, and dune locks its build directory.
    std::fs::create_dir_all(root.join("target")).expect("cannot make target/");
    let lock = File::create(root.join("target/test-targets.lock")).expect("cannot make a lock");
    let _lock = Flock::lock(lock, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .expect("cannot lock");
    let built = Command::new("dune")
        .args(["build", "./test-programs"])
        .current_dir(&root)
        .output()
        .expect("cannot run dune: `make test` installs what the tests need");
    assert!(
        built.status.success(),
        "dune build ./test-programs failed:\n{}",
        String::from_utf8_lossy(&built.stderr)
    );
    root.join("_build/default/test-programs")
}

/// A child that is killed and reaped when dropped.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    /// How it has exited, once that is known.
    status: Option<ExitStatus>,
}

impl Guard {
    /// Starts `command`.
    pub fn spawn(command: &mut Command) -> Guard {
        let started = Instant::now();
        loop {
            match command.spawn() {
                Ok(child) => return child.into(),
                // A program that a test has just written: a child that another test has forked
                // meanwhile holds it open until its own exec.
                Err(error)
                    if error.kind() == ErrorKind::ExecutableFileBusy
                        && started.elapsed() < DEADLINE =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("cannot run {command:?}: {error}"),
            }
        }
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The child itself.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Whether it has not exited.
    pub fn is_running(&mut self) -> bool {
        matches!(self.exit_status(), Ok(None))
    }

    /// Waits until it has exited.
    pub fn wait(&mut self) -> ExitStatus {
        self.wait_within(DEADLINE)
    }

    fn wait_within(&mut self, limit: Duration) -> ExitStatus {
        let pid = self.pid();
        eventually_within(limit, &format!("process {pid} exits"), || {
            self.exit_status().expect("cannot wait for a child")
        })
    }

    /// How it has exited, if it has. `Child` would take a stop for an exit: waitpid(2) reports the stops of a child
    /// that this process traces, too.
    fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        // Once it is reaped, another process may have its pid.
        if self.status.is_none() && matches!(process::state(self.pid()), None | Some('Z' | 'X')) {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }
}

impl From<Child> for Guard {
    fn from(child: Child) -> Guard {
        Guard {
            child,
            status: None,
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let killed = Instant::now();
        // An error: it was reaped by other means.
        while let Ok(None) = self.exit_status() {
            if killed.elapsed() > DEADLINE {
                let pid = self.pid();
                let state = process::describe(pid);
                eprintln!("process {pid} was killed, and does not exit{state}");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A program that takes commands and answers, line by line.
#[derive(Debug)]
pub struct Talker {
    guard: Guard,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    name: String,
}

impl Talker {
    /// Starts a program and waits for a line that begins with `ready`.
    pub fn start(program: &Path) -> Talker {
        Talker::start_with(program, [] as [&str; 0])
    }

    /// The same, with arguments.
    pub fn start_with(program: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Talker {
        let mut talker = Talker::spawn(Command::new(program).args(args));
        talker.expect("ready");
        talker
    }

    /// Starts a program in a process group of its own, as a shell does. The process group of the tests
    /// may be orphaned (setsid, cron, a container), and in such a group SIGTSTP, SIGTTIN and SIGTTOU stop
    /// nothing.
    pub fn start_job(program: &Path) -> Talker {
        let mut talker = Talker::spawn(Command::new(program).process_group(0));
        talker.expect("ready");
        talker
    }

    /// Starts `command` with pipes for its input and output.
    pub fn spawn(command: &mut Command) -> Talker {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut talker = Talker::of(Guard::spawn(command));
        let program = Path::new(command.get_program()).display();
        talker.name = format!("{program} (pid {})", talker.pid());
        talker
    }

    /// Takes a child whose input and output are pipes already.
    pub fn of(mut guard: Guard) -> Talker {
        let name = format!("process {}", guard.pid());
        let output = guard.child().stdout.take().expect("its output is a pipe");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if sender
                    .send(String::from_utf8_lossy(&line).into_owned())
                    .is_err()
                {
                    break;
                }
            }
        });
        Talker {
            input: guard.child().stdin.take(),
            guard,
            lines,
            name,
        }
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.guard.pid()
    }

    /// The guard, to wait for its exit or to see whether it runs.
    pub fn guard(&mut self) -> &mut Guard {
        &mut self.guard
    }

    /// Sends a line.
    pub fn send(&mut self, line: &str) {
        self.type_keys(&format!("{line}\n"));
    }

    /// Sends characters, without an end of line.
    pub fn type_keys(&mut self, keys: &str) {
        let input = self.input.as_mut().expect("its input is open");
        input.write_all(keys.as_bytes()).unwrap_or_else(|error| {
            panic!("{} does not read {keys:?}: {error}", self.name);
        });
    }

    /// Closes its input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// The next line; `None` when its output has ended.
    pub fn line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(DEADLINE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                let processes = process::describe(self.guard.pid());
                panic!("{} prints nothing for {DEADLINE:?}{processes}", self.name)
            }
        }
    }

    /// The next line, if it comes within `limit`; panics if the output has ended.
    pub fn line_within(&mut self, limit: Duration) -> Option<String> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("{} has closed its output", self.name),
        }
    }

    /// The next line that begins with `start`; lines before it are skipped.
    pub fn expect(&mut self, start: &str) -> String {
        let started = Instant::now();
        while let Some(line) = self.line() {
            if line.starts_with(start) {
                return line;
            }
            assert!(
                started.elapsed() < DEADLINE,
                "{} never prints {start:?}",
                self.name
            );
        }
        panic!(
            "{} has closed its output, and has not printed {start:?}",
            self.name
        )
    }

    /// Sends a line and returns the next line that begins with `start`.
    pub fn ask(&mut self, line: &str, start: &str) -> String {
        self.send(line);
        self.expect(start)
    }

    /// Sends `vfork` to a fixture and waits until it is in vfork(2), where it cannot be stopped.
    pub fn vfork(&mut self) {
        self.ask("vfork", "vforking");
        eventually("it waits in vfork", || {
            (process::state(self.pid()) == Some('D')).then_some(())
        });
    }

    /// Sends `run` to a fixture and returns the hits of each probe so far.
    pub fn hits(&mut self) -> Vec<(String, u64)> {
        let line = self.ask("run", "hits");
        line.split_ascii_whitespace()
            .skip(1)
            .map(|word| {
                let (name, count) = word.rsplit_once('=').expect("name=count");
                (name.to_owned(), count.parse().expect("a count"))
            })
            .collect()
    }
}

/// A program that root runs as nobody.
pub fn as_nobody(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
    command.arg(program);
    command
}

/// A program that an ordinary user runs: nobody, if we are root.
pub fn as_ordinary_user(program: impl AsRef<OsStr>) -> Command {
    if geteuid().is_root() {
        as_nobody(program)
    } else {
        Command::new(program)
    }
}

/// Runs `command` to its end, before the deadline, and returns what it printed.
pub fn output(command: &mut Command) -> Output {
    output_while(command, || {})
}

/// Same as [`output`], and calls `meanwhile` once `command` was started.
pub fn output_while(command: &mut Command, meanwhile: impl FnOnce()) -> Output {
    output_within(DEADLINE, command, meanwhile)
}

/// Same as [`output_while`], for a command that may take longer than one step of a test.
pub fn output_within(limit: Duration, command: &mut Command, meanwhile: impl FnOnce()) -> Output {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut guard = Guard::spawn(command);
    let stdout = drain(guard.child().stdout.take());
    let stderr = drain(guard.child().stderr.take());
    meanwhile();
    Output {
        status: guard.wait_within(limit),
        stdout: stdout
            .recv_timeout(DEADLINE)
            .expect("the output ends when the command exits"),
        stderr: stderr
            .recv_timeout(DEADLINE)
            .expect("the errors end when the command exits"),
    }
}

/// Reads a pipe to its end on a separate thread, so that a full pipe blocks no process.
fn drain(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    let mut pipe = pipe.expect("it is a pipe");
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        // The pipe is closed before the caller sees the result.
        drop(pipe);
        sender.send(bytes)
    });
    receiver
}

/// The name of a test function, for running it again with its own test binary (`--exact NAME`).
pub fn test_name<F: Fn()>(_test: F) -> &'static str {
    let path = std::any::type_name::<F>();
    path.split_once("::").map_or(path, |(_, name)| name)
}

/// Calls `ask` again and again until it returns an answer; panics if there is none at the deadline.
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    eventually_within(DEADLINE, what, ask)
}

fn eventually_within<T>(limit: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < limit, "still waiting until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
