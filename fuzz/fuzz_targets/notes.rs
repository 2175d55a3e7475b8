//! Parses the notes and arguments of a note section with arbitrary bytes. The tests of the library check
//! the corpus in the same way.

#![no_main]

use libfuzzer_sys::fuzz_target;
use probes_lib::{Argument, Generation, notes};

fuzz_target!(|section: &[u8]| {
    let mut last = None;
    let mut ended = false;
    for note in notes(section) {
        assert!(!ended, "a note after a malformed one");
        let (index, offset) = match &note {
            Ok(note) => (note.index, note.offset),
            Err(malformed) => (malformed.index, malformed.offset),
        };
        assert!(offset < section.len() && last < Some((index, offset)));
        last = Some((index, offset));
        let Ok(note) = note else {
            ended = true;
            continue;
        };
        Generation::of_provider(note.provider);
        let arguments = note.arguments;
        assert!(!arguments.contains(&0));
        for text in String::from_utf8_lossy(arguments).split_ascii_whitespace() {
            if let Some(argument) = Argument::parse(text) {
                let written = argument.to_string();
                assert_eq!(Argument::parse(&written), Some(argument), "{text}");
            }
        }
    }
});
