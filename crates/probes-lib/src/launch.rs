//! [`Launch`]: starts a program whose probes are set before its entry.

mod executable;
mod set_up;
pub(crate) mod split;
mod until_ocaml;

use std::fmt;
use std::path::PathBuf;
use std::process::{Child, Command};

use self::executable::{check_names, error_of_launch, refuse_privileged, refuse_shell, resolve};
use self::set_up::{Ready, SetUp};
use self::until_ocaml::Patched;
use crate::error::{Effect, Result};
use crate::observe::Observation;
use crate::observe::install::at_launch::AtLaunch;
use crate::observer::Observer;
use crate::select::Actions;
use crate::sys::signals::SignalsAtLaunch;
use crate::target::Target;
use crate::trace::at_exec::{self, SpawnedChild};
use crate::trace::tracer::with_tracer;
use crate::update::code_digest::CodeDigest;
use crate::update::options::Options;
use crate::update::report::Report;

/// A program to be started with its probes set before its entry and, if its loader allows it, before the initialisers of its
/// libraries.
///
/// ```no_run
/// use std::process::Command;
/// use probes_lib::{Action, Actions, Launch, Selector};
///
/// let mut program = Command::new("./server.exe");
/// program.arg("--port=8080");
/// let launched = Launch::new(program)
///     .actions(Actions::of(Action::Enable, Selector::All))
///     .spawn()?;
/// println!("started {}", launched.report().pid);
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct Launch {
    command: Command,
    actions: Actions,
    options: Options,
    /// Whether the caller waits for the program, which is then a job of the shell: see `job.rs`.
    pub(crate) attended: bool,
    observation: Option<Observation>,
    may_lack_probes: bool,
}

impl Launch {
    /// Prepares to start the program of `command`, with its arguments, environment, directory and
    /// descriptors.
    pub fn new(command: Command) -> Launch {
        Launch {
            command,
            actions: Actions::new(),
            options: Options::default(),
            attended: false,
            observation: None,
            may_lack_probes: false,
        }
    }

    /// Sets what to do with its probes; nothing by default.
    #[must_use]
    pub fn actions(mut self, actions: Actions) -> Launch {
        self.actions = actions;
        self
    }

    /// Sets the [`Options`]; `live` does not matter, as nothing runs yet.
    #[must_use]
    pub fn options(mut self, options: Options) -> Launch {
        self.options = options;
        self
    }

    /// Observes the hits of its probes as well, from the first one to the last: also the last ones can be read after the
    /// program has exited ([`Launched::take_observer`]). Processes that it forks add to the counts and events, and
    /// disturb the times of pairs. Libraries that it loads after its start are not observed.
    #[must_use]
    pub fn observe(mut self, observation: Observation) -> Launch {
        self.observation = Some(observation);
        self
    }

    /// Also starts a program that has no probes, if no actions are given and no probes are to be observed.
    #[must_use]
    pub fn may_lack_probes(mut self) -> Launch {
        self.may_lack_probes = true;
        self
    }

    /// Starts the program, sets its probes and runs it.
    ///
    /// # Errors
    ///
    /// If the program cannot be found, read, executed or traced, if it has no OCaml probes (unless only functions are
    /// observed, or it [may lack them](Launch::may_lack_probes)), or if the actions cannot be applied to these. None of
    /// its OCaml code has run then, and no child is left behind.
    pub fn spawn(self) -> Result<Launched> {
        self.try_spawn()
            .map_err(|error| error.with_effect(Effect::NotStarted))
    }

