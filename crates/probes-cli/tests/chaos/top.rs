//! A panic while `top` shows its screen: the terminal is usable again, and the process is restored.

use probes_lib::{Action, State, Target};
use test_support::fixture_forms;
use test_support::tmux::Terminal;

use crate::case::Case;
use crate::subject::{Subject, all};

/// The number of system calls of the tool after which it panics: far more than it makes before the
/// first screen, and reached soon after, because each refresh makes some.
const CALLS: u32 = 15_000;

// promise: top: After a panic, `top` leaves terminal and process as they were (2)
#[test]
fn panic_of_the_screen_restores_terminal_and_process() {
    let mut case = Case::begin("panics of the screen", 1);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("gen_ocaml") {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            subject.apply(&all(Action::Enable));
            let pid = subject.pid();
            let terminal = Terminal::open(100, 30);
            terminal.type_line(&format!(
                "clear; stty -g | md5sum; RUST_BACKTRACE=0 OCAML_PROBES_FAULT=panic:{CALLS} {} top -interval 10ms -pid {pid}; \
                 echo \"status $?\"; stty -g | md5sum",
                env!("CARGO_BIN_EXE_ocaml-probes")
            ));
            terminal.wait_for(&format!(", process {pid}"));
            terminal.press(&["Down", "Enter"]);
            terminal.wait_for("1 -> 0");
            let screen = terminal.wait_for("injected panic");
            assert!(!screen.contains("HITS/S"), "{screen}");
            let screen = terminal.wait_until("its status", |screen| {
                screen.contains("status 101") && screen.matches("  -").count() == 2
            });
            let sums: Vec<&str> = screen.lines().filter(|it| it.ends_with("  -")).collect();
            assert_eq!(sums[0], sums[1], "the terminal's settings are restored");
            assert_eq!(terminal.format("#{alternate_on} #{cursor_flag}"), "0 1");

            let states = Target::open(pid).unwrap().states().unwrap();
            assert_eq!(
                (states.observed_sites(), states.observed_functions()),
                (0, 0)
            );
            subject.assert_released();
            subject.assert_all((1, State::Enabled), "after a panic");
            subject.run();
            subject.apply(&all(Action::Disable));
            subject.end();
            case.count("panicked, and everything is as it was");
        }
        rounds += 1;
    }
}
