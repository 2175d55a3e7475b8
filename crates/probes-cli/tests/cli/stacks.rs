//! What `stack -json` says, for the tests here and in the matrix.

use serde_json::Value;
use test_support::{eventually, gdb};

use crate::support::run;

/// The threads of a process.
pub(crate) fn read(pid: i32, flags: &str) -> Vec<Value> {
    let answer = run(&format!("stack -json -pid {pid}{flags}")).json();
    answer["threads"].as_array().unwrap().clone()
}

/// The same, once they are as wanted.
pub(crate) fn read_when(pid: i32, flags: &str, is_wanted: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    eventually("its threads wait", || {
        let threads = read(pid, flags);
        is_wanted(&threads).then_some(threads)
    })
}

/// The addresses of the frames of a thread.
pub(crate) fn addresses(thread: &Value) -> Vec<u64> {
    let frames = thread["frames"].as_array().unwrap().iter();
    let address = |frame: &Value| {
        let text = frame["address"].as_str().unwrap();
        u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap()
    };
    frames.map(address).collect()
}

/// The functions of the frames of a thread that have names.
pub(crate) fn functions(thread: &Value) -> Vec<String> {
    let frames = thread["frames"].as_array().unwrap().iter();
    let name = |frame: &Value| frame["function"].as_str().map(str::to_owned);
    frames.filter_map(name).collect()
}

/// Waits until a thread waits in each of these functions of a module. Checks that all stacks are complete, and those
/// of gdb if `gdb_knows` the function; otherwise gdb's are the beginning.
pub(crate) fn check_waiting(
    pid: i32,
    ways: &[&str],
    module: &str,
    gdb_knows: impl Fn(Option<&str>) -> bool,
) {
    let names: Vec<String> = ways.iter().map(|way| format!("{module}.{way}")).collect();
    let threads = read_when(pid, "", |threads| {
        let waits = |name: &String| {
            let mut of_way = threads.iter().filter(|it| functions(it).contains(name));
            of_way.any(|it| it["system_call"]["name"] == "read")
        };
        names.iter().all(waits) && threads[0]["system_call"]["name"] == "read"
    });
    let expected = gdb::stacks(pid);
    for thread in &threads {
        assert_eq!(thread["stack"], "complete", "{thread}");
        let functions = functions(thread);
        let (tid, found) = (thread["tid"].as_i64().unwrap() as i32, addresses(thread));
        let of_gdb = &expected[&tid];
        let way = ways
            .iter()
            .find(|way| functions.contains(&format!("{module}.{way}")));
        if gdb_knows(way.copied()) {
            assert_eq!(&found, of_gdb, "{thread}");
        } else {
            assert!(found.starts_with(of_gdb), "{thread}");
        }
        if let Some(way) = way.filter(|_| thread["role"] == "systhread") {
            // Where it waits, and the functions that lead there.
            let last = functions
                .iter()
                .rposition(|it| *it == format!("{module}.{way}"));
            assert!(
                last.unwrap() >= 2 && functions.contains(&"caml_thread_start".to_owned()),
                "{thread}"
            );
        }
    }
    // Without the registers, the callers of some frames are guessed.
    for guessed in read(pid, " -live") {
        if guessed["stack"] == "guessed" {
            let mut threads = threads.iter();
            let thread = threads.find(|it| it["tid"] == guessed["tid"]).unwrap();
            assert_eq!(addresses(&guessed), addresses(thread), "{guessed}");
        }
    }
    let role = |thread: &Value| thread["role"].as_str().unwrap().to_owned();
    let roles: Vec<String> = threads.iter().map(role).collect();
    assert_eq!(roles[0], "main");
    let ticks = roles.iter().any(|role| role == "tick");
    // Without symbols, roles are not known.
    let known = roles.iter().any(|role| role == "systhread");
    assert_eq!(ticks, known, "{roles:?}");
}

/// Checks the stack of a process that was told to `allocate`. gdb takes a word of the trap frame for a return address.
pub(crate) fn check_allocating(pid: i32) {
    let threads = read_when(pid, "", |threads| {
        functions(&threads[0]).contains(&"Stacks.wait".to_owned())
    });
    assert_eq!(threads[0]["stack"], "complete", "{}", threads[0]);
    let functions = functions(&threads[0]);
    let mut callers = functions.iter().skip_while(|it| *it != "caml_call_gc");
    let expected = [
        "caml_call_gc",
        "in_allocation",
        "allocate",
        "deep",
        "deep",
        "deep",
    ];
    for name in expected {
        let found = callers.next().map(|it| it.trim_start_matches("Stacks."));
        assert_eq!(found, Some(name), "{functions:?}");
    }
    assert!(callers.any(|it| it == "main"), "{functions:?}");
}

