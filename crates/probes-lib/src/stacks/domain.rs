//! [`Domains`]: which domain of OCaml 5 a thread belongs to, and how that domain is interrupted.
//!
//! ```text
//! get_robust_list(2) ─▶ in the control block of the thread (glibc) ─▶ its thread pointer
//! thread pointer ─▶ domain_self, a thread-local variable of the executable ─▶ struct dom_internal, which begins with the number
//! struct dom_internal ─▶ interrupt_word, which is young_limit, the first word of the domain's state
//! ```
//!
//! The runtime sets `domain_self` in each thread that it starts, and in those that are registered with it, and leaves it
//! there while the thread blocks, in contrast to `Caml_state` (runtime/domain.c). Nothing is stopped for it.

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::symbols::SymbolTable;
use crate::elf::{ElfFile, ThreadLocals};
use crate::functions::Functions;
use crate::memory::ReadMemory;
use crate::numbers::u64_at;
use crate::sys::robust_list::robust_list;

/// More domains than OCaml permits: `Max_domains_max` of runtime/caml/config.h is 4096.
const MAX_DOMAINS: u64 = 1 << 12;

/// `struct dom_internal` is larger than that.
const MIN_STRIDE: u64 = 64;

/// What `young_limit` is while a domain is interrupted: more than any `young_ptr`, so that the domain polls at its next allocation.
pub(crate) const INTERRUPTED: u64 = u64::MAX;

/// How far before the list of robust locks the control block of a thread may begin: `struct pthread` of glibc's nptl/descr.h has
/// 704 bytes before, and some words.
const CONTROL_BLOCK: usize = 1 << 10;

/// The control block is aligned so (`TCB_ALIGNMENT` of glibc).
const ALIGNMENT: usize = 64;

/// Where the executable has what tells the domain of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Domains {
    /// `domain_self`, by how much it is below the thread pointer.
    below_thread_pointer: u64,
    all: AllDomains,
}

/// `all_domains`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllDomains {
    /// OCaml 5.0 to 5.2: the table itself, and its length in bytes.
    Table(u64, u64),
    /// Since OCaml 5.3: where the address of the table is.
    Pointer(u64),
}

impl Domains {
    /// Returns `None` if the executable is not known to have the runtime of OCaml 5: it may be stripped, or have it in a
    /// library.
    pub(crate) fn of_process(functions: &Functions) -> Option<Domains> {
        let executable = functions.executable()?;
        Domains::of_executable(executable.elf(), executable.load_bias()?)
    }

    fn of_executable(elf: &ElfFile, bias: LoadBias) -> Option<Domains> {
        let offset = elf.thread_local("domain_self")?;
        let [found] = elf
            .symbols(SymbolTable::Static)
            .ok()??
            .find(["all_domains"])
            .ok()?;
        let [all] = found[..] else {
            return None;
        };
        let at = bias.live(all.address).0;
        Some(Domains {
            below_thread_pointer: below_thread_pointer(offset, elf.thread_locals()?)?,
            all: match all.len {
                8 => AllDomains::Pointer(at),
                len => AllDomains::Table(at, len),
            },
        })
    }

    /// Returns the number of the domain that a thread belongs to; `None` if it belongs to none, or that cannot be determined.
    pub(super) fn of_thread(&self, tid: i32, memory: &impl ReadMemory) -> Option<u32> {
        let (number, _) = self.entry_of_thread(tid, memory)?;
        Some(number)
    }

    /// Returns where [`INTERRUPTED`] has to be written so that the domain of a thread polls at its next allocation, as a signal handler of
    /// the runtime does (`caml_interrupt_all_signal_safe`); `None` if it will poll anyway, or has no such word that is known.
    pub(crate) fn interrupt_word(&self, tid: i32, memory: &impl ReadMemory) -> Option<LiveAddr> {
        let (_, domain) = self.entry_of_thread(tid, memory)?;
        interrupt_word(domain, memory)
    }

