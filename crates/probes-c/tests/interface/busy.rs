//! A program switches its own probes while other threads execute their sites without a pause, and while other threads
//! and tools switch the same probes. Each test runs in both ways in which a program can change its code: it writes
//! through /proc/self/mem, or it replaces the page that holds the code.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use probes_lib::State::Disabled;
use probes_lib::{Action, Actions, Selector, State};
use test_support::{eventually, fixture};

use crate::own::{Library, SelfSwitching};

const OFF: (State, u16) = (Disabled, 0);

/// Held by each of these tests: their programs take all the processor time they get.
fn busy() -> MutexGuard<'static, ()> {
    static BUSY: Mutex<()> = Mutex::new(());
    BUSY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns programs in both forms: first those that change their code through /proc/self/mem, then those that replace
/// the page.
fn both_ways() -> impl Iterator<Item = SelfSwitching> {
    let by_page = SelfSwitching::forms(Library::Shared).map(|mut own| {
        own.command("forbid-code");
        let before = mappings_of_code(&own);
        own.command("enable-all");
        own.command("disable-all");
        // The kernel does not merge a replaced page with its neighbours: there are more mappings.
        assert!(mappings_of_code(&own) > before);
        own
    });
    SelfSwitching::forms(Library::Shared).chain(by_page)
}

fn mappings_of_code(own: &SelfSwitching) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", own.talker.pid())).unwrap();
    maps.lines().filter(|line| line.contains(" r-xp ")).count()
}

/// Asserts that the threads of the program run on and that no site is on; then ends the program,
/// which must exit with success.
fn assert_runs_on_and_exits(mut own: SelfSwitching) {
    let rounds = |own: &mut SelfSwitching| -> Vec<u64> {
        let report = own.ask("report");
        let rounds = report.split_ascii_whitespace().skip(1);
        rounds.map(|count| count.parse().unwrap()).collect()
    };
    let before = rounds(&mut own);
    assert!(!before.is_empty());
    eventually("all threads run on", || {
        let now = rounds(&mut own);
        let mut pairs = now.iter().zip(&before);
        pairs.all(|(now, then)| now > then).then_some(())
    });
    own.assert_states(OFF, OFF);
    own.end();
}

// promise: Own probes: Threads that execute the sites run on while another thread switches them (4
//    × 500 updates, both ways)
#[test]
fn threads_run_on_while_their_sites_are_switched() {
    let _busy = busy();
    for mut own in both_ways() {
        own.command("spin 8");
        assert_eq!(own.ask("toggle 250 1"), "toggled 0 0");
        assert_runs_on_and_exits(own);
    }
}

// promise: Own probes: If threads of one program switch the same probes, each of their updates is
//    counted (4 × 800 updates, both ways)
#[test]
fn updates_by_several_threads_all_take_effect() {
    let _busy = busy();
    for mut own in both_ways() {
        own.command("spin 2");
        assert_eq!(own.ask("toggle 100 4"), "toggled 0 0");
        assert_runs_on_and_exits(own);
    }
}

// promise: Own probes: If tools switch the same probes from outside, with and without a stop, each
//    update is counted (4 × 600 updates from inside and 100 from outside, both ways)
#[test]
fn updates_by_outside_tools_all_take_effect() {
    const UPDATES: usize = 50;
    let _busy = busy();
    let all = |action| Actions::of(action, Selector::All);
    for mut own in both_ways() {
        own.command("spin 2");
        own.talker.send("toggle 150 2");
        for live in [true, false].into_iter().cycle().take(UPDATES) {
            own.change(&all(Action::Enable), live);
            own.change(&all(Action::Disable), live);
        }
        let answer = own.talker.expect("toggled");
        assert!(answer.starts_with("toggled 0 "), "{answer}");
        assert_runs_on_and_exits(own);
    }
}

// promise: Own probes: An object that is loaded and unloaded all the time is never written to by
//    mistake (4 × 600 updates, both ways)
#[test]
fn objects_that_come_and_go_are_never_corrupted() {
    let _busy = busy();
    let plugin = fixture("objects/plugin.so");
    for mut own in both_ways() {
        own.command(&format!("churn {}", plugin.display()));
        assert_eq!(own.ask("set 300"), "toggled 0 0");
        assert!(own.ask("states").contains(" ping=0/0 "));
        assert_eq!(own.run(), (0, 0));
        own.end();
    }
}

// promise: Own probes: No page is writable and executable at once, and code stays mapped from its
//    file (4 × 600 updates, both ways, watched from outside)
#[test]
fn no_page_is_ever_writable_and_executable() {
    let _busy = busy();
    for mut own in both_ways() {
        own.command("spin 2");
        let maps = format!("/proc/{}/maps", own.talker.pid());
        let code = || -> Vec<(u64, u64, String)> {
            let maps = fs::read_to_string(&maps).unwrap();
            merged(&maps)
        };
        let before = code();
        let (done, readings) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let maps = fs::read_to_string(&maps).unwrap();
                    let writable_code = maps.lines().find(|line| line.contains(" rwx"));
                    assert_eq!(writable_code, None);
                    readings.fetch_add(1, Ordering::Relaxed);
                }
            });
            // If this thread panics, the scope waits for the watcher.
            let at_end = SetAtEnd(&done);
            // On a busy machine, the watcher gets little processor time during so few updates.
            eventually("the mappings have been read often", || {
                assert_eq!(own.ask("toggle 300 1"), "toggled 0 0");
                let is_enough = readings.load(Ordering::Relaxed) > 100;
                (is_enough || watcher.is_finished()).then_some(())
            });
            drop(at_end);
            watcher.join().unwrap();
        });
        assert_eq!(code(), before);
        assert_runs_on_and_exits(own);
    }
}

/// Sets a flag once it is dropped.
struct SetAtEnd<'f>(&'f AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the mappings of code: start minus file offset, end, and file. Adjacent mappings of one file are joined.
fn merged(maps: &str) -> Vec<(u64, u64, String)> {
    let hex = |digits: &str| u64::from_str_radix(digits, 16).unwrap();
    let mut merged: Vec<(u64, u64, String)> = Vec::new();
    for line in maps.lines().filter(|line| line.contains(" r-xp ")) {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (start, end) = fields[0].split_once('-').unwrap();
        let (start, end) = (hex(start), hex(end));
        let place = start.wrapping_sub(hex(fields[2]));
        let file = fields[3..].join(" ");
        match merged.last_mut() {
            Some(last) if last.1 == start && last.0 == place && last.2 == file => last.1 = end,
            _ => merged.push((place, end, file)),
        }
    }
    merged
}
