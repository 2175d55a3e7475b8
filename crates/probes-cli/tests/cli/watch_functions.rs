//! `watch -fn`: calls of functions, one by one, with their arguments.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use test_support::{Talker, eventually, fixture_forms, program_forms};

use crate::count_functions::{ObservingTool, start_observing, trace};
use crate::support::{is_observed, object, run};

/// Starts `watch` with these fields: the name, and the arguments.
fn watching(flags: &str, pid: i32) -> ObservingTool {
    start_observing("watch", &format!("-fields name,args {flags}"), pid)
}

/// Its lines, after it is interrupted.
fn lines(tool: ObservingTool) -> Vec<String> {
    let run = tool.end();
    let note =
        "how many arguments 1 function has is not known, and none are shown: -args N shows N\n";
    assert!(["", note].contains(&&*run.stderr), "{}", run.stderr);
    run.answer().lines().map(str::to_owned).collect()
}

// promise: Functions: Arguments of C functions are shown as numbers, text and addresses, and the program computes with
//    what it passed, also in the x87 unit (2 programs, 1 and 4 threads)
#[test]
fn words_of_c_are_numbers_and_text() {
    for file in fixture_forms("passing") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = watching("-fn numbers,texts,floats,scales", pid);
            target.ask(&format!("pass {threads} 20"), "passed");
            let lines = lines(tool);
            assert_eq!(lines.len(), 4 * 20 * threads);
            let of = |name: &str| {
                let lines = lines.iter().filter_map(|it| it.strip_prefix(name));
                let lines: Vec<&str> = lines.collect();
                assert_eq!(lines.len(), 20 * threads, "{name}");
                lines
            };
            for line in of("numbers ") {
                assert_eq!(line, "0 -1 9223372036854775808 5 120 0");
            }
            let longer = "a line of text that is longer than sixty-four bytes, of which on";
            let texts = format!("\"GET\" \"{longer}\"... \"café\" 0x");
            for line in of("texts ") {
                let rest = line.strip_prefix(&texts).unwrap();
                let [_, empty, last] = rest.split(' ').collect::<Vec<_>>()[..] else {
                    panic!("{line}");
                };
                assert!(empty.starts_with("0x") && last == "7", "{line}");
            }
            for (name, only) in [("floats ", "2"), ("scales ", "4")] {
                assert!(of(name).iter().all(|line| *line == only));
            }
            assert!(!is_observed(pid));
            target.ask(&format!("pass {threads} 20"), "passed");
        }
    }
}

// promise: Functions: Arguments and results of C that do not fill their registers are shown, and compared, with their size and sign
//    if debugging information tells these (2 programs)
#[test]
fn narrow_numbers_have_their_size_and_sign() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let tool = watching("-fn narrow -results", target.pid());
        target.ask("narrow 3", "passed");
        let run = tool.end();
        let expected = [
            "narrow -16 4294867296 -3 65533 -2 1",
            "narrow returns -34487",
        ]
        .repeat(3);
        assert_eq!(run.answer().lines().collect::<Vec<_>>(), expected);
        let all = "arg0==-16&&arg1==4294867296&&arg2==-3&&arg3==65533&&arg4==-2&&arg5==1";
        for (flags, expected) in [
            (format!("-fn narrow -where {all}"), "narrow untyped 0"),
            ("-fn narrow -by arg0+arg1,arg4".to_owned(), "4294867280 -2"),
            (
                "-fn narrow -by int(arg1),u64(arg4)&255".to_owned(),
                "-100000 254",
            ),
        ] {
            let tool = start_observing("count", &flags, target.pid());
            target.ask("narrow 3", "passed");
            let answer = tool.end().answer();
            let fields: Vec<&str> = answer.lines().next().unwrap().splitn(3, ' ').collect();
            assert_eq!([fields[0], fields[2]], ["3", expected], "{flags}");
        }
        let tool = start_observing("hist", "-fn narrow -of retval -json", target.pid());
        target.ask("narrow 3", "passed");
        let json = object(&tool.end().answer());
        assert_eq!(json["histograms"][0]["max"], -34487, "{json}");
    }
}