    /// Returns the number of the domain that a thread belongs to, and its entry in the table.
    fn entry_of_thread(&self, tid: i32, memory: &impl ReadMemory) -> Option<(u32, u64)> {
        let pointer = thread_pointer(robust_list(tid).ok()?, memory)?;
        let domain = word(memory, pointer.checked_sub(self.below_thread_pointer)?)?;
        if domain == 0 {
            return None;
        }
        let number = word(memory, domain)? & u64::from(u32::MAX);
        let (table, len) = match self.all {
            AllDomains::Table(at, len) => (at, len),
            AllDomains::Pointer(at) => (word(memory, at)?, u64::MAX),
        };
        let offset = domain.checked_sub(table).filter(|offset| *offset < len)?;
        let is_entry = is_at(number, offset);
        Some((u32::try_from(number).ok().filter(|_| is_entry)?, domain))
    }
}

/// Returns the `interrupt_word` of a `struct dom_internal`, unless the domain is interrupted already. The word has to
/// be that of the state in the struct, which begins with `young_limit`, `young_ptr`, `young_start` and `young_end`.
/// "Setting `young_limit` to `UINTNAT_MAX` can be done safely at any time whatsoever by any thread"
/// (runtime/caml/domain_state.tbl).
fn interrupt_word(domain: u64, memory: &impl ReadMemory) -> Option<LiveAddr> {
    // The state is the second field, and in OCaml 5.4 the third; what interrupts it comes next.
    let words = |of: u64| words::<4>(memory, of);
    let [_, second, third, fourth] = words(domain)?;
    let mut pairs = [(second, third), (third, fourth)].into_iter();
    let (state, _) = pairs.find(|(state, word)| *state != 0 && state == word)?;
    let [limit, pointer, start, end] = words(state)?;
    let is_inside = |at| start != 0 && start <= at && at <= end;
    let is_known = state % 8 == 0 && is_inside(limit) && is_inside(pointer);
    is_known.then_some(LiveAddr(state))
}

/// Returns whether the entry of this number may be there in the table, as far as is known without the length of an entry.
fn is_at(number: u64, offset: u64) -> bool {
    match number {
        0 => offset == 0,
        number => {
            number < MAX_DOMAINS && offset % number == 0 && {
                let stride = offset / number;
                stride >= MIN_STRIDE && stride % 8 == 0
            }
        }
    }
}

/// Returns by how much a variable at `offset` in the thread-local variables of the executable is below the thread pointer: they end
/// there, rounded up to their alignment (variant II of "ELF Handling For Thread-Local Storage").
fn below_thread_pointer(offset: FileAddr, variables: ThreadLocals) -> Option<u64> {
    let ThreadLocals { start, len, align } = variables;
    let align = align.max(1);
    let is_aligned = align.is_power_of_two() && start.0 % align == 0;
    let end = len.checked_next_multiple_of(align).filter(|_| is_aligned)?;
    end.checked_sub(offset.0).filter(|below| *below >= 8)
}

/// Returns the thread pointer of the thread with this list of robust locks: the control block that has the list begins there, and has its
/// own address as its first and third words (`tcbhead_t` of glibc's sysdeps/x86_64/nptl/tls.h). That of musl is another.
fn thread_pointer(list: u64, memory: &impl ReadMemory) -> Option<u64> {
    let nearest = list.checked_sub(1)? & !(ALIGNMENT as u64 - 1);
    let end = nearest.checked_add(ALIGNMENT as u64)?;
    let start = end.checked_sub(CONTROL_BLOCK as u64)?;
    let mut bytes = [0; CONTROL_BLOCK];
    memory.read(LiveAddr(start), &mut bytes).ok()?;
    let mut blocks = (0..CONTROL_BLOCK).step_by(ALIGNMENT).rev();
    blocks.find_map(|at| {
        let block = start + at as u64;
        let is_block = [at, at + 16].map(|at| u64_at(&bytes, at)) == [Some(block); 2];
        is_block.then_some(block)
    })
}

fn words<const N: usize>(memory: &impl ReadMemory, at: u64) -> Option<[u64; N]> {
    at.checked_add(8 * N as u64)?;
    let mut words = [0; N];
    for (index, word) in words.iter_mut().enumerate() {
        *word = memory.read_word(LiveAddr(at).plus(8 * index as u64)).ok()?;
    }
    Some(words)
}

