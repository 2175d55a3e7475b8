//! [`Profiler`]: where the time of a process goes, on the processor and off it, by looking at all its threads again and again.
//!
//! ```text
//! sample  each thread: has it run since the last sample? → blocked as before, blocked elsewhere, or running
//! stop    the threads that run, for their registers; not if it is live
//! add     the time since the last sample → the stack of each thread
//! ```
//!
//! A thread that has not run since the last sample has waited all the time: its stack need not be read again, and its time is
//! exact. How long each thread has run, and waited for a processor, the kernel counts exactly.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use nix::time::{ClockId, clock_gettime};

use crate::error::{Error, ProcessError, Result};
use crate::stacks::{
    Look, Slices, StackFrame, Stacks, SystemCall, ThreadFiles, ThreadRole, ThreadState,
};
use crate::unwind::{RawFrame, RawStack, StackEnd};

/// How many different stacks are told apart, and how many frames they have in all.
const MOST_STACKS: usize = 1 << 16;
const MOST_FRAMES: usize = 1 << 22;

/// How many descriptors are left to others. As long as there are more, two files of each thread stay open; those of other threads
/// are opened for each sample, which takes four times as long.
const LEFT_TO_OTHERS: u64 = 128;

/// How often it is checked whether the process has executed another program.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How often, at most, it is checked whether libraries were loaded; only if there is code that is not known.
const RELOAD_INTERVAL: Duration = Duration::from_millis(20);

/// Samples a process.
///
/// ```no_run
/// use std::time::Duration;
/// use probes_lib::Profiler;
///
/// let mut profiler = Profiler::of_process(4242, false)?;
/// for _ in 0..100 {
///     std::thread::sleep(Duration::from_millis(10));
///     profiler.sample()?;
/// }
/// for stack in profiler.profile().stacks {
///     println!("{:?} {:?} {}", stack.time, stack.activity, stack.thread_name);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct Profiler {
    stacks: Stacks,
    is_live: bool,
    /// How many threads have their files open at most.
    most_open: usize,
    /// Where the functions of the collector are, if it is told apart whether they are at work.
    collector: Vec<Range<u64>>,
    threads: HashMap<i32, Watched>,
    found: Found,
    begun: Instant,
    last: Instant,
    checked: Instant,
    reloaded: Instant,
    samples: u64,
    stops: u64,
    stopped: Duration,
    last_stop: Duration,
    last_look: Duration,
    not_stopped: Option<Error>,
    ended: ThreadTimes,
}

/// A thread between two samples.
struct Watched {
    name: Arc<str>,
    /// `None` if there are too many threads.
    files: Option<ThreadFiles>,
    /// What it does as long as its slices stay the same.
    blocked: Option<(Slices, Key)>,
    /// When it was first seen, and when last.
    first: Option<(Duration, Duration)>,
    last: Option<(Duration, Duration)>,
    /// How long it was there.
    present: Duration,
}

/// What times are added up for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    tid: i32,
    name: Arc<str>,
    activity: Activity,
    in_collection: bool,
    /// `None` if it is not known.
    stack: Option<Arc<(Vec<RawFrame>, StackEnd, bool)>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    time: Duration,
    samples: u64,
}

/// What a thread was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activity {
    /// It was on a processor, or about to be.
    Running,
    /// It waited in this system call, by its number.
    Blocked(u32),
    /// It waited in the kernel, and in no system call.
    Waiting,
    /// It was stopped by a signal or a debugger.
    Stopped,
}

impl Activity {
    fn of(state: &ThreadState) -> Activity {
        match state {
            ThreadState::Running => Activity::Running,
            ThreadState::Blocked { call, .. } => Activity::Blocked(call.number),
            ThreadState::Waiting => Activity::Waiting,
            ThreadState::Stopped => Activity::Stopped,
        }
    }

    /// Returns the name of the system call, in brackets, or what else it was doing; `None` if it was running.
    pub fn leaf(self) -> Option<String> {
        match self {
            Activity::Running => None,
            Activity::Blocked(number) => {
                let arguments = [0; 6];
                Some(format!("[{}]", SystemCall { number, arguments }))
            }
            Activity::Waiting => Some("[kernel]".to_owned()),
            Activity::Stopped => Some("[stopped]".to_owned()),
        }
    }
}

/// The times of a process or thread, as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// How long it was on a processor.
    pub running: Duration,
    /// How long it waited for one.
    pub runnable: Duration,
    /// How long it was off the processor for other reasons.
    pub off: Duration,
}

impl ThreadTimes {
    fn add(&mut self, other: ThreadTimes) {
        self.running = self.running.saturating_add(other.running);
        self.runnable = self.runnable.saturating_add(other.runnable);
        self.off = self.off.saturating_add(other.off);
    }
}

