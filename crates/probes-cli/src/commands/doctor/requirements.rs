//! What each command needs, and whether the checks say that it has it.

use probes_lib::{
    Check, CheckKind, CheckResult, Denial, Diagnosis, ErrorKind, MemoryError, ProcessError,
};

use crate::commands::opened_events::is_without_events;
use crate::output::{Ability, CommandAnswer};

/// Something that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// To see the processes of all users.
    Processes,
    /// To start programs stopped.
    Start,
    /// To read the maps and files of the process.
    Files,
    /// The same; without that, the command reads the file of a program (`-prog`).
    ListedFiles,
    /// To read its memory.
    Memory,
    /// To stop it.
    Stop,
    /// To stop it; without that, the command writes while it runs (`-live`).
    StopOrWriteLive,
    /// To stop it; without that, the command reads while it runs (`-live`).
    StopOrReadLive,
    /// To inject system calls into it, and put trampolines into its code.
    Observe,
    /// OCaml probes.
    Probes,
    /// OCaml probes, or functions.
    Points,
    /// Times of hits.
    Times,
    /// Runtime events.
    Events,
    /// Stacks of its threads.
    Stacks,
    /// To have the kernel record its waits.
    Waits,
    /// To have the kernel record its waits; without that, the command records other things.
    WaitsAlso,
    /// To have the kernel sample the threads that run.
    Samples,
}

/// Whether a command works that needs this.
pub(super) fn answer(
    command: &'static str,
    needs: &[Need],
    diagnosis: &Diagnosis,
) -> CommandAnswer {
    let found = Findings(diagnosis);
    let mut answer = CommandAnswer::of(command);
    let records_waits = needs.contains(&Need::WaitsAlso);
    for need in needs {
        let abilities = found.abilities(*need);
        let fails = abilities.iter().any(|it| matches!(it, Ability::Fails(_)));
        for ability in abilities {
            answer.add(match ability {
                Ability::Fails(why) if records_waits && found.may_record_waits_without(*need) => {
                    Ability::Limited(format!("with -off-cpu only: {why}"))
                }
                ability => ability,
            });
        }
        // What comes next fails for the same reason, mostly.
        if fails {
            break;
        }
    }
    answer
}

/// What the checks have found.
struct Findings<'d>(&'d Diagnosis);

