//! [`ForkedChildren`]: processes that an observed process has forked while it is observed, with copies of the
//! trampolines and of their counters.

use std::collections::HashMap;
use std::mem;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::error::{Error, ProcessError};
use crate::memory::ReadMemory;
use crate::observe::install::write_shared;
use crate::observe::layout::arena::Arena;
use crate::observe::read::page_table::PageTable;
use crate::process::children::children;
use crate::process::memory::ProcessMemory;
use crate::process::tool::since_boot;
use crate::process::{Process, pids, status};
use crate::sys::kcmp;
use crate::update::lock::UpdateLock;

/// The least time between two looks for children.
const INTERVAL: Duration = Duration::from_millis(200);

/// The next look comes no sooner than after this many times the duration of the last one: a process may have thousands
/// of threads.
const REST_FACTOR: u32 = 20;

/// No further page table is renewed once a renewal has taken this long. The next renewal begins at the earliest after
/// [`RENEWAL_REST_FACTOR`] times the duration of the last one, counted from its beginning, so that rings can be read.
const RENEWAL_TIME: Duration = Duration::from_millis(2);
const RENEWAL_REST_FACTOR: u32 = 4;

/// A child that has not called execve(2) for this time, or that is seen twice, is assumed to execute no other
/// program.
const EXECUTES_WITHIN: Duration = Duration::from_millis(50);

/// How many pids are kept: a server may fork a child for each request.
const MAX_KEPT: usize = 64;

/// Processes that an observed process, or one of its forked children, has forked while it was observed, and that did
/// not call execve(2) soon afterwards. They have copies of the trampolines and of the data. What they record is in
/// these copies, which are not read: their hits, times and events are missing, unless
/// [`ForkedChildren::are_recorded`].
///
/// Children are looked for whenever something is read, but at most five times a second. Those that exit between two
/// looks are not noticed, nor are processes whose parent has exited before the first look at them. Children that share
/// the memory of their parent, as after vfork(2) and posix_spawn(3), are not included.
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

    /// Returns whether their hits are recorded with those of their parent. That is so if the program was launched to
    /// be observed; then only times are unreliable or missing.
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
    /// The children that are alive.
    known: HashMap<PidAndStart, FoundChild>,
    begun: Instant,
    next: Option<Instant>,
    next_renewal: Instant,
}

/// A child that has copies of the trampolines.
#[derive(Debug)]
struct FoundChild {
    /// Whether it is assumed to execute no other program.
    is_settled: bool,
    /// The time when it will have run for [`EXECUTES_WITHIN`].
    settled_at: Instant,
    /// Its page table, if it needs one and certainly shares no memory with another process.
    pages: Option<PageTable>,
    /// When that table was last renewed, or tried to be.
    renewed: Option<Instant>,
}

impl ForkCheck {
    /// Returns the check for an observation that has `begun`. Children that record with their parent are looked for only
    /// if something `is_timed`, or if trampolines need a table of `pages`.
    pub(crate) fn new(
        begun: Instant,
        are_recorded: bool,
        is_timed: bool,
        pages: Option<PageTable>,
    ) -> ForkCheck {
        let now = Instant::now();
        let is_incomplete = !are_recorded || is_timed;
        let pages = pages.filter(|_| are_recorded);
        let are_sought = is_incomplete || pages.is_some();
        ForkCheck {
            found: ForkedChildren {
                pids: Vec::new(),
                are_recorded,
            },
            is_incomplete,
            pages,
            known: HashMap::new(),
            begun,
            next: are_sought.then_some(now),
            next_renewal: now,
        }
    }

    /// Looks for children, and renews tables of pages, if it is time.
    pub(crate) fn look_if_due(&mut self, observed: &Process, arenas: &[Arena]) {
        if self.next.is_some_and(|next| next <= Instant::now()) {
            self.look(observed, arenas);
        }
        if let Some(arena) = arenas.first() {
            self.renew_pages(arena);
        }
    }

