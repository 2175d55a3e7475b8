//! `count -where`: the hits for which an expression is true.

use std::process::Command;

use test_support::{Scratch, Talker, eventually, fixture_forms, program, program_forms};

use crate::count_functions::{counting, function};
use crate::support::{is_observed, object, run};
use crate::trace_observe::trace;

/// Hits, name and untyped hits of each plain line.
fn counted(plain: &str) -> Vec<(u64, &str, u64)> {
    let line = |line| {
        let words: Vec<&str> = str::split(line, ' ').collect();
        let [hits, _, name, "untyped", untyped] = words[..] else {
            panic!("{line}");
        };
        (hits.parse().unwrap(), name, untyped.parse().unwrap())
    };
    plain.lines().map(line).collect()
}

#[test]
fn functions_of_one_name_are_left_out_singly() {
    // The one in the functor uses variables of an outer function.
    let target = Talker::start(&program("service"));
    let flags = "-fn Stdlib.Hashtbl.add -where tag(arg1)>=0";
    let ended = counting(flags, target.pid()).end();
    let why = "1 of 2 functions cannot be counted: Stdlib.Hashtbl.add is not known to have an argument of this kind";
    assert!(ended.stderr.contains(why), "{}", ended.stderr);
    assert!(counted(&ended.answer())[0].1 == "Stdlib.Hashtbl.add");
}

// promise: Observations: With `-where`, the hits that are counted, those that are not and the untyped ones are all hits
//    (21 expressions, 2 programs)
#[test]
fn expressions_choose_the_hits_of_probes() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (probe, expression, expected) in [
            ("ints", "arg3==42", (10, 0)),
            ("ints", "answer==42&&minus_one<zero", (10, 0)),
            ("ints", "arg0+arg1-arg2*2==3", (10, 0)),
            ("ints", "arg2>0", (0, 0)),
            ("ints", "len(arg0)==1", (0, 10)),
            ("ints", "arg3==42.0", (0, 10)),
            ("constants", "arg4=='c'&&arg5==1", (10, 0)),
            ("strings", "arg1==\"hello\"", (10, 0)),
            ("strings", "arg1==\"hello!\"", (0, 0)),
            ("strings", "arg0==\"\"&&arg2^=\"8\\032bytes\"", (10, 0)),
            ("strings", "len(arg5)==100000", (10, 0)),
            (
                "strings",
                "arg4^=\"0123456789\"&&len(arg4)>len(arg3)",
                (10, 0),
            ),
            ("strings", "arg1==5", (0, 10)),
            ("floats", "arg0<0.2&&arg2>1e308&&arg1==0.", (10, 0)),
            ("floats", "arg3==arg3", (0, 10)),
            ("floats", "float(arg3)==float(arg3)", (0, 0)),
            ("blocks", "arg0.0==1&&arg0.1==\"two\"", (10, 0)),
            ("blocks", "tag(arg5)==1&&arg5.0^=\"b\"", (10, 0)),
            ("blocks", "arg2.1==3", (0, 10)),
            ("arrays", "len(arg2)==1000&&arg2.999==999", (10, 0)),
            ("arrays", "probe==\"arrays\"&&probe!=\"ints\"", (10, 0)),
        ] {
            for (expression, (hits, untyped)) in [
                (expression.to_owned(), expected),
                (
                    format!("!({expression})"),
                    (10 - expected.0 - expected.1, expected.1),
                ),
            ] {
                let tool = counting(&format!("-probe {probe} -where {expression}"), pid);
                target.ask("hit 10", "done");
                let run = tool.end();
                assert_eq!(
                    counted(&run.answer()),
                    [(hits, probe, untyped)],
                    "{expression}"
                );
            }
        }
        assert!(!is_observed(pid));
        target.ask("hit 1", "done");
    }
}

#[test]
fn untyped_hits_alone_are_reported_by_stack_too() {
    let file = program("shown");
    let why = "no result, and 1 hit is untyped: an argument does not have the type";
    let mut target = Talker::start(&file);
    let tool = counting("-probe ints -where len(arg0)==1 -by stack", target.pid());
    target.ask("hit 1", "done");
    let said = tool.end().stderr;
    assert!(said.contains(why), "{said}");
    let said = trace(&file, "-hist ints -of len(arg0)", "hit 1\n").stderr;
    assert!(said.contains(why), "{said}");
    let filter = "-fn Calls.deep -where len(arg0)==1";
    for flags in ["-count", "-count -by arg0"] {
        let said = trace(&program("calls"), &format!("{flags} {filter}"), "run 1 5\n").stderr;
        let why = why.replace("1 hit is", "20 hits are");
        assert!(said.contains(&why), "{flags}: {said}");
    }
}

