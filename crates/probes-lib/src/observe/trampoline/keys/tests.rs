//! The compiled code finds the same keys as a model, and counts each in a slot of its own: a traced process executes
//! it, with random arguments and memory.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use test_support::process::{peek, poke};

use super::super::SAVED_IF_TIMED;
use super::super::filter::tests::{
    LAYOUT, MEMORY, PAGES, Puppet, RecordedHit, SHARED, SOURCES, TID, finished, hit_with_text_of_c,
    hits, numbers, scope, with_puppet,
};
use super::*;
use crate::address::PAGE;
use crate::expression::typed::{STRING_TAG, Word, block_of};
use crate::expression::{Expression, Hit, Keys};
use crate::observe::layout::groups::GROUPS;
use crate::observe::value_pages::ValuePages;

#[test]
fn numbers_of_slots_follow_from_their_distance() {
    for units in 1..8 {
        let layout = KeysLayout::of_number(units).with_histograms();
        for number in 0..u64::from(histograms::OF_SLOTS) {
            let product = number * layout.slot_len() * reciprocal(layout) as u64;
            assert_eq!(product >> RECIPROCAL_BITS, number, "{units}");
        }
    }
}

/// The number of the point's name.
const NAME: u32 = 7;

/// A list of keys, as text.
fn lists() -> impl Strategy<Value = String> {
    const STRINGS: &[&str] = &[
        "str(arg0)",
        "str(arg1)",
        "str(arg5)",
        "str(arg6.1)",
        "str(arg2)",
        "str(arg2)",
    ];
    let held = prop_oneof![
        2 => numbers(),
        1 => numbers().prop_map(|number| format!("u64({number})")),
        2 => proptest::sample::select(STRINGS).prop_map(str::to_owned),
    ];
    let held = proptest::collection::vec(held, 1..=Keys::MAX_HELD);
    let others = proptest::sample::select(&["probe", "tid", "caller"][..]);
    (held, others, 0..4_usize).prop_map(|(mut parts, other, at)| {
        if at <= parts.len() {
            parts.insert(at, other.to_owned());
        }
        parts.join(",")
    })
}

/// Returns the words of a key at a hit, as they are in a slot. `None` is untyped.
fn expected(role: &KeyRole, keys: &Keys, hit: &RecordedHit) -> Option<Vec<Vec<u64>>> {
    let parts = role.parts.iter().zip(keys.expressions());
    let parts = parts.map(|(part, expression)| match part {
        KeyPart::Number(..) => Some(vec![number(expression, hit)?]),
        KeyPart::Text(Text::Ocaml(word)) => string(word, hit),
        KeyPart::Text(Text::C(word)) => string_of_c(hit.argument(of_c(word))?, hit),
        KeyPart::Probe => Some(vec![NAME.into()]),
        KeyPart::Thread => Some(vec![TID.into()]),
        KeyPart::Caller => Some(vec![hit.caller()?]),
    });
    parts.collect()
}

fn number(expression: &Expression, hit: &RecordedHit) -> Option<u64> {
    expression.integer(&scope()).unwrap().value(hit)
}

/// Returns how many words a string has, and the first of them. `None` if it is no string, or a word that a key may need
/// is not readable.
fn string(word: &Word, hit: &RecordedHit) -> Option<Vec<u64>> {
    let at = address(word, hit)?;
    let (tag, size) = header(at, hit)?;
    if tag != STRING_TAG || size == 0 {
        return None;
    }
    let read = |index: u64| hit.word_at(at.wrapping_add(8 * index));
    let last = read(size.min(text::WHOLE) - 1)?;
    let many = match size {
        0..=text::WORDS => size,
        text::WHOLE if last == LAST_OF_WHOLE => text::WHOLE,
        _ => text::LONGER,
    };
    let words: Option<Vec<u64>> = (0..many.min(text::WORDS)).map(read).collect();
    let mut all = vec![many];
    all.extend(words?);
    Some(all)
}

/// Returns how many bytes a string of C has, and the first of them. `None` if a byte that a key needs is not readable.
fn string_of_c(at: u64, hit: &RecordedHit) -> Option<Vec<u64>> {
    let bytes = (0..=text::MAX_READ).map(|index| {
        let at = at.wrapping_add(index);
        let word = hit.word_at(at & !7)?;
        Some(word.to_le_bytes()[(at & 7) as usize])
    });
    let bytes: Vec<u8> = bytes.collect::<Option<_>>()?;
    let len = bytes.iter().position(|byte| *byte == 0);
    let len = len.unwrap_or(bytes.len());
    let mut held = bytes[..len.min(text::MAX_READ as usize)].to_vec();
    held.resize(held.len().next_multiple_of(8), 0);
    let words = held
        .chunks_exact(8)
        .map(|it| u64::from_le_bytes(it.try_into().unwrap()));
    Some([text::OF_C + len as u64].into_iter().chain(words).collect())
}

