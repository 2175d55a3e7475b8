//! Normalizes the flags and subcommands that were typed to the one spelling that clap reads.
//!
//! OCaml users write `-pid 7`, everybody else `--pid 7` or `--pid=7`, and both abbreviate.
//! Each flag becomes `--flag` or `--flag=VALUE`, each subcommand is spelled out:
//!
//! - The argument after a flag that takes a value is its value, whatever it looks like, as with
//!   getopt(3) and with Jane Street's Core.Command: `-enable-regexp -foo` looks for `-foo`. But where no value can
//!   begin with a dash, a flag is not taken for one: in `-pid -for 1s` the pid is missing. The value of some flags may
//!   be missing, such as that of `-latency` in `trace -latency -fn f`.
//! - A unique prefix is enough, except for `-enable*` and `-disable*`, which must be spelled out: a
//!   mistyped flag must not select all probes instead of one.
//! - Operands, and what follows `--`, are left alone.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use clap::{Arg, Command};

use crate::flags::LATENCY_COMMAND;
use crate::text::{is_number, ocaml_string};
use crate::usage::UsageError;

/// A name is suggested if what was typed differs from it by at most this many typing errors, and by no more than
/// one in three letters.
const MAX_TYPING_ERRORS: usize = 2;
const LETTERS_PER_ERROR: usize = 3;

/// A flag of several commands. In the others, it is unknown, and not an abbreviation of `-format`.
const DURATION: &str = "for";

/// The flag with which `list` shows functions, and the one with which others observe them.
const FUNCTIONS: &str = "functions";
const FN: &str = "fn";

/// The command that makes histograms, but not of times, and the flag that it therefore does not have.
const HIST: &str = "hist";
const PAIR: &str = "pair";

/// The flag that selects a process.
const PID: &str = "pid";

/// The flag that names a program's file.
const PROG: &str = "prog";

/// The commands that `trace` has as flags.
const OF_TRACE: [&str; 4] = ["count", "hist", "latency", "watch"];

/// The subcommand that is also a flag.
const VERSION: &str = "version";

/// Spells out `argv`, whose first word is the program. `root` must have been completed with
/// [`Command::build`].
pub(crate) fn spell_out(
    root: &Command,
    argv: impl IntoIterator<Item = OsString>,
) -> Result<Vec<OsString>, UsageError> {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let mut words = argv.into_iter();
    let mut spelled: Vec<OsString> = words.next().into_iter().collect();
    let mut command = root;
    let mut subcommand = None;
    while let Some(word) = words.next() {
        if word == "--" {
            match words.next() {
                Some(word) if operand(command).is_none() => {
                    return Err(unexpected(command, subcommand, &spelled, &word));
                }
                Some(first) => spelled.extend(["--".into(), first].into_iter().chain(words)),
                None => {}
            }
            break;
        }
        if let Some(flag) = Flag::of(&word) {
            let misplaced = || before_subcommand(root, &flag, words.as_slice());
            if let Some(error) = subcommand.is_none().then(misplaced).flatten() {
                return Err(error);
            }
            if subcommand == Some("help") && flag.find_whole(root).is_some_and(is_help) {
                continue;
            }
            if subcommand.is_none() && flag.is_version(root) {
                command = find_subcommand(root, OsStr::new(VERSION))?;
                subcommand = Some(VERSION);
                spelled.push(VERSION.into());
                continue;
            }
            let flag = flag.spell_out(command, subcommand, &mut words);
            spelled.push(flag?);
        } else if let Some(operand) = operand(command).filter(|it| !it.is_last_set()) {
            if let Some(why) = why_not_text(operand, word.as_bytes()) {
                let message = format!("{}: {why}", value_name(operand));
                return Err(UsageError::new(subcommand, message));
            }
            spelled.push(word);
        } else if !command.has_subcommands() {
            return Err(unexpected(command, subcommand, &spelled, &word));
        } else {
            command = find_subcommand(command, &word)?;
            subcommand = subcommand.or(Some(command.get_name()));
            spelled.push(command.get_name().into());
        }
    }
    Ok(spelled)
}

