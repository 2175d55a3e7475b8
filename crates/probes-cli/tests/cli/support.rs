//! Runs `ocaml-probes`, compares with golden files, and reads targets.

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use nix::unistd::pipe2;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use test_support::{Scratch, Talker, eventually};

#[path = "schema.rs"]
pub(crate) mod schema;

pub(crate) use schema::object;

/// The result of one run of the program.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Standard output of a run that has succeeded.
    #[track_caller]
    pub(crate) fn answer(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// The same, as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let text = self.answer();
        assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
        object(&text)
    }

    /// The lines of standard error that are ours among those of a traced program.
    pub(crate) fn said(&self) -> Vec<Value> {
        let ours = self.stderr.lines().filter(|line| line.starts_with('{'));
        ours.map(object).collect()
    }

    /// Standard error of a run that has failed: a line with the reason, and at most one with a
    /// hint.
    #[track_caller]
    pub(crate) fn failure(self) -> String {
        assert_eq!(self.code, Some(1), "{self:?}");
        assert_eq!(self.stdout, "");
        let lines: Vec<_> = self.stderr.lines().collect();
        assert!(lines[0].starts_with("ocaml-probes: "), "{lines:?}");
        assert!(
            lines[1..].iter().all(|line| line.starts_with("hint: ")),
            "{lines:?}"
        );
        assert!(lines.len() <= 2, "{lines:?}");
        self.stderr
    }
}

/// The program with these arguments, and without the environment's settings of colours.
pub(crate) fn command(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ocaml-probes"));
    command.args(args).env_remove("NO_COLOR");
    command
}

/// A command that is started by another one, such as prlimit(1) or setpriv(1) with its flags.
pub(crate) fn started_by(starter: &str, command: &Command) -> Command {
    let mut words = starter.split(' ');
    let mut started = Command::new(words.next().unwrap());
    started.args(words);
    started.arg(command.get_program()).args(command.get_args());
    started
}

/// Runs the program with the words of `line`, which are separated by single spaces.
pub(crate) fn run(line: &str) -> Run {
    run_command(&mut command(line.split(' ')))
}

/// Runs the program on a file: `line` followed by ` -prog FILE`.
pub(crate) fn run_on(line: &str, file: &Path) -> Run {
    let mut command = command(line.split(' '));
    run_command(command.arg("-prog").arg(file))
}

pub(crate) fn run_command(command: &mut Command) -> Run {
    let output = test_support::output(command);
    let [stdout, stderr] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    let lines = stdout.lines().chain(stderr.lines());
    for line in lines.filter(|line| line.starts_with("{\"type\":")) {
        object(line);
    }
    Run {
        code: output.status.code(),
        stdout,
        stderr,
    }
}

/// The same, of a command that starts a program, which reads `input`.
pub(crate) fn run_with_input(input: &str, command: &Command) -> Run {
    let scratch = Scratch::new();
    let file = scratch.file("input");
    fs::write(&file, input).unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "input=$1; shift; exec \"$@\" < \"$input\"", "-"]);
    shell.arg(&file).arg(command.get_program());
    run_command(shell.args(command.get_args()))
}

/// Compares `actual` with the golden file `tests/cli/golden/NAME`; with UPDATE_GOLDEN set, writes it.
#[track_caller]
pub(crate) fn golden(name: &str, actual: &str) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/golden");
    golden_file(&directory.join(name), actual);
}

/// Compares `actual` with a file; with UPDATE_GOLDEN set, writes it.
#[track_caller]
pub(crate) fn golden_file(path: &Path, actual: &str) {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(path, actual).unwrap();
    }
    let expected = fs::read_to_string(path).unwrap_or_default();
    assert!(
        expected == actual,
        "differs from {}; UPDATE_GOLDEN=1 writes the new text there:\n{}",
        path.display(),
        difference(&expected, actual)
    );
}

/// The first line in which the texts differ.
fn difference(expected: &str, actual: &str) -> String {
    let (mut expected, mut actual) = (expected.lines(), actual.lines());
    loop {
        let (old, new) = (expected.next(), actual.next());
        if old != new || old.is_none() {
            return format!("-{}\n+{}", old.unwrap_or("(end)"), new.unwrap_or("(end)"));
        }
    }
}

