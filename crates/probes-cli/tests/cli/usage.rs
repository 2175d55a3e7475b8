//! Different spellings of the same arguments, and usage errors.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use test_support::{Talker, fixture, program};

use crate::support::{command, golden, run, run_command, run_on, states};

#[test]
fn pid_is_accepted_in_every_spelling() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let expected = "flag disabled\nplain disabled\nwatched disabled\n";
    for spelling in ["-pid ", "--pid ", "-pid=", "--pid=", "-p ", "--p="] {
        for subcommand in ["info", "inf", "i"] {
            let line = format!("{subcommand} {spelling}{}", target.pid());
            assert_eq!(run(&line).answer(), expected, "{line}");
        }
    }
}

#[test]
fn unique_prefix_of_a_word_is_accepted() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let line = format!("att -p {pid} -gig -forc -form plain -q -enable plain");
    assert_eq!(run(&line).answer(), "plain 0 -> 1, 1 site\n");
    assert!(states(pid).contains("plain enabled"));
    assert_eq!(run_on("li -j", &program("service")).code, Some(0));
}

#[test]
fn value_of_a_flag_is_never_a_flag() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let line = format!("attach -pid {} -enable-regexp -quiet", target.pid());
    let error = run(&line).failure();
    assert!(error.contains("matches \"-quiet\""), "{error}");
}