impl Findings<'_> {
    fn abilities(&self, need: Need) -> Vec<Ability> {
        match need {
            Need::Processes => vec![
                self.needed(CheckKind::Proc),
                self.limited(CheckKind::Hidepid, ""),
            ],
            Need::Start => vec![
                self.needed(CheckKind::Proc),
                self.needed(CheckKind::Ptrace),
                self.start_in_spite_of_yama(),
            ],
            Need::Files => vec![self.needed(CheckKind::Proc), self.needed(CheckKind::Files)],
            Need::ListedFiles => {
                let files = self.abilities(Need::Files).into_iter();
                let or_file = |ability| match ability {
                    Ability::Fails(why) if self.0.pid().is_none() => {
                        Ability::Limited(format!("with -prog only: {why}"))
                    }
                    ability => ability,
                };
                files.map(or_file).collect()
            }
            Need::Memory => vec![self.memory()],
            Need::Stop => vec![self.stop()],
            Need::StopOrWriteLive => vec![match self.stop() {
                Ability::Fails(why) if self.passes(CheckKind::ForceOverride) => {
                    Ability::Limited(format!("with -live only: {why}"))
                }
                stop => stop,
            }],
            Need::StopOrReadLive => vec![match self.stop() {
                Ability::Fails(why) => Ability::Limited(format!("with -live only: {why}")),
                stop => stop,
            }],
            Need::Observe => vec![
                self.needed(CheckKind::Translator),
                self.needed(CheckKind::Seccomp),
                self.limited(CheckKind::Observer, "with -force only: "),
                self.limited(CheckKind::MemoryLimit, ""),
                self.needed(CheckKind::CodeCave),
            ],
            Need::Probes => self.probes(),
            Need::Points => self.points(),
            Need::Times => vec![self.needed(CheckKind::InvariantTsc)],
            Need::Events => self.events(),
            Need::Waits => vec![self.limited(CheckKind::PerfEvents, "waits are sampled: ")],
            Need::WaitsAlso => {
                vec![self.limited(CheckKind::PerfEvents, "without -off-cpu only: ")]
            }
            Need::Samples => vec![self.limited(
                CheckKind::PerfSamples,
                "threads that run are stopped for a moment, and much of a program that waits often is [not read]: ",
            )],
            Need::Stacks => vec![
                self.limited(CheckKind::Translator, "stacks of the translator: "),
                self.limited(CheckKind::UnwindTables, "stacks are cut: "),
            ],
        }
    }

    /// Whether the waits of the process can be recorded though it lacks this. The kernel records them: the process is
    /// neither stopped nor observed for that, but it has to be readable.
    fn may_record_waits_without(&self, need: Need) -> bool {
        let is_readable = !matches!(need, Need::Files | Need::Memory);
        // Whether it can record those of an ancestor has not been tried.
        is_readable && self.passes(CheckKind::PerfEvents) && self.passes(CheckKind::Ancestor)
    }

    /// The process is observed to switch them on, and where there are none, to time functions instead.
    fn events(&self) -> Vec<Ability> {
        let error = self.check(CheckKind::RuntimeEvents).and_then(Check::cause);
        let is_timed = error.is_some_and(is_without_events);
        let mut abilities = vec![if is_timed {
            let how = "by timing the functions of the collector: ";
            self.limited(CheckKind::RuntimeEvents, how)
        } else {
            self.needed(CheckKind::RuntimeEvents)
        }];
        if is_timed || !self.passes(CheckKind::RuntimeEventsOn) {
            for need in [Need::Memory, Need::Stop, Need::Observe] {
                abilities.extend(self.abilities(need));
            }
        }
        abilities
    }

    /// The check, unless it has passed. Without a process, those of a process count as passed.
    fn check(&self, kind: CheckKind) -> Option<&Check> {
        let check = self.0.check(kind)?;
        (check.result() != CheckResult::Pass).then_some(check)
    }

    fn passes(&self, kind: CheckKind) -> bool {
        self.check(kind).is_none()
    }

    /// A check without which nothing works.
    fn needed(&self, kind: CheckKind) -> Ability {
        match self.check(kind) {
            None => Ability::Works,
            Some(check) if check.result() == CheckResult::Unknown => not_known(check),
            Some(check) => Ability::Fails(check.finding().to_owned()),
        }
    }

    /// A check without which it works in part; `how` says how.
    fn limited(&self, kind: CheckKind, how: &str) -> Ability {
        match self.check(kind) {
            None => Ability::Works,
            Some(check) if check.result() == CheckResult::Unknown => not_known(check),
            Some(check) => Ability::Limited(format!("{how}{}", check.finding())),
        }
    }

    /// Whether the memory of the process may be read and written; without a process, whether Yama or a missing
    /// CAP_SYS_PTRACE denies that in general.
    fn memory(&self) -> Ability {
        if self.0.pid().is_some() {
            return self.needed(CheckKind::Memory);
        }
        match self.needed(CheckKind::Yama) {
            Ability::Works => self.limited(CheckKind::Capabilities, ""),
            denied => denied,
        }
    }

    fn stop(&self) -> Ability {
        let kinds = [CheckKind::Ptrace, CheckKind::Tracer, CheckKind::Ancestor];
        let abilities = kinds.into_iter().map(|kind| self.needed(kind));
        let mut hindered = abilities.filter(|it| *it != Ability::Works);
        hindered.next().unwrap_or(Ability::Works)
    }

    /// A process may trace programs that it starts, unless Yama allows that only to root, or to no process at all.
    fn start_in_spite_of_yama(&self) -> Ability {
        let error = self.check(CheckKind::Yama).and_then(Check::cause);
        match error.and_then(probes_lib::Error::denial) {
            Some(Denial::Yama { scope: 0 | 1 }) | None => Ability::Works,
            Some(Denial::Incapable(of)) if matches!(**of, Denial::Yama { scope: 0 | 1 }) => {
                Ability::Works
            }
            Some(_) => self.needed(CheckKind::Yama),
        }
    }

    fn probes(&self) -> Vec<Ability> {
        let probes = match self.check(CheckKind::Probes) {
            // Some of them have counters and sites that disagree.
            Some(check) if check.result() == CheckResult::Fail && check.cause().is_none() => {
                Ability::Limited(check.finding().to_owned())
            }
            _ => self.needed(CheckKind::Probes),
        };
        vec![
            self.needed(CheckKind::Translator),
            self.needed(CheckKind::Bytecode),
            probes,
            self.sites(),
        ]
    }

    fn sites(&self) -> Ability {
        let check = self.check(CheckKind::HugePages);
        match check.and_then(Check::cause).map(probes_lib::Error::kind) {
            Some(ErrorKind::Memory(MemoryError::GigaText)) => {
                self.limited(CheckKind::HugePages, "with -gigatext only: ")
            }
            _ => self.limited(CheckKind::HugePages, ""),
        }
    }

    fn points(&self) -> Vec<Ability> {
        let mut abilities = self.probes();
        let has_probes = !abilities.iter().any(|it| matches!(it, Ability::Fails(_)));
        if !has_probes {
            abilities = vec![match self.check(CheckKind::Probes) {
                Some(check) => Ability::Limited(format!(
                    "functions and probes of other providers only: {}",
                    check.finding()
                )),
                None => Ability::Limited("functions only".to_owned()),
            }];
            if let Some(ErrorKind::Process(ProcessError::Bytecode)) = self
                .check(CheckKind::Bytecode)
                .and_then(Check::cause)
                .map(probes_lib::Error::kind)
            {
                abilities = vec![self.limited(CheckKind::Bytecode, "functions of C only: ")];
            }
        }
        abilities.push(self.limited(CheckKind::Symbols, "functions: "));
        abilities
    }
}

fn not_known(check: &Check) -> Ability {
    Ability::Limited(format!("not known: {}", check.finding()))
}
