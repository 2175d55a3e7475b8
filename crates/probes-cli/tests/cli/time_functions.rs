//! `latency -fn`: how long calls of functions last.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use test_support::{Talker, fixture_forms, program_forms};

use crate::count_functions::{start_observing, trace};
use crate::support::{is_observed, object, run, run_on};

/// The figures of a plain line before its name.
const FIGURES: usize = 11;

/// COUNT, RUNNING, EXITS, LOST, UNWOUND and the name of each plain line, by name.
fn figures(plain: &str) -> Vec<String> {
    let line = |line: &str| {
        let words: Vec<&str> = line.splitn(FIGURES + 1, ' ').collect();
        let numbers: Vec<u64> = words[..FIGURES]
            .iter()
            .map(|word| word.parse().unwrap())
            .collect();
        assert!(numbers[2..7].is_sorted(), "{line}");
        let others = words[7..FIGURES].join(" ");
        format!("{} {} {others}", words[FIGURES], words[0])
    };
    let mut lines: Vec<String> = plain.lines().map(line).collect();
    lines.sort();
    lines
}

const NOTE_OF_JUMPS: &str =
    "calls of tail can end with a jump to another function, whose time is not part of theirs";

// promise: Functions: Calls of C functions, nested, ended by a jump, and unwound by longjmp(3), in one thread and in 16,
//    are timed to the last one (2)
#[test]
fn every_call_of_c_is_timed_or_unwound() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for threads in [1, 4, 16] {
            let tool = start_observing(
                "latency",
                "-fn deep,tail,returns_long_double -fn unwound,leaf",
                pid,
            );
            target.ask(&format!("call {threads} 2000"), "called");
            let run = tool.end();
            assert!(run.stderr.starts_with(NOTE_OF_JUMPS), "{run:?}");
            assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
            let rounds = threads * 2000;
            let expected = [
                format!("deep {} 0 0 0 0", 6 * rounds),
                format!("leaf {} 0 0 0 0", 5 * rounds + rounds / 2),
                format!("returns_long_double {rounds} 0 0 0 0"),
                format!("tail {rounds} 0 0 0 0"),
            ];
            let mut figures = figures(&run.answer());
            let unwound = figures.pop().unwrap();
            assert_eq!(figures, expected, "{threads}");
            // Those of the last round of a thread are noticed only if its stack is used again.
            let words: Vec<&str> = unwound.split(' ').collect();
            let ["unwound", "0", running, "0", "0", unwound] = words[..] else {
                panic!("{words:?}");
            };
            let [running, unwound]: [u64; 2] = [running, unwound].map(|it| it.parse().unwrap());
            assert_eq!(running + unwound, 3 * rounds);
            assert!(running <= 3 * threads, "{running}");
            assert!(!is_observed(pid));
        }
        target.ask("call 1 1", "called");
    }
}

/// The figures of functions of `owners` that `trace -latency` prints for these commands, by name; `main` calls exit(3).
fn owners_figures(file: &Path, words: &str) -> (String, Vec<[u64; 5]>) {
    let traced = trace(file, "-latency -fn half,leaf,outer,main", words);
    assert_eq!(traced.code, Some(0), "{}", traced.stderr);
    let is_figures = |line: &&str| line.starts_with(|first: char| first.is_ascii_digit());
    let plain: Vec<&str> = traced.stderr.lines().filter(is_figures).collect();
    let lines = figures(&plain.join("\n"));
    let names: Vec<&str> = lines.iter().filter_map(|it| it.split(' ').next()).collect();
    assert_eq!(names, ["half", "leaf", "main", "outer"]);
    assert_eq!(lines[2], "main 0 1 0 0 0");
    let numbers = |line: &String| {
        let numbers = line.split(' ').skip(1).map(|it| it.parse().unwrap());
        numbers.collect::<Vec<u64>>().try_into().unwrap()
    };
    let lines = [&lines[0], &lines[1], &lines[3]];
    (traced.stderr.clone(), lines.map(numbers).to_vec())
}

