//! [`ProfileReport`]: where the time of a process goes, as an answer in each format, and as the file that -o names: a
//! flame graph, or input for other tools.

mod incomplete;
mod picture;
mod pprof;
mod rows;
mod waits;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use probes_lib::{
    Activity, Profile, ProfiledStack, RunningMethod, StackEnd, StackFrame, ThreadRole, WaitTimes,
};
use serde::Serialize;

use super::format::{Format, VERSION, json, word};
use super::stack_quality::{IN_COLLECTION, NOT_IN_COLLECTION, StackQuality};
use super::stacks::in_words;
use crate::failure::Failure;
pub(crate) use incomplete::{IncompleteBecause, IncompleteStacks};
pub(crate) use picture::PictureKind;
use waits::{Distribution, Waits, variance_of_part, variance_of_sample};

/// The frame shown for the time that threads ran and no sample covers.
const NOT_SAMPLED: &str = "[not sampled]";

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
    times: Option<TotalTimes>,
    /// How it was found where threads run: stopped, sampled, `user_sampled`, or unread.
    running_method: &'static str,
    stops: u64,
    stopped_seconds: f64,
    /// The time of threads that only work for the runtime.
    idle_seconds: f64,
    /// The times while some thread worked for the collector; only if that is distinguished.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_collection: Option<CollectionTimes>,
    waits: Waits,
    #[serde(skip)]
    how: ProfileOptions,
    functions: Vec<FunctionTimes>,
    stacks: Vec<StackTimes>,
}

/// What the answer is to show, as the flags say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProfileOptions {
    pub(crate) by: ProfileBy,
    /// Whether what happens during collections is distinguished (-gc).
    pub(crate) tells_collections: bool,
    /// Whether it shows waits only (-off-cpu).
    pub(crate) is_off_cpu: bool,
    /// Whether it shows no waits (-on-cpu).
    pub(crate) is_on_cpu: bool,
}

#[derive(Debug, Serialize)]
struct TotalTimes {
    running_seconds: f64,
    runnable_seconds: f64,
    off_seconds: f64,
    /// Two standard deviations of `off_seconds`.
    off_error_seconds: f64,
}

/// Times as sampled, not as the kernel counts them.
#[derive(Debug, Serialize)]
struct CollectionTimes {
    running_seconds: f64,
    off_seconds: f64,
    /// Two standard deviations of each, and the time of which it is not known whether it was in a collection.
    running_error_seconds: f64,
    off_error_seconds: f64,
}

impl CollectionTimes {
    /// The time of these stacks in collections.
    fn of(stacks: &[StackTimes], profile: &Profile) -> CollectionTimes {
        // A time, and two standard deviations of it.
        let in_collection = |is_running: bool| -> (f64, f64) {
            let is_meant =
                |it: &&StackTimes| it.in_collection == Some(true) && it.is_running == is_running;
            // The sum of nothing is -0.
            let seconds = stacks.iter().filter(is_meant).map(|it| it.seconds);
            let seconds = seconds.sum::<f64>().abs();
            let is_unknown = |it: &&StackTimes| {
                it.tid.is_some() && it.in_collection.is_none() && it.is_running == is_running
            };
            let unknown = stacks.iter().filter(is_unknown).map(|it| it.seconds);
            let unknown: f64 = unknown.sum();
            // A collection is found at the same moments for all threads: their errors are not independent, and add up.
            let one = variance_of_sample(profile.seconds, profile.samples);
            let mut threads: HashMap<i32, [f64; 2]> = HashMap::new();
            for (stack, tid) in stacks.iter().filter_map(|it| Some((it, it.tid?))) {
                let [part, all] = threads.entry(tid).or_default();
                *all += stack.split_variance;
                if is_meant(&stack) {
                    *part += stack.split_variance;
                }
            }
            let variances = threads.into_values();
            let variances = variances.map(|[part, all]| variance_of_part(part, all, one));
            let deviation: f64 = variances.map(f64::sqrt).sum();
            (seconds, 2.0 * deviation.abs() + unknown.abs())
        };
        let (running_seconds, running_error_seconds) = in_collection(true);
        let (off_seconds, off_error_seconds) = in_collection(false);
        CollectionTimes {
            running_seconds,
            off_seconds,
            running_error_seconds,
            off_error_seconds,
        }
    }
}

