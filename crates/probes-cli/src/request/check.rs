//! [`Check`]: what was typed, flag by flag, made what it means or refused.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::time::Duration;

use probes_lib::{Action, Actions, Selector};
use regex::Regex;

use super::{Answer, Observed, Whom};
use crate::args::{ActionArgs, AnswerArgs, WhomArgs};
use crate::messages::{Level, Messages};
use crate::output::Format;
use crate::usage::UsageError;

/// The checks of one subcommand, whose name is in their errors.
pub(super) struct Check(pub(super) &'static str);

impl Check {
    pub(super) fn refuse<T, E: From<UsageError>>(
        &self,
        message: impl Into<String>,
    ) -> Result<T, E> {
        Err(UsageError::new(Some(self.0), message).into())
    }

    pub(super) fn given(
        &self,
        value: Option<OsString>,
        flag: &str,
    ) -> Result<OsString, UsageError> {
        match value {
            Some(value) if !value.is_empty() => Ok(value),
            Some(_) => self.refuse(format!("{flag} is empty")),
            None => self.refuse(format!("no {flag} given")),
        }
    }

    pub(super) fn whom(&self, typed: WhomArgs) -> Result<Whom, UsageError> {
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

    pub(super) fn one_pid(&self, typed: Option<&str>) -> Result<i32, UsageError> {
        match typed {
            Some(typed) => self.pid(typed),
            None => self.refuse("no -pid N given"),
        }
    }

    pub(super) fn pid(&self, typed: &str) -> Result<i32, UsageError> {
        // `parse` would also take a sign.
        let digits = typed.bytes().all(|byte| byte.is_ascii_digit());
        match typed.parse() {
            Ok(pid) if digits && pid > 0 => Ok(pid),
            _ => self.refuse(format!("\"{typed}\" is not a pid")),
        }
    }

    /// What is to be learnt of a program that is started, if anything.
    pub(super) fn observed(
        &self,
        counts: bool,
        pairs: &[String],
        watched: &[String],
    ) -> Result<Option<Observed>, UsageError> {
        let observed = Observed {
            counts,
            pairs: self.timed("-latency", pairs)?,
            watched: match watched.is_empty() {
                true => Vec::new(),
                false => self.selectors("-watch", watched)?,
            },
        };
        let is_any = counts || !pairs.is_empty() || !watched.is_empty();
        Ok(is_any.then_some(observed))
    }

    /// A number of things, at least one.
    pub(super) fn number(
        &self,
        flag: &str,
        typed: Option<String>,
    ) -> Result<Option<u64>, UsageError> {
        let Some(typed) = typed else {
            return Ok(None);
        };
        // `parse` would also take a sign.
        let digits = typed.bytes().all(|byte| byte.is_ascii_digit());
        match typed.parse() {
            Ok(number) if digits && number > 0 => Ok(Some(number)),
            _ => self.refuse(format!("{flag}: \"{typed}\" is not a number from 1 on")),
        }
    }

    pub(super) fn duration(
        &self,
        flag: &str,
        typed: Option<String>,
    ) -> Result<Option<Duration>, UsageError> {
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

    pub(super) fn answer(&self, args: &AnswerArgs) -> Result<Answer, UsageError> {
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

    pub(super) fn level(&self, quiet: bool, verbose: bool) -> Result<Level, UsageError> {
        match (quiet, verbose) {
            (true, true) => self.refuse("-quiet and -verbose cannot be combined"),
            (true, false) => Ok(Level::Errors),
            (false, false) => Ok(Level::Warnings),
            (false, true) => Ok(Level::Steps),
        }
    }

    /// The actions, of one family; `None` if there are none.
    pub(super) fn actions(&self, args: &ActionArgs) -> Result<Option<Actions>, UsageError> {
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

    pub(super) fn names(
        &self,
        enable: &[String],
        disable: &[String],
    ) -> Result<Actions, UsageError> {
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
    pub(super) fn selection(
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
    pub(super) fn selectors(
        &self,
        flag: &str,
        lists: &[String],
    ) -> Result<Vec<Selector>, UsageError> {
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

    pub(super) fn name(&self, flag: &str, name: &str) -> Result<(), UsageError> {
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

    pub(super) fn regexp(&self, flag: &str, pattern: &str) -> Result<Selector, UsageError> {
        match Selector::regexp(pattern) {
            Ok(selector) => Ok(selector),
            Err(error) => self.refuse(format!("{flag}: {error}")),
        }
    }

    pub(super) fn pair(&self, flag: &str, names: &str) -> Result<Selector, UsageError> {
        let (start, stop) = self.two_names(flag, names)?;
        if start == stop {
            return self.refuse(format!("{flag} has \"{start}\" twice"));
        }
        Ok(Selector::Pair { start, stop })
    }

    /// The pairs that times are taken of, each once. One probe can be both: from hit to hit.
    pub(super) fn timed(
        &self,
        flag: &str,
        typed: &[String],
    ) -> Result<Vec<(String, String)>, UsageError> {
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

    pub(super) fn two_names(
        &self,
        flag: &str,
        names: &str,
    ) -> Result<(String, String), UsageError> {
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
