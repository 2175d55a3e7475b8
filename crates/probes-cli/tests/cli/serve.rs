//! `serve`: figures of live programs, as Prometheus and hostile clients see them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use regex::Regex;
use serde_json::Value;
use test_support::{
    DEADLINE, Guard, Scratch, Talker, as_ordinary_user, eventually, fixture, fixture_forms, output,
    process, program,
};

use crate::count::start_observing;
use crate::count_functions::with_fixed_functions;
use crate::serving::{Serving, value};
use crate::support::{Directory, command, image, is_observed, object, run};

// promise: Serving: Each scrape has exactly the hits that the program has made until then; when the tool ends, the process is restored
//    (2 × 3 signals)
#[test]
fn scrapes_equal_the_hits_of_the_program() {
    for file in fixture_forms("gen_ocaml") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let before = image(pid);
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            let serving = Serving::start(&format!("-pid {pid}"));
            for round in 0..3 {
                let metrics = serving.scrape();
                for (probe, hits) in [("shared", 3), ("only_alpha", 1)] {
                    let probe = format!("probe=\"{probe}\"");
                    let found = value(&metrics, &["_hits_total", &probe]);
                    assert_eq!(found, f64::from(hits * round));
                    assert_eq!(value(&metrics, &["_probe_enabled", &probe]), 0.0);
                }
                target.hits();
            }
            run(&format!("attach -quiet -pid {pid} -enable shared")).answer();
            let metrics = serving.scrape();
            let state = value(&metrics, &["_probe_enabled", "probe=\"shared\""]);
            assert_eq!(state, 1.0);
            run(&format!("attach -quiet -pid {pid} -disable shared")).answer();
            serving.end(signal);
            assert!(!is_observed(pid));
        }
        assert_eq!(before.len(), image(pid).len());
    }
}

/// Sets how many files a process may have open.
fn limit_files(pid: i32, soft: u64) {
    let mut prlimit = Command::new("prlimit");
    prlimit.args([format!("--pid={pid}"), format!("--nofile={soft}:")]);
    assert!(output(&mut prlimit).status.success());
}

// promise: Serving: A process that cannot be read any more is restored, as soon as that is possible; if it is not, the tool fails in
//    the end (2)
#[test]
fn process_that_cannot_be_read_is_restored() {
    for file in fixture_forms("gen_ocaml") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let mut serving = Serving::start(&format!("-pid {pid}"));
        let tool = serving.tool.pid();
        limit_files(tool, 3);
        serving.wait_until_said("Too many open files");
        serving.wait_until_said("is still observed");
        assert!(is_observed(pid));
        limit_files(tool, 1024);
        serving.wait_until_said("the process is restored now");
        serving.wait_until_said("is observed; stopped");
        limit_files(tool, 3);
        serving.wait_until_said("is still observed");
        kill(Pid::from_raw(tool), Signal::SIGTERM).unwrap();
        assert_eq!(serving.tool.guard().wait().code(), Some(1));
        serving.wait_until_said("is still observed");
        run(&format!("observe -clean -pid {pid}")).answer();
        assert!(!is_observed(pid));
    }
}