/// How often a round of `owners` calls `half`, `leaf` and `outer`.
const OF_ROUND: [u64; 3] = [3, 2, 1];

// promise: Functions: From the first instruction, each call of a program is timed or counted as lost, as those in threads
//    without thread-local storage are (4 programs)
#[test]
fn calls_are_timed_from_the_first_instruction() {
    let (timed, lost) = (4 * 20_000, 4 * 5_000);
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            let (stderr, all) = owners_figures(&file, "threads 4 20000\nbare 4 5000\n");
            let mut all_lost = 0;
            for (calls, numbers) in OF_ROUND.into_iter().zip(all) {
                let [count, 0, 0, reported, 0] = numbers else {
                    panic!("{}: {numbers:?}", file.display());
                };
                // On a busy machine some are lost because their registers cannot be saved.
                let (timed, lost) = (calls * timed, calls * lost);
                assert!(count <= timed && reported >= lost, "{numbers:?}");
                assert!(count + reported >= timed + lost, "{numbers:?}");
                all_lost += reported;
            }
            assert!(stderr.contains(&format!("{all_lost} of ")), "{stderr}");
        }
    }
}

// promise: Functions: From the first instruction, calls of a program are timed to the last one while its forked children make
//    the same calls, of which none is timed or counted as lost (4 programs)
#[test]
fn calls_of_forked_children_are_not_timed() {
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            let (stderr, all) = owners_figures(&file, "forks 6 20000\n");
            let expected = OF_ROUND.map(|calls| [calls * 20_000, 0, 0, 0, 0]);
            assert_eq!(all, expected, "{}: {stderr}", file.display());
        }
    }
}

#[test]
fn loaders_are_timed_from_their_first_instruction() {
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            let traced = trace(&file, "-latency -fn * -json", "threads 2 1000\\n");
            assert_eq!(traced.code, Some(0), "{}", traced.stderr);
            assert!(traced.stdout.ends_with("done 2000\n"), "{}", traced.stdout);
            let said = traced.said();
            let json = said.iter().find(|it| it["type"] == "latency").unwrap();
            let functions = json["functions"].as_array().unwrap();
            let sum = |field: &str| -> u64 {
                functions.iter().map(|it| it[field].as_u64().unwrap()).sum()
            };
            assert!(sum("count") > 2000 * 6, "{}", file.display());
            // In dynamic programs, the first calls are those of the loader that give the thread its thread-local
            // storage.
            assert_eq!(
                sum("lost") > 0,
                name == "owners_static",
                "{}",
                file.display()
            );
        }
    }
}

#[test]
fn ocaml_is_timed_from_the_first_instruction() {
    for file in program_forms("calls") {
        let traced = trace(&file, "-latency -fn Calls.leaf,Calls.entry", "run 2 100\\n");
        assert_eq!(traced.code, Some(0), "{}", traced.stderr);
        let expected = ["Calls.entry 1 0 0 0 0", "Calls.leaf 300 0 0 0 0"];
        assert_eq!(figures(&traced.stderr), expected);
    }
    let nothing = run("trace -latency -fn nothing_of_this_name -prog /bin/true");
    assert!(nothing.failure().contains("the program was not started"));
}

#[test]
fn exits_do_not_count_as_functions() {
    for file in fixture_forms("lasting") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let tool = start_observing("latency", "-fn deep,tail,returns_long_double", pid);
        let info = run(&format!("info -json -pid {pid}")).json();
        assert_eq!(info["observed_functions"], 3);
        tool.kill();
        let cleaned = run(&format!("observe -clean -pid {pid}")).answer();
        assert_eq!(cleaned, format!("{pid} 3\n"));
        assert!(!is_observed(pid));
    }
}