/// Where the time has gone.
#[derive(Debug)]
pub struct Profile {
    /// Each stack of each thread that was seen, most time first.
    pub stacks: Vec<ProfiledStack>,
    /// How long the process was watched.
    pub seconds: Duration,
    /// How often it was looked at.
    pub samples: u64,
    /// How many threads there were.
    pub threads: usize,
    /// The times of all threads, as the kernel counts them; `None` if it does not.
    pub times: Option<ThreadTimes>,
    /// How often, and how long in all, the process was stopped.
    pub stops: u64,
    /// See `stops`.
    pub stopped: Duration,
    /// Why it could not be stopped once.
    pub not_stopped: Option<String>,
}

/// How long a thread had one stack.
#[derive(Clone, Debug)]
pub struct ProfiledStack {
    /// The thread.
    pub tid: i32,
    /// Its name, as the kernel has it.
    pub thread_name: String,
    /// What it is for the runtime of OCaml.
    pub role: ThreadRole,
    /// What it was doing.
    pub activity: Activity,
    /// Whether some thread of the process was working for the garbage collector; see [`Profiler::tell_collections_apart`].
    pub in_collection: bool,
    /// The innermost first; none if they could not be read.
    pub frames: Vec<Arc<StackFrame>>,
    /// Why there are no more.
    pub end: Option<StackEnd>,
    /// Whether a frame was found by searching the stack.
    pub is_guessed: bool,
    /// The time between samples that it stands for.
    pub time: Duration,
    /// In how many samples it was seen.
    pub samples: u64,
}

impl ProfiledStack {
    /// Returns whether its frames reach to the code that the thread began with, and none was guessed.
    pub fn is_complete(&self) -> bool {
        self.end == Some(StackEnd::Outermost) && !self.is_guessed
    }
}

impl Profiler {
    /// Begins to watch a process. If it `is_live`, nothing is ever stopped: threads that run have no frames then.
    ///
    /// # Errors
    ///
    /// Same as [`Stacks::of_process`]; and if it is this process or an ancestor of it, unless it is live.
    pub fn of_process(pid: i32, is_live: bool) -> Result<Profiler> {
        let stacks = Stacks::of_process(pid)?;
        if !is_live {
            stacks.process().refuse_self_and_ancestors()?;
        }
        let now = Instant::now();
        let mut profiler = Profiler {
            stacks,
            is_live,
            most_open: most_open(),
            collector: Vec::new(),
            threads: HashMap::new(),
            found: Found::default(),
            begun: now,
            last: now,
            checked: now,
            reloaded: now,
            samples: 0,
            stops: 0,
            stopped: Duration::ZERO,
            last_stop: Duration::ZERO,
            last_look: Duration::ZERO,
            not_stopped: None,
            ended: ThreadTimes::default(),
        };
        // Threads that wait already are known to have waited until the first sample.
        profiler.look_at_all(Duration::ZERO, now)?;
        Ok(profiler)
    }

    /// From now on, tells apart whether some thread works for the garbage collector: whether a function of it is on a stack.
    ///
    /// # Errors
    ///
    /// If no function of the collector is known in the process: it has none of OCaml's, or no symbols.
    pub fn tell_collections_apart(&mut self) -> Result<()> {
        self.collector = self.stacks.code_of_collector()?;
        Ok(())
    }

    /// The path of its program, as the kernel names it.
    pub fn program(&self) -> &Path {
        self.stacks.program()
    }

    /// The files that are mapped with code in them, and could not be read: stacks end at their code.
    pub fn unreadable(&self) -> Vec<PathBuf> {
        self.stacks.unreadable().collect()
    }

    /// Returns how long to wait until the next sample at least, so that the process is stopped for no more than 2 % of the time, and
    /// looking at its threads takes no more than 5 % of a processor. Where processors are shared, a stop takes longer.
    pub fn least_pause(&self) -> Duration {
        let (stop, look) = (self.last_stop, self.last_look);
        stop.saturating_mul(49).max(look.saturating_mul(19))
    }

    /// Looks at all threads, and adds the time since the last call to what they do.
    ///
    /// # Errors
    ///
    /// If the process has exited, or executed another program, or may not be read. What was found is still there.
    pub fn sample(&mut self) -> Result<()> {
        let now = Instant::now();
        let begun = processor_time();
        let elapsed = now.saturating_duration_since(self.last);
        self.look_at_all(elapsed, now)?;
        self.last = now;
        self.last_look = processor_time().saturating_sub(begun);
        self.samples += 1;
        if now.saturating_duration_since(self.checked) >= CHECK_INTERVAL {
            self.checked = now;
            self.refuse_executed()?;
        }
        Ok(())
    }

