//! What a killed `attach -for` holds: `info` shows it, and `attach -release-dead` undoes it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};
use serde_json::Value;
use test_support::{Talker, eventually, fixture, fixture_forms, process};

use crate::restore::Waiting;
use crate::support::{both_forms, command, image, probe, run, run_command, started_by, states};

/// The directories in which a user's holds may be recorded.
fn directories(user: u32) -> Vec<PathBuf> {
    let mut directories = vec![PathBuf::from(format!("/tmp/ocaml-probes-{user}"))];
    if user == 0 {
        directories.push(PathBuf::from("/run/ocaml-probes"));
    }
    directories
}

/// The records of a process that one of these users has.
fn records(pid: i32) -> Vec<PathBuf> {
    let users = [geteuid().as_raw(), 65534];
    let directories = users.into_iter().flat_map(directories);
    let mut records: Vec<PathBuf> = directories
        .filter_map(|directory| fs::read_dir(directory).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with(&format!("{pid}."))
        })
        .collect();
    records.sort();
    records.dedup();
    records
}

/// Holds probes and is killed.
fn hold_and_die(target: &Talker, flags: &str) {
    let waiting = start(target, flags);
    waiting.send(Signal::SIGKILL);
    assert_eq!(waiting.wait_for_exit().0, None);
}

fn start(target: &Talker, flags: &str) -> Waiting {
    Waiting::start_on(&format!("-pid {} {flags} -for 1h", target.pid()))
}

fn release(pid: i32) -> String {
    run(&format!("attach -pid {pid} -release-dead -q -format plain")).answer()
}

fn info(pid: i32) -> Value {
    run(&format!("info -pid {pid} -json -q")).json()
}

/// The pids of the holders of a probe, whether they are alive, and their amounts.
fn holders(pid: i32, name: &str) -> Vec<(i64, bool, i64)> {
    let info = info(pid);
    let holders = probe(&info, name)["holders"].as_array();
    let one = |holder: &Value| {
        let number = |field: &str| holder[field].as_i64().unwrap();
        assert!(holder["command"].as_str().unwrap().contains(" attach "));
        assert_eq!(holder["uid"], geteuid().as_raw());
        (
            number("pid"),
            holder["alive"].as_bool().unwrap(),
            number("amount"),
        )
    };
    holders.map_or_else(Vec::new, |holders| holders.iter().map(one).collect())
}

// promise: Updates for a time: The changes of a killed command can be undone, in memory byte by byte (8 kills)
#[test]
fn what_the_dead_hold_is_undone() {
    for flags in ["-enable plain,flag", "-disable plain"] {
        for live in ["", " -live"] {
            for target in both_forms("gen_ocaml_2") {
                let pid = target.pid();
                if flags.contains("disable") {
                    run(&format!("attach -pid {pid} -enable plain")).answer();
                }
                let before = image(pid);
                hold_and_die(&target, &format!("{flags}{live}"));
                assert!(image(pid) != before);
                assert_eq!(records(pid).len(), 1);
                release(pid);
                assert!(image(pid) == before, "{flags}{live}");
                assert_eq!(records(pid).len(), 0);
            }
        }
    }
}

#[test]
fn many_dead_holders_have_one_warning() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    for _ in 0..10 {
        hold_and_die(&target, "-enable plain");
    }
    hold_and_die(&target, "-enable flag");
    let found = holders(pid, "plain");
    let pids: Vec<String> = found.iter().map(|(pid, ..)| pid.to_string()).collect();
    let table = run(&format!("info -pid {pid} -format table"));
    let few: Vec<String> = pids[..3]
        .iter()
        .map(|pid| format!("{pid} (dead)"))
        .collect();
    let cell = format!("| {} and 7 more ", few.join(", "));
    assert!(table.stdout.contains(&cell), "{}", table.stdout);
    let warning = "ocaml-probes: warning: held by 11 commands that were killed (pid ";
    assert!(table.stderr.contains(warning), "{}", table.stderr);
    assert!(
        table.stderr.contains(" and 3 more): flag, plain\n"),
        "{}",
        table.stderr
    );
    assert_eq!(table.stderr.matches("hint: ").count(), 1);
    let lines = run(&format!("info -pid {pid} -sites -q")).answer();
    assert_eq!(lines.matches(" dead 1 ").count(), 11);
    release(pid);
}

