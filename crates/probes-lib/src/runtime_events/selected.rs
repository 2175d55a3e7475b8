//! [`SelectedEvents`]: which runtime events are meant by names and globs.

use std::collections::HashMap;
use std::io;

use super::names::{LIFECYCLE, Names};
use super::ring::RingBytes;
use super::user_names::UserNames;
use super::{RingEntry, RuntimeEventKind};
use crate::error::RuntimeEventsError;
use crate::near::near_names;
use crate::select::glob::Glob;

/// Runtime events that were selected by their names ([`RuntimeEvents::select`](super::RuntimeEvents::select)).
///
/// ```no_run
/// use probes_lib::{RuntimeEventGroup, RuntimeEvents, SelectedEntry};
///
/// let mut events = RuntimeEvents::of_process(4242)?;
/// let mut selected = events.select(&["minor*".parse().unwrap()])?;
/// let mut hits = std::collections::HashMap::new();
/// events.read_selected(&mut selected, |entry| if let SelectedEntry::Event { name, .. } = entry {
///     *hits.entry(name).or_insert(0) += 1;
/// })?;
/// for (index, name) in selected.names().iter().enumerate().filter(|(_, it)| it.group == RuntimeEventGroup::Counter) {
///     println!("{}: {:?}", name.name, hits.get(&index));
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SelectedEvents {
    /// Empty: all.
    globs: Vec<Glob>,
    names: Vec<RuntimeEventName>,
    /// The index of a name in `names`; `None` if it is not selected.
    of_runtime: HashMap<(RuntimeEventGroup, &'static str), Option<usize>>,
    of_users: HashMap<u16, Option<usize>>,
}

/// The name of runtime events.
///
/// [`SelectedEvents`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeEventName {
    /// What they are.
    pub group: RuntimeEventGroup,
    /// The name, such as `minor`.
    pub name: String,
}

/// What runtime events of one name are.
///
/// [`SelectedEvents`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum RuntimeEventGroup {
    /// The begins and ends of a phase of the collector.
    Phase,
    /// A counter of the collector.
    Counter,
    /// What happens to rings and domains.
    Lifecycle,
    /// Numbers of blocks that were allocated, by size.
    Alloc,
    /// Events that the program itself writes.
    User,
}

/// What a ring has of selected events.
///
/// [`SelectedEvents`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectedEntry<'w> {
    /// An event.
    Event {
        /// The index of its name in [`SelectedEvents::names`].
        name: usize,
        /// The number of the ring: the domain's index, which a later domain may have again.
        domain: u32,
        /// When, in nanoseconds of CLOCK_MONOTONIC.
        time: u64,
        /// What has happened.
        kind: RuntimeEventKind<'w>,
    },
    /// Words of events were overwritten before they were read, selected or not.
    Lost {
        /// The number of the ring.
        domain: u32,
        /// How many words.
        words: u64,
    },
    /// A domain has ended: what began in it has no end.
    DomainEnded(u32),
    /// Events were paused or resumed at this time, in all domains: an end after it does not belong to a begin before
    /// it. Nanoseconds of CLOCK_MONOTONIC; rings are read one after the other, so events from before that time may
    /// follow.
    PausedOrResumed(u64),
    /// The process has forked a child, which has rings of its own; its pid, as the process knows it.
    Forked(Option<i64>),
}

/// The name that all [`RuntimeEventKind::Allocations`] have.
const ALLOC: &str = "alloc";

impl SelectedEvents {
    /// Selects by globs; all if there are none. `names` are those of the runtime's version, `users` those that the
    /// program has registered.
    ///
    /// # Errors
    ///
    /// If a glob matches no name.
    pub(super) fn new(
        globs: &[Glob],
        names: &Names,
        users: Vec<String>,
    ) -> Result<SelectedEvents, RuntimeEventsError> {
        use RuntimeEventGroup::{Alloc, Counter, Lifecycle, Phase, User};
        let phases = names.phases().map(|name| (Phase, name.to_owned()));
        let counters = names.counters().map(|name| (Counter, name.to_owned()));
        let lifecycle = LIFECYCLE.map(|name| (Lifecycle, name.to_owned()));
        let alloc = [(Alloc, ALLOC.to_owned())];
        let all = phases.chain(counters).chain(lifecycle).chain(alloc);
        let all = all.chain(users.into_iter().map(|name| (User, name)));
        let all: Vec<(RuntimeEventGroup, String)> = all.collect();
        let is_any = |glob: &Glob| all.iter().any(|(_, name)| glob.matches(name));
        if let Some(glob) = globs.iter().find(|glob| !is_any(glob)) {
            let name = glob.as_str();
            return Err(RuntimeEventsError::UnknownEvent {
                glob: name.to_owned(),
                near: near_names(all.iter().map(|(_, name)| name), name),
            });
        }
        let mut selected = SelectedEvents {
            globs: globs.to_vec(),
            names: Vec::new(),
            of_runtime: HashMap::new(),
            of_users: HashMap::new(),
        };
        for (group, name) in all {
            selected.index(group, &name);
        }
        Ok(selected)
    }