// promise: Functions: Functions that end with a jump to another one are named in text, and in JSON each has the number of its
//    jumps (3 functions)
#[test]
fn functions_that_jump_are_told() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let mut with = |flags: &str| {
            let tool = start_observing("latency", flags, target.pid());
            target.ask("call 1 2", "called");
            tool.end()
        };
        let run = with("-json -fn deep,tail,leaf");
        assert_eq!(run.stderr, "");
        let timed = called(&object(&run.answer()));
        let exits = ["deep", "leaf", "tail"].map(|name| {
            let number = |field: &str| timed[name][field].as_u64().unwrap();
            (number("returns"), number("jumps"))
        });
        assert_eq!(exits[1], (1, 0));
        assert!(exits[0].0 > 0 && exits[0].1 == 0, "{exits:?}");
        assert!(exits[2].0 > 0 && exits[2].1 > 0, "{exits:?}");
        assert!(!with("-fn deep,leaf").stderr.contains("jump"));
        // It is timed, but not called.
        assert!(
            !with("-fn tail,lasts -where arg0==77")
                .stderr
                .contains("jump")
        );
        let traced = trace(&file, "-latency -fn tail", "call 1 2\\n");
        assert!(traced.stderr.contains(NOTE_OF_JUMPS), "{traced:?}");
    }
}

#[test]
fn times_are_those_of_the_program() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let tool = start_observing("latency", "-json -fn lasts", target.pid());
        let answer = target.ask("last 20 2000", "lasted");
        let own: u64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let json = object(&tool.end().answer());
        let function = &json["functions"][0];
        let number = |name: &str| function[name].as_u64().unwrap();
        assert_eq!((number("count"), number("unwound")), (20, 0));
        let measured = 20 * number("mean_ns");
        // The program reads its clock before the first call and after the last one.
        assert!(measured <= own + own / 100, "{measured} {own}");
        assert!(measured >= 20 * 2_000_000 * 99 / 100, "{measured}");
        assert!(number("max_ns") >= number("p50_ns") && number("p50_ns") >= 1_980_000);
        let counted = function["buckets"].as_array().unwrap().iter();
        let counted: u64 = counted.map(|it| it["count"].as_u64().unwrap()).sum();
        assert_eq!(counted, 20);
        assert_eq!(json["pairs"], Value::Array(Vec::new()));
    }
}

/// The calls of each function that the program `calls` has counted.
fn own_calls(target: &mut Talker, command: &str) -> Vec<u64> {
    let answer = target.ask(command, "calls");
    let words = answer.split(' ').skip(1);
    words
        .map(|word| word.split_once('=').unwrap().1.parse().unwrap())
        .collect()
}

// promise: Functions: Calls of OCaml functions are timed to the last one, and those that an exception ends are
//    distinguished (2 programs, 1 and 4 threads)
#[test]
fn calls_that_raise_are_unwound() {
    for file in program_forms("calls") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let before = own_calls(&mut target, "run 1 0");
            let tool = start_observing(
                "latency",
                "-fn Calls.leaf,Calls.deep,Calls.raises",
                target.pid(),
            );
            let after = own_calls(&mut target, &format!("run {threads} 20000"));
            let run = tool.end();
            let added: Vec<u64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
            let [leaves, deep, raises] = added[..] else {
                panic!("{added:?}");
            };
            // Every other call of `raises` raises; the others end with a jump to `leaf`.
            let half = raises / 2;
            let expected = [
                format!("Calls.deep {deep} 0 0 0 0"),
                format!("Calls.leaf {leaves} 0 0 0 0"),
                format!("Calls.raises {half} 0 0 0 {half}"),
            ];
            assert_eq!(figures(&run.answer()), expected, "{threads}");
        }
    }
}

// promise: Functions: An OCaml program that overflows its stack in functions that are timed catches it (2)
#[test]
fn overflow_within_timed_functions_is_caught() {
    for file in program_forms("overflow") {
        let mut target = Talker::start(&file);
        let tool = start_observing("latency", "-fn Overflow.*", target.pid());
        for threads in [0, 4] {
            let answer = target.ask(&format!("overflow {threads}"), "overflow");
            assert_eq!(answer, "overflow caught=9 others=same");
        }
        let answer = tool.end().answer();
        let small = answer.lines().find(|it| it.ends_with(" Overflow.small"));
        let words: Vec<&str> = small.unwrap().split(' ').collect();
        // About 500 calls of each overflow are recorded; the calls within them are lost.
        let (lost, unwound): (u64, u64) = (words[9].parse().unwrap(), words[10].parse().unwrap());
        assert!(lost > 1000 && unwound > 1000, "{answer}");
    }
}