#[test]
fn usage_errors_are_reported_before_anything_is_done() {
    let lines = [
        // Words that are unknown or ambiguous.
        "frobnicate",
        "attch -pid 7",
        "info pid 7",
        "info 7",
        "attach 7 -enable a",
        "list 7",
        "info -pid 7 -- x",
        "profile -pid 7 -- x",
        "gc -pid 7 -- x",
        "record -pid 7 -o x -- x",
        "-- info",
        "-pid 7 info",
        "-json info -pid 7",
        "-v info -pid 7",
        "-pid 7",
        "help -json",
        "help nope",
        "help cont",
        "-version x",
        "-version -pid 7",
        "info -frobnicate -pid 7",
        "info -pidd 7",
        "attach -f -pid 7 -enable a",
        "attach -fo 30s -pid 7 -enable a",
        "attach -pid 7 -pid 07 -enable a",
        "attach -name ( -enable a",
        "attach -pid 7 -enable a -for",
        "attach -pid 7 -enable a -for 1",
        "attach -pid 7 -enable a -for soon",
        "attach -pid 7 -enable a -for 99999999999999999h",
        "count -pid 7 -interval 250",
        // A flag in the place of a value.
        "count -pid -for 1s",
        "count -pid 7 -for -format json",
        "watch -pid 7 -probe -limit 1",
        "watch -pid 7 -regexp . -fields -json",
        "trace -count -watch -json -prog x",
        "trace -latency -prog x",
        "trace -latency start -prog x",
        "trace -count -latency -fn f -prog x",
        "trace -count -watch -fn f -prog x",
        "trace -watch -prog x",
        "trace -watch a, -prog x",
        "trace -watch a -args 2 -prog x",
        "trace -count -fn f -results -prog x",
        "trace -fn f -prog x",
        "attach -pid 7 -enable a -live=yes",
        "info -pid 7 -live",
        "trace -prog x y",
        // Observations, with missing, repeated or invalid arguments.
        "latency -pair a,b",
        "latency -pid 7",
        "latency -pid 7 -pair a",
        "latency -pid 7 -pair a,b -pair a,b",
        "latency -pid 7 -pair a, -for 1s",
        "latency -pid 7 -pair a,b -over 10",
        "trace -count -over 1ms -prog x",
        "hist -pid 7 -probe a",
        "hist -pid 7 -probe a -of arg0=",
        "hist -pid 7 -pair a,b -of elapsed",
        "hist -pid 7 -fn f -of elapsed",
        "trace -prog x -hist -fn f -of elapsed",
        "hist -pid 7 -probe a -of arg0 -linear 0,10",
        "hist -pid 7 -probe a -of arg0 -linear 9,-9,1",
        "hist -pid 7 -probe a -of arg0 -linear 0,1000000,1",
        "trace -prog x -hist a",
        "trace -prog x -hist -of arg0",
        "trace -prog x -hist a -of arg0 -count",
        "trace -prog x -watch a -fn g",
        "trace -prog x -count -watch -usdt p:n",
        "count -pid 7 -fn a -by stack,arg0",
        "count -pid 7 -fn a -by arg0,pid",
        "trace -prog x -count -by pid,caller",
        "count -pid 7 -fn a -by pid,caller",
        "hist -pid 7 -of arg0 -fn a -by pid,caller",
        "latency -pid 7 -fn a -by pid,caller",
        "trace -prog x -count -linear 0,10,1",
        "watch -pid 7",
        "watch -probe a",
        "watch -pid 7 -probe a -regexp b",
        "watch -pid 7 -probe a -limit 0",
        "watch -pid 7 -events",
        "watch -pid 7 -events minor,",
        "watch -pid 7 -events mi[nor",
        "watch -pid 7 -events minor,minor",
        "watch -pid 7 -events all,minor",
        "watch -pid 7 -events minor -probe a",
        "watch -pid 7 -events minor -rate 5",
        "watch -pid 7 -events minor -fields time",
        "watch -name a -events minor",
        "watch -pid 7 -pid 8 -events minor",
        "count -pid 7 -events minor -where true",
        "count -pid 7 -events minor -by pid",
        "hist -pid 7 -events minor -of arg0",
        "hist -pid 7 -events minor -linear 1,0,1",
        "watch -pid 7 -probe a -rate fast",
        "watch -pid 7 -probe a -fields time,nam",
        "watch -pid 7 -probe a -fields time,args,time",
        "watch -pid 7 -probe a -fields time -json",
        "watch -pid 7 -probe a -paths long",
        "watch -pid 7 -fn f -args +3",
        "watch -pid 7 -probe a -sample 1000",
        "watch -pid 7 -probe a -sample 1/0",
        "watch -pid 7 -fn f -sample 1/9 -results",
        "trace -count -sample 1/9 -prog x",
        "trace -count -paths full -prog x",
        "count -pid 7 -paths full",
        "count -pid 7 -buffer 4",
        "info -pid 7 -paths full",
        "list -prog x -paths full",
        "list -prog x -provider any -paths full",
        "record -pid 7 -off-cpu -o x.json -force",
        "record -pid 7 -off-cpu -o x.json -despite-seccomp",
        "serve -pid 7 -gc -force",
        "serve -pid 7 -gc -despite-seccomp",
        "serve -pid 7 -buckets 1ms",
        "trace -watch a -by arg0 -prog x",
        "trace -count -by pid,arg0 -prog x",
        "trace -count -by caller -prog x",
        "trace -count -top 3 -prog x",
        "watch -pid 7 -probe a -where arg0>",
        "watch -pid 7 -fn f -where arg0>5 -results",
        "trace -gc -where arg0>5 -prog x",
        "trace -latency -fn f -usdt a:b -prog x",
        "trace -watch -usdt a:b -results -prog x",
        "watch -pid 7 -usdt a:b -results",
        "observe -pid 7",
        "observe -clean",
        // Flags without a value or of other commands, and a command that does not exist.
        "trace -prog x -wait=yes",
        "info -pid 7 -wait",
        "trace -prog x -count -for 1s",
        "trace -prog x -count -fields time",
        "trace -prog x -gc minor",
        "count -pid 7 -gc minor,nursery",
        "trace -prog x -watch a -fields time -json",
        "trace -prog x -force",
        "record -prog x -probe a -o x.json -force",
        "gc -prog x -force",
        "completion tcsh",
        "man nope",
        // Flags that must be spelled in full.
        "attach -pid 7 -enabl a",
        "attach -pid 7 -enable-a",
        "attach -pid 7 --disable-regex a",
        // Values.
        "info",
        "info -pid",
        "info -pid=",
        "info -pid 0",
        "info -pid -7",
        "info -pid +7",
        "info -pid 0x7",
        "info -pid 7.0",
        "info -pid 2147483648",
        "info -pid self",
        "info -pid 7 -pid 07",
        "info -name (",
        "info -pid 7 -sites=yes",
        "list",
        "list -prog=",
        "list -prog x y",
        "list server.exe",
        "list server.exe -sites",
        "list -pid 7",
        "list -functions",
        "list -functions -pid 7 -prog x",
        "list -functions -sites -prog x",
        "list -functions -prog x [",
        "list -functions -prog x -- a[",
        "list -provider any",
        "list -provider",
        "list -provider any -functions -prog x",
        "list -provider any -pid 7 -prog x",
        "list -provider a:b -prog x",
        "list -provider a[ -prog x",
        "list -provider any -prog x a:b",
        "list -provider any -prog x a[",
        "list -provider= -prog x",
        "trace -enable a",
        "info -pid 7 -format xml",
        "info -pid 7 -json -format plain",
        "info -pid 7 -json -json",
        "info -pid 7 -quiet -verbose",
        // Actions.
        "attach -pid 7",
        "attach -pid 7 -force",
        "attach -pid 7 -enable a -enable-all",
        "attach -pid 7 -enable a -disable b -disable-regexp c",
        "attach -pid 7 -enable-all -disable-all",
        "attach -pid 7 -enable-pair a,b -disable-pair c,d",
        "attach -pid 7 -enable-regexp a -enable-regexp b",
        "attach -pid 7 -enable a,b -enable a",
        "attach -pid 7 -disable a,a",
        "attach -pid 7 -enable a -disable b,a",
        "attach -pid 7 -enable a,,b",
        "attach -pid 7 -enable ,a",
        "attach -pid 7 -disable a,",
        "attach -pid 7 -enable=",
        "attach -pid 7 -enable -disable-all",
        "attach -pid 7 -enable-pair a",
        "attach -pid 7 -enable-pair a,b,c",
        "attach -pid 7 -enable-pair a,a",
        "attach -pid 7 -enable-pair a,",
        "attach -pid 7 -enable-regexp a(",
        "attach -pid 7 -enable-all -follow -live",
        "attach -pid 7 -enable-all -follow -for 1s",
        "trace -prog x -disable-regexp [",
        // The screen of `top`.
        "top",
        "top -pid 7 -pid 7",
        "top -pid 7 -by tid",
        "top -pid 7 -probe a -regexp b",
        "top -pid 7 -pair a",
        "top -pid 7 -pair a,b,c",
        "top -pid 7 -pair a,",
        "top -pid 7 -pair a,b -pair b,a -pair a,b",
        "top -pid 7 -interval 9ms",
        "top -pid 7 -interval soon",
        "top -pid 7 -quiet -verbose",
        "top -pid 7 -json",
    ];
    let mut text = String::new();
    for line in lines {
        let run = run(line);
        assert_eq!(run.code, Some(2), "{line}: {run:?}");
        assert_eq!(run.stdout, "", "{line}");
        text += &format!("$ ocaml-probes {line}\n{}", run.stderr);
    }
    golden("usage-errors.txt", &text);
}