// promise: Updates for a time: Of a running and a killed holder of a probe, only the killed one's hold is undone (2)
#[test]
fn living_holder_keeps_what_it_holds() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        hold_and_die(&target, "-enable plain");
        let alive = start(&target, "-enable plain,flag");
        let found = holders(pid, "plain");
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].1, found[0].2), (false, 1));
        assert_eq!(found[1], (i64::from(alive.pid()), true, 1));
        assert_eq!(holders(pid, "flag").len(), 1);
        let plain = run(&format!("info -pid {pid}"));
        assert_eq!(plain.stdout, states(pid));
        let dead = format!("held by pid {} (", found[0].0);
        let living = format!("held by pid {} (", found[1].0);
        assert!(plain.stderr.contains(&dead) && plain.stderr.contains(&living));
        assert!(
            plain.stderr.contains("which was killed: plain\n"),
            "{}",
            plain.stderr
        );
        let lines = run(&format!("info -pid {pid} -sites -q")).answer();
        assert!(
            lines.contains(&format!("  holder {} dead 1 ", found[0].0)),
            "{lines}"
        );
        assert!(
            lines.contains(&format!("  holder {} alive 1 ", found[1].0)),
            "{lines}"
        );
        let table = run(&format!("info -pid {pid} -format table -q")).answer();
        let column = format!("{} (dead), {}", found[0].0, found[1].0);
        assert!(
            table.contains("held by") && table.contains(&column),
            "{table}"
        );

        assert_eq!(release(pid), "plain 2 -> 1, 0 sites\n");
        assert_eq!(holders(pid, "plain"), [found[1]]);
        // There is nothing left to undo.
        assert_eq!(release(pid), "");
        alive.send(Signal::SIGINT);
        let (code, stdout, stderr) = alive.wait_for_exit();
        assert_eq!(code, Some(0), "{stderr}");
        assert!(stdout.contains("plain 1 -> 0, 1 site\n"), "{stdout}");
        assert!(stderr.contains("which was killed: plain"), "{stderr}");
        assert_eq!(records(pid).len(), 0);
    }
}

#[test]
fn answer_names_the_holder_in_json() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        hold_and_die(&target, "-enable plain");
        let dead = holders(pid, "plain")[0].0;
        let answer = run(&format!("attach -pid {pid} -release-dead -json"));
        assert!(
            answer
                .stderr
                .contains(&format!("undid the changes of pid {dead} ("))
        );
        let released = answer.json();
        assert_eq!(
            (&released["type"], &released["pid"]),
            (&"released".into(), &pid.into())
        );
        assert_eq!(released["holder"], dead);
        let change = &released["changed"][0];
        assert_eq!(
            (&change["name"], &change["after"]),
            (&"plain".into(), &0.into())
        );
    }
}

// promise: Updates for a time: What a killed command held is not undone in a program that was executed since (2)
#[test]
fn executed_program_undoes_nothing() {
    for file in fixture_forms("exec_self") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        hold_and_die(&target, "-enable ping");
        target.ask("exec", "ready");
        // Otherwise there would be nothing to undo, even if the record were trusted.
        run(&format!("attach -pid {pid} -enable ping")).answer();
        assert_eq!(holders(pid, "ping"), []);
        assert_eq!(release(pid), "");
        assert!(states(pid).contains("ping enabled"));
        // The next hold deletes the record.
        hold_and_die(&target, "-enable ping");
        assert_eq!(records(pid).len(), 1);
        release(pid);
    }
}

// promise: Updates for a time: Counters that -force has set since are not undone (2)
#[test]
fn forced_counter_is_held_no_more() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        hold_and_die(&target, "-enable plain,flag");
        run(&format!("attach -pid {pid} -force -disable plain")).answer();
        run(&format!("attach -pid {pid} -enable plain")).answer();
        assert_eq!(holders(pid, "plain"), []);
        assert_eq!(release(pid), "flag 1 -> 0, 0 sites\n");
        assert!(states(pid).contains("plain enabled"));
    }
}

/// Makes the text of a record another one.
type Edit = fn(&str) -> Vec<u8>;

/// The record of a hold of `plain` by a dead process, changed by `edit`, in place of the true one.
fn forge(target: &Talker, edit: impl Fn(&str) -> Vec<u8>) -> PathBuf {
    hold_and_die(target, "-enable plain");
    let [record] = &records(target.pid())[..] else {
        panic!("{:?}", records(target.pid()));
    };
    let text = fs::read_to_string(record).unwrap();
    fs::write(record, edit(&text)).unwrap();
    record.clone()
}

