//! `stack` with the programs of other compilers, from outside of their root.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use test_support::{eventually, fixture_forms, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::json_stacks::{
    check_allocating, check_collections, check_complete, check_stopped_sleep, check_waiting, read,
    read_when,
};
use crate::support::run;

// promise: Stacks: The stacks of OCaml 5 are those of gdb in its fibers, in the handlers of effects, through callbacks from C within fibers, where gdb stops early,
//    and in domains; also in other namespaces (4 programs of 9 to 20 threads)
#[test]
fn stacks_reach_through_fibers_and_callbacks() {
    let ways = [
        "plain",
        "callback",
        "in_alloca",
        "arguments",
        "raised",
        "library",
        "finaliser",
    ];
    for file in program_forms("stacks") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("wait", "waits");
        // In OCaml 5, gdb does not find the callers of C code that is called directly.
        check_waiting(program.pid, &ways, "Stacks", |way| way.is_some());
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("allocate", "allocates");
        check_allocating(program.pid);
    }
    let ways = [
        "nested",
        "called_back",
        "in_alloca",
        "arguments",
        "in_handler",
        "resumed",
        "passed_on",
        "grown",
    ];
    // Their fibers have no link to their parents, because C code has called back.
    let cut_by_gdb = ["called_back", "in_alloca", "arguments"];
    for (file, isolation) in program_forms("ocaml5/suspended").iter().zip(Isolation::ALL) {
        let mut program = ChrootProgram::start(isolation, file, &[]);
        program.talker.ask("wait", "waits");
        check_waiting(program.pid, &ways, "Suspended", |way| {
            way.is_none_or(|way| !cut_by_gdb.contains(&way))
        });
    }
}

// promise: Stacks: With other C libraries, too, a sleep that goes on after the process was stopped is shown with its name (2 programs in
//    each chroot)
#[test]
fn sleep_that_was_stopped_has_its_name() {
    for file in fixture_forms("blocked") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("block", "blocked");
        check_stopped_sleep(program.pid);
    }
}

// promise: Profiles: Stacks of running OCaml 5 are complete wherever it is interrupted, also in nested fibers (2 programs in each
//    chroot, all but one of 20 or more)
#[test]
fn stacks_of_running_code_are_complete() {
    for (name, work) in [
        ("calls", "run 1 10000000000"),
        ("ocaml5/fibers", "nested 100000000"),
    ] {
        let [file, _] = program_forms(name);
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.send(work);
        check_complete(program.pid);
    }
}

// promise: Profiles: Where a program of OCaml 5 waits again before it can be stopped, the kernel's samples tell where it ran (one
//    program in each chroot, nearly all of the time)
#[test]
fn short_work_is_sampled_by_kernel() {
    let [file, _] = program_forms("ocaml5/fibers");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    // On a busy machine, a few samples may be missing by chance.
    let profile = eventually("the kernel's samples are shown", || {
        let line = format!("profile -json -on-cpu -hz 997 -pid {} -for 3s", program.pid);
        let profiled = std::thread::spawn(move || run(&line).json());
        while !profiled.is_finished() {
            // Less than 100 us.
            program.talker.ask("nested 4", "nested");
        }
        let profile = profiled.join().unwrap();
        (profile["running_method"] == "sampled").then_some(profile)
    });
    let stacks = profile["stacks"].as_array().unwrap().iter();
    let seconds = |stack: &Value| stack["seconds"].as_f64().unwrap();
    let is_known = |stack: &&Value| !stack["frames"].as_array().unwrap().is_empty();
    let known: f64 = stacks.clone().filter(is_known).map(seconds).sum();
    let all: f64 = stacks.map(seconds).sum();
    assert!(
        all > 0.0 && known > 0.9 * all,
        "{known} of {all}: {profile}"
    );
}

// promise: Profiles: With -live, the stacks of OCaml 5 lead through C code and fibers to the first function of the thread (3 programs
//    in each chroot, half of the time at least)
#[test]
fn live_profiles_reach_other_stacks() {
    for (name, work, function) in [
        ("stacks", "collect", "Stacks.fun"),
        ("calls", "run 1 10000000000", "Calls.work"),
        ("ocaml5/fibers", "nested 100000000", "Fibers."),
    ] {
        let [file, _] = program_forms(name);
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.send(work);
        let line = format!("profile -json -on-cpu -live -pid {} -for 2s", program.pid);
        let profile = run(&line).json();
        assert_eq!(profile["stops"], 0);
        let stacks = profile["stacks"].as_array().unwrap().iter();
        let seconds = |stack: &Value| stack["seconds"].as_f64().unwrap();
        let is_whole = |stack: &&Value| {
            let frames = stack["frames"].as_array().unwrap();
            let mut names = frames.iter().filter_map(Value::as_str);
            let leads = names.any(|it| it.starts_with(function));
            leads && ["complete", "guessed"].contains(&stack["stack"].as_str().unwrap())
        };
        let whole: f64 = stacks.clone().filter(is_whole).map(seconds).sum();
        let all: f64 = stacks.map(seconds).sum();
        assert!(
            all > 0.0 && whole > 0.5 * all,
            "{whole} of {all}: {profile}"
        );
    }
}

#[test]
fn collections_of_ocaml_5_are_distinguished() {
    let [file, _] = program_forms("stacks");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    program.talker.ask("collect", "collects");
    check_collections(program.pid);
}