/// What the last word of a command line that is not complete can be.
pub(crate) enum CompletionContext<'c> {
    /// A subcommand of this command.
    Subcommand(&'c Command),
    /// A flag of this command.
    Flag(&'c Command),
    /// The value of this flag, from this byte of the word on.
    Value(&'c Arg, usize),
    /// An operand of a command.
    Operand(&'c Arg),
    /// A word after `--`.
    Program,
    /// Nothing.
    Nothing,
}

/// A flag with the value that it was given.
pub(crate) type Given<'c> = (&'c Arg, OsString);

/// Reads the words of a command line whose last word is not complete yet. Returns what that word can be, and the
/// values of the flags before it. The first word is the program; words that make no sense are passed over.
pub(crate) fn context<'c>(
    root: &'c Command,
    words: &[OsString],
) -> (CompletionContext<'c>, Vec<Given<'c>>) {
    let mut given = Vec::new();
    let Some((last, before)) = words.split_last() else {
        return (CompletionContext::Nothing, given);
    };
    let mut command = root;
    let mut before = before.iter().skip(1).peekable();
    let mut waiting = None;
    while let Some(word) = before.next() {
        if word == "--" {
            return (CompletionContext::Program, given);
        }
        let Some(flag) = Flag::of(word) else {
            if operand(command).is_none() {
                command = find_subcommand(command, word).unwrap_or(command);
            }
            continue;
        };
        let [arg] = flag.find(command)[..] else {
            continue;
        };
        if !arg.get_action().takes_values() {
            continue;
        }
        let value = match (flag.value, before.peek()) {
            (Some(value), _) => value.to_vec(),
            (None, Some(next)) if needs_no_value(arg) && !may_be_value(next, command) => continue,
            (None, Some(_)) => before
                .next()
                .map_or(Vec::new(), |next| next.as_bytes().to_vec()),
            (None, None) => {
                waiting = Some(arg);
                continue;
            }
        };
        given.push((arg, OsString::from_vec(value)));
    }
    let begins_flag = last.as_bytes().starts_with(b"-");
    let place = match (waiting, Flag::of(last)) {
        (Some(arg), _) if !(begins_flag && needs_no_value(arg)) => CompletionContext::Value(arg, 0),
        (_, Some(flag)) => match (flag.value, &flag.find(command)[..]) {
            (Some(value), [arg]) if arg.get_action().takes_values() => {
                CompletionContext::Value(arg, last.len() - value.len())
            }
            (Some(_), _) => CompletionContext::Nothing,
            (None, _) => CompletionContext::Flag(command),
        },
        // One or two dashes alone.
        _ if begins_flag => CompletionContext::Flag(command),
        _ => match operand(command) {
            Some(operand) => CompletionContext::Operand(operand),
            None if command.has_subcommands() => CompletionContext::Subcommand(command),
            None => CompletionContext::Nothing,
        },
    };
    (place, given)
}

/// The flags that complete a word, in the spelling that it begins with.
pub(crate) fn completions_of_flag<'c>(command: &'c Command, word: &str) -> Vec<(String, &'c Arg)> {
    let dashes = if word.starts_with("--") { "--" } else { "-" };
    let shown = flags(command).filter(|arg| !arg.is_hide_set());
    shown
        .map(|arg| (format!("{dashes}{}", long(arg)), arg))
        .filter(|(spelled, _)| spelled.starts_with(word))
        .collect()
}

