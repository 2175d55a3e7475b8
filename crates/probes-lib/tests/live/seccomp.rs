//! Observed processes under seccomp filters: what a filter says of each injected call is known before the
//! call is made, or nothing is injected.

use std::path::Path;
use std::process::Command;

use nix::unistd::geteuid;
use probes_lib::{
    Effect, Error, ErrorKind, Observation, ObserveError, Options, SeccompAction, Selector, Target,
    UnreadableFilter,
};
use test_support::process::{Image, children};
use test_support::{Scratch, Talker, fixture, fixture_forms};

use crate::observe::{anonymous_code, options};

/// Options that take filters that cannot be read to allow everything.
fn despite() -> Options {
    Options {
        despite_seccomp: true,
        ..options()
    }
}

/// Whether this process can read the filters of others.
fn reads_filters() -> bool {
    geteuid().is_root()
}

fn refuses(call: &'static str, action: SeccompAction) -> ObserveError {
    ObserveError::SeccompRefuses { call, action }
}

/// The error for the fixture `seccomp`.
pub(crate) fn killed() -> ObserveError {
    refuses("mmap of executable memory", SeccompAction::Kill)
}

/// Asserts that a process is not observed, for this reason if the filters can be read; returns the error.
#[track_caller]
pub(crate) fn refused(target: &Target, why: &ObserveError) -> Error {
    let Err(error) = target.observe(&Observation::new().count(Selector::All), options()) else {
        panic!("it is observed");
    };
    let ErrorKind::Observe(found) = error.kind() else {
        panic!("{error}");
    };
    let expected = if reads_filters() {
        why.to_string()
    } else {
        let why = UnreadableFilter::NotPermitted;
        ObserveError::SeccompUnreadable { why }.to_string()
    };
    assert_eq!(found.to_string(), expected);
    assert!(error.is_refused_by_seccomp());
    assert_eq!(error.effect(), Effect::NothingChanged);
    error
}

/// Asserts that every hit is counted, and that nothing remains.
#[track_caller]
fn observed(talker: &mut Talker, target: &Target, options: Options) {
    let before = Image::of(target.pid()).text();
    let observation = Observation::new().count(Selector::All).watch(Selector::All);
    let mut observer = target.observe(&observation, options).unwrap();
    talker.hits();
    let report = observer.remove().unwrap();
    assert_eq!(report.counts.total(), report.events.events.len() as u64);
    assert!(report.counts.total() > 0);
    assert_eq!(report.still_mapped, 0);
    before.assert_same(&Image::of(target.pid()).text(), "the program");
    assert_eq!(anonymous_code(target.pid()), [""; 0]);
    talker.hits();
}

/// Starts a program under filters.
fn start_under(filters: &[impl AsRef<Path>], program: &Path) -> Talker {
    let mut command = Command::new(fixture("under_filters.exe"));
    command.args(filters.iter().map(AsRef::as_ref)).arg("--");
    let mut talker = Talker::spawn(command.arg(program));
    talker.expect("ready");
    talker
}

/// Filters of services and containers, as systemd and Docker set them.
fn real_filters() -> [Vec<std::path::PathBuf>; 4] {
    let files = |names: &[&str]| {
        names
            .iter()
            .map(|name| fixture("filters").join(name))
            .collect()
    };
    let service = ["system-service.x86_64.bpf", "system-service.x32.bpf"];
    let no_writable_code = [
        "deny-write-execute.x86_64.bpf",
        "deny-write-execute.x32.bpf",
    ];
    [
        files(&service),
        files(&no_writable_code),
        files(&["docker.bpf"]),
        files(&[&service[..], &no_writable_code, &["docker.bpf"]].concat()),
    ]
}

