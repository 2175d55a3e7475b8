//! `-events`: runtime events of OCaml 5, instead of hits of probes and functions.

use clap::ArgMatches;
use clap::parser::ValueSource;
use probes_lib::Glob;

use super::checked::{EMPTY_NAME, Flags, each_once};

/// The name that selects all events.
const ALL: &str = "all";

/// The name of the flag, for clap.
const EVENTS: &str = "events";

/// The flags that mean something for runtime events, of all commands that have -events. The others are about hits.
const BESIDE_EVENTS: [&str; 14] = [
    EVENTS, "pid", "duration", "interval", "limit", "linear", "svg", "force", "output", "format",
    "json", "verbose", "quiet", "help",
];

// Some runtime events.
#[derive(Debug, clap::Args)]
pub(crate) struct EventFlags {
    /// Observe runtime events of OCaml 5 instead: globs of names, or all
    #[arg(id = "events", long, value_name = "NAMES", value_delimiter = ',', value_parser = event)]
    events: Vec<EventArgument>,
}

/// Some runtime events, as they were typed and what that means.
#[derive(Clone, Debug)]
struct EventArgument {
    typed: String,
    /// `None`: all.
    glob: Option<Glob>,
}

impl EventFlags {
    /// The globs for names of events, an empty list for all; `None` if the flag is not given.
    pub(super) fn globs(self) -> Result<Option<Vec<Glob>>, String> {
        let typed: Vec<&String> = self.events.iter().map(|it| &it.typed).collect();
        each_once("-events", &typed)?;
        let many = self.events.len();
        let globs: Vec<Glob> = self.events.into_iter().filter_map(|it| it.glob).collect();
        if many > 1 && globs.len() < many {
            return Err("-events: all cannot be combined with other names".to_owned());
        }
        Ok((many > 0).then_some(globs))
    }
}

fn event(typed: &str) -> Result<EventArgument, String> {
    let typed = typed.trim();
    let glob = match typed {
        "" => return Err(EMPTY_NAME.to_owned()),
        ALL => None,
        _ => Some(
            typed
                .parse()
                .map_err(|error| format!("\"{typed}\" is {error}"))?,
        ),
    };
    let typed = typed.to_owned();
    Ok(EventArgument { typed, glob })
}

/// Refuses flags that have no meaning beside -events.
pub(super) fn refuse_beside_events(matches: &ArgMatches) -> Result<(), String> {
    let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    if !is_given(EVENTS) {
        return Ok(());
    }
    let ids = matches.ids().map(clap::Id::as_str);
    // Groups of flags have the names of their types.
    let mut flags = ids.filter(|id| !id.starts_with(|it: char| it.is_ascii_uppercase()));
    match flags.find(|id| !BESIDE_EVENTS.contains(id) && is_given(id)) {
        None => Ok(()),
        Some(flag) => {
            let flag = flag.replace('_', "-");
            Err(format!("-events and -{flag} cannot be combined"))
        }
    }
}

// Runtime events, or what else a command observes.
#[derive(Debug, clap::Args)]
pub(crate) struct EventsOr<F: clap::Args> {
    #[command(flatten)]
    events: EventFlags,
    #[command(flatten)]
    hits: F,
}

/// What a command observes.
#[derive(Debug)]
pub(crate) enum EventsOrHits<H> {
    /// Runtime events whose names match; all if there are none.
    Events(Vec<Glob>),
    Hits(H),
}

impl<F: Flags> Flags for EventsOr<F> {
    type Value = EventsOrHits<F::Value>;

    fn check(self) -> Result<EventsOrHits<F::Value>, String> {
        match self.events.globs()? {
            Some(globs) => Ok(EventsOrHits::Events(globs)),
            None => self.hits.check().map(EventsOrHits::Hits),
        }
    }

    fn check_others(matches: &ArgMatches) -> Result<(), String> {
        refuse_beside_events(matches)
    }
}
