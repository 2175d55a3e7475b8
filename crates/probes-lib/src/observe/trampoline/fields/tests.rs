//! The code copies what a model of it copies, and nothing else: a traced process executes it, with random memory, some
//! of which must not be read.

use std::cell::Cell;
use std::collections::BTreeMap;

use nix::libc::user_regs_struct;
use proptest::prelude::*;
use test_support::process::{peek, poke};

use super::super::filter::tests::{
    CODE, LAYOUT, MEMORY, PAGES, Puppet, RUNTIMES, RecordedHit, SHARED, STACK,
};
use super::*;
use crate::address::PAGE;
use crate::ticks;

/// Where the record is.
const RECORD: u64 = RUNTIMES + 0x800;
const RECORD_LEN: usize = 0x600;

const NUMBER: u64 = 0x1234_5678_9abc;

/// Returns code that copies the fields of argument `index`. Its copies for the arguments 1 and 6 must not be executed.
fn code(index: u64, value_pages: ValuePages) -> Vec<u8> {
    let layout = SharedLayout {
        value_pages,
        ..LAYOUT
    };
    let mut a = CodeAssembler::new(64).unwrap();
    let (mut after, mut after_other) = (a.create_label(), a.create_label());
    let mut fields = FieldCopies::default();
    fields.begin(&mut a, 1, after_other);
    let begin = fields.begin(&mut a, index, after);
    fields.begin(&mut a, 6, after_other);
    a.jmp(begin).unwrap();
    a.set_label(&mut after).unwrap();
    a.int3().unwrap();
    a.set_label(&mut after_other).unwrap();
    a.ud2().unwrap();
    fields.emit(&mut a, layout, LiveAddr(CODE)).unwrap();
    a.assemble(CODE + 64).unwrap()
}

/// A block in the memory of a hit.
#[derive(Debug)]
struct Blocks {
    hit: RecordedHit,
    at: u64,
}

impl Blocks {
    fn word(&self, at: u64) -> u64 {
        let start = (at - MEMORY) as usize;
        u64::from_le_bytes(self.hit.bytes()[start..start + 8].try_into().unwrap())
    }

    /// Returns a word that may be read.
    fn readable(&self, at: u64) -> Option<u64> {
        let page = at.checked_sub(MEMORY)? / PAGE;
        let may_read = page < PAGES && self.hit.readable >> page & 1 == 1;
        may_read.then(|| self.word(at))
    }

    /// Returns what is copied of the block; `None` if nothing is.
    fn copied(&self) -> Option<Vec<u64>> {
        let header = self.word(self.at - 8);
        let (tag, size) = (header as u8, header >> 10);
        let mut words = vec![0];
        if tag == 248 {
            words.extend([self.at, header]);
            self.exception(self.at, &mut words);
            return Some(words);
        }
        if tag > 243 && tag != 250 || header >> 56 != 0 || size == 0 {
            return None;
        }
        let is_cell = tag == 0 && size == 2;
        let mut left = size.min(fields::MAX);
        let mut at = self.at;
        self.readable(at + 8 * (left - 1))?;
        while left > 0 {
            let room = fields::WORDS as usize - words.len();
            let value = self.word(at);
            if room == 0 || value % 8 == 0 && room == 1 {
                break;
            }
            words.push(value);
            if value % 8 == 0 {
                let header = self.readable(value.wrapping_sub(8));
                let cell = header.map(|header| header & !0x300);
                if is_cell && left == 1 && cell == Some(2 << 10) {
                    words.pop();
                    if self.readable(value + 8).is_none() {
                        break;
                    }
                    words[0] += 1;
                    (at, left) = (value, 2);
                    continue;
                }
                words.push(header.unwrap_or(0));
                match header.map(|header| header as u8) {
                    Some(248) if room < 3 => {
                        words.truncate(words.len() - 2);
                        break;
                    }
                    Some(248) => self.exception(value, &mut words),
                    Some(252) => self.opaque(value, 4, &mut words),
                    Some(253) => self.opaque(value, 1, &mut words),
                    Some(255) => self.opaque(value, 2, &mut words),
                    _ => {}
                }
            }
            at += 8;
            left -= 1;
        }
        Some(words)
    }

    /// Adds the name of the object, whose header is added already.
    fn exception(&self, at: u64, words: &mut Vec<u64>) {
        let Some(name) = self.readable(at) else {
            *words.last_mut().unwrap() = 0;
            return;
        };
        let header = (name % 8 == 0).then(|| self.readable(name.wrapping_sub(8)));
        let header = header.flatten().filter(|header| *header as u8 == 252);
        words.push(header.unwrap_or(0));
        if header.is_some() {
            self.opaque(name, 8, words);
        }
    }

    /// Adds the first words of a block, whose header is added already.
    fn opaque(&self, at: u64, most: u64, words: &mut Vec<u64>) {
        let header = words.last_mut().unwrap();
        let size = *header << 8 >> 18;
        let many = most.min(size);
        let room = fields::WORDS - words.len() as u64;
        let many = many.min(room);
        if many == 0 {
            return;
        }
        if self.readable(at + 8 * (many - 1)).is_none() {
            *words.last_mut().unwrap() = 0;
            return;
        }
        words.extend((0..many).map(|index| self.word(at + 8 * index)));
    }
}

/// How many words are random around each boundary between pages, and around both ends of the memory; and how many of
/// these are before it.
const AROUND: u64 = 48;
const BEFORE: u64 = 25;

/// The address of a word there.
fn address((border, index): (u64, u64)) -> u64 {
    MEMORY + border * PAGE + 8 * index - 8 * BEFORE
}