/// Checks the thread `sleeps` of `blocked.c` after it was stopped.
pub(crate) fn check_stopped_sleep(pid: i32) {
    run(&format!("count -quiet -fn waits -for 10ms -pid {pid}")).answer();
    let is_sleeping = |thread: &&Value| thread["name"] == "sleeps" && thread["state"] == "blocked";
    let threads = read_when(pid, "", |threads| threads.iter().any(|it| is_sleeping(&it)));
    let call = &threads.iter().find(is_sleeping).unwrap()["system_call"];
    assert_eq!(call["name"], "clock_nanosleep", "{call}");
    assert_eq!(call["waits_for"], "the time", "{call}");
}

/// Profiles a busy process until there are so many samples; returns the stacks. A second has hundreds; on a busy machine, on
/// which the process seldom runs, one or two.
fn stacks_of_busy(pid: i32, flags: &str, enough: u64) -> Vec<Value> {
    let mut stacks: Vec<Value> = Vec::new();
    eventually("there are enough samples", || {
        let line = format!("profile -json -on-cpu -hz 997 -for 1s -pid {pid}{flags}");
        let profile = run(&line).json();
        // On a busy machine, stops may come so late that the samples of the kernel are the answer.
        if profile["stops"] != 0 && profile["running_method"] != "stopped" {
            return None;
        }
        let found = profile["stacks"].as_array().unwrap().clone();
        // A thread that has waited again before it was stopped is not read.
        stacks.extend(found.into_iter().filter(|it| it["stack"] != "unread"));
        (samples(stacks.iter()) >= enough).then_some(())
    });
    stacks
}

pub(crate) fn samples<'v>(stacks: impl Iterator<Item = &'v Value>) -> u64 {
    stacks.map(|it| it["samples"].as_u64().unwrap()).sum()
}

/// Profiles a process that is busy; checks that its stacks are complete: all but one, or 1 %. Returns them.
pub(crate) fn check_complete(pid: i32) -> Vec<Value> {
    let stacks = stacks_of_busy(pid, "", 20);
    let cut = stacks.iter().filter(|it| it["stack"] != "complete");
    let (all, many) = (samples(stacks.iter()), samples(cut.clone()));
    assert!(
        many <= 1 + all / 100,
        "{many} of {all}: {:?}",
        cut.collect::<Vec<_>>()
    );
    stacks
}

/// Profiles a process that does nothing but collect garbage; checks that nearly all its time is of collections.
pub(crate) fn check_collections(pid: i32) {
    let stacks = stacks_of_busy(pid, " -gc", 50);
    let collecting = stacks.iter().filter(|it| it["in_collection"] == true);
    let (all, collecting) = (samples(stacks.iter()), samples(collecting));
    assert!(
        10 * collecting > 7 * all,
        "{collecting} of {all}: {stacks:?}"
    );
    let profile = run(&format!("profile -gc -json -pid {pid} -for 300ms")).json();
    let running = profile["in_collection"]["running_seconds"]
        .as_f64()
        .unwrap();
    let stacks = profile["stacks"].as_array().unwrap().iter();
    // Together with the time that no sample covers, which is of unknown kind, they add up to the exact time.
    let runs = stacks.clone().filter(|it| it["state"] == "running");
    let runs: f64 = runs.map(|it| it["seconds"].as_f64().unwrap()).sum();
    let exact = profile["times"]["running_seconds"].as_f64().unwrap();
    assert!(runs <= exact + 1e-6 && runs > 0.5 * exact, "{profile}");
    let collecting = stacks.filter(|it| it["in_collection"] == true && it["state"] == "running");
    let collecting: f64 = collecting.map(|it| it["seconds"].as_f64().unwrap()).sum();
    assert!((running - collecting).abs() < 0.001, "{profile}");
    // Threads that run may be those that collect: they are read for the time off the processor, too.
    let off = run(&format!("profile -gc -off-cpu -json -pid {pid} -for 300ms")).json();
    assert!(off["stops"].as_u64().unwrap() > 0, "{off}");
    let lines = run(&format!("profile -gc -pid {pid} -by stack -for 1s")).answer();
    assert!(
        lines
            .lines()
            .nth(1)
            .unwrap()
            .starts_with("collection running "),
        "{lines}"
    );
    assert!(lines.contains(" [collection];"), "{lines}");
}