    /// Returns the names that are selected, as far as they are known: a program may register more of its own, which are
    /// added at the end.
    pub fn names(&self) -> &[RuntimeEventName] {
        &self.names
    }

    /// Returns the index of a name, which is added if it is new; `None` if it is not selected.
    fn index(&mut self, group: RuntimeEventGroup, name: &str) -> Option<usize> {
        let is_selected = self.globs.is_empty() || self.globs.iter().any(|it| it.matches(name));
        is_selected.then(|| {
            let known = self.names.iter();
            let mut known = known.map(|it| (it.group, it.name.as_str()));
            known.position(|it| it == (group, name)).unwrap_or_else(|| {
                let name = name.to_owned();
                self.names.push(RuntimeEventName { group, name });
                self.names.len() - 1
            })
        })
    }

    /// Calls `visit` with an entry if it is selected, and always with what matters to other events: losses, the end of
    /// a domain, pauses, forks.
    ///
    /// # Errors
    ///
    /// If the name of a user event cannot be read.
    pub(super) fn pass<'w>(
        &mut self,
        entry: RingEntry<'w>,
        users: &mut UserNames,
        file: &impl RingBytes,
        mut visit: impl FnMut(SelectedEntry<'w>),
    ) -> io::Result<()> {
        let (domain, time, kind) = match entry {
            RingEntry::Event { domain, time, kind } => (domain, time, kind),
            RingEntry::Lost { domain, words } => {
                visit(SelectedEntry::Lost { domain, words });
                return Ok(());
            }
        };
        let index = match kind {
            RuntimeEventKind::User(id, _) => self.index_of_user(id, users, file)?,
            RuntimeEventKind::Begin(name) | RuntimeEventKind::End(name) => {
                self.index_of_runtime(RuntimeEventGroup::Phase, name)
            }
            RuntimeEventKind::Counter(name, _) => {
                self.index_of_runtime(RuntimeEventGroup::Counter, name)
            }
            RuntimeEventKind::Lifecycle(name, _) => {
                self.index_of_runtime(RuntimeEventGroup::Lifecycle, name)
            }
            RuntimeEventKind::Allocations(_) => {
                self.index_of_runtime(RuntimeEventGroup::Alloc, ALLOC)
            }
        };
        if let Some(name) = index {
            visit(SelectedEntry::Event {
                name,
                domain,
                time,
                kind,
            });
        }
        match kind {
            RuntimeEventKind::Lifecycle("domain_terminate", _) => {
                visit(SelectedEntry::DomainEnded(domain));
            }
            RuntimeEventKind::Lifecycle("ring_pause" | "ring_resume", _) => {
                visit(SelectedEntry::PausedOrResumed(time));
            }
            RuntimeEventKind::Lifecycle("fork_parent", child) => {
                visit(SelectedEntry::Forked(child));
            }
            _ => {}
        }
        Ok(())
    }

    fn index_of_runtime(&mut self, group: RuntimeEventGroup, name: &'static str) -> Option<usize> {
        if let Some(index) = self.of_runtime.get(&(group, name)) {
            return *index;
        }
        let index = self.index(group, name);
        self.of_runtime.insert((group, name), index);
        index
    }

