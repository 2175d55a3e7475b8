//! What the threads of a process do, in one shape for all formats. The field names are those of the JSON output.

use std::fmt::Write;
use std::path::Path;

use probes_lib::{
    HitStack, StackEnd, StackFrame, StackReport, ThreadRole, ThreadStack, ThreadState, WaitsFor,
};
use serde::Serialize;

use super::format::{Format, VERSION, json, word};
use super::stack_quality::StackQuality;
use crate::failure::Failure;
use crate::text::Escaped;

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
    #[serde(serialize_with = "word")]
    role: ThreadRole,
    /// Of OCaml 5.
    domain: Option<u32>,
    state: &'static str,
    system_call: Option<Call>,
    /// The function of the kernel that it waits in.
    kernel_function: Option<String>,
    stack: StackQuality,
    /// Why it is cut.
    cut: Option<String>,
    frames: Vec<Frame>,
}

/// The stack of a hit.
#[derive(Debug, Serialize)]
pub(crate) struct FoundStack {
    #[serde(rename = "state")]
    quality: StackQuality,
    /// Why it is cut.
    cut: Option<String>,
    frames: Vec<Frame>,
    /// How many more frames were found.
    left_out: usize,
}

#[derive(Debug, Serialize)]
struct Call {
    number: u32,
    name: Option<&'static str>,
    /// In words.
    waits_for: Option<String>,
    /// The descriptor of the file that it waits for.
    descriptor: Option<i32>,
    /// The other end of the socket that it waits for.
    peer: Option<String>,
    /// The thread that holds the mutex that it waits for.
    owner: Option<i32>,
    /// The process that it waits for.
    child: Option<i32>,
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

    fn plain(&self, text: &mut String) {
        let or_not = |text: Option<&str>| Escaped(text.unwrap_or("-")).to_string();
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "frame {} {} {} {}",
            self.address,
            or_not(self.function.as_deref()),
            or_not(self.object.as_deref()),
            or_not(self.location().as_deref()),
        );
    }

    fn table(&self, text: &mut String) {
        let name = match (&self.function, self.object_name()) {
            (Some(function), _) => function.clone(),
            (None, Some(object)) => format!("{} in {object}", self.address),
            (None, None) => self.address.clone(),
        };
        let place = self.location().or_else(|| {
            let object = self.object_name().filter(|_| self.function.is_some());
            object.map(|object| format!("in {object}"))
        });
        let _ = write!(text, "    {}", Escaped(&name));
        if let Some(place) = place {
            let _ = write!(text, "  {}", Escaped(&place));
        }
        text.push('\n');
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

/// Says what is wrong with a stack.
fn note(quality: StackQuality, cut: Option<&str>, text: &mut String) {
    match quality {
        StackQuality::Complete => {}
        StackQuality::Cut => {
            let _ = writeln!(text, "    (cut: {})", cut.unwrap_or_default());
        }
        StackQuality::Guessed => text.push_str("    (guessed: a register was not known)\n"),
        StackQuality::Unread => text.push_str("    (not read: it was running)\n"),
    }
}

/// Says why a stack ends too early, if it does.
fn cut(quality: StackQuality, end: Option<StackEnd>) -> Option<String> {
    let end = end.filter(|_| quality == StackQuality::Cut);
    end.map(|end| end.to_string())
}

impl FoundStack {
    /// The innermost frames of the stack of a hit, at most `most`.
    pub(crate) fn of(stack: &HitStack, most: usize) -> FoundStack {
        let frames = stack.frames.iter().take(most);
        let frames: Vec<Frame> = frames.map(|it| Frame::of(it)).collect();
        let quality = StackQuality::of(Some(stack.end), stack.is_guessed);
        FoundStack {
            quality,
            cut: cut(quality, Some(stack.end)),
            left_out: stack.frames.len() - frames.len(),
            frames,
        }
    }

    /// The lines below that of its hit.
    pub(crate) fn lines(&self, format: Format) -> String {
        let mut text = String::new();
        for frame in &self.frames {
            match format {
                Format::Table => frame.table(&mut text),
                _ => frame.plain(&mut text),
            }
        }
        // Writing to a String does not fail.
        let _ = match (self.left_out, format) {
            (0, _) => Ok(()),
            (more, Format::Table) => writeln!(text, "    ({more} more)"),
            (more, _) => writeln!(text, "more {more}"),
        };
        match (&self.cut, format) {
            (_, Format::Table) => note(self.quality, self.cut.as_deref(), &mut text),
            (Some(cut), _) => {
                let _ = writeln!(text, "cut: {cut}");
            }
            (None, _) if self.quality == StackQuality::Guessed => text.push_str("guessed\n"),
            (None, _) => {}
        }
        text
    }
}

impl Thread {
    fn of(thread: &ThreadStack) -> Thread {
        let (state, system_call) = match &thread.state {
            ThreadState::Running => ("running", None),
            ThreadState::Waiting => ("waiting", None),
            ThreadState::Stopped => ("stopped", None),
            ThreadState::Frozen => ("frozen", None),
            ThreadState::Blocked { call, waits_for } => {
                let mut shown = Call {
                    number: call.number,
                    name: call.name(),
                    waits_for: waits_for.as_ref().map(ToString::to_string),
                    descriptor: None,
                    peer: None,
                    owner: None,
                    child: None,
                };
                match waits_for {
                    Some(WaitsFor::File {
                        descriptor, peer, ..
                    }) => {
                        shown.descriptor = Some(*descriptor);
                        shown.peer = peer.as_ref().map(ToString::to_string);
                    }
                    Some(WaitsFor::Futex { owner, .. }) => shown.owner = *owner,
                    Some(WaitsFor::Child { pid }) => shown.child = *pid,
                    _ => {}
                }
                ("blocked", Some(shown))
            }
            _ => ("unknown", None),
        };
        let stack = StackQuality::of(thread.end, thread.is_guessed);
        Thread {
            tid: thread.tid,
            name: thread.name.clone(),
            role: thread.role,
            domain: thread.domain,
            state,
            system_call,
            kernel_function: thread.kernel_function.clone(),
            stack,
            cut: cut(stack, thread.end),
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
            <&str>::from(self.role),
            self.state,
            self.kernel_function.as_deref().unwrap_or("-"),
            self.stack,
            Escaped(&self.name),
        );
        if let Some(domain) = self.domain {
            let _ = writeln!(text, "domain {domain}");
        }
        if let Some(waits_for) = self.waits_for() {
            let _ = writeln!(text, "waits for {}", Escaped(waits_for));
        }
        for frame in &self.frames {
            frame.plain(text);
        }
        if let Some(cut) = &self.cut {
            let _ = writeln!(text, "cut: {cut}");
        }
    }

    fn table(&self, text: &mut String) {
        let role = in_words(self.role, self.domain);
        let _ = write!(
            text,
            "{} \"{}\" {role}: {}",
            self.tid,
            Escaped(&self.name),
            self.state
        );
        if let Some(call) = &self.system_call {
            let name = call
                .name
                .map_or_else(|| call.number.to_string(), str::to_owned);
            let _ = write!(text, " in {name}");
        }
        if let Some(waits_for) = self.waits_for() {
            let _ = write!(text, ", waits for {}", Escaped(waits_for));
        }
        text.push('\n');
        for frame in &self.frames {
            frame.table(text);
        }
        note(self.stack, self.cut.as_deref(), text);
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
                    thread.table(&mut text);
                }
            }
        }
        Ok(text)
    }
}