/// Whether `argv` asks for JSON, as far as that can be seen in arguments that may make no sense.
pub(crate) fn asks_for_json(root: &Command, argv: &[OsString]) -> bool {
    let mut words = argv.iter().skip(1).peekable();
    let mut command = root;
    while let Some(word) = words.next().filter(|word| *word != "--") {
        let Some(flag) = Flag::of(word) else {
            command = find_subcommand(command, word).unwrap_or(command);
            continue;
        };
        let found = flag.find(command);
        let mut next_is_value = |arg| {
            !needs_no_value(arg) || words.peek().is_some_and(|next| may_be_value(next, command))
        };
        let (name, takes_value) = match found.as_slice() {
            [arg] => (
                long(arg),
                arg.get_action().takes_values() && next_is_value(arg),
            ),
            // Not a flag of this command: meant for a subcommand that is missing or misspelled.
            _ => (&*flag.name, flag.name == "format"),
        };
        let mut value = flag.value;
        if takes_value && value.is_none() {
            value = words.next().map(|word| word.as_bytes());
        }
        if name == "json" || (name == "format" && value == Some(b"json")) {
            return true;
        }
    }
    false
}

fn find_subcommand<'c>(command: &'c Command, word: &OsStr) -> Result<&'c Command, UsageError> {
    let word = word.to_string_lossy();
    // Even after `help`, the error is not about `help`.
    let error = |message| Err(UsageError::new(None, message));
    if let Some(exact) = command.find_subcommand(&*word) {
        return Ok(exact);
    }
    let names = || command.get_subcommands().map(Command::get_name);
    let cut_short = |name: &&str| !word.is_empty() && name.starts_with(&*word);
    let fitting: Vec<&str> = names().filter(cut_short).collect();
    match fitting.as_slice() {
        [] => {
            let near: Vec<&str> = names().filter(|name| is_near(name, &word)).collect();
            let suggestion = if near.is_empty() {
                format!("; {}", there_are(command))
            } else {
                did_you_mean(&near)
            };
            error(format!("no subcommand \"{word}\"{suggestion}"))
        }
        [name] => Ok(command.find_subcommand(name).unwrap_or(command)),
        names => error(format!("\"{word}\" could be {}", names.join(" or "))),
    }
}

/// Names the subcommands of `command`.
pub(crate) fn there_are(command: &Command) -> String {
    let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    format!("there are {}", names.join(", "))
}

/// What is wrong with a flag that comes before the subcommand, unless it is one of `root` itself; `rest` comes
/// after it.
fn before_subcommand(root: &Command, flag: &Flag<'_>, rest: &[OsString]) -> Option<UsageError> {
    if flag.find_whole(root).is_some() {
        return None;
    }
    let typed = &flag.typed;
    let is_of = |command: &Command| !flag.find(command).is_empty();
    let later = rest.iter().find_map(|word| root.find_subcommand(word));
    let message = match later.map(Command::get_name) {
        Some(name) => {
            format!("{typed} comes before the subcommand: write ocaml-probes {name} {typed}")
        }
        None if !is_of(root) && root.get_subcommands().any(is_of) => {
            format!("no subcommand before {typed}")
        }
        None => return None,
    };
    Some(UsageError::new(None, message))
}

/// Refuses a word that is neither a flag, nor its value, nor a subcommand; `spelled` comes before it.
fn unexpected(
    command: &Command,
    subcommand: Option<&str>,
    spelled: &[OsString],
    word: &OsStr,
) -> UsageError {
    let word = &*word.to_string_lossy();
    let takes_pid = command.get_arguments().any(|arg| long(arg) == PID);
    let has_pid = spelled
        .iter()
        .any(|it| it.as_bytes().starts_with(b"--pid="));
    let advice = match subcommand {
        Some(name) if takes_pid && !has_pid && is_number(word) => {
            format!(": write ocaml-probes {name} -pid {word}")
        }
        _ if operand(command).is_some() => {
            ": the program comes after -prog, its arguments after --".to_owned()
        }
        Some(_) if flags(command).any(|arg| long(arg) == word) => {
            format!(": did you mean -{word}?")
        }
        _ => String::new(),
    };
    UsageError::new(
        subcommand,
        format!("unexpected argument \"{word}\"{advice}"),
    )
}

/// The operand of a command, if it takes any.
fn operand(command: &Command) -> Option<&Arg> {
    command.get_positionals().next()
}