// promise: Observations: A process under the real filters of systemd and Docker is observed by
//    root; by others, with `-despite-seccomp` (2 × 4)
#[test]
fn process_under_real_filters_is_observed() {
    for file in fixture_forms("gen_ocaml_2") {
        for filters in real_filters() {
            let mut talker = start_under(&filters, &file);
            let target = Target::open(talker.pid()).unwrap();
            if reads_filters() {
                observed(&mut talker, &target, options());
            } else {
                refused(&target, &killed());
                talker.hits();
            }
            observed(&mut talker, &target, despite());
        }
    }
}

/// The instructions of a filter that does `action` for a call, if argument 2, the protection, has all
/// these bits.
fn filter_against(call: i64, bits: u32, action: u32) -> Vec<u8> {
    // Offsets of struct seccomp_data: the number, and the lower half of argument 2.
    const NUMBER: u32 = 0;
    const PROTECTION: u32 = 32;
    let (load, and, equal, ret) = (0x20, 0x54, 0x15, 0x06);
    let instructions: [(u16, u8, u8, u32); 7] = [
        (load, 0, 0, NUMBER),
        (equal, 0, 4, call as u32),
        (load, 0, 0, PROTECTION),
        (and, 0, 0, bits),
        (equal, 0, 1, bits),
        (ret, 0, 0, action),
        (ret, 0, 0, 0x7fff_0000),
    ];
    let bytes = |(code, jt, jf, k): (u16, u8, u8, u32)| {
        [&code.to_le_bytes()[..], &[jt, jf], &k.to_le_bytes()].concat()
    };
    instructions.into_iter().flat_map(bytes).collect()
}

// promise: Observations: A process whose seccomp filter refuses an injected call is refused, with the
//    call and what the filter does, and is unchanged (2 × 10)
#[test]
fn refused_calls_are_named_with_their_action() {
    let (executable, writable) = ("mmap of executable memory", "mmap of writable memory");
    let (execute, write) = (libc::PROT_EXEC as u32, libc::PROT_WRITE as u32);
    let errno = |errno: i32| SeccompAction::Errno(errno);
    let cases = [
        (
            libc::SYS_mmap,
            execute,
            0x8000_0000,
            executable,
            SeccompAction::Kill,
        ),
        (libc::SYS_mmap, execute, 0, executable, SeccompAction::Kill),
        (
            libc::SYS_mmap,
            execute,
            0x1234_0000,
            executable,
            SeccompAction::Kill,
        ),
        (
            libc::SYS_mmap,
            execute,
            0x0003_0000,
            executable,
            SeccompAction::Trap,
        ),
        (
            libc::SYS_mmap,
            execute,
            0x0005_0001,
            executable,
            errno(libc::EPERM),
        ),
        (libc::SYS_mmap, execute, 0x0005_0000, executable, errno(0)),
        (
            libc::SYS_mmap,
            execute,
            0x7fc0_0000,
            executable,
            SeccompAction::Notify,
        ),
        (
            libc::SYS_mmap,
            execute,
            0x7ff0_0000,
            executable,
            SeccompAction::Trace,
        ),
        (
            libc::SYS_mmap,
            write,
            0x0005_000d,
            writable,
            errno(libc::EACCES),
        ),
        (
            libc::SYS_munmap,
            0,
            0x8000_0000,
            "munmap",
            SeccompAction::Kill,
        ),
    ];
    let directory = Scratch::new();
    let file = directory.file("filter");
    // Statically linked: its own startup makes none of the calls that are refused here.
    for program in fixture_forms("gen_ocaml_2_static") {
        for (call, bits, action, name, expected) in cases {
            std::fs::write(&file, filter_against(call, bits, action)).unwrap();
            let mut talker = start_under(&[&file], &program);
            let before = Image::of(talker.pid()).text();
            let target = Target::open(talker.pid()).unwrap();
            refused(&target, &refuses(name, expected));
            before.assert_same(&Image::of(talker.pid()).text(), "the program");
            talker.hits();
            if reads_filters() {
                // `despite_seccomp` overrides unreadable filters only, not a refusal that was read.
                assert!(
                    target
                        .observe(&Observation::new().count(Selector::All), despite())
                        .is_err()
                );
                talker.hits();
            }
        }
    }
}