#[derive(Debug, Serialize)]
struct FunctionTimes {
    function: String,
    self_seconds: f64,
    total_seconds: f64,
    /// Two standard deviations of `self_seconds`.
    self_error_seconds: f64,
    /// Two standard deviations of `total_seconds`.
    error_seconds: f64,
    /// Of the waits in it and in what it calls, if they were recorded with -off-cpu.
    waits: Option<Distribution>,
}

#[derive(Debug, Serialize)]
struct StackTimes {
    /// `None` of what is in no sample.
    tid: Option<i32>,
    thread: String,
    #[serde(serialize_with = "word")]
    role: ThreadRole,
    /// Of OCaml 5.
    domain: Option<u32>,
    /// running, blocked, waiting, stopped, frozen or unseen
    state: &'static str,
    #[serde(skip)]
    is_running: bool,
    /// The system call that it waited in.
    system_call: Option<String>,
    seconds: f64,
    samples: u64,
    /// Two standard deviations of `seconds`.
    error_seconds: f64,
    /// How long its waits were, if they were recorded with -off-cpu.
    waits: Option<Distribution>,
    stack: StackQuality,
    /// Why there are no more frames.
    #[serde(skip)]
    end: Option<StackEnd>,
    /// The innermost first: what it waited in, if it did, then functions.
    frames: Vec<String>,
    /// Only if that is distinguished.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_collection: Option<bool>,
    #[serde(skip)]
    time: Duration,
    #[serde(skip)]
    variance: f64,
    #[serde(skip)]
    split_variance: f64,
    #[serde(skip)]
    lengths: Option<WaitTimes>,
}

impl StackTimes {
    fn of(stack: &ProfiledStack, how: ProfileOptions) -> StackTimes {
        let variance = if how.tells_collections {
            stack.split_variance
        } else {
            stack.variance
        };
        let lengths = stack.waits.as_ref().filter(|_| how.is_off_cpu);
        let (state, system_call) = match stack.activity {
            Activity::Running => ("running", None),
            Activity::Blocked(_) => ("blocked", stack.activity.leaf()),
            Activity::Stopped => ("stopped", None),
            Activity::Frozen => ("frozen", None),
            Activity::Unseen => ("unseen", None),
            _ => ("waiting", None),
        };
        let names = stack.frames.iter().map(|frame| name_of(frame));
        let frames: Vec<String> = stack.activity.leaf().into_iter().chain(names).collect();
        StackTimes {
            tid: Some(stack.tid),
            thread: stack.thread_name.clone(),
            role: stack.role,
            domain: stack.domain,
            state,
            is_running: stack.activity == Activity::Running,
            system_call: system_call.map(|name| name.trim_matches(['[', ']']).to_owned()),
            seconds: stack.time.as_secs_f64(),
            samples: stack.samples,
            error_seconds: 2.0 * variance.sqrt(),
            waits: lengths.map(Distribution::of),
            stack: StackQuality::of(stack.end, stack.is_guessed),
            end: stack.end,
            frames: if stack.end.is_none() && stack.activity != Activity::Unseen {
                vec!["[not read]".to_owned()]
            } else {
                frames
            },
            in_collection: stack.in_collection,
            time: stack.time,
            variance: stack.variance,
            split_variance: stack.split_variance,
            lengths: lengths.cloned(),
        }
    }

    /// The time that threads ran and no sample covers: what is left of an exact time.
    fn not_sampled(time: Duration) -> StackTimes {
        StackTimes {
            tid: None,
            thread: String::new(),
            role: ThreadRole::Other,
            domain: None,
            state: "running",
            is_running: true,
            system_call: None,
            seconds: time.as_secs_f64(),
            samples: 0,
            error_seconds: 0.0,
            waits: None,
            stack: StackQuality::Unread,
            end: None,
            frames: vec![NOT_SAMPLED.to_owned()],
            in_collection: None,
            time,
            variance: 0.0,
            split_variance: 0.0,
            lengths: None,
        }
    }

    /// The name of its thread in a row of it.
    fn thread_name(&self) -> String {
        let suffix = self.thread_suffix();
        match self.tid {
            Some(tid) => format!("{tid} {}{suffix}", self.thread),
            None => NOT_SAMPLED.to_owned(),
        }
    }

    /// What its thread is, and of which domain, to follow its name; empty if it is not known.
    fn thread_suffix(&self) -> String {
        if self.role == ThreadRole::Other && self.domain.is_none() {
            return String::new();
        }
        format!(" ({})", in_words(self.role, self.domain))
    }

