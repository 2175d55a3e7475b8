//! Code that is not simply mapped from its file: sealed, in huge pages, moved away and back, or
//! with another tool's uprobe.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use probes_lib::{Action, Effect, FunctionSelector, LiveAddr, Observation, Selector, State};
use test_support::process::{peek, poke};
use test_support::{Scratch, fixture_forms, output};

use crate::functions::symbols;
use crate::observe::options;
use crate::session::{Session, all, heavy_test_lock, named};

// promise: Processes that are hard to change: Sealed code (mseal) is changed (2)
#[test]
fn sealed_code_is_changed() {
    for file in fixture_forms("sealed_text") {
        let mut session = Session::start(&file);
        session.update(Action::Enable, Selector::All, |_| true);
        let hits = session.run();
        assert_eq!((hits["guarded"], hits["free"]), (2, 1));
        session.update(Action::Disable, Selector::All, |_| true);
        assert_eq!(session.run()["guarded"], 0);
        session.end();
    }
}

// promise: Processes that are hard to change: Code in transparent huge pages is changed, and the
//    pages stay huge (2 × 10 updates)
#[test]
fn code_in_huge_pages_is_changed_there() {
    for file in fixture_forms("huge_text") {
        let mut session = Session::start(&file);
        let huge = session.talker.ask("huge", "huge");
        for _ in 0..5 {
            session.apply(&all(Action::Enable)).unwrap();
            session.assert_all((1, State::Enabled));
            let hits = session.run();
            assert_eq!((hits["huge"], hits["free"]), (2, 1));
            session.apply(&all(Action::Disable)).unwrap();
            session.assert_all((0, State::Disabled));
            assert_eq!(session.run()["huge"], 0);
        }
        assert_eq!(session.talker.ask("huge", "huge"), huge);
        session.end();
    }
}

// promise: All or nothing: Nothing is written where something else has been mapped since (2 × at
//    least 200 updates)
#[test]
fn remapped_code_is_changed_wholly_or_not() {
    let _lock = heavy_test_lock();
    for file in fixture_forms("remapped") {
        let mut session = Session::start(&file);
        session.talker.ask("move", "moving");
        let (mut done, mut refused) = (0, 0);
        let mut on = false;
        // How long the code is away depends on what else the processors do.
        let begun = Instant::now();
        while done < 100 || refused < 100 {
            let action = [Action::Enable, Action::Disable][usize::from(on)];
            match session.apply(&all(action)) {
                Ok(report) => {
                    assert_eq!(report.changed.len(), 2);
                    on = !on;
                    done += 1;
                }
                Err(error) => {
                    assert_eq!(error.effect(), Effect::NothingChanged, "{error}");
                    refused += 1;
                }
            }
            let is_late = begun.elapsed() > Duration::from_secs(120);
            assert!(!is_late, "{done} done, {refused} refused");
        }
        let stopped = session.talker.ask("stop", "stopped");
        assert!(stopped.ends_with(" overwritten 0"), "{stopped}");
        let state = [(0, State::Disabled), (1, State::Enabled)][usize::from(on)];
        session.assert_all(state);
        assert_eq!(session.run()["guarded"] > 0, on);
        session.end();
    }
}

/// A breakpoint at an address: a uprobe if permitted, else written as a debugger writes it.
enum Breakpoint {
    Uprobe { directory: PathBuf, event: String },
    Poked { pid: i32, at: u64, byte: u8 },
}

impl Breakpoint {
    /// Sets one at the address `at` of process `pid`. In the file that `link` leads to, this
    /// address has the offset `offset`.
    fn set(pid: i32, at: LiveAddr, link: &Path, offset: u64) -> Breakpoint {
        let directory = PathBuf::from("/sys/kernel/tracing");
        let event = format!("ocaml_probes_{pid}/at_{offset:x}");
        let add = format!("p:{event} {}:{offset:#x}\n", link.display());
        let append = |text: &str| {
            let events = fs::OpenOptions::new()
                .append(true)
                .open(directory.join("uprobe_events"));
            events.and_then(|mut events| events.write_all(text.as_bytes()))
        };
        if append(&add).is_ok() {
            let enable = directory.join("events").join(&event).join("enable");
            fs::write(enable, "1").unwrap();
            return Breakpoint::Uprobe { directory, event };
        }
        poke(pid, at.0, &[0xcc]);
        // Restore later what the kernel restores for a uprobe: what the file has.
        let byte = fs::read(link).unwrap()[offset as usize];
        Breakpoint::Poked {
            pid,
            at: at.0,
            byte,
        }
    }
}

impl Drop for Breakpoint {
    fn drop(&mut self) {
        match self {
            Breakpoint::Uprobe { directory, event } => {
                let enable = directory.join("events").join(&*event).join("enable");
                fs::write(enable, "0").unwrap();
                let events = fs::OpenOptions::new()
                    .append(true)
                    .open(directory.join("uprobe_events"));
                events
                    .unwrap()
                    .write_all(format!("-:{event}\n").as_bytes())
                    .unwrap();
            }
            Breakpoint::Poked { pid, at, byte } => poke(*pid, *at, &[*byte]),
        }
    }
}