#[test]
fn arguments_anywhere_are_filtered() {
    for file in fixture_forms("arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (probe, expression) in [
            ("widths", "arg0==-7&&arg1<0&&arg3==200"),
            (
                "registers",
                "arg0==0&&arg1==1&&arg2==2&&arg3==3&&arg4==4&&arg5==5",
            ),
            (
                "registers",
                "(arg5*10+arg4)*(arg3+arg2-arg1)==(54+arg0)*(arg4&7)",
            ),
        ] {
            let tool = counting(&format!("-probe {probe} -where {expression}"), pid);
            target.hits();
            let run = tool.end();
            assert_eq!(counted(&run.answer()), [(1, probe, 0)], "{expression}");
        }
    }
}

// promise: Functions: With `-where`, calls in four threads are counted to the last one (2 programs)
#[test]
fn calls_with_an_argument_are_counted_exactly() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = counting("-fn Calls.leaf -where arg0<=10", pid);
        target.ask("run 4 20000", "calls");
        // Ten of each thread, and five more that another function makes.
        assert_eq!(counted(&tool.end().answer()), [(60, "Calls.leaf", 0)]);
        let tool = counting(
            "-fn Calls.deep,Calls.leaf -where arg0==0||arg0>7 -json",
            pid,
        );
        target.ask("run 4 1000", "calls");
        let json = object(&tool.end().answer());
        // Each thread calls `deep` 1000 times, and each such call reaches 0 once.
        let (deep, leaf) = (function(&json, "Calls.deep"), function(&json, "Calls.leaf"));
        assert_eq!((&deep["hits"], &deep["untyped"]), (&4000.into(), &0.into()));
        // All but seven of the 1000, and all but three of the 500 that are even.
        let hits = 4 * (1000 - 7 + 500 - 3);
        assert_eq!((&leaf["hits"], &leaf["untyped"]), (&hits.into(), &0.into()));
        let tool = counting("-fn Calls.leaf -where len(arg0)==1 -format table", pid);
        target.ask("run 4 1000", "calls");
        let run = tool.end();
        let answer = run.answer();
        let rows: Vec<Vec<&str>> = answer
            .lines()
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        assert_eq!(rows[0], ["function", "hits", "hits/s", "untyped"]);
        let last = rows.last().unwrap();
        assert_eq!((last[0], last[1], last[3]), ("Calls.leaf", "0", "6000"));
    }
}

#[test]
fn functions_without_the_argument_are_left_out() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    let named = run(&format!("count -pid {pid} -fn Calls.leaf -where arg1==1"));
    let message = "function Calls.leaf has no arg1: it has arg0 only; nothing was changed\n";
    assert!(named.stderr.contains(message), "{}", named.stderr);
    assert!(!is_observed(pid));
    let tool = counting("-fn Calls.* -where arg0<=10 -json", pid);
    target.ask("run 4 1000", "calls");
    let json = object(&tool.end().answer());
    assert_eq!(function(&json, "Calls.leaf")["hits"], 60);
    // It uses variables of another function.
    let refused = json["refused"].as_array().unwrap();
    let refused: Vec<_> = refused.iter().map(|it| &it["reason"]).collect();
    assert!(refused.contains(&&"no_argument".into()), "{json}");
}

#[test]
fn numbers_of_c_are_left_out_of_text() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let text = "-where str(arg0)==\"GET\"";
        let named = run(&format!("count -pid {pid} -fn numbers,texts {text}"));
        let message = "arg0 is an integer, where an OCaml value, or a word of C is needed";
        assert!(named.stderr.contains(message), "{}", named.stderr);
        assert!(!is_observed(pid));
        let tool = counting(&format!("-fn number?,text* {text} -json"), pid);
        target.ask("pass 1 20", "passed");
        let json = object(&tool.end().answer());
        assert_eq!(function(&json, "texts")["hits"], 20);
        let refused = &json["refused"][0];
        assert_eq!(
            (&refused["name"], &refused["reason"]),
            (&"numbers".into(), &"no_argument".into())
        );
        // The expression is wrong whatever the types of arguments are.
        let wrong = run(&format!(
            "count -pid {pid} -fn number?,text* -where str(tid)==\"GET\""
        ));
        assert!(wrong.stderr.contains("is an integer"), "{}", wrong.stderr);
    }
}

