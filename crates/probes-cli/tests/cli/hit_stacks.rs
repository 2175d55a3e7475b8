//! What `watch -stack -json` says, for the tests here and in the matrix.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::Talker;

use crate::support::{command, object};

/// A `watch -stack -json` that observes a process.
pub(crate) struct StackWatch(Talker);

impl StackWatch {
    /// Waits until it observes.
    pub(crate) fn begin(pid: i32, flags: &str) -> StackWatch {
        let line = format!("watch -json -pid {pid} {flags}");
        let mut tool = Talker::spawn(command(line.split(' ')).stderr(Stdio::piped()));
        let stderr = tool.guard().child().stderr.take().unwrap();
        let mut errors = BufReader::new(stderr);
        let mut said = String::new();
        while !said.contains("stopped ") {
            assert!(errors.read_line(&mut said).unwrap() > 0, "{said}");
        }
        StackWatch(tool)
    }

    /// Interrupts it; returns the hits.
    pub(crate) fn end(self) -> Vec<Value> {
        kill(Pid::from_raw(self.0.pid()), Signal::SIGINT).unwrap();
        self.until_end()
    }

    /// Returns the hits, once it has shown as many as it is to show.
    pub(crate) fn until_end(mut self) -> Vec<Value> {
        let mut hits = Vec::new();
        while let Some(line) = self.0.line() {
            // Where it is interrupted, its last line may be cut.
            if !line.ends_with('}') {
                break;
            }
            let object = object(&line);
            if object["type"] == "hit" {
                hits.push(object);
            }
        }
        assert!(self.0.guard().wait().success());
        hits
    }
}

/// The stacks of the last hit of each thread.
pub(crate) fn last_stacks(hits: Vec<Value>) -> HashMap<i32, Value> {
    let of_thread = |hit: Value| {
        let tid = hit["thread"].as_i64().unwrap() as i32;
        (tid, hit["stack"].clone())
    };
    hits.into_iter().map(of_thread).collect()
}

/// Returns whether the callers in `stack`, of which there is at least one, are among the frames of `whole`, or are
/// its last ones if `stack` `is_whole`.
pub(crate) fn has_callers(whole: &[u64], stack: &[u64], is_whole: bool) -> bool {
    let callers = &stack[1..];
    let is_among = whole.windows(callers.len().max(1)).any(|it| it == callers);
    is_among && (!is_whole || whole.ends_with(callers))
}