    /// Its functions, the outermost first; before them whether there was a collection, and the thread, if that is asked
    /// for, and what is wrong with the stack.
    fn path(&self, by: ProfileBy) -> Vec<String> {
        let collection = self.in_collection.map(|is_in| {
            let root = if is_in {
                IN_COLLECTION
            } else {
                NOT_IN_COLLECTION
            };
            root.to_owned()
        });
        let thread = self.tid.filter(|_| by == ProfileBy::Thread).map(|tid| {
            let suffix = self.thread_suffix();
            format!("{} {tid}{suffix}", self.thread)
        });
        let frames = self.frames.iter().rev().cloned();
        let roots = collection.into_iter().chain(thread);
        roots.chain(self.stack.mark()).chain(frames).collect()
    }
}

/// The name of a frame: that of its function, or of the file that has its code.
pub(super) fn name_of(frame: &StackFrame) -> String {
    match (&frame.function, &frame.object) {
        (Some(function), _) => function.clone(),
        (None, Some(object)) => {
            let name = object.file_name().unwrap_or(object.as_os_str());
            format!("[{}]", name.to_string_lossy())
        }
        (None, None) => "[unknown]".to_owned(),
    }
}

impl ProfileReport {
    pub(crate) fn new(
        pid: i32,
        program: &Path,
        profile: &Profile,
        how: ProfileOptions,
        is_wanted: impl Fn(Activity) -> bool,
    ) -> ProfileReport {
        let is_idle = |it: &ProfiledStack| matches!(it.role, ThreadRole::Tick | ThreadRole::Backup);
        let wanted = profile.stacks.iter().filter(|it| is_wanted(it.activity));
        let (idle, busy): (Vec<_>, Vec<_>) = wanted.partition(|it| is_idle(it));
        let idle: Duration = idle.iter().map(|it| it.time).sum();
        let waits = Waits::of(profile, &busy, how, is_idle);
        let mut stacks: Vec<StackTimes> = busy.iter().map(|it| StackTimes::of(it, how)).collect();
        if is_wanted(Activity::Running) && !profile.not_sampled.is_zero() {
            let at = stacks.partition_point(|it| it.time >= profile.not_sampled);
            stacks.insert(at, StackTimes::not_sampled(profile.not_sampled));
        }
        ProfileReport {
            version: VERSION,
            pid,
            program: program.to_string_lossy().into_owned(),
            seconds: profile.seconds.as_secs_f64(),
            samples: profile.samples,
            threads: profile.threads,
            times: profile.times.as_ref().map(|times| TotalTimes {
                running_seconds: times.running.as_secs_f64(),
                runnable_seconds: times.runnable.as_secs_f64(),
                off_seconds: times.off.as_secs_f64(),
                off_error_seconds: 2.0 * profile.off_variance.sqrt(),
            }),
            running_method: match profile.running {
                RunningMethod::Stopped => "stopped",
                RunningMethod::ByKernel { in_kernel: true } => "sampled",
                RunningMethod::ByKernel { in_kernel: false } => "user_sampled",
                _ => "unread",
            },
            stops: profile.stops,
            stopped_seconds: profile.stopped.as_secs_f64(),
            idle_seconds: idle.as_secs_f64(),
            in_collection: how
                .tells_collections
                .then(|| CollectionTimes::of(&stacks, profile)),
            waits,
            how,
            functions: rows::functions(&stacks),
            stacks,
        }
    }

    /// `is_terminal`: whether a terminal shows it.
    pub(crate) fn text(&self, format: Format, is_terminal: bool) -> Result<String, Failure> {
        match format {
            Format::Json => json(self),
            Format::Plain => Ok(self.plain()),
            Format::Table => Ok(self.tables(is_terminal)),
        }
    }

