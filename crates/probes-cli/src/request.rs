//! What is usable: checked as far as can be without the program it is about, before anything runs.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Action, Actions, Selector};
use regex::Regex;

use crate::args::{ActionArgs, AnswerArgs, Typed, WhomArgs};
use crate::messages::{Level, Messages};
use crate::output::Format;
use crate::usage::{Stop, UsageError};

/// More often than that, a screen only costs.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// What to do, ready to be done.
#[derive(Debug)]
pub(crate) enum Request {
    Trace(Trace),
    Attach(Attach),
    Info(Info),
    List(List),
    Ps(Ps),
    Count(Count),
    Top(Top),
}

#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) actions: Actions,
    pub(crate) wait: bool,
    pub(crate) follow: bool,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Attach {
    pub(crate) whom: Whom,
    pub(crate) actions: Actions,
    pub(crate) live: bool,
    pub(crate) follow: bool,
    /// How long it is to stay so, if not for ever.
    pub(crate) duration: Option<Duration>,
    pub(crate) gigatext: bool,
    pub(crate) answer: Answer,
}

/// Which processes.
#[derive(Debug)]
pub(crate) struct Whom {
    /// Each once.
    pub(crate) pids: Vec<i32>,
    /// Also those whose program's name it matches, from its start.
    pub(crate) name: Option<Regex>,
}

