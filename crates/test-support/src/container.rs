//! Programs in their own user, mount and pid namespaces, with another root directory.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Scratch, Talker, eventually, output, process};

/// A directory that is the root of a container, inside a directory that can be hidden.
#[derive(Debug)]
pub struct Container(Scratch);

impl Container {
    /// Makes a container that holds each of these files, with all that it needs to be loaded, at
    /// the given path inside.
    pub fn with(files: &[(&Path, &Path)]) -> Container {
        let container = Container(Scratch::new());
        fs::create_dir_all(container.path(Path::new("/proc"))).expect("a directory can be made");
        for (file, path) in files {
            container.copy(file, path);
            for library in libraries(file) {
                container.copy(&library, &library);
            }
        }
        container
    }

    /// Returns the path, outside of the container, of what has the path `there` inside.
    pub fn path(&self, there: &Path) -> PathBuf {
        let root = self.0.file("root");
        root.join(there.strip_prefix("/").unwrap_or(there))
    }

    /// Makes the directory that holds its root accessible to nobody, or accessible again.
    pub fn hide(&self, hidden: bool) {
        let mode = if hidden { 0o000 } else { 0o755 };
        let set = fs::set_permissions(self.0.path(), Permissions::from_mode(mode));
        set.expect("it is ours");
    }

    fn copy(&self, file: &Path, there: &Path) {
        let to = self.path(there);
        let directory = to.parent().expect("it is in a directory");
        fs::create_dir_all(directory).expect("a directory can be made");
        // By another process: a child that another test starts meanwhile has a copy of our descriptor until its exec, and
        // the kernel executes no file that is open for writing.
        let copied = output(
            Command::new("cp")
                .args(["--preserve=mode", "--"])
                .arg(file)
                .arg(to),
        );
        assert!(copied.status.success(), "{copied:?}");
    }

    /// Starts a program by its path inside, and waits until it is ready. Also returns its pid
    /// outside of the container; inside, its pid is 1, also in `/proc`.
    pub fn start(&self, program: &Path) -> (Talker, i32) {
        let mut command = unshare();
        let proc = self.path(Path::new("/proc"));
        command.arg(format!("--mount-proc={}", proc.display()));
        command.arg("chroot").arg(self.path(Path::new("/")));
        command.arg(program);
        let mut talker = Talker::spawn(&mut command);
        talker.expect("ready");
        let pid = only_child(talker.pid());
        (talker, pid)
    }
}

/// A command that runs its arguments in new user, mount and pid namespaces. If it is killed, so is what it runs.
pub fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--pid"]);
    command.args(["--fork", "--kill-child"]);
    command
}

/// A command that runs its arguments in the namespaces of process `pid`.
pub fn enter(pid: i32) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--target={pid}"));
    command.args(["--user", "--preserve-credentials"]);
    command.args(["--mount", "--pid", "--root"]);
    command
}

/// Waits until process `pid`, such as `unshare`, has started a program, and returns the pid of that.
pub fn only_child(pid: i32) -> i32 {
    eventually("the program is started", || {
        process::children(pid).first().copied()
    })
}

/// The loader and the libraries of a program or library.
fn libraries(file: &Path) -> Vec<PathBuf> {
    let ldd = output(Command::new("ldd").arg(file));
    let words = String::from_utf8(ldd.stdout).expect("paths are text");
    let paths = words.split_ascii_whitespace();
    paths
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}
