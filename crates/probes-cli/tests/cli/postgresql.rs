//! `watch -usdt` on real PostgreSQL, which Debian builds with its probes: queries with their text, while pgbench runs.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use test_support::{Guard, Scratch, Talker, eventually, output};

use crate::ask::Question;
use crate::count_functions::{counting, start_observing, start_observing_several};
use crate::support::{is_observed, object, started_by};

/// The user that runs the server if the tests are run by root, which it refuses: nobody.
const NOBODY: u32 = 65534;

/// A server with an empty database.
struct Server {
    tools: PathBuf,
    directory: PathBuf,
    /// After the server: it is removed last.
    server: Option<Guard>,
    _scratch: Scratch,
}

impl Server {
    fn start() -> Server {
        let scratch = Scratch::new();
        let directory = scratch.file("server");
        fs::create_dir(&directory).unwrap();
        if geteuid().is_root() {
            chown(&directory, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let mut server = Server {
            tools: tools(),
            directory,
            server: None,
            _scratch: scratch,
        };
        let data = server.directory.join("data");
        let flags = [
            "-A",
            "trust",
            "-U",
            "tester",
            "--locale=C",
            "--no-sync",
            "-D",
        ];
        let initialized = output(server.command("initdb", &flags).arg(&data));
        assert!(initialized.status.success(), "{initialized:?}");
        let flags = ["-c", "listen_addresses=", "-c", "fsync=off", "-D"];
        let mut command = server.command("postgres", &flags);
        command.arg(&data).arg("-k").arg(&server.directory);
        server.server = Some(Guard::spawn(command.stderr(Stdio::null())));
        eventually("the server answers", || {
            let asked = output(&mut server.client("psql", &["-c", "select 1"]));
            asked.status.success().then_some(())
        });
        let filled = output(&mut server.client("pgbench", &["-i", "-q"]));
        assert!(filled.status.success(), "{filled:?}");
        server
    }

    fn pid(&self) -> i32 {
        self.server.as_ref().unwrap().pid()
    }

    /// One of its programs, as the user that it may be run by.
    fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(self.tools.join(name));
        command.args(flags);
        if geteuid().is_root() {
            let starter = format!("setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups");
            command = started_by(&starter, &command);
        }
        command.current_dir(&self.directory);
        command
    }

    /// A program that connects to it.
    fn client(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = self.command(name, flags);
        command.args(["-U", "tester", "-h"]).arg(&self.directory);
        command.arg("postgres");
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Killed, it would leave shared memory behind.
        if let Some(mut server) = self.server.take() {
            let _ = kill(Pid::from_raw(server.pid()), Signal::SIGINT);
            if !std::thread::panicking() {
                server.wait();
            }
        }
    }
}

/// The directory of its newest version.
fn tools() -> PathBuf {
    let versions = fs::read_dir(Path::new("/usr/lib/postgresql"));
    let versions = versions.into_iter().flatten();
    let versions = versions.map(|version| version.unwrap().path().join("bin"));
    let servers = versions.filter(|directory| directory.join("postgres").exists());
    let newest = servers.max();
    newest.unwrap_or_else(|| panic!("scripts/setup installs PostgreSQL"))
}

/// The number after `pid `, which a query answers with.
fn pid_of(session: &mut Talker, query: &str) -> i32 {
    let answer = session.ask(query, "pid ");
    answer.trim_start_matches("pid ").parse().unwrap()
}

// promise: Observations: Queries of PostgreSQL are shown and counted with their text, each of them, while pgbench runs (Debian's
//    PostgreSQL)
#[test]
fn queries_of_postgresql_are_shown_with_text() {
    let server = Server::start();
    let mut session = server.client("psql", &["-X", "-q", "-A", "-t"]);
    let mut session = Talker::spawn(&mut session);
    let own = pid_of(&mut session, "select 'pid ' || pg_backend_pid();");
    let mut load = server.client("pgbench", &["-n", "-c", "4", "-T", "600"]);
    let _load = Guard::spawn(load.stdout(Stdio::null()).stderr(Stdio::null()));
    let tool = start_observing(
        "watch",
        "-fields args -usdt postgresql:query__start,postgresql:query__done -where arg0!=0",
        own,
    );
    let query = |number: usize| format!("select 'answer {number}';");
    for number in 0..40 {
        session.ask(&query(number), &format!("answer {number}"));
    }
    let shown = tool.end();
    let shown: Vec<&str> = shown.stdout.lines().collect();
    let expected: Vec<String> = (0..80)
        .map(|line| format!("\"{}\"", query(line / 2)))
        .collect();
    assert_eq!(shown, expected);
    let tool = counting("-usdt postgresql:query__start -where arg0==0", own);
    session.ask(&query(0), "answer 0");
    let counted = tool.end().stdout;
    assert_eq!(
        counted.trim_end(),
        "0 0.0 postgresql:query__start untyped 0"
    );
    assert!(!is_observed(own));
    let flags = "-json -usdt postgresql:query__start,postgresql:query__done -where arg0!=0";
    let tool = start_observing("latency", flags, own);
    for number in 0..40 {
        session.ask(&query(number), &format!("answer {number}"));
    }
    session.ask("select 'slept ' || (pg_sleep(0.05) is null);", "slept");
    let timed = object(&tool.end().answer());
    let pair = &timed["pairs"][0];
    assert_eq!(pair["count"], 41, "{pair}");
    assert_eq!(pair["unmatched_starts"], 0, "{pair}");
    assert_eq!(pair["interleaved"], 0, "{pair}");
    assert!(pair["max_ns"].as_u64().unwrap() >= 50_000_000, "{pair}");
    assert!(!is_observed(own));
    let by_text =
        "-usdt postgresql:query__start,postgresql:query__done -key str(arg0) -by str(arg0)";
    let tool = start_observing("latency", by_text, own);
    for number in 0..40 {
        session.ask(&query(number % 4), &format!("answer {}", number % 4));
    }
    let timed = tool.end().answer();
    let of_texts: Vec<&str> = timed.lines().filter(|line| line.ends_with(";\"")).collect();
    assert_eq!(of_texts.len(), 4, "{timed}");
    assert!(
        of_texts.iter().all(|line| line.starts_with("by 10 ")),
        "{timed}"
    );
    let by_text =
        "-usdt postgresql:query__start -by str(arg0) -where str(arg0)^=\"select\\032'answer\"";
    let tool = counting(by_text, own);
    for number in 0..40 {
        session.ask(&query(number % 4), &format!("answer {}", number % 4));
        session.ask("select 1;", "1");
    }
    let counted = tool.end().answer();
    let mut lines: Vec<&str> = counted.lines().collect();
    lines.truncate(4);
    let rest: Vec<&str> = counted.lines().skip(4).collect();
    assert!(
        lines.iter().all(|line| line.starts_with("10 ")),
        "{counted}"
    );
    assert!(counted.contains("\"select 'answer 3';\""), "{counted}");
    assert_eq!(rest, ["0 0.0 other", "0 0.0 untyped"]);
    assert!(!is_observed(own));
    // The same for a connection that is made later, once its process is found.
    let later = "-follow -fields args -limit 1 -usdt postgresql:query__start -where str(arg0)^=\"select\\032'later\"";
    let tool = start_observing_several("watch", later, server.pid(), 2);
    let mut client = server.client("psql", &["-X", "-q", "-A", "-t"]);
    let mut client = Talker::spawn(&mut client);
    client.send("select 'later' \\watch 0.02");
    assert_eq!(tool.until_end().answer(), "\"select 'later' \"\n");
    drop(client);
    assert!(!is_observed(server.pid()));
    let of_pgbench = eventually("pgbench has connected", || {
        let pid = "select 'pid ' || coalesce(min(pid), 0) from pg_stat_activity";
        let query = format!("{pid} where application_name = 'pgbench';");
        Some(pid_of(&mut session, &query)).filter(|pid| *pid > 0)
    });
    let flags = "-fields args -limit 70 -usdt postgresql:query__start";
    let shown = start_observing("watch", flags, of_pgbench).until_end();
    let kinds = [
        "\"BEGIN;\"",
        "\"UPDATE pgbench_accounts SET abalance",
        "\"SELECT abalance FROM pgbench_accounts",
        "\"UPDATE pgbench_tellers SET tbalance",
        "\"UPDATE pgbench_branches SET bbalance",
        "\"INSERT INTO pgbench_history",
        "\"END;\"",
    ];
    let kind = |line: &str| kinds.iter().position(|kind| line.starts_with(kind));
    let kind = |line| kind(line).unwrap_or_else(|| panic!("{line}"));
    let shown: Vec<usize> = shown.stdout.lines().map(kind).collect();
    assert_eq!(shown.len(), 70);
    // One transaction after the other.
    let follows = |pair: &[usize]| pair[1] == (pair[0] + 1) % kinds.len();
    assert!(shown.windows(2).all(follows), "{shown:?}");
    assert!(!is_observed(of_pgbench));
    let question = Question::about("4343");
    let tool = start_observing("watch", question.flags(), own);
    session.ask("select 1;", "1");
    question.assert_answered(&tool.until_end().stdout);
    session.ask(&query(1), "answer 1");
}
