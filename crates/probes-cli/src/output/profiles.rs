//! Where the time of a process goes, in one shape for all formats, and as pictures and files for other tools.

mod pprof;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use inferno::flamegraph;
use probes_lib::{Activity, Profile, ProfiledStack, ThreadRole, ThreadTimes};
use serde::Serialize;
use serde_json::json;

use super::format::{Format, VERSION, json};
use super::table::table;
use crate::failure::Failure;

/// What has less of the time is not drawn, in percent.
const LEAST_DRAWN: f64 = 0.2;

/// What times are added up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProfileBy {
    Function,
    Stack,
    Thread,
    Syscall,
}

impl ProfileBy {
    pub(crate) fn parse(typed: &str) -> Result<ProfileBy, String> {
        Ok(match typed {
            "function" => ProfileBy::Function,
            "stack" => ProfileBy::Stack,
            "thread" => ProfileBy::Thread,
            "syscall" => ProfileBy::Syscall,
            _ => {
                return Err(format!(
                    "\"{typed}\" is not a key: there are function, stack, thread and syscall"
                ));
            }
        })
    }
}

/// A form of the file of -o.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PictureKind {
    Svg,
    Folded,
    Speedscope,
    Pprof,
}

impl PictureKind {
    /// What the name of a file asks for.
    pub(crate) fn of(path: &Path) -> Option<PictureKind> {
        let name = path.file_name()?.to_str()?;
        Some(if name.ends_with(".svg") {
            PictureKind::Svg
        } else if name.ends_with(".folded") {
            PictureKind::Folded
        } else if name.ends_with(".json") {
            PictureKind::Speedscope
        } else if name.ends_with(".pb.gz") {
            PictureKind::Pprof
        } else {
            return None;
        })
    }
}

/// Where the time went.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "profile")]
pub(crate) struct ProfileReport {
    version: u32,
    pid: i32,
    program: String,
    /// How long the process was watched.
    seconds: f64,
    samples: u64,
    threads: usize,
    times: Option<Times>,
    stops: u64,
    stopped_seconds: f64,
    /// The time of threads that only work for the runtime.
    idle_seconds: f64,
    /// The times while some thread worked for the collector; only if that is told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_collection: Option<Split>,
    #[serde(skip)]
    by: ProfileBy,
    functions: Vec<Function>,
    stacks: Vec<Stack>,
}

#[derive(Debug, Serialize)]
struct Times {
    running_seconds: f64,
    runnable_seconds: f64,
    off_seconds: f64,
}

