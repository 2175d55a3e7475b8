//! `stack`: the stacks of all threads of a process, and what they wait for.

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::process::{Command, Stdio};

use nix::libc::PTRACE_EVENT_CLONE;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;
use test_support::process;
use test_support::{
    Guard, Scratch, Talker, eventually, fixture, fixture_forms, gdb, program_forms,
};

use crate::stacks::{addresses, check_stopped_sleep, functions, read, read_when};
use crate::support::{run, run_command};

/// The threads that wait in `blocked.c`, and what each calls last.
const BLOCKED: [(&str, &str); 7] = [
    ("waits", "waits"),
    ("in_alloca", "waits"),
    ("leaf_in_alloca", "leaf_in_alloca"),
    ("in_handler", "waits"),
    ("on_other_stack", "waits"),
    ("sorts", "waits"),
    ("sleeps", "sleeps"),
];

/// Starts its threads; returns them by their names once they wait.
fn blocked(target: &mut Talker, flags: &str) -> BTreeMap<String, Value> {
    target.ask("block", "blocked");
    let waits = |thread: &Value| {
        let calls = ["read", "clock_nanosleep"].map(Value::from);
        calls.contains(&thread["system_call"]["name"])
    };
    let threads = read_when(target.pid(), flags, |threads| {
        let waiting = threads.iter().filter(|thread| waits(thread));
        waiting.count() == BLOCKED.len() + 1
    });
    let name = |thread: Value| (thread["name"].as_str().unwrap().to_owned(), thread);
    threads.into_iter().map(name).collect()
}

// promise: Stacks: The stacks of threads of a C program without frame pointers are those of gdb, to their outermost frames, whatever
//    they wait in: in signal handlers, on other stacks, in frames with alloca(3), or running (2 × 9 threads)
#[test]
fn stacks_of_c_are_those_of_gdb() {
    for file in fixture_forms("blocked") {
        let mut target = Talker::start(&file);
        let threads = blocked(&mut target, "");
        let expected = gdb::stacks(target.pid());
        assert_eq!(threads.len(), 9);
        for (name, innermost) in BLOCKED {
            let thread = &threads[name];
            assert_eq!(thread["stack"], "complete", "{name}");
            let functions = functions(thread);
            let own = functions.iter().position(|it| it == innermost).unwrap();
            let rest = &functions[own..];
            assert_eq!(rest.iter().filter(|it| *it == "deep").count(), 5, "{name}");
            assert!(rest.contains(&name.to_owned()) && rest.contains(&"begin".to_owned()));
            let tid = thread["tid"].as_i64().unwrap() as i32;
            assert_eq!(addresses(thread), expected[&tid], "{name}");
        }
        let spins = &threads["spins"];
        assert_eq!(
            (&spins["state"], &spins["stack"]),
            (&"running".into(), &"complete".into())
        );
        assert_eq!(functions(spins)[..2], ["spins", "deep"]);
        assert_eq!(threads["in_handler"]["system_call"]["descriptor"], 3);
        assert_eq!(threads["sleeps"]["system_call"]["waits_for"], "the time");
    }
}

// promise: Stacks: With -live, nothing is stopped, and what is guessed or not read for that reason is said to be so (2 × 9 threads)
#[test]
fn live_stacks_say_what_they_lack() {
    for file in fixture_forms("blocked") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let threads = blocked(&mut target, " -live");
        let expected = gdb::stacks(pid);
        for (name, _) in BLOCKED {
            let thread = &threads[name];
            let stack = if name.ends_with("alloca") {
                "guessed"
            } else {
                "complete"
            };
            assert_eq!(thread["stack"], stack, "{name}");
            let tid = thread["tid"].as_i64().unwrap() as i32;
            assert_eq!(addresses(thread), expected[&tid], "{name}");
        }
        assert_eq!(threads["spins"]["stack"], "unread");
        let expected = "ocaml-probes: warning: 1 thread without frames: they were running, and -live stops nothing\n\
             hint: without -live, they are stopped for about 50 us each\n\
             ocaml-probes: warning: 2 stacks cut or guessed\n\
             hint: the last line of a cut stack says why (`cut` in JSON); of a guessed one, a register was not known\n";
        // The debugger has just woken all threads.
        let said = eventually("one thread alone is running", || {
            let said = run(&format!("stack -live -pid {pid} -format table")).stderr;
            said.contains("1 thread without frames").then_some(said)
        });
        assert_eq!(said, expected);
    }
}

