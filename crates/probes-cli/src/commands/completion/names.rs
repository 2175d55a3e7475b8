//! The names that complete a word: pids with their programs, and the probes and functions of a process or file. A
//! user waits for them, so the search ends after [`TIME_LIMIT`], with what was found by then.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use probes_lib::{FunctionTable, Glob, ProbeTable, RuntimeEvents, Target, UsdtProbes};

use crate::flags::program_of;
use crate::text::number_of;

/// How many names are shown at most.
pub(super) const MAX_SHOWN: usize = 200;

/// How many names that begin with the typed word are collected, at most.
const MAX_FOUND: usize = 100_000;

/// How long the search for names may take; without optimization, everything takes longer.
const TIME_LIMIT: Duration =
    Duration::from_millis(if cfg!(debug_assertions) { 10_000 } else { 40 });

/// Which names complete a word.
#[derive(Clone, Copy, Debug)]
pub(super) enum Names {
    Probes,
    Functions,
    /// Of all providers, as `PROVIDER:NAME`.
    Usdt,
    /// Of the runtime of OCaml 5, and those that the program has registered.
    Events,
}

type FoundNames = BTreeMap<String, String>;

/// The processes of this user, or of all users if this is root, whose pid begins with `typed`; kernel threads have no
/// command.
pub(super) fn pids(typed: &str) -> FoundNames {
    let until = Instant::now() + TIME_LIMIT;
    let own = geteuid();
    let mut found = FoundNames::new();
    for pid in probes_lib::pids().into_iter().flatten() {
        let pid = pid.to_string();
        if !pid.starts_with(typed) || pid == std::process::id().to_string() {
            continue;
        }
        let directory = Path::new("/proc").join(&pid);
        let is_own = || fs::metadata(&directory).is_ok_and(|it| it.uid() == own.as_raw());
        if !own.is_root() && !is_own() {
            continue;
        }
        if let Some(program) = command_of(&directory) {
            found.insert(pid, program);
        }
        if found.len() >= MAX_SHOWN || Instant::now() > until {
            break;
        }
    }
    found
}

/// The programs that processes run whose files this user may see, as -name takes them.
pub(super) fn programs(typed: &str) -> FoundNames {
    let until = Instant::now() + TIME_LIMIT;
    let mut processes: BTreeMap<String, usize> = BTreeMap::new();
    for pid in probes_lib::pids().into_iter().flatten() {
        // A character that means something else in a regular expression has to be typed by hand.
        let is_plain = |it: char| it.is_alphanumeric() || "_-.".contains(it);
        let program = program_of(pid).unwrap_or_default();
        if !program.is_empty() && program.starts_with(typed) && program.chars().all(is_plain) {
            *processes.entry(program).or_default() += 1;
        }
        if processes.len() >= MAX_SHOWN || Instant::now() > until {
            break;
        }
    }
    let meaning = |many| match many {
        1 => "1 process".to_owned(),
        many => format!("{many} processes"),
    };
    let found = processes.into_iter();
    found.map(|(name, many)| (name, meaning(many))).collect()
}

/// The first word of the command of a process, without its directory.
fn command_of(directory: &Path) -> Option<String> {
    let command = fs::read(directory.join("cmdline")).ok()?;
    let first = command.split(|&byte| byte == 0).next()?;
    let name = first.rsplit(|&byte| byte == b'/').next()?;
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

/// The names of a process that begin with `typed`.
pub(super) fn of_process(pid: i32, names: Names, typed: &str) -> FoundNames {
    let start = typed.to_owned();
    in_time(move |found| {
        let program = PathBuf::from(format!("/proc/{pid}/exe"));
        match names {
            Names::Probes => {
                for object in Target::open(pid).ok()?.objects() {
                    probes(object.table(), &start, found);
                }
            }
            Names::Functions => functions(&program, &start, found)?,
            Names::Usdt => usdt(&UsdtProbes::of_process(pid).ok()?, &start, found)?,
            Names::Events => events(RuntimeEvents::of_process(pid).ok()?, &start, found)?,
        }
        Some(())
    })
}

/// Same as [`of_process`], for a file.
pub(super) fn of_file(file: PathBuf, names: Names, typed: &str) -> FoundNames {
    let start = typed.to_owned();
    in_time(move |found| {
        match names {
            Names::Probes => probes(&ProbeTable::read(&file).ok()?, &start, found),
            Names::Functions => functions(&file, &start, found)?,
            Names::Usdt => usdt(&UsdtProbes::of_file(&file).ok()?, &start, found)?,
            Names::Events => {}
        }
        Some(())
    })
}

/// A name, and what it means.
type Name = (String, String);

/// Returns what `find` has sent when the time is over; what it does after that ends with this process.
fn in_time(find: impl FnOnce(&SyncSender<Name>) -> Option<()> + Send + 'static) -> FoundNames {
    let until = Instant::now() + TIME_LIMIT;
    let (sender, receiver) = mpsc::sync_channel(1024);
    let spawned = thread::Builder::new().spawn(move || find(&sender));
    let mut found = FoundNames::new();
    if spawned.is_err() {
        return found;
    }
    while let Ok((name, meaning)) =
        receiver.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        found.insert(name, meaning);
        // What was sent is received, even when no time is left.
        if found.len() >= MAX_FOUND || Instant::now() >= until {
            break;
        }
    }
    found
}

fn probes(table: &ProbeTable, start: &str, found: &SyncSender<Name>) {
    for probe in table.probes().filter(|it| it.name().starts_with(start)) {
        let sites = probe.sites().len();
        let meaning = number_of(sites, "site");
        // The reader has gone once the time is over.
        let _ = found.send((probe.name().to_owned(), meaning));
    }
}

/// Those of the program alone: its libraries have many that are seldom wanted.
fn functions(file: &Path, start: &str, found: &SyncSender<Name>) -> Option<()> {
    let table = FunctionTable::read(file).ok()?;
    for function in table.functions() {
        let Some(name) = function.name().filter(|name| name.text.starts_with(start)) else {
            continue;
        };
        found.send((name.text, String::new())).ok()?;
    }
    Some(())
}

fn usdt(probes: &UsdtProbes, start: &str, found: &SyncSender<Name>) -> Option<()> {
    let all: Glob = "*".parse().ok()?;
    for probe in probes.select(Some(&all), std::slice::from_ref(&all)).ok()? {
        let name = format!("{}:{}", probe.provider(), probe.name());
        if name.starts_with(start) {
            found.send((name, String::new())).ok()?;
        }
    }
    Some(())
}

fn events(mut events: RuntimeEvents, start: &str, found: &SyncSender<Name>) -> Option<()> {
    for event in events.select(&[]).ok()?.names() {
        if event.name.starts_with(start) {
            let group: &str = event.group.into();
            found.send((event.name.clone(), group.to_owned())).ok()?;
        }
    }
    Some(())
}
