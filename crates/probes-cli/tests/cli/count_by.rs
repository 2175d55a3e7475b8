//! `count -by`: hits by keys.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use test_support::{Talker, fixture_forms, program, program_forms};

use crate::count_functions::counting;
use crate::support::{is_observed, object, run};

/// The hits of each integer.
type Hits = BTreeMap<i64, u64>;

/// Returns the parts of each key, and its hits.
fn keys(json: &Value) -> Vec<(&Vec<Value>, u64)> {
    let all = json["keys"].as_array().unwrap().iter();
    all.map(|it| (it["key"].as_array().unwrap(), it["hits"].as_u64().unwrap()))
        .collect()
}

/// Returns the hits of each integer that is a key; no key comes twice.
fn integers(json: &Value) -> Hits {
    let mut hits = Hits::new();
    for (key, many) in keys(json) {
        let before = hits.insert(key[0]["int"].as_i64().unwrap(), many);
        assert_eq!(before, None, "{json}");
    }
    hits
}

/// Returns the hits of `other`, and the untyped ones.
fn rest(json: &Value) -> (u64, u64) {
    let field = |name: &str| json[name].as_u64().unwrap();
    (field("other"), field("untyped"))
}

/// How often `Calls.leaf` is called with each argument.
fn leaves(threads: u64, rounds: i64) -> Hits {
    // Another function calls it with each even number.
    let hits = |round| if round % 2 == 0 { 2 } else { 1 };
    (1..=rounds)
        .map(|round| (round, threads * hits(round)))
        .collect()
}

// promise: Functions: `count -by` has each argument of all calls as a key with its exact hits (2 programs, 1, 4 and 16 threads)
#[test]
fn arguments_of_calls_are_keys() {
    for file in program_forms("calls") {
        for threads in [1, 4, 16] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = counting("-fn Calls.leaf -by arg0 -json", pid);
            target.ask(&format!("run {threads} 500"), "calls");
            let json = object(&tool.end().answer());
            assert_eq!(integers(&json), leaves(threads, 500));
            assert_eq!((rest(&json), &json["by"]), ((0, 0), &json!(["arg0"])));
            assert!(!is_observed(pid));
            target.ask("run 1 10", "calls");
        }
    }
}

// promise: Functions: `count -by` of 100,000 keys has all hits, as those of keys or as other (2 programs, 1 and 4 threads)
#[test]
fn more_keys_than_room_add_up() {
    for file in program_forms("calls") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = counting("-fn Calls.leaf -by arg0*-1 -json", pid);
            target.ask(&format!("run {threads} 100000"), "calls");
            let run = tool.end();
            assert!(run.stderr.contains("found no room"), "{run:?}");
            let json = object(&run.stdout);
            let (found, most) = (integers(&json), leaves(threads, 100_000));
            assert!(found.len() > 3000, "{}", found.len());
            for (key, hits) in &found {
                assert!(hits <= &most[&-key], "{key}: {hits}");
            }
            let (other, untyped) = rest(&json);
            let all: u64 = most.values().sum();
            assert_eq!(found.values().sum::<u64>() + other + untyped, all);
            assert!(other > 0 && untyped == 0, "{other} {untyped}");
        }
    }
}

/// How often the fixture `calls` calls `leaf` with each argument, in each thread: with the number of each round, and
/// with one more.
fn arguments_of_leaf(rounds: i64) -> impl Iterator<Item = i64> {
    (0..rounds).flat_map(|round| [round, round + 1])
}

// promise: Functions: Ten million calls of a C function have the keys that the program passes, each as often (2 programs, 1, 4 and 16
//    threads)
#[test]
fn ten_million_calls_have_their_keys() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        for threads in [1, 4, 16] {
            let rounds = 5_000_000 / threads;
            let tool = counting("-fn leaf -by int(arg0)&1023 -json", target.pid());
            target.ask(&format!("calls {threads} {rounds}"), "called");
            let json = object(&tool.end().answer());
            // How many of the numbers below one have these bits.
            let below = |end: i64, bits: i64| (end + 1023 - bits) / 1024;
            let hits = |bits| {
                let [of_rounds, up_to_one_more] = [rounds, rounds + 1].map(|end| below(end, bits));
                let is_zero = i64::from(bits == 0);
                ((of_rounds + up_to_one_more - is_zero) * threads) as u64
            };
            let expected: Hits = (0..1024).map(|bits| (bits, hits(bits))).collect();
            assert_eq!(expected.values().sum::<u64>(), 10_000_000);
            assert_eq!(integers(&json), expected);
            assert_eq!(rest(&json), (0, 0));
        }
    }
}