// promise: Stacks: The stacks of OCaml 4 are those of gdb through callbacks, exceptions, finalisers, signal handlers and the C code of
//    the runtime, and have names and lines in stripped programs too (3 programs of 9 threads)
#[test]
fn stacks_of_ocaml_are_those_of_gdb() {
    let scratch = Scratch::new();
    let mut files = program_forms("stacks").to_vec();
    let stripped = scratch.file("stripped");
    let mut strip = Command::new("strip");
    let strip = strip.arg("-o").arg(&stripped).arg(&files[0]);
    assert!(strip.status().unwrap().success());
    files.push(stripped);
    for file in files {
        let mut target = Talker::start(&file);
        target.ask("wait", "waits");
        crate::stacks::check_waiting(
            target.pid(),
            &[
                "plain",
                "callback",
                "in_alloca",
                "arguments",
                "raised",
                "library",
                "finaliser",
            ],
            "Stacks",
            |_| true,
        );
        // OCaml 4 has no domains.
        let threads = read(target.pid(), "");
        assert!(threads.iter().all(|it| it["domain"].is_null()));
    }
}

// promise: Stacks: A collection, or a signal handler, that an allocation within `try` has called is shown with its callers (2 programs
//    here and in each chroot)
#[test]
fn allocations_in_try_have_their_callers() {
    for file in program_forms("stacks") {
        let mut target = Talker::start(&file);
        target.ask("allocate", "allocates");
        crate::stacks::check_allocating(target.pid());
    }
}

// promise: Stacks: A thread that waits in posix_spawn(3) is shown with its callers, also with -live (2 × 2)
#[test]
fn thread_that_spawns_has_its_callers() {
    let scratch = Scratch::new();
    for (index, file) in fixture_forms("blocked").iter().enumerate() {
        let fifo = scratch.file(&format!("fifo{index}"));
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let mut target = Talker::start(file);
        target.send(&format!("spawn {}", fifo.display()));
        for flags in ["", " -live"] {
            let threads = read_when(target.pid(), flags, |threads| {
                threads[0]["system_call"]["name"].is_string()
                    && functions(&threads[0]).contains(&"spawns".to_owned())
            });
            assert_eq!(threads[0]["stack"], "complete", "{}", threads[0]);
            let functions = functions(&threads[0]);
            let own = functions.iter().position(|it| it == "spawns").unwrap();
            assert_eq!(functions[own + 1], "fixture_command");
            assert!(functions.contains(&"main".to_owned()), "{functions:?}");
        }
        fs::write(&fifo, "").unwrap();
        target.expect("spawned");
    }
}

