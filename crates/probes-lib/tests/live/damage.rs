//! Memory that is not as expected: foreign bytes at a site, counters that contradict each other or
//! are full, code that cannot be written. Nothing is changed then, and everything works once it is
//! repaired.

use probes_lib::{
    Action, Effect, Error, ErrorKind, LiveAddr, MemoryError, ProbeError, Selector, SiteCode, State,
};
use test_support::process::{peek, poke};
use test_support::{Talker, fixture_forms, program_forms};

use crate::session::{Session, all, named};

/// Bytes that another tool writes over a site, what the error says of them, and whether the state
/// of the probe can still be read.
struct Foreign {
    offset: u64,
    bytes: &'static [u8],
    reason: &'static str,
    /// Whether a probe with these bytes is still recognised as enabled or disabled.
    readable: bool,
}

const BREAKPOINT: &str = "a breakpoint or uprobe (gdb, perf, bpftrace) is there";
const DIFFERENT: &str = "the process does not have the bytes of the file";

const FOREIGN: [Foreign; 6] = [
    Foreign {
        offset: 1,
        bytes: &[0xcc],
        reason: BREAKPOINT,
        readable: false,
    },
    Foreign {
        offset: 0,
        bytes: &[0xcc],
        reason: BREAKPOINT,
        readable: true,
    },
    Foreign {
        offset: 1,
        bytes: &[0x0f],
        reason: DIFFERENT,
        readable: false,
    },
    Foreign {
        offset: 0,
        bytes: &[0x66],
        reason: DIFFERENT,
        readable: false,
    },
    Foreign {
        offset: 2,
        bytes: &[0x77],
        reason: DIFFERENT,
        readable: false,
    },
    Foreign {
        offset: 0,
        bytes: &[0x0f, 0x0b, 0x90, 0x90, 0x90, 0x90],
        reason: DIFFERENT,
        readable: false,
    },
];

impl Foreign {
    /// How an error prints it in a site that holds `found`: as few bytes as show the defect.
    fn shown(&self, found: [u8; 6]) -> String {
        match (self.offset, self.bytes) {
            (0, [nop]) => format!("{nop:02x}, expected 90: "),
            (1, [opcode]) => format!("{opcode:02x}, expected 3d or e8: "),
            _ => format!("{}, expected ", SiteCode(found)),
        }
    }
}

/// Addresses of the sites of a probe in the process.
fn sites(session: &Session, name: &str) -> Vec<LiveAddr> {
    let states = session.target.states().unwrap();
    let probe = states.probe(name).unwrap();
    probe.sites().map(|site| site.address).collect()
}

fn counters(session: &Session, name: &str) -> Vec<LiveAddr> {
    let states = session.target.states().unwrap();
    let probe = states.probe(name).unwrap();
    let counters = probe.semaphores();
    counters.map(|semaphore| semaphore.address).collect()
}

fn refused_unchanged(session: &Session, actions: &probes_lib::Actions) -> Error {
    let before = session.image();
    let error = session.apply(actions).unwrap_err();
    assert_eq!(error.effect(), Effect::NothingChanged, "{error}");
    session.image().assert_same(&before, &error.to_string());
    error
}