fn word(memory: &impl ReadMemory, at: u64) -> Option<u64> {
    memory.read_word(LiveAddr(at)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// Words from an address on.
    struct Words(u64, Vec<u64>);

    impl ReadMemory for Words {
        fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            let all: Vec<u8> = self.1.iter().flat_map(|word| word.to_le_bytes()).collect();
            let start = at.0.checked_sub(self.0).map(|start| start as usize);
            let found = start.and_then(|start| all.get(start..)?.get(..bytes.len()));
            bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }

    #[test]
    fn entries_agree_with_their_numbers() {
        let stride = 312;
        for number in 0..MAX_DOMAINS {
            assert!(is_at(number, number * stride));
        }
        for (number, offset) in [
            (0, 8),
            (1, 0),
            (2, 100),
            (7, 7 * 313),
            (MAX_DOMAINS, 1 << 20),
        ] {
            assert!(!is_at(number, offset), "{number} {offset}");
        }
    }

    #[test]
    fn interrupt_words_are_checked() {
        let state = 0x1000;
        let young = [0x2080, 0x2100, 0x2000, 0x2200];
        let memory = |domain: [u64; 4], young: [u64; 4]| {
            let words = young.into_iter().chain([0; 4]).chain(domain);
            Words(state, words.collect())
        };
        let of = |domain, young| interrupt_word(state + 64, &memory(domain, young));
        for domain in [[0, state, state, 7], [0, 5, state, state]] {
            assert_eq!(of(domain, young), Some(LiveAddr(state)));
            // It is interrupted, has terminated, or has other fields.
            for young in [
                [INTERRUPTED, 0x2100, 0x2000, 0x2200],
                [0; 4],
                [0x2080, 0x2300, 0x2000, 0x2200],
            ] {
                assert_eq!(of(domain, young), None, "{young:?}");
            }
        }
        // It has another layout, or no state.
        for domain in [
            [0, state, state + 8, 7],
            [0; 4],
            [0, u64::MAX, u64::MAX, 0],
            [0, state + 1, state + 1, 0],
        ] {
            assert_eq!(of(domain, young), None, "{domain:?}");
        }
    }

    #[test]
    fn variables_end_at_the_thread_pointer() {
        let below = |offset, start, len, align| {
            let start = FileAddr(start);
            below_thread_pointer(FileAddr(offset), ThreadLocals { start, len, align })
        };
        // Those of the programs here: 0x20 bytes, aligned to 8.
        assert_eq!(below(0, 0x14_3330, 0x20, 8), Some(0x20));
        assert_eq!(below(8, 0x14_3330, 0x24, 8), Some(0x20));
        assert_eq!(below(0x10, 0x1000, 0x20, 64), Some(0x30));
        assert_eq!(below(0x1c, 0x1000, 0x20, 8), None);
        assert_eq!(below(0x28, 0x1000, 0x20, 8), None);
        assert_eq!(below(0, 0x1008, 0x20, 64), None);
        assert_eq!(below(0, 0x1000, 0x20, 24), None);
        assert_eq!(below(0, 0x1000, u64::MAX, 64), None);
    }

    #[test]
    fn control_blocks_have_their_own_addresses() {
        let (start, block) = (0x7000_0000, 0x7000_0800);
        let mut words = vec![0; 512];
        let list = block + 736;
        for at in [0, 16] {
            words[((block - start) as usize + at) / 8] = block;
        }
        let memory = Words(start, words.clone());
        assert_eq!(thread_pointer(list, &memory), Some(block));
        // Of another one, of none, and where nothing can be read.
        assert_eq!(thread_pointer(block, &memory), None);
        for list in [0, 8, start, u64::MAX] {
            assert_eq!(thread_pointer(list, &memory), None, "{list:#x}");
        }
        words[((block - start) as usize + 16) / 8] = 0;
        assert_eq!(thread_pointer(list, &Words(start, words)), None);
    }
}