#[test]
fn arguments_are_shown_as_far_as_known() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        // For a structure, the debugging information does not simply say where it is passed.
        let tool = watching("-fn pairs", pid);
        target.ask("pass 1 1", "passed");
        let run = tool.end();
        let note = "how many arguments 1 function has is not known, and none are shown: ";
        assert!(run.stderr.starts_with(note), "{}", run.stderr);
        assert_eq!(run.answer(), "pairs\n");
        let tool = watching("-fn pairs,takes,scales -args 3", pid);
        target.ask("pass 1 1", "passed");
        target.ask("edge", "passed");
        let lines = lines(tool);
        assert_eq!(lines[..2], ["scales 4", "pairs 3 4 5"]);
        assert!(lines[2..].iter().all(|it| it.split(' ').count() == 2));
    }
}

#[test]
fn text_ends_where_memory_ends() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        // From now on the page is mapped.
        target.ask("edge", "passed");
        let tool = watching("-args 1 -fn takes", target.pid());
        target.ask("edge", "passed");
        let whole = "x".repeat(20);
        let expected = [
            format!("takes \"{whole}\"..."),
            "takes \"xxx\"...".to_owned(),
            "takes \"xxxxx\"".to_owned(),
        ];
        assert_eq!(lines(tool), expected);
    }
}

// promise: Functions: A function that is passed the address of memory that is no longer mapped is watched without harm
//    (2 programs, 20,000 times)
#[test]
fn memory_that_is_gone_is_not_read() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let tool = start_observing("watch", "-fields args -args 1 -fn takes", target.pid());
        target.ask("gone 20000", "passed");
        let run = tool.end();
        let lines: Vec<&str> = run.stdout.lines().collect();
        let is_address = |line: &&&str| line.starts_with("0x7");
        let addresses = lines.iter().filter(is_address).count();
        let texts = lines.iter().filter(|line| **line == "\"here\"").count();
        assert!(addresses > 0, "{lines:?}");
        assert_eq!(addresses + texts, lines.len());
        target.ask("gone 1", "passed");
    }
}

/// The arguments of the functions of `shown`, as they are passed in the first round.
const PASSED: [&str; 13] = [
    "Shown.takes_ints 1 -2 4611686018427387903",
    "Shown.takes_texts \"hello\" 1",
    "Shown.takes_blocks (1, 99) <1>(\"blue\")",
    "Shown.takes_floats 0.5 1e300",
    "Shown.takes_unit 0",
    "Shown.takes_seven 1 2 3 4 5 6",
    "Shown.takes_depth 3",
    "Shown.takes_depth 2",
    "Shown.takes_depth 1",
    "Shown.takes_depth 0",
    "Shown.raises \"gone\"",
    "Shown.closes 1",
    "Shown.adds",
];

const SHOWN: &str = "-fn Shown.takes_*,Shown.raises,Shown.closes,Shown.adds";

/// What is shown of a round of `shown`, with all values read: if the machine is so busy that the tool cannot say in
/// time which memory may be read, addresses are shown instead.
fn passed(target: &mut Talker, flags: &str) -> Vec<String> {
    eventually("all values are read", || {
        let tool = watching(flags, target.pid());
        target.ask("pass 1", "done");
        let lines = lines(tool);
        let is_read = lines.iter().all(|line| !line.contains(" 0x"));
        is_read.then_some(lines)
    })
}

// promise: Functions: Arguments of OCaml functions are shown as OCaml prints them, as many as each has (2)
#[test]
fn values_of_ocaml_are_shown_as_passed() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        assert_eq!(passed(&mut target, SHOWN), PASSED);
        // For functions whose number of arguments is unknown, as many as asked for.
        let mut expected = PASSED.map(str::to_owned);
        expected[12] += " 1";
        assert_eq!(passed(&mut target, &format!("-args 1 {SHOWN}")), expected);
    }
}

