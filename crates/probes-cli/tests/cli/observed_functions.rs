//! Programs behave the same while their functions are counted and timed: compilers, backtraces, probes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use test_support::{
    DEADLINE, Guard, Scratch, Talker, eventually, output, output_within, program_forms,
};

use crate::count_functions::{counting, start_observing};
use crate::support::{command, is_observed, run, states};

/// Modules that all others import: a second copy of their interfaces would be inconsistent with the installed one.
const NOT_COMPILED: [&str; 2] = ["stdlib", "camlinternalFormatBasics"];

/// OCaml's compiler, and the source files of its standard library.
struct Compiler {
    file: PathBuf,
    sources: Vec<PathBuf>,
}

impl Compiler {
    fn find() -> Compiler {
        let said = output(Command::new("ocamlfind").args(["ocamlopt", "-where"]));
        let directory = String::from_utf8(said.stdout).unwrap();
        let files = fs::read_dir(directory.trim_end()).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let is_source = |file: &PathBuf| {
            let is_ml = file.extension().is_some_and(|it| it == "ml");
            is_ml && !NOT_COMPILED.contains(&file.file_stem().unwrap().to_str().unwrap())
        };
        let mut sources: Vec<PathBuf> = files.filter(is_source).collect();
        sources.sort();
        assert!(sources.len() > 50, "{directory}");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut files =
            std::env::split_paths(&path).map(|directory| directory.join("ocamlopt.opt"));
        let file = files.find(|file| file.exists());
        Compiler {
            file: file.unwrap(),
            sources,
        }
    }

    /// Copies the first `modules` modules, each into its own subdirectory of `directory`; returns the arguments that
    /// compile them there.
    fn arguments(&self, directory: &Path, modules: usize) -> Vec<String> {
        let copies = self.sources.iter().take(modules).map(|source| {
            let name = source.file_stem().unwrap();
            fs::create_dir(directory.join(name)).unwrap();
            let copy = Path::new(name).join(source.file_name().unwrap());
            fs::copy(source, directory.join(&copy)).unwrap();
            copy.to_str().unwrap().to_owned()
        });
        let flags = ["-c", "-g", "-w", "-a"].map(str::to_owned);
        flags.into_iter().chain(copies).collect()
    }
}

/// The names and contents of files.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// The directory in which all runs of the compiler work, because its name is in the files that the compiler writes.
struct Directory {
    work: PathBuf,
}

impl Directory {
    fn new(scratch: &Scratch) -> Directory {
        let work = scratch.file("work");
        fs::create_dir(&work).unwrap();
        Directory { work }
    }

    /// Returns all files in it, and empties it.
    fn take(&self) -> Files {
        let files = |directory: &Path| {
            let entries = fs::read_dir(directory).unwrap();
            entries.map(|it| it.unwrap().path()).collect::<Vec<_>>()
        };
        let directories = files(&self.work).into_iter().filter(|it| it.is_dir());
        let files = directories
            .flat_map(|directory| files(&directory))
            .map(|file| {
                let name = file.strip_prefix(&self.work).unwrap().to_owned();
                (name, fs::read(file).unwrap())
            });
        let mut files: Files = files.collect();
        files.sort();
        fs::remove_dir_all(&self.work).unwrap();
        fs::create_dir(&self.work).unwrap();
        files
    }
}

/// Asserts that the names and contents are the same.
#[track_caller]
fn assert_same(alone: &Files, observed: &Files) {
    let names = |files: &[(PathBuf, Vec<u8>)]| -> Vec<PathBuf> {
        files.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(alone), names(observed));
    let mut both = alone.iter().zip(observed);
    let differs = both.find(|(alone, observed)| alone.1 != observed.1);
    assert_eq!(differs.map(|(alone, _)| &alone.0), None);
}

// promise: Functions: OCaml's compiler with all its functions counted compiles the standard library to the same bytes (about
//    60 modules)
#[test]
fn counted_compiler_writes_the_same_bytes() {
    let compiler = Compiler::find();
    let scratch = Scratch::new();
    let directory = Directory::new(&scratch);
    let mut ocamlopt = Command::new(&compiler.file);
    let arguments = compiler.arguments(&directory.work, usize::MAX);
    ocamlopt.args(arguments).current_dir(&directory.work);
    let said = output_within(4 * DEADLINE, &mut ocamlopt, || {});
    assert!(said.status.success(), "{said:?}");
    let alone = directory.take();

    let mut trace = command(["trace", "-count", "-fn", "*", "-o", "../counts", "-prog"]);
    trace.arg(&compiler.file).arg("--");
    trace.args(compiler.arguments(&directory.work, usize::MAX));
    let said = output_within(4 * DEADLINE, trace.current_dir(&directory.work), || {});
    assert!(said.status.success(), "{said:?}");
    assert_same(&alone, &directory.take());
    let counts = fs::read_to_string(scratch.file("counts")).unwrap();
    let called = counts.lines().count();
    assert!(called > 5000, "{called}");
}

