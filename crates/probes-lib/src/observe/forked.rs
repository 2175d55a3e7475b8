//! [`ForkedChildren`]: processes that an observed process has forked while it is observed, with copies of the
//! trampolines and of their counters.

use std::collections::HashMap;
use std::mem;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::memory::ReadMemory;
use crate::observe::install::write_shared;
use crate::observe::layout::arena::Arena;
use crate::observe::page_table::PageTable;
use crate::process::memory::ProcessMemory;
use crate::process::tool::since_boot;
use crate::process::{Process, is_gone, pids, status};
use crate::sys::kcmp;
use crate::update::lock::UpdateLock;

/// The least time between two looks for children.
const INTERVAL: Duration = Duration::from_millis(200);

/// The next look comes no sooner than after this many times the duration of the last one: a process may have thousands
/// of threads.
const REST: u32 = 20;

/// After this time without an execve, a child is taken for one that executes no other program; so is one that is seen
/// twice.
const EXECUTES_WITHIN: Duration = Duration::from_millis(50);

/// How many are kept: a server may fork one for each request.
const MAX_KEPT: usize = 64;

/// Processes that an observed process, or one of these, has forked while it was observed, and that executed no other
/// program at once: they have copies of the trampolines, and what they record is in copies of the data, which are not
/// read. Their hits, times and events are missing, unless [`ForkedChildren::are_recorded`].
///
/// Children are looked for whenever something is read, but at most five times a second; those that exit between two
/// looks are not noticed, nor are processes whose parent has exited before the first look at them. Children that share
/// the memory of their parent, as after vfork(2) and posix_spawn(3), are none of them.
///
/// ```no_run
/// # let observer: probes_lib::Observer = unimplemented!();
/// for pid in observer.forked().pids() {
///     println!("hits of process {pid} are missing");
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForkedChildren {
    pids: Vec<i32>,
    are_recorded: bool,
}

impl ForkedChildren {
    /// Returns their pids, in the order in which they were found: the first 64.
    pub fn pids(&self) -> &[i32] {
        &self.pids
    }

    /// Returns whether their hits are recorded with those of their parent, as they are if the program was launched to
    /// be observed: then only what is timed is unreliable or missing.
    pub fn are_recorded(&self) -> bool {
        self.are_recorded
    }
}

/// The pid and the start time of a process: a pid may be used again.
type PidAndStart = (i32, u64);

/// Collects the forked children while an observation lasts.
#[derive(Debug)]
pub(crate) struct ForkCheck {
    found: ForkedChildren,
    /// Whether hits or times of children are missing.
    is_incomplete: bool,
    /// A table of pages for a child, if children record with their parent and such a table is needed.
    pages: Option<PageTable>,
    /// Those that live.
    known: HashMap<PidAndStart, FoundChild>,
    begun: Instant,
    next: Option<Instant>,
}

/// A child that has copies of the trampolines.
#[derive(Debug)]
struct FoundChild {
    /// Whether it is taken for one that executes no other program.
    stays: bool,
    /// Its table of pages, if it needs one.
    pages: Option<PageTable>,
}

impl ForkCheck {
    /// Returns the check for an observation that begins now. Children that record with their parent are looked for only if
    /// something `is_timed`, or if trampolines need a table of `pages`.
    pub(crate) fn new(are_recorded: bool, is_timed: bool, pages: Option<PageTable>) -> ForkCheck {
        let now = Instant::now();
        let is_incomplete = !are_recorded || is_timed;
        let pages = pages.filter(|_| are_recorded);
        let matter = is_incomplete || pages.is_some();
        ForkCheck {
            found: ForkedChildren {
                pids: Vec::new(),
                are_recorded,
            },
            is_incomplete,
            pages,
            known: HashMap::new(),
            begun: now,
            next: matter.then_some(now),
        }
    }

    /// Looks for children if it is time.
    pub(crate) fn look_if_due(&mut self, process: &Process, arenas: &[Arena]) {
        if self.next.is_some_and(|next| next <= Instant::now()) {
            self.look(process, arenas);
        }
    }