    fn refuse_executed(&self) -> Result<()> {
        if !self.stacks.has_executed() {
            return Ok(());
        }
        let pid = self.stacks.pid();
        Err(Error::of_process(pid, ProcessError::Executed))
    }

    /// Reads the files of the process again if it has loaded some since.
    fn reload(&mut self, now: Instant) -> Result<()> {
        if now.saturating_duration_since(self.reloaded) < RELOAD_INTERVAL {
            return Ok(());
        }
        self.reloaded = now;
        self.refuse_executed()?;
        if !self.stacks.has_loaded_more() {
            return Ok(());
        }
        self.stacks = Stacks::of_process(self.stacks.pid())?;
        if !self.collector.is_empty() {
            self.collector = self.stacks.code_of_collector()?;
        }
        for thread in self.threads.values_mut() {
            thread.blocked = None;
        }
        Ok(())
    }

    fn look_at_all(&mut self, elapsed: Duration, now: Instant) -> Result<()> {
        let process = self.stacks.process().clone();
        let tids = process.threads().and_then(|mut list| list.read());
        let tids = tids.map_err(|source| process.exited_or(source))?;
        let there: HashSet<i32> = tids.iter().copied().collect();
        let ended = &mut self.ended;
        self.threads.retain(|tid, thread| {
            let is_there = there.contains(tid);
            if !is_there {
                ended.add(thread.times());
            }
            is_there
        });
        let mut running = HashSet::new();
        let mut seen = Vec::new();
        for tid in tids {
            match self.look_at(tid, elapsed)? {
                Some(key) if key.activity == Activity::Running => {
                    running.insert(tid);
                }
                Some(key) => seen.push(key),
                None => {
                    if let Some(thread) = self.threads.remove(&tid) {
                        self.ended.add(thread.times());
                    }
                }
            }
        }
        if running.is_empty() && seen.is_empty() {
            return Err(process.exited_or(nix::errno::Errno::ESRCH.into()));
        }
        if !elapsed.is_zero() {
            self.look_at_running(&running, &mut seen);
        }
        let is_unknown = |key: &Key| {
            let stack = key.stack.as_ref();
            stack.is_some_and(|stack| matches!(stack.1, StackEnd::UnknownCode(_)))
        };
        if seen.iter().any(is_unknown) {
            self.reload(now)?;
        }
        let in_collection = seen.iter().any(|key| self.is_of_collector(key));
        for mut key in seen {
            key.in_collection = in_collection;
            self.found.add(key, elapsed);
        }
        // Stopping takes time, too.
        self.last = now;
        Ok(())
    }

    /// Returns whether a thread works for the collector.
    fn is_of_collector(&self, key: &Key) -> bool {
        let frames = key.stack.iter().flat_map(|stack| &stack.0);
        let mut addresses = frames.map(|frame| frame.within.0);
        !self.collector.is_empty()
            && addresses.any(|at| self.collector.iter().any(|code| code.contains(&at)))
    }

    /// Looks at a thread without stopping it; `None` if it has exited.
    fn look_at(&mut self, tid: i32, elapsed: Duration) -> Result<Option<Key>> {
        let mut opened = None;
        if !self.threads.contains_key(&tid) {
            let Some(files) = ThreadFiles::open(self.stacks.process(), tid)? else {
                return Ok(None);
            };
            let watched = Watched {
                name: files.name().into(),
                files: Some(files),
                blocked: None,
                first: None,
                last: None,
                present: Duration::ZERO,
            };
            self.threads.insert(tid, watched);
        }
        let is_many = self.threads.len() > self.most_open;
        let Some(thread) = self.threads.get_mut(&tid) else {
            return Ok(None);
        };
        if thread.files.is_none() {
            opened = ThreadFiles::open(self.stacks.process(), tid)?;
        }
        let Some(files) = thread.files.as_ref().or(opened.as_ref()) else {
            return Ok(None);
        };
        let Some(slices) = files.slices()? else {
            return Ok(None);
        };
        let times = slices.times();
        let is_new = thread.first.is_none();
        thread.first = thread.first.or(times);
        thread.last = times;
        if !is_new {
            thread.present += elapsed;
        }
        if let Some((since, key)) = &thread.blocked {
            if *since == slices {
                return Ok(Some(key.clone()));
            }
        }
        thread.blocked = None;
        let mut key = Key {
            tid,
            name: thread.name.clone(),
            activity: Activity::Running,
            in_collection: false,
            stack: None,
        };
        match self.stacks.look(files)? {
            Look::Exited => return Ok(None),
            Look::Running => {}
            Look::Blocked(blocked) => {
                key.activity = Activity::of(&blocked.state);
                key.stack = Some(shared(blocked.stack));
                thread.blocked = Some((blocked.slices, key.clone()));
            }
        }
        if is_many {
            thread.files = None;
        }
        Ok(Some(key))
    }

