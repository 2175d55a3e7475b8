//! Functions in which another tool has set a breakpoint.

use test_support::process::{peek, poke};
use test_support::{Talker, fixture_forms};

use crate::count_functions::start_observing;
use crate::support::{image, is_observed, number, run};

const INT3: u8 = 0xcc;

/// Where `numbers` of fixture `passing` begins, and where it returns: with its last instruction, of one byte.
fn numbers_of(pid: i32) -> (u64, u64) {
    let listed = run(&format!("list -functions -json -pid {pid} numbers")).json();
    let function = &listed["functions"][0];
    let (start, size) = (number(&function["address"]), function["size"].as_u64());
    let at_return = start + size.unwrap() - 1;
    assert_eq!(peek(pid, at_return, 1), [0xc3]);
    (start, at_return)
}

fn reason(at: u64) -> String {
    format!("has a breakpoint of another tool, such as gdb or bpftrace, at {at:#x}")
}

// promise: Functions: A function with a breakpoint of another tool in its first instructions is refused by its name and the place, and
//    nothing is changed; a pattern leaves it out (count, latency, watch; 2 programs)
#[test]
fn functions_with_breakpoints_are_refused_by_name() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let (start, _) = numbers_of(pid);
        let original = peek(pid, start, 1);
        poke(pid, start, &[INT3]);
        let before = image(pid);
        for command in ["count", "latency", "watch"] {
            let of = |globs: &str| run(&format!("{command} -fn {globs} -pid {pid} -for 1ms"));
            for globs in ["numbers", "narrow,numbers", "number[s]"] {
                let failure = of(globs).failure();
                let why = format!("numbers {}; nothing was changed", reason(start));
                assert!(failure.contains(&why), "{command} {globs}: {failure}");
                let hint = "hint: remove the breakpoint or uprobe\n";
                assert!(failure.ends_with(hint), "{command} {globs}: {failure}");
                assert!(!is_observed(pid));
                assert_eq!(image(pid), before, "{command} {globs}");
            }
            let others = of("narrow,number[s]");
            let why = format!("1 of 2 functions cannot be {command}");
            let why = why.replace("be count", "be counted");
            let why = why.replace("be latency", "be timed");
            let why = why.replace("be watch", "be watched");
            let why = format!("{why}: numbers {}\n", reason(start));
            assert!(others.stderr.contains(&why), "{command}: {}", others.stderr);
            assert_eq!(image(pid), before, "{command}");
        }
        poke(pid, start, &original);
        target.ask("pass 1 20", "passed");
    }
}

// promise: Functions: A breakpoint of another tool at a return is named with its place: the function is counted, watched without its
//    results, and not timed (2 programs)
#[test]
fn breakpoints_at_returns_are_named() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let (start, at_return) = numbers_of(pid);
        let original = peek(pid, at_return, 1);
        let why = format!("numbers {}", reason(at_return));
        poke(pid, at_return, &[INT3]);
        let code = || peek(pid, start, (at_return + 1 - start) as usize);
        let before = code();
        let failure = run(&format!("latency -fn numbers -pid {pid} -for 1ms")).failure();
        let unchanged = format!("{why}; nothing was changed");
        assert!(failure.contains(&unchanged), "{failure}");
        assert_eq!(code(), before);
        for (command, flags) in [
            ("count", "-fn numbers"),
            ("watch", "-fields name,args -fn numbers -results"),
        ] {
            let tool = start_observing(command, flags, pid);
            // Nothing else executes it: the program would be killed.
            poke(pid, at_return, &original);
            target.ask("pass 1 20", "passed");
            let ended = tool.end();
            let without = format!("the results of 1 function are not shown: {why}\n");
            let is_watched = command == "watch";
            assert_eq!(ended.stderr.contains(&without), is_watched, "{ended:?}");
            let answer = ended.answer();
            if is_watched {
                let line = "numbers 0 -1 9223372036854775808 5 120 0";
                assert_eq!(answer.lines().collect::<Vec<_>>(), [line; 20]);
            } else {
                assert!(answer.starts_with("20 "), "{answer}");
            }
            poke(pid, at_return, &[INT3]);
            assert_eq!(code(), before);
        }
    }
}