    /// Says by how much unseen waits may be too long, if they may.
    pub(crate) fn excess(&self) -> Option<String> {
        self.waits.excess()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use probes_lib::{LiveAddr, WaitMethod};

    use super::*;

    pub(super) fn stack(time: Duration, variance: f64) -> ProfiledStack {
        ProfiledStack {
            tid: 1,
            thread_name: "main".to_owned(),
            role: ThreadRole::Other,
            domain: None,
            activity: Activity::Running,
            in_collection: None,
            frames: Vec::new(),
            end: None,
            is_guessed: false,
            time,
            samples: 1,
            variance,
            split_variance: variance,
            waits: None,
        }
    }

    pub(super) const OPTIONS: ProfileOptions = ProfileOptions {
        by: ProfileBy::Function,
        tells_collections: false,
        is_off_cpu: false,
        is_on_cpu: false,
    };

    fn report(stack: ProfiledStack, by: ProfileBy) -> ProfileReport {
        report_of(&profile(vec![stack]), by)
    }

    pub(super) fn profile(stacks: Vec<ProfiledStack>) -> Profile {
        Profile {
            stacks,
            seconds: Duration::from_millis(1),
            samples: 1,
            threads: 1,
            times: None,
            off_variance: 0.0,
            not_sampled: Duration::ZERO,
            stops: 0,
            stopped: Duration::ZERO,
            not_stopped: None,
            waits: WaitMethod::Sampled { because: None },
            running: RunningMethod::Stopped,
            unseen_excess: Duration::ZERO,
        }
    }

    fn report_of(profile: &Profile, by: ProfileBy) -> ProfileReport {
        let how = ProfileOptions { by, ..OPTIONS };
        ProfileReport::new(1, Path::new("/srv/server"), profile, how, |_| true)
    }

    #[test]
    fn unsampled_time_is_in_each_form() {
        let mut found = profile(vec![stack(Duration::from_secs(1), 0.01)]);
        found.not_sampled = Duration::from_secs(3);
        let of = |by, format| report_of(&found, by).text(format, false).unwrap();
        let row = |by| of(by, Format::Plain).lines().nth(2).unwrap().to_owned();
        assert_eq!(
            row(ProfileBy::Function),
            "3.000 0.000 3.000 0.000 [not sampled]"
        );
        for by in [ProfileBy::Stack, ProfileBy::Thread, ProfileBy::Syscall] {
            assert_eq!(row(by), "3.000 0.000 [not sampled]");
        }
        let table = of(ProfileBy::Thread, Format::Table);
        assert!(
            table.contains(" 75.0 % | 3.000 s | 0.000 s | [not sampled]"),
            "{table}"
        );
        let json: serde_json::Value =
            serde_json::from_str(&of(ProfileBy::Function, Format::Json)).unwrap();
        let first = &json["stacks"][0];
        assert!(first["tid"].is_null() && first["seconds"] == 3.0, "{json}");
        for (by, path) in [
            (ProfileBy::Function, "[not sampled] 3000000\n"),
            (ProfileBy::Thread, "[not sampled] 3000000\n"),
        ] {
            let report = report_of(&found, by);
            let text = |kind| {
                let bytes = report.picture(kind, "server").unwrap();
                String::from_utf8(bytes).unwrap()
            };
            assert!(text(PictureKind::Folded).contains(path));
            for kind in [PictureKind::Svg, PictureKind::Speedscope] {
                assert!(text(kind).contains("[not sampled]"));
            }
        }
        let how = ProfileOptions {
            is_off_cpu: true,
            ..report_of(&found, ProfileBy::Stack).how
        };
        let off = ProfileReport::new(1, Path::new("/srv"), &found, how, |it| {
            it != Activity::Running
        });
        assert_eq!(off.stacks.len(), 0);
    }

    #[test]
    fn incomplete_stacks_are_marked_in_each_form() {
        let named = |name: &str| {
            Arc::new(StackFrame {
                address: LiveAddr(0x1000),
                function: Some(name.to_owned()),
                offset: None,
                object: None,
                file: None,
                line: None,
            })
        };
        let cut = ProfiledStack {
            frames: vec![named("leaf"), named("rec")],
            end: Some(StackEnd::NotCopied),
            ..stack(Duration::from_secs(1), 0.0)
        };
        let guessed = ProfiledStack {
            is_guessed: true,
            ..cut.clone()
        };
        for (stack, path) in [(cut, "[cut];rec;leaf"), (guessed, "[guessed];rec;leaf")] {
            let report = report(stack, ProfileBy::Stack);
            for format in [Format::Plain, Format::Table] {
                let text = report.text(format, false).unwrap();
                let mut ends = text.lines().map(|line| line.trim_end().ends_with(path));
                assert!(ends.any(|is_path| is_path), "{text}");
            }
            let folded = report.picture(PictureKind::Folded, "server").unwrap();
            assert_eq!(folded, format!("{path} 1000000\n").as_bytes());
            // JSON says it beside the frames.
            let json: serde_json::Value =
                serde_json::from_str(&report.text(Format::Json, false).unwrap()).unwrap();
            assert_eq!(
                json["stacks"][0]["frames"],
                serde_json::json!(["leaf", "rec"])
            );
            assert_eq!(json["functions"].as_array().unwrap().len(), 2);
        }
    }

    #[test]
    fn collections_that_were_not_seen_have_an_error() {
        let found = |in_collection| Profile {
            seconds: Duration::from_secs(1),
            samples: 100,
            ..profile(vec![ProfiledStack {
                in_collection,
                ..stack(Duration::from_secs(1), 100e-4)
            }])
        };
        let how = ProfileOptions {
            tells_collections: true,
            ..OPTIONS
        };
        let split = |in_collection| {
            let found = found(in_collection);
            let report = ProfileReport::new(1, Path::new("/srv/server"), &found, how, |_| true);
            report.in_collection.unwrap()
        };
        let known = split(Some(false));
        assert_eq!((known.running_seconds, known.off_seconds), (0.0, 0.0));
        for error in [known.running_error_seconds, known.off_error_seconds] {
            assert!((0.018..0.022).contains(&error), "{error}");
        }
        // All of it may have been in collections.
        let error = split(None).running_error_seconds;
        assert!((1.0..1.03).contains(&error), "{error}");
    }

    #[test]
    fn names_are_escaped_in_pictures_as_in_plain() {
        let odd = ProfiledStack {
            thread_name: "a;b\u{1}<".to_owned(),
            ..stack(Duration::from_secs(1), 0.01)
        };
        let report = report(odd, ProfileBy::Thread);
        for (kind, name) in [
            (PictureKind::Folded, "a:b\\u{1}<"),
            (PictureKind::Svg, "a:b\\u{1}&lt;"),
        ] {
            let bytes = report.picture(kind, "\u{2}").unwrap();
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.contains(name), "{text}");
            assert!(!text.contains(['\u{1}', '\u{2}']), "{text}");
        }
    }

