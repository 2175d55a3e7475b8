//! Programs observed by `top`, which counts their hits, times a pair, and enables a probe.

use test_support::tmux::Terminal;

use crate::case::Case;
use crate::program::Program;

// promise: top: Programs that check themselves behave the same on its screen (4 programs)
#[test]
fn programs_behave_the_same_under_top() {
    let mut case = Case::begin("on the screen of top", 100);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (form, name) in ["signals", "systhreads", "callbacks", "values"]
            .iter()
            .enumerate()
        {
            let program = Program::checked(name);
            let mut running = program.start(form + rounds);
            let (pid, probes) = (running.pid, program.probes());
            let terminal = Terminal::open(100, 30);
            terminal.type_line(&format!(
                "clear; {} top -interval 20ms -pid {pid} -pair {},{}; echo \"status $?\"",
                env!("CARGO_BIN_EXE_ocaml-probes"),
                probes.last().unwrap(),
                probes[0],
            ));
            terminal.wait_for(&format!(", process {pid}"));
            terminal.press(&["Down", "Enter"]);
            terminal.wait_for("0 -> 1");
            running.speak();
            terminal.press(&["q"]);
            terminal.wait_for("status 0");
            running.assert_unobserved();
            let done = running.end("top");
            case.add("rounds on the screen of top", done);
        }
        rounds += 1;
    }
}