/// The functions of `-json` that were called, by name; one that is there twice has the last part of its code.
fn called(json: &Value) -> HashMap<String, Value> {
    let functions = json["functions"].as_array().unwrap().iter();
    let called = functions.filter(|it| it["count"] != 0 || it["unwound"] != 0);
    called
        .map(|it| (it["name"].as_str().unwrap().to_owned(), it.clone()))
        .collect()
}

/// Asserts that the self times of all functions add up to the time of `root`, which all others are called by.
fn assert_self_times_add_up(functions: &HashMap<String, Value>, root: &str) {
    let sum = |field: &str| {
        functions
            .values()
            .map(|it| it[field].as_u64().unwrap())
            .sum()
    };
    let own: u64 = sum("self_ns");
    let total = functions[root]["total_ns"].as_u64().unwrap();
    // Each sum is rounded down to nanoseconds.
    let rounding = functions.len() as u64;
    assert!(own <= total + 1 && total <= own + rounding, "{own} {total}");
    for function in functions.values() {
        let times = ["self_ns", "total_ns"].map(|it| function[it].as_u64().unwrap());
        assert!(times.is_sorted(), "{function}");
        assert_eq!(function["lost"], 0);
    }
}

// promise: Functions: Self times of functions in C and in OCaml, nested, recursive, unwound and raising, add up to the time of
//    the function that calls them all (4 programs, 1, 4 and 16 threads)
#[test]
fn self_times_add_up() {
    for (files, command, answer, functions, root) in [
        (
            fixture_forms("lasting"),
            "call",
            "called",
            "work,deep,tail,leaf,returns_long_double,unwound",
            "work",
        ),
        (
            program_forms("calls"),
            "run",
            "calls",
            "Calls.work,Calls.leaf,Calls.deep,Calls.raises",
            "Calls.work",
        ),
    ] {
        for file in files {
            let mut target = Talker::start(&file);
            for threads in [1, 4, 16] {
                let flags = format!("-json -self -fn {functions}");
                let tool = start_observing("latency", &flags, target.pid());
                target.ask(&format!("{command} {threads} 2000"), answer);
                let called = called(&object(&tool.end().answer()));
                assert_self_times_add_up(&called, root);
                // Unwound calls are made by it alone.
                for (name, function) in &called {
                    let doubtful = if name == root { threads } else { 0 };
                    assert_eq!(function["doubtful"], doubtful, "{name}");
                }
                let deep = called.iter().find(|(name, _)| name.ends_with("deep"));
                let (_, deep) = deep.unwrap();
                assert!(deep["total_ns"].as_u64() > deep["self_ns"].as_u64());
            }
        }
    }
}

// promise: Functions: Self times add up although signal handlers that call timed functions interrupt the trampolines
//    (2 programs)
#[test]
fn self_times_add_up_across_signals() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let flags = "-json -self -fn interrupted,deep,leaf";
        let tool = start_observing("latency", flags, target.pid());
        let answer = target.ask("interrupt 300000", "handled");
        let handled: u64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let called = called(&object(&tool.end().answer()));
        assert!(handled > 0);
        assert_self_times_add_up(&called, "interrupted");
        assert_eq!(called["leaf"]["count"], 5 * 300_000 + handled);
        assert_eq!(called["deep"]["count"], 6 * 300_000);
        for function in called.values() {
            let others = ["doubtful", "unwound", "unmatched_exits"].map(|it| &function[it]);
            assert!(others.iter().all(|it| **it == 0), "{function}");
        }
    }
}