// promise: Functions: A thousand keys of `count -by` each have room, wherever the bits are in which they differ (2 programs, 6 places)
#[test]
fn keys_have_room_wherever_they_differ() {
    const KEYS: i64 = 1000;
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        for place in [0, 10, 24, 32, 40, 50] {
            let flags = format!("-fn leaf -by (int(arg0)&4095)*{} -json", 1_i64 << place);
            let tool = counting(&flags, target.pid());
            target.ask(&format!("calls 1 {KEYS}"), "called");
            let json = object(&tool.end().answer());
            assert_eq!(integers(&json).len() as i64, KEYS + 1, "{place}");
            assert_eq!(rest(&json), (0, 0), "{place}");
        }
    }
}

// promise: Functions: Of 100,000 keys of 16 threads, as many as there is room for are shown, none with more hits than it has, and the
//    others add up with them to all hits (2 programs)
#[test]
fn hundred_thousand_keys_add_up() {
    const KEYS: i64 = 100_000;
    const THREADS: u64 = 16;
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = counting("-fn leaf -by int(arg0) -json", target.pid());
        target.ask(&format!("calls {THREADS} {KEYS}"), "called");
        let json = object(&tool.end().answer());
        let hits = integers(&json);
        let all = 2 * THREADS * KEYS as u64;
        let (other, untyped) = rest(&json);
        assert_eq!((hits.values().sum::<u64>() + other, untyped), (all, 0));
        assert!(
            hits.len() >= 4096 && other > all / 2,
            "{} {other}",
            hits.len()
        );
        for (key, many) in hits {
            // The first and the last argument are passed once.
            let most = if (1..KEYS).contains(&key) { 2 } else { 1 };
            assert!(
                (0..=KEYS).contains(&key) && many <= most * THREADS,
                "{key}: {many}"
            );
        }
    }
}

// promise: Functions: `count -by` has each argument of C functions as a key with its exact hits, also with `-where` (2 programs, 16 threads)
#[test]
fn arguments_of_c_functions_are_keys() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for least in [0, 150] {
            let filter = format!("int(arg0)>={least}");
            let flags = format!("-fn leaf -by int(arg0),tid -json -where {filter}");
            let tool = counting(&flags, pid);
            target.ask("calls 16 200", "called");
            let json = object(&tool.end().answer());
            let (mut hits, mut of_threads) = (Hits::new(), BTreeMap::<i64, u64>::new());
            for (key, many) in keys(&json) {
                *hits.entry(key[0]["int"].as_i64().unwrap()).or_default() += many;
                let thread = key[1]["thread"].as_i64().unwrap();
                *of_threads.entry(thread).or_default() += many;
            }
            let mut expected = Hits::new();
            for argument in arguments_of_leaf(200) {
                if argument >= least {
                    *expected.entry(argument).or_default() += 16;
                }
            }
            assert_eq!((hits, rest(&json)), (expected.clone(), (0, 0)));
            let of_one: u64 = expected.values().sum::<u64>() / 16;
            assert_eq!(of_threads.into_values().collect::<Vec<_>>(), [of_one; 16]);
        }
        assert!(!is_observed(pid));
    }
}

// promise: Observations: `count -by` has strings of up to 64 bytes as keys, and the first 64 bytes of longer ones (2 programs)
#[test]
fn strings_are_keys() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut texts = Vec::new();
        for argument in 0..6 {
            let flags = format!("-probe strings -by str(arg{argument}),len(arg{argument}) -json");
            let tool = counting(&flags, pid);
            target.ask("hit 10", "done");
            let json = object(&tool.end().answer());
            let [(key, 10)] = keys(&json)[..] else {
                panic!("{json}");
            };
            assert_eq!(rest(&json), (0, 0));
            let string = &key[0]["string"];
            let text = string["text"].as_str().unwrap().to_owned();
            let len = key[1]["int"].as_u64().unwrap();
            assert_eq!(string["is_whole"], len <= 64, "{json}");
            assert_eq!(text.len() as u64, len.min(64), "{json}");
            texts.push((text, len));
        }
        let short: Vec<_> = texts[..3].iter().map(|(text, _)| &text[..]).collect();
        assert_eq!(short, ["", "hello", "8 bytes."]);
        let long: Vec<u64> = texts[3..].iter().map(|(_, len)| *len).collect();
        assert_eq!(long, [64, 65, 100_000]);
        assert!(!is_observed(pid));
    }
}

#[test]
fn adjacent_strings_are_kept_apart() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let tool = counting("-probe strings -by str(arg1),str(arg2)", target.pid());
        target.ask("hit 3", "done");
        let answer = tool.end().answer();
        let (line, rest) = answer.split_once('\n').unwrap();
        assert!(line.starts_with("3 ") && line.ends_with(" \"hello\" \"8 bytes.\""));
        assert_eq!(rest, "0 0.0 other\n0 0.0 untyped\n");
    }
}