// promise: Functions: Every call and return of several threads is shown, or counted as dropped (2 programs, 4 threads)
#[test]
fn each_call_is_shown_or_dropped() {
    // So few that a pipe holds their lines.
    const ROUNDS: usize = 50;
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let flags = format!("-args 0 -results -fields thread {SHOWN}");
        let tool = start_observing("watch", &flags, target.pid());
        target.ask(&format!("pass 4 {ROUNDS}"), "done");
        let run = tool.end();
        let stderr = run.stderr.replace(" hit was ", " hits were ");
        let before = stderr.split(" hits were dropped");
        let dropped = before.filter_map(|text| text.rsplit(' ').next()?.parse::<usize>().ok());
        let dropped: usize = dropped.sum();
        let mut threads: HashMap<&str, usize> = HashMap::new();
        for thread in run.stdout.lines() {
            *threads.entry(thread).or_default() += 1;
        }
        let shown: usize = threads.values().sum();
        // All calls but one return.
        let most = ROUNDS * (2 * PASSED.len() - 1);
        assert_eq!(shown + dropped, 4 * most);
        assert!((1..=4).contains(&threads.len()), "{threads:?}");
        assert!(threads.values().all(|shown| *shown <= most), "{threads:?}");
    }
}

// promise: Functions: Results of OCaml functions are shown as OCaml prints them, and calls that an exception ends have
//    none (2)
#[test]
fn results_of_ocaml_are_shown_where_functions_return() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let tool = watching(&format!("-results -args 1 {SHOWN}"), target.pid());
        target.ask("pass 1", "done");
        let lines = lines(tool);
        let expected = [
            PASSED[0],
            "Shown.takes_ints returns 4611686018427387902",
            PASSED[1],
            "Shown.takes_texts returns \"hello1\"",
            PASSED[2],
            "Shown.takes_blocks returns <0:2>",
            PASSED[3],
            "Shown.takes_floats returns 1e300",
            PASSED[4],
            "Shown.takes_unit returns 1",
            PASSED[5],
            "Shown.takes_seven returns 28",
            PASSED[6],
            PASSED[7],
            PASSED[8],
            PASSED[9],
            "Shown.takes_depth returns 0",
            "Shown.takes_depth returns 1",
            "Shown.takes_depth returns 2",
            "Shown.takes_depth returns 3",
            PASSED[10],
            PASSED[11],
            "Shown.closes returns <closure>",
            "Shown.adds 1",
            "Shown.adds returns 2",
        ];
        assert_eq!(lines, expected);
    }
}

// promise: Functions: Results of C functions are shown, and the program gets them all, also those in the x87 unit
//    (2 programs, 1 and 4 threads)
#[test]
fn results_of_c_are_words_and_text() {
    for file in fixture_forms("passing") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let flags = "-results -args 0 -fn numbers,texts,floats,scales";
            let tool = watching(flags, target.pid());
            target.ask(&format!("pass {threads} 20"), "passed");
            let lines = lines(tool);
            let count = |start: &str| lines.iter().filter(|it| it.starts_with(start)).count();
            for line in [
                "numbers returns -9223372036854775684",
                "texts returns \"GET\"",
            ] {
                assert_eq!(count(line), 20 * threads, "{line} in {lines:#?}");
            }
            // Their results are in no general register.
            for line in ["floats returns", "scales returns"] {
                let returned = lines.iter().filter(|it| *it == line);
                assert_eq!(returned.count(), 20 * threads, "{line} in {lines:#?}");
            }
            assert_eq!(lines.len(), 2 * 4 * 20 * threads);
        }
    }
}

#[test]
fn jumps_to_other_functions_have_no_result() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let flags = "-results -args 1 -fn tail,returns_long_double,unwound";
        let tool = watching(flags, target.pid());
        target.ask("call 1 4", "called");
        let lines = lines(tool);
        let of = |name: &str| {
            let lines = lines.iter().filter_map(|it| it.strip_prefix(name));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        // The others jump to `leaf`.
        assert_eq!(of("tail "), ["0", "returns 4", "1", "2", "returns 6", "3"]);
        // Its result is in the x87 unit.
        let returned = lines
            .iter()
            .filter(|it| *it == "returns_long_double returns");
        assert_eq!(returned.count(), 4);
        // longjmp(3) ends them.
        assert_eq!(of("unwound returns ").len(), 0);
        assert_eq!(of("unwound ").len(), 3 * 4);
    }
}

