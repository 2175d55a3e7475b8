//! Every function of probes.h, called by a program that otherwise waits for lines.

use std::process::Command;

use probes_lib::State::{Disabled, Enabled, Inconsistent};
use test_support::process::{Image, descriptors, poke, settle};
use test_support::{Guard, Talker, as_ordinary_user, eventually};

use crate::own::{Library, SelfSwitching, programs};

const OFF: (probes_lib::State, u16) = (Disabled, 0);
const ON: (probes_lib::State, u16) = (Enabled, 1);

// promise: Own probes: Each call does what its documentation says, and code is as it was after
//    enabling and disabling (4)
#[test]
fn program_switches_its_own_probes_with_either_library() {
    let forms = SelfSwitching::forms(Library::Shared).chain(SelfSwitching::forms(Library::Static));
    for mut own in forms {
        settle(own.talker.pid());
        let before = Image::of(own.talker.pid()).text();
        own.assert_states(OFF, OFF);
        assert_eq!(own.run(), (0, 0));
        own.command("enable ping");
        own.assert_states(ON, OFF);
        assert_eq!(own.run(), (3, 0));
        own.command("enable-all");
        own.assert_states((Enabled, 2), ON);
        assert_eq!(own.run(), (3, 1));
        own.command("disable ping");
        own.command("disable-regexp p[oi]ng");
        own.assert_states(OFF, OFF);
        own.command("enable-regexp po");
        assert_eq!(own.ask("state pong"), "state 1");
        assert_eq!(own.ask("state ping"), "state 0");
        own.command("disable-all");
        own.assert_states(OFF, OFF);
        assert_eq!(own.run(), (0, 0));
        settle(own.talker.pid());
        let after = Image::of(own.talker.pid()).text();
        after.assert_same(&before, "on and off again");
        own.end();
    }
}

#[test]
fn impossible_calls_fail_and_change_nothing() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        for (line, message) in [
            (
                "enable pang",
                "failed no probe \"pang\" in own; did you mean \"ping\" or \"pong\"? nothing was changed",
            ),
            (
                "disable ping",
                "failed probe \"ping\" is not enabled; nothing was changed",
            ),
            (
                "enable-regexp x",
                "failed no probe in own matches \"x\"; nothing was changed",
            ),
            ("state pang", "failed no probe \"pang\""),
            ("mistakes", "mistakes 0"),
        ] {
            assert_eq!(own.ask(line), message);
        }
        assert!(
            own.ask("enable-regexp (")
                .starts_with("failed \"(\" is not a regular expression")
        );
        own.assert_states(OFF, OFF);
        own.end();
    }
}

// promise: Own probes: A breakpoint on a site keeps its probe unchanged (2)
#[test]
fn breakpoint_on_a_site_keeps_its_probe_unchanged() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        let states = own.target.states().unwrap();
        let site = states.probe("ping").unwrap().sites().next().unwrap();
        poke(own.talker.pid(), site.address.0 + 1, &[0xcc]);
        let answer = own.ask("enable-all");
        assert!(answer.contains("found cc, expected 3d or e8"), "{answer}");
        assert!(answer.ends_with("; nothing was changed"), "{answer}");
        own.assert_states((Inconsistent, 0), OFF);
        own.command("enable pong");
        own.assert_states((Inconsistent, 0), ON);
    }
}

#[test]
fn set_repairs_an_inconsistent_probe() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        let states = own.target.states().unwrap();
        let site = states.probe("ping").unwrap().sites().next().unwrap();
        poke(own.talker.pid(), site.address.0 + 1, &[0xe8]);
        let answer = own.ask("enable ping");
        assert!(
            answer.contains("1 of 3 sites of \"ping\" are enabled and its counter is 0"),
            "{answer}"
        );
        own.command("set-on ping");
        own.assert_states(ON, OFF);
        own.command("enable ping");
        own.command("set-off ping");
        own.assert_states(OFF, OFF);
        own.end();
    }
}

// promise: Own probes: A child process is distinct from its parent: neither changes the other (2)
#[test]
fn child_and_parent_do_not_change_each_other() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        let pid = own.talker.pid();
        let refusal = own.ask("fork");
        assert!(
            refusal.contains(&format!(
                "process {pid} cannot be changed from its forked child, process "
            )) && refusal.ends_with("(Target::current, probes_current); nothing was changed"),
            "{refusal}"
        );
        assert_eq!(own.talker.expect("child hits"), "child hits ping=3 pong=1");
        own.talker.expect("forked");
        own.assert_states(OFF, OFF);
        own.command("enable ping");
        own.talker.send("fork");
        own.talker.expect("forked");
        own.assert_states(ON, OFF);
        own.end();
    }
}

