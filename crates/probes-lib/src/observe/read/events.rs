//! [`Event`]: one hit, from the record that a trampoline has written of it.
//!
//! ```text
//! Rings ─▶ records ─▶ EventDecoder ─▶ EventBatch, one Event after the other ─▶ Events, all of them
//!          └────── EventReader ─────┘
//! ```

mod batch;
mod decoder;
mod pair_key;
mod point_counters;
mod reader;
mod slow;
mod watched_points;

pub use batch::EventBatch;
pub use pair_key::PairKey;
pub use slow::SlowPair;

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::observe::functions::ObservedFunctions;
use crate::observe::read::copied_stack::CopiedStack;
use crate::observe::read::value::Value;
use crate::process::object::Object;
use crate::process::program::{LiveSite, ProbeId, Program};

pub(crate) use self::reader::EventReader;

/// The hits of a process, one by one.
///
/// ```no_run
/// use std::{thread, time::Duration};
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().watch(Selector::name("req_start"));
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// loop {
///     thread::sleep(Duration::from_millis(50));
///     let read = observer.events()?;
///     for event in &read.events {
///         println!("{} {:?}", event.name(), event.arguments);
///     }
///     if read.dropped > 0 {
///         println!("{} hits were dropped", read.dropped);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Events {
    /// In the order of their times.
    pub events: Vec<Event>,
    /// How many hits, or slow pairs, were lost: overwritten before they were read, with an invalid record, or, of a
    /// function of C, not recorded because there was no place to save registers.
    pub dropped: u64,
    /// How many of these hits have found no free place for their stack: other threads have begun to copy theirs there and
    /// were preempted for long, or signal handlers have left the code that copies them by siglongjmp(3).
    pub without_place: u64,
    /// How many hits were not recorded because of [`Observation::sample`](crate::Observation::sample).
    pub skipped: u64,
    /// How many hits were not recorded because [`Observation::only_where`](crate::Observation::only_where) has no
    /// answer for them; `None` if there is no such expression.
    pub untyped: Option<u64>,
    /// Pairs that lasted long ([`Observation::report_slow`](crate::Observation::report_slow)), in the order of their
    /// ends.
    pub slow_pairs: Vec<SlowPair>,
}

/// A hit.
///
/// ```no_run
/// # let event: probes_lib::Event = unimplemented!();
/// println!("{:?} thread {:?}: {}", event.time, event.thread, event.name());
/// println!("at {} with {:?}", event.address(), event.arguments);
/// ```
#[derive(Clone, Debug)]
pub struct Event {
    /// Its time.
    pub time: SystemTime,
    /// The same on CLOCK_MONOTONIC, in nanoseconds. Times that were read together are in the right order; between two
    /// readings, they may be some hundred nanoseconds off.
    pub monotonic: u64,
    /// The thread's id in our pid namespace; `None` if it is unknown, or if the thread is of
    /// another namespace and has exited.
    pub thread: Option<i32>,
    /// Which kind of hit it is.
    pub kind: EventKind,
    /// Its arguments, decoded, at most six. They are found by the note of the site, or by the calling convention of the
    /// function. Of a return, the result.
    pub arguments: Vec<Value>,
    /// Where the call is, of a function whose exits are recorded
    /// ([`Observation::watch_exits`](crate::Observation::watch_exits)).
    pub frame: Option<CallFrame>,
    /// The key of the pair, if the hit is an end of one, the key is asked for
    /// ([`Observation::with_pair_keys`](crate::Observation::with_pair_keys)), and it has a value.
    pub pair_key: Option<PairKey>,
    /// Its stack, if it was copied ([`Observation::with_stacks`](crate::Observation::with_stacks)). At a return, it is
    /// that of the entry: the frames of the callers are the same.
    pub stack: Option<CopiedStack>,
    within: Arc<Watched>,
    of: EventOrigin,
}

