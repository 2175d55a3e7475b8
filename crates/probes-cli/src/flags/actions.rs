//! The flags that say which probes to enable and which to disable.

use probes_lib::{Action, Actions, Selector};

use super::checked::{Flags, each_once};
use super::pairs::{Pair, pair};
use super::probe_selection::{probe_name, regexp};

/// The flags that -enable and -disable cannot be combined with.
const OTHER_KINDS: [&str; 6] = [
    "enable_all",
    "disable_all",
    "enable_regexp",
    "disable_regexp",
    "enable_pair",
    "disable_pair",
];

// Actions of one kind: -enable and -disable, or one of the other flags.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Actions")]
pub(crate) struct ActionFlags {
    /// Enable these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = probe_name)]
    #[arg(conflicts_with_all = OTHER_KINDS)]
    enable: Vec<String>,
    /// Disable these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = probe_name)]
    #[arg(conflicts_with_all = OTHER_KINDS)]
    disable: Vec<String>,
    /// Enable all probes
    #[arg(long, group = "kind")]
    enable_all: bool,
    /// Disable all probes
    #[arg(long, group = "kind")]
    disable_all: bool,
    /// Enable the probes whose name RE matches at its start
    #[arg(long, value_name = "RE", value_parser = regexp, group = "kind")]
    enable_regexp: Option<Selector>,
    /// Disable the probes whose name RE matches at its start
    #[arg(long, value_name = "RE", value_parser = regexp, group = "kind")]
    disable_regexp: Option<Selector>,
    /// Enable the probes at the start and stop of an event; STOP first
    #[arg(long, value_name = "START,STOP", value_parser = two_probes, group = "kind")]
    enable_pair: Option<Selector>,
    /// Disable the probes at the start and stop of an event; START first
    #[arg(long, value_name = "START,STOP", value_parser = two_probes, group = "kind")]
    disable_pair: Option<Selector>,
}

/// What `attach` is to do.
#[derive(Debug)]
pub(crate) enum RequestedChange {
    Actions(Actions),
    /// Undo what dead holders have changed.
    ReleaseDead,
}

// [`ActionFlags`], of which at least one must be given, or -release-dead.
#[derive(Debug, clap::Args)]
pub(crate) struct ChangeFlags {
    #[command(flatten)]
    actions: ActionFlags,
    /// Undo what killed commands with -for have changed
    #[arg(long, help_heading = "Actions")]
    #[arg(conflicts_with_all = ["enable", "disable", "kind", "force", "follow", "duration"])]
    release_dead: bool,
}

impl Flags for ChangeFlags {
    type Value = RequestedChange;

    fn check(self) -> Result<RequestedChange, String> {
        let actions = self.actions.check()?.map(RequestedChange::Actions);
        let release = self.release_dead.then_some(RequestedChange::ReleaseDead);
        let needed = || "needs an action, such as -enable NAMES".to_owned();
        actions.or(release).ok_or_else(needed)
    }
}

impl Flags for ActionFlags {
    /// `None` if there are no actions.
    type Value = Option<Actions>;

    fn check(self) -> Result<Option<Actions>, String> {
        use Action::{Disable, Enable};
        let kinds = [
            (Enable, self.enable_all.then_some(Selector::All)),
            (Disable, self.disable_all.then_some(Selector::All)),
            (Enable, self.enable_regexp),
            (Disable, self.disable_regexp),
            (Enable, self.enable_pair),
            (Disable, self.disable_pair),
        ];
        let mut kinds = kinds.into_iter();
        if let Some((action, selector)) =
            kinds.find_map(|(action, selector)| Some((action, selector?)))
        {
            return Ok(Some(Actions::of(action, selector)));
        }
        if self.enable.is_empty() && self.disable.is_empty() {
            return Ok(None);
        }
        each_once("-enable", &self.enable)?;
        each_once("-disable", &self.disable)?;
        if let Some(both) = self.enable.iter().find(|name| self.disable.contains(name)) {
            return Err(format!("\"{both}\" is given to both -enable and -disable"));
        }
        let names = self.enable.iter().map(|name| (Enable, name));
        let names = names.chain(self.disable.iter().map(|name| (Disable, name)));
        let actions = names.fold(Actions::new(), |actions, (action, name)| {
            actions.and(action, Selector::name(name))
        });
        Ok(Some(actions))
    }
}

/// Reads two names, which must differ.
fn two_probes(typed: &str) -> Result<Selector, String> {
    let Pair { start, stop } = pair(typed)?;
    if start == stop {
        return Err(format!("\"{start}\" is given twice"));
    }
    Ok(Selector::Pair { start, stop })
}
