//! A directory for the files of one test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::output;

/// A new directory that every user may read, removed with all its files when dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes one, in the directory for temporary files.
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ocaml-probes-test {}-{next}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a directory for temporary files");
        let scratch = Scratch(path);
        scratch.run(Command::new("chmod").arg("755").arg(scratch.path()));
        scratch
    }

    /// Where it is; the path has a space in it.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Copies `file` here, as `name`, replacing what was there with a new file.
    ///
    /// Done by another process: a child that another test starts meanwhile would inherit our open
    /// descriptor for a moment, and an executable that is open for writing cannot be executed.
    pub fn copy(&self, file: &Path, name: &str) -> PathBuf {
        let copy = self.file(name);
        let mut install = Command::new("install");
        self.run(install.args(["-m", "755", "--"]).arg(file).arg(&copy));
        copy
    }

    /// Makes an executable text file.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let source = self.file(&format!("{name}.source"));
        std::fs::write(&source, text).expect("a file can be written here");
        self.copy(&source, name)
    }

    fn run(&self, command: &mut Command) {
        let output = output(command);
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
