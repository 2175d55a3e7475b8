//! The line of `top` for the collector of OCaml 5.

use test_support::program_forms;
use test_support::tmux::Terminal;

use crate::chroot::{ChrootProgram, Isolation};
use crate::gc::writes_events;

const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

/// Waits until the screen has this text, while the program collects.
fn collect_until(program: &mut ChrootProgram, terminal: &Terminal, text: &str) {
    test_support::eventually(text, || {
        program.talker.ask("work 2 5", "worked");
        terminal.screen().contains(text).then_some(())
    });
}

// promise: Runtime events: `top` shows the pauses of a program whose events are on, and what it allocates and loses; it switches none on
//    (4 programs in each chroot, rings of 1,024 words)
#[test]
fn top_shows_the_collector_if_events_are_on() {
    for isolation in Isolation::ALL {
        for file in program_forms("ocaml5/events") {
            let mut program = ChrootProgram::start_with(isolation, &file, &[], "e=10");
            let pid = program.pid;
            let line = format!("{TOOL} top -pid {pid} -fn Events.round -interval 100ms");
            let terminal = Terminal::open(120, 20);
            terminal.type_line(&line);
            terminal.wait_for(&format!(", process {pid}"));
            program.talker.ask("work 2 5", "worked");
            assert!(!terminal.screen().contains("GC: "));
            terminal.press(&["?"]);
            terminal.wait_for("runtime events are off; `gc` switches them on");
            terminal.press(&["q"]);
            terminal.wait_until("top has ended", |screen| !screen.contains(", process "));
            assert_eq!(writes_events(&mut program), (false, false));

            program.talker.ask("start", "started");
            terminal.type_line(&line);
            terminal.wait_for("GC: no pauses; 0 B/s allocated");
            for text in [
                "% in pauses, longest ",
                "B/s allocated",
                " words of events lost",
            ] {
                collect_until(&mut program, &terminal, text);
            }
            terminal.press(&["q"]);
            program.end();
        }
    }
}
