//! A running `serve`, scraped by tests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::{DEADLINE, Talker};

use crate::support::{command, object};

/// A running `serve`, with its port, and what it says on standard error.
pub(crate) struct Serving {
    pub(crate) tool: Talker,
    pub(crate) port: u16,
    said: Receiver<String>,
}

impl Serving {
    /// Starts it, and waits until it serves.
    pub(crate) fn start(flags: &str) -> Serving {
        Serving::of(command([""; 0]), flags)
    }

    /// The same, of this tool.
    pub(crate) fn of(mut tool: Command, flags: &str) -> Serving {
        let line = format!("serve -json -listen 127.0.0.1:0 {flags}");
        tool.args(line.split(' ')).stderr(Stdio::piped());
        let mut tool = Talker::spawn(&mut tool);
        let stderr = tool.guard().child().stderr.take().unwrap();
        let (sender, said) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(stderr).lines().map_while(Result::ok);
            lines.for_each(|line| drop(sender.send(line)));
        });
        let Some(line) = tool.line() else {
            panic!("{flags}: {:?}", said.iter().collect::<Vec<_>>());
        };
        let serving = object(&line);
        assert_eq!(serving["type"], "serving");
        let port = serving["port"].as_u64().unwrap() as u16;
        let url = format!("http://127.0.0.1:{port}/metrics");
        assert_eq!(serving["url"], url);
        Serving { tool, port, said }
    }

    /// The next error that it reports.
    pub(crate) fn error(&self) -> Value {
        loop {
            let said = object(&self.said.recv_timeout(DEADLINE).unwrap());
            if said["type"] == "error" {
                return said;
            }
        }
    }

    /// Waits until a line of what it says contains this text.
    pub(crate) fn wait_until_said(&self, text: &str) {
        while !self.said.recv_timeout(DEADLINE).unwrap().contains(text) {}
    }

    /// The metrics of a scrape, with their labels.
    pub(crate) fn scrape(&self) -> BTreeMap<String, f64> {
        let (head, body) = self.get("application/openmetrics-text; version=1.0.0");
        assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"));
        assert!(body.ends_with("\n# EOF\n"), "{body}");
        let samples = body.lines().filter(|line| !line.starts_with('#'));
        let samples = samples.map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        });
        samples.collect()
    }

    pub(crate) fn get(&self, accept: &str) -> (String, String) {
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n");
        self.ask(&request)
    }

    /// The head and the body of the answer to a request.
    pub(crate) fn ask(&self, request: &str) -> (String, String) {
        let mut client = self.connect();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let client = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        client
    }

    /// Ends it by a signal: it succeeds.
    pub(crate) fn end(mut self, signal: Signal) -> Vec<String> {
        kill(Pid::from_raw(self.tool.pid()), signal).unwrap();
        assert_eq!(self.tool.guard().wait().code(), Some(0));
        self.said.iter().collect()
    }
}

/// The value of the only metric whose name and labels have all these parts.
#[track_caller]
pub(crate) fn value(metrics: &BTreeMap<String, f64>, parts: &[&str]) -> f64 {
    let has_all = |name: &str| parts.iter().all(|part| name.contains(part));
    let mut found = metrics.iter().filter(|(name, _)| has_all(name));
    let Some((_, value)) = found.next() else {
        panic!("no {parts:?}: {metrics:#?}");
    };
    assert!(found.next().is_none(), "{parts:?}");
    *value
}
