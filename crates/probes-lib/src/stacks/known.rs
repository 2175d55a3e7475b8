//! [`KnownStacks`]: stacks of blocked threads that were found before, which are recognized without unwinding. Pure.
//!
//! ```text
//! unwind  place + registers + words of memory → frames     what was read is kept with them
//! find    same place, and the same words there → same frames
//! ```
//!
//! A thread that waits again and again does so in few places. Comparing some words takes a small part of the time of
//! unwinding.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::ThreadState;
use super::thread::KernelEntry;
use crate::unwind::memory::StackMemory;
use crate::unwind::registers::FrameRegisters;
use crate::unwind::{RawStack, Unwinder};

/// How many words all kept stacks take before all are forgotten, and how many words are read for one.
const MAX_KEPT: usize = 1 << 19;
const MAX_WORDS: usize = 1 << 10;

/// How many stacks are kept of one place: all are compared.
const MAX_OF_PLACE: usize = 1 << 6;

/// The stack pointer and the program counter of a thread that waits.
type WaitPlace = (u64, u64);

fn place_of(entry: &KernelEntry) -> WaitPlace {
    (entry.stack_pointer, entry.program_counter)
}

fn number_of(entry: &KernelEntry) -> Option<u32> {
    entry.call.map(|call| call.number)
}

/// A stack that was found, and the words that were read for it: their addresses, and what they were.
struct KnownStack {
    call: Option<u32>,
    kernel_function: Option<String>,
    words: Vec<(u64, u64)>,
    state: ThreadState,
    stack: Arc<RawStack>,
}

impl KnownStack {
    /// How many words it takes, about.
    fn size(&self) -> usize {
        32 + 2 * self.words.len() + 2 * self.stack.frames.len()
    }

    fn is_in(&self, memory: &mut impl StackMemory) -> bool {
        let mut words = self.words.iter();
        words.all(|&(at, word)| memory.word(at) == Some(word))
    }
}

#[derive(Default)]
pub(super) struct KnownStacks {
    by_place: HashMap<WaitPlace, Vec<KnownStack>>,
    /// How many words all of them take.
    words: usize,
}

impl KnownStacks {
    /// Returns the stack of a thread that waits at a place, and what it does there, if the memory is what it was when that was found.
    pub(super) fn find(
        &self,
        entry: &KernelEntry,
        kernel_function: Option<&str>,
        memory: &mut impl StackMemory,
    ) -> Option<(ThreadState, Arc<RawStack>)> {
        let mut of_place = self.by_place.get(&place_of(entry))?.iter();
        let known = of_place.find(|known| {
            known.call == number_of(entry)
                && known.kernel_function.as_deref() == kernel_function
                && known.is_in(memory)
        })?;
        Some((known.state.clone(), known.stack.clone()))
    }

    /// Returns the number of the system call that restart_syscall(2) resumes in a thread: the one in which the same stack waited
    /// before.
    pub(super) fn restarted(
        &self,
        entry: &KernelEntry,
        memory: &mut impl StackMemory,
    ) -> Option<u32> {
        let of_place = self.by_place.get(&place_of(entry))?;
        of_place.iter().find_map(|known| match &known.state {
            ThreadState::Blocked { call, .. } if !call.is_restart() && known.is_in(memory) => {
                Some(call.number)
            }
            _ => None,
        })
    }

    /// Keeps a stack that was found by these `reads`, unless it depends on more than the place and words of memory.
    pub(super) fn add(
        &mut self,
        entry: &KernelEntry,
        kernel_function: Option<&str>,
        (state, stack): (&ThreadState, &Arc<RawStack>),
        reads: Reads,
        unwinder: &mut Unwinder,
    ) {
        let is_kept = matches!(state, ThreadState::Blocked { .. } | ThreadState::Waiting);
        let Some(words) = reads.words().filter(|_| is_kept) else {
            return;
        };
        // The arguments of the system call are in registers, and differ each time.
        let without_arguments = FrameRegisters::new(entry.program_counter, entry.stack_pointer);
        let mut memory = OnlyWords {
            words: &words,
            next: 0,
        };
        if unwinder.unwind(without_arguments, &mut memory) != **stack {
            return;
        }
        let place = place_of(entry);
        let known = KnownStack {
            call: number_of(entry),
            kernel_function: kernel_function.map(str::to_owned),
            words,
            state: state.clone(),
            stack: stack.clone(),
        };
        if self.words + known.size() > MAX_KEPT {
            *self = KnownStacks::default();
        }
        self.words += known.size();
        let of_place = self.by_place.entry(place).or_default();
        if of_place.len() >= MAX_OF_PLACE {
            // The words of these stacks differ each time: the counter of a loop, for example.
            self.words -= of_place.iter().map(KnownStack::size).sum::<usize>();
            of_place.clear();
        }
        of_place.push(known);
    }
}

/// What was read of memory, except code, which does not change.
pub(super) struct Reads {
    words: Vec<(u64, u64)>,
    /// Whether there were others: a read that failed, or was not one of a word, or too many.
    is_incomplete: bool,
}

impl Reads {
    fn words(self) -> Option<Vec<(u64, u64)>> {
        (!self.is_incomplete).then_some(self.words)
    }
}

/// Memory, and what was read of it.
pub(super) struct RecordedReads<'m, M> {
    memory: &'m mut M,
    code: Vec<Range<u64>>,
    reads: Reads,
}

