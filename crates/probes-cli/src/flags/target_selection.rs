//! Which processes a command is about, by their pids and by the names of their programs.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{fs, io};

use probes_lib::{proc_hides_others, survey};
use regex::Regex;

use super::checked::{Flags, each_once};
use super::forked::ForkedFlag;
use super::probe_selection::regexp;
use crate::descriptors;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::text::unsigned;

/// Why processes may not be found.
pub(crate) const HIDDEN_OTHERS: &str = "/proc is mounted with hidepid, and does not show the processes of other users: sudo finds them";

// One process.
#[derive(Debug, clap::Args)]
pub(crate) struct OneProcess {
    /// The process
    #[arg(short, long, value_name = "N", value_parser = pid)]
    pub(crate) pid: i32,
}

// Processes, of which there may be several.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub(crate) struct TargetSelection {
    /// The process; may be repeated
    #[arg(id = "pid", short, long, value_name = "N", value_parser = pid_or_hint)]
    pids: Vec<i32>,
    /// All processes whose program's name RE matches at its start
    #[arg(long, value_name = "RE", value_parser = program_name)]
    name: Option<Regex>,
}

impl Flags for TargetSelection {
    type Value = TargetSelection;

    fn check(self) -> Result<TargetSelection, String> {
        each_once("-pid", &self.pids)?;
        Ok(self)
    }
}

impl TargetSelection {
    /// Whether processes are selected by name, so that there may be any number of them.
    pub(crate) fn is_by_name(&self) -> bool {
        self.name.is_some()
    }

    /// The processes that are selected by their pids.
    pub(crate) fn given(&self) -> &[i32] {
        &self.pids
    }

    /// Whether a program of this name is selected.
    pub(crate) fn selects_program(&self, program: &str) -> bool {
        let name = self.name.as_ref();
        name.is_some_and(|name| matches_from_start(name, program))
    }

    /// The processes that are selected now, each once; if probes are needed, by name only those that have some. There may
    /// be many, and they are opened next: raises our limit of open files.
    pub(crate) fn pids(
        &self,
        needs_probes: bool,
        messages: &Messages,
    ) -> Result<Vec<i32>, Failure> {
        descriptors::raise_limit_for_processes();
        let mut pids = self.pids.clone();
        let Some(name) = &self.name else {
            return Ok(pids);
        };
        if needs_probes {
            add_with_probes(&mut pids, name, messages)?;
        } else {
            add_with_name(&mut pids, name, messages)?;
        }
        if pids.is_empty() {
            if proc_hides_others() {
                messages.note(HIDDEN_OTHERS);
            }
            return Err(Failure::NoProcessNamed {
                name: name.as_str().to_owned(),
                needs_probes,
            });
        }
        Ok(pids)
    }

    /// Whether an answer about the processes `pids` has the form for several processes: there are several, or there
    /// may be.
    pub(crate) fn is_of_several(&self, pids: &[i32], forked: ForkedFlag) -> bool {
        self.is_by_name() || forked.follow || pids.len() > 1
    }

    /// Whether it is one process, given by its pid.
    pub(crate) fn is_one_pid(&self) -> bool {
        matches!(self.given(), [_]) && !self.is_by_name()
    }
}

/// Adds the processes with probes whose program's name matches.
fn add_with_probes(pids: &mut Vec<i32>, name: &Regex, messages: &Messages) -> Result<(), Failure> {
    let survey = survey().map_err(Failure::Survey)?;
    for process in survey.processes {
        let program = process.program.file_name().unwrap_or_default();
        let is_selected = matches_from_start(name, &program.to_string_lossy());
        if is_selected && !pids.contains(&process.pid) {
            pids.push(process.pid);
        }
    }
    for pid in survey.denied {
        note_denied(pid, name, messages);
    }
    for unread in survey.unread {
        let (pid, why) = (unread.pid, unread.why);
        if let Some(comm) = comm(pid).filter(|comm| matches_from_start(name, comm)) {
            messages.note(&format!("process {pid} ({comm}) is left out: {why}"));
        }
    }
    Ok(())
}

/// Adds all processes whose program's name matches, except our own.
fn add_with_name(pids: &mut Vec<i32>, name: &Regex, messages: &Messages) -> Result<(), Failure> {
    let own = std::process::id() as i32;
    let all = probes_lib::pids().map_err(|error| Failure::System("list the processes", error))?;
    for pid in all {
        if pid == own || pids.contains(&pid) {
            continue;
        }
        match program_of(pid) {
            Ok(program) if matches_from_start(name, &program) => pids.push(pid),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                note_denied(pid, name, messages);
            }
            // It has exited, or it is a kernel thread.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

fn note_denied(pid: i32, name: &Regex, messages: &Messages) {
    if let Some(comm) = comm(pid).filter(|comm| matches_from_start(name, comm)) {
        messages.note(&format!("no permission to read process {pid} ({comm})"));
    }
}

/// The name of the program that a process runs: that of its file.
pub(crate) fn program_of(pid: i32) -> io::Result<String> {
    let path = fs::read_link(format!("/proc/{pid}/exe"))?;
    let bytes = path.as_os_str().as_bytes();
    let path = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
    let name = Path::new(OsStr::from_bytes(path)).file_name();
    Ok(name.unwrap_or_default().to_string_lossy().into_owned())
}

/// All that the kernel says of a program which may not be read: 15 characters of its name.
pub(crate) fn comm(pid: i32) -> Option<String> {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(comm.trim_end().to_owned())
}

/// Whether the match of `name` in `text` begins at its start. As with all regular expressions here,
/// the match is the one that begins first.
fn matches_from_start(name: &Regex, text: &str) -> bool {
    name.find(text).is_some_and(|found| found.start() == 0)
}

pub(crate) fn pid(typed: &str) -> Result<i32, String> {
    let pid = unsigned(typed).filter(|pid| *pid > 0);
    pid.ok_or_else(|| format!("\"{typed}\" is not a pid"))
}

/// Same as [`pid`], where `-name` is a flag, too.
fn pid_or_hint(typed: &str) -> Result<i32, String> {
    let is_name = |byte: u8| byte.is_ascii_alphabetic() || b"._-".contains(&byte);
    pid(typed).map_err(|why| {
        if typed.bytes().all(is_name) && !typed.is_empty() {
            format!(
                "{why}; -name {typed} selects the processes whose program's name begins with that"
            )
        } else {
            why
        }
    })
}

fn program_name(typed: &str) -> Result<Regex, String> {
    // Only for its error message, which says what is wrong.
    regexp(typed)?;
    Regex::new(typed).map_err(|error| error.to_string())
}