/// Stops a process, by a signal, where it has made its first thread, which has executed nothing yet; returns that thread.
fn stop_with_new_thread(target: &mut Talker) -> i32 {
    let pid = Pid::from_raw(target.pid());
    ptrace::seize(pid, Options::PTRACE_O_TRACECLONE).unwrap();
    target.send("block");
    let stop = waitpid(pid, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(
        matches!(stop, WaitStatus::PtraceEvent(_, _, PTRACE_EVENT_CLONE)),
        "{stop:?}"
    );
    let tid = Pid::from_raw(ptrace::getevent(pid).unwrap().try_into().unwrap());
    waitpid(tid, Some(WaitPidFlag::__WALL)).unwrap();
    kill(pid, Signal::SIGSTOP).unwrap();
    ptrace::detach(tid, None).unwrap();
    ptrace::detach(pid, None).unwrap();
    all_stop(pid.as_raw());
    tid.as_raw()
}

// promise: Stacks: A thread that has just been made is shown to begin there (2)
#[test]
fn new_threads_begin_in_clone() {
    for file in fixture_forms("blocked") {
        let mut target = Talker::start(&file);
        let tid = stop_with_new_thread(&mut target);
        let threads = read(target.pid(), "");
        let new = threads.iter().find(|it| it["tid"] == tid).unwrap();
        assert_eq!(new["stack"], "complete", "{new}");
        assert_eq!(addresses(new).len(), 1, "{new}");
        let main = threads.iter().find(|it| it["tid"] != tid).unwrap();
        assert!(
            functions(main).iter().any(|it| it == "fixture_command"),
            "{main}"
        );
    }
}

// promise: Stacks: Of threads that live for less than a millisecond, each stack is complete, or it is said that it is not there (10
//    times)
#[test]
fn short_lived_threads_are_complete_or_unread() {
    let target = Talker::start(&fixture("churn.pie"));
    for _ in 0..10 {
        for thread in read(target.pid(), "") {
            let is_known = ["complete", "unread"]
                .map(Value::from)
                .contains(&thread["stack"]);
            assert!(is_known, "{thread}");
        }
    }
}

fn state(pid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("State:\t"));
    line.unwrap()[..1].to_owned()
}

/// Waits until all threads of a process are stopped by a signal.
fn all_stop(pid: i32) {
    eventually("all its threads are stopped", || {
        let mut tids = process::threads(pid).into_iter();
        tids.all(|tid| state(tid) == "T").then_some(())
    });
}

// promise: Stacks: A process that is stopped by a signal has stacks, and stays stopped
#[test]
fn stopped_process_has_stacks() {
    let mut target = Talker::start(&fixture("blocked.pie"));
    let pid = target.pid();
    blocked(&mut target, "");
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    all_stop(pid);
    let threads = read(pid, "");
    assert_eq!(threads.len(), 9);
    for thread in &threads {
        assert_eq!(thread["stack"], "complete", "{thread}");
        assert_eq!(thread["state"], "stopped");
    }
    // It stops itself again once it is not traced any more.
    eventually("it is stopped again", || (state(pid) == "T").then_some(()));
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    target.ask("nonsense", "unknown");
}

// promise: Stacks: A sleep that goes on after the process was stopped is shown with its name and what it waits for (2)
#[test]
fn sleep_that_was_stopped_has_its_name() {
    for file in fixture_forms("blocked") {
        let mut target = Talker::start(&file);
        blocked(&mut target, "");
        check_stopped_sleep(target.pid());
    }
}

// promise: Stacks: A process of 10,000 threads has the stacks of all, and is profiled
#[test]
fn ten_thousand_threads_have_stacks() {
    let target = Talker::start_with(&fixture("idle_threads.pie"), ["10000"]);
    // Some are still about to wait.
    eventually("all its threads wait", || {
        let mut tids = process::threads(target.pid()).into_iter();
        tids.all(|tid| state(tid) == "S").then_some(())
    });
    let threads = read(target.pid(), "");
    assert_eq!(threads.len(), 10_001);
    let are_complete =
        |thread: &&Value| thread["stack"] == "complete" && thread["state"] == "blocked";
    assert_eq!(threads.iter().filter(are_complete).count(), 10_001);
    let profile = run(&format!(
        "profile -wall -for 10ms -json -pid {}",
        target.pid()
    ))
    .json();
    assert_eq!(profile["threads"], 10_001);
    // Two files a thread, which RLIMIT_NOFILE may not allow, nor the kernel at all: that is said then.
    let waits = &profile["waits"];
    let is_recorded = waits["method"] == "recorded";
    assert_eq!(waits["because"].is_string(), !is_recorded, "{waits}");
}