    /// Looks for children, if they matter. Errors are ignored: if the process still runs, the next reading of its data reports them.
    pub(crate) fn look(&mut self, process: &Process, arenas: &[Arena]) {
        let (Some(_), Some(arena)) = (self.next, arenas.first()) else {
            return;
        };
        let looked = Instant::now();
        let mut before = mem::take(&mut self.known);
        let now = since_boot();
        let mut parents = children(process);
        while let Some(pid) = parents.pop() {
            let Ok(child) = Process::open(pid) else {
                continue;
            };
            let Some((start, age)) = start_if_only_forked(&child, now) else {
                continue;
            };
            let may_have = age <= self.begun.elapsed();
            if !has_copy(&child, process, arena, may_have) || self.known.contains_key(&(pid, start))
            {
                continue;
            }
            parents.extend(children(&child));
            let known = before.remove(&(pid, start));
            self.keep(&child, (start, age), known, process, arena);
        }
        // Those that are found no more, because their parent has exited.
        for ((pid, start), found) in before {
            let child = Process::open(pid).ok();
            let still = child.and_then(|child| {
                let (found, age) = start_if_only_forked(&child, now)?;
                (found == start).then_some((child, age))
            });
            if let Some((child, age)) = still {
                self.keep(&child, (start, age), Some(found), process, arena);
            }
        }
        self.next = Some(looked + INTERVAL.max(looked.elapsed() * REST));
    }

    /// Keeps a child that was started at this time, and has run for so long; `known` is what is known of it from an earlier look.
    fn keep(
        &mut self,
        child: &Process,
        (start, age): (u64, Duration),
        known: Option<FoundChild>,
        parent: &Process,
        arena: &Arena,
    ) {
        let pid = child.pid();
        let stays = known.is_some() || age >= EXECUTES_WITHIN;
        let new = || FoundChild {
            stays: false,
            pages: self.pages.as_ref().map(PageTable::of_forked),
        };
        let mut found = known.unwrap_or_else(new);
        if stays && !found.stays && self.is_incomplete && self.found.pids.len() < MAX_KEPT {
            self.found.pids.push(pid);
        }
        found.stays = stays;
        found.renew_pages(child, parent, arena);
        self.known.insert((pid, start), found);
    }

    pub(crate) fn found(&self) -> ForkedChildren {
        self.found.clone()
    }

    /// Returns whether a forked process records with its parent.
    pub(crate) fn is_recorded(&self, pid: i32, parent: &Process, arenas: &[Arena]) -> bool {
        let (Ok(child), Some(arena)) = (Process::open(pid), arenas.first()) else {
            return false;
        };
        self.found.are_recorded
            && has_copy(&child, parent, arena, false)
            && has_patch(&child, arena)
    }
}

impl FoundChild {
    /// Renews the table of pages of a child that records with its parent. If that cannot be done now, it stays as it is, for the
    /// second that it is valid.
    fn renew_pages(&mut self, child: &Process, parent: &Process, arena: &Arena) {
        let Some(pages) = &mut self.pages else {
            return;
        };
        // Another tool may be about to unmap it.
        let Ok(_lock) = UpdateLock::wait(child, Instant::now()) else {
            return;
        };
        // Opened first: if the child then executes a program, nothing is written into that.
        let memory = ProcessMemory::open(child, OFlag::O_RDWR);
        let memory = memory
            .ok()
            .filter(|_| has_copy(child, parent, arena, false));
        if let Some(memory) = memory {
            let write = |writes: &[_]| write_shared(child.pid(), &memory, arena, writes);
            // If that fails, the child has exited, or the next look tries again.
            let _ = pages.renew(child, write);
        }
    }
}

/// Returns the pids of the descendants of a process that were forked without an execve since, have memory of their own, and are at
/// least [`EXECUTES_WITHIN`] old: younger ones may be about to execute a program.
pub(crate) fn forked_descendants(process: &Process) -> Vec<i32> {
    let now = since_boot();
    let program = process.identity_of("exe").ok();
    let is_meant = |child: &Process| {
        let stays = start_if_only_forked(child, now).is_some_and(|(_, age)| age >= EXECUTES_WITHIN);
        let is_other = |program| matches!(child.identity_of("exe"), Ok(own) if own != program);
        // Where that cannot be known, it may be like a thread: what is done to its memory is done to that of the process.
        let has_own_memory =
            || matches!(kcmp::shares_memory(process.pid(), child.pid()), Ok(false));
        stays && !program.is_some_and(is_other) && has_own_memory()
    };
    let mut found = Vec::new();
    let mut pids = children(process);
    while let Some(pid) = pids.pop() {
        if let Some(child) = Process::open(pid).ok().filter(&is_meant) {
            pids.extend(children(&child));
            found.push(pid);
        }
    }
    found
}