/// What a program says of its threads: role and domain, by the file descriptor that each reads.
fn started(program: &mut ChrootProgram) -> BTreeMap<i64, (String, u64)> {
    program.talker.send("start");
    let mut threads = BTreeMap::new();
    loop {
        let line = program.talker.line().expect("its threads");
        if line == "numbered" {
            return threads;
        }
        let [role, domain, descriptor] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let thread = (role.to_owned(), domain.parse().unwrap());
        threads.insert(descriptor.parse().unwrap(), thread);
    }
}

fn descriptor(thread: &Value) -> Option<i64> {
    thread["system_call"]["descriptor"].as_i64()
}

/// The threads, once each waits that the program has named.
fn read_named(pid: i32, flags: &str, named: &BTreeMap<i64, (String, u64)>) -> Vec<Value> {
    read_when(pid, flags, |threads| all_wait(threads, named))
}

/// The threads, once each waits that the program has named, and none of the others runs: it would have no frames, and
/// so no role.
fn read_with_roles(pid: i32, flags: &str, named: &BTreeMap<i64, (String, u64)>) -> Vec<Value> {
    read_when(pid, flags, |threads| {
        let have_roles = threads.iter().all(|it| it["role"] != "other");
        have_roles && all_wait(threads, named)
    })
}

fn all_wait(threads: &[Value], named: &BTreeMap<i64, (String, u64)>) -> bool {
    let waiting: Vec<_> = threads.iter().filter_map(descriptor).collect();
    named.keys().all(|named| waiting.contains(named))
}

// promise: Stacks: Each thread of OCaml 5 is shown with the domain that the program reports, tick and backup threads too;
//    nothing is stopped
//    for it; also in other namespaces (2 programs of 4 domains and 19 threads in each chroot)
#[test]
fn threads_are_shown_with_their_domains() {
    for (file, isolation) in program_forms("ocaml5/numbered").iter().zip(Isolation::ALL) {
        let mut program = ChrootProgram::start(isolation, file, &[]);
        let named = started(&mut program);
        assert_eq!(named.len(), 10, "{named:?}");
        let pid = program.pid;
        for flags in [" -live", ""] {
            let threads = read_with_roles(pid, flags, &named);
            let mut of_runtime: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
            for thread in &threads {
                let role = thread["role"].as_str().unwrap();
                let domain = thread["domain"].as_u64().expect("a domain");
                match descriptor(thread).and_then(|it| named.get(&it)) {
                    Some(named) => assert_eq!((role.to_owned(), domain), *named, "{thread}"),
                    None => of_runtime.entry(role).or_default().push(domain),
                }
            }
            of_runtime.values_mut().for_each(|domains| domains.sort());
            let all = vec![0, 1, 2, 3];
            let expected = [("backup", all.clone()), ("main", vec![0]), ("tick", all)];
            assert_eq!(of_runtime, BTreeMap::from(expected));
        }
        let table = run(&format!("stack -pid {pid} -format table")).answer();
        for said in [
            " main thread of domain 0: blocked in read, ",
            " domain 3: blocked in read, ",
            " systhread of domain 2: blocked in read, ",
            " tick thread of domain 1: ",
            " backup thread of domain 1: ",
        ] {
            assert!(table.contains(said), "{said}: {table}");
        }
        let plain = run(&format!("stack -pid {pid}")).answer();
        // Its first thread, and two more.
        assert!(
            plain.matches("\ndomain 3\nwaits for file ").count() == 3,
            "{plain}"
        );
        check_profiled(pid, &read(pid, ""));
    }
}

/// Checks that `profile` says the same of the threads of a process.
fn check_profiled(pid: i32, threads: &[Value]) {
    let profile = run(&format!("profile -pid {pid} -for 300ms -off-cpu -json")).json();
    let profiled = profile["stacks"].as_array().unwrap();
    let of_program = threads.iter().filter(|thread| {
        let role = thread["role"].as_str().unwrap();
        !["tick", "backup"].contains(&role)
    });
    for thread in of_program {
        let mut stacks = profiled.iter().filter(|it| it["tid"] == thread["tid"]);
        let is_said = |it: &Value| it["domain"] == thread["domain"] && it["role"] == thread["role"];
        assert!(
            stacks.clone().count() > 0 && stacks.all(is_said),
            "{thread}"
        );
    }
    let line = format!("profile -pid {pid} -for 300ms -off-cpu -by thread");
    let lines = run(&line).answer();
    for (said, count) in [
        (" (main thread of domain 0)\n", 1),
        (" (domain 3)\n", 1),
        (" (systhread of domain 2)\n", 2),
    ] {
        assert_eq!(lines.matches(said).count(), count, "{said}: {lines}");
    }
}

/// A file beside another, which is removed at the end.
struct Beside(PathBuf);

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn stripped(file: &Path) -> Beside {
    let stripped = Beside(file.with_extension(format!("stripped{}", std::process::id())));
    let mut strip = Command::new("strip");
    let strip = strip.arg("-o").arg(&stripped.0).arg(file);
    assert!(strip.status().unwrap().success());
    stripped
}

#[test]
fn domains_of_stripped_programs_are_not_guessed() {
    let [file, _] = program_forms("ocaml5/numbered");
    let file = stripped(&file);
    let mut program = ChrootProgram::start(Isolation::Chroot, &file.0, &[]);
    let named = started(&mut program);
    let threads = read_named(program.pid, "", &named);
    assert!(threads.iter().all(|it| it["domain"].is_null()));
}