/// The number of an argument of C.
fn of_c(word: &Word) -> usize {
    match word {
        Word::Argument(index) => (*index).into(),
        Word::Field(..) => panic!("{word:?}"),
    }
}

fn address(word: &Word, hit: &RecordedHit) -> Option<u64> {
    match word {
        Word::Argument(index) => hit.argument((*index).into()),
        Word::Field(of, field) => {
            let at = address(of, hit)?;
            let (tag, size) = header(at, hit)?;
            let field = u64::from(*field);
            // What a block of a greater tag holds are no values.
            let has_it = tag < 246 && field < size;
            has_it.then(|| hit.word_at(at.wrapping_add(8 * field)))?
        }
    }
}

/// Returns tag and size in words of a block.
fn header(at: u64, hit: &RecordedHit) -> Option<(u64, u64)> {
    if at % 8 != 0 {
        return None;
    }
    let header = hit.word_at(at.wrapping_sub(8))?;
    Some((header & 0xff, header << 8 >> 18))
}

/// Returns code that counts a hit, and leaves the address of its slot in rbx, and 1 in rax; or 2 there if there is no room, or 3 if it is untyped.
fn code(role: &KeyRole) -> Vec<u8> {
    let saved = &SAVED_IF_TIMED;
    finished(
        saved,
        role,
        ValuePages::TableOfObserver,
        |a, context, other, untyped| super::count(a, role, context, untyped, other),
    )
}

/// Slots that hold keys; they are free again in the end, whatever fails.
struct Slots<'p> {
    puppet: &'p Puppet,
    at: BTreeSet<u64>,
}

impl Drop for Slots<'_> {
    fn drop(&mut self) {
        let free = vec![0; LAYOUT.keys.slot_len() as usize];
        for at in &self.at {
            poke(self.puppet.pid.as_raw(), *at, &free);
        }
    }
}

#[test]
fn texts_of_c_are_held_to_64_bytes() {
    let keys: Keys = "str(arg2)".parse().unwrap();
    let role = KeyRole {
        parts: keys.parts(&scope()).unwrap(),
        arguments: SOURCES.to_vec(),
        name: NAME,
    };
    let code = code(&role);
    let end = MEMORY + PAGES * PAGE;
    with_puppet(|puppet| {
        for len in [0, 1, 7, 8, 9, 15, 63, 64, 65, 100] {
            let text: Vec<u8> = (1..=len).chain([0]).collect();
            for at in [MEMORY + 0x100, MEMORY + PAGE - 3, end - 65, end - 64, end] {
                let hit = hit_with_text_of_c(at, &text);
                let after = puppet.execute(&code, &role, &hit);
                let Some(expected) = string_of_c(at, &hit) else {
                    assert_eq!((after.rax, at >= end - 64), (3, true), "{len} {at:x}");
                    continue;
                };
                assert_eq!(after.rax, 1, "{len} {at:x}");
                let _slots = Slots {
                    puppet,
                    at: [after.rbx].into(),
                };
                let slot = peek(
                    puppet.pid.as_raw(),
                    after.rbx,
                    LAYOUT.keys.slot_len() as usize,
                );
                let words = slot[slot::KEY as usize..].chunks_exact(8);
                let words = words.map(|it| u64::from_le_bytes(it.try_into().unwrap()));
                let held: Vec<u64> = words.take(expected.len()).collect();
                assert_eq!(held, expected, "{len} {at:x}");
            }
        }
    });
}