/// Sampled times.
#[derive(Debug, Serialize)]
struct Split {
    running_seconds: f64,
    off_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Function {
    function: String,
    self_seconds: f64,
    total_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Stack {
    tid: i32,
    thread: String,
    /// running, blocked, waiting or stopped
    state: &'static str,
    /// The system call that it waited in.
    system_call: Option<String>,
    seconds: f64,
    samples: u64,
    /// complete, guessed, cut or unread
    stack: &'static str,
    /// The innermost first.
    frames: Vec<String>,
    /// Only if that is told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_collection: Option<bool>,
    #[serde(skip)]
    time: Duration,
}

impl Stack {
    fn of(stack: &ProfiledStack, tells_collections: bool) -> Stack {
        let (state, system_call) = match stack.activity {
            Activity::Running => ("running", None),
            Activity::Blocked(_) => ("blocked", stack.activity.leaf()),
            Activity::Stopped => ("stopped", None),
            _ => ("waiting", None),
        };
        let names = stack
            .frames
            .iter()
            .map(|frame| match (&frame.function, &frame.object) {
                (Some(function), _) => function.clone(),
                (None, Some(object)) => {
                    let name = object.file_name().unwrap_or(object.as_os_str());
                    format!("[{}]", name.to_string_lossy())
                }
                (None, None) => "[unknown]".to_owned(),
            });
        let frames: Vec<String> = stack.activity.leaf().into_iter().chain(names).collect();
        Stack {
            tid: stack.tid,
            thread: stack.thread_name.clone(),
            state,
            system_call: system_call.map(|name| name.trim_matches(['[', ']']).to_owned()),
            seconds: stack.time.as_secs_f64(),
            samples: stack.samples,
            stack: match stack.end {
                None => "unread",
                Some(_) if stack.is_complete() => "complete",
                Some(_) if stack.is_guessed => "guessed",
                Some(_) => "cut",
            },
            frames: if stack.end.is_none() {
                vec!["[not read]".to_owned()]
            } else {
                frames
            },
            in_collection: tells_collections.then_some(stack.in_collection),
            time: stack.time,
        }
    }

    /// Its functions, the outermost first; before them the thread, and whether there was a collection, if that is asked for.
    fn path(&self, by: ProfileBy) -> Vec<String> {
        let collection = self.in_collection.map(|it| match it {
            true => "[collection]".to_owned(),
            false => "[no collection]".to_owned(),
        });
        let thread = (by == ProfileBy::Thread).then(|| format!("{} {}", self.thread, self.tid));
        let frames = self.frames.iter().rev().cloned();
        let roots = collection.into_iter().chain(thread);
        roots.chain(frames).collect()
    }
}

impl ProfileReport {
    pub(crate) fn new(
        pid: i32,
        program: &Path,
        profile: &Profile,
        by: ProfileBy,
        tells_collections: bool,
        is_wanted: impl Fn(Activity) -> bool,
    ) -> ProfileReport {
        let is_idle =
            |it: &&ProfiledStack| matches!(it.role, ThreadRole::Tick | ThreadRole::Backup);
        let wanted = profile.stacks.iter().filter(|it| is_wanted(it.activity));
        let (idle, busy): (Vec<_>, Vec<_>) = wanted.partition(is_idle);
        let idle: Duration = idle.iter().map(|it| it.time).sum();
        let stacks = busy.into_iter();
        let stacks: Vec<Stack> = stacks.map(|it| Stack::of(it, tells_collections)).collect();
        let in_collection = |is_running: bool| -> f64 {
            let stacks = stacks.iter().filter(|it| it.in_collection == Some(true));
            let stacks = stacks.filter(|it| (it.state == "running") == is_running);
            stacks.map(|it| it.seconds).sum()
        };
        let seconds =
            |of: fn(&ThreadTimes) -> Duration| move |it: &ThreadTimes| of(it).as_secs_f64();
        ProfileReport {
            version: VERSION,
            pid,
            program: program.to_string_lossy().into_owned(),
            seconds: profile.seconds.as_secs_f64(),
            samples: profile.samples,
            threads: profile.threads,
            times: profile.times.as_ref().map(|times| Times {
                running_seconds: seconds(|it| it.running)(times),
                runnable_seconds: seconds(|it| it.runnable)(times),
                off_seconds: seconds(|it| it.off)(times),
            }),
            stops: profile.stops,
            stopped_seconds: profile.stopped.as_secs_f64(),
            idle_seconds: idle.as_secs_f64(),
            in_collection: tells_collections.then(|| Split {
                running_seconds: in_collection(true),
                off_seconds: in_collection(false),
            }),
            by,
            functions: functions(&stacks),
            stacks,
        }
    }

    pub(crate) fn text(&self, format: Format) -> Result<String, Failure> {
        match format {
            Format::Json => json(self),
            Format::Plain => Ok(self.plain()),
            Format::Table => Ok(self.tables()),
        }
    }

    /// The times by what was asked for, most first; the time in the function itself first.
    fn rows(&self) -> Vec<(f64, Option<f64>, String)> {
        let sums = |key: &dyn Fn(&Stack) -> String| {
            let mut sums: BTreeMap<String, f64> = BTreeMap::new();
            for stack in &self.stacks {
                *sums.entry(key(stack)).or_default() += stack.seconds;
            }
            let mut rows: Vec<_> = sums
                .into_iter()
                .map(|(key, sum)| (sum, None, key))
                .collect();
            rows.sort_by(|one, other| other.0.total_cmp(&one.0));
            rows
        };
        match self.by {
            ProfileBy::Function => self
                .functions
                .iter()
                .map(|it| (it.self_seconds, Some(it.total_seconds), it.function.clone()))
                .collect(),
            ProfileBy::Stack => sums(&|stack| stack.path(self.by).join(";")),
            ProfileBy::Thread => sums(&|stack| format!("{} {}", stack.tid, stack.thread)),
            ProfileBy::Syscall => sums(&|stack| match &stack.system_call {
                Some(call) => call.clone(),
                None => stack.state.to_owned(),
            }),
        }
    }

    fn plain(&self) -> String {
        let or_not = |of: fn(&Times) -> f64| {
            let time = self.times.as_ref().map(of);
            time.map_or("-".to_owned(), |time| format!("{time:.3}"))
        };
        let mut text = format!(
            "all {:.3} samples {} threads {} running {} runnable {} off {} stopped {:.6}\n",
            self.seconds,
            self.samples,
            self.threads,
            or_not(|it| it.running_seconds),
            or_not(|it| it.runnable_seconds),
            or_not(|it| it.off_seconds),
            self.stopped_seconds,
        );
        if let Some(split) = &self.in_collection {
            // Writing to a String does not fail.
            let _ = writeln!(
                text,
                "collection running {:.3} off {:.3}",
                split.running_seconds, split.off_seconds
            );
        }
        for (time, total, name) in self.rows() {
            let _ = match total {
                Some(total) => writeln!(text, "{time:.3} {total:.3} {name}"),
                None => writeln!(text, "{time:.3} {name}"),
            };
        }
        text
    }

    fn tables(&self) -> String {
        const FEW: usize = 30;
        let all: f64 = self.stacks.iter().map(|it| it.seconds).sum();
        let share = |time: f64| format!("{:.1} %", 100.0 * time / all.max(1e-9));
        let rows = self.rows();
        let many = rows.len();
        let cells = rows.into_iter().take(FEW).map(|(time, total, name)| {
            let mut cells = vec![share(time), format!("{time:.3} s")];
            cells.extend(total.map(share));
            cells.push(name);
            cells
        });
        let mut text = match self.by {
            ProfileBy::Function => table(&["self", "time", "total", "function"], cells),
            ProfileBy::Stack => table(&["share", "time", "stack"], cells),
            ProfileBy::Thread => table(&["share", "time", "thread"], cells),
            ProfileBy::Syscall => table(&["share", "time", "system call"], cells),
        };
        if many > FEW {
            let _ = writeln!(text, "\nand {} more; -format plain shows all", many - FEW);
        }
        let _ = write!(
            text,
            "\n{:.1} s, {} samples, {} threads",
            self.seconds, self.samples, self.threads
        );
        if let Some(times) = &self.times {
            let _ = write!(
                text,
                ": {:.2} s on the processor, {:.2} s waiting for one, {:.2} s off it",
                times.running_seconds, times.runnable_seconds, times.off_seconds
            );
        }
        if let Some(split) = &self.in_collection {
            let _ = write!(
                text,
                "; during collections {:.2} s on the processor, {:.2} s off it (sampled)",
                split.running_seconds, split.off_seconds
            );
        }
        if self.idle_seconds > 0.0 {
            let _ = write!(
                text,
                "; {:.2} s idle threads of the runtime left out",
                self.idle_seconds
            );
        }
        text + "\n"
    }

    /// The times in microseconds of each stack, the outermost function first.
    fn folded(&self) -> Vec<(Vec<String>, u64)> {
        let mut sums: BTreeMap<Vec<String>, Duration> = BTreeMap::new();
        for stack in &self.stacks {
            *sums.entry(stack.path(self.by)).or_default() += stack.time;
        }
        let sums = sums.into_iter();
        sums.map(|(path, time)| (path, time.as_micros() as u64))
            .collect()
    }

    /// The lines of other tools: functions with ; between them, and the microseconds.
    fn folded_lines(&self) -> Vec<String> {
        lines(self.folded())
    }

    /// The same without the calls of a function by itself: recursion may be thousands of frames deep.
    fn drawn_lines(&self) -> Vec<String> {
        let mut sums: BTreeMap<Vec<String>, u64> = BTreeMap::new();
        for (mut path, time) in self.folded() {
            path.dedup();
            *sums.entry(path).or_default() += time;
        }
        lines(sums)
    }

    pub(crate) fn picture(&self, kind: PictureKind, title: &str) -> Result<Vec<u8>, Failure> {
        match kind {
            PictureKind::Folded => {
                let lines = self.folded_lines();
                let text: String = lines.into_iter().map(|line| line + "\n").collect();
                Ok(text.into_bytes())
            }
            PictureKind::Speedscope => Ok(self.speedscope(title).into_bytes()),
            PictureKind::Svg => self.svg(title),
            PictureKind::Pprof => pprof::encoded(&self.folded()).map_err(Failure::Output),
        }
    }

    fn svg(&self, title: &str) -> Result<Vec<u8>, Failure> {
        let lines = self.drawn_lines();
        let lines: Vec<&str> = match lines.is_empty() {
            true => vec!["[nothing] 1"],
            false => lines.iter().map(|line| &**line).collect(),
        };
        let mut options = flamegraph::Options::default();
        options.title = title.to_owned();
        options.count_name = "us".to_owned();
        options.min_width = LEAST_DRAWN;
        options.deterministic = true;
        let mut svg = Vec::new();
        let drawn = flamegraph::from_lines(&mut options, lines, &mut svg);
        drawn.map(|()| svg).map_err(Failure::Output)
    }

    /// The format of speedscope.app: <https://www.speedscope.app/file-format-schema.json>
    fn speedscope(&self, title: &str) -> String {
        let (mut indexes, mut frames): (HashMap<String, usize>, Vec<_>) = Default::default();
        let (mut samples, mut weights) = (Vec::new(), Vec::new());
        for (path, time) in self.folded() {
            let index = |name: String| {
                *indexes.entry(name).or_insert_with_key(|name| {
                    frames.push(json!({ "name": name }));
                    frames.len() - 1
                })
            };
            samples.push(path.into_iter().map(index).collect::<Vec<_>>());
            weights.push(time);
        }
        let all: u64 = weights.iter().sum();
        let file = json!({
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "name": title,
            "exporter": concat!("ocaml-probes ", env!("CARGO_PKG_VERSION")),
            "shared": { "frames": frames },
            "profiles": [{
                "type": "sampled", "name": title, "unit": "microseconds",
                "startValue": 0, "endValue": all, "samples": samples, "weights": weights,
            }],
        });
        format!("{file}\n")
    }
}

fn lines(folded: impl IntoIterator<Item = (Vec<String>, u64)>) -> Vec<String> {
    let line = |(path, time): (Vec<String>, u64)| {
        let names = path.iter().map(|name| name.replace([';', '\n'], ":"));
        format!("{} {time}", names.collect::<Vec<_>>().join(";"))
    };
    folded.into_iter().map(line).collect()
}

/// The times of each function, in itself and with what it calls; most time in itself first.
fn functions(stacks: &[Stack]) -> Vec<Function> {
    let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for stack in stacks {
        // A function that calls itself counts once.
        let mut seen = HashSet::new();
        for (depth, name) in stack.frames.iter().enumerate() {
            let sum = sums.entry(name).or_default();
            if depth == 0 {
                sum.0 += stack.seconds;
            }
            if seen.insert(name) {
                sum.1 += stack.seconds;
            }
        }
    }
    let mut functions: Vec<Function> = sums
        .into_iter()
        .map(|(function, (self_seconds, total_seconds))| Function {
            function: function.to_owned(),
            self_seconds,
            total_seconds,
        })
        .collect();
    functions.sort_by(|one, other| {
        let keys = [one, other].map(|it| (it.self_seconds, it.total_seconds));
        keys[1]
            .partial_cmp(&keys[0])
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    functions
}
