//! What is usable: checked as far as can be without the program it is about, before anything runs.

mod check;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Action, Actions, Selector};
use regex::Regex;

use self::check::Check;
use crate::args::Typed;
use crate::messages::Messages;
use crate::output::Format;
use crate::usage::Stop;

/// More often than that, a screen only costs.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// What to do, ready to be done.
#[derive(Debug)]
pub(crate) enum Request {
    Trace(Trace),
    Attach(Attach),
    Info(Info),
    List(List),
    Ps(Ps),
    Count(Count),
    Latency(Latency),
    Watch(Watch),
    Clean(Clean),
    Top(Top),
}

#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) actions: Actions,
    pub(crate) wait: bool,
    pub(crate) follow: bool,
    /// What is to be learnt of its hits.
    pub(crate) observed: Option<Observed>,
    pub(crate) answer: Answer,
}

/// What is to be learnt of the hits of a program that is started.
#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) counts: bool,
    /// Starts and stops.
    pub(crate) pairs: Vec<(String, String)>,
    pub(crate) watched: Vec<Selector>,
}

#[derive(Debug)]
pub(crate) struct Attach {
    pub(crate) whom: Whom,
    pub(crate) actions: Actions,
    pub(crate) live: bool,
    pub(crate) follow: bool,
    /// How long it is to stay so, if not for ever.
    pub(crate) duration: Option<Duration>,
    pub(crate) gigatext: bool,
    pub(crate) answer: Answer,
}

/// Which processes.
#[derive(Debug)]
pub(crate) struct Whom {
    /// Each once.
    pub(crate) pids: Vec<i32>,
    /// Also those whose program's name it matches, from its start.
    pub(crate) name: Option<Regex>,
}

