//! What can complete the last word of a command line.
//!
//! One line for each completion: the whole word, a tab, and its description. If the shell is to complete the word with
//! file names, the only line is a tab and `files`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Arg, Command};
use probes_lib::CollectorWork;

use super::names::{self, MAX_SHOWN, Names};
use crate::flags::ends_part;
use crate::search_path::look_up;
use crate::spelling::{CompletionContext, Given, completions_of_flag, context, long, value_name};
use crate::text::is_unprintable;

/// The answer that makes the shell complete file names.
const FILES: &str = "\tfiles\n";

/// Completions: words, and what they mean.
type Completions = BTreeMap<String, String>;

/// The completions of the last word.
pub(super) fn answer(root: &Command, words: &[OsString]) -> String {
    let Some(word) = words.last().and_then(|word| word.to_str()) else {
        return String::new();
    };
    let (context, given) = context(root, words);
    let completions = match context {
        CompletionContext::Subcommand(command) => subcommands(command, word),
        CompletionContext::Flag(command) => completions_of_flag(command, word)
            .into_iter()
            .map(|(spelled, arg)| (spelled, help_of(arg)))
            .collect(),
        CompletionContext::Value(arg, start) => {
            let (before, typed) = word.split_at_checked(start).unwrap_or(("", word));
            match values(arg, typed, &given) {
                Some(values) => with_prefix(before, values),
                None => return FILES.to_owned(),
            }
        }
        CompletionContext::Operand(arg) if value_name(arg) == "SUBCOMMAND" => {
            subcommands(root, word)
        }
        CompletionContext::Operand(arg) => match values(arg, word, &given) {
            Some(values) => values,
            None => return FILES.to_owned(),
        },
        CompletionContext::Program => return FILES.to_owned(),
        CompletionContext::Nothing => Completions::new(),
    };
    let mut text = String::new();
    for (word, meaning) in completions {
        // An unprintable character would reach the terminal, or split the word.
        if !word.is_empty() && !word.chars().any(is_unprintable) {
            let meaning = meaning.replace(is_unprintable, "?");
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{word}\t{meaning}");
        }
    }
    text
}

fn subcommands(command: &Command, word: &str) -> Completions {
    let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
    shown
        .filter(|it| it.get_name().starts_with(word))
        .map(|it| (it.get_name().to_owned(), first_line(it.get_about())))
        .collect()
}

fn help_of(arg: &Arg) -> String {
    first_line(arg.get_help())
}

fn first_line(text: Option<&clap::builder::StyledStr>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}