// promise: Updates for a time: A record that is damaged or forged changes nothing but counters of
//    its probes, and never below 0 (2 × 8)
#[test]
fn hostile_record_changes_nothing_else() {
    let edits: [(&str, Edit, bool); 8] = [
        ("garbage", |_| b"\xff\0\n%%".repeat(1000), false),
        ("no end", |text| text.trim_end().into(), true),
        (
            "no such probe",
            |text| text.replace("plain ", "pl%61n ").into(),
            true,
        ),
        (
            "no such counter",
            |text| {
                let line = text
                    .lines()
                    .find(|line| line.starts_with("plain "))
                    .unwrap();
                let words: Vec<&str> = line.split(' ').collect();
                text.replace(words[2], "7fffdeadbeef").into()
            },
            true,
        ),
        (
            "too large",
            |text| text.replace(" 0 1\n", " 0 70000\n").into(),
            true,
        ),
        (
            "other program",
            |text| text.replace("process ", "process 1").into(),
            true,
        ),
        (
            "escapes",
            |text| text.replace("ocaml-probes%20", "%1b]0;x%07%20").into(),
            true,
        ),
        (
            "endless",
            |text| text.replace("intent 1", "intent 99999999999").into(),
            true,
        ),
    ];
    for (what, edit, is_readable) in edits {
        for target in both_forms("gen_ocaml_2") {
            let pid = target.pid();
            let record = forge(&target, edit);
            let before = states(pid);
            let shown = run(&format!("info -pid {pid} -sites"));
            let warned = shown.stderr.contains("cannot be read");
            assert_eq!(warned, !is_readable, "{what}: {}", shown.stderr);
            let shown = shown.stdout + &shown.stderr;
            assert!(!shown.contains(['\x1b', '\x07']), "{what}: {shown:?}");
            let released =
                run(&format!("attach -pid {pid} -release-dead -q -format plain")).answer();
            if matches!(what, "no end" | "escapes") {
                // The counter shows what the record leaves open.
                assert_eq!(released, "plain 1 -> 0, 1 site\n", "{what}");
            } else {
                assert_eq!((released.as_str(), states(pid)), ("", before), "{what}");
            }
            let _ = fs::remove_file(record);
        }
    }
}

#[test]
fn record_that_is_no_file_is_not_opened() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        let record = forge(&target, |text| text.into());
        // Its name begins with no pid.
        let hidden = record.with_file_name(format!("kept.{pid}"));
        let link = |record: &Path| symlink(&hidden, record).unwrap();
        let fifo = |record: &Path| mkfifo(record, Mode::S_IRWXU).unwrap();
        let directory = |record: &Path| fs::create_dir(record).unwrap();
        for replace in [&link as &dyn Fn(&Path), &fifo, &directory] {
            fs::rename(&record, &hidden).unwrap();
            replace(&record);
            assert_eq!(release(pid), "");
            assert_eq!(holders(pid, "plain"), []);
            let _ = fs::remove_file(&record).or_else(|_| fs::remove_dir(&record));
            fs::rename(&hidden, &record).unwrap();
        }
        assert_eq!(release(pid), "plain 1 -> 0, 1 site\n");
    }
}

#[test]
fn record_of_a_process_that_exited_is_deleted() {
    let gone = {
        let [target, _] = &both_forms("gen_ocaml_2")[..] else {
            panic!("two forms");
        };
        hold_and_die(target, "-enable plain");
        // Later, any other hold may delete it.
        assert_eq!(records(target.pid()).len(), 1);
        target.pid()
    };
    eventually("it is gone", || {
        process::state(gone).is_none().then_some(())
    });
    for target in both_forms("gen_ocaml_2") {
        hold_and_die(&target, "-enable plain");
        assert_eq!(records(gone).len(), 0);
        assert_eq!(release(target.pid()), "plain 1 -> 0, 1 site\n");
    }
}

#[test]
fn records_are_readable_by_all() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let mut shell = Command::new("sh");
    let script = "umask 077; exec \"$@\"";
    shell.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ocaml-probes")]);
    shell.args(["attach", "-enable", "plain", "-for", "1h", "-pid"]);
    let waiting = Waiting::spawn(shell.arg(target.pid().to_string()));
    let [record] = &records(target.pid())[..] else {
        panic!("no record");
    };
    let of_record = fs::metadata(record).unwrap();
    let directory = fs::metadata(record.parent().unwrap()).unwrap();
    assert_eq!(of_record.permissions().mode() & 0o777, 0o644);
    assert_eq!(directory.permissions().mode() & 0o777, 0o755);
    assert_eq!(of_record.uid(), geteuid().as_raw());
    waiting.send(Signal::SIGTERM);
    assert_eq!(waiting.wait_for_exit().0, Some(0));
}