    fn try_spawn(self) -> Result<Launched> {
        let Launch {
            mut command,
            actions,
            options,
            attended,
            observation,
            may_lack_probes,
        } = self;
        let file = resolve(&command);
        // A program may have no probes if only its functions are observed.
        let observes_probes = match &observation {
            Some(observation) => observation.needs_probes(),
            None => !may_lack_probes,
        };
        let needs_probes = !actions.is_empty() || observes_probes;
        if let Some(file) = &file {
            refuse_privileged(file)?;
            if needs_probes {
                check_names(file, &actions)?;
            }
        }
        let program = PathBuf::from(command.get_program());
        let at_launch = observation.map(|observation| AtLaunch::of(observation, &mut command));
        let at_launch = at_launch.transpose()?;
        let signals = SignalsAtLaunch::new(attended);
        let inherited = signals.inherited();
        let mut spawned = SpawnedChild::default();
        let launched = with_tracer(&[], |tracer| {
            let at_exec = at_exec::spawn_to_exec(tracer, command, inherited, &mut spawned)?;
            refuse_shell(at_exec.process(), file.as_deref(), &program)?;
            let set_up = SetUp {
                tracer,
                at_exec: &at_exec,
                program: &program,
                actions: &actions,
                options,
                allow_missing_names: !needs_probes,
            };
            // On an error, dropping what is stopped kills the program, and dropping `spawned` reaps it.
            release(set_up.run()?, &set_up, at_launch)
        });
        let (report, observer) =
            launched.map_err(|error| error_of_launch(error, program, file.as_deref()))?;
        let child = spawned.take(report.pid)?;
        if attended {
            signals.keep_blocked();
        }
        Ok(Launched {
            child,
            report,
            observer,
        })
    }
}

/// Lets a program run whose probes are set, and begins to observe it, if it is to be observed.
fn release(
    ready: Ready<'_>,
    set_up: &SetUp<'_>,
    at_launch: Option<AtLaunch>,
) -> Result<(Report, Option<Observer>)> {
    let Ready {
        stopped,
        mut report,
        ..
    } = ready;
    if at_launch.is_none() && report.code_digest != CodeDigest::Pending {
        stopped.release();
        return Ok((report, None));
    }
    let target = if set_up.allow_missing_names {
        Target::open_any(report.pid)?
    } else {
        Target::open(report.pid)?
    };
    let options = set_up.options;
    let patched = Patched {
        tracer: set_up.tracer,
        at_exec: set_up.at_exec,
        image: &*target.opened.current_image()?,
        memory: &target.opened.unshadowed_memory()?,
        options,
    };
    let installed = patched.release(at_launch, stopped, &mut report)?;
    let observer = installed.map(|installed| Observer::of(target.clone(), installed, options));
    Ok((report, observer))
}

/// A program that was started with its probes set, and runs.
///
/// ```no_run
/// use std::process::Command;
/// use probes_lib::Launch;
///
/// let mut launched = Launch::new(Command::new("./server.exe")).spawn()?;
/// println!("started process {}", launched.report().pid);
/// println!("it has exited: {:?}", launched.child().wait());
/// # Ok::<(), probes_lib::Error>(())
/// ```
///
/// Dropping it leaves the program running, as dropping a [`Child`] does.
pub struct Launched {
    child: Child,
    report: Report,
    observer: Option<Observer>,
}

impl fmt::Debug for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Launched");
        text.field("child", &self.child)
            .field("report", &self.report);
        text.finish_non_exhaustive()
    }
}

impl Launched {
    /// Returns what was done to its probes, and its pid.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns the observer of the program, if it was to be observed; `None` from the second call on.
    pub fn take_observer(&mut self) -> Option<Observer> {
        self.observer.take()
    }

    /// Returns the program as a child of this process: to wait for, or to drop, which leaves it running.
    ///
    /// When this process stops the program, as an [`Observer`] does when it is removed, waitpid(2) reports that in any
    /// thread of this process. So [`Child::wait`] and [`Child::try_wait`] may return a status with neither a code nor a
    /// signal: wait again then, or call [`Launched::has_exited`] before.
    pub fn into_child(self) -> Child {
        self.child
    }

    /// Returns the program as a child of this process, to wait for; see [`Launched::into_child`].
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }
}