#[test]
fn self_times_are_shown_in_every_form() {
    let mut target = Talker::start(&fixture_forms("lasting")[0]);
    let mut with = |flags: &str| {
        let flags = format!("-self -fn deep,unwound{flags}");
        let tool = start_observing("latency", &flags, target.pid());
        target.ask("call 1 10", "called");
        tool.end().answer()
    };
    let plain = with("");
    let deep = plain.lines().next().unwrap();
    let words: Vec<&str> = deep.split(' ').collect();
    assert_eq!((words.len(), words[0], words[14]), (15, "60", "deep"));
    let numbers: Vec<u64> = words[..14].iter().map(|it| it.parse().unwrap()).collect();
    // DOUBTFUL, SELF and TOTAL.
    assert!(numbers[11] == 0 && numbers[12] < numbers[13], "{deep}");
    assert_eq!(numbers[12] / 60, numbers[1]);
    let table = with(" -format table");
    let mut head = table.lines().next().unwrap().split('|').map(str::trim);
    let columns = ["function", "count", "self", "total", "mean"];
    assert!(columns.iter().all(|it| head.next() == Some(it)), "{table}");
    assert!(table.contains("deep, self time:"), "{table}");
    let without = run(&format!("latency -pid {} -pair a,b -self", target.pid()));
    assert_eq!(without.code, Some(2));
    let needs = "-self is for functions: it needs -fn GLOBS or -gc WORK";
    assert!(without.stderr.contains(needs), "{}", without.stderr);
}

/// The callers of a function of `-json`: the name of each caller's function (or `other`) and how often it has called.
fn callers(function: &Value) -> Vec<(String, u64)> {
    let callers = function["callers"].as_array().unwrap().iter();
    let mut callers: Vec<_> = callers
        .map(|it| {
            let name = it["function"].as_str().unwrap_or("other");
            assert_eq!(it["address"].is_null(), name == "other");
            (name.to_owned(), it["count"].as_u64().unwrap())
        })
        .collect();
    callers.sort();
    callers
}

/// Asserts that the calls of all callers are those of the function, and so are their times.
fn assert_callers_add_up(function: &Value) {
    let callers = function["callers"].as_array().unwrap();
    let sum = |field: &str| -> u64 { callers.iter().map(|it| it[field].as_u64().unwrap()).sum() };
    assert_eq!(function["count"], sum("count"), "{function}");
    for (of_callers, own) in [("sum_ns", "self_ns"), ("total_ns", "total_ns")] {
        let difference = function[own].as_u64().unwrap().abs_diff(sum(of_callers));
        // Each sum is rounded down to nanoseconds.
        assert!(difference <= callers.len() as u64, "{own} {function}");
    }
    let longest = callers.iter().map(|it| it["max_ns"].as_u64().unwrap());
    assert_eq!(function["max_ns"], longest.max().unwrap_or(0));
}

// promise: Functions: Calls are counted and timed by caller to the last one, with recursion, tail calls and exceptions (4
//    programs, 1, 4 and 16 threads)
#[test]
fn callers_are_counted_to_the_last_call() {
    let named = |all: &[(&str, u64)]| {
        let named = all.iter().map(|(name, count)| ((*name).to_owned(), *count));
        named.collect::<Vec<_>>()
    };
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        for threads in [1, 4, 16] {
            let flags = "-json -self -by caller -fn deep,leaf,tail,unwound";
            let tool = start_observing("latency", flags, target.pid());
            target.ask(&format!("call {threads} 2000"), "called");
            let called = called(&object(&tool.end().answer()));
            let rounds = threads * 2000;
            let of = |name: &str| callers(&called[name]);
            assert_eq!(of("deep"), named(&[("deep", 5 * rounds), ("work", rounds)]));
            // `tail` jumps to it, and is called by `work`.
            let tail = ("work", rounds / 2);
            assert_eq!(of("leaf"), named(&[("deep", 5 * rounds), tail]));
            // In every other round, that jump is the exit of `tail`.
            assert_eq!(of("tail"), named(&[("work", rounds)]));
            assert_eq!(of("unwound"), []);
            called.values().for_each(assert_callers_add_up);
        }
    }
    for file in program_forms("calls") {
        for threads in [1, 4, 16] {
            let mut target = Talker::start(&file);
            let before = own_calls(&mut target, "run 1 0");
            let flags = "-json -self -by caller -fn Calls.leaf,Calls.deep,Calls.raises";
            let tool = start_observing("latency", flags, target.pid());
            let after = own_calls(&mut target, &format!("run {threads} 2000"));
            let called = called(&object(&tool.end().answer()));
            let added: Vec<u64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
            let rounds = threads * 2000;
            let of = |name: &str| callers(&called[name]);
            let work = "Calls.work";
            let deep = [("Calls.deep", added[1] - rounds), (work, rounds)];
            assert_eq!(of("Calls.deep"), named(&deep));
            // Every other call of `raises` ends with a jump to it.
            let leaf = [(work, rounds / 2), (work, rounds)];
            assert_eq!(of("Calls.leaf"), named(&leaf));
            assert_eq!(of("Calls.raises"), named(&[(work, rounds / 2)]));
            assert_eq!(added, [rounds + rounds / 2, added[1], rounds]);
            called.values().for_each(assert_callers_add_up);
        }
    }
}

