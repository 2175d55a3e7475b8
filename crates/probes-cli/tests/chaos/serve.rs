//! A panic of `serve`, in either of the threads that change processes: the process is restored, and the tool exits.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::Target;
use test_support::{Talker, fixture_forms};

use crate::case::Case;
use crate::counting::anonymous_code_mappings;
use crate::subject::Subject;

// promise: Serving: After a panic, `serve` leaves the process as it was, and exits (40)
#[test]
fn panic_of_serve_restores_the_process() {
    let mut case = Case::begin("panics of serve", 1);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("gen_ocaml") {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            for calls in (1..=20).map(|step| step * step) {
                let outcome = serve_until_panic(subject.pid(), calls);
                let states = Target::open(subject.pid()).unwrap().states().unwrap();
                let left = (states.observed_sites(), states.observed_functions());
                assert_eq!(left, (0, 0), "{calls} calls, {outcome}");
                subject.assert_released();
                case.count(outcome);
            }
            subject.run();
            subject.end();
        }
        rounds += 1;
    }
    assert!(case.counted("panicked while it served") > 0);
    assert!(case.counted("panicked before it served") > 0);
}

// promise: Serving: After a panic before or within any write into the process, as it is observed or restored, `serve` leaves
//    it as it was (2 fixtures)
#[test]
fn panic_at_any_write_restores_the_process() {
    let mut case = Case::begin("panics at writes", 1);
    for file in fixture_forms("gen_ocaml") {
        let mut subject = Subject::start(&file, [] as [&str; 0]);
        for place in ["write", "within"] {
            let mut panicked = 0;
            while let Some(outcome) = panic_at_write(subject.pid(), place, panicked + 1) {
                let states = Target::open(subject.pid()).unwrap().states().unwrap();
                let left = (states.observed_sites(), states.observed_functions());
                assert_eq!(left, (0, 0), "{place} {panicked}, {outcome}");
                let mappings = anonymous_code_mappings(subject.pid());
                assert_eq!(mappings, 0, "{place} {panicked}, {outcome}");
                subject.assert_released();
                case.count(outcome);
                panicked += 1;
            }
        }
        subject.run();
        subject.end();
    }
    assert!(case.counted("panicked while it observed") > 0);
    assert!(case.counted("panicked while it restored") > 0);
}

/// Runs `serve`, which panics before or within its nth write, and ends it once it serves; returns `None` if it has not
/// made so many writes.
fn panic_at_write(pid: i32, place: &str, nth: u32) -> Option<&'static str> {
    let mut tool = serve(pid, &format!("panic-{place}:{nth}"));
    let is_served = tool.line().is_some();
    if is_served {
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    }
    match (tool.guard().wait().code(), is_served) {
        (Some(0), true) => None,
        (Some(101), true) => Some("panicked while it restored"),
        (Some(101), false) => Some("panicked while it observed"),
        (code, _) => panic!("{place} {nth}: {code:?}"),
    }
}

/// Starts `serve` with a fault.
fn serve(pid: i32, fault: &str) -> Talker {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ocaml-probes"));
    command.args("serve -json -listen 127.0.0.1:0 -pid".split(' '));
    command.arg(pid.to_string());
    command.env("OCAML_PROBES_FAULT", fault);
    Talker::spawn(command.env("RUST_BACKTRACE", "0").stderr(Stdio::null()))
}

/// Runs `serve`, which panics at one of its system calls, and asserts that it exits.
fn serve_until_panic(pid: i32, calls: u32) -> &'static str {
    let mut tool = serve(pid, &format!("panic:{calls}"));
    let outcome = match tool.line() {
        Some(line) => {
            let (_, port) = line.split_once("\"port\":").expect("a port");
            let port = port.split([',', '}']).next().unwrap().parse().unwrap();
            while scrape(port).is_ok() {}
            "panicked while it served"
        }
        None => "panicked before it served",
    };
    let status = tool.guard().wait();
    assert_eq!(status.code(), Some(101), "{calls} calls, {outcome}");
    outcome
}

/// Makes `serve` read the process at once; fails if `serve` has exited.
fn scrape(port: u16) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: it\r\nconnection: close\r\n\r\n")?;
    stream.read_to_end(&mut Vec::new()).map(drop)
}
