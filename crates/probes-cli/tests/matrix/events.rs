//! Runtime events, event by event as the consumer of the program's own compiler reads them.

use std::path::Path;

use probes_lib::{
    ErrorKind, RingEntry, RuntimeEventKind, RuntimeEvents, RuntimeEventsError, UserValue,
};
use test_support::program_forms;

use crate::chroot::{ChrootProgram, Isolation};

fn start(isolation: Isolation, file: &Path, runtime: &str) -> ChrootProgram {
    ChrootProgram::start_with(isolation, file, &[], runtime)
}

/// What the program's own consumer reads.
pub(crate) fn own_lines(program: &mut ChrootProgram) -> Vec<String> {
    program.talker.send("print");
    let mut lines = Vec::new();
    loop {
        let line = program.talker.line().expect("a line");
        if line == "events end" {
            return lines;
        }
        lines.push(line);
    }
}

/// What we read, as the program prints it.
fn lines(events: &mut RuntimeEvents) -> Vec<String> {
    let mut lines = Vec::new();
    let mut users = Vec::new();
    events
        .read(|entry| {
            let line = match entry {
                RingEntry::Lost { domain, words } => format!("lost {domain} {words}"),
                RingEntry::Event { domain, time, kind } => {
                    let what = match kind {
                        RuntimeEventKind::Begin(phase) => format!("begin {phase}"),
                        RuntimeEventKind::End(phase) => format!("end {phase}"),
                        RuntimeEventKind::Counter(name, value) => format!("counter {name} {value}"),
                        RuntimeEventKind::Lifecycle(name, _) => format!("lifecycle {name}"),
                        RuntimeEventKind::User(id, value) => {
                            users.push((lines.len(), id));
                            shown(value)
                        }
                        other => panic!("{other:?}"),
                    };
                    format!("event {domain} {time} {what}")
                }
            };
            lines.push(line);
        })
        .unwrap();
    for (index, id) in users {
        let name = events.user_event_name(id).unwrap().expect("a name");
        lines[index] = lines[index].replace("NAME", name);
    }
    lines
}

fn shown(value: UserValue<'_>) -> String {
    let value = match value {
        UserValue::Unit => "unit".to_owned(),
        UserValue::Int(value) => value.to_string(),
        UserValue::SpanBegin => "begin".to_owned(),
        UserValue::SpanEnd => "end".to_owned(),
        UserValue::Custom(bytes) => format!("{:?}", String::from_utf8(bytes.to_vec()).unwrap()),
        other => panic!("{other:?}"),
    };
    format!("user NAME {value}")
}

/// The lines by domain, each with the lines about lost words first, and otherwise in order.
fn by_domain(mut lines: Vec<String>) -> Vec<String> {
    let key = |line: &String| {
        let mut words = line.split(' ');
        let is_event = words.next() != Some("lost");
        (words.next().unwrap().parse::<u32>().unwrap(), is_event)
    };
    lines.sort_by_key(key);
    lines
}

fn assert_same(isolation: Isolation, file: &Path, runtime: &str, rounds: u32) -> Vec<String> {
    let mut program = start(isolation, file, runtime);
    program.talker.ask("start", "started");
    let mut from_now = RuntimeEvents::of_process(program.pid).unwrap();
    assert!(lines(&mut from_now).len() < 1000);
    program.talker.ask(&format!("work 4 {rounds}"), "worked");
    let own = by_domain(own_lines(&mut program));
    let events = RuntimeEvents::of_process(program.pid).unwrap();
    let mut events = events.from_start();
    assert!(events.is_mapped().unwrap());
    let ours = by_domain(lines(&mut events));
    let difference = own.iter().zip(&ours).find(|(own, ours)| own != ours);
    assert_eq!(difference, None, "{isolation:?} {}", file.display());
    assert_eq!(own.len(), ours.len());
    assert!(lines(&mut events).is_empty());
    let later = lines(&mut from_now);
    assert!(later.len() > 100);
    let pid = program.pid;
    program.end();
    assert!(!events.is_mapped().unwrap(), "{pid} has exited");
    own
}

// promise: Runtime events: Events are read as the consumer of the program's own compiler reads them, of any kind, in domains that come and go
//    (2 programs × 2 isolations in each chroot, about 3,500 events each)
#[test]
fn events_equal_those_of_the_own_consumer() {
    for isolation in Isolation::ALL {
        for file in program_forms("ocaml5/events") {
            let own = assert_same(isolation, &file, "", 10);
            for what in [
                "begin minor",
                "end minor",
                "counter minor_promoted",
                "lifecycle domain_spawn",
                "user events.unit unit",
                "user events.int -7",
                "user events.span begin",
                "user events.text \"xxxxxxx\"",
            ] {
                assert!(own.iter().any(|line| line.contains(what)), "{what}");
            }
            assert!(!own.iter().any(|line| line.starts_with("lost")));
        }
    }
}

// promise: Runtime events: Words that were overwritten before they were read are counted as the program's own consumer does
//    (2 programs in each chroot, rings of 1,024 words)
#[test]
fn lost_words_equal_those_of_the_own_consumer() {
    for file in program_forms("ocaml5/events") {
        let own = assert_same(Isolation::Chroot, &file, "e=10", 30);
        let lost = own.iter().filter(|line| line.starts_with("lost"));
        assert!(lost.count() >= 4);
    }
}

#[test]
fn process_without_events_says_so() {
    let [file, _] = program_forms("ocaml5/events");
    let program = start(Isolation::Namespaces, &file, "");
    let error = RuntimeEvents::of_process(program.pid).unwrap_err();
    let kind = error.kind();
    assert!(
        matches!(kind, ErrorKind::RuntimeEvents(RuntimeEventsError::NotOn)),
        "{error}"
    );
    program.end();
}