// promise: Functions: Calls of more callers than there is room for are those of `other`, and the sums stay exact (2 programs)
#[test]
fn callers_without_room_are_others() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let flags = "-json -self -by caller -fn leaf";
        let tool = start_observing("latency", flags, target.pid());
        target.ask("everywhere 3", "everywhere");
        let called = called(&object(&tool.end().answer()));
        let leaf = &called["leaf"];
        assert_callers_add_up(leaf);
        let callers = callers(leaf);
        let (others, known): (Vec<_>, Vec<_>) = callers.iter().partition(|it| it.0 == "other");
        let [(_, others)] = others[..] else {
            panic!("{others:?}");
        };
        assert!(known.iter().all(|it| **it == ("everywhere".to_owned(), 3)));
        assert!(known.len() > 4000 && known.len() <= 8208, "{}", known.len());
        assert_eq!(3 * known.len() as u64 + others, 27_000);
        let last = leaf["callers"].as_array().unwrap().last().unwrap();
        assert!(last["address"].is_null(), "{last}");
    }
}

#[test]
fn callers_are_shown_in_every_form() {
    let mut target = Talker::start(&fixture_forms("lasting")[0]);
    let mut with = |flags: &str| {
        let tool = start_observing("latency", &format!("-fn leaf{flags}"), target.pid());
        target.ask("call 1 10", "called");
        tool.end().answer()
    };
    let plain = with(" -by caller");
    let lines: Vec<&str> = plain.lines().collect();
    assert!(lines.len() == 3 && lines[0].starts_with("55 ") && lines[0].ends_with(" 0 0 0 0 leaf"));
    let of = |start: &str| *lines.iter().find(|it| it.starts_with(start)).unwrap();
    let words: Vec<&str> = of("by 50 ").split(' ').collect();
    let ["by", "50", mean, max, sum, caller, source] = words[..] else {
        panic!("{plain}");
    };
    let [mean, max, sum]: [u64; 3] = [mean, max, sum].map(|it| it.parse().unwrap());
    assert!(mean == sum / 50 && max <= sum, "{plain}");
    assert!(caller.starts_with("deep+0x") && source.starts_with("lasting.c:"));
    assert!(of("by 5 ").contains(" work+0x"), "{plain}");
    let table = with(" -by caller -self -format table");
    let head = " function | caller ";
    let columns = table.lines().find(|it| it.starts_with(head)).unwrap();
    let columns: Vec<&str> = columns.split('|').map(str::trim).collect();
    assert_eq!(columns[2..], ["count", "mean", "max", "self", "total"]);
    let without = run(&format!(
        "latency -pid {} -pair a,b -by caller",
        target.pid()
    ));
    assert_eq!(without.code, Some(2));
    let needs = "-by caller is for functions: it needs -fn GLOBS or -gc WORK";
    assert!(without.stderr.contains(needs), "{}", without.stderr);
}