/// A word that begins with a dash.
struct Flag<'w> {
    /// With its dashes, without its value.
    typed: String,
    name: String,
    value: Option<&'w [u8]>,
}

impl Flag<'_> {
    fn of(word: &OsStr) -> Option<Flag<'_>> {
        let bytes = word.as_bytes();
        let end = bytes.iter().position(|&byte| byte == b'=');
        let (typed, value) = match end {
            Some(end) => (&bytes[..end], Some(&bytes[end + 1..])),
            None => (bytes, None),
        };
        let typed = String::from_utf8_lossy(typed).into_owned();
        let name = typed.strip_prefix('-')?;
        let name = name.strip_prefix('-').unwrap_or(name);
        if name.is_empty() {
            return None;
        }
        Some(Flag {
            name: name.to_owned(),
            typed,
            value,
        })
    }

    fn spell_out(
        &self,
        command: &Command,
        subcommand: Option<&str>,
        rest: &mut std::vec::IntoIter<OsString>,
    ) -> Result<OsString, UsageError> {
        let error = |message| Err(UsageError::new(subcommand, message));
        let typed = &self.typed;
        let arg = match self.find(command).as_slice() {
            [] => {
                let mut near = self.suggestions(command);
                if near.is_empty() && self.name == FUNCTIONS {
                    near.extend(flags(command).filter(|arg| long(arg) == FN).map(one_dash));
                }
                let suggestion = match (subcommand, &*self.name) {
                    _ if !near.is_empty() => did_you_mean(&near),
                    (Some(HIST), PAIR) => format!("; {LATENCY_COMMAND} measures times"),
                    (Some(name), PROG) if OF_TRACE.contains(&name) => {
                        format!("; `trace -prog FILE -{name}` does so from the program's start")
                    }
                    _ => String::new(),
                };
                return error(format!("unknown flag {typed}{suggestion}"));
            }
            [arg] => *arg,
            several => {
                let names: Vec<_> = several.iter().map(|arg| one_dash(arg)).collect();
                return error(format!("{typed} could be {}", names.join(" or ")));
            }
        };
        let mut spelled = format!("--{}", long(arg)).into_bytes();
        if arg.get_action().takes_values() {
            let needed = || format!("{typed} needs a value: {typed} {}", value_name(arg));
            let value = match self.value {
                Some(value) => value.to_vec(),
                None if needs_no_value(arg) && !has_value(rest, command) => {
                    return Ok(OsString::from_vec(spelled));
                }
                None => match rest.next() {
                    Some(word) if !may_begin_with_dash(arg) && is_flag(&word, command) => {
                        let word = word.to_string_lossy();
                        return error(format!("{}, not the flag {word}", needed()));
                    }
                    Some(word) => word.into_vec(),
                    None => return error(needed()),
                },
            };
            if let Some(why) = why_not_text(arg, &value) {
                return error(format!("{}: {why}", one_dash(arg)));
            }
            spelled.push(b'=');
            spelled.extend(value);
        } else if self.value.is_some() {
            return error(format!("{typed} takes no value"));
        }
        Ok(OsString::from_vec(spelled))
    }

    /// The flags that this one can abbreviate; only the flag itself if it is spelled out.
    fn find<'c>(&self, command: &'c Command) -> Vec<&'c Arg> {
        if let Some(arg) = self.find_whole(command) {
            return vec![arg];
        }
        flags(command)
            .filter(|arg| self.abbreviates(arg) && !must_be_spelled_whole(arg))
            .collect()
    }

    /// Whether it is `-version`, which means the subcommand, with all its flags.
    fn is_version(&self, root: &Command) -> bool {
        let found = self.find(root);
        self.value.is_none() && matches!(found.as_slice(), [flag] if long(flag) == VERSION)
    }

    fn abbreviates(&self, flag: &Arg) -> bool {
        self.name != DURATION && long(flag).starts_with(&self.name)
    }

    /// The flag with this name or letter.
    fn find_whole<'c>(&self, command: &'c Command) -> Option<&'c Arg> {
        let mut letters = self.name.chars();
        let by_letter = match (letters.next(), letters.next()) {
            (Some(letter), None) => flags(command).find(|arg| has_letter(arg, letter)),
            _ => None,
        };
        by_letter.or_else(|| flags(command).find(|arg| long(arg) == self.name))
    }

    /// The flags that may have been meant.
    fn suggestions(&self, command: &Command) -> Vec<String> {
        let cut_short = |arg: &&Arg| self.abbreviates(arg);
        let spellings: Vec<_> = flags(command).filter(cut_short).map(one_dash).collect();
        if !spellings.is_empty() {
            return spellings;
        }
        let near = |arg: &&Arg| is_near(long(arg), &self.name);
        flags(command).filter(near).map(one_dash).collect()
    }
}

fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    command
        .get_arguments()
        .filter(|arg| arg.get_long().is_some())
}

fn is_help(flag: &Arg) -> bool {
    long(flag) == "help"
}

pub(crate) fn long(flag: &Arg) -> &str {
    flag.get_long().unwrap_or_default()
}

fn one_dash(flag: &Arg) -> String {
    format!("-{}", long(flag))
}

fn has_letter(flag: &Arg, letter: char) -> bool {
    flag.get_short_and_visible_aliases()
        .is_some_and(|letters| letters.contains(&letter))
}

fn must_be_spelled_whole(flag: &Arg) -> bool {
    long(flag).starts_with("enable") || long(flag).starts_with("disable")
}

pub(crate) fn value_name(flag: &Arg) -> &str {
    match flag.get_value_names() {
        Some([name, ..]) => name,
        _ => "VALUE",
    }
}

/// Whether a value of the flag may begin with a dash: a file and a regular expression may.
fn may_begin_with_dash(flag: &Arg) -> bool {
    matches!(value_name(flag), "FILE" | "RE")
}

/// What is wrong with a value that is not text, unless it names a file or is passed on.
fn why_not_text(arg: &Arg, value: &[u8]) -> Option<String> {
    if matches!(value_name(arg), "FILE" | "DIRECTORY" | "ARGS" | "WORDS") {
        return None;
    }
    let is_text = std::str::from_utf8(value).is_ok();
    (!is_text).then(|| format!("{} is not valid UTF-8", ocaml_string(value)))
}

fn needs_no_value(flag: &Arg) -> bool {
    let count = flag.get_num_args();
    count.is_some_and(|count| count.min_values() == 0)
}

/// Whether a value may be the next of these words.
fn has_value(rest: &std::vec::IntoIter<OsString>, command: &Command) -> bool {
    let next = rest.as_slice().first();
    next.is_some_and(|word| may_be_value(word, command))
}

/// Whether a word may be the value of a flag that needs none. No such value begins with a dash and a letter: that is a
/// flag, maybe an unknown one.
fn may_be_value(word: &OsStr, command: &Command) -> bool {
    let has_letter = matches!(word.as_bytes(), [b'-', b'-', byte, ..] | [b'-', byte, ..] if byte.is_ascii_alphabetic());
    word != "--" && !has_letter && !is_flag(word, command)
}

/// Whether a word is a flag of `command`, or the beginning of one.
fn is_flag(word: &OsStr, command: &Command) -> bool {
    Flag::of(word).is_some_and(|flag| !flag.find(command).is_empty())
}

fn is_near(name: &str, typed: &str) -> bool {
    let allowed = MAX_TYPING_ERRORS.min(typed.len() / LETTERS_PER_ERROR);
    allowed > 0 && strsim::osa_distance(name, typed) <= allowed
}

fn did_you_mean(near: &[impl AsRef<str>]) -> String {
    match near {
        [] => String::new(),
        near => {
            let near: Vec<&str> = near.iter().map(AsRef::as_ref).collect();
            format!("; did you mean {}?", near.join(" or "))
        }
    }
}