    /// Looks for children, if this check does so at all ([`ForkCheck::new`]). Errors are ignored: the next reading of
    /// the data reports them, if the process still runs.
    pub(crate) fn look(&mut self, observed: &Process, arenas: &[Arena]) {
        let (Some(_), Some(arena)) = (self.next, arenas.first()) else {
            return;
        };
        let looked = Instant::now();
        let mut before = mem::take(&mut self.known);
        let now = since_boot();
        let children_of = |parent: &Process| {
            let pid = parent.pid();
            children(parent).into_iter().map(move |child| (pid, child))
        };
        let mut pids: Vec<(i32, i32)> = children_of(observed).collect();
        loop {
            while let Some((parent, pid)) = pids.pop() {
                let Ok(child) = Process::open(pid) else {
                    continue;
                };
                let Some((start, age)) = start_if_only_forked(&child, now) else {
                    continue;
                };
                let may_have = age <= self.begun.elapsed();
                let is_known = self.known.contains_key(&(pid, start));
                if is_known || !has_copy(&child, observed, arena, may_have) {
                    continue;
                }
                pids.extend(children_of(&child));
                let known = before.remove(&(pid, start));
                let is_settled = known.is_some() || age >= EXECUTES_WITHIN;
                let found =
                    known.unwrap_or_else(|| self.new_child(pid, age, [observed.pid(), parent]));
                self.keep((pid, start), found, is_settled);
            }
            // Then the children of the last look that were not found again: their parent may have exited.
            let Some((pid, start)) = before.keys().next().copied() else {
                break;
            };
            let found = before.remove(&(pid, start));
            let child = Process::open(pid).ok();
            let child = child.filter(|child| has_copy(child, observed, arena, false));
            let running = child.as_ref().and_then(|it| start_if_only_forked(it, now));
            let is_same = running.is_some_and(|(started, _)| started == start);
            if let (Some(child), Some(found), true) = (child, found, is_same) {
                pids.extend(children_of(&child));
                self.keep((pid, start), found, true);
            }
        }
        self.next = Some(looked + INTERVAL.max(looked.elapsed() * REST_FACTOR));
    }

    /// Returns a child that is found for the first time and has run for `age`. It gets a page table only if it shares
    /// no memory with `others`.
    fn new_child(&self, pid: i32, age: Duration, others: [i32; 2]) -> FoundChild {
        let is_own = |other: &i32| matches!(kcmp::shares_memory(*other, pid), Ok(false));
        let pages = self.pages.as_ref();
        let pages = pages.filter(|_| others.iter().all(is_own));
        FoundChild {
            is_settled: false,
            settled_at: Instant::now() + EXECUTES_WITHIN.saturating_sub(age),
            pages: pages.map(PageTable::of_forked),
            renewed: None,
        }
    }

    /// Keeps a child for the next look, and its pid for [`ForkedChildren`] once it `is_settled`.
    fn keep(&mut self, child: PidAndStart, mut found: FoundChild, is_settled: bool) {
        if is_settled && !found.is_settled && self.is_incomplete && self.found.pids.len() < MAX_KEPT
        {
            self.found.pids.push(child.0);
        }
        found.is_settled = is_settled;
        self.known.insert(child, found);
    }

