//! What keeps the memory of a removed observation mapped: words on stacks that point there, as in a
//! thread that would return there from a signal handler.

use std::fs;
use std::path::{Path, PathBuf};

use probes_lib::{
    Action, CleanReport, Counts, Effect, ErrorKind, FunctionSelector, Observation, ObserveError,
    Options, ProbeError, ProcessError, Selector, State, Target,
};
use test_support::process::{Image, peek, poke, stat};
use test_support::{Talker, fixture_forms};

use crate::observe::{anonymous_code, options};
use crate::seccomp::{killed, refused};
use crate::session::all;

/// The address of the trampoline that an observed site of a probe calls.
fn trampoline_of(pid: i32, counts: &Counts, name: &str) -> u64 {
    let site = counts.sites(name).next().unwrap().address.0;
    let bytes = peek(pid, site, 6);
    assert_eq!(bytes[1], 0xe8);
    let displacement = i32::from_le_bytes(bytes[2..].try_into().unwrap());
    (site + 6).wrapping_add_signed(displacement.into())
}

/// The lowest addresses of the threads' stacks, just above the guard pages: no thread has used this memory yet.
fn unused_ends_of_stacks(pid: i32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines: Vec<&str> = maps.lines().collect();
    let two = lines.windows(2);
    let is_stack = |two: &&[&str]| two[0].contains(" ---p ") && two[1].contains(" rw-p ");
    two.filter(is_stack)
        .filter(|two| two[0].contains(" 00:00 0") && two[1].contains(" 00:00 0"))
        .map(|two| u64::from_str_radix(two[1].split_once('-').unwrap().0, 16).unwrap())
        .collect()
}

/// How many bytes observations have mapped: code, and the data after it.
fn mapped(pid: i32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let range = |line: &str| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        number(start)..number(end)
    };
    let code: Vec<_> = anonymous_code(pid).iter().map(|line| range(line)).collect();
    let is_of_observation = |line: &&str| {
        let range = range(line);
        let mut code = code.iter();
        code.any(|code| *code == range || code.end == range.start)
    };
    let ranges = maps.lines().filter(is_of_observation).map(range);
    ranges.map(|range| range.end - range.start).sum()
}

// promise: Observations: What lies in the unused part of a thread's stack keeps nothing mapped (2)
#[test]
fn unused_stack_memory_keeps_nothing_mapped() {
    for file in fixture_forms("idle_threads") {
        let mut talker = Talker::start_with(&file, ["8"]);
        let pid = talker.pid();
        let before = Image::of(pid).text();
        let target = Target::open(pid).unwrap();
        let mut observer = target
            .observe(&Observation::new().count(Selector::All), options())
            .unwrap();
        let trampoline = trampoline_of(pid, &observer.counts().unwrap(), "ping") + 1;
        let ends = unused_ends_of_stacks(pid);
        assert!(ends.len() >= 8, "{ends:x?}");
        for end in ends {
            poke(pid, end, &trampoline.to_le_bytes());
        }
        observer.remove().unwrap();
        assert_eq!(anonymous_code(pid), [""; 0]);
        before.assert_same(&Image::of(pid).text(), "the program");
        talker.ask("round", "round");
    }
}

/// A program with a place in its stack, above all frames, where the test may put a word. The memory that the word
/// points to stays mapped as long as the word is there.
struct Keeper {
    talker: Talker,
    place: u64,
}

impl Keeper {
    fn start(file: &Path) -> Keeper {
        const ARGUMENT: &str = "a word that a debugger may change, wherever it begins";
        let talker = Talker::start_with(file, [ARGUMENT]);
        // The argument is above all frames of the first thread: arg_start and arg_end of /proc/PID/stat.
        let start = stat(talker.pid(), 48).parse::<u64>().unwrap();
        let end = stat(talker.pid(), 49).parse::<u64>().unwrap();
        let arguments = peek(talker.pid(), start, (end - start) as usize);
        let is_argument = |at: &usize| arguments[*at..].starts_with(ARGUMENT.as_bytes());
        let at = (0..arguments.len()).find(is_argument).unwrap() as u64;
        let place = (start + at).next_multiple_of(8);
        Keeper { talker, place }
    }

    fn put(&self, word: u64) {
        poke(self.talker.pid(), self.place, &word.to_le_bytes());
    }
}

fn assert_all_are(target: &Target, state: State) {
    let states = target.states().unwrap();
    for probe in states.probes().filter(|probe| probe.site_count() > 0) {
        assert_eq!(probe.state(), state, "{}", probe.name());
    }
}