/// SECCOMP_RET_LOG executes the call. If a process has several filters, the most restrictive result
/// applies (seccomp(2)), in whichever order they were installed.
// promise: Observations: The most restrictive of several seccomp filters decides, and one that only
//    logs refuses nothing (2)
#[test]
fn most_restrictive_filter_counts() {
    let directory = Scratch::new();
    let (logs, denies) = (directory.file("logs"), directory.file("denies"));
    let against = |action| filter_against(libc::SYS_mmap, libc::PROT_EXEC as u32, action);
    std::fs::write(&logs, against(0x7ffc_0000)).unwrap();
    std::fs::write(&denies, against(0x0005_0001)).unwrap();
    for program in fixture_forms("gen_ocaml_2_static") {
        let mut talker = start_under(&[&logs], &program);
        let target = Target::open(talker.pid()).unwrap();
        observed(&mut talker, &target, despite());
        for filters in [[&logs, &denies], [&denies, &logs]] {
            let mut talker = start_under(&filters, &program);
            let target = Target::open(talker.pid()).unwrap();
            let denied = SeccompAction::Errno(libc::EPERM);
            refused(&target, &refuses("mmap of executable memory", denied));
            talker.hits();
        }
    }
}

// promise: Observations: A process in which every thread's seccomp filter kills for mapping memory
//    is refused (2)
#[test]
fn process_killed_for_mapping_memory_is_refused() {
    for file in fixture_forms("seccomp") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        refused(&target, &killed());
        talker.hits();
    }
}

/// seccomp(2): a filter belongs to a thread. The thread that has it is in no system call, and such
/// threads are preferred for injected calls.
// promise: Observations: Memory is mapped by a thread whose seccomp filter allows it (2 × 6)
#[test]
fn memory_is_mapped_by_an_allowed_thread() {
    for file in fixture_forms("seccomp") {
        let mut talker = Talker::start_with(&file, ["worker"]);
        let target = Target::open(talker.pid()).unwrap();
        for _ in 0..5 {
            let mut observer = target
                .observe(&Observation::new().count(Selector::All), options())
                .unwrap();
            talker.hits();
            assert_eq!(observer.remove().unwrap().counts.total(), 4);
        }
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        // Now both threads would be killed.
        talker.ask("forbid", "forbidden");
        refused(&target, &killed());
        talker.hits();
    }
}

/// As in a container or a service: the parent of the first process with the filter lacks it, the
/// parents of that process's descendants have it.
// promise: Observations: A seccomp filter that a program was executed with is no obstacle, if the process's
//    parent has it, too (2)
#[test]
fn seccomp_filter_of_the_parent_is_no_obstacle() {
    for file in fixture_forms("gen_ocaml_2") {
        let confined = fixture("without_ptrace.exe");
        let shell = ["sh", "-c", "\"$0\"; exit"];
        let mut talker = Talker::spawn(Command::new(&confined).args(shell).arg(&file));
        talker.expect("ready");
        let target = Target::open(children(talker.pid())[0]).unwrap();
        observed(&mut talker, &target, options());
    }
}

/// The child has as many filters as its parent, and neither has executed a program under them: they may
/// forbid anything.
// promise: Observations: A forked process under its parent's seccomp filters is not taken for one that was
//    executed with them (2)
#[test]
fn forked_process_is_not_taken_for_executed() {
    for file in fixture_forms("forker") {
        let mut talker = start_under(&[fixture("filters/docker.bpf")], &file);
        talker.ask("child", "child");
        let target = Target::open(children(talker.pid())[0]).unwrap();
        if reads_filters() {
            observed(&mut talker, &target, options());
        } else {
            refused(&target, &killed());
        }
        talker.ask("quit", "forked");
    }
}
