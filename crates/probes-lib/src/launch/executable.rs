//! Checks of a program's file before anything is started, so that what is wrong with the file, or with the names of
//! probes, is found early. The file that is checked is the one that the kernel executes. Also finds out afterwards why
//! the file was not executed, or that a shell was executed instead of it.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind::NotFound, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use libc::{S_ISGID, S_ISUID, S_IXGRP};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, access, getegid, geteuid};

use crate::address::LoadBias;
use crate::elf::ElfFile;
use crate::elf::table::ProbeTable;
use crate::error::{Error, ErrorKind, LaunchError, Result, Subject, SystemError};
use crate::process::Process;
use crate::process::denial::{is_ptracer, own_status};
use crate::process::program::Program;
use crate::select::{Actions, choose};
use crate::sys::xattr;

/// Returns the file that execvp(3) will execute, as far as it is known; `None` if there is none.
pub(super) fn resolve(command: &Command) -> Option<PathBuf> {
    let program = command.get_program();
    // execvp(3) is called in this directory.
    let current = command.get_current_dir().unwrap_or(Path::new(""));
    if program.as_bytes().contains(&b'/') {
        return Some(current.join(program)).filter(|file| file.exists());
    }
    let path = command
        .get_envs()
        .find(|(name, _)| *name == "PATH")
        .map_or_else(
            || std::env::var_os("PATH"),
            |(_, value)| value.map(OsStr::to_owned),
        );
    // "If this variable isn't defined, the path list defaults to a list that includes the directories
    // returned by confstr(_CS_PATH) (which typically returns the value "/bin:/usr/bin")".
    let path = path.unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path)
        .map(|directory| current.join(directory).join(program))
        // "If permission is denied for a file (the attempted execve(2) failed with the error
        // EACCES), these functions will continue searching the rest of the search path."
        .find(|file| file.is_file() && access(file, AccessFlags::X_OK).is_ok())
}

/// Fails if a program would run without the privilege that its file gives it.
///
/// execve(2): the set-user-ID and set-group-ID bits, and the capabilities of the file, are ignored if "the calling
/// process is being ptraced"; the kernel makes an exception if the tracer has CAP_SYS_PTRACE.
pub(super) fn refuse_privileged(file: &Path) -> Result<()> {
    let Ok(metadata) = std::fs::metadata(file) else {
        return Ok(());
    };
    let owner = (metadata.uid(), metadata.gid());
    let status = own_status();
    // A tracer with this capability takes no privilege from the program.
    if is_ptracer(&status) {
        return Ok(());
    }
    let ours = (geteuid().as_raw(), getegid().as_raw());
    if changes_ids(metadata.mode(), owner, ours) {
        let program = file.to_owned();
        return Err(Error::of_program(&program, LaunchError::Setuid));
    }
    let capabilities = xattr::read(file, c"security.capability", MAX_CAPABILITIES);
    let given = capabilities.map_or(0, |bytes| file_capabilities(&bytes));
    if given & status.bounding & !status.permitted != 0 {
        return Err(Error::of_program(file, LaunchError::FileCapabilities));
    }
    Ok(())
}

/// More bytes than `struct vfs_ns_cap_data` has.
const MAX_CAPABILITIES: usize = 64;

