//! Long-running commands: what `record` and `serve` cost while they run; and how long `completion` takes to answer.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::{Guard, Scratch, Talker, eventually, process};

use crate::cost;
use crate::document::{Table, mib, ms};
use crate::failure::{Failure, Result};
use crate::programs::{BURST, CALLS};
use crate::ps::Processes;
use crate::stats::Samples;

/// For how long each command is measured.
const MEASURED: Duration = Duration::from_secs(5);

/// How long the program calls its functions, in milliseconds: 1,000 calls, then a pause of 1 ms, over and over.
const BURSTS: u64 = 2 * MEASURED.as_millis() as u64;

/// Of each process, about a hundred series.
const SERVED: usize = 50;
const FUNCTIONS: &str = "Calls.leaf,Calls.deep,Calls.raises,Calls.work,Calls.run,Calls.fork";

/// The tool while it runs.
struct LastingCommand {
    guard: Guard,
    output: BufReader<ChildStdout>,
    cpu: ClockId,
}

impl LastingCommand {
    fn start(tool: &Path, args: &[impl AsRef<OsStr>]) -> Result<LastingCommand> {
        let mut command = Command::new(tool);
        command.args(args).env_remove(cost::SET_BY_CARGO);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut guard = Guard::spawn(command.stderr(Stdio::null()));
        let output = guard.child().stdout.take();
        let output = output.ok_or_else(|| Failure::new("the tool has no output"))?;
        let cpu = clock_getcpuclockid(Pid::from_raw(guard.pid()));
        Ok(LastingCommand {
            cpu: cpu.map_err(Failure::of("cannot read the times of the tool"))?,
            output: BufReader::new(output),
            guard,
        })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line);
        read.map_err(Failure::of("cannot read what the tool says"))?;
        Ok(line.trim_end().to_owned())
    }

    /// Returns what it has cost so far.
    fn cpu(&self) -> Result<Duration> {
        let now = clock_gettime(self.cpu);
        now.map(Duration::from)
            .map_err(Failure::of("the tool has exited"))
    }

    /// Returns the share of a processor that it takes while `work` is done.
    fn share_during(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (begun, before) = (Instant::now(), self.cpu()?);
        work()?;
        let cpu = self.cpu()? - before;
        Ok(cpu.as_secs_f64() / begun.elapsed().as_secs_f64())
    }

    fn peak_kib(&self) -> u64 {
        let peak = process::status(self.guard.pid(), "VmHWM");
        let number = peak.split_whitespace().next();
        number.and_then(|it| it.parse().ok()).unwrap_or(0)
    }

    /// Ends it; returns what it says then.
    fn end(mut self) -> Result<String> {
        let ended = kill(Pid::from_raw(self.guard.pid()), Signal::SIGINT);
        ended.map_err(Failure::of("cannot end the tool"))?;
        let mut rest = String::new();
        let read = self.output.read_to_string(&mut rest);
        read.map_err(Failure::of("cannot read what the tool says"))?;
        let status = self.guard.wait();
        if !status.success() {
            return Err(Failure::new(format!("the tool failed with {status}")));
        }
        Ok(rest)
    }
}

/// What `record` costs at nearly a million calls a second.
pub(crate) fn record(targets: &Path, tool: &Path) -> Result<String> {
    let mut table = Table::new(&[
        "command",
        "calls a second",
        "of a processor",
        "CPU for a call",
        "memory",
        "file, for a call",
        "lost hits",
    ]);
    for flags in ["", " -last 10s"] {
        eprintln!("bench: record{flags}");
        let mut talker = Talker::start(&targets.join(BURST));
        let scratch = Scratch::new();
        let file = scratch.file("bench.perfetto-trace");
        talker.send(&format!("bursts 1 {BURSTS}"));
        let line = format!("record -json -fn burst -pid {}{flags} -o", talker.pid());
        let mut args: Vec<&OsStr> = line.split(' ').map(OsStr::new).collect();
        args.push(file.as_os_str());
        let tool = LastingCommand::start(tool, &args)?;
        eventually("it records", || file.exists().then_some(()));
        let share = tool.share_during(|| {
            std::thread::sleep(MEASURED);
            Ok(())
        })?;
        let memory = tool.peak_kib();
        let said = tool.end()?;
        let said: Value = serde_json::from_str(&said).map_err(Failure::of("record says"))?;
        let number = |name: &str| said[name].as_f64().unwrap_or(0.0);
        let (slices, lost) = (number("slices"), number("lost_hits"));
        let kept = said["last_seconds"].as_f64().unwrap_or(number("seconds"));
        let rate = slices / kept;
        table.row([
            format!("`record{flags}`"),
            format!("{rate:.0}"),
            format!("{:.1} %", 100.0 * share),
            format!("{:.0} ns", 1e9 * share / rate),
            mib(memory),
            format!("{:.1} bytes", number("bytes") / slices),
            lost.to_string(),
        ]);
    }
    Ok(table.finish())
}

