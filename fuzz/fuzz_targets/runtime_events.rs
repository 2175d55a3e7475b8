//! Reads arbitrary bytes as a file of runtime events. The tests of the library check the corpus in the same way.

#![no_main]

mod memory_file;

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use probes_lib::{RingEntry, RuntimeEventKind, RuntimeEvents, SelectedEntry};

include!("runtime_events_input.rs");

/// The program, written once: a file in memory is replaced by the next one.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("runtime_events.{}", std::process::id()));
    fs::write(&path, program_of_ocaml_5_4()).expect("a temporary file");
    path
});

fuzz_target!(|file: &[u8]| {
    let mut events = match RuntimeEvents::of_file(memory_file::file_with(file), &*PROGRAM) {
        Ok(events) => events,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let mut users = Vec::new();
    let mut words = 0;
    let read = events.read(|entry| {
        if let RingEntry::Event { kind, .. } = entry {
            words += 1;
            if let RuntimeEventKind::User(id, _) = kind {
                users.push(id);
            }
        }
    });
    assert!(words <= file.len() / 8, "each event has words of its own");
    for id in users {
        let _ = events.user_event_name(id);
    }
    // The same, selected by names, which are also read from the file.
    let mut events = events.from_start();
    let mut named = 0;
    let by_name = events.select(&[]).and_then(|mut selected| {
        let by_name = events.read_selected(&mut selected, |entry| {
            named += usize::from(matches!(entry, SelectedEntry::Event { .. }));
        });
        assert!(named == 0 || !selected.names().is_empty());
        by_name
    });
    for result in [read, by_name] {
        if let Err(error) = result {
            assert!(!error.to_string().is_empty());
        }
    }
    assert_eq!(named, words, "each event has a name");
});