// promise: Own probes: A program under a debugger switches its probes (2)
#[test]
fn program_under_a_debugger_switches_its_probes() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        let pid = own.talker.pid();
        let mut gdb = Command::new("gdb");
        gdb.args(["-q", "-nx", "-p", &pid.to_string(), "-ex", "continue"]);
        gdb.stdin(std::process::Stdio::piped());
        gdb.stdout(std::process::Stdio::null());
        gdb.stderr(std::process::Stdio::null());
        let _gdb = Guard::spawn(&mut gdb);
        eventually("gdb is attached", || {
            (test_support::process::status(pid, "TracerPid") != "0").then_some(())
        });
        own.command("enable-all");
        assert_eq!(own.ask("states"), "states ping=1/1 pong=1/1");
        assert_eq!(own.run(), (3, 1));
    }
}

// promise: Own probes: A thousand updates leave no descriptor and no mapping (2 × 1,000 updates)
#[test]
fn thousand_updates_leave_nothing_behind() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        assert_eq!(own.ask("toggle 1 1"), "toggled 0 0");
        let before = descriptors(own.talker.pid());
        let maps = maps_of_code(own.talker.pid());
        assert_eq!(own.ask("toggle 500 1"), "toggled 0 0");
        assert_eq!(descriptors(own.talker.pid()), before);
        assert_eq!(maps_of_code(own.talker.pid()), maps);
        own.end();
    }
}

fn maps_of_code(pid: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let code = maps.lines().filter(|line| line.contains(" r-xp "));
    code.map(str::to_owned).collect()
}

// promise: Own probes: If files in /proc cannot be opened, the call fails with that reason (2)
#[test]
fn files_that_cannot_be_opened_are_reported() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        own.command("forbid-open");
        assert!(own.ask("enable ping").ends_with("; nothing was changed"));
        let answer = own.ask("open");
        assert!(answer.starts_with("failed cannot open /proc/"), "{answer}");
        let states = own.target.states().unwrap();
        assert!(states.probes().all(|probe| probe.counter() == 0));
    }
}

// promise: Own probes: A program that is not dumpable gets an error with that reason (2)
#[test]
fn program_that_is_not_dumpable_is_refused() {
    // Root may read everything: the program runs as another user, linked so that it needs no file
    // of a directory that this user may not enter.
    for directory in programs(Library::Static) {
        let program = directory.file("own");
        let mut talker = Talker::spawn(&mut as_ordinary_user(&program));
        talker.expect("ready");
        assert_eq!(talker.ask("open", ""), "done");
        assert_eq!(talker.ask("hide", ""), "done");
        let pid = talker.pid();
        let reason = format!(
            "failed process {pid} is not dumpable (setuid or file capabilities, a program file that its user may not read, or prctl)"
        );
        assert_eq!(talker.ask("open", ""), reason);
        assert_eq!(talker.ask("show", ""), "done");
        assert_eq!(talker.ask("open", ""), "done");
        assert_eq!(talker.ask("enable ping", ""), "done");
    }
}

#[test]
fn program_with_another_pid_in_proc_switches_probes() {
    for directory in programs(Library::Shared) {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--pid", "--fork", "--kill-child"]);
        let mut talker = Talker::spawn(unshare.arg(directory.file("own")));
        talker.expect("ready");
        for line in ["open", "enable ping"] {
            assert_eq!(talker.ask(line, ""), "done");
        }
        assert_eq!(talker.ask("states", ""), "states ping=1/1 pong=0/0");
        assert_eq!(talker.ask("run", ""), "hits ping=3 pong=0");
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Own probes: A program whose first thread has exited switches its probes (2)
#[test]
fn program_without_first_thread_switches_its_probes() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        own.talker.ask("leave", "ready");
        own.command("enable-all");
        own.assert_states(ON, ON);
        own.command("open");
        own.command("disable ping");
        own.assert_states(OFF, ON);
        assert_eq!(own.run(), (0, 1));
        own.end();
    }
}

// promise: Own probes: Sealed code (mseal) is switched through `/proc/self/mem`, and refused where pages have to be replaced
//    (2)
#[test]
fn sealed_code_is_switched_through_proc_mem_only() {
    for mut own in SelfSwitching::forms(Library::Shared) {
        let is_sealed = own.ask("seal") == "done";
        own.command("enable-all");
        own.command("disable-all");
        own.command("forbid-code");
        // Kernels before 6.10 cannot seal memory.
        if is_sealed {
            let answer = own.ask("enable-all");
            assert!(answer.contains("Operation not permitted"), "{answer}");
            assert!(answer.ends_with("; every change was undone"));
            own.assert_states(OFF, OFF);
        } else {
            own.command("enable-all");
            own.assert_states(ON, ON);
        }
        own.end();
    }
}