// promise: All or nothing: Nothing is written if one byte is not as expected, even with `-force` (4
//    × 60 updates)
#[test]
fn foreign_bytes_at_one_site_prevent_the_update() {
    for file in fixture_forms("multi_semaphore")
        .into_iter()
        .chain(program_forms("twolibs"))
    {
        let mut session = Session::start(&file);
        let states = session.states();
        let name = if states.contains_key("many") {
            "many"
        } else {
            "shared"
        };
        // Checked with the probe on and off.
        for on in [false, true] {
            let site = *sites(&session, name).last().unwrap();
            let original: [u8; 6] = peek(session.pid(), site.0, 6).try_into().unwrap();
            for foreign in &FOREIGN {
                session.image();
                poke(session.pid(), site.0 + foreign.offset, foreign.bytes);
                let mut found = original;
                let at = foreign.offset as usize;
                found[at..at + foreign.bytes.len()].copy_from_slice(foreign.bytes);

                let state = session.state(name);
                let readable = [State::Disabled, State::Enabled][usize::from(on)];
                let expected = if foreign.readable {
                    readable
                } else {
                    State::Inconsistent
                };
                assert_eq!(state, expected, "{found:02x?}");

                for actions in [
                    all(Action::Enable),
                    all(Action::Disable),
                    named(Action::Enable, name),
                    all(Action::Enable).force(true),
                    all(Action::Disable).force(true),
                ] {
                    let error = refused_unchanged(&session, &actions);
                    match error.kind() {
                        ErrorKind::Probe(ProbeError::UnexpectedSite {
                            name: named,
                            address,
                            found: bytes,
                            ..
                        }) => {
                            assert_eq!((&named[..], *address, bytes.0), (name, site, found));
                        }
                        kind => panic!("{found:02x?}: {kind:?}"),
                    }
                    let message = error.to_string();
                    let found = foreign.shown(found);
                    let start = format!("a site of probe \"{name}\" at {site}: found {found}");
                    assert!(message.starts_with(&start), "{message}");
                    let end = format!("{}; nothing was changed", foreign.reason);
                    assert!(message.ends_with(&end), "{message}");
                }
                poke(session.pid(), site.0, &original);
            }
            // Once it is restored, everything works as usual, as do the probes beside the damaged
            // one.
            let action = [Action::Enable, Action::Disable][usize::from(on)];
            session.update(action, Selector::All, |_| true);
            let hits = session.run();
            assert!(hits.values().all(|&count| (count > 0) != on), "{hits:?}");
        }
    }
}

#[test]
fn probe_beside_a_damaged_one_is_changed() {
    for file in fixture_forms("multi_semaphore") {
        let session = Session::start(&file);
        let site = sites(&session, "many")[0];
        let original = peek(session.pid(), site.0, 6);
        poke(session.pid(), site.0 + 1, &[0xcc]);
        let before = session.image();
        session.apply(&named(Action::Enable, "single")).unwrap();
        session.apply(&named(Action::Disable, "single")).unwrap();
        session.image().assert_same(&before, "the breakpoint stays");
        poke(session.pid(), site.0, &original);
    }
}

// promise: Processes that are hard to change: Code that is mapped shared is refused before anything
//    is written (2 × 3)
#[test]
fn code_mapped_shared_is_refused_others_are_changed() {
    for file in fixture_forms("shared_text") {
        let mut session = Session::start(&file);
        for actions in [
            all(Action::Enable),
            named(Action::Enable, "guarded"),
            named(Action::Enable, "guarded").force(true),
        ] {
            let error = refused_unchanged(&session, &actions);
            let page = match error.kind() {
                ErrorKind::Memory(MemoryError::Shared { address, .. }) => *address,
                kind => panic!("{kind:?}"),
            };
            assert_eq!(
                error.to_string(),
                format!(
                    "a site of process {} at {page} is mapped shared, and cannot be changed for \
                     this process alone; nothing was changed",
                    session.pid()
                )
            );
            assert_eq!(page.0 & !0xfff, sites(&session, "guarded")[0].0 & !0xfff);
        }
        assert_eq!(session.state("guarded"), State::Disabled);
        session.update(Action::Enable, Selector::name("free"), |name| {
            name == "free"
        });
        let hits = session.run();
        assert_eq!((hits["free"], hits["guarded"]), (1, 0));
    }
}