/// What `serve` costs with many processes, scraped once a second.
pub(crate) fn serve(targets: &Path, tool: &Path) -> Result<String> {
    eprintln!("bench: serve");
    let mut table = Table::new(&[
        "processes",
        "series",
        "of a processor",
        "memory",
        "an answer takes, median",
        "largest",
    ]);
    let processes = Processes::start(targets, &[CALLS], SERVED)?;
    let mut args: Vec<String> = ["serve", "-listen", "127.0.0.1:0", "-fn", FUNCTIONS]
        .map(str::to_owned)
        .to_vec();
    for pid in processes.pids() {
        args.extend(["-pid".to_owned(), pid.to_string()]);
    }
    let mut tool = LastingCommand::start(tool, &args)?;
    let url = tool.line()?;
    let address = url
        .strip_prefix("http://")
        .and_then(|it| it.split_once('/'));
    let (address, _) = address.ok_or_else(|| Failure::new(format!("serve says {url:?}")))?;
    let series = scrape(address)?;
    let mut answers = Samples::default();
    let share = tool.share_during(|| {
        let begun = Instant::now();
        for second in 1..=2 * MEASURED.as_secs() {
            let asked = Instant::now();
            scrape(address)?;
            answers.push_time(asked.elapsed());
            std::thread::sleep(Duration::from_secs(second).saturating_sub(begun.elapsed()));
        }
        Ok(())
    })?;
    let memory = tool.peak_kib();
    tool.end()?;
    table.row([
        SERVED.to_string(),
        series.to_string(),
        format!("{:.1} %", 100.0 * share),
        mib(memory),
        ms(answers.median()),
        ms(answers.max()),
    ]);
    Ok(table.finish())
}

/// Scrapes; returns how many series there are.
fn scrape(address: &str) -> Result<usize> {
    let failed = || Failure::of("cannot scrape");
    let mut stream = TcpStream::connect(address).map_err(failed())?;
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(failed())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed())?;
    let (head, page) = answer.split_once("\r\n\r\n").unwrap_or_default();
    if !head.starts_with("HTTP/1.1 200") {
        return Err(Failure::new(format!("serve answers {head:?}")));
    }
    Ok(page.lines().filter(|line| !line.starts_with('#')).count())
}

/// How long the shell waits for the next word of a command line.
pub(crate) fn completion(targets: &Path, tool: &Path, rounds: usize) -> Result<String> {
    eprintln!("bench: completion");
    let mut table = Table::new(&["what is completed", "took, median", "largest"]);
    let processes = Processes::start(targets, &[CALLS], SERVED)?;
    let pid = processes.pids().next().unwrap_or_default().to_string();
    for (what, words) in [
        ("flags", &["latency", "-"][..]),
        ("pids", &["info", "-pid", ""]),
        (
            "functions of a process",
            &["count", "-pid", &pid, "-fn", "Cal"],
        ),
    ] {
        let mut took = Samples::default();
        for _ in 0..rounds {
            let mut command = Command::new(tool);
            command.args(["completion", "-answer", "--"]).args(words);
            let begun = Instant::now();
            let output = test_support::output(command.env_remove(cost::SET_BY_CARGO));
            took.push_time(begun.elapsed());
            if output.stdout.is_empty() {
                return Err(Failure::new(format!("there is no completion of {words:?}")));
            }
        }
        table.row([what.to_owned(), ms(took.median()), ms(took.max())]);
    }
    Ok(table.finish())
}