/// The completions of a value; `None` if the shell completes it with file names.
fn values(arg: &Arg, typed: &str, given: &[Given<'_>]) -> Option<Completions> {
    let of_list = |names: &dyn Fn(&str) -> Completions| {
        let (before, last) = split_list(typed);
        let mut found = names(last);
        found.retain(|name, _| !before.split(',').any(|it| it.trim_start() == name));
        with_prefix(before, found)
    };
    let values = match (long(arg), value_name(arg)) {
        (_, "FILE" | "ARGS" | "DIRECTORY") => return None,
        ("pid", _) => names::pids(typed),
        ("name", "RE") => names::programs(typed),
        (_, "FORMAT") => words_with_prefix(typed, &["plain", "table", "json"]),
        (_, "FORM") => words_with_prefix(typed, &["short", "full"]),
        (_, "SHELL") => words_with_prefix(typed, &["bash", "zsh", "fish"]),
        (_, "KEY") => words_with_prefix(typed, &["function", "stack", "syscall", "thread"]),
        ("by", "pid") => words_with_prefix(typed, &["pid"]),
        ("by", "EXPR,...") => {
            let (before, last) = split_list(typed);
            // Some are only possible first, or alone.
            let words: &[&str] = if before.is_empty() {
                &["caller", "pid", "probe", "stack", "tid"]
            } else {
                &["probe", "tid"]
            };
            with_prefix(before, words_with_prefix(last, words))
        }
        (_, "WORK") => {
            let work = CollectorWork::ALL.map(CollectorWork::word);
            of_list(&|typed| words_with_prefix(typed, &work))
        }
        ("events", _) => of_list(&|typed| of_target(given, Names::Events, typed)),
        ("fn", _) => of_list(&|typed| of_target(given, Names::Functions, typed)),
        ("usdt", _) => of_list(&|typed| of_target(given, Names::Usdt, typed)),
        (_, "NAMES") => of_list(&|typed| of_target(given, Names::Probes, typed)),
        // Both may be the same probe.
        (_, "START,STOP" | "PAIR") => {
            let (before, last) = split_list(typed);
            with_prefix(before, of_target(given, Names::Probes, last))
        }
        ("until", _) => of_target(given, Names::Probes, typed),
        _ => {
            let possible = arg.get_possible_values();
            let possible: Vec<&str> = possible.iter().map(|it| it.get_name()).collect();
            words_with_prefix(typed, &possible)
        }
    };
    Some(values)
}

/// The words that begin with `typed`.
fn words_with_prefix(typed: &str, words: &[&str]) -> Completions {
    let fitting = words.iter().filter(|it| it.starts_with(typed));
    let each = fitting.map(|it| ((*it).to_owned(), String::new()));
    each.collect()
}

/// Splits a comma-separated list before its last element, which begins after any spaces.
fn split_list(typed: &str) -> (&str, &str) {
    let mut commas = typed.match_indices(',').map(|(at, _)| at);
    let last = commas.rfind(|&at| ends_part(typed, at));
    let (_, name) = typed.split_at(last.map_or(0, |at| at + 1));
    typed.split_at(typed.len() - name.trim_start_matches(' ').len())
}

/// The names that begin with `typed`, in the process or file that the command line names.
fn of_target(given: &[Given<'_>], names: Names, typed: &str) -> Completions {
    let value_of = |flag: &str| {
        let mut of_flag = given.iter().filter(|(arg, _)| long(arg) == flag);
        of_flag.next_back().map(|(_, value)| value.clone())
    };
    let pid = value_of("pid").and_then(|pid| pid.to_str()?.parse().ok());
    let file = value_of("prog").as_deref().and_then(program);
    let found = match (pid, file) {
        (Some(pid), _) => names::of_process(pid, names, typed),
        (None, Some(file)) => names::of_file(file, names, typed),
        (None, None) => Completions::new(),
    };
    shortened(found, typed.len())
}

/// The file of a program: `typed` if it is a file, or else the file of that name in PATH.
fn program(typed: &OsStr) -> Option<PathBuf> {
    let typed = Path::new(typed);
    if typed.is_file() {
        return Some(typed.to_owned());
    }
    look_up(typed)
}

/// If there are many names, each only up to the next dot: `Stdlib.`, instead of all that is in it.
fn shortened(found: Completions, typed_len: usize) -> Completions {
    if found.len() <= MAX_SHOWN {
        return found;
    }
    let parts = found.into_iter().map(|(name, meaning)| {
        let dot = name.get(typed_len..).and_then(|rest| rest.find('.'));
        match dot.map(|dot| &name[..=typed_len + dot]) {
            Some(part) if part != name => (part.to_owned(), String::new()),
            _ => (name, meaning),
        }
    });
    let parts: Completions = parts.collect();
    if parts.len() <= MAX_SHOWN {
        return parts;
    }
    // Still too many to show: names that are no modules, or all names if there are many modules, are cut to a length at
    // which few enough of them differ. Leaving some out instead would be wrong: the shell inserts the prefix that all
    // names it gets have in common.
    let (modules, others): (Completions, Completions) =
        parts.into_iter().partition(|(name, _)| name.ends_with('.'));
    let (mut shown, others) = if modules.len() < MAX_SHOWN / 2 {
        (modules, others)
    } else {
        (
            Completions::new(),
            modules.into_iter().chain(others).collect(),
        )
    };
    let room = MAX_SHOWN - shown.len();
    let (mut least, mut most) = (typed_len, longest(&others));
    while least + 1 < most {
        let middle = least.midpoint(most);
        if cut(&others, middle).len() <= room {
            least = middle;
        } else {
            most = middle;
        }
    }
    shown.extend(cut(&others, least));
    shown
}

/// The length of the longest name, in bytes.
fn longest(names: &Completions) -> usize {
    names.keys().map(String::len).max().unwrap_or(0)
}

/// The names, each cut to at most `len` bytes.
fn cut(names: &Completions, len: usize) -> Completions {
    let each = names.iter().map(|(name, meaning)| {
        let mut len = (0..=len.min(name.len())).rev();
        let len = len.find(|&at| name.is_char_boundary(at)).unwrap_or(0);
        if len < name.len() {
            (name[..len].to_owned(), String::new())
        } else {
            (name.clone(), meaning.clone())
        }
    });
    each.collect()
}

fn with_prefix(before: &str, values: Completions) -> Completions {
    let whole = |(value, meaning)| (format!("{before}{value}"), meaning);
    values.into_iter().map(whole).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_end_at_the_next_dot() {
        let names = (0..MAX_SHOWN).map(|at| format!("Stdlib.List.f{at}"));
        let names = names.chain(["Stdlib.exit".to_owned(), "Http.get".to_owned()]);
        let found: Completions = names.map(|name| (name, String::new())).collect();
        let keys = |found: Completions| found.into_keys().collect::<Vec<_>>();
        assert_eq!(keys(shortened(found.clone(), 0)), ["Http.", "Stdlib."]);
        let in_stdlib: Completions = found
            .clone()
            .into_iter()
            .filter(|(name, _)| name.starts_with("Stdlib."))
            .collect();
        assert_eq!(
            keys(shortened(in_stdlib, 7)),
            ["Stdlib.List.", "Stdlib.exit"]
        );
        let many = (0..9 * MAX_SHOWN).map(|at| (format!("camlList__f{at}"), String::new()));
        let many = keys(shortened(many.collect(), 1));
        assert_eq!(
            many.len(),
            100,
            "camlList__f0 to f99: names are cut to two digits"
        );
        assert!(many.contains(&"camlList__f17".to_owned()));
        let few: Completions = found.into_iter().take(3).collect();
        assert_eq!(shortened(few.clone(), 0), few);
    }

    #[test]
    fn lists_are_completed_after_their_last_comma() {
        for (typed, expected) in [
            ("", ("", "")),
            ("a", ("", "a")),
            ("a,b", ("a,", "b")),
            ("a,b,", ("a,b,", "")),
            ("a, b", ("a, ", "b")),
            ("f(int, in", ("", "f(int, in")),
        ] {
            assert_eq!(split_list(typed), expected, "{typed}");
        }
    }
}