/// Returns the pids of the processes that a process, or one of these, has forked with copies of an arena. Looks at all processes:
/// the parent of one may have exited, as a daemon's has.
pub(crate) fn with_copies(process: &Process, arena: &Arena) -> Vec<i32> {
    let is_forked = |pid: &i32| {
        Process::open(*pid)
            .is_ok_and(|child| child.was_only_forked() && has_copy(&child, process, arena, false))
    };
    pids().into_iter().flatten().filter(is_forked).collect()
}

/// Returns when a process was started, in clock ticks since boot, and for how long it has run; `None` if it has
/// executed a program since it was forked. `now` is the time since boot.
fn start_if_only_forked(child: &Process, now: Duration) -> Option<(u64, Duration)> {
    let stat = child.read("stat").ok()?;
    let start = status::start_time(&stat).filter(|_| status::was_only_forked(&stat))?;
    Some((start, status::age(&stat, now)?))
}

/// Returns whether a child has copies of an arena of its parent. If its memory cannot be read, it `may_have` them.
fn has_copy(child: &Process, parent: &Process, arena: &Arena, may_have: bool) -> bool {
    let shares = kcmp::shares_memory(parent.pid(), child.pid());
    if matches!(shares, Ok(true)) || child.has_exited() {
        return false;
    }
    let memory = ProcessMemory::open(child, OFlag::O_RDONLY);
    match memory.and_then(|memory| arena.is_there(|at, bytes| memory.read(at, bytes))) {
        Ok(is_there) => is_there,
        Err(_) => may_have && !child.has_exited() && child.was_only_forked(),
    }
}

/// Returns whether the first point of an arena is patched in a child, too: it may have been forked while the arena was installed.
fn has_patch(child: &Process, arena: &Arena) -> bool {
    let memory = ProcessMemory::open(child, OFlag::O_RDONLY);
    let first = arena.places().next();
    let (Ok(memory), Some((_, place))) = (memory, first) else {
        return false;
    };
    let mut found = vec![0; place.after.len()];
    memory.read(place.at, &mut found).is_ok() && found == *place.after
}

/// Returns the pids of the children of all threads of a process.
fn children(process: &Process) -> Vec<i32> {
    let threads = process.threads().and_then(|mut threads| threads.read());
    let mut children = Vec::new();
    for tid in threads.unwrap_or_default() {
        match process.read(&format!("task/{tid}/children")) {
            Ok(pids) => children.extend(numbers(&String::from_utf8_lossy(&pids))),
            // A kernel without CONFIG_PROC_CHILDREN, unless the thread has just exited.
            Err(error) if is_gone(&error) && process.thread_status(tid).is_ok() => {
                return children_among_all(process.pid());
            }
            Err(_) => {}
        }
    }
    children
}

fn numbers(text: &str) -> impl Iterator<Item = i32> {
    let words = text.split_ascii_whitespace();
    words.filter_map(|pid| pid.parse().ok())
}

/// Returns the pids of the children of a process, by the parents of all processes.
fn children_among_all(parent: i32) -> Vec<i32> {
    let is_child = |pid: &i32| {
        let status =
            Process::open(*pid).and_then(|it| it.status().map_err(|error| it.exited_or(error)));
        status.is_ok_and(|status| status.ppid == parent)
    };
    pids().into_iter().flatten().filter(is_child).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn both_searches_find_a_child() {
        let mut child = Command::new("cat");
        let mut child = child
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (own, pid) = (Process::own().unwrap(), child.id() as i32);
        assert!(children(&own).contains(&pid));
        assert!(children_among_all(own.pid()).contains(&pid));
        // It has executed a program.
        assert_eq!(
            start_if_only_forked(&Process::open(pid).unwrap(), since_boot()),
            None
        );
        assert!(!forked_descendants(&own).contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children_among_all(own.pid()).contains(&pid));
    }
}