#[test]
fn texts_of_ocaml_are_readable_to_the_end() {
    let keys: Keys = "str(arg0)".parse().unwrap();
    let role = KeyRole {
        parts: keys.parts(&scope()).unwrap(),
        arguments: SOURCES.to_vec(),
        name: NAME,
    };
    let code = code(&role);
    // The third page is not in the table.
    let end = MEMORY + 2 * PAGE;
    let mut seen = [0; 2];
    with_puppet(|puppet| {
        for len in [0, 7, 8, 16, 56, 64, 80] {
            let block = block_of(&vec![b'a'; len]);
            for words in 0..12 {
                let at = end - 8 * words;
                let header = (block.len() as u64) << 10 | STRING_TAG;
                let all = std::iter::once(header).chain(block.iter().copied());
                let hit = RecordedHit {
                    arguments: [at, 1, 1, 0, 0, 1, 1],
                    words: (at - 8..).step_by(8).zip(all).collect(),
                    readable: 0b011,
                    is_valid: true,
                    may_ask: true,
                };
                let after = puppet.execute(&code, &role, &hit);
                let is_typed = expected(&role, &keys, &hit).is_some();
                let answer = if is_typed { 1 } else { 3 };
                assert_eq!(after.rax, answer, "{len} {words}");
                if is_typed {
                    let at = [after.rbx].into();
                    drop(Slots { puppet, at });
                }
                seen[usize::from(is_typed)] += 1;
            }
        }
    });
    assert!(seen.iter().all(|many| *many > 20), "{seen:?}");
}

// promise: Observations: Compiled keys are those of a model, and each has a slot of its own with its exact hits (300 random lists of
//    expressions, with random arguments and memory)
#[test]
fn compiled_keys_are_those_of_a_model() {
    let cases = std::env::var("EXPRESSION_CASES").map_or(300, |many| many.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(cases)
    });
    let (typed, untyped, together) = (Cell::new(0_u32), Cell::new(0_u32), Cell::new(0_u32));
    let add = |to: &Cell<u32>| to.set(to.get() + 1);
    let inputs = (lists(), proptest::collection::vec(hits(), 1..6));
    runner
        .run(&inputs, |(list, hits)| {
            let keys: Keys = list.parse().unwrap();
            let Ok(parts) = keys.parts(&scope()) else {
                // Too many numbers at a time.
                return Ok(());
            };
            let role = KeyRole {
                parts,
                arguments: SOURCES.to_vec(),
                name: NAME,
            };
            let code = code(&role);
            let places: Vec<_> = super::keys::parts(&role.kinds()).collect();
            // Of each key, its slot and its hits.
            let mut found: BTreeMap<Vec<Vec<u64>>, (u64, u64)> = BTreeMap::new();
            with_puppet(|puppet| {
                let pid = puppet.pid.as_raw();
                let mut slots = Slots {
                    puppet,
                    at: BTreeSet::new(),
                };
                for hit in hits.iter().chain(&hits) {
                    let after = puppet.execute(&code, &role, hit);
                    let Some(key) = expected(&role, &keys, hit) else {
                        assert_eq!(after.rax, 3, "{list} with {hit:x?}");
                        add(&untyped);
                        continue;
                    };
                    assert_eq!(after.rax, 1, "{list} with {hit:x?}");
                    add(&typed);
                    slots.at.insert(after.rbx);
                    let table = SHARED + LAYOUT.keys();
                    let offset = after.rbx - table;
                    assert!(offset < LAYOUT.keys.copy_len() * GROUPS as u64);
                    assert_eq!(offset % LAYOUT.keys.copy_len() % LAYOUT.keys.slot_len(), 0);
                    let slot = peek(pid, after.rbx, LAYOUT.keys.slot_len() as usize);
                    let word =
                        |at: u64| u64::from_le_bytes(slot[at as usize..][..8].try_into().unwrap());
                    let (slot_of_key, hits) = found.entry(key.clone()).or_insert((after.rbx, 0));
                    *hits += 1;
                    if *hits == 3 {
                        add(&together);
                    }
                    assert_eq!(
                        (*slot_of_key, *hits),
                        (after.rbx, word(slot::HITS)),
                        "{list}"
                    );
                    let state = word(slot::STATE) & 0xff;
                    assert_eq!(
                        state,
                        u64::from(role.signs()) << slot::SIGNS_AT | slot::HELD
                    );
                    for (place, words) in places.iter().zip(&key) {
                        let held: Vec<u64> = (0..words.len() as u64)
                            .map(|index| word(place.start + 8 * index))
                            .collect();
                        assert_eq!(&held, words, "{list} with {hit:x?}");
                    }
                }
                assert_eq!(slots.at.len(), found.len(), "{list}: {found:x?}");
            });
            Ok(())
        })
        .unwrap();
    // About 1,400 hits are typed, and as many are not; the numbers vary, because a few lists have many of the hits.
    let seen = [typed.get(), untyped.get()];
    assert!(seen.iter().all(|many| *many > cases / 4), "{seen:?}");
    // Different hits with the same key.
    assert!(together.get() > cases / 20, "{}", together.get());
}