// promise: Stacks: Of a thread that waits for a mutex, the thread that holds it is named; a condition has no owner (2 programs)
#[test]
fn owners_of_mutexes_are_named() {
    for file in program_forms("waiting") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let calls = |thread: &Value, name: &str| functions(thread).iter().any(|it| it == name);
        let threads = read_when(pid, "", |threads| {
            let has = |name| threads.iter().any(|thread| calls(thread, name));
            let waits_for_condition = has("Stdlib.Condition.wait") || has("caml_condition_wait");
            has("pthread_mutex_lock") && waits_for_condition
        });
        // The main thread has locked it.
        let locks = threads.iter().find(|it| calls(it, "pthread_mutex_lock"));
        let call = &locks.unwrap()["system_call"];
        assert_eq!(call["owner"], pid, "{call}");
        let waits_for = call["waits_for"].as_str().unwrap();
        let text = format!(", a mutex held by thread {pid}");
        assert!(
            waits_for.starts_with("the futex at 0x") && waits_for.ends_with(&text),
            "{waits_for}"
        );
        let owned = threads
            .iter()
            .filter(|it| !it["system_call"]["owner"].is_null());
        assert_eq!(owned.count(), 1);
        let shown = run(&format!("stack -format table -pid {pid}")).answer();
        assert!(shown.contains(&text), "{shown}");
    }
}

/// The system call that the only thread of a program waits in, once it is this one.
fn waits_in(program: &Guard, name: &str) -> Value {
    // It may still be executing its program.
    eventually("it sleeps", || {
        (process::state(program.pid()) == Some('S')).then_some(())
    });
    let threads = read_when(program.pid(), "", |threads| {
        threads[0]["system_call"]["name"] == name
    });
    threads[0]["system_call"].clone()
}

/// A shell whose standard input is a pipe: a `cat` that it starts ends when this is dropped.
fn bash(script: &str) -> Guard {
    Guard::spawn(
        Command::new("bash")
            .args(["-c", script])
            .stdin(Stdio::piped()),
    )
}

// promise: Stacks: Of a thread that waits for a connected socket, by read(2) or select(2), the other end is named (2 protocols)
#[test]
fn peers_of_sockets_are_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
    let addresses = [listener.local_addr(), receiver.local_addr()].map(Result::unwrap);
    for (protocol, address) in ["tcp", "udp"].into_iter().zip(addresses) {
        let path = format!("/dev/{protocol}/127.0.0.1/{}", address.port());
        for (command, name) in [("read", "read"), ("read -t 1000", "pselect6")] {
            let reader = bash(&format!("exec 7<>{path}; {command} -u 7"));
            let call = waits_in(&reader, name);
            assert_eq!(call["descriptor"], 7);
            assert_eq!(call["peer"], address.to_string());
            let waits_for = call["waits_for"].as_str().unwrap();
            let text = format!("]), the other end is {address}");
            assert!(waits_for.ends_with(&text), "{waits_for}");
        }
    }
    let of_pipe = bash("cat | read");
    let reader = eventually("it reads", || {
        let children = process::children(of_pipe.pid());
        children
            .into_iter()
            .find(|&pid| process::status(pid, "Name") == "bash")
    });
    let threads = read_when(reader, "", |threads| {
        threads[0]["system_call"]["name"] == "read"
    });
    assert!(threads[0]["system_call"]["peer"].is_null(), "{threads:?}");
}

/// The children of a program, once it has so many.
fn children(program: &Guard, many: usize) -> Vec<i32> {
    eventually("it has children", || {
        let children = process::children(program.pid());
        (children.len() == many).then_some(children)
    })
}

// promise: Stacks: Of a thread that waits for a child, that is named if it is the one that the call names, or the only one, also in a pid
//    namespace of its own (4 ways)
#[test]
fn children_that_are_waited_for_are_named() {
    let parent = bash("cat; true");
    let only = children(&parent, 1)[0];
    let call = waits_in(&parent, "wait4");
    assert_eq!(call["child"], only);
    assert_eq!(call["waits_for"], format!("its child process {only}"));
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--user",
        "--map-root-user",
        "--fork",
        "--pid",
        "--kill-child",
        "cat",
    ]);
    let parent = Guard::spawn(unshare.stdin(Stdio::piped()));
    let only = children(&parent, 1)[0];
    assert_eq!(waits_in(&parent, "wait4")["child"], only);
    let parent = bash("exec 3<&0; cat <&3 & cat; true");
    children(&parent, 2);
    let call = waits_in(&parent, "wait4");
    assert!(call["child"].is_null(), "{call}");
    assert_eq!(call["waits_for"], "a child process");
    let script = "fork || exec 'cat'; $second = fork || exec 'cat', '-'; waitpid $second, 0";
    let mut perl = Command::new("perl");
    let parent = Guard::spawn(perl.args(["-e", script]).stdin(Stdio::piped()));
    children(&parent, 2);
    let call = waits_in(&parent, "wait4");
    let second = call["child"].as_i64().unwrap();
    eventually("it is the second", || {
        let line = fs::read(format!("/proc/{second}/cmdline")).unwrap();
        (line == b"cat\x00-\x00").then_some(())
    });
}