// promise: Observations: Hits without a key are untyped (2 programs, 3 keys)
#[test]
fn hits_without_a_key_are_untyped() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        for (probe, key) in [
            ("ints", "str(arg0)"),
            ("strings", "arg0"),
            ("ints", "probe,len(arg0)"),
        ] {
            let flags = format!("-probe {probe} -by {key} -json");
            let tool = counting(&flags, target.pid());
            target.ask("hit 10", "done");
            let json = object(&tool.end().answer());
            assert_eq!((keys(&json).len(), rest(&json)), (0, (0, 10)), "{key}");
        }
    }
}

// promise: Functions: `count -by caller,tid` names the line and the thread of each call (2 programs)
#[test]
fn callers_and_threads_are_keys() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = counting("-fn Calls.leaf -by caller,tid -json", target.pid());
        target.ask("run 4 100", "calls");
        let json = object(&tool.end().answer());
        let mut of_lines = BTreeMap::new();
        let mut threads = Vec::new();
        for (key, hits) in keys(&json) {
            let caller = &key[0]["caller"];
            assert_eq!(caller["function"], "Calls.work", "{json}");
            *of_lines.entry(caller["line"].as_u64()).or_insert(0) += hits;
            threads.push(key[1]["thread"].as_u64().unwrap());
        }
        threads.sort_unstable();
        threads.dedup();
        // What it calls in tail position returns to its caller.
        let expected = BTreeMap::from([(Some(27), 400), (Some(29), 200)]);
        assert_eq!((of_lines, rest(&json)), (expected, (0, 0)));
        assert_eq!(threads.len(), 4, "{json}");
    }
    let mut target = Talker::start(&program("shown"));
    let tool = counting("-probe ints -by tid -json", target.pid());
    target.ask("hit 10", "done");
    let json = object(&tool.end().answer());
    let first = json!([{ "thread": target.pid() }]);
    assert_eq!(keys(&json), [(first.as_array().unwrap(), 10)]);
}

#[test]
fn probes_and_functions_are_keys_together() {
    let mut target = Talker::start(&program("shown"));
    let pid = target.pid();
    let tool = counting(
        "-probe ints,constants -fn Shown.floats -by probe -json",
        pid,
    );
    target.ask("hit 5", "done");
    let json = object(&tool.end().answer());
    let mut found = BTreeMap::new();
    for (key, hits) in keys(&json) {
        found.insert(key[0]["probe"].as_str().unwrap(), hits);
    }
    let expected = [("Shown.floats", 5), ("constants", 5), ("ints", 5)];
    assert_eq!(found, BTreeMap::from(expected), "{json}");
    assert_eq!(rest(&json), (0, 0));
}

#[test]
fn usdt_probes_are_keys() {
    for file in fixture_forms("usdt") {
        let mut target = Talker::start(&file);
        let tool = counting("-usdt demo:* -by probe -json", target.pid());
        target.ask("fire 4 1000", "fired");
        let json = object(&tool.end().answer());
        let hits = keys(&json).iter().map(|(_, hits)| hits).sum::<u64>();
        let (other, untyped) = rest(&json);
        assert_eq!((hits + other + untyped, other), (4 * 3500, 0), "{json}");
        let all = keys(&json);
        let names: BTreeSet<_> = all
            .iter()
            .filter_map(|it| it.0[0]["probe"].as_str())
            .collect();
        let expected = ["between", "guarded", "open"];
        let expected = expected.map(|name| format!("demo:{name} in usdt_round"));
        assert!(names.into_iter().eq(&expected), "{json}");
    }
}

#[test]
fn intervals_add_up() {
    let mut target = Talker::start(&program("calls"));
    let flags = "-fn Calls.leaf -by arg0&1 -interval 20ms -json";
    let mut tool = counting(flags, target.pid());
    target.ask("run 4 2000", "calls");
    let mut sum = Hits::new();
    let expected = Hits::from([(0, 8000), (1, 4000)]);
    while sum != expected {
        let json = object(&tool.line().unwrap());
        assert!(json["at"].as_f64().unwrap() > 0.0);
        for (key, hits) in integers(&json) {
            *sum.entry(key).or_default() += hits;
        }
    }
    let answer = tool.end().answer();
    let total = object(answer.lines().last().unwrap());
    assert!(total["at"].is_null());
    assert_eq!((integers(&total), rest(&total)), (expected, (0, 0)));
}