/// `text` without what depends on the machine: addresses, build-ids, numbers of three digits and
/// more, the directory of `path`, and the `./` that dune 3.24 passes to the compiler.
pub(crate) fn redacted(text: &str, path: &Path) -> String {
    let directory = format!("{}/", path.parent().unwrap().display());
    let text = text.replace(&directory, "").replace("/./", "/");
    let mut redacted = String::new();
    let mut word = String::new();
    for character in text.chars().chain(['\n']) {
        if character.is_ascii_alphanumeric() || character == '_' {
            word.push(character);
            continue;
        }
        redacted += match word.as_str() {
            hex if hex.starts_with("0x") => "0x…",
            id if id.len() == 40 => "…",
            number if number.len() > 2 && number.parse::<u64>().is_ok() => "N",
            word => word,
        };
        word.clear();
        redacted.push(character);
    }
    redacted.pop();
    redacted
}

/// What a process of one thread has in memory of its executable: code, data, counters. First waits
/// until the process waits for a line: before that, it may still change its memory.
pub(crate) fn image(pid: i32) -> Vec<u8> {
    eventually(&format!("process {pid} waits"), || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let state = stat.rsplit(')').next().unwrap().trim_start().chars().next();
        matches!(state, Some('S' | 't')).then_some(())
    });
    let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mut image = Vec::new();
    for line in maps
        .lines()
        .filter(|line| line.ends_with(exe.to_str().unwrap()))
    {
        let range = line.split(' ').next().unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut bytes = vec![0; (end - start) as usize];
        memory.read_exact_at(&mut bytes, start).unwrap();
        image.extend(bytes);
    }
    assert!(!image.is_empty());
    image
}

/// Writes into the memory of a process that waits for a line, without the tool.
pub(crate) fn poke(pid: i32, address: &Value, bytes: &[u8]) {
    let memory = OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/mem"));
    memory
        .unwrap()
        .write_all_at(bytes, number(address))
        .unwrap();
}

/// An address in JSON output.
pub(crate) fn number(address: &Value) -> u64 {
    let digits = address.as_str().unwrap().strip_prefix("0x").unwrap();
    u64::from_str_radix(digits, 16).unwrap()
}

/// The probe of that name in JSON output.
pub(crate) fn probe<'j>(json: &'j Value, name: &str) -> &'j Value {
    let probes = json["probes"].as_array().unwrap();
    probes.iter().find(|probe| probe["name"] == name).unwrap()
}

/// Whether the process has code in its memory that belongs to no file.
pub(crate) fn is_observed(pid: i32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines()
        .any(|line| line.contains(" r-xp 00000000 00:00 0") && !line.ends_with(']'))
}

/// A pipe that no program inherits, and in which there is no room: its reading end, and its writing end.
pub(crate) fn full_pipe() -> (File, File) {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC).unwrap();
    let size = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let mut writer = File::from(writer);
    writer.write_all(&vec![b'.'; size as usize]).unwrap();
    (reader.into(), writer)
}

/// Reads what filled a pipe, and what comes after it to the end, which is returned.
pub(crate) fn rest_of_full_pipe(mut reader: File) -> String {
    let text = std::io::read_to_string(&mut reader).unwrap();
    text.trim_start_matches('.').to_owned()
}

/// What `info` prints in plain format: a line with name and state for each probe.
#[track_caller]
pub(crate) fn states(pid: i32) -> String {
    run(&format!("info -quiet -pid {pid}")).answer()
}

/// Starts `name.pie` and `name.nopie`.
pub(crate) fn both_forms(name: &str) -> Vec<Talker> {
    test_support::fixture_forms(name)
        .iter()
        .map(|path| Talker::start(path))
        .collect()
}

/// Whether a tool has blocked the signals that end it, and not all, as posix_spawn(3) does for a moment.
pub(crate) fn blocks_termination(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
    let has = |signal: Signal| mask >> (signal as u32 - 1) & 1 == 1;
    has(Signal::SIGTERM) && !has(Signal::SIGUSR1)
}

/// A directory that is removed at the end of the test.
#[derive(Debug)]
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new(name: &str) -> Directory {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ocaml-probes-{name}-{}-{next}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Directory(path)
    }

    /// Copies a file in a process of its own: a child that another test forks meanwhile would inherit the open copy,
    /// and a program that is open for writing cannot be executed.
    pub(crate) fn copy(&self, file: &Path, name: impl AsRef<Path>) -> PathBuf {
        let copy = self.0.join(name);
        let mut cp = Command::new("cp");
        let status = cp.arg("--preserve=mode").arg(file).arg(&copy).status();
        assert!(status.unwrap().success(), "cannot copy {}", file.display());
        copy
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
