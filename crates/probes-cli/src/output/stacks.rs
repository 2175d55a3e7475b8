//! What the threads of a process do, in one shape for all formats. The field names are those of the JSON output.

use std::fmt::Write;
use std::path::Path;

use probes_lib::{StackFrame, StackReport, ThreadStack, ThreadState, WaitsFor};
use serde::Serialize;

use super::format::{Format, VERSION, json};
use crate::failure::Failure;

/// The stacks of all threads of a process.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "stacks")]
pub(crate) struct ThreadStacks {
    version: u32,
    pid: i32,
    program: String,
    /// How long the process was stopped for it.
    stopped_us: Option<u64>,
    threads: Vec<Thread>,
}

#[derive(Debug, Serialize)]
struct Thread {
    tid: i32,
    name: String,
    role: &'static str,
    state: &'static str,
    system_call: Option<Call>,
    /// The function of the kernel that it waits in.
    kernel_function: Option<String>,
    /// complete, guessed, cut or unread
    stack: &'static str,
    /// Why it is cut.
    cut: Option<String>,
    frames: Vec<Frame>,
}

#[derive(Debug, Serialize)]
struct Call {
    number: u32,
    name: Option<&'static str>,
    /// In words.
    waits_for: Option<String>,
    /// The descriptor of the file that it waits for.
    descriptor: Option<i32>,
}

#[derive(Debug, Serialize)]
struct Frame {
    address: String,
    function: Option<String>,
    /// From the beginning of the function, in bytes.
    offset: Option<u64>,
    object: Option<String>,
    file: Option<String>,
    line: Option<u32>,
}

impl Frame {
    fn of(frame: &StackFrame) -> Frame {
        Frame {
            address: frame.address.to_string(),
            function: frame.function.clone(),
            offset: frame.offset,
            object: frame.object.as_ref().map(|it| it.display().to_string()),
            file: frame.file.clone(),
            line: frame.line,
        }
    }

    /// The last part of the path of its object.
    fn object_name(&self) -> Option<&str> {
        let object = self.object.as_deref()?;
        Some(object.rsplit('/').next().unwrap_or(object))
    }

    fn location(&self) -> Option<String> {
        let file = self.file.as_deref()?;
        Some(match self.line {
            Some(line) => format!("{file}:{line}"),
            None => file.to_owned(),
        })
    }
}

impl Thread {
    fn of(thread: &ThreadStack) -> Thread {
        let (state, system_call) = match &thread.state {
            ThreadState::Running => ("running", None),
            ThreadState::Waiting => ("waiting", None),
            ThreadState::Stopped => ("stopped", None),
            ThreadState::Blocked { call, waits_for } => {
                let descriptor = match waits_for {
                    Some(WaitsFor::File { descriptor, .. }) => Some(*descriptor),
                    _ => None,
                };
                let call = Call {
                    number: call.number,
                    name: call.name(),
                    waits_for: waits_for.as_ref().map(ToString::to_string),
                    descriptor,
                };
                ("blocked", Some(call))
            }
            _ => ("unknown", None),
        };
        let stack = match thread.end {
            None => "unread",
            Some(_) if thread.is_complete() => "complete",
            Some(_) if thread.is_guessed => "guessed",
            Some(_) => "cut",
        };
        let cut = thread.end.filter(|_| stack == "cut");
        Thread {
            tid: thread.tid,
            name: thread.name.clone(),
            role: thread.role.into(),
            state,
            system_call,
            kernel_function: thread.kernel_function.clone(),
            stack,
            cut: cut.map(|end| end.to_string()),
            frames: thread.frames.iter().map(|it| Frame::of(it)).collect(),
        }
    }

    fn waits_for(&self) -> Option<&str> {
        self.system_call.as_ref()?.waits_for.as_deref()
    }

    fn plain(&self, text: &mut String) {
        let call = match &self.system_call {
            None => "-".to_owned(),
            Some(call) => call
                .name
                .map_or_else(|| call.number.to_string(), str::to_owned),
        };
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "thread {} {} {} {call} {} {} {}",
            self.tid,
            self.role,
            self.state,
            self.kernel_function.as_deref().unwrap_or("-"),
            self.stack,
            self.name,
        );
        if let Some(waits_for) = self.waits_for() {
            let _ = writeln!(text, "waits for {}", waits_for);
        }
        for frame in &self.frames {
            let or_not = |text: Option<&str>| text.unwrap_or("-").to_owned();
            let _ = writeln!(
                text,
                "frame {} {} {} {}",
                frame.address,
                or_not(frame.function.as_deref()),
                or_not(frame.object.as_deref()),
                or_not(frame.location().as_deref()),
            );
        }
        if let Some(cut) = &self.cut {
            let _ = writeln!(text, "cut: {cut}");
        }
    }

    fn table(&self, text: &mut String, role: impl std::fmt::Display) {
        let _ = write!(
            text,
            "{} \"{}\" {role}: {}",
            self.tid, self.name, self.state
        );
        if let Some(call) = &self.system_call {
            let name = call
                .name
                .map_or_else(|| call.number.to_string(), str::to_owned);
            let _ = write!(text, " in {name}");
        }
        if let Some(waits_for) = self.waits_for() {
            let _ = write!(text, ", waits for {}", waits_for);
        }
        text.push('\n');
        for frame in &self.frames {
            let name = match (&frame.function, frame.object_name()) {
                (Some(function), _) => function.clone(),
                (None, Some(object)) => format!("{} in {object}", frame.address),
                (None, None) => frame.address.clone(),
            };
            let place = frame.location().or_else(|| {
                let object = frame.object_name().filter(|_| frame.function.is_some());
                object.map(|object| format!("in {object}"))
            });
            let _ = write!(text, "    {}", name);
            if let Some(place) = place {
                let _ = write!(text, "  {}", place);
            }
            text.push('\n');
        }
        match self.stack {
            "cut" => {
                let cut = self.cut.as_deref().unwrap_or_default();
                let _ = writeln!(text, "    (cut: {cut})");
            }
            "guessed" => text.push_str("    (guessed: a register was not known)\n"),
            "unread" => text.push_str("    (not read: it was running)\n"),
            _ => {}
        }
        text.push('\n');
    }
}

impl ThreadStacks {
    pub(crate) fn new(pid: i32, program: &Path, report: &StackReport) -> ThreadStacks {
        ThreadStacks {
            version: VERSION,
            pid,
            program: program.to_string_lossy().into_owned(),
            stopped_us: report.stopped.map(|time| time.as_micros() as u64),
            threads: report.threads.iter().map(Thread::of).collect(),
        }
    }

    pub(crate) fn text(&self, format: Format) -> Result<String, Failure> {
        let mut text = String::new();
        match format {
            Format::Json => return json(self),
            Format::Plain => self.threads.iter().for_each(|it| it.plain(&mut text)),
            Format::Table => {
                for thread in &self.threads {
                    thread.table(&mut text, in_words(thread.role));
                }
            }
        }
        Ok(text)
    }
}

/// What a thread is, for people.
fn in_words(role: &str) -> &str {
    match role {
        "main" => "main thread",
        "tick" => "tick thread",
        "backup" => "backup thread",
        "other" => "thread",
        role => role,
    }
}