/// Returns the capabilities that a file permits to a process that executes it, by its attribute `security.capability`:
/// `struct vfs_cap_data` of linux/capability.h. 0 if it has the form with a user namespace: the kernel returns that
/// only of another one than ours.
fn file_capabilities(attribute: &[u8]) -> u64 {
    const REVISION_MASK: u32 = 0xff00_0000;
    const REVISION_1: u32 = 0x0100_0000;
    const REVISION_2: u32 = 0x0200_0000;
    let word = |index: usize| {
        let bytes = attribute.get(4 * index..4 * index + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    // The words after the first: permitted and inheritable ones, first the lower halves.
    let (Some(magic), Some(low)) = (word(0), word(1)) else {
        return 0;
    };
    match (magic & REVISION_MASK, word(3)) {
        (REVISION_1, _) => low.into(),
        (REVISION_2, Some(high)) => u64::from(high) << 32 | u64::from(low),
        _ => 0,
    }
}

/// Returns whether a file of this mode, user and group changes the user or the group of the process with
/// these effective ids that executes it.
fn changes_ids(mode: u32, (uid, gid): (u32, u32), (euid, egid): (u32, u32)) -> bool {
    // Without the group's permission to execute it, the set-group-ID bit gives nothing (execve(2) of Linux).
    let is_setuid = mode & S_ISUID != 0;
    let is_setgid = mode & (S_ISGID | S_IXGRP) == S_ISGID | S_IXGRP;
    (is_setuid && uid != euid) || (is_setgid && gid != egid)
}

/// Looks the names up among the probes of a file, so that a wrong name is found before anything is started.
/// A name that is not found is no error if the program is dynamically linked: it may be in a library.
pub(super) fn check_names(file: &Path, actions: &Actions) -> Result<()> {
    let elf = ElfFile::open(file)?;
    let is_dynamic = elf.interpreter().is_some();
    match choose_in(elf, actions) {
        Err(error) if is_dynamic && error.is_missing_name() => Ok(()),
        checked => checked,
    }
}

fn choose_in(elf: ElfFile, actions: &Actions) -> Result<()> {
    let table = Arc::new(ProbeTable::of(&elf)?);
    choose(&Program::alone(elf, table, LoadBias::NONE), actions)?;
    Ok(())
}

/// Fails if `process` has executed a shell instead of `file`.
///
/// execvp(3): "If the header of a file isn't recognized (the attempted execve(2) failed with the
/// error ENOEXEC), these functions will execute the shell (/bin/sh) with the path of the file as its
/// first argument."
pub(super) fn refuse_shell(process: &Process, file: Option<&Path>, program: &Path) -> Result<()> {
    let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let exe = process.open_file("exe", OFlag::O_RDONLY);
    let exe = exe.and_then(|exe| exe.metadata()).map(identity);
    let of_path = |path: &Path| std::fs::metadata(path).map(identity).ok();
    // A script that says itself which shell is to execute it begins with `#!`.
    let is_script = |file: &Path| {
        let mut start = [0; 2];
        let opened = File::open(file);
        opened.is_ok_and(|mut file| file.read_exact(&mut start).is_ok() && start == *b"#!")
    };
    let is_shell_instead = exe.is_ok_and(|exe| {
        Some(exe) == of_path(Path::new("/bin/sh")) && Some(exe) != file.and_then(of_path)
    }) && !file.is_some_and(is_script);
    if is_shell_instead {
        let (program, source) = (program.to_owned(), Errno::ENOEXEC.into());
        return Err(Error::of_program(&program, LaunchError::Exec { source }));
    }
    Ok(())
}

/// Returns the same error, in terms of the program that was to be started.
pub(super) fn error_of_launch(error: Error, program: PathBuf, file: Option<&Path>) -> Error {
    match error.kind() {
        ErrorKind::System(SystemError::NoThread { source }) => {
            // The error is from clone(2), so it has an errno.
            let errno = source.raw_os_error().unwrap_or(libc::EAGAIN);
            let source = io::Error::from_raw_os_error(errno);
            Error::of_program(&program, LaunchError::Exec { source })
        }
        // ENOENT of a file that exists is about its interpreter.
        ErrorKind::Launch(LaunchError::Exec { source, .. }) if source.kind() == NotFound => {
            let elf = file.and_then(|file| ElfFile::open(file).ok());
            match elf.and_then(|elf| elf.interpreter()) {
                Some(interpreter) if !interpreter.exists() => {
                    Error::of_program(&program, LaunchError::NoInterpreter { interpreter })
                }
                _ => error,
            }
        }
        // The process never ran the program, and is not there any more.
        _ if error.pid().is_some() => error.about(Subject::Program(program)),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_change_their_own_id() {
        for (mode, owner, changes) in [
            (0o755, (0, 0), false),
            (0o4755, (0, 7), true),
            (0o4755, (7, 0), false),
            (0o4755, (7, 7), false),
            (0o2755, (7, 0), true),
            (0o2755, (0, 7), false),
            // Without the group's permission to execute.
            (0o2745, (7, 0), false),
            (0o6755, (7, 0), true),
        ] {
            let changed = changes_ids(mode, owner, (7, 7));
            assert_eq!(changed, changes, "{mode:o} {owner:?}");
        }
    }

    #[test]
    fn file_capabilities_are_those_of_our_namespace() {
        let of_words = |words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
            file_capabilities(&bytes)
        };
        // The lowest bit says that they are effective at once.
        assert_eq!(
            of_words(&[0x0200_0001, 1 << 13, 2, 1 << 7, 4]),
            1 << 39 | 1 << 13
        );
        assert_eq!(of_words(&[0x0100_0000, 1 << 13, 2]), 1 << 13);
        // Only inheritable ones; those of another namespace, with its root; damaged ones.
        assert_eq!(of_words(&[0x0200_0000, 0, 2, 0, 4]), 0);
        assert_eq!(of_words(&[0x0300_0001, 1 << 13, 0, 0, 0, 1000]), 0);
        assert_eq!(of_words(&[0x0200_0001, 1 << 13]), 0);
        assert_eq!(of_words(&[]), 0);
        assert_eq!(file_capabilities(&[1; 7]), 0);
    }

    #[test]
    fn files_are_found_where_execvp_finds_them() {
        let file = |directory: &str, path: Option<&str>, program: &str| {
            let mut command = Command::new(program);
            command.current_dir(directory);
            match path {
                Some(path) => command.env("PATH", path),
                None => command.env_remove("PATH"),
            };
            resolve(&command)
        };
        let shell = Path::new("/usr/bin/sh");
        assert_eq!(file("/usr", Some("nowhere:bin"), "sh").unwrap(), shell);
        assert_eq!(file("/usr", Some(""), "bin/sh").unwrap(), shell);
        assert_eq!(file("/usr/bin", Some(""), "sh").unwrap(), shell);
        assert_eq!(file("/usr", Some("nowhere"), "sh"), None);
        let by_default = file("/usr", None, "sh").unwrap();
        assert_eq!(by_default, Path::new("/bin/sh"));
    }
}