/// Starts the compiler; at its first module, it waits for a preprocessor, until the file `go` exists.
fn start_waiting(compiler: &Compiler, directory: &Path) -> Guard {
    let gate = directory.join("gate");
    let script = "#!/bin/sh\n: > started\nwhile [ ! -e go ]; do sleep 0.02; done\necho \"# 1 \\\"$1\\\"\"\ncat \"$1\"\n";
    fs::write(&gate, script).unwrap();
    fs::set_permissions(&gate, fs::Permissions::from_mode(0o755)).unwrap();
    let mut ocamlopt = Command::new(&compiler.file);
    ocamlopt.args(["-pp", "./gate"]);
    ocamlopt.args(compiler.arguments(directory, 4));
    let guard = Guard::spawn(ocamlopt.current_dir(directory).stdin(Stdio::null()));
    eventually("the compiler starts", || {
        directory.join("started").exists().then_some(())
    });
    guard
}

// promise: Functions: OCaml's compiler with thousands of its functions timed compiles to the same bytes (4 modules)
#[test]
fn timed_compiler_writes_the_same_bytes() {
    let compiler = Compiler::find();
    let scratch = Scratch::new();
    let directory = Directory::new(&scratch);
    let go = || fs::write(directory.work.join("go"), "").unwrap();
    let mut ocamlopt = start_waiting(&compiler, &directory.work);
    go();
    assert!(ocamlopt.wait().success());
    let alone = directory.take();

    let mut ocamlopt = start_waiting(&compiler, &directory.work);
    // Type inference is recursive and raises exceptions.
    let globs = "-json -fn Ctype.*,Env.*,Typecore.*,Stdlib.*,caml_alloc*,caml_modify,caml_raise*";
    let tool = start_observing("latency", globs, ocamlopt.pid());
    go();
    assert!(ocamlopt.wait().success());
    let run = tool.until_end();
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_same(&alone, &directory.take());
    let timed = run.stdout.matches("\"count\":").count();
    assert!(timed > 1000, "{timed}");
}

/// The stack of a process as gdb shows it, a line for each frame.
fn stack(pid: i32) -> Vec<String> {
    let mut gdb = Command::new("gdb");
    gdb.args(["-q", "-nx", "-batch", "-ex", "backtrace", "-p"]);
    let said = String::from_utf8(output(gdb.arg(pid.to_string())).stdout).unwrap();
    let frames = said.lines().filter(|line| line.starts_with('#'));
    let frames: Vec<String> = frames.map(str::to_owned).collect();
    assert!(frames.len() > 6, "{said}");
    frames
}

// promise: Functions: OCaml's backtraces, and gdb's of a thread within counted and timed functions, are as before (2 × 2)
#[test]
fn backtraces_through_observed_functions_are_the_same() {
    for file in program_forms("backtraces") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let raised = |target: &mut Talker| {
            target.send("raise");
            let mut lines = Vec::new();
            loop {
                let line = target.line().unwrap();
                if line == "raised" {
                    return lines;
                }
                lines.push(line);
            }
        };
        let before = raised(&mut target);
        assert!(before.len() > 6, "{before:?}");
        target.ask("wait", "waiting");
        let stack_before = stack(pid);
        assert_eq!(target.ask("line", "waited"), "waited 8");
        for name in ["count", "latency"] {
            let tool = start_observing(name, "-fn Backtraces.*,Stdlib.*,caml_*", pid);
            assert_eq!(raised(&mut target), before);
            target.ask("wait", "waiting");
            assert_eq!(stack(pid), stack_before);
            assert_eq!(target.ask("line", "waited"), "waited 8");
            let answer = tool.end().answer();
            assert!(answer.contains(" Backtraces.waits\n"), "{answer}");
        }
    }
}

#[test]
fn probes_within_observed_functions_are_switched() {
    for file in program_forms("twolibs") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let before = states(pid);
        let change = |what: &str| {
            run(&format!("attach -pid {pid} -{what} shared,main_only")).answer();
        };
        for name in ["count", "latency"] {
            let tool = start_observing(name, "-fn Twolibs.round,Left.run,Right.run", pid);
            change("enable");
            assert_ne!(states(pid), before);
            let answer = target.ask("run", "round");
            let hits = " shared=1 left.shared=1 right.shared=1 main_only=1 left_only=0 ";
            assert!(answer.contains(hits), "{answer}");
            change("disable");
            assert_eq!(states(pid), before);
            let answer = target.ask("run", "round");
            assert!(answer.contains(" shared=0 left.shared=0 "), "{answer}");
            let answer = tool.end().answer();
            for function in ["Twolibs.round", "Left.run", "Right.run"] {
                let mut rows = answer.lines().filter(|line| line.ends_with(function));
                let row = rows.next().unwrap();
                assert_eq!(row.split(' ').next(), Some("2"), "{answer}");
            }
            assert!(!is_observed(pid));
            assert_eq!(states(pid), before);
        }
        // This observation begins and ends while the probes are enabled.
        change("enable");
        let enabled = states(pid);
        let tool = counting("-fn Left.run -probe shared", pid);
        change("disable");
        change("enable");
        assert_eq!(states(pid), enabled);
        tool.end().answer();
        assert_eq!(states(pid), enabled);
        let answer = target.ask("run", "round");
        assert!(answer.contains(" shared=1 left.shared=1 "), "{answer}");
    }
}