    /// Adds what the threads do that run.
    fn look_at_running(&mut self, running: &HashSet<i32>, seen: &mut Vec<Key>) {
        let mut stacks = HashMap::new();
        self.last_stop = Duration::ZERO;
        if !self.is_live && !running.is_empty() {
            match self.stacks.read_stopped(running) {
                Ok((found, time)) => {
                    stacks = found;
                    self.stops += 1;
                    self.stopped += time;
                    self.last_stop = time;
                }
                Err(error) => self.not_stopped = Some(error),
            }
        }
        for &tid in running {
            let Some(thread) = self.threads.get(&tid) else {
                continue;
            };
            seen.push(Key {
                tid,
                name: thread.name.clone(),
                activity: Activity::Running,
                in_collection: false,
                stack: stacks.remove(&tid).map(shared),
            });
        }
    }

    /// Returns what was found so far.
    pub fn profile(&mut self) -> Profile {
        let mut stacks = Vec::new();
        for (key, sum) in &self.found.sums {
            if sum.time.is_zero() {
                continue;
            }
            let (frames, end, is_guessed) = match key.stack.as_deref() {
                Some((frames, end, is_guessed)) => (&**frames, Some(*end), *is_guessed),
                None => (&[][..], None, false),
            };
            let frames: Vec<Arc<StackFrame>> = frames
                .iter()
                .map(|frame| self.stacks.name(*frame))
                .collect();
            stacks.push(ProfiledStack {
                tid: key.tid,
                thread_name: key.name.to_string(),
                role: ThreadRole::of(&frames, key.tid == self.stacks.pid()),
                activity: key.activity,
                in_collection: key.in_collection,
                frames,
                end,
                is_guessed,
                time: sum.time,
                samples: sum.samples,
            });
        }
        // In an order that does not change from run to run.
        stacks.sort_by(|one, other| (other.time, one.tid).cmp(&(one.time, other.tid)));
        let tids: HashSet<i32> = self.found.sums.keys().map(|key| key.tid).collect();
        let counts = self.threads.values().any(|thread| thread.first.is_some());
        let mut times = self.ended;
        for thread in self.threads.values() {
            times.add(thread.times());
        }
        let is_counted = counts || times != ThreadTimes::default();
        Profile {
            stacks,
            seconds: self.last.saturating_duration_since(self.begun),
            samples: self.samples,
            threads: tids.len(),
            times: is_counted.then_some(times),
            stops: self.stops,
            stopped: self.stopped,
            not_stopped: self.not_stopped.as_ref().map(ToString::to_string),
        }
    }
}

impl Watched {
    fn times(&self) -> ThreadTimes {
        let (Some(first), Some(last)) = (self.first, self.last) else {
            return ThreadTimes::default();
        };
        let running = last.0.saturating_sub(first.0);
        let runnable = last.1.saturating_sub(first.1);
        ThreadTimes {
            running,
            runnable,
            off: self
                .present
                .saturating_sub(running.saturating_add(runnable)),
        }
    }
}

/// Returns how long this thread has run.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Returns how many threads may have their files open.
fn most_open() -> usize {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
    usize::try_from(limit.saturating_sub(LEFT_TO_OTHERS) / 2).unwrap_or(usize::MAX)
}

fn shared(stack: RawStack) -> Arc<(Vec<RawFrame>, StackEnd, bool)> {
    Arc::new((stack.frames, stack.end, stack.is_guessed))
}

/// The times that were found.
#[derive(Default)]
struct Found {
    sums: HashMap<Key, Sum>,
    /// How many frames all stacks have.
    frames: usize,
}

impl Found {
    /// Adds time; once there are too many stacks, that of new ones is added to a stack without frames.
    fn add(&mut self, mut key: Key, time: Duration) {
        if let Some(sum) = self.sums.get_mut(&key) {
            return sum.add(time);
        }
        let frames = key.stack.as_ref().map_or(0, |stack| stack.0.len());
        if self.sums.len() >= MOST_STACKS || self.frames + frames > MOST_FRAMES {
            key.stack = None;
        } else {
            self.frames += frames;
        }
        self.sums.entry(key).or_default().add(time);
    }
}

impl Sum {
    fn add(&mut self, time: Duration) {
        self.time = self.time.saturating_add(time);
        self.samples += 1;
    }
}