#[test]
fn version_flag_is_the_subcommand() {
    for flags in ["", " -json", " -format plain", " -q"] {
        let expected = run(&format!("version{flags}")).answer();
        assert!(expected.contains(env!("CARGO_PKG_VERSION")), "{expected}");
        for spelling in ["-version", "--version", "--vers"] {
            assert_eq!(run(&format!("{spelling}{flags}")).answer(), expected);
        }
    }
}

#[test]
fn json_may_be_asked_for_twice() {
    let file = program("service");
    let json = run_on("list -json", &file).answer();
    for flags in ["-json -format json", "-format json -json"] {
        assert_eq!(run_on(&format!("list {flags}"), &file).answer(), json);
    }
}

#[test]
fn missing_arguments_are_a_usage_error() {
    let run = run_command(&mut command([] as [&str; 0]));
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    assert!(
        run.stderr.contains("trace, attach, info, list"),
        "{}",
        run.stderr
    );
}

#[test]
fn argument_that_is_no_text_is_named() {
    let bad = OsStr::from_bytes(b"a\xffb");
    for (line, flag) in [("count -pid 7 -fn", "-fn"), ("list -prog x", "GLOBS")] {
        let run = run_command(command(line.split(' ')).arg(bad));
        assert_eq!(run.code, Some(2));
        let why = format!("{flag}: \"a\\255b\" is not valid UTF-8\n");
        assert!(run.stderr.contains(&why), "{}", run.stderr);
    }
    let file = run_command(command(["list", "-prog"]).arg(bad));
    assert_eq!(file.code, Some(1), "{file:?}");
}