#[test]
fn full_counter_is_refused_and_can_count_down() {
    for file in fixture_forms("gen_ocaml")
        .into_iter()
        .chain(fixture_forms("multi_semaphore"))
    {
        let session = Session::start(&file);
        session.apply(&all(Action::Enable)).unwrap();
        let names: Vec<String> = session.states().into_keys().collect();
        let name = &names[0];
        let all_counters = counters(&session, name);
        let set = |at: LiveAddr, value: u16| poke(session.pid(), at.0, &value.to_le_bytes());
        // Only the last of its counters is full: the smallest one, which is reported, does not show
        // that.
        set(*all_counters.last().unwrap(), u16::MAX);
        let error = refused_unchanged(&session, &all(Action::Enable));
        assert!(matches!(
            error.kind(),
            ErrorKind::Probe(ProbeError::CounterFull { .. })
        ));
        assert_eq!(
            error.to_string(),
            format!(
                "probe \"{name}\" has been enabled 65535 times: its counter can hold no more; \
                 nothing was changed"
            )
        );
        for &counter in &all_counters {
            set(counter, u16::MAX);
        }
        refused_unchanged(&session, &named(Action::Enable, name));
        session.update(Action::Disable, Selector::All, |_| true);
        assert_eq!(session.states()[name], (65534, State::Enabled));
        session.apply(&named(Action::Enable, name)).unwrap();
        assert_eq!(session.states()[name], (65535, State::Enabled));
        session
            .apply(&named(Action::Disable, name).force(true))
            .unwrap();
        assert_eq!(session.states()[name], (0, State::Disabled));
    }
}

// promise: Death of the tool: Counters and sites that contradict each other are reported, and
//    repaired with `-force` (4 × 4 contradictions)
#[test]
fn contradicting_counters_and_sites_are_repaired_by_force() {
    for file in fixture_forms("multi_semaphore")
        .into_iter()
        .chain(fixture_forms("gen_ocaml"))
    {
        let mut session = Session::start(&file);
        let names: Vec<String> = session.states().into_keys().collect();
        let name = names
            .iter()
            .find(|name| counters(&session, name).len() > 1)
            .unwrap();
        let site = sites(&session, name)[1].0 + 1;
        let counter = counters(&session, name)[1].0;
        // One counter of several is 1; one site is enabled; one counter is 0; one site is disabled.
        let damaged: [(bool, u64, &[u8]); 4] = [
            (false, counter, &[1, 0]),
            (false, site, &[0xe8]),
            (true, counter, &[0, 0]),
            (true, site, &[0x3d]),
        ];
        for (on, at, bytes) in damaged {
            if on {
                session.apply(&all(Action::Enable)).unwrap();
            }
            poke(session.pid(), at, bytes);
            assert_eq!(session.state(name), State::Inconsistent);
            for actions in [
                all(Action::Enable),
                all(Action::Disable),
                named(Action::Disable, name),
            ] {
                let error = refused_unchanged(&session, &actions);
                match error.kind() {
                    ErrorKind::Probe(ProbeError::Inconsistent { name: named, .. }) => {
                        assert_eq!(named, name)
                    }
                    kind => panic!("{kind:?}"),
                }
            }
            session.apply(&all(Action::Enable).force(true)).unwrap();
            session.assert_all((1, State::Enabled));
            assert!(session.run().values().all(|&hits| hits > 0));
            session.apply(&all(Action::Disable).force(true)).unwrap();
            session.assert_all((0, State::Disabled));
            assert!(session.run().values().all(|&hits| hits == 0));
        }
    }
}

// promise: All or nothing: A breakpoint beside a site survives the writes to its page (2)
#[test]
fn breakpoint_beside_a_site_survives_its_writes() {
    for file in fixture_forms("spin_1000") {
        let session = Session::of(Talker::start(&file));
        // Between the sites of one page, where the code is not executed meanwhile.
        let site = sites(&session, "probe_0")[3];
        let at = site.0 + 6;
        let original = peek(session.pid(), at, 1);
        poke(session.pid(), at, &[0xcc]);
        session.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(peek(session.pid(), at, 1), [0xcc]);
        poke(session.pid(), at, &original);
        session.update(Action::Disable, Selector::All, |_| true);
    }
}