#[test]
fn idle_functions_of_many_are_left_out() {
    let mut target = Talker::start(&program_forms("calls")[0]);
    for json in [false, true] {
        let flags = if json {
            "-json -fn Stdlib.*,Calls.leaf"
        } else {
            "-fn Stdlib.*,Calls.leaf"
        };
        let tool = start_observing("latency", flags, target.pid());
        target.ask("run 1 10", "calls");
        let run = tool.end();
        if !json {
            let called = figures(&run.stdout);
            assert!(called.iter().any(|line| line.starts_with("Calls.leaf 15 ")));
            assert!(
                called.iter().all(|line| !line.ends_with(" 0 0 0 0 0")),
                "{called:?}"
            );
            let sum = format!(" functions ({} of them called), ", called.len());
            assert!(run.stderr.contains(&sum), "{}", run.stderr);
            continue;
        }
        let json = object(&run.answer());
        let rows = json["functions"].as_array().unwrap().len() as u64;
        assert!(rows > 0 && json["functions_timed"].as_u64().unwrap() > 100 + rows);
    }
}

#[test]
fn lost_calls_are_warned_of() {
    let mut target = Talker::start(&program_forms("overflow")[0]);
    for form in ["plain", "table", "json"] {
        let flags = format!("-fn Overflow.* -format {form}");
        let tool = start_observing("latency", &flags, target.pid());
        target.ask("overflow 0", "overflow");
        let run = tool.end();
        let warning = " were not recorded: the figures are those of the others";
        assert!(run.stderr.contains(warning), "{form}: {}", run.stderr);
        let is_kind = run.stderr.contains("\"kind\":\"lost_calls\"");
        assert_eq!(is_kind, form == "json", "{}", run.stderr);
    }
}

#[test]
fn functions_and_pairs_are_timed_together() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let tool = start_observing(
            "latency",
            "-pair start,stop -fn fixture_command",
            target.pid(),
        );
        // When the second one begins, the first has ended.
        target.ask("do ()()", "done");
        target.ask("do ()()", "done");
        let answer = tool.end().answer();
        let mut lines = answer.lines();
        assert!(lines.next().unwrap().starts_with("4 "), "{answer}");
        let line = lines.next().unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(words[8..], ["0", "0", "0", "fixture_command"], "{answer}");
        let [ended, running]: [u64; 2] = [words[0], words[7]].map(|it| it.parse().unwrap());
        assert_eq!((ended + running, ended > 0), (2, true), "{answer}");
    }
}

#[test]
fn work_of_the_collector_is_timed() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = start_observing("latency", "-gc minor,slice", target.pid());
        target.ask("run 4 200000", "calls");
        let answer = tool.end().answer();
        let lines = figures(&answer);
        let [minor, slice] = &lines[..] else {
            panic!("{answer}");
        };
        // Of OCaml 4, or of OCaml 5.
        let names = ["caml_empty_minor_heap", "caml_empty_minor_heaps_once"];
        let name = minor.split(' ').next().unwrap();
        assert!(names.contains(&name), "{minor}");
        assert!(slice.starts_with("caml_major_collection_slice "), "{slice}");
        for line in [minor, slice] {
            let count = line.split(' ').nth(1).unwrap();
            assert!(count != "0" && line.ends_with(" 0 0 0 0"), "{line}");
        }
    }
}

// promise: Functions: A function that begins with a `push` and a call is timed, too, where no address is free that a jump in
//    place of the `push` reaches (2 programs)
#[test]
fn compactions_are_timed_where_no_place_is_free() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let tool = start_observing("latency", "-gc compact", target.pid());
        target.ask("collect 5", "done");
        let timed = figures(&tool.end().answer());
        let tool = start_observing("count", "-gc compact", target.pid());
        target.ask("collect 5", "done");
        let counted = tool.end().answer();
        let (count, _) = counted.split_once(' ').unwrap();
        assert!(count.parse::<u64>().unwrap() >= 5, "{counted}");
        assert_eq!(timed, [format!("caml_compact_heap {count} 0 0 0 0")]);
    }
    for file in program_forms("calls") {
        let target = Talker::start(&file);
        let none = run(&format!(
            "latency -for 1ms -gc compact -pid {}",
            target.pid()
        ));
        assert!(none.answer().ends_with(" caml_compact_heap\n"));
    }
}