// promise: Observations: Memory that a thread may still return to stays mapped, is reported, does
//    not count as observed, and is removed later (4 programs)
#[test]
fn memory_still_in_use_stays_mapped_until_free() {
    let mut files: Vec<PathBuf> = fixture_forms("page_borders").into();
    files.extend(fixture_forms("gen_ocaml_2"));
    for file in files {
        let mut keeper = Keeper::start(&file);
        let pid = keeper.talker.pid();
        let before = Image::of(pid).text();
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().count(Selector::All);
        target.update(&all(Action::Enable)).unwrap();
        let mut first = target.observe(&observation, options()).unwrap();
        let counts = first.counts().unwrap();
        let name = counts.probes().next().unwrap().0.to_owned();
        keeper.put(trampoline_of(pid, &counts, &name));
        let len: u64 = mapped(pid);

        let observed = first.remove().unwrap();
        assert_eq!(observed.still_mapped, len);
        assert_eq!(mapped(pid), len);
        // No site is patched any more, whether it is enabled or disabled.
        assert_eq!(target.states().unwrap().observed_sites(), 0);
        assert_all_are(&target, State::Enabled);
        target.update(&all(Action::Disable)).unwrap();
        let kept = CleanReport {
            sites: 0,
            still_mapped: len,
        };
        assert_eq!(target.clean(options()).unwrap(), kept);
        assert_all_are(&target, State::Disabled);

        // The next observation has its own memory, and the remaining mapping does not disturb it.
        let mut second = target.observe(&observation, options()).unwrap();
        let sites = target.states().unwrap().observed_sites();
        assert!(sites > 0);
        assert_all_are(&target, State::Disabled);
        target.update(&all(Action::Enable)).unwrap();
        assert_all_are(&target, State::Enabled);
        keeper.talker.hits();
        let observed = second.remove().unwrap();
        assert_eq!(
            (observed.counts.total(), observed.still_mapped),
            (sites as u64, 0)
        );
        assert_all_are(&target, State::Enabled);
        target.update(&all(Action::Disable)).unwrap();

        assert_eq!(mapped(pid), len);
        keeper.put(0);
        assert_eq!(target.clean(options()).unwrap(), CleanReport::default());
        assert_eq!(anonymous_code(pid), [""; 0]);
        before.assert_same(&Image::of(pid).text(), "the program");
        keeper.talker.hits();
    }
}

// promise: Observations: A replaced observer gets an error that names its successor even if its
//    memory stays mapped (2)
#[test]
fn replaced_observer_gets_error_though_memory_stays_mapped() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut keeper = Keeper::start(&file);
        let pid = keeper.talker.pid();
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().count(Selector::name("plain"));
        let mut first = target.observe(&observation, options()).unwrap();
        keeper.put(trampoline_of(pid, &first.counts().unwrap(), "plain"));
        let take_over = Options {
            take_over: true,
            ..options()
        };
        let cleaned = target.clean(take_over).unwrap();
        assert_eq!((cleaned.sites, cleaned.still_mapped), (1, mapped(pid)));
        keeper.talker.hits();
        for error in [first.counts().unwrap_err(), first.remove().unwrap_err()] {
            let kind = error.kind();
            let own = std::process::id() as i32;
            assert!(
                matches!(kind, ErrorKind::Observe(ObserveError::Replaced { observer: Some(by) })
                    if by.pid == own),
                "{error}"
            );
        }
        // Dropping it leaves its memory mapped, as a killed tool does.
        drop(first);
        keeper.put(0);
        assert_eq!(target.clean(options()).unwrap(), CleanReport::default());
        assert_eq!(anonymous_code(pid), [""; 0]);
    }
}

// promise: Observations: An error says that memory which an earlier observation left stays mapped
//    (2)
#[test]
fn failure_says_that_orphaned_memory_stays_mapped() {
    for file in fixture_forms("gen_ocaml_2") {
        let keeper = Keeper::start(&file);
        let pid = keeper.talker.pid();
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().count(Selector::name("plain"));
        let mut observer = target.observe(&observation, options()).unwrap();
        let counts = observer.counts().unwrap();
        let site = counts.sites("plain").next().unwrap().address.0;
        keeper.put(trampoline_of(pid, &counts, "plain"));
        observer.remove().unwrap();
        let own = peek(pid, site, 6);
        // A breakpoint, as a debugger writes it.
        poke(pid, site, &[0xcc]);
        let Err(error) = target.observe(&observation, options()) else {
            panic!("it is observed");
        };
        assert!(
            matches!(
                error.kind(),
                ErrorKind::Probe(ProbeError::UnexpectedSite { .. })
            ),
            "{error}"
        );
        assert_eq!(error.effect(), Effect::StillMapped, "{error}");
        poke(pid, site, &own);
        keeper.put(0);
        assert_eq!(target.clean(options()).unwrap(), CleanReport::default());
        assert_eq!(anonymous_code(pid), [""; 0]);
    }
}

/// Returns where the jump at the entry of a function leads.
fn jump_target(pid: i32, entry: u64) -> u64 {
    let has_endbr = peek(pid, entry, 4) == [0xf3, 0x0f, 0x1e, 0xfa];
    let at = entry + if has_endbr { 4 } else { 0 };
    let bytes = peek(pid, at, 5);
    assert_eq!(bytes[0], 0xe9, "{bytes:x?}");
    let displacement = i32::from_le_bytes(bytes[1..].try_into().unwrap());
    (at + 5).wrapping_add_signed(displacement.into())
}