// promise: Serving: A process that becomes undumpable while it is observed is still known, however often processes are looked for:
//    the tool says that it cannot be restored
#[test]
fn undumpable_process_is_not_forgotten() {
    let directory = Directory::new("serve");
    let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
    let program = directory.copy(&fixture("undumpable.pie"), "undumpable");
    let mut target = Talker::spawn(&mut as_ordinary_user(&program));
    target.expect("ready");
    let pid = target.pid();
    let flags = format!("-scan 100ms -pid {pid}");
    let mut serving = Serving::of(as_ordinary_user(&tool), &flags);
    target.ask("hide", "hidden");
    serving.wait_until_said("is still observed");
    kill(Pid::from_raw(serving.tool.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(serving.tool.guard().wait().code(), Some(1));
}

/// A real Prometheus that scrapes one exporter.
struct Prometheus {
    _server: Guard,
    port: u16,
}

impl Prometheus {
    fn start(scratch: &Scratch, exporter: u16) -> Prometheus {
        let config = scratch.script(
            "prometheus.yml",
            &format!(
                "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\n\
                 scrape_configs:\n\
                 - {{job_name: p, scrape_interval: 5s, scrape_timeout: 5s, static_configs: [{{targets: ['localhost:{exporter}']}}]}}\n"
            ),
        );
        // No other program takes the port in this moment.
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                scratch.file("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let server = Guard::spawn(&mut command);
        Prometheus {
            _server: server,
            port,
        }
    }

    /// The values of the series that a query selects; empty as long as it cannot answer.
    fn query(&self, query: &str) -> Vec<f64> {
        let encode = |byte: u8| format!("%{byte:02x}");
        let query: String = query.bytes().map(encode).collect();
        let Ok(mut client) = TcpStream::connect(("127.0.0.1", self.port)) else {
            return Vec::new();
        };
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        let request = format!("GET /api/v1/query?query={query} HTTP/1.0\r\n\r\n");
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        let Some((_, body)) = answer.split_once("\r\n\r\n") else {
            return Vec::new();
        };
        let Ok(json) = serde_json::from_str::<Value>(body) else {
            return Vec::new();
        };
        let result = json["data"]["result"].as_array();
        let values = result.into_iter().flatten();
        let value = |it: &Value| it["value"][1].as_str().unwrap().parse().unwrap();
        values.map(value).collect()
    }

    /// The value of the only series that a query selects. After a scrape that took too long, there is none until the next.
    fn value(&self, query: &str) -> f64 {
        eventually(query, || match self.query(query)[..] {
            [value] => Some(value),
            _ => None,
        })
    }
}

// promise: Serving: Prometheus answers queries with the program's own count of requests and with a sum of their times between its own
//    two sums (Debian's Prometheus, 400 requests)
#[test]
fn prometheus_answers_with_the_programs_own_figures() {
    let scratch = Scratch::new();
    let mut target = Talker::start(&program("requests"));
    let pid = target.pid();
    let flags =
        format!("-pid {pid} -probe start,stop -pair start,stop -key arg0 -fn Requests.stop");
    let serving = Serving::start(&flags);
    let prometheus = Prometheus::start(&scratch, serving.port);
    let line = target.ask("flight 4 396", "flight");
    let own: Vec<f64> = line
        .split(' ')
        .skip(1)
        .map(|it| it.parse().unwrap())
        .collect();
    let (count, longest, shortest) = (own[0], own[1] / 1e9, own[2] / 1e9);
    let pair = "ocaml_probes_pair_duration_seconds";
    eventually("Prometheus has scraped them all", || {
        let scraped = prometheus.query(&format!("sum({pair}_count)"));
        (scraped == [count]).then_some(())
    });
    for query in [
        format!(
            "ocaml_probes_hits_total{{pid=\"{pid}\",program=\"requests.exe\",probe=\"start\"}}"
        ),
        "sum(ocaml_probes_hits_total{probe=\"stop\"})".to_owned(),
        "ocaml_probes_call_duration_seconds_count{function=\"Requests.stop\"}".to_owned(),
        format!("{pair}_bucket{{le=\"+Inf\"}}"),
    ] {
        eventually(&query, || {
            (prometheus.query(&query) == [count]).then_some(())
        });
    }
    let sum = prometheus.value(&format!("{pair}_sum"));
    assert!(
        shortest <= sum && sum <= longest,
        "{shortest} {sum} {longest}"
    );
    let quantile = format!("histogram_quantile(0.5, sum by (le) ({pair}_bucket))");
    let median = prometheus.value(&quantile);
    assert!(median > 0.0 && median <= longest, "{median}");
    // All of them were scraped, and Prometheus takes the page for valid.
    for query in ["up", "ocaml_probes_up"] {
        eventually(query, || (prometheus.query(query) == [1.0]).then_some(()));
    }
    serving.end(Signal::SIGTERM);
}

#[test]
fn times_that_may_interleave_are_counted() {
    for (file, command, expected) in [
        (&fixture_forms("timed")[0], "do (.)(.)", 2.0),
        (&program("requests"), "flight 1 2", 0.0),
    ] {
        let mut target = Talker::start(file);
        let pid = target.pid();
        let serving = Serving::start(&format!("-pid {pid} -pair start,stop"));
        target.ask(
            command,
            command.replace("do ", "done ").split(' ').next().unwrap(),
        );
        let count = value_of(&serving, pid, &["_pair_duration_seconds_count"]);
        assert!(count >= Some(2.0), "{count:?}");
        let words = ["_pair_problems_total", "reason=\"may_interleave\""];
        assert_eq!(value_of(&serving, pid, &words), Some(expected));
    }
}

#[test]
fn promtool_accepts_metrics_and_rules() {
    let target = Talker::start(&program("requests"));
    let flags = format!(
        "-pid {} -probe start -pair start,stop -fn Requests.*",
        target.pid()
    );
    let serving = Serving::start(&flags);
    let (head, body) = serving.get("text/plain;version=0.0.4");
    assert!(
        head.contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    let scratch = Scratch::new();
    let page = scratch.script("page", &body);
    let mut check = Command::new("sh");
    check
        .args(["-c", "exec promtool check metrics <\"$0\""])
        .arg(page);
    let checked = output(&mut check);
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && said.is_empty(), "{said}");
    let rules = contrib("prometheus/ocaml-probes.rules.yml");
    let mut check = Command::new("promtool");
    let checked = output(check.args(["check", "rules"]).arg(rules));
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(
        checked.status.success() && said.contains("SUCCESS"),
        "{said}"
    );
}

// promise: Serving: The command that the alert on slow requests names works while `serve` runs, which observes again afterwards, also
//    if the name of the program has special characters
#[test]
fn next_step_of_the_alert_works() {
    let scratch = Scratch::new();
    let target = named(&scratch, "s.h+[op]$'s");
    let serving = Serving::start("-name s.h -pair shared,only_alpha -scan 100ms");
    let next = r"-name 's\.h\+\[op\]\$.s$' -pair shared,only_alpha -over 250ms";
    let series = |le: &str| {
        format!(
            "  - series: ocaml_probes_pair_duration_seconds_bucket{{le=\"{le}\",instance=\"i\",\
             program=\"s.h+[op]$'s\",start=\"shared\",stop=\"only_alpha\"}}\n    values: 0+60x30\n"
        )
    };
    let rules = contrib("prometheus/ocaml-probes.rules.yml");
    let text = format!(
        "rule_files: [{}]\ntests:\n- interval: 1m\n  input_series:\n{}{}  alert_rule_test:\n  - eval_time: 25m\n    \
         alertname: OcamlRequestsSlow\n    exp_alerts: []\n",
        rules.canonicalize().unwrap().display(),
        series("0.5"),
        series("+Inf"),
    );
    let file = scratch.script("test.yml", &text);
    let mut check = Command::new("promtool");
    let said = output(check.args(["test", "rules"]).arg(file)).stderr;
    let said = String::from_utf8(said).unwrap();
    // promtool quotes annotations.
    let shown = format!("ocaml-probes latency -force {next}").replace('\\', r"\\");
    assert!(said.contains(&format!("next=\"{shown}\"")), "{said}");
    let mut step = Command::new("sh");
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let line = format!("exec '{tool}' latency -force {next} -for 100ms");
    let step = output(step.args(["-c", &line]));
    let said = String::from_utf8_lossy(&step.stderr);
    assert!(step.status.success(), "{said}");
    eventually("serve observes it again", || {
        let observed = value_of(&serving, target.pid(), &["_process_observed"]);
        (observed == Some(1.0)).then_some(())
    });
    serving.end(Signal::SIGTERM);
}

fn contrib(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../contrib")
        .join(path)
}

// promise: Serving: The page, the rules and the dashboard of docs/serve.md name only metrics that are exported, and the page
//    names all
#[test]
fn documents_name_the_exported_metrics() {
    let target = Talker::start(&program("service"));
    let serving = Serving::start(&format!("-pid {}", target.pid()));
    let (_, body) = serving.get("text/plain");
    let mut names = BTreeSet::new();
    for line in body.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        names.insert(name.to_owned());
        if kind == "histogram" {
            names.extend(["_bucket", "_sum", "_count"].map(|it| format!("{name}{it}")));
        }
    }
    let named = Regex::new("ocaml_probes_[a-z_]+").unwrap();
    let docs = contrib("../docs/serve.md");
    let dashboard = contrib("grafana/ocaml-probes.json");
    let json: Value = serde_json::from_str(&fs::read_to_string(&dashboard).unwrap()).unwrap();
    assert!(json["panels"].as_array().unwrap().len() > 5);
    for file in [
        &docs,
        &dashboard,
        &contrib("prometheus/ocaml-probes.rules.yml"),
    ] {
        let text = fs::read_to_string(file).unwrap();
        for name in named.find_iter(&text).map(|it| it.as_str()) {
            assert!(names.contains(name), "{name} in {}", file.display());
        }
    }
    let docs = fs::read_to_string(docs).unwrap();
    for line in body.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(docs.contains(&format!("`{name}`")), "docs/serve.md: {name}");
    }
}

#[test]
fn systemd_accepts_the_unit() {
    let unit = fs::read_to_string(contrib("systemd/ocaml-probes-serve.service")).unwrap();
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    assert!(unit.contains("ExecStart=/usr/bin/ocaml-probes serve "));
    let scratch = Scratch::new();
    let unit = unit.replace("/usr/bin/ocaml-probes", tool);
    let file = scratch.file("ocaml-probes-serve.service");
    fs::write(&file, unit).unwrap();
    let mut verify = Command::new("systemd-analyze");
    let verified = output(verify.args(["verify", "--man=no"]).arg(&file));
    let said = String::from_utf8_lossy(&verified.stderr);
    // What it says of other units of the machine does not matter.
    let ours: Vec<&str> = said
        .lines()
        .filter(|it| it.contains("ocaml-probes"))
        .collect();
    assert!(ours.is_empty(), "{ours:#?}");
}

/// Starts a copy of a fixture under a name of its own.
fn named(scratch: &Scratch, name: &str) -> Talker {
    let file = &fixture_forms("gen_ocaml")[0];
    Talker::start(&scratch.copy(file, name))
}

// promise: Serving: Processes that are started while it serves are found by name; one that exits keeps its last figures, which end with it
#[test]
fn processes_come_and_go() {
    let scratch = Scratch::new();
    let mut first = named(&scratch, "coming_and_going");
    let serving = Serving::start("-name coming_and -scan 100ms");
    let mut second = named(&scratch, "coming_and_going2");
    let observed = |pid: i32| {
        let pid = format!("pid=\"{pid}\"");
        let metrics = serving.scrape();
        let mut found = metrics.iter();
        let found = found.find(|(it, _)| it.contains("_process_observed") && it.contains(&pid));
        found.map(|(_, value)| *value)
    };
    eventually("the second is observed", || {
        (observed(second.pid()) == Some(1.0)).then_some(())
    });
    assert_eq!(observed(first.pid()), Some(1.0));
    let hits = |pid: i32| {
        let pid = format!("pid=\"{pid}\"");
        value(&serving.scrape(), &["_hits_total", "shared", &pid])
    };
    second.hits();
    first.hits();
    assert_eq!((hits(first.pid()), hits(second.pid())), (3.0, 3.0));
    let pid = first.pid();
    drop(first);
    eventually("the first is observed no more", || {
        (observed(pid) == Some(0.0)).then_some(())
    });
    second.hits();
    assert_eq!((hits(pid), hits(second.pid())), (3.0, 6.0));
    let metrics = serving.scrape();
    for (state, number) in [("observed", 1.0), ("refused", 0.0), ("exited", 1.0)] {
        let state = format!("state=\"{state}\"");
        assert_eq!(
            value(&metrics, &["ocaml_probes_processes{", &state]),
            number
        );
    }
    serving.end(Signal::SIGTERM);
    assert!(!is_observed(second.pid()));
}

/// Waits until the tool, which looks for programs whose names begin with `name`, has looked at all processes that run
/// now. No other test has programs of such names.
fn wait_for_scan(serving: &Serving, scratch: &Scratch, name: &str) {
    // The scan that finds the second one begins after the one that finds the first.
    for number in [1, 2] {
        let target = named(scratch, &format!("{name}_{number}"));
        eventually("a scan has found it", || {
            let observed = value_of(serving, target.pid(), &["_process_observed"]);
            (observed == Some(1.0)).then_some(())
        });
    }
}

// promise: Serving: A process that is given by its pid keeps its last figures also while it is a zombie, and that is no error
#[test]
fn zombie_keeps_its_last_figures() {
    let scratch = Scratch::new();
    let (mut given, other) = (named(&scratch, "given"), named(&scratch, "other"));
    let pid = given.pid();
    let flags = format!(
        "-pid {pid} -pid {} -name beside_zombie -scan 100ms",
        other.pid()
    );
    let serving = Serving::start(&flags);
    given.hits();
    let hits = || value_of(&serving, pid, &["_hits_total", "shared"]);
    assert_eq!(hits(), Some(3.0));
    // It is a child of this process, which does not wait for it.
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    eventually("it is observed no more", || {
        let observed = value_of(&serving, pid, &["_process_observed"]);
        (observed == Some(0.0)).then_some(())
    });
    wait_for_scan(&serving, &scratch, "beside_zombie");
    assert_eq!(process::state(pid), Some('Z'));
    assert_eq!(hits(), Some(3.0));
    assert_eq!(value_of(&serving, pid, &["_process_refused"]), None);
    let said = serving.end(Signal::SIGTERM);
    let errors = said.iter().filter(|line| object(line)["type"] == "error");
    assert_eq!(errors.count(), 0, "{said:?}");
}

/// Starts a program until it gets this pid; returns `None` if this user cannot choose pids.
fn start_as(file: &Path, pid: i32) -> Option<Talker> {
    for _ in 0..1000 {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        // Another process may have taken it.
        let talker = Talker::start(file);
        if talker.pid() == pid {
            return Some(talker);
        }
    }
    panic!("no process gets the pid {pid}");
}

// promise: Serving: Another process that gets the pid of a given one is not observed
#[test]
fn later_process_of_a_pid_is_not_meant() {
    let scratch = Scratch::new();
    let (given, other) = (named(&scratch, "given"), named(&scratch, "other"));
    let pid = given.pid();
    let flags = format!(
        "-pid {pid} -pid {} -name beside_reused -scan 100ms",
        other.pid()
    );
    let serving = Serving::start(&flags);
    drop(given);
    eventually("it is observed no more", || {
        let observed = value_of(&serving, pid, &["_process_observed"]);
        (observed == Some(0.0)).then_some(())
    });
    let Some(_later) = start_as(&scratch.copy(&fixture_forms("gen_ocaml")[0], "reused"), pid)
    else {
        return;
    };
    wait_for_scan(&serving, &scratch, "beside_reused");
    assert_eq!(value_of(&serving, pid, &["_process_observed"]), Some(0.0));
    assert!(!is_observed(pid));
    serving.end(Signal::SIGTERM);
}

// promise: Serving: A process that another observer observes is a metric and one error; the others are served, and it is observed
//    once it can be
#[test]
fn refused_process_is_a_metric() {
    let scratch = Scratch::new();
    let (mut free, taken) = (named(&scratch, "free"), named(&scratch, "taken"));
    let other = start_observing("count -quiet", taken.pid());
    let flags = format!("-scan 100ms -pid {} -pid {}", free.pid(), taken.pid());
    let serving = Serving::start(&flags);
    let error = serving.error();
    assert_eq!(error["pid"], taken.pid());
    free.hits();
    let metrics = serving.scrape();
    let pid = format!("pid=\"{}\"", taken.pid());
    let kind = format!("reason=\"{}\"", error["kind"].as_str().unwrap());
    assert_eq!(value(&metrics, &["_process_refused", &pid, &kind]), 1.0);
    assert_eq!(value(&metrics, &["_process_observed", &pid]), 0.0);
    let pid_of_free = format!("pid=\"{}\"", free.pid());
    assert_eq!(
        value(&metrics, &["_hits_total", "shared", &pid_of_free]),
        3.0
    );
    crate::count::end(other, Signal::SIGTERM);
    eventually("it is observed", || {
        let metrics = serving.scrape();
        (value(&metrics, &["_process_observed", &pid]) == 1.0).then_some(())
    });
    let said = serving.end(Signal::SIGTERM);
    let errors = said.iter().filter(|line| object(line)["type"] == "error");
    assert_eq!(errors.count(), 0, "{said:?}");
    assert!(!is_observed(free.pid()) && !is_observed(taken.pid()));
}

/// The value of a metric of a process; `None` if it has none.
fn value_of(serving: &Serving, pid: i32, parts: &[&str]) -> Option<f64> {
    let pid = format!("pid=\"{pid}\"");
    let metrics = serving.scrape();
    let has_all = |name: &str| name.contains(&pid) && parts.iter().all(|it| name.contains(it));
    let found = metrics.iter().find(|(name, _)| has_all(name));
    found.map(|(_, value)| *value)
}

// promise: Serving: Of each process that is selected by its name, what it has is served; what it lacks is one error and a
//    metric, and one that has nothing is refused (4 programs)
#[test]
fn programs_that_differ_are_served() {
    let scratch = Scratch::new();
    let mut with_probes = named(&scratch, "differ_probes");
    let functions = Talker::start(&scratch.copy(&program("requests"), "differ_functions"));
    let nothing = Talker::start(&scratch.copy(&program("calls"), "differ_nothing"));
    let flags = "-name differ_ -probe shared -pair shared,nosuch -fn Requests.stop,Nosuch.*";
    let serving = Serving::start(flags);
    with_probes.hits();
    let hits = value_of(&serving, with_probes.pid(), &["_hits_total", "shared"]);
    assert_eq!(hits, Some(3.0));
    for (pid, kind, number) in [
        (with_probes.pid(), "probe.unknown", 1.0),
        (with_probes.pid(), "function.no_match", 2.0),
        (functions.pid(), "probe.unknown", 2.0),
        (functions.pid(), "function.no_match", 1.0),
    ] {
        let reason = format!("reason=\"{kind}\"");
        let missing = value_of(&serving, pid, &["_missing_selections", &reason]);
        assert_eq!(missing, Some(number), "{kind}");
        let observed = value_of(&serving, pid, &["_process_observed"]);
        assert_eq!(observed, Some(1.0));
    }
    let calls = ["_call_duration_seconds_count", "Requests.stop"];
    assert_eq!(value_of(&serving, functions.pid(), &calls), Some(0.0));
    let refused = ["_process_refused", "reason=\"probe.no_probes\""];
    assert_eq!(value_of(&serving, nothing.pid(), &refused), Some(1.0));
    let errors = serving
        .end(Signal::SIGTERM)
        .into_iter()
        .map(|it| object(&it));
    let errors = errors.filter(|it| it["type"] == "error");
    let of = |pid: i32| errors.clone().filter(|it| it["pid"] == pid).count();
    let numbers = [&with_probes, &functions, &nothing].map(|it| of(it.pid()));
    assert_eq!(numbers, [3, 3, 1]);
}

#[test]
fn functions_that_cannot_be_timed_are_left_out() {
    let scratch = Scratch::new();
    let program = scratch.copy(&with_fixed_functions(&scratch, 2), "serve_fixed");
    let target = Talker::start(&program);
    let pid = target.pid();
    let serving = Serving::start("-name serve_fixed -fn main,fixed_2");
    for (metric, number) in [("_process_observed", 1.0), ("_refused_functions", 1.0)] {
        assert_eq!(value_of(&serving, pid, &[metric]), Some(number), "{metric}");
    }
    let calls = ["_call_duration_seconds_count", "\"main\""];
    assert_eq!(value_of(&serving, pid, &calls), Some(0.0));
    serving.end(Signal::SIGTERM);
    assert!(!is_observed(pid));
    // Of one that is given by its pid, everything has to be possible; and something of any.
    for flags in [
        format!("-pid {pid} -fn main,fixed_2"),
        format!("-pid {pid} -fn fixed_2"),
    ] {
        let refused = run(&format!("serve -listen 127.0.0.1:0 {flags}")).failure();
        assert!(refused.contains("cannot be moved"), "{refused}");
    }
}

#[test]
fn programs_without_ocaml_are_left_out() {
    let scratch = Scratch::new();
    let file = scratch.copy(Path::new("/bin/sleep"), "without_ocaml");
    let foreign = Guard::spawn(Command::new(file).arg("1000"));
    let ocaml = Talker::start(&scratch.copy(&program("calls"), "without_probes"));
    for flags in ["-name without_", "-name without_ -gc"] {
        let serving = Serving::start(flags);
        let refused = |pid: i32| value_of(&serving, pid, &["_process_refused"]);
        assert_eq!(refused(foreign.pid()), None, "{flags}");
        assert_eq!(refused(ocaml.pid()), Some(1.0), "{flags}");
        let said = serving.end(Signal::SIGTERM);
        let errors = said.iter().filter(|line| object(line)["type"] == "error");
        assert_eq!(errors.count(), 1, "{said:?}");
    }
}

// promise: Serving: A process that has executed its program anew is observed again at once, whatever `-scan` is (3 ×)
#[test]
fn executed_program_is_observed_at_once() {
    let scratch = Scratch::new();
    let file = scratch.copy(&fixture_forms("exec_self")[0], "anew");
    let mut target = Talker::start(&file);
    let serving = Serving::start("-name anew -scan 1h");
    let pid = target.pid();
    let hits = || value_of(&serving, pid, &["_hits_total"]).unwrap();
    for _ in 0..3 {
        target.hits();
        let before = hits();
        target.ask("exec", "ready");
        eventually("it is observed again", || is_observed(pid).then_some(()));
        assert!(hits() >= before);
    }
    serving.end(Signal::SIGTERM);
}

// promise: Serving: What a killed `serve` leaves is removed by the next one (2 ×)
#[test]
fn next_start_cleans_up_after_kill() {
    for file in fixture_forms("gen_ocaml") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut serving = Serving::start(&format!("-pid {pid}"));
        kill(Pid::from_raw(serving.tool.pid()), Signal::SIGKILL).unwrap();
        serving.tool.guard().wait();
        assert!(is_observed(pid));
        let serving = Serving::start(&format!("-pid {pid}"));
        target.hits();
        assert_eq!(value(&serving.scrape(), &["_hits_total", "shared"]), 3.0);
        serving.end(Signal::SIGTERM);
        assert!(!is_observed(pid));
        target.hits();
    }
}