/// Places there, most of them after one of the headers: those are every third word.
fn place() -> impl Strategy<Value = u64> {
    let index = prop_oneof![
        3 => (0..AROUND / 3).prop_map(|it| 3 * it + 1),
        1 => 0..AROUND,
    ];
    (0..=PAGES, index).prop_map(address)
}

fn header() -> impl Strategy<Value = u64> {
    let tags = prop_oneof![
        6 => Just(0_u64),
        4 => 240_u64..256,
        2 => prop_oneof![Just(248_u64), Just(252)],
        1 => 1_u64..240,
    ];
    let size = prop_oneof![4 => Just(2_u64), 4 => 0_u64..6, 1 => 6_u64..40, 1 => 0_u64..1 << 46];
    let above = prop_oneof![9 => Just(0_u64), 1 => 1_u64..256];
    let any = (tags, size, above);
    let cell = (Just(0), Just(2), Just(0));
    let parts = prop_oneof![1 => cell, 2 => any];
    (parts, 0_u64..4)
        .prop_map(|((tag, size, above), colour)| above << 56 | size << 10 | colour << 8 | tag)
}

fn blocks() -> impl Strategy<Value = Blocks> {
    let value = prop_oneof![
        6 => place(),
        4 => any::<u64>().prop_map(|it| it | 1),
        1 => any::<u64>(),
    ];
    let triple =
        (header(), value.clone(), value).prop_map(|(header, one, other)| [header, one, other]);
    let words = proptest::collection::vec(triple, (AROUND / 3 * (PAGES + 1)) as usize);
    (words, place(), header(), 1_u8..8).prop_map(|(random, at, header, readable)| {
        let end = MEMORY + PAGES * PAGE;
        let at = at.clamp(MEMORY + 8, end - 8);
        let places = (0..=PAGES).flat_map(|border| (0..AROUND).map(move |index| (border, index)));
        let mut words: BTreeMap<u64, u64> = places
            .map(address)
            .zip(random.into_iter().flatten())
            .filter(|(at, _)| (MEMORY..end).contains(at))
            .collect();
        words.insert(at - 8, header);
        let hit = RecordedHit {
            arguments: [0; 7],
            words,
            // Its header has been read, so its page is readable.
            readable: readable | 1 << ((at - 8 - MEMORY) / PAGE),
            is_valid: true,
            may_ask: true,
        };
        Blocks { hit, at }
    })
}

#[test]
fn code_copies_what_the_model_copies() {
    let puppet = Puppet::new();
    let pid = puppet.pid.as_raw();
    let config = ProptestConfig::with_cases(2000);
    let [all, lists, full] = [const { Cell::new(0) }; 3];
    let add = |to: &Cell<u32>, it: bool| to.set(to.get() + u32::from(it));
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let tested = runner.run(&(blocks(), 2_u64..6), |(blocks, index)| {
        let mut expected = vec![0xdd; RECORD_LEN];
        expected[record::COPIED as usize..][..6].fill(1);
        let now = ticks::now().to_le_bytes();
        expected[record::TIME as usize..][..8].copy_from_slice(&now);
        let before = expected.clone();
        if let Some(words) = blocks.copied() {
            expected[(record::COPIED + index) as usize] += words.len() as u8;
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let start = (LAYOUT.argument_at(index) + record::COPY) as usize;
            expected[start..start + bytes.len()].copy_from_slice(&bytes);
            add(&all, true);
            add(&lists, words[0] > 0);
            add(&full, words.len() > 18);
        }
        for pages in [
            ValuePages::TableOfObserver,
            ValuePages::TableOfRuntime(LiveAddr(RUNTIMES)),
        ] {
            puppet.prepare(&code(index, pages), &blocks.hit);
            puppet.poke_runtimes_table(&blocks.hit);
            poke(pid, RECORD, &before);
            let with = user_regs_struct {
                rip: CODE + 64,
                rsp: STACK,
                rax: blocks.word(blocks.at - 8),
                rbx: SHARED,
                rcx: RECORD,
                rdx: blocks.at,
                r8: NUMBER,
                ..puppet.registers
            };
            let after = puppet.run(with);
            prop_assert!(after.is_ok(), "{after:?}");
            let after = after.unwrap();
            prop_assert_eq!((after.rcx, after.rbx, after.r8), (RECORD, SHARED, NUMBER));
            prop_assert_eq!(
                (after.rsp, after.rip),
                (STACK, CODE + 64 + code_at_end(index, pages))
            );
            let len = written(&expected, index);
            let copied = peek(pid, RECORD, RECORD_LEN);
            // Behind what is copied, a word that had no room may have been begun.
            prop_assert_eq!(&copied[..len], &expected[..len]);
            let end = (LAYOUT.argument_at(index + 1)) as usize;
            prop_assert_eq!(&copied[end..], &expected[end..]);
        }
        Ok(())
    });
    tested.unwrap();
    // Not only refusals were tested.
    let [all, lists, full] = [all, lists, full].map(|it| it.get());
    assert!(all > 500 && lists > 20 && full > 20, "{all} {lists} {full}");
}

/// Returns where what is copied ends in a record.
fn written(record: &[u8], index: u64) -> usize {
    let words = u64::from(record[(record::COPIED + index) as usize]) - 1;
    (LAYOUT.argument_at(index) + record::COPY + 8 * words) as usize
}

/// Returns where the code goes on, after the breakpoint there.
fn code_at_end(index: u64, pages: ValuePages) -> u64 {
    let code = code(index, pages);
    let breakpoint = code.iter().position(|byte| *byte == 0xcc);
    breakpoint.unwrap() as u64 + 1
}