    fn index_of_user(
        &mut self,
        id: u16,
        users: &mut UserNames,
        file: &impl RingBytes,
    ) -> io::Result<Option<usize>> {
        if let Some(index) = self.of_users.get(&id) {
            return Ok(*index);
        }
        let name = users.get(file, id)?;
        let index = match name {
            Some(name) => self.index(RuntimeEventGroup::User, name),
            // It may get its name later.
            None => return Ok(self.index(RuntimeEventGroup::User, &format!("#{id}"))),
        };
        self.of_users.insert(id, index);
        Ok(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime_events::item::UserValue;

    fn globs(globs: &[&str]) -> Vec<Glob> {
        globs.iter().map(|it| it.parse().unwrap()).collect()
    }

    fn selected(typed: &[&str]) -> Result<SelectedEvents, RuntimeEventsError> {
        let users = ["app.request".to_owned(), "minor".to_owned()];
        SelectedEvents::new(&globs(typed), &Names::of("5.3.0").unwrap(), users.into())
    }

    fn names(selected: &SelectedEvents) -> Vec<(&'static str, &str)> {
        let names = selected.names().iter();
        names
            .map(|it| (it.group.into(), it.name.as_str()))
            .collect()
    }

    #[test]
    fn names_and_globs_select_events_of_all_groups() {
        assert_eq!(
            names(&selected(&["minor", "domain_*", "minor_promoted", "app.*"]).unwrap()),
            [
                ("phase", "minor"),
                ("phase", "domain_condition_wait"),
                ("phase", "domain_resize_heap_reservation"),
                ("counter", "minor_promoted"),
                ("lifecycle", "domain_spawn"),
                ("lifecycle", "domain_terminate"),
                ("user", "app.request"),
                ("user", "minor"),
            ]
        );
        assert_eq!(names(&selected(&[]).unwrap()).len(), 48 + 26 + 8 + 1 + 2);
    }

    #[test]
    fn unknown_names_suggest_similar_ones() {
        let error = selected(&["minor", "minor_promotd"]).unwrap_err();
        let RuntimeEventsError::UnknownEvent { glob, near } = error else {
            panic!("{error}");
        };
        assert_eq!(glob, "minor_promotd");
        assert_eq!(near[0], "minor_promoted");
        assert!(selected(&["app.*", "nothing*"]).is_err());
        // Of a later version.
        assert!(selected(&["empty_minor"]).is_err());
    }

    /// A table of names that are written later.
    struct Table(Vec<u8>);

    impl RingBytes for Table {
        fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
            bytes.copy_from_slice(&self.0[at as usize..][..bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn entries_pass_if_their_names_are_selected() {
        let mut selected = selected(&["minor", "*ate"]).unwrap();
        let mut table = Table(vec![0; 1 << 20]);
        let mut users = UserNames::at(Some(0));
        let mut passed = |selected: &mut SelectedEvents, table: &Table, kind| {
            let mut found = Vec::new();
            let entry = RingEntry::Event {
                domain: 2,
                time: 9,
                kind,
            };
            let visit = |it: SelectedEntry<'_>| {
                found.push(match it {
                    SelectedEntry::Event { name, .. } => format!("event {name}"),
                    other => format!("{other:?}"),
                });
            };
            selected.pass(entry, &mut users, table, visit).unwrap();
            found
        };
        let user = RuntimeEventKind::User(0, UserValue::Unit);
        for (kind, expected) in [
            (RuntimeEventKind::Begin("minor"), vec!["event 0"]),
            (RuntimeEventKind::End("minor"), vec!["event 0"]),
            (RuntimeEventKind::End("major"), vec![]),
            (
                RuntimeEventKind::Lifecycle("domain_terminate", None),
                vec!["event 2", "DomainEnded(2)"],
            ),
            (
                RuntimeEventKind::Lifecycle("ring_pause", None),
                vec!["PausedOrResumed(9)"],
            ),
            (
                RuntimeEventKind::Lifecycle("fork_parent", Some(7)),
                vec!["Forked(Some(7))"],
            ),
            // It has no name so far.
            (user, vec![]),
        ] {
            assert_eq!(passed(&mut selected, &table, kind), expected, "{kind:?}");
        }
        table.0[..5].copy_from_slice(b"late\0");
        assert_eq!(passed(&mut selected, &table, user), ["event 4"]);
        assert_eq!(
            names(&selected),
            [
                ("phase", "minor"),
                ("phase", "compact_evacuate"),
                ("lifecycle", "domain_terminate"),
                ("user", "minor"),
                ("user", "late"),
            ]
        );
    }
}