// promise: Functions: With `-where`, calls of C functions are counted to the last one, and the program computes with what it
//    passed, also in the x87 unit (2 programs, 4 threads)
#[test]
fn words_of_c_functions_are_filtered() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (name, expression, expected) in [
            (
                "numbers",
                "arg0==0&&arg1==-1&&arg2<0&&int(arg3)==5&&arg4=='x'",
                8000,
            ),
            ("numbers", "u64(arg1)==0xffffffffffffffff", 8000),
            ("numbers", "arg0!=0", 0),
            ("texts", "int(arg5)==7&&arg0!=arg1", 8000),
        ] {
            let tool = counting(&format!("-fn {name} -where {expression}"), pid);
            target.ask("pass 4 2000", "passed");
            let run = tool.end();
            assert_eq!(
                counted(&run.answer()),
                [(expected, name, 0)],
                "{expression}"
            );
        }
        // Registers are saved under a lock: what finds it taken is untyped.
        for expression in ["arg0==arg0", "(arg0+1)*(arg0+2)==arg0*arg0+3*arg0+2"] {
            let tool = counting(&format!("-fn scales -where {expression}"), pid);
            target.ask("pass 4 2000", "passed");
            let run = tool.end();
            let answer = run.answer();
            let [(hits, "scales", untyped)] = counted(&answer)[..] else {
                panic!("{answer}");
            };
            assert_eq!(hits + untyped, 8000, "{expression}");
            assert!(hits > 0, "{expression}");
        }
    }
}

#[test]
fn filters_of_killed_observers_are_removed() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        counting("-probe strings -where arg1==\"hello\"", pid).kill();
        assert!(is_observed(pid));
        target.ask("hit 10", "done");
        let cleaned = run(&format!("observe -clean -pid {pid}"));
        assert_eq!(cleaned.code, Some(0), "{cleaned:?}");
        assert!(!is_observed(pid));
        target.ask("hit 10", "done");
    }
}

// promise: Observations: `-where` never reads where a value of OCaml 4 points to that is outside of its heap (each kind of
//    question, 3 programs, one of them stripped)
#[test]
fn naked_pointers_are_untyped() {
    let stripped = Scratch::new();
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(stripped.file("naked.exe"));
    assert!(
        strip
            .arg(program("adversary/naked"))
            .status()
            .unwrap()
            .success()
    );
    let [pie, fixed] = program_forms("adversary/naked");
    for file in [pie, fixed, stripped.file("naked.exe")] {
        let target = Talker::start(&file);
        let pid = target.pid();
        for question in [
            "arg0==\"aaaaaaaaaaaaaaa\"",
            "arg0^=\"aaaaaaaa\"",
            "len(arg0)==15",
            "tag(arg0)==252",
            "arg0.0==7",
            "arg0<1.5",
        ] {
            let line =
                format!("count -pid {pid} -probe mapped,unmapped -where {question} -for 100ms");
            // Beside other work, it may have no hits for so long.
            eventually("both probes are hit", || {
                let answer = run(&line).answer();
                let counted = counted(&answer);
                assert!(counted.iter().all(|(hits, ..)| *hits == 0), "{answer}");
                (counted.len() == 2 && counted.iter().all(|(.., untyped)| *untyped > 0))
                    .then_some(())
            });
        }
        // The string beside it is on the heap.
        let line = format!("count -pid {pid} -probe unmapped -where len(arg1)>0 -for 100ms");
        eventually("strings on the heap are read", || {
            let answer = run(&line).answer();
            let [(hits, _, untyped)] = counted(&answer)[..] else {
                return None;
            };
            assert_eq!(untyped, 0, "{answer}");
            (hits > 0).then_some(())
        });
    }
}

// promise: Functions: `-where` knows the thread of a call and where it returns to: calls of one thread, and of one caller, are exactly those
//    that `-by` has (2 programs)
#[test]
fn threads_and_callers_choose_calls() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = counting("-fn Calls.leaf -by tid,caller -json", pid);
        target.ask("run 2 100", "calls");
        let json = object(&tool.end().answer());
        let keys = json["keys"].as_array().unwrap();
        assert!(keys.len() > 2, "{json}");
        for caller in keys.iter().map(|it| &it["key"][1]["caller"]["address"]) {
            let caller = caller.as_str().unwrap();
            let of_caller = keys
                .iter()
                .filter(|it| it["key"][1]["caller"]["address"] == *caller);
            let hits: u64 = of_caller.map(|it| it["hits"].as_u64().unwrap()).sum();
            let flags = format!("-fn Calls.leaf -where caller=={caller}&&tid!={pid}");
            let tool = counting(&flags, pid);
            target.ask("run 2 100", "calls");
            let answer = tool.end().answer();
            assert_eq!(counted(&answer), [(hits, "Calls.leaf", 0)], "{json}");
        }
        let tool = counting(&format!("-fn Calls.leaf -where tid=={pid}"), pid);
        target.ask("run 2 100", "calls");
        let answer = tool.end().answer();
        assert_eq!(counted(&answer), [(0, "Calls.leaf", 0)]);
    }
}

#[test]
fn programs_are_filtered_from_their_start() {
    let file = program("calls");
    let line = format!(
        "trace -count -fn Calls.leaf -where arg0==3 -prog {}",
        file.display()
    );
    let mut command = crate::support::command(line.split(' '));
    let mut tool = Talker::spawn(command.stderr(std::process::Stdio::piped()));
    tool.ask("run 4 1000", "calls");
    tool.close_input();
    let mut stderr = String::new();
    let mut pipe = tool.guard().child().stderr.take().unwrap();
    std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
    assert_eq!(counted(&stderr), [(4, "Calls.leaf", 0)]);
}

