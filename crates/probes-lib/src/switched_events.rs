//! [`SwitchedEvents`]: runtime events that are switched on in a process that runs, and off again.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result, RuntimeEventsError};
use crate::events_switch::EventsSwitch;
use crate::observe::observation::Observation;
use crate::observer::Observer;
use crate::runtime_events::RuntimeEvents;
use crate::target::Target;
use crate::update::options::Options;

/// Runtime events that we have switched on. As long as this exists, the process is observed by it, and by no other
/// observer.
///
/// ```no_run
/// use probes_lib::{Options, Target};
///
/// let target = Target::open_any(4242)?;
/// if let Some(mut switched) = target.switch_on_events(Options::default())? {
///     while !switched.is_on()? {
///         std::thread::sleep(std::time::Duration::from_millis(5));
///     }
///     let events = switched.open()?;
///     switched.remove_file()?;
///     // ...
///     switched.switch_off()?;
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct SwitchedEvents {
    observer: Observer,
}

impl Target {
    /// Switches on the runtime events of a process that runs without them, or has paused them; returns `None` if they
    /// are on already. If they were never on, they come on when OCaml code of the process next allocates: see
    /// [`SwitchedEvents::is_on`].
    ///
    /// # Errors
    ///
    /// - The process has no runtime of OCaml 5 ([`RuntimeEventsError::Ocaml4`], [`RuntimeEventsError::NoRuntime`]).
    /// - It is of a version of OCaml whose events are not known ([`RuntimeEventsError::NoVersion`],
    ///   [`RuntimeEventsError::UnknownVersion`]).
    /// - It cannot be done without risk for the process ([`RuntimeEventsError::CannotSwitchOn`]): its runtime has no
    ///   symbols, it has limited itself with seccomp(2), or might not be able to create the file.
    /// - See [`Target::observe`].
    pub fn switch_on_events(&self, options: Options) -> Result<Option<SwitchedEvents>> {
        self.clean_orphaned(options)?;
        let Some(switch) = EventsSwitch::of(self)? else {
            return Ok(None);
        };
        let observer = self.observe(&switch.added_to(&Observation::new()), options)?;
        let observer = observer.with_events_switch(switch);
        Ok(Some(SwitchedEvents { observer }))
    }

    /// Begins to record hits as [`Target::observe`] does, and also switches on the runtime events of the process, as
    /// [`Target::switch_on_events`] does, unless they are on already. [`Observer::events_are_on`] says whether they are
    /// on by now. [`Observer::remove`] undoes both.
    ///
    /// ```no_run
    /// use probes_lib::{Observation, Options, Selector, Target};
    ///
    /// let target = Target::open(4242)?;
    /// let observation = Observation::new().watch(Selector::All);
    /// let mut observer = target.observe_with_events(&observation, Options::default())?;
    /// while !observer.events_are_on()? {
    ///     println!("{} hits", observer.events()?.events.len());
    /// }
    /// let mut events = observer.open_events()?;
    /// observer.remove_events_file()?;
    /// events.read(|entry| println!("{entry:?}"))?;
    /// observer.remove()?;
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`Target::switch_on_events`] and [`Target::observe`].
    pub fn observe_with_events(
        &self,
        observation: &Observation,
        options: Options,
    ) -> Result<Observer> {
        self.clean_orphaned(options)?;
        let Some(switch) = EventsSwitch::of(self)? else {
            return self.observe(observation, options);
        };
        let observer = self.observe(&switch.added_to(observation), options)?;
        Ok(observer.with_events_switch(switch))
    }

    /// Checks whether [`Target::switch_on_events`] would succeed, as far as that is known without observing the
    /// process; returns whether the events are on already. Changes nothing.
    ///
    /// # Errors
    ///
    /// See [`Target::switch_on_events`].
    pub fn check_events(&self) -> Result<bool> {
        let switch = EventsSwitch::of(self);
        let switch = switch.map_err(|error| self.opened.executed_or(error));
        Ok(switch?.is_none())
    }
}

impl RuntimeEvents {
    /// Opens the events of a process, from now on, unless they are known to be paused: the program writes none until they are
    /// resumed, by itself or by a tool such as `gc`.
    ///
    /// # Errors
    ///
    /// See [`RuntimeEvents::of_process`]; [`RuntimeEventsError::NotOn`] if they are paused.
    pub fn of_process_if_on(pid: i32) -> Result<RuntimeEvents> {
        let events = RuntimeEvents::of_process(pid)?;
        let are_on = Target::open_any(pid).and_then(|target| target.check_events());
        match are_on {
            Ok(false) => Err(Error::of_process(pid, RuntimeEventsError::NotOn)),
            // If it is not known, a reader will see.
            Ok(true) | Err(_) => Ok(events),
        }
    }
}

impl SwitchedEvents {
    /// Returns whether they are on by now. Does not stop the process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::check`], [`Observer::events_are_on`].
    pub fn is_on(&self) -> Result<bool> {
        self.observer.check()?;
        self.observer.events_are_on()
    }

    /// Opens the events, to read those that are written from now on. They have to be on ([`SwitchedEvents::is_on`](Self::is_on)).
    ///
    /// # Errors
    ///
    /// Same as [`RuntimeEvents::of_process`].
    pub fn open(&self) -> Result<RuntimeEvents> {
        self.observer.open_events()
    }

    /// Returns why the events are not on yet: the error of [`SwitchedEvents::is_on`], or that the process has neither
    /// allocated nor collected.
    pub fn why_not_on(&self) -> Error {
        let pid = self.observer.target().pid();
        self.is_on()
            .err()
            .unwrap_or_else(|| Error::of_process(pid, RuntimeEventsError::Idle))
    }

    /// Removes the name of the file that the process has created, if it has: the process goes on writing to the file,
    /// and readers that have opened it go on reading it. If the name cannot be removed, returns the path and the
    /// reason.
    ///
    /// # Errors
    ///
    /// If the process has exited.
    pub fn remove_file(&mut self) -> Result<Option<(PathBuf, io::Error)>> {
        self.observer.remove_events_file()
    }

    /// Returns how long the process was stopped to switch them on, at most.
    pub fn stopped(&self) -> Duration {
        self.observer.stopped()
    }

    /// Restores the state in which the events were found, off or paused, and removes the observation. Only the mapping
    /// of the file is left in the process.
    ///
    /// # Errors
    ///
    /// See [`Observer::remove`].
    pub fn switch_off(&mut self) -> Result<()> {
        self.observer.remove().map(|_| ())
    }
}