#[derive(Debug)]
pub(crate) struct Info {
    pub(crate) whom: Whom,
    pub(crate) sites: bool,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct List {
    pub(crate) file: PathBuf,
    pub(crate) sites: bool,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Count {
    pub(crate) pid: i32,
    pub(crate) selectors: Vec<Selector>,
    pub(crate) sites: bool,
    /// How long, if not until told to end.
    pub(crate) duration: Option<Duration>,
    /// How often what was counted so far is shown.
    pub(crate) interval: Option<Duration>,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Latency {
    pub(crate) pid: i32,
    /// Starts and stops.
    pub(crate) pairs: Vec<(String, String)>,
    /// How long, if not until told to end.
    pub(crate) duration: Option<Duration>,
    /// How often the times so far are shown.
    pub(crate) interval: Option<Duration>,
    /// Where a picture of them is to be drawn.
    pub(crate) picture: Option<PathBuf>,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) pid: i32,
    pub(crate) selectors: Vec<Selector>,
    /// How many hits, if not all.
    pub(crate) limit: Option<u64>,
    /// How many hits a second, if not all.
    pub(crate) rate: Option<u64>,
    /// How long, if not until told to end.
    pub(crate) duration: Option<Duration>,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Clean {
    pub(crate) pid: i32,
    pub(crate) answer: Answer,
}

#[derive(Debug)]
pub(crate) struct Top {
    pub(crate) pid: i32,
    pub(crate) selectors: Vec<Selector>,
    /// Those that the times are taken of: start and stop.
    pub(crate) pairs: Vec<(String, String)>,
    /// How often the screen is renewed.
    pub(crate) interval: Duration,
    pub(crate) messages: Messages,
}

#[derive(Debug)]
pub(crate) struct Ps {
    pub(crate) answer: Answer,
}

/// How to answer, and what else to say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) format: Format,
    pub(crate) messages: Messages,
}

impl Request {
    /// Checks what was typed.
    pub(crate) fn of(typed: Typed) -> Result<Request, Stop> {
        Ok(match typed {
            Typed::Trace(args) => {
                let check = Check("trace");
                let actions = check.actions(&args.actions)?;
                let observed = check.observed(args.count, &args.latency, &args.watch)?;
                if args.follow && observed.is_some() {
                    return check.refuse("-follow goes with none of -count, -latency and -watch");
                }
                let otherwise = match observed {
                    Some(_) => Actions::new(),
                    None => Actions::of(Action::Enable, Selector::All),
                };
                Request::Trace(Trace {
                    program: check.given(args.prog, "-prog FILE")?,
                    arguments: args.arguments,
                    actions: actions.unwrap_or(otherwise),
                    wait: args.wait || observed.is_some(),
                    follow: args.follow,
                    observed,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Attach(args) => {
                let check = Check("attach");
                let whom = check.whom(args.whom)?;
                let Some(actions) = check.actions(&args.actions)? else {
                    return check.refuse("no action given, such as -enable NAMES");
                };
                for (flag, given) in [("-live", args.live), ("-for", args.duration.is_some())] {
                    if args.follow && given {
                        return check.refuse(format!("-follow and {flag} cannot be combined"));
                    }
                }
                Request::Attach(Attach {
                    whom,
                    actions: actions.force(args.force),
                    live: args.live,
                    follow: args.follow,
                    duration: check.duration("-for", args.duration)?,
                    gigatext: args.gigatext,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Info(args) => {
                let check = Check("info");
                Request::Info(Info {
                    whom: check.whom(args.whom)?,
                    sites: args.sites,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::List(args) => {
                let check = Check("list");
                Request::List(List {
                    file: check.given(args.prog, "-prog FILE")?.into(),
                    sites: args.sites,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Count(args) => {
                let check = Check("count");
                Request::Count(Count {
                    pid: check.one_pid(args.pid.as_deref())?,
                    selectors: check.selection(&args.probe, args.regexp.as_deref())?,
                    sites: args.sites,
                    duration: check.duration("-for", args.duration)?,
                    interval: check.duration("-interval", args.interval)?,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Latency(args) => {
                let check = Check("latency");
                let pid = check.one_pid(args.pid.as_deref())?;
                if args.pair.is_empty() {
                    return check.refuse("no -pair START,STOP given");
                }
                Request::Latency(Latency {
                    pid,
                    pairs: check.timed("-pair", &args.pair)?,
                    duration: check.duration("-for", args.duration)?,
                    interval: check.duration("-interval", args.interval)?,
                    picture: args.svg.map(PathBuf::from),
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Watch(args) => {
                let check = Check("watch");
                let pid = check.one_pid(args.pid.as_deref())?;
                if args.probe.is_empty() && args.regexp.is_none() {
                    return check.refuse("no -probe NAMES given, and no -regexp RE");
                }
                Request::Watch(Watch {
                    pid,
                    selectors: check.selection(&args.probe, args.regexp.as_deref())?,
                    limit: check.number("-limit", args.limit)?,
                    rate: check.number("-rate", args.rate)?,
                    duration: check.duration("-for", args.duration)?,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Observe(args) => {
                let check = Check("observe");
                let pid = check.one_pid(args.pid.as_deref())?;
                if !args.clean {
                    return check
                        .refuse("no -clean given; it is count, latency and watch that observe");
                }
                Request::Clean(Clean {
                    pid,
                    answer: check.answer(&args.answer)?,
                })
            }
            Typed::Top(args) => {
                let check = Check("top");
                let interval = check.duration("-interval", args.interval)?;
                let interval = interval.unwrap_or(Duration::from_secs(1));
                if interval < SHORTEST_INTERVAL {
                    return check.refuse(format!(
                        "-interval {} is too short for a screen; {} is the shortest",
                        humantime::format_duration(interval),
                        humantime::format_duration(SHORTEST_INTERVAL),
                    ));
                }
                Request::Top(Top {
                    pid: check.one_pid(args.pid.as_deref())?,
                    selectors: check.selection(&args.probe, args.regexp.as_deref())?,
                    pairs: check.timed("-pair", &args.pair)?,
                    interval,
                    messages: Messages::new(check.level(args.quiet, args.verbose)?),
                })
            }
            Typed::Ps(args) => Request::Ps(Ps {
                answer: Check("ps").answer(&args.answer)?,
            }),
            Typed::Version => {
                let version = format!("ocaml-probes {}\n", env!("CARGO_PKG_VERSION"));
                return Err(Stop::Asked(version));
            }
        })
    }

    /// Where its messages go.
    pub(crate) fn messages(&self) -> Messages {
        match self {
            Request::Trace(Trace { answer, .. })
            | Request::Attach(Attach { answer, .. })
            | Request::Info(Info { answer, .. })
            | Request::List(List { answer, .. })
            | Request::Count(Count { answer, .. })
            | Request::Latency(Latency { answer, .. })
            | Request::Watch(Watch { answer, .. })
            | Request::Clean(Clean { answer, .. })
            | Request::Ps(Ps { answer }) => answer.messages,
            Request::Top(Top { messages, .. }) => *messages,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::args;

    use super::*;

    fn request(line: &str) -> Result<Request, Stop> {
        let argv = line.split(' ').map(OsString::from);
        args::parse(argv).and_then(Request::of)
    }

    fn refusal(line: &str) -> String {
        match request(line) {
            Err(Stop::Usage(error)) => error.to_string(),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn actions(line: &str) -> String {
        match request(&format!("x attach -pid 7 {line}")) {
            Ok(Request::Attach(attach)) => format!("{:?}", attach.actions),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn comma_lists_of_both_sides_add_up() {
        let expected = Actions::new()
            .enable(Selector::name("a"))
            .enable(Selector::name("b"))
            .enable(Selector::name("c"))
            .disable(Selector::name("d"));
        let line = "-enable a,b -disable d -enable c";
        assert_eq!(actions(line), format!("{expected:?}"));
    }

    #[test]
    fn force_combines_with_every_family() {
        for family in [
            "-enable a -disable b",
            "-enable-all",
            "-disable-regexp a",
            "-enable-pair a,b",
        ] {
            assert!(actions(&format!("{family} -force")).contains("force: true"));
            assert!(actions(family).contains("force: false"));
        }
    }

    #[test]
    fn two_families_are_refused() {
        let families = [
            "-enable=a",
            "-enable-all",
            "-disable-all",
            "-enable-regexp=a",
            "-disable-regexp=a",
            "-enable-pair=a,b",
            "-disable-pair=a,b",
        ];
        for (index, one) in families.iter().enumerate() {
            for other in &families[index + 1..] {
                let message = refusal(&format!("x attach -pid 7 {other} {one}"));
                assert!(message.ends_with("cannot be combined"), "{message}");
            }
            let message = refusal(&format!("x attach -pid 7 {one} {one}"));
            let twice = ["is given more than once", "has \"a\" twice"];
            assert!(twice.iter().any(|end| message.ends_with(end)), "{message}");
        }
    }

    #[test]
    fn pid_is_a_positive_decimal_number() {
        for pid in [
            "0",
            "-1",
            "+7",
            "0x7",
            "7.0",
            "",
            " 7",
            "2147483648",
            "self",
            "７",
        ] {
            // A space cannot be typed into these test lines, which are split there.
            let line = ["x", "info", "-pid", pid].map(OsString::from);
            let refused = args::parse(line).and_then(Request::of);
            assert!(matches!(refused, Err(Stop::Usage(_))), "{pid:?}");
        }
        for pid in ["7", "007", "2147483647"] {
            assert!(request(&format!("x info -pid {pid}")).is_ok(), "{pid}");
        }
    }
}