#[test]
fn what_makes_no_sense_is_refused_before() {
    let target = Talker::start(&program("shown"));
    let pid = target.pid();
    let long = ["arg0.1.1.1.1.1.1.1.1==1"; 30].join("||");
    let long = format!("-probe ints -where {long}");
    for (flags, message) in [
        (
            &long[..],
            "bytes of code at a point: at most 8192 are possible; nothing was changed\n    arg0.1.1",
        ),
        (
            "-where arg0=5",
            "= is no operator: == compares\n    arg0=5\n        ^",
        ),
        (
            "-probe nothing -where arg0==5",
            "probe nothing has no arg0: it has no arguments; nothing was changed\n    arg0==5\n    ^^^^\nhint: ",
        ),
        (
            "-probe ints -where arg6==5",
            "probe ints has no arg6: it has arg0 to arg5; nothing was changed\n    arg6==5\n    ^^^^\nhint: ",
        ),
        (
            "-probe ints -where arg1",
            "arg1 is an OCaml value, where a comparison is needed; nothing was changed\n    arg1\n    ^^^^",
        ),
    ] {
        let run = run(&format!("count -pid {pid} {flags}"));
        assert!(run.stderr.contains(message), "{}", run.stderr);
        assert_eq!(run.stdout, "");
        assert!(run.code == Some(1) || run.code == Some(2), "{run:?}");
    }
    assert!(!is_observed(pid));
    let run = run("trace -gc -where arg0==1 -prog x");
    assert_eq!(run.code, Some(2));
    assert!(
        run.stderr
            .contains("-where needs -count, -hist, -latency or -watch"),
        "{}",
        run.stderr
    );
}

// promise: Observations: Strings of C are compared, and are keys, wherever in private memory they are; what cannot be read is untyped, and the program runs on
//    (9 expressions, 2 programs, 1 and 4 threads)
#[test]
fn strings_of_c_are_read_where_possible() {
    for file in fixture_forms("usdt_arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        target.ask("form 4 1", "formed");
        for (points, expression, expected) in [
            (
                "-usdt forms:registers",
                r#"str(arg2)=="round\032text""#,
                (40, 0),
            ),
            (
                "-usdt forms:registers",
                r#"str(arg2)=="round\032texts""#,
                (0, 0),
            ),
            ("-usdt forms:registers", r#"str(arg2)!="round""#, (40, 0)),
            ("-usdt forms:stack", r#"str(arg1)^="round""#, (40, 0)),
            // A small number.
            ("-usdt forms:registers", r#"str(arg1)^="""#, (0, 40)),
            ("-fn forms_round", r#"str(arg1)=="round\032text""#, (40, 0)),
            ("-fn forms_round", r#"str(arg0)=="round""#, (0, 40)),
            // The last byte before memory that is not mapped.
            ("-fn forms_round", r#"str(arg3)^="\001""#, (40, 0)),
            ("-fn forms_round", r#"str(arg3)=="\001""#, (0, 40)),
        ] {
            let tool = counting(&format!("{points} -where {expression}"), pid);
            target.ask("form 4 10", "formed");
            let ended = tool.end();
            let words: Vec<&str> = ended.stdout.trim_end().split(' ').collect();
            let number = |at: usize| words[at].parse::<u64>().unwrap();
            let counted = (number(0), number(words.len() - 1));
            assert_eq!(counted, expected, "{points} {expression}");
        }
        for (points, by, key, expected) in [
            (
                "-usdt x87:registers,forms:registers",
                "str(arg2)",
                "\"round text\"",
                20,
            ),
            (
                "-fn forms_round,x87_round",
                "probe,str(arg1)",
                "\"round text\"",
                20,
            ),
            (
                "-fn forms_round",
                "str(arg1),arg0>>4",
                "\"round text\" 0",
                10,
            ),
        ] {
            let tool = counting(&format!("{points} -by {by}"), pid);
            target.ask("form 1 10", "formed");
            let counted = tool.end().stdout;
            let keyed = counted.lines().filter(|line| line.ends_with(key));
            let hits = keyed.map(|line| line.split(' ').next().unwrap());
            let hits: u64 = hits.map(|it| it.parse::<u64>().unwrap()).sum();
            assert_eq!(hits, expected, "{points} {by}: {counted}");
            let rest = "0 0.0 other\n0 0.0 untyped\n";
            assert!(counted.ends_with(rest), "{counted}");
        }
        assert!(!is_observed(pid));
        target.ask("form 4 10", "formed");
    }
}