#[test]
fn directory_is_readable_whatever_the_umask() {
    if !geteuid().is_root() {
        return;
    }
    // A user who has no directory yet.
    let user = 1_000_000 + std::process::id();
    let directory = PathBuf::from(format!("/tmp/ocaml-probes-{user}"));
    let mut target = Talker::spawn(&mut as_user(
        user,
        &Command::new(fixture("gen_ocaml_2.pie")),
    ));
    target.expect("ready");
    let mut shell = Command::new("sh");
    let script = "umask 777; exec \"$@\"";
    shell.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ocaml-probes")]);
    shell.args(["attach", "-enable", "plain", "-for", "1h", "-pid"]);
    shell.arg(target.pid().to_string());
    let waiting = Waiting::spawn(&mut as_user(user, &shell));
    let mode = fs::metadata(&directory).unwrap().permissions().mode();
    let records = fs::read_dir(&directory).unwrap().count();
    waiting.send(Signal::SIGTERM);
    assert_eq!(waiting.wait_for_exit().0, Some(0));
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!((mode & 0o777, records), (0o755, 1));
}

/// The command, run as this user.
fn as_user(user: u32, command: &Command) -> Command {
    let starter = format!("setpriv --reuid={user} --regid={user} --clear-groups");
    started_by(&starter, command)
}

/// The tool, run as an ordinary user.
fn as_nobody(line: &str) -> Command {
    as_user(NOBODY, &command(line.split(' ')))
}

const NOBODY: u32 = 65_534;

// promise: Updates for a time: What root holds of a user's process is shown to the user, and undone by root;
//    what the user holds, by both (4, as root)
#[test]
fn user_sees_what_root_holds() {
    if !geteuid().is_root() {
        // Without root, only the release of our own hold is tested.
        return assert_eq!(release_of_own(), "plain 1 -> 0, 1 site\n");
    }
    for form in ["gen_ocaml_2.pie", "gen_ocaml_2.nopie"] {
        let mut target = Talker::spawn(&mut as_user(NOBODY, &Command::new(fixture(form))));
        target.expect("ready");
        let pid = target.pid();
        hold_and_die(&target, "-enable plain");
        let shown = run_command(&mut as_nobody(&format!("info -pid {pid}")));
        assert!(
            shown.stderr.contains("which was killed: plain"),
            "{}",
            shown.stderr
        );
        assert!(
            shown
                .stderr
                .contains("`, run as root, undoes the changes\n"),
            "{}",
            shown.stderr
        );
        let line = format!("attach -pid {pid} -release-dead");
        let refused = run_command(&mut as_nobody(&line));
        assert!(
            refused
                .stderr
                .contains("`, run as root, undoes the changes\n"),
            "{}",
            refused.stderr
        );
        assert!(states(pid).contains("plain enabled"));
        assert_eq!(release(pid), "plain 1 -> 0, 1 site\n");

        let line = format!("attach -pid {pid} -enable plain -for 1h");
        let waiting = Waiting::spawn(&mut as_nobody(&line));
        waiting.send(Signal::SIGKILL);
        waiting.wait_for_exit();
        assert_eq!(release(pid), "plain 1 -> 0, 1 site\n");
    }
}

// promise: Updates for a time: A directory for records that another user has made is not used; the command says so and
//    does its work (2, as root)
#[test]
fn directory_of_another_user_is_not_used() {
    if !geteuid().is_root() {
        // Only root can make a directory of another user.
        return assert_eq!(release_of_own(), "plain 1 -> 0, 1 site\n");
    }
    for (form, user) in [("gen_ocaml_2.pie", 54_321), ("gen_ocaml_2.nopie", 54_322)] {
        let directory = PathBuf::from(format!("/tmp/ocaml-probes-{user}"));
        let mut target = Talker::spawn(&mut as_user(user, &Command::new(fixture(form))));
        target.expect("ready");
        let pid = target.pid();
        // The directory belongs to root, not to the user.
        let _ = fs::create_dir(&directory);
        let line = format!("attach -pid {pid} -enable plain -for 10ms");
        let attached = run_command(&mut as_user(user, &command(line.split(' '))));
        fs::remove_dir(&directory).unwrap();
        let why = format!("({}: another user can write there)", directory.display());
        assert!(attached.stderr.contains(&why), "{}", attached.stderr);
        assert_eq!(
            attached.answer(),
            "plain 0 -> 1, 1 site\nplain 1 -> 0, 1 site\n"
        );
    }
}