    #[test]
    fn stacks_without_a_microsecond_are_not_drawn() {
        let report = report(stack(Duration::from_nanos(999), 0.0), ProfileBy::Stack);
        let svg = report.picture(PictureKind::Svg, "server").unwrap();
        assert!(String::from_utf8(svg).unwrap().contains("[nothing]"));
        let folded = report.picture(PictureKind::Folded, "server").unwrap();
        assert_eq!(folded, b"");
    }

    #[test]
    fn times_are_followed_by_their_errors() {
        let text = |by, format| {
            let report = report(stack(Duration::from_secs(1), 0.01), by);
            report.text(format, false).unwrap()
        };
        let plain = text(ProfileBy::Function, Format::Plain);
        assert_eq!(
            plain.lines().last(),
            Some("1.000 0.200 1.000 0.200 [not read]")
        );
        let plain = text(ProfileBy::Thread, Format::Plain);
        assert_eq!(plain.lines().last(), Some("1.000 0.200 1 main"));
        let table = text(ProfileBy::Function, Format::Table);
        let row = " 100.0 % | 1.000 s | 0.200 s | 100.0 % | 20.0 % | [not read]";
        assert!(table.contains(row), "{table}");
    }

    #[test]
    fn split_stacks_have_errors_of_the_split() {
        let mut report = report(stack(Duration::from_secs(1), 0.01), ProfileBy::Stack);
        report.how.tells_collections = true;
        report.stacks[0].in_collection = Some(true);
        report.stacks[0].split_variance = 4.0;
        let row = |report: &ProfileReport| report.plain().lines().last().unwrap().to_owned();
        let split = row(&report);
        assert!(split.starts_with("1.000 4.000 [collection]"), "{split}");
        report.how.by = ProfileBy::Thread;
        assert_eq!(row(&report), "1.000 0.200 1 main");
    }

    #[test]
    fn errors_of_functions_are_of_their_times() {
        let report = report(stack(Duration::from_secs(1), 4.0), ProfileBy::Function);
        let mut stacks = report.stacks;
        stacks[0].frames = ["leaf", "main"].map(str::to_owned).to_vec();
        let functions = rows::functions(&stacks);
        let errors = functions.iter().map(|it| {
            let errors = (it.self_error_seconds, it.error_seconds);
            (&*it.function, errors)
        });
        let expected = [("leaf", (4.0, 4.0)), ("main", (0.0, 4.0))];
        assert_eq!(errors.collect::<Vec<_>>(), expected);
    }
}