impl<'m, M: StackMemory> RecordedReads<'m, M> {
    pub(super) fn of(memory: &'m mut M, unwinder: &Unwinder) -> RecordedReads<'m, M> {
        RecordedReads {
            memory,
            code: unwinder.code().collect(),
            reads: Reads {
                words: Vec::new(),
                is_incomplete: false,
            },
        }
    }

    pub(super) fn reads(self) -> Reads {
        self.reads
    }
}

impl<M: StackMemory> StackMemory for RecordedReads<'_, M> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let read = self.memory.read(at, bytes);
        if self.code.iter().any(|code| code.contains(&at)) {
            return read;
        }
        match <[u8; 8]>::try_from(&*bytes) {
            Ok(word) if read.is_some() && self.reads.words.len() < MAX_WORDS => {
                self.reads.words.push((at, u64::from_le_bytes(word)));
            }
            _ => self.reads.is_incomplete = true,
        }
        read
    }
}

/// Memory that holds these words, and no code.
struct OnlyWords<'w> {
    words: &'w [(u64, u64)],
    /// Which is likely to be read next.
    next: usize,
}

impl StackMemory for OnlyWords<'_> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let bytes: &mut [u8; 8] = bytes.try_into().ok()?;
        let (before, after) = self.words.split_at_checked(self.next)?;
        let mut in_order = (self.next..).zip(after).chain((0..).zip(before));
        let (index, (_, word)) = in_order.find(|(_, (address, _))| *address == at)?;
        self.next = index + 1;
        *bytes = word.to_le_bytes();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::LiveAddr;
    use crate::stacks::SystemCall;
    use crate::unwind::{RawFrame, StackEnd};

    const STACK: u64 = 0x7ffc_0000;

    /// Words from [`STACK`] on.
    struct Words(Vec<u64>);

    impl StackMemory for Words {
        fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
            let index = usize::try_from(at.checked_sub(STACK)? / 8).ok()?;
            bytes.copy_from_slice(&self.0.get(index)?.to_le_bytes());
            Some(())
        }
    }

    fn entry(argument: u64) -> KernelEntry {
        KernelEntry {
            call: Some(SystemCall {
                number: 230,
                arguments: [argument; 6],
            }),
            stack_pointer: STACK,
            program_counter: 0x40_1000,
        }
    }

    /// What is found by reading the first two words, with an unwinder that knows no code.
    fn added(known: &mut KnownStacks, memory: &mut Words) -> Arc<RawStack> {
        let mut unwinder = Unwinder::of([].into_iter());
        let mut recorded = RecordedReads::of(memory, &unwinder);
        recorded.word(STACK);
        recorded.word(STACK + 8);
        let at = LiveAddr(0x40_1000);
        let stack = Arc::new(RawStack {
            frames: vec![RawFrame {
                address: at,
                within: at,
            }],
            end: StackEnd::UnknownCode(at),
            is_guessed: false,
        });
        let state = ThreadState::Blocked {
            call: entry(1).call.unwrap(),
            waits_for: None,
        };
        let (reads, found) = (recorded.reads(), (&state, &stack));
        known.add(&entry(1), Some("do_nanosleep"), found, reads, &mut unwinder);
        stack
    }

    #[test]
    fn same_words_at_same_place_are_recognized() {
        let mut known = KnownStacks::default();
        let first = added(&mut known, &mut Words(vec![1, 2, 3]));
        let second = added(&mut known, &mut Words(vec![1, 9, 3]));
        let found = |known: &KnownStacks, entry: &KernelEntry, function, words: &[u64]| {
            let found = known.find(entry, Some(function), &mut Words(words.to_vec()));
            found.map(|(_, stack)| stack)
        };
        let is = |found: Option<Arc<RawStack>>, stack| Arc::ptr_eq(&found.unwrap(), stack);
        // Arguments, and words that no frame depends on, may be others.
        let sleeps =
            |argument, words: &[u64]| found(&known, &entry(argument), "do_nanosleep", words);
        assert!(is(sleeps(1, &[1, 2, 3]), &first));
        assert!(is(sleeps(7, &[1, 2, 4]), &first));
        assert!(is(sleeps(1, &[1, 9, 3]), &second));
        for words in [&[1, 3, 3][..], &[1]] {
            assert!(sleeps(1, words).is_none(), "{words:?}");
        }
        assert!(found(&known, &entry(1), "do_signal_stop", &[1, 2, 3]).is_none());
        // It goes on after a stop.
        let number = libc::SYS_restart_syscall as u32;
        let call = SystemCall {
            number,
            arguments: [1; 6],
        };
        let after_stop = KernelEntry {
            call: Some(call),
            ..entry(1)
        };
        let restarted = |words: &[u64]| known.restarted(&after_stop, &mut Words(words.to_vec()));
        assert_eq!(restarted(&[1, 9, 3]), Some(230));
        assert_eq!(restarted(&[1, 3, 3]), None);
        let elsewhere = KernelEntry {
            stack_pointer: STACK + 8,
            ..entry(1)
        };
        assert!(found(&known, &elsewhere, "do_nanosleep", &[1, 2, 3]).is_none());
    }

    #[test]
    fn known_stacks_take_bounded_memory() {
        let mut known = KnownStacks::default();
        for word in 0..1000 {
            added(&mut known, &mut Words(vec![1, word]));
            assert!(known.by_place.values().all(|it| it.len() <= MAX_OF_PLACE));
            let kept = known.by_place.values().flatten().map(KnownStack::size);
            assert_eq!(known.words, kept.sum::<usize>());
        }
        // Not all that was read is known.
        let unwinder = Unwinder::of([].into_iter());
        let mut memory = Words(vec![1]);
        let mut recorded = RecordedReads::of(&mut memory, &unwinder);
        recorded.word(STACK);
        assert!(recorded.word(STACK + 8).is_none());
        assert_eq!(recorded.reads().words(), None);
    }
}