#[test]
fn returns_as_json_have_results() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let tool = start_observing("watch", "-json -results -fn Shown.takes_ints", target.pid());
        target.ask("pass 1", "done");
        let answer = tool.end().answer();
        let objects: Vec<Value> = answer.lines().map(object).collect();
        let types: Vec<&Value> = objects.iter().map(|it| &it["type"]).collect();
        assert_eq!(types, ["hit", "return"]);
        assert_eq!(objects[1]["name"], "Shown.takes_ints");
        assert_eq!(objects[1]["result"]["int"], 4_611_686_018_427_387_902_i64);
        for field in ["name", "address", "thread", "file", "line"] {
            assert_eq!(objects[0][field], objects[1][field], "{field}");
        }
    }
}

#[test]
fn returns_without_a_result_are_no_calls() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let tool = start_observing("watch", "-json -results -args 0 -fn floats", target.pid());
        target.ask("pass 1 2", "passed");
        let answer = tool.end().answer();
        let objects: Vec<Value> = answer.lines().map(object).collect();
        let types: Vec<&Value> = objects.iter().map(|it| &it["type"]).collect();
        assert_eq!(types, ["hit", "return", "hit", "return"]);
        assert!(objects[1].get("result").is_none(), "{}", objects[1]);
    }
}

#[test]
fn calls_as_json_have_their_source() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let tool = start_observing("watch", "-json -fn Shown.takes_texts", target.pid());
        target.ask("pass 1", "done");
        let hit = object(&tool.end().answer());
        assert_eq!(
            (&hit["type"], &hit["name"]),
            (&"hit".into(), &"Shown.takes_texts".into())
        );
        assert_eq!(hit["function"], "Shown.takes_texts");
        assert_eq!(hit["thread"], target.pid());
        assert!(hit["file"].as_str().unwrap().ends_with("shown.ml"));
        assert!(hit["line"].as_u64().is_some());
        assert_eq!(hit["object"], file.to_str().unwrap());
        let text = &hit["arguments"][0]["string"];
        assert_eq!(
            (&text["text"], &text["is_whole"]),
            (&"hello".into(), &Value::Bool(true))
        );
        assert_eq!(hit["arguments"][1]["int"], 1);
    }
}

// promise: Functions: An OCaml program that overflows its stack in functions that are watched catches it (2)
#[test]
fn overflow_within_watched_functions_is_caught() {
    for file in program_forms("overflow") {
        let mut target = Talker::start(&file);
        let tool = start_observing("watch", "-rate 1 -results -fn Overflow.*", target.pid());
        for threads in [0, 4] {
            let answer = target.ask(&format!("overflow {threads}"), "overflow");
            assert_eq!(answer, "overflow caught=9 others=same");
        }
        let answer = tool.end().answer();
        assert!(answer.contains(" Overflow."), "{answer}");
    }
}

#[test]
fn program_outlives_its_killed_watcher() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let flags = "-args 6 -fn numbers,texts,scales -fields name";
        let mut tool = start_observing("watch", flags, pid);
        target.ask("pass 1 1", "passed");
        assert_eq!(tool.line().unwrap(), "numbers");
        tool.kill();
        target.ask("pass 4 2000", "passed");
        let info = run(&format!("info -pid {pid}"));
        assert!(info.stderr.contains("3 functions"), "{info:?}");
        // The next one removes what is left.
        let tool = watching("-fn numbers", pid);
        target.ask("pass 1 1", "passed");
        assert_eq!(lines(tool).len(), 1);
        assert!(!is_observed(pid));
    }
}

#[test]
fn probes_and_functions_are_watched_together() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let flags = "-args 1 -probe start -fn fixture_command -fields name,function,args";
        let tool = start_observing("watch", flags, target.pid());
        target.ask("do ()()", "done");
        let lines = lines(tool);
        let [first, start, again] = &lines[..] else {
            panic!("{lines:?}");
        };
        assert_eq!(first, "fixture_command fixture_command \"do ()()\"");
        assert!(start.starts_with("start ") && again == start, "{lines:?}");
    }
}

#[test]
fn instructions_and_lines_have_no_arguments() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let source = include_str!("../../../../test-programs/fixtures/passing.c");
        let line = source.lines().position(|it| it.contains("return a + n"));
        let line = line.unwrap() + 1;
        let tool = watching(&format!("-args 6 -fn passing.c:{line}"), target.pid());
        target.ask("pass 1 1", "passed");
        assert_eq!(lines(tool), [format!("passing.c:{line} in floats")]);
    }
}