    /// Renews the page tables of children that are due, the oldest tables first, for [`RENEWAL_TIME`] at most.
    fn renew_pages(&mut self, arena: &Arena) {
        let begun = Instant::now();
        if self.pages.is_none() || begun < self.next_renewal {
            return;
        }
        let is_due = |found: &FoundChild| {
            let renewed = found.renewed;
            let is_old = renewed.is_none_or(|at| begun.duration_since(at) >= INTERVAL);
            found.settled_at <= begun && found.pages.is_some() && is_old
        };
        let due = self.known.iter_mut().filter(|(_, found)| is_due(found));
        let mut due: Vec<_> = due.collect();
        due.sort_by_key(|(_, found)| found.renewed);
        for ((pid, start), found) in due {
            if begun.elapsed() >= RENEWAL_TIME {
                break;
            }
            found.renewed = Some(begun);
            let child = Process::open(*pid).ok();
            let is_it = |child: &Process| {
                start_if_only_forked(child, Duration::MAX).is_some_and(|(at, _)| at == *start)
            };
            if let Some(child) = child.filter(is_it) {
                found.renew_pages(&child, arena);
            }
        }
        self.next_renewal = begun + begun.elapsed() * RENEWAL_REST_FACTOR;
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
    /// Renews the page table of a child that records with its parent and has memory of its own. If that cannot be done
    /// now, the table stays as it is, and stays valid until a second after its last renewal.
    fn renew_pages(&mut self, child: &Process, arena: &Arena) {
        let Some(pages) = &mut self.pages else {
            return;
        };
        // Another tool may be about to unmap the arena.
        let Ok(_lock) = UpdateLock::wait(child, Instant::now()) else {
            return;
        };
        // Opened before the checks: if the child executes a program after them, nothing is written
        // into that program.
        let Ok(memory) = ProcessMemory::open(child, OFlag::O_RDWR) else {
            return;
        };
        if !matches!(arena.is_there(|at, bytes| memory.read(at, bytes)), Ok(true)) {
            return;
        }
        // If that fails, the child has exited, or the next look tries again.
        let _ = pages.renew(child, |writes| {
            // Otherwise the mappings may be those of a program that it has executed.
            if !child.was_only_forked() {
                return Err(Error::of_process(child.pid(), ProcessError::Executed));
            }
            write_shared(child.pid(), &memory, arena, writes)
        });
    }
}

/// Returns the pids of the descendants of a process that have called no execve(2) since they were forked, have the
/// same executable and memory of their own, and are at least [`EXECUTES_WITHIN`] old: younger ones may be about to
/// execute a program. Children of a descendant that is left out are left out, too.
pub(crate) fn forked_descendants(process: &Process) -> Vec<i32> {
    let now = since_boot();
    let program = process.identity_of("exe").ok();
    let is_meant = |child: &Process| {
        let is_settled =
            start_if_only_forked(child, now).is_some_and(|(_, age)| age >= EXECUTES_WITHIN);
        let is_other = |program| matches!(child.identity_of("exe"), Ok(own) if own != program);
        // If that cannot be found out, the child may share the memory of the process, as a thread does.
        let has_own_memory =
            || matches!(kcmp::shares_memory(process.pid(), child.pid()), Ok(false));
        is_settled && !program.is_some_and(is_other) && has_own_memory()
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

/// Returns the pids of the descendants of a process that have a copy of an arena. Looks at all processes: the parent of
/// a descendant may have exited, as a daemon's has.
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

/// Returns whether a child has a copy of an arena of its parent; if its memory cannot be read, whether it
/// `may_have` one.
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

/// Returns whether the first point of an arena is patched in a child, too: it may have been forked while the arena was
/// being installed.
fn has_patch(child: &Process, arena: &Arena) -> bool {
    let memory = ProcessMemory::open(child, OFlag::O_RDONLY);
    let first = arena.places().next();
    let (Ok(memory), Some((_, place))) = (memory, first) else {
        return false;
    };
    let mut found = vec![0; place.after.len()];
    memory.read(place.at, &mut found).is_ok() && found == *place.after
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::process::children::children_among_all;

    #[test]
    fn both_searches_find_a_child() {
        let mut child = Command::new("cat");
        let mut child = child
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (own, pid) = (Process::own().unwrap(), child.id() as i32);
        // The list of our threads ends early if the thread of another test exits while it is read.
        test_support::eventually("the child is found", || {
            children(&own).contains(&pid).then_some(())
        });
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