// promise: Serving: Scrapes are answered, and hits counted, while clients send nothing, half a request, too much, or do not read
//    their answer; these are disconnected (1,000 clients)
#[test]
fn hostile_clients_cost_nothing() {
    // A thousand descriptors.
    let (now, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most.min(4096).max(now), most).unwrap();
    let scratch = Scratch::new();
    let mut target = named(&scratch, "hostile");
    let serving = Serving::start(&format!("-pid {}", target.pid()));
    let requests: [&[u8]; 5] = [
        b"",
        b"GET /metr",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\xff\xff\0\0",
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\nx",
    ];
    let mut clients = Vec::new();
    for index in 0..1000 {
        let mut client = serving.connect();
        // It may be closed already.
        let _ = client.write_all(requests[index % requests.len()]);
        clients.push(client);
        if index % 100 == 99 {
            target.hits();
            let hits = value(&serving.scrape(), &["_hits_total", "shared"]);
            assert_eq!(hits, (3 * (index / 100 + 1)) as f64);
        }
    }
    // More headers, and longer ones, than a request may have.
    for header in [
        "x: y\r\n".repeat(10_000),
        format!("x: {}\r\n", "y".repeat(1 << 20)),
    ] {
        let mut client = serving.connect();
        let request = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\n{header}\r\n");
        let _ = client.write_all(request.as_bytes());
        let mut answer = Vec::new();
        let read = client.read_to_end(&mut answer);
        let is_reset = read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset);
        let answer = String::from_utf8_lossy(&answer);
        assert!(is_reset || answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
    // All are disconnected, within their time.
    for mut client in clients {
        let mut rest = Vec::new();
        if let Err(error) = client.read_to_end(&mut rest) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
    }
    let metrics = serving.scrape();
    assert!(value(&metrics, &["_connections_total"]) >= 1000.0);
    assert!(value(&metrics, &["_connections_closed_total", "too_many"]) > 0.0);
    serving.end(Signal::SIGTERM);
    assert!(!is_observed(target.pid()));
}

// promise: Serving: A client that never reads a page of 4 MB is disconnected
#[test]
fn client_that_never_reads_is_disconnected() {
    let target = Talker::start(&program("service"));
    let bounds: Vec<String> = (1..=64).map(|bound| format!("{bound}us")).collect();
    let flags = format!(
        "-pid {} -fn caml* -buckets {}",
        target.pid(),
        bounds.join(",")
    );
    let serving = Serving::start(&flags);
    let page = serving.get("text/plain").1;
    assert!(page.len() > 4 << 20, "{}", page.len());
    let mut client = serving.connect();
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    client.write_all(request).unwrap();
    eventually("it is disconnected", || {
        let metrics = serving.scrape();
        let closed = value(&metrics, &["_connections_closed_total", "too_slow"]);
        (closed > 0.0).then_some(())
    });
    serving.end(Signal::SIGTERM);
}

// promise: Serving: Nothing but reading is possible, and a web page with a name of its own cannot read from a browser of this machine
#[test]
fn only_the_page_can_be_read() {
    let scratch = Scratch::new();
    let target = named(&scratch, "read_only");
    let serving = Serving::start(&format!("-pid {}", target.pid()));
    for (request, status) in [
        ("GET /metrics HTTP/1.0\r\n\r\n", "200 ok"),
        (
            "GET /metrics?a=b HTTP/1.1\r\nHost: 127.0.0.1:9464\r\n\r\n",
            "200 ok",
        ),
        (
            "HEAD /metrics HTTP/1.1\r\nHost: [::1]:9464\r\n\r\n",
            "200 ok",
        ),
        ("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "200 ok"),
        (
            "GET /etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "404 not found",
        ),
        (
            "GET /../metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "404 not found",
        ),
        (
            "PUT /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "405 method not allowed",
        ),
        (
            "GET /metrics HTTP/1.1\r\nHost: rebound.example\r\n\r\n",
            "403 forbidden",
        ),
        ("nonsense\r\n\r\n", "400 bad request"),
    ] {
        let (head, body) = serving.ask(request);
        assert!(
            head.split("\r\n").next().unwrap().ends_with(status),
            "{request}: {head}"
        );
        assert_eq!(
            body.is_empty(),
            request.starts_with("HEAD") || status.starts_with("400")
        );
    }
    serving.end(Signal::SIGTERM);
}

#[test]
fn wrong_addresses_and_flags_are_refused() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let pid = std::process::id();
    assert_eq!(
        run(&format!("serve -pid {pid} -listen 127.0.0.1:{port}")).failure(),
        format!(
            "ocaml-probes: cannot listen at 127.0.0.1:{port}: Address already in use\n\
             hint: `ss -ltnp sport = {port}` shows which process listens there; \
             -listen 127.0.0.1:0 takes any port that is free\n"
        )
    );
    for (flags, why) in [
        ("-listen 127.0.0.1:0", "-pid"),
        (
            "-pid 7 -listen localhost",
            "\"localhost\" is not ADDRESS:PORT",
        ),
        (
            "-pid 7 -fn f -buckets 1ms,1us",
            "larger than the one before",
        ),
        (
            "-pid 7 -scan 1ms",
            "1ms is too short; 100ms is the shortest",
        ),
        ("-pid 7 -key arg0", "-key needs -pair"),
    ] {
        let refused = run(&format!("serve {flags}"));
        assert_eq!(refused.code, Some(2), "{flags}");
        assert!(refused.stderr.contains(why), "{flags}: {}", refused.stderr);
    }
    let gone = run("serve -pid 2147483647 -listen 127.0.0.1:0").failure();
    assert!(gone.contains("2147483647"), "{gone}");
}

#[test]
fn name_without_process_is_waited_for() {
    let scratch = Scratch::new();
    let serving = Serving::start("-name born_after_the_exporter -scan 100ms");
    let mut metrics = serving.scrape();
    assert_eq!(value(&metrics, &["ocaml_probes_up"]), 1.0);
    assert_eq!(
        value(&metrics, &["ocaml_probes_processes{", "observed"]),
        0.0
    );
    let _target = named(&scratch, "born_after_the_exporter");
    eventually("it is observed", || {
        metrics = serving.scrape();
        (value(&metrics, &["ocaml_probes_processes{", "observed"]) == 1.0).then_some(())
    });
    serving.end(Signal::SIGTERM);
}

#[test]
fn other_machines_are_warned_of() {
    let scratch = Scratch::new();
    let target = named(&scratch, "everybody");
    let serving = Serving::start(&format!("-pid {}", target.pid()));
    let quiet = serving.end(Signal::SIGTERM);
    assert!(
        quiet.iter().all(|line| !line.contains("not_loopback")),
        "{quiet:?}"
    );
    let any = Ipv6Addr::UNSPECIFIED;
    // A machine may have no IPv6.
    let address = match TcpListener::bind((any, 0)) {
        Ok(_) => format!("[{any}]:0"),
        Err(_) => "0.0.0.0:0".to_owned(),
    };
    let line = format!("serve -json -listen {address} -pid {}", target.pid());
    let mut tool = Talker::spawn(command(line.split(' ')).stderr(Stdio::piped()));
    let serving = object(&tool.line().unwrap());
    let port = serving["port"].as_u64().unwrap() as u16;
    let mut client = TcpStream::connect(("localhost", port)).unwrap();
    // The names of this machine are known to those who read from elsewhere.
    client
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: server.example\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    let mut said = String::new();
    let mut stderr = tool.guard().child().stderr.take().unwrap();
    stderr.read_to_string(&mut said).unwrap();
    assert!(said.contains("\"kind\":\"not_loopback\""), "{said}");
    assert_eq!(tool.guard().wait().code(), Some(0));
}
