//! Hints about programs that cannot be started, and files that cannot be read.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use probes_lib::{ElfDefect, FileError, LaunchError, Subject};

use super::processes::of_denial;
use super::{CommandTarget, KEEP_SYMBOLS, LIMITED};
use crate::search_path::has_slash;

pub(super) fn of_file(kind: &FileError, file: &Subject, target: &CommandTarget) -> Option<String> {
    let hint = match kind {
        FileError::Open { source } => return of_open(source, target),
        FileError::Elf(defect) => return of_elf(defect),
        FileError::Nameless { .. } => {
            "use sudo outside of containers: only root can open such a file, through /proc/PID/map_files"
        }
        FileError::UnknownLayout { .. } => KEEP_SYMBOLS,
        FileError::MalformedNote(_) | FileError::WrongNote { .. } => {
            return Some(format!(
                "the file is damaged, build it again; `readelf -n {file}` shows its notes"
            ));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

fn of_open(source: &io::Error, target: &CommandTarget) -> Option<String> {
    let is_typed = matches!(target, CommandTarget::Program(_) | CommandTarget::File(_));
    let hint = match source.kind() {
        io::ErrorKind::NotFound if is_typed => "give its path: it is not looked up in PATH",
        io::ErrorKind::PermissionDenied => "use sudo, or be a user with permission to read it",
        _ => return None,
    };
    Some(hint.to_owned())
}

fn of_elf(defect: &ElfDefect) -> Option<String> {
    let hint = match defect {
        ElfDefect::NotElf => "give the native program itself, not bytecode or a script",
        ElfDefect::NotAProgram(_) => "give the linked program",
        ElfDefect::NoSectionHeaders => {
            "keep the section headers and .note.stapsdt when stripping: plain `strip` does"
        }
        ElfDefect::UnknownClass(_)
        | ElfDefect::Truncated { .. }
        | ElfDefect::Table(_)
        | ElfDefect::Contradiction(_) => "the file is damaged, build it again",
        ElfDefect::TooLarge { .. } | ElfDefect::TooMuchCode { .. } => {
            "it is damaged, or larger than ocaml-probes supports: `readelf -lSW` shows its sizes"
        }
        ElfDefect::TooManySegments(_) | ElfDefect::LongSymbols { .. } => {
            "no linker makes such a file: it is damaged, or was made like this on purpose"
        }
        ElfDefect::NoFunctions => KEEP_SYMBOLS,
        _ => return None,
    };
    Some(hint.to_owned())
}

/// The hint about a program that cannot be started.
pub(super) fn of_launch(kind: &LaunchError, program: &Subject) -> Option<String> {
    let hint = match (kind, program) {
        (LaunchError::Exec { source }, Subject::Program(program)) => {
            return of_exec(program, source);
        }
        (LaunchError::Denied(denial), _) => return of_denial(denial, false, false),
        (LaunchError::Setuid | LaunchError::FileCapabilities, _) => {
            "start it without ocaml-probes, then `attach` to it with sudo"
        }
        (LaunchError::DiedAtStart { .. }, _) => {
            "is memory limited (`ulimit -v`), or the file damaged? run it without ocaml-probes to see"
        }
        (LaunchError::DiedLoading, _) => {
            "`ldd` says which libraries it needs and which are missing"
        }
        (LaunchError::NoInterpreter { .. }, _) => {
            "install what the program needs, or build it for this system"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

fn of_exec(program: &Path, source: &io::Error) -> Option<String> {
    let has_slash = has_slash(program);
    let hint = match source.kind() {
        io::ErrorKind::NotFound if !has_slash && program.is_file() => format!(
            "without a slash it is looked up in PATH; the file in this directory is ./{}",
            program.display()
        ),
        io::ErrorKind::NotFound if !has_slash => {
            "without a slash it is looked up in PATH".to_owned()
        }
        io::ErrorKind::PermissionDenied if !has_slash => {
            "a file of that name is in PATH, but cannot be executed".to_owned()
        }
        io::ErrorKind::PermissionDenied => permission_denied(program),
        io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => LIMITED.to_owned(),
        io::ErrorKind::ExecutableFileBusy => {
            "another process has the file open for writing: wait until it is complete".to_owned()
        }
        io::ErrorKind::ArgumentListTooLong => {
            "give it fewer or shorter arguments and environment variables".to_owned()
        }
        _ => return None,
    };
    Some(hint)
}

fn permission_denied(program: &Path) -> String {
    const EXECUTE: u32 = 0o111;
    match program.metadata() {
        Ok(metadata) if metadata.mode() & EXECUTE == 0 => format!(
            "is it a program? `chmod +x {}` makes it one",
            program.display()
        ),
        Ok(_) => "does this user have permission to execute it, and is its file system mounted without noexec?".to_owned(),
        Err(_) => "does this user have permission to enter the directories above it?".to_owned(),
    }
}