// promise: Updates for a time: Counters that another user has set with -force are not undone (2, as root)
#[test]
fn counter_forced_by_another_user_is_kept() {
    if !geteuid().is_root() {
        return assert_eq!(release_of_own(), "plain 1 -> 0, 1 site\n");
    }
    for form in ["gen_ocaml_2.pie", "gen_ocaml_2.nopie"] {
        let mut target = Talker::spawn(&mut as_user(NOBODY, &Command::new(fixture(form))));
        target.expect("ready");
        let pid = target.pid();
        hold_and_die(&target, "-enable plain");
        let line = format!("attach -pid {pid} -force -enable plain");
        run_command(&mut as_nobody(&line)).answer();
        assert_eq!(release(pid), "");
        assert!(states(pid).contains("plain enabled"));
    }
}

fn release_of_own() -> String {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    hold_and_die(&target, "-enable plain");
    release(target.pid())
}

#[test]
fn releasing_several_dead_leaves_nothing_on() {
    for target in both_forms("gen_ocaml_2") {
        for _ in 0..2 {
            hold_and_die(&target, "-enable plain");
        }
        let released = run(&format!("attach -pid {} -release-dead", target.pid()));
        let changes = "plain 2 -> 1, 0 sites\nplain 1 -> 0, 1 site\n";
        assert_eq!(released.stdout, changes);
        let stderr = released.stderr;
        assert!(!stderr.contains("still enabled"), "{stderr}");
    }
}

// promise: Updates for a time: Two killed commands, one of which disabled what the other had enabled, leave nothing
//    enabled (2 × 4)
#[test]
fn later_holds_are_undone_first() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        for _ in 0..4 {
            hold_and_die(&target, "-enable plain");
            hold_and_die(&target, "-disable plain");
            let changes = "plain 0 -> 1, 1 site\nplain 1 -> 0, 1 site\n";
            assert_eq!(release(pid), changes);
            assert_eq!(records(pid).len(), 0);
        }
    }
}

// promise: Updates for a time: What a killed command has enabled, and a living one disabled, stays held until that ends (2)
#[test]
fn hold_of_what_another_disabled_is_kept() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        hold_and_die(&target, "-enable plain,flag");
        let alive = start(&target, "-disable plain");
        let released = run(&format!("attach -pid {pid} -release-dead -format plain"));
        assert_eq!(released.stdout, "flag 1 -> 0, 0 sites\n");
        let stderr = &released.stderr;
        assert!(
            stderr.contains(
                "another command has disabled them, or their file cannot be read: plain\n"
            ),
            "{stderr}"
        );
        assert!(stderr.contains(": flag\n"), "{stderr}");
        // There is nothing else to undo now.
        assert_eq!(release(pid), "");
        assert_eq!(holders(pid, "plain").len(), 2);
        alive.send(Signal::SIGINT);
        assert_eq!(alive.wait_for_exit().0, Some(0));
        assert_eq!(release(pid), "plain 1 -> 0, 1 site\n");
        assert_eq!(records(pid).len(), 0);
    }
}

#[test]
fn killed_holder_is_settled_once_files_open() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        // As if it was killed before it could record that it had changed the counter.
        forge(&target, |text| {
            let intent = text.split_inclusive('\n');
            let intent = intent.filter(|line| !line.starts_with("settled "));
            intent.collect::<String>().into_bytes()
        });
        let limits = 3..60;
        let mut failures = 0;
        for limit in limits.clone() {
            let update = command(["attach", "-enable", "flag", "-pid", &pid.to_string()]);
            let starter = format!("prlimit --nofile={limit}");
            let done = run_command(&mut started_by(&starter, &update));
            // Too few to start it, to begin with.
            failures += usize::from(done.code != Some(0));
            assert_eq!(holders(pid, "plain").len(), 1, "{limit}: {}", done.stderr);
        }
        assert!((1..limits.len()).contains(&failures), "{failures}");
        release(pid);
        assert!(states(pid).contains("plain disabled"));
    }
}