#[test]
fn missing_collectors_are_explained() {
    let target = Talker::start(&fixture_forms("lasting")[0]);
    let none = run(&format!("latency -pid {} -gc minor", target.pid())).failure();
    let why = "no OCaml runtime with symbols in lasting.pie or its ";
    let hint = "hint: -gc is for OCaml programs that have the symbols of their runtime";
    assert!(none.contains(why) && none.contains(hint), "{none}");
    let file = &program_forms("calls")[0];
    let target = Talker::start(file);
    let is_ocaml_5 = run_on("list -functions caml_init_domains", file).code == Some(0);
    let stw = run(&format!("count -for 1ms -pid {} -gc stw", target.pid()));
    if is_ocaml_5 {
        let warning = "most may be no stop-the-world sections";
        assert!(stw.stderr.contains(warning), "{}", stw.stderr);
        assert!(
            stw.answer()
                .ends_with("caml_try_run_on_all_domains_with_spin_work\n")
        );
        return;
    }
    let stw = stw.failure();
    let why = "calls.exe: the runtime of OCaml 4 does not do stw, only that of OCaml 5";
    assert!(
        stw.contains(why) && stw.contains("hint: -gc stw needs OCaml 5"),
        "{stw}"
    );
}

#[test]
fn errors_say_what_to_give() {
    let target = Talker::start(&fixture_forms("lasting")[0]);
    let latency = |flags: &str| run(&format!("latency -pid {}{flags}", target.pid()));
    let missing = latency("");
    assert_eq!(missing.code, Some(2));
    assert!(
        missing
            .stderr
            .contains("needs -pair START,STOP, -usdt START,STOP, -fn GLOBS or -gc WORK")
    );
    let listed = run(&format!("list -functions -pid {} leaf", target.pid())).answer();
    let (address, _) = listed.split_once(' ').unwrap();
    let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).unwrap();
    let middle = format!("count -pid {} -fn {:#x}", target.pid(), address + 1);
    let middle = run(&middle).failure();
    assert!(
        middle.contains("is in the middle of an instruction"),
        "{middle}"
    );
    assert!(
        middle.contains("hint: give the address at which an instruction begins"),
        "{middle}"
    );
    let calls = Talker::start(&program_forms("calls")[0]);
    let line = run(&format!("latency -pid {} -fn calls.ml:28", calls.pid())).failure();
    assert!(
        line.contains("hint: `count -fn calls.ml:28` counts"),
        "{line}"
    );
    // A wrapper that can be timed as a whole, and an instruction in it.
    let wrappers = Talker::start(&fixture_forms("externals")[0]);
    let of_wrappers = format!("-pid {} ", wrappers.pid());
    let listed = run(&format!("list -functions {of_wrappers}padded_wrapper")).answer();
    let address = u64::from_str_radix(listed[2..].split(' ').next().unwrap(), 16).unwrap();
    let inside = run(&format!("latency {of_wrappers}-fn {:#x}", address + 3)).failure();
    let why = "padded_wrapper+0x3 is not the beginning of a function, and only calls of functions can be timed";
    let hint = "hint: `count -fn 0xADDRESS` counts";
    assert!(inside.contains(why) && inside.contains(hint), "{inside}");
    let whole = format!("latency {of_wrappers}-for 1ms -fn {address:#x}");
    assert!(run(&whole).answer().ends_with(" padded_wrapper\n"));
    let unknown = latency(" -fn depe");
    assert_eq!(unknown.code, Some(1));
    assert!(
        unknown.stderr.contains("did you mean"),
        "{}",
        unknown.stderr
    );
    assert!(!is_observed(target.pid()));
}