#[test]
fn examples_of_the_page_are_right() {
    let page = include_str!("../../../../docs/ask.md");
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (typed, flags) in [
            (
                "-fn Calls.leaf,Calls.deep -by 'probe,arg0 & 1'",
                "-fn Calls.leaf,Calls.deep -by probe,arg0&1",
            ),
            (
                "-fn Calls.deep -by arg0 -top 2",
                "-fn Calls.deep -by arg0 -top 2",
            ),
        ] {
            let tool = counting(flags, pid);
            target.ask("run 1 8", "calls");
            let without_rates = |text: &str| -> Vec<String> {
                let lines = text.lines().map(|line| {
                    let mut words = line.split(' ');
                    let hits = words.next().unwrap_or_default().to_owned();
                    words.skip(1).fold(hits, |all, word| all + " " + word)
                });
                lines.collect()
            };
            let command = format!("$ ocaml-probes count -pid 4242 {typed}\n");
            let (_, expected) = page.split_once(&command).unwrap();
            let end = expected.find(['$', '`']).unwrap();
            let answer = tool.end().answer();
            assert_eq!(without_rates(&answer), without_rates(&expected[..end]));
        }
        let tool = counting("-fn Calls.deep -by arg0 -top 1 -format table", pid);
        target.ask("run 1 8", "calls");
        let answer = tool.end().answer();
        let cells = answer.lines().map(|line| {
            let cells = line.split('|').take(2).map(str::trim);
            cells.collect::<Vec<_>>()
        });
        let cells: Vec<_> = cells.filter(|cells| cells.len() == 2).collect();
        let expected = [
            ["arg0", "hits"],
            ["0", "8"],
            ["of 7 keys more", "28"],
            ["other", "0"],
            ["untyped", "0"],
        ];
        assert_eq!(cells, expected, "{answer}");
    }
}

#[test]
fn invalid_keys_are_refused_before_any_change() {
    let target = Talker::start(&program("shown"));
    let pid = target.pid();
    for (flags, message) in [
        (
            "-probe ints -by arg0==1",
            "arg0==1 is a comparison, where an integer, or str(...) is needed; nothing was changed\n    arg0==1\n    ^^^^^^^",
        ),
        (
            "-probe ints -by float(arg0)",
            "float(arg0) is a float, where an integer, or str(...) is needed; nothing was changed\n    float(arg0)\n    ^^^^^^^^^^^",
        ),
        (
            "-probe nothing -by tid,arg0",
            "probe nothing has no arg0: it has no arguments; nothing was changed\n    arg0\n    ^^^^\n",
        ),
        (
            "-probe ints -by caller",
            "caller is not known here: only the entry and the exits of a function have one; nothing was changed\n    caller\n    ^^^^^^",
        ),
        (
            "-probe ints -by arg0,arg1,arg2",
            "at most 2 keys can be made of arguments; nothing was changed\n    arg2\n    ^^^^",
        ),
        (
            "-probe ints -by tid,tid,tid,tid,tid",
            "at most 4 keys are possible\n    tid,tid,tid,tid,tid\n    ^^^^^^^^^^^^^^^^^^^",
        ),
        (
            "-probe ints -by tid -sites",
            "-sites cannot be combined with -by",
        ),
        ("-probe ints -top 3", "-top needs -by"),
    ] {
        let run = run(&format!("count -pid {pid} {flags}"));
        assert!(run.stderr.contains(message), "{}", run.stderr);
        assert_eq!(run.stdout, "");
        let is_usage_error = !message.contains("nothing was changed");
        assert_eq!(
            run.code,
            Some(if is_usage_error { 2 } else { 1 }),
            "{run:?}"
        );
    }
    assert!(!is_observed(pid));
}

#[test]
fn keys_of_killed_tool_are_removed() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    let tool = counting("-fn Calls.leaf -by arg0", pid);
    tool.kill();
    target.ask("run 4 5000", "calls");
    let tool = counting("-fn Calls.leaf -by arg0&1 -json", pid);
    target.ask("run 1 10", "calls");
    let json = object(&tool.end().answer());
    assert_eq!(integers(&json), Hits::from([(0, 10), (1, 5)]));
    assert!(!is_observed(pid));
}

// promise: Functions: `count -by` at code without free registers has each call as one of its key, or as untyped (2 programs, 4 threads)
#[test]
fn calls_without_free_registers_have_keys() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let flags = "-fn scales -by caller,1500+arg0-arg0,tid -where arg0==arg0 -json";
        let tool = counting(flags, target.pid());
        target.ask("pass 4 2000", "passed");
        let json = object(&tool.end().answer());
        let mut hits = 0;
        let mut callers = Vec::new();
        for (key, many) in keys(&json) {
            assert_eq!(key[1], json!({"int": 1500}));
            callers.push(key[0]["caller"]["function"].as_str().unwrap().to_owned());
            hits += many;
        }
        callers.dedup();
        let (other, untyped) = rest(&json);
        assert_eq!((hits + untyped, other), (8000, 0), "{json}");
        assert_eq!(callers.len(), 1, "{json}");
    }
}
