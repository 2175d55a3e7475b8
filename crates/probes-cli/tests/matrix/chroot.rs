//! Programs in the chroot, controlled from outside.

use std::path::{Path, PathBuf};
use std::process::Command;

use test_support::{Talker, container};

/// What separates a program from this process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Isolation {
    /// The chroot is its root directory.
    Chroot,
    /// The same, and it has user, mount and pid namespaces of its own.
    Namespaces,
}

impl Isolation {
    pub(crate) const ALL: [Isolation; 2] = [Isolation::Chroot, Isolation::Namespaces];
}

/// A program in the chroot.
pub(crate) struct ChrootProgram {
    pub(crate) talker: Talker,
    /// Its process id in the namespace of this process.
    pub(crate) pid: i32,
    /// Its first line, in which OCaml programs print the result of getpid(2).
    pub(crate) ready: String,
}

/// Removes the files of runtime events that programs have left which were killed: a later one may get the pid of such
/// a program.
fn remove_old_events() {
    for entry in std::fs::read_dir(chroot()).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let pid = name.strip_suffix(".events");
        let pid = pid.and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another test may have removed it.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

impl ChrootProgram {
    /// Starts a program, given by its path outside, and waits until it is ready.
    pub(crate) fn start(isolation: Isolation, program: &Path, args: &[&str]) -> ChrootProgram {
        ChrootProgram::start_with(isolation, program, args, "")
    }

    /// The same, with OCAMLRUNPARAM.
    pub(crate) fn start_with(
        isolation: Isolation,
        program: &Path,
        args: &[&str],
        runtime: &str,
    ) -> ChrootProgram {
        remove_old_events();
        let mut command = match isolation {
            Isolation::Chroot => Command::new("chroot"),
            Isolation::Namespaces => {
                let mut unshare = container::unshare();
                unshare.arg("chroot");
                unshare
            }
        };
        command.arg(chroot()).arg(inside(program)).args(args);
        let mut talker = Talker::spawn(command.env("OCAMLRUNPARAM", runtime));
        let ready = talker.expect("ready");
        let pid = match isolation {
            Isolation::Chroot => talker.pid(),
            Isolation::Namespaces => container::only_child(talker.pid()),
        };
        ChrootProgram { talker, pid, ready }
    }

    /// Returns the numbers by name in the answer to `run`.
    pub(crate) fn round(&mut self) -> Vec<(String, u64)> {
        let line = self.talker.ask("run", "round");
        line.split_ascii_whitespace()
            .filter_map(|word| {
                let (name, number) = word.split_once('=')?;
                Some((name.to_owned(), number.parse().unwrap()))
            })
            .collect()
    }

    /// Closes its input, on which it exits, and asserts that it exits with 0.
    pub(crate) fn end(mut self) {
        self.talker.close_input();
        assert!(self.talker.guard().wait().success());
    }
}

/// Returns the path that a file in the chroot has for programs there.
pub(crate) fn inside(file: &Path) -> PathBuf {
    let below = file.strip_prefix(chroot()).expect("a file in the chroot");
    Path::new("/").join(below)
}

fn chroot() -> PathBuf {
    let chroot = std::env::var_os("OCAML_PROBES_CHROOT");
    chroot
        .expect("`scripts/matrix` runs this, and names the chroot")
        .into()
}

/// The tool with these arguments, inside the chroot. It reads `words` from standard input; `directory` is /tmp/files
/// there.
pub(crate) fn tool_inside(directory: &Path, args: &[&str], words: &str) -> Command {
    std::fs::write(directory.join("input"), words).unwrap();
    // Mounts are gone with the namespace.
    let script = "mount --bind \"$1\" \"$1\"; cd \"$1\"; mount -t proc proc proc; mount --rbind /dev dev; \
                  mount -t tmpfs -o mode=1777 tmpfs tmp; mkdir tmp/files; mount --bind \"$2\" tmp/files; \
                  cp \"$3\" tmp/ocaml-probes; shift 3; exec chroot . /tmp/ocaml-probes \"$@\" < tmp/files/input";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]);
    command.args([script, "-"]).arg(chroot()).arg(directory);
    command.arg(env!("CARGO_BIN_EXE_ocaml-probes")).args(args);
    command
}
