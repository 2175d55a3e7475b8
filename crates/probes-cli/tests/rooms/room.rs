//! Programs in the room, spoken to from outside.

use std::path::{Path, PathBuf};
use std::process::Command;

use test_support::{Talker, container};

/// What a program is shut in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Walls {
    /// The room is its root folder.
    Root,
    /// ... and it has a user, a mount and a pid namespace of its own.
    Namespaces,
}

impl Walls {
    pub(crate) const ALL: [Walls; 2] = [Walls::Root, Walls::Namespaces];
}

/// A program in the room.
pub(crate) struct Inmate {
    pub(crate) talker: Talker,
    /// Its process id here.
    pub(crate) pid: i32,
    /// Its first line, in which programs in OCaml say the process id that they know themselves.
    pub(crate) ready: String,
}

impl Inmate {
    /// Starts a program, named by its path here, and waits until it is ready.
    pub(crate) fn start(walls: Walls, program: &Path, args: &[&str]) -> Inmate {
        Inmate::start_with(walls, program, args, "")
    }

    /// The same, with parameters for the runtime of OCaml.
    pub(crate) fn start_with(walls: Walls, program: &Path, args: &[&str], runtime: &str) -> Inmate {
        let mut command = match walls {
            Walls::Root => Command::new("chroot"),
            Walls::Namespaces => {
                let mut unshare = container::unshare();
                unshare.arg("chroot");
                unshare
            }
        };
        command.arg(room()).arg(inside(program)).args(args);
        let mut talker = Talker::spawn(command.env("OCAMLRUNPARAM", runtime));
        let ready = talker.expect("ready");
        let pid = match walls {
            Walls::Root => talker.pid(),
            Walls::Namespaces => container::only_child(talker.pid()),
        };
        Inmate { talker, pid, ready }
    }

    /// The numbers by name in the answer to `run`.
    pub(crate) fn round(&mut self) -> Vec<(String, u64)> {
        let line = self.talker.ask("run", "round");
        line.split_ascii_whitespace()
            .filter_map(|word| {
                let (name, number) = word.split_once('=')?;
                Some((name.to_owned(), number.parse().unwrap()))
            })
            .collect()
    }

    /// Ends it by the end of its input, and checks that it was well.
    pub(crate) fn end(mut self) {
        self.talker.hang_up();
        assert!(self.talker.guard().wait().success());
    }
}

/// The path in the room of a file that is in it.
pub(crate) fn inside(file: &Path) -> PathBuf {
    let below = file.strip_prefix(room()).expect("a file of the room");
    Path::new("/").join(below)
}

fn room() -> PathBuf {
    let room = std::env::var_os("OCAML_PROBES_ROOM");
    room.expect("`scripts/rooms` runs this, and names the room")
        .into()
}