// promise: Stacks: Where threads hold a mutex in turn, the stack of the one that is named as its holder holds it (2 × 20 times)
#[test]
fn named_owners_hold_the_mutex() {
    for file in fixture_forms("blocked") {
        let mut target = Talker::start(&file);
        target.ask("hand_over", "handing over");
        let mut named = 0;
        for _ in 0..20 {
            let threads = read(target.pid(), "");
            let owners = threads.iter().map(|it| &it["system_call"]["owner"]);
            for owner in owners.filter(|it| !it.is_null()) {
                named += 1;
                let owner = threads.iter().find(|it| it["tid"] == *owner).unwrap();
                let holds = functions(owner).iter().any(|it| it == "holds");
                assert!(holds, "{threads:?}");
            }
        }
        assert!(named >= 10, "{named}");
    }
}

// promise: Stacks: A process that cannot be stopped has the stacks of its blocked threads, and the others are said to be missing
#[test]
fn traced_process_has_stacks_of_blocked_threads() {
    let mut target = Talker::start(&fixture("blocked.pie"));
    let pid = target.pid();
    blocked(&mut target, "");
    let mut tracer = Command::new("strace");
    tracer.args(["-f", "-o", "/dev/null", "-p", &pid.to_string()]);
    let _tracer = Guard::spawn(&mut tracer);
    eventually("it is traced", || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        (!status.contains("TracerPid:\t0")).then_some(())
    });
    let said = run(&format!("stack -pid {pid}"));
    assert!(said.stderr.contains("without frames"), "{}", said.stderr);
    assert!(said.stderr.contains("strace"), "{}", said.stderr);
    assert!(said.stdout.contains("frame 0x"), "{}", said.stdout);
}

#[test]
fn unread_stacks_have_the_hint_of_the_error() {
    let mut target = Talker::start(&fixture("blocked.pie"));
    let pid = target.pid().to_string();
    blocked(&mut target, "");
    let mut stack = Command::new(fixture("without_ptrace.exe"));
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let said = run_command(stack.args([tool, "stack", "-pid", &pid])).stderr;
    assert!(said.contains("without frames"), "{said}");
    let hint = "blocks ptrace\nhint: start the container with --cap-add=SYS_PTRACE\n";
    assert!(said.contains(hint), "{said}");
}

// promise: Stacks: A first thread that has exited before the others has no stack, and does not wait (2 programs)
#[test]
fn exited_first_thread_is_not_shown() {
    for file in fixture_forms("zombie_leader") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let stacks = run(&format!("stack -json -pid {pid}")).json();
        let threads = stacks["threads"].as_array().unwrap();
        assert!(!threads.is_empty(), "{stacks}");
        assert!(threads.iter().all(|it| it["tid"] != pid), "{stacks}");
        let profile = run(&format!("profile -for 50ms -json -pid {pid}")).json();
        let states = profile["stacks"].as_array().unwrap().iter();
        let tids: Vec<_> = states.map(|it| &it["tid"]).collect();
        assert!(
            !tids.is_empty() && !tids.contains(&&pid.into()),
            "{profile}"
        );
    }
}

#[test]
fn processes_without_stacks_are_refused() {
    let error = run("stack -pid 2").failure();
    assert!(error.contains("kernel thread"), "{error}");
    let error = run("stack -pid 2147483647").failure();
    assert!(error.contains("2147483647"), "{error}");
}