/// A copy of a program that only one process runs, and a link to it: a uprobe belongs to a file, and its path must not
/// contain a space.
fn linked_copy(scratch: &Scratch, file: &Path) -> (PathBuf, PathBuf) {
    let copy = scratch.copy(file, "program");
    static LINKS: AtomicUsize = AtomicUsize::new(0);
    let number = LINKS.fetch_add(1, Ordering::Relaxed);
    let name = format!("ocaml-probes-{}-{number}", std::process::id());
    let link = std::env::temp_dir().join(name);
    std::os::unix::fs::symlink(&copy, &link).unwrap();
    (copy, link)
}

// promise: Other tracers and tools: A uprobe or breakpoint on a site keeps that probe unchanged,
//    and what it restores later is noticed (2; users who may set no uprobe write the breakpoint as
//    gdb does)
#[test]
fn uprobe_on_a_site_keeps_its_probe_unchanged() {
    for file in fixture_forms("gen_ocaml_1") {
        let scratch = Scratch::new();
        let (copy, link) = linked_copy(&scratch, &file);
        let session = Session::start(&copy);
        let pid = session.pid();
        let (site, in_file) = {
            let states = session.target.states().unwrap();
            let site = states
                .probe("late")
                .unwrap()
                .sites()
                .next()
                .unwrap()
                .address;
            (site, site.0 - session.object().load_bias().0)
        };
        let offset = file_offset(&copy, in_file);
        session.image();

        // A breakpoint on the nop, where a tracer that knows only the note puts one.
        let refused = |bytes: &str| {
            let error = session.apply(&named(Action::Enable, "late")).unwrap_err();
            let message = error.to_string();
            let start = format!("a site of probe \"late\" at {site}: found {bytes}");
            assert!(message.starts_with(&start), "{message}");
            assert!(message.contains("a breakpoint or uprobe"), "{message}");
            assert_eq!(error.effect(), Effect::NothingChanged);
        };
        let breakpoint = Breakpoint::set(pid, site, &link, offset);
        assert_eq!(peek(pid, site.0, 1), [0xcc]);
        refused("cc, expected 90");
        session.update(Action::Enable, Selector::name("early"), |name| {
            name == "early"
        });
        drop(breakpoint);
        assert_eq!(peek(pid, site.0, 2), [0x90, 0x3d]);
        session.update(Action::Enable, Selector::name("late"), |name| {
            name == "late"
        });

        // On the opcode of an enabled site.
        let opcode = LiveAddr(site.0 + 1);
        let breakpoint = Breakpoint::set(pid, opcode, &link, offset + 1);
        assert_eq!(peek(pid, opcode.0, 1), [0xcc]);
        refused("cc, expected 3d or e8");
        drop(breakpoint);
        // The kernel has restored the byte of the file: the site is disabled, but the counter is 1.
        assert_eq!(peek(pid, site.0, 2), [0x90, 0x3d]);
        assert_eq!(session.state("late"), State::Inconsistent);
        session.apply(&all(Action::Enable).force(true)).unwrap();
        session.assert_all((1, State::Enabled));
        fs::remove_file(link).unwrap();
        session.end();
    }
}

/// The file offset of an address of a program, according to readelf.
fn file_offset(file: &Path, address: u64) -> u64 {
    let headers = output(Command::new("readelf").args(["-lW", "--"]).arg(file));
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let headers = String::from_utf8(headers.stdout).unwrap();
    let mut loads = headers
        .lines()
        .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
        .filter(|words| words.first() == Some(&"LOAD"))
        // Offset, virtual and physical address, size in the file.
        .map(|words| (hex(words[1]), hex(words[2]), hex(words[4])));
    let load = loads.find(|(_, start, size)| (*start..start + size).contains(&address));
    let (offset, start, _) = load.unwrap();
    address - start + offset
}

// promise: Observations: A breakpoint or uprobe that is set on an observed function stays, and the rest of its code
//    is restored (2 × 2 places)
#[test]
fn code_around_breakpoints_is_restored() {
    for file in fixture_forms("owners") {
        // lea 1(%rdi),%eax; ret; padding: all of it is replaced by the jump.
        for place in [0, 3] {
            let scratch = Scratch::new();
            let (copy, link) = linked_copy(&scratch, &file);
            let session = Session::start(&copy);
            let symbols = symbols(&copy);
            let leaf = symbols.iter().find(|(_, name)| name == "leaf").unwrap().0;
            let (pid, at) = (session.pid(), leaf + session.object().load_bias().0);
            let code = peek(pid, at, 5);
            let leaf_calls = FunctionSelector::Glob("leaf".parse().unwrap());
            let observation = Observation::new().count_functions(leaf_calls);
            let mut observer = session.target.observe(&observation, options()).unwrap();
            assert_eq!(peek(pid, at, 1), [0xe9]);
            let offset = file_offset(&copy, leaf) + place;
            let breakpoint = Breakpoint::set(pid, LiveAddr(at + place), &link, offset);
            let report = observer.remove().unwrap();
            let discarded: Vec<&str> = report.discarded.functions().collect();
            assert_eq!(discarded, ["leaf"]);
            let mut under = code.clone();
            under[place as usize] = 0xcc;
            assert_eq!(peek(pid, at, 5), under);
            drop(breakpoint);
            assert_eq!(peek(pid, at, 5), code);
            fs::remove_file(link).unwrap();
            session.end();
        }
    }
}
