use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use probes_lib::{Actions, Selector};

use super::*;

fn command(line: &str) -> Result<Command, NoCommand> {
    let argv = line.split(' ').map(OsString::from);
    parse(argv)
}

fn refusal(line: &str) -> String {
    match command(line) {
        Err(NoCommand::Usage(error, _)) => error.to_string(),
        other => panic!("{line}: {other:?}"),
    }
}

fn actions(line: &str) -> String {
    match command(&format!("x attach -pid 7 {line}")) {
        Ok(Command::Attach(attach)) => format!("{:?}", attach.actions().unwrap_or_default()),
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn comma_lists_and_repeated_flags_add_up() {
    let expected = Actions::new()
        .enable(Selector::name("a"))
        .enable(Selector::name("b"))
        .enable(Selector::name("c"))
        .disable(Selector::name("d"));
    let line = "-enable a,b -disable d -enable c";
    assert_eq!(actions(line), format!("{expected:?}"));
}

#[test]
fn force_combines_with_every_way_of_selecting() {
    for family in [
        "-enable a -disable b",
        "-enable-all",
        "-disable-regexp a",
        "-enable-pair a,b",
    ] {
        assert!(actions(&format!("{family} -force")).contains("force: true"));
        assert!(actions(family).contains("force: false"));
    }
}

#[test]
fn two_ways_of_selecting_are_refused() {
    let families = [
        "-enable=a",
        "-enable-all",
        "-disable-all",
        "-enable-regexp=a",
        "-disable-regexp=a",
        "-enable-pair=a,b",
        "-disable-pair=a,b",
    ];
    for (index, one) in families.iter().enumerate() {
        for other in &families[index + 1..] {
            let message = refusal(&format!("x attach -pid 7 {other} {one}"));
            assert!(message.ends_with("cannot be combined"), "{message}");
        }
        let message = refusal(&format!("x attach -pid 7 {one} {one}"));
        let twice = ["is given more than once", "\"a\" is given twice"];
        assert!(twice.iter().any(|end| message.ends_with(end)), "{message}");
    }
}

#[test]
fn second_name_is_explained() {
    let message = refusal("x serve -name a -name b");
    let expected = "serve: -name is given more than once; -name 'ONE|OTHER' selects the programs of both names";
    assert_eq!(message, expected);
}

#[test]
fn pid_is_a_positive_decimal_number() {
    for pid in [
        "0",
        "-1",
        "+7",
        "0x7",
        "7.0",
        "",
        " 7",
        "2147483648",
        "self",
        "７",
    ] {
        // Not `command(line)`: that splits lines at spaces, and one of these pids has a space.
        let line = ["x", "info", "-pid", pid].map(OsString::from);
        let refused = parse(line);
        assert!(matches!(refused, Err(NoCommand::Usage(..))), "{pid:?}");
    }
    for pid in ["7", "007", "2147483647"] {
        assert!(command(&format!("x info -pid {pid}")).is_ok(), "{pid}");
    }
}

fn spelled(line: &str) -> Result<String, String> {
    let argv = line.split(' ').map(OsString::from);
    match spell_out(&definition(), argv) {
        Ok(words) => Ok(words
            .iter()
            .map(|word| word.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" ")),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn all_spellings_of_a_flag_become_one() {
    for flag in ["-pid 7", "--pid 7", "-pid=7", "--pid=7", "-p 7", "--pi=7"] {
        let line = spelled(&format!("ocaml-probes info {flag} -sites"));
        assert_eq!(line.unwrap(), "ocaml-probes info --pid=7 --sites");
    }
    for flag in ["-h", "-?", "-help", "--help", "--h", "-hel"] {
        let line = spelled(&format!("ocaml-probes attach {flag}"));
        assert_eq!(line.unwrap(), "ocaml-probes attach --help");
    }
}

#[test]
fn subcommands_may_be_abbreviated_also_after_help() {
    assert_eq!(spelled("x att -q").unwrap(), "x attach --quiet");
    assert_eq!(spelled("x he tr").unwrap(), "x help trace");
}

#[test]
fn word_after_a_flag_is_its_value() {
    let line = spelled("x attach -enable-regexp -pid -pid -7").unwrap();
    assert_eq!(line, "x attach --enable-regexp=-pid --pid=-7");
    let line = spelled("x attach -enable-regexp= -enable-pair a=b").unwrap();
    assert_eq!(line, "x attach --enable-regexp= --enable-pair=a=b");
}

#[test]
fn words_after_two_dashes_are_left_alone() {
    let line = spelled("x trace -prog a -- -pid 7 -p -- -enable").unwrap();
    assert_eq!(line, "x trace --prog=a -- -pid 7 -p -- -enable");
}

#[test]
fn enable_and_disable_are_not_abbreviated() {
    for (line, error) in [
        (
            "x attach -enabl a",
            "attach: unknown flag -enabl; did you mean \
             -enable or -enable-all or -enable-regexp or -enable-pair?",
        ),
        (
            "x attach --disable-a",
            "attach: unknown flag --disable-a; did you mean -disable-all?",
        ),
    ] {
        assert_eq!(spelled(line).unwrap_err(), error);
    }
}

#[test]
fn commands_that_start_no_program_name_trace() {
    for name in ["count", "hist", "latency", "watch"] {
        let error = spelled(&format!("x {name} -prog a.exe")).unwrap_err();
        let advice = format!("`trace -prog FILE -{name}` does so from the program's start");
        assert_eq!(error, format!("{name}: unknown flag -prog; {advice}"));
    }
    let error = spelled("x top -prog a.exe").unwrap_err();
    assert_eq!(error, "top: unknown flag -prog");
    let error = spelled("x profile 992").unwrap_err();
    assert_eq!(
        error,
        "profile: unexpected argument \"992\": write ocaml-probes profile -pid 992"
    );
}

#[test]
fn unknown_flag_after_optional_value_is_named() {
    for (line, error) in [
        (
            "x latency -pid 7 -fn f -stack -limit 1",
            "latency: unknown flag -limit",
        ),
        (
            "x watch -pid 7 -fn f -stack --tpo 3",
            "watch: unknown flag --tpo",
        ),
    ] {
        let refused = spelled(line).unwrap_err();
        assert!(refused.starts_with(error), "{refused}");
    }
    let line = spelled("x watch -stack -3 -stack").unwrap();
    assert_eq!(line, "x watch --stack=-3 --stack");
}

#[test]
fn pid_is_advised_only_if_missing() {
    let error = spelled("x latency -pid 7 -fn f 992").unwrap_err();
    assert_eq!(error, "latency: unexpected argument \"992\"");
    let error = spelled("x latency -fn f 992").unwrap_err();
    let advice = "write ocaml-probes latency -pid 992";
    assert_eq!(
        error,
        format!("latency: unexpected argument \"992\": {advice}")
    );
}

#[test]
fn bytes_that_are_not_text_stay_unchanged() {
    let file = OsString::from_vec(b"-prog=\xff\n".to_vec());
    let argv = ["x".into(), "list".into(), file];
    let line = spell_out(&definition(), argv).unwrap();
    assert_eq!(line[2].as_bytes(), b"--prog=\xff\n");
}