/// What a thread is, and of which domain, for people.
pub(super) fn in_words(role: ThreadRole, domain: Option<u32>) -> String {
    let words = match role {
        ThreadRole::Main => "main thread",
        ThreadRole::Tick => "tick thread",
        ThreadRole::Backup => "backup thread",
        ThreadRole::Other => "thread",
        role => role.into(),
    };
    match domain {
        None => words.to_owned(),
        Some(domain) if role == ThreadRole::Domain => format!("domain {domain}"),
        Some(domain) => format!("{words} of domain {domain}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_named_with_their_domains() {
        let words = [
            (ThreadRole::Main, None),
            (ThreadRole::Main, Some(0)),
            (ThreadRole::Domain, None),
            (ThreadRole::Domain, Some(3)),
            (ThreadRole::Backup, Some(3)),
            (ThreadRole::Other, Some(0)),
        ];
        assert_eq!(
            words.map(|(role, domain)| in_words(role, domain)),
            [
                "main thread",
                "main thread of domain 0",
                "domain",
                "domain 3",
                "backup thread of domain 3",
                "thread of domain 0"
            ]
        );
    }

    #[test]
    fn names_of_threads_do_not_control_terminals() {
        let thread = Thread {
            tid: 7,
            name: "\x1b[31mX\nframe y".to_owned(),
            role: ThreadRole::Other,
            domain: None,
            state: "running",
            system_call: None,
            kernel_function: None,
            stack: StackQuality::Unread,
            cut: None,
            frames: Vec::new(),
        };
        let mut plain = String::new();
        thread.plain(&mut plain);
        assert_eq!(
            plain,
            "thread 7 other running - - unread \\u{1b}[31mX\\nframe y\n"
        );
        let mut table = String::new();
        thread.table(&mut table);
        assert!(table.starts_with("7 \"\\u{1b}[31mX\\nframe y\" thread: running\n"));
    }
}