#[derive(Debug)]
pub(crate) struct Info {
    pub(crate) whom: Whom,
    pub(crate) sites: bool,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct List {
    pub(crate) file: PathBuf,
    pub(crate) sites: bool,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Count {
    pub(crate) pid: i32,
    pub(crate) selectors: Vec<Selector>,
    pub(crate) sites: bool,
    /// How long, if not until told to end.
    pub(crate) duration: Option<Duration>,
    /// How often what was counted so far is shown.
    pub(crate) interval: Option<Duration>,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Top {
    pub(crate) pid: i32,
    pub(crate) selectors: Vec<Selector>,
    /// Those that the times are taken of: start and stop.
    pub(crate) pairs: Vec<(String, String)>,
    /// How often the screen is renewed.
    pub(crate) interval: Duration,
    pub(crate) messages: Messages,
}

#[derive(Debug)]
pub(crate) struct Ps {
    pub(crate) answer: Answer,
}

/// How to answer, and what else to say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) format: Format,
    pub(crate) messages: Messages,
}

impl Request {
    /// Checks what was typed.
    pub(crate) fn of(typed: Typed) -> Result<Request, Stop> {
        Ok(match typed {
            Typed::Trace(args) => {
                let check = Check("trace");
                let actions = check.actions(&args.actions)?;
                Request::Trace(Trace {
                    program: check.given(args.prog, "-prog FILE")?,
                    arguments: args.arguments,
                    actions: actions.unwrap_or(Actions::of(Action::Enable, Selector::All)),
                    wait: args.wait,
                    follow: args.follow,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Attach(args) => {
                let check = Check("attach");
                let whom = check.whom(args.whom)?;
                let Some(actions) = check.actions(&args.actions)? else {
                    return check.refuse("no action given, such as -enable NAMES");
                };
                for (flag, given) in [("-live", args.live), ("-for", args.duration.is_some())] {
                    if args.follow && given {
                        return check.refuse(format!("-follow and {flag} cannot be combined"));
                    }
                }
                Request::Attach(Attach {
                    whom,
                    actions: actions.force(args.force),
                    live: args.live,
                    follow: args.follow,
                    duration: check.duration("-for", args.duration)?,
                    gigatext: args.gigatext,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Info(args) => {
                let check = Check("info");
                Request::Info(Info {
                    whom: check.whom(args.whom)?,
                    sites: args.sites,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::List(args) => {
                let check = Check("list");
                Request::List(List {
                    file: check.given(args.prog, "-prog FILE")?.into(),
                    sites: args.sites,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Count(args) => {
                let check = Check("count");
                Request::Count(Count {
                    pid: check.one_pid(args.pid.as_deref())?,
                    selectors: check.selection(&args.probe, args.regexp.as_deref())?,
                    sites: args.sites,
                    duration: check.duration("-for", args.duration)?,
                    interval: check.duration("-interval", args.interval)?,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Top(args) => {
                let check = Check("top");
                let interval = check.duration("-interval", args.interval)?;
                let interval = interval.unwrap_or(Duration::from_secs(1));
                if interval < SHORTEST_INTERVAL {
                    return check.refuse(format!(
                        "-interval {} is too short for a screen; {} is the shortest",
                        humantime::format_duration(interval),
                        humantime::format_duration(SHORTEST_INTERVAL),
                    ));
                }
                Request::Top(Top {
                    pid: check.one_pid(args.pid.as_deref())?,
                    selectors: check.selection(&args.probe, args.regexp.as_deref())?,
                    pairs: check.timed("-pair", &args.pair)?,
                    interval,
                    messages: Messages::new(check.level(args.quiet, args.verbose)?),
                })
            }
            Typed::Ps(args) => Request::Ps(Ps {
                answer: Check("ps").answer(&args.answer)?,
            }),
            Typed::Version => {
                let version = format!("ocaml-probes {}\n", env!("CARGO_PKG_VERSION"));
                return Err(Stop::Asked(version));
            }
        })
    }

    /// Where its messages go.
    pub(crate) fn messages(&self) -> Messages {
        match self {
            Request::Trace(Trace { answer, .. })
            | Request::Attach(Attach { answer, .. })
            | Request::Info(Info { answer, .. })
            | Request::List(List { answer, .. })
            | Request::Count(Count { answer, .. })
            | Request::Ps(Ps { answer }) => answer.messages,
            Request::Top(Top { messages, .. }) => *messages,
        }
    }
}

/// The checks of one subcommand, whose name is in their errors.
struct Check(&'static str);

impl Check {
    fn refuse<T, E: From<UsageError>>(&self, message: impl Into<String>) -> Result<T, E> {
        Err(UsageError::new(Some(self.0), message).into())
    }

    fn given(&self, value: Option<OsString>, flag: &str) -> Result<OsString, UsageError> {
        match value {
            Some(value) if !value.is_empty() => Ok(value),
            Some(_) => self.refuse(format!("{flag} is empty")),
            None => self.refuse(format!("no {flag} given")),
        }
    }

    fn whom(&self, typed: WhomArgs) -> Result<Whom, UsageError> {
        let mut pids = Vec::with_capacity(typed.pid.len());
        for one in typed.pid {
            let pid = self.pid(&one)?;
            if pids.contains(&pid) {
                return self.refuse(format!("-pid {pid} is given twice"));
            }
            pids.push(pid);
        }
        let name = match typed.name {
            Some(name) => match Regex::new(&name) {
                Ok(name) => Some(name),
                Err(_) => {
                    return self.refuse(format!("-name: \"{name}\" is not a regular expression"));
                }
            },
            None => None,
        };
        if pids.is_empty() && name.is_none() {
            return self.refuse("no -pid N given, and no -name RE");
        }
        Ok(Whom { pids, name })
    }

    fn one_pid(&self, typed: Option<&str>) -> Result<i32, UsageError> {
        match typed {
            Some(typed) => self.pid(typed),
            None => self.refuse("no -pid N given"),
        }
    }

    fn pid(&self, typed: &str) -> Result<i32, UsageError> {
        // `parse` would also take a sign.
        let digits = typed.bytes().all(|byte| byte.is_ascii_digit());
        match typed.parse() {
            Ok(pid) if digits && pid > 0 => Ok(pid),
            _ => self.refuse(format!("\"{typed}\" is not a pid")),
        }
    }

    fn duration(&self, flag: &str, typed: Option<String>) -> Result<Option<Duration>, UsageError> {
        let Some(typed) = typed else {
            return Ok(None);
        };
        // humantime's M is a month, and people who type it mean minutes.
        if typed.contains('M') {
            return self.refuse(format!("{flag}: \"{typed}\" means months; minutes are m"));
        }
        match humantime::parse_duration(&typed) {
            Ok(duration) if !duration.is_zero() => Ok(Some(duration)),
            Ok(_) => self.refuse(format!("{flag} has to be longer than {typed}")),
            Err(_) => self.refuse(format!(
                "{flag}: \"{typed}\" is not a duration, such as 30s, 5m or 1h30m"
            )),
        }
    }

    fn answer(&self, args: &AnswerArgs) -> Result<Answer, UsageError> {
        let format = match (args.json, args.format.as_deref()) {
            (true, Some(_)) => return self.refuse("-json and -format cannot be combined"),
            (true, None) | (false, Some("json")) => Format::Json,
            (false, Some("plain")) => Format::Plain,
            (false, Some("table")) => Format::Table,
            (false, None) if stdout().is_terminal() => Format::Table,
            (false, None) => Format::Plain,
            (false, Some(other)) => {
                return self.refuse(format!(
                    "\"{other}\" is not a format: there are plain, table and json"
                ));
            }
        };
        Ok(Answer {
            format,
            messages: Messages::new(self.level(args.quiet, args.verbose)?),
        })
    }

    fn level(&self, quiet: bool, verbose: bool) -> Result<Level, UsageError> {
        match (quiet, verbose) {
            (true, true) => self.refuse("-quiet and -verbose cannot be combined"),
            (true, false) => Ok(Level::Errors),
            (false, false) => Ok(Level::Warnings),
            (false, true) => Ok(Level::Steps),
        }
    }

    /// The actions, of one family; `None` if there are none.
    fn actions(&self, args: &ActionArgs) -> Result<Option<Actions>, UsageError> {
        let ActionArgs {
            enable,
            disable,
            enable_all,
            disable_all,
            enable_regexp,
            disable_regexp,
            enable_pair,
            disable_pair,
        } = args;
        let mut families: Vec<(&str, Actions)> = Vec::new();
        match (enable.is_empty(), disable.is_empty()) {
            (true, true) => {}
            (false, true) => families.push(("-enable", self.names(enable, disable)?)),
            (true, false) => families.push(("-disable", self.names(enable, disable)?)),
            (false, false) => families.push(("-enable -disable", self.names(enable, disable)?)),
        }
        for (flag, given, action) in [
            ("-enable-all", *enable_all, Action::Enable),
            ("-disable-all", *disable_all, Action::Disable),
        ] {
            if given {
                families.push((flag, Actions::of(action, Selector::All)));
            }
        }
        for (flag, given, action) in [
            ("-enable-regexp", enable_regexp, Action::Enable),
            ("-disable-regexp", disable_regexp, Action::Disable),
        ] {
            if let Some(pattern) = given {
                families.push((flag, Actions::of(action, self.regexp(flag, pattern)?)));
            }
        }
        for (flag, given, action) in [
            ("-enable-pair", enable_pair, Action::Enable),
            ("-disable-pair", disable_pair, Action::Disable),
        ] {
            if let Some(names) = given {
                families.push((flag, Actions::of(action, self.pair(flag, names)?)));
            }
        }
        match families.as_slice() {
            [(one, _), (other, _), ..] => {
                self.refuse(format!("{one} and {other} cannot be combined"))
            }
            _ => Ok(families.pop().map(|(_, actions)| actions)),
        }
    }

    fn names(&self, enable: &[String], disable: &[String]) -> Result<Actions, UsageError> {
        let mut actions = Actions::new();
        let mut sides: HashMap<&str, Action> = HashMap::new();
        for (flag, lists, action) in [
            ("-enable", enable, Action::Enable),
            ("-disable", disable, Action::Disable),
        ] {
            for name in lists.iter().flat_map(|list| list.split(',')) {
                self.name(flag, name)?;
                match sides.insert(name, action) {
                    None => actions = actions.and(action, Selector::name(name)),
                    Some(before) if before == action => {
                        return self.refuse(format!("{flag} has \"{name}\" twice"));
                    }
                    Some(_) => {
                        return self.refuse(format!("both -enable and -disable have \"{name}\""));
                    }
                }
            }
        }
        Ok(actions)
    }

    /// The probes that are counted: those of -probe or -regexp, or all.
    fn selection(
        &self,
        names: &[String],
        pattern: Option<&str>,
    ) -> Result<Vec<Selector>, UsageError> {
        match (names.is_empty(), pattern) {
            (true, None) => Ok(vec![Selector::All]),
            (true, Some(pattern)) => Ok(vec![self.regexp("-regexp", pattern)?]),
            (false, None) => self.selectors("-probe", names),
            (false, Some(_)) => self.refuse("-probe and -regexp cannot be combined"),
        }
    }

    /// Probes by their names, each once.
    fn selectors(&self, flag: &str, lists: &[String]) -> Result<Vec<Selector>, UsageError> {
        let mut names: Vec<&str> = Vec::new();
        for name in lists.iter().flat_map(|list| list.split(',')) {
            self.name(flag, name)?;
            if names.contains(&name) {
                return self.refuse(format!("{flag} has \"{name}\" twice"));
            }
            names.push(name);
        }
        Ok(names.into_iter().map(Selector::name).collect())
    }

    fn name(&self, flag: &str, name: &str) -> Result<(), UsageError> {
        if name.is_empty() {
            return self.refuse(format!("{flag} has an empty name"));
        }
        if name.starts_with('-') {
            return self.refuse(format!(
                "{flag} has \"{name}\", which is not a probe's name"
            ));
        }
        Ok(())
    }

    fn regexp(&self, flag: &str, pattern: &str) -> Result<Selector, UsageError> {
        match Selector::regexp(pattern) {
            Ok(selector) => Ok(selector),
            Err(error) => self.refuse(format!("{flag}: {error}")),
        }
    }

    fn pair(&self, flag: &str, names: &str) -> Result<Selector, UsageError> {
        let (start, stop) = self.two_names(flag, names)?;
        if start == stop {
            return self.refuse(format!("{flag} has \"{start}\" twice"));
        }
        Ok(Selector::Pair { start, stop })
    }

    /// The pairs that times are taken of, each once. One probe can be both: from hit to hit.
    fn timed(&self, flag: &str, typed: &[String]) -> Result<Vec<(String, String)>, UsageError> {
        let mut pairs = Vec::new();
        for names in typed {
            let pair = self.two_names(flag, names)?;
            if pairs.contains(&pair) {
                return self.refuse(format!("{flag} {names} is given twice"));
            }
            pairs.push(pair);
        }
        Ok(pairs)
    }

    fn two_names(&self, flag: &str, names: &str) -> Result<(String, String), UsageError> {
        let pair: Vec<&str> = names.split(',').collect();
        let &[start, stop] = pair.as_slice() else {
            return self.refuse(format!(
                "{flag} takes two names, START,STOP, not \"{names}\""
            ));
        };
        self.name(flag, start)?;
        self.name(flag, stop)?;
        Ok((start.to_owned(), stop.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use crate::args;

    use super::*;

    fn request(line: &str) -> Result<Request, Stop> {
        let argv = line.split(' ').map(OsString::from);
        args::parse(argv).and_then(Request::of)
    }

    fn refusal(line: &str) -> String {
        match request(line) {
            Err(Stop::Usage(error)) => error.to_string(),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn actions(line: &str) -> String {
        match request(&format!("x attach -pid 7 {line}")) {
            Ok(Request::Attach(attach)) => format!("{:?}", attach.actions),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn comma_lists_add_up_over_both_sides() {
        let expected = Actions::new()
            .enable(Selector::name("a"))
            .enable(Selector::name("b"))
            .enable(Selector::name("c"))
            .disable(Selector::name("d"));
        let line = "-enable a,b -disable d -enable c";
        assert_eq!(actions(line), format!("{expected:?}"));
    }

    #[test]
    fn force_goes_with_every_family() {
        for family in [
            "-enable a -disable b",
            "-enable-all",
            "-disable-regexp a",
            "-enable-pair a,b",
        ] {
            assert!(actions(&format!("{family} -force")).contains("force: true"));
            assert!(actions(family).contains("force: false"));
        }
    }

    #[test]
    fn two_families_are_refused() {
        let families = [
            "-enable=a",
            "-enable-all",
            "-disable-all",
            "-enable-regexp=a",
            "-disable-regexp=a",
            "-enable-pair=a,b",
            "-disable-pair=a,b",
        ];
        for (index, one) in families.iter().enumerate() {
            for other in &families[index + 1..] {
                let message = refusal(&format!("x attach -pid 7 {other} {one}"));
                assert!(message.ends_with("cannot be combined"), "{message}");
            }
            let message = refusal(&format!("x attach -pid 7 {one} {one}"));
            let twice = ["is given more than once", "has \"a\" twice"];
            assert!(twice.iter().any(|end| message.ends_with(end)), "{message}");
        }
    }

    #[test]
    fn a_pid_is_a_positive_decimal_number() {
        for pid in [
            "0",
            "-1",
            "+7",
            "0x7",
            "7.0",
            "",
            " 7",
            "2147483648",
            "self",
            "７",
        ] {
            // A space cannot be typed into these test lines, which are split there.
            let line = ["x", "info", "-pid", pid].map(OsString::from);
            let refused = args::parse(line).and_then(Request::of);
            assert!(matches!(refused, Err(Stop::Usage(_))), "{pid:?}");
        }
        for pid in ["7", "007", "2147483647"] {
            assert!(request(&format!("x info -pid {pid}")).is_ok(), "{pid}");
        }
    }
}