#[test]
fn text_is_not_read_under_a_filter() {
    for file in fixture_forms("seccomp") {
        let mut target = Talker::start_with(&file, ["worker"]);
        let flags = "-args 1 -fn fixture_command";
        let tool = watching(flags, target.pid());
        target.ask("nothing", "unknown command");
        let lines = lines(tool);
        assert!(lines[0].starts_with("fixture_command 0x"), "{lines:?}");
    }
}

#[test]
fn errors_say_what_can_be_watched() {
    let target = Talker::start(&fixture_forms("passing")[0]);
    let pid = target.pid();
    for (flags, expected) in [
        ("-fn number", "did you mean \"numbers\"?"),
        (
            "-fn 0x10",
            "no function in passing.pie or its 2 libraries is known at 0x10",
        ),
    ] {
        let failure = run(&format!("watch -pid {pid} {flags}")).failure();
        assert!(failure.contains(expected), "{failure}");
        assert!(!is_observed(pid));
    }
    for (flags, expected) in [
        (
            "",
            "needs -probe NAMES, -regexp RE, -fn GLOBS, -usdt GLOBS, -gc WORK or -events NAMES",
        ),
        ("-probe a -args 2", "-args needs -fn"),
        ("-probe a -results", "-results needs -fn"),
        ("-fn a -args 7", "-args: \"7\" is not a number from 0 to 6"),
    ] {
        let run = run(format!("watch -pid {pid} {flags}").trim());
        assert_eq!(run.code, Some(2));
        assert!(run.stderr.contains(expected), "{}", run.stderr);
    }
}

/// The lines of `trace -watch` with these flags, before the note on unknown arguments.
fn traced(file: &Path, flags: &str, words: &str) -> Vec<String> {
    let run = trace(file, &format!("-watch -fields name,args {flags}"), words);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let lines = run
        .stderr
        .lines()
        .filter(|it| !it.contains(" is not known"));
    lines.map(str::to_owned).collect()
}

// promise: Functions: From the first instruction, calls of functions are shown with their arguments and results, also those of
//    a thread that has no thread control block yet (10 programs)
#[test]
fn calls_are_watched_from_the_first_instruction() {
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            // Without arguments, because its own stack is not mapped as far as is known.
            let lines = traced(&file, "-args 0 -fn _start,main,outer", "threads 1 3\n");
            let mut expected = vec!["_start", "main"];
            expected.extend(["outer"; 3]);
            let names: Vec<&str> = lines
                .iter()
                .map(|it| it.split(' ').next().unwrap())
                .collect();
            assert_eq!(names, expected, "{}", file.display());
        }
    }
    for file in fixture_forms("passing") {
        let flags = "-results -args 0 -fn main,numbers";
        let lines = traced(&file, flags, "pass 1 2\nquit\n");
        let call = "numbers 0 -1 9223372036854775808 5 120 0";
        let result = "numbers returns -9223372036854775684";
        let [main, calls @ ..] = &lines[..] else {
            panic!("{lines:?}");
        };
        assert!(main.starts_with("main"), "{main}");
        assert_eq!(calls, [call, result, call, result]);
    }
    for file in program_forms("shown") {
        // The memory of blocks is known to be readable only a moment after it is mapped, in OCaml 5.
        let lines = traced(&file, "-fn Shown.takes_ints,Shown.takes_depth", "pass 1\n");
        let expected = [PASSED[0], PASSED[6], PASSED[7], PASSED[8], PASSED[9]];
        assert_eq!(lines, expected);
    }
}

#[test]
fn whole_programs_are_watched_from_the_first_instruction() {
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            let run = trace(&file, "-watch -args 6 -json -fn *", "threads 2 50\n");
            assert_eq!(run.code, Some(0), "{}", run.stderr);
            assert!(run.stdout.ends_with("done 100\n"), "{}", run.stdout);
            let hits = run.said().iter().filter(|it| it["type"] == "hit").count();
            assert!(hits > 100, "{hits}");
        }
    }
}