// promise: Observations: Functions are not observed while a thread may return to an earlier trampoline; the error names
//    the thread and the function (2)
#[test]
fn error_names_thread_that_may_return_to_trampoline() {
    for file in fixture_forms("page_borders") {
        let keeper = Keeper::start(&file);
        let pid = keeper.talker.pid();
        let target = Target::open(pid).unwrap();
        let main = FunctionSelector::Glob("main".parse().unwrap());
        let observation = Observation::new().count_functions(main);
        let mut first = target.observe(&observation, options()).unwrap();
        let counts = first.counts().unwrap();
        let entry = counts.functions().next().unwrap().address.0;
        keeper.put(jump_target(pid, entry));
        assert_eq!(first.remove().unwrap().still_mapped, mapped(pid));
        let Err(error) = target.observe(&observation, options()) else {
            panic!("it is observed");
        };
        let text = error.to_string();
        let begin = format!("thread {pid} of process {pid} (page_borders.");
        assert!(text.starts_with(&begin), "{text}");
        let middle = "may still return to the trampoline of main at 0x";
        assert!(text.contains(middle), "{text}");
        assert!(matches!(
            error.kind(),
            ErrorKind::Observe(ObserveError::StillInside { .. })
        ));
        assert_eq!(error.effect(), Effect::StillMapped, "{error}");
        keeper.put(0);
        let mut second = target.observe(&observation, options()).unwrap();
        assert_eq!(second.remove().unwrap().still_mapped, 0);
        assert_eq!(anonymous_code(pid), [""; 0]);
    }
}

// promise: Observations: A process that sets a seccomp filter while it is observed gets its sites
//    restored, and keeps the memory (2)
#[test]
fn self_filtered_process_is_restored_but_keeps_memory() {
    for file in fixture_forms("seccomp") {
        let mut talker = Talker::start_with(&file, ["later"]);
        let pid = talker.pid();
        let before = Image::of(pid).text();
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().count(Selector::All);
        let mut observer = target.observe(&observation, options()).unwrap();
        let len = mapped(pid);
        talker.ask("forbid", "forbidden");
        talker.hits();
        let observed = observer.remove().unwrap();
        assert_eq!((observed.counts.total(), observed.still_mapped), (4, len));
        before.assert_same(&Image::of(pid).text(), "the program");
        talker.hits();
        let kept = CleanReport {
            sites: 0,
            still_mapped: len,
        };
        assert_eq!(target.clean(options()).unwrap(), kept);
        talker.hits();
    }
}

// promise: Observations: Orphaned sites in a process that has set a seccomp filter are restored, but not by an
//    observer that is refused (2)
#[test]
fn orphaned_sites_in_filtered_process_are_restored() {
    for file in fixture_forms("seccomp") {
        let mut talker = Talker::start_with(&file, ["later"]);
        let pid = talker.pid();
        let before = Image::of(pid).text();
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().count(Selector::All);
        drop(target.observe(&observation, options()).unwrap());
        talker.ask("forbid", "forbidden");
        assert_eq!(refused(&target, &killed()).effect(), Effect::NothingChanged);
        assert_eq!(target.states().unwrap().observed_sites(), 4);
        let cleaned = target.clean(options()).unwrap();
        assert_eq!((cleaned.sites, cleaned.still_mapped), (4, mapped(pid)));
        before.assert_same(&Image::of(pid).text(), "the program");
        talker.hits();
    }
}

// promise: Observations: An observation of a process that cannot be stopped at the end goes on, and
//    is removed later without loss (2)
#[test]
fn observation_that_cannot_be_removed_is_removed_later() {
    for file in fixture_forms("vforker") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let before = Image::of(pid).text();
        let target = Target::open(pid).unwrap();
        let observation = Observation::new()
            .count(Selector::All)
            .time("ping", "pong")
            .watch(Selector::All);
        let mut observer = target.observe(&observation, Options::default()).unwrap();
        talker.hits();
        talker.vfork();
        for _ in 0..2 {
            let error = observer.remove().unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Process(ProcessError::Busy { .. })),
                "{error}"
            );
            assert_eq!(target.states().unwrap().observed_sites(), 4);
            assert_eq!(observer.counts().unwrap().total(), 4);
        }
        talker.ask("", "vforked");
        talker.hits();
        let observed = observer.remove().unwrap();
        assert_eq!((observed.counts.total(), observed.still_mapped), (8, 0));
        assert_eq!(observed.latencies[0].count(), 2);
        assert_eq!(observed.events.events.len(), 8);
        before.assert_same(&Image::of(pid).text(), "the program");
        assert_eq!(anonymous_code(pid), [""; 0]);
        // The observation has ended.
        let assert_removed = |error: probes_lib::Error| {
            assert!(
                matches!(error.kind(), ErrorKind::Observe(ObserveError::Removed)),
                "{error}"
            );
        };
        assert_removed(observer.counts().unwrap_err());
        assert_removed(observer.latencies().unwrap_err());
        assert_removed(observer.events().unwrap_err());
        assert_removed(observer.remove().unwrap_err());
        talker.hits();
    }
}