/// What the points of events are in.
#[derive(Debug)]
struct Watched {
    program: Arc<Program>,
    functions: Arc<ObservedFunctions>,
}

/// What kind of hit an event is.
///
/// [`CallFrame`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// A hit of a probe, a call of a function, or an execution of an instruction.
    Hit,
    /// A return of a function.
    Return,
    /// A function is left by a tail call ([`Observation::watch_exits`](crate::Observation::watch_exits),
    /// [`Observation::report_slow`](crate::Observation::report_slow)): its call has ended, and the other function
    /// returns in its place.
    Jump,
}

/// Identifies the frame of a call by its stack, and the place of its return address there. The place of a callee is
/// lower than that of its caller on the same stack. So when a call begins, earlier calls on that stack at its place or
/// a lower one have ended.
///
/// ```no_run
/// use probes_lib::{Event, EventKind, FunctionSelector, Observation, Options, Target};
///
/// let handlers = FunctionSelector::Glob("Http.handle*".parse().unwrap());
/// let observation = Observation::new().watch_functions(handlers).watch_exits();
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let events = observer.events()?.events;
/// for (index, exit) in events.iter().enumerate().filter(|(_, it)| it.kind == EventKind::Return) {
///     let is_call = |it: &&Event| it.kind == EventKind::Hit && it.thread == exit.thread && it.frame == exit.frame;
///     if let Some(call) = events[..index].iter().rfind(is_call) {
///         println!("{} returned after {} ns", exit.name(), exit.monotonic - call.monotonic);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFrame {
    /// The number of the fiber of OCaml 5 that the stack belongs to, which may move between threads; `None` if it is
    /// the stack of the thread.
    pub fiber: Option<u64>,
    /// The place of the return address: its address or, on the stack of a fiber, its distance in bytes from the upper
    /// end, which is negative.
    pub place: i64,
}

/// What was hit.
#[derive(Clone, Copy, Debug)]
enum EventOrigin {
    /// A site of a probe.
    Site { site: usize, probe: ProbeId },
    /// The function with this index among those that are observed.
    Function(usize),
}

impl Event {
    /// Returns the name of its probe, or of its function as in the source; of a function without a name, its address.
    pub fn name(&self) -> &str {
        match self.of {
            EventOrigin::Site { probe, .. } => self.within.program.by_id(probe).name(),
            EventOrigin::Function(index) => &self.within.functions.functions[index].wanted.name,
        }
    }

    /// Returns its site; `None` for a function.
    pub fn site(&self) -> Option<Site<'_>> {
        self.live_site().map(|site| site.site)
    }

    /// Returns the object that its site is in; `None` for a function.
    pub fn object(&self) -> Option<&Object> {
        self.live_site().map(|site| site.object)
    }

    /// Returns the index of that object in [`Target::objects`](crate::Target::objects).
    pub fn object_index(&self) -> Option<usize> {
        let object = self.object()?;
        let mut objects = self.within.program.objects().iter();
        objects.position(|one| std::ptr::eq(one, object))
    }

    /// Returns the path of the file that its site or function is in.
    pub fn path(&self) -> &Path {
        match self.of {
            EventOrigin::Site { site, .. } => self.within.program.site(site).object.path(),
            EventOrigin::Function(index) => &self.within.functions.functions[index].wanted.object,
        }
    }

    /// Returns the address in the process of the site's nop, or of the function or the instruction that is
    /// observed.
    #[inline]
    pub fn address(&self) -> LiveAddr {
        match self.of {
            EventOrigin::Site { site, .. } => self.within.program.site(site).address(),
            EventOrigin::Function(index) => self.within.functions.functions[index].wanted.address,
        }
    }

    fn live_site(&self) -> Option<LiveSite<'_>> {
        match self.of {
            EventOrigin::Site { site, .. } => Some(self.within.program.site(site)),
            EventOrigin::Function(_) => None,
        }
    }
}
