//! Injected calls: the code that makes a thread of a stopped process execute system calls, and then
//! return to where it was. The functions here only compute: they access no process.
//!
//! ```text
//! mark     whose code this is
//! calls    mov registers, arguments; syscall          for each call
//! linger   mov count, rcx; loop                       only to learn the result of the last call
//! return   mov registers, what they were; jmp *(rip)  to where the thread was
//! ```
//!
//! Of the thread's registers only the program counter is set, and `orig_rax`, so that the kernel restarts no system
//! call; the code does all else. So the thread returns with all its registers whether its tracer is still there or not.
//! The code keeps the flags and uses no stack.

use std::ops::Range;

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, qword_ptr, r8, r9, r10, r11, rax, rcx, rdi, rdx, rsi,
};

use crate::address::LiveAddr;
use crate::numbers::u64_at;
use crate::process::maps::Mapping;
use crate::process::seccomp::filter::SeccompData;

/// The registers of a thread that are changed by injected calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallRegisters {
    pub(crate) rax: u64,
    pub(crate) rcx: u64,
    pub(crate) rdx: u64,
    pub(crate) rsi: u64,
    pub(crate) rdi: u64,
    pub(crate) r8: u64,
    pub(crate) r9: u64,
    pub(crate) r10: u64,
    pub(crate) r11: u64,
    pub(crate) rip: u64,
    /// The system call that the thread is in; [`NO_CALL`] if it is in none.
    pub(crate) orig_rax: u64,
}

/// The `orig_rax` of a thread that is in no system call.
pub(crate) const NO_CALL: u64 = -1_i64 as u64;

/// A system call: its number and arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InjectedCall {
    pub(crate) number: u32,
    pub(crate) arguments: [u64; 6],
}

const MAP: u32 = libc::SYS_mmap as u32;
const UNMAP: u32 = libc::SYS_munmap as u32;
const ADVISE: u32 = libc::SYS_madvise as u32;
const CONTROL: u32 = libc::SYS_prctl as u32;

impl InjectedCall {
    /// Maps anonymous private memory at an address where nothing is mapped.
    pub(crate) fn map(at: LiveAddr, len: u64, protection: i32) -> InjectedCall {
        // Most of a large mapping is never touched, and is not to be accounted for.
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
        InjectedCall::map_anonymous(at, len, protection, flags)
    }

    /// Maps anonymous memory, readable and writable, that forked children share, at an address where nothing is mapped.
    pub(crate) fn map_shared_with_children(at: LiveAddr, len: u64) -> InjectedCall {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
        InjectedCall::map_anonymous(at, len, protection, flags)
    }

    /// Maps anonymous private memory, readable and writable, over memory that an earlier call has mapped.
    pub(crate) fn map_over(at: LiveAddr, len: u64) -> InjectedCall {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        InjectedCall::map_anonymous(at, len, protection, flags)
    }

    fn map_anonymous(at: LiveAddr, len: u64, protection: i32, flags: i32) -> InjectedCall {
        let flags = flags | libc::MAP_ANONYMOUS;
        InjectedCall {
            number: MAP,
            arguments: [at.0, len, protection as u64, flags as u64, u64::MAX, 0],
        }
    }

    /// Has a part of private memory cleared in forked children (MADV_WIPEONFORK). Whether it was
    /// done can be seen in the maps: the kernel splits the mapping at the end of the part.
    pub(crate) fn wipe_on_fork(at: LiveAddr, len: u64) -> InjectedCall {
        InjectedCall {
            number: ADVISE,
            arguments: [at.0, len, libc::MADV_WIPEONFORK as u64, 0, 0, 0],
        }
    }

    /// Keeps huge pages out of the same part of memory (MADV_NOHUGEPAGE): each of them would be filled at its first
    /// write. This call comes after [`InjectedCall::wipe_on_fork`], so that it splits no mapping. The maps do not show
    /// whether it was done.
    pub(crate) fn small_pages(at: LiveAddr, len: u64) -> InjectedCall {
        InjectedCall {
            number: ADVISE,
            arguments: [at.0, len, libc::MADV_NOHUGEPAGE as u64, 0, 0, 0],
        }
    }

    /// Maps the file of a descriptor, readable and writable, at an address where nothing is mapped.
    pub(crate) fn map_shared(at: LiveAddr, len: u64, descriptor: i32, offset: u64) -> InjectedCall {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
        let (protection, flags, descriptor) = (protection as u64, flags as u64, descriptor as u64);
        InjectedCall {
            number: MAP,
            arguments: [at.0, len, protection, flags, descriptor, offset],
        }
    }

    /// Writes whether the thread may read the time stamp counter (prctl(2)): a C `int` at `at`.
    pub(crate) fn tsc_mode(at: LiveAddr) -> InjectedCall {
        InjectedCall {
            number: CONTROL,
            arguments: [libc::PR_GET_TSC as u64, at.0, 0, 0, 0, 0],
        }
    }

    /// Closes a descriptor.
    pub(crate) fn close(descriptor: i32) -> InjectedCall {
        InjectedCall {
            number: libc::SYS_close as u32,
            arguments: [descriptor as u64, 0, 0, 0, 0, 0],
        }
    }

    /// Unmaps memory whose first mapping has this protection. The protection is the third argument,
    /// which munmap(2) does not have: it is there for a tool that finds the call in the code of a
    /// killed tool ([`orphaned_mappings`]).
    pub(crate) fn unmap(range: &Range<u64>, protection: i32) -> InjectedCall {
        let len = range.end.saturating_sub(range.start);
        InjectedCall {
            number: UNMAP,
            arguments: [range.start, len, protection as u64, 0, 0, 0],
        }
    }

    /// Returns the call that unmaps what this one maps or unmaps. Its arguments from the third on, which munmap(2) does
    /// not have, are those by which [`InjectedCall::matches`] recognizes the mapping.
    pub(crate) fn unmapping(&self) -> InjectedCall {
        let [at, len, protection, flags, _, offset] = self.arguments;
        let kind = flags & libc::MAP_SHARED as u64;
        InjectedCall {
            number: UNMAP,
            arguments: [at, len, protection, kind, 0, offset],
        }
    }

    /// Returns the protection of the memory that it maps or unmaps.
    pub(crate) fn protection(&self) -> i32 {
        let [_, _, protection, ..] = self.arguments;
        protection as i32
    }

    /// What it is called in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self.number {
            MAP if self.protection() & libc::PROT_EXEC != 0 => "mmap of executable memory",
            MAP => "mmap of writable memory",
            UNMAP => "munmap",
            ADVISE => "madvise",
            CONTROL => "prctl",
            _ => "close",
        }
    }

    /// Whether it maps memory.
    pub(crate) fn maps(&self) -> bool {
        self.number == MAP
    }

    /// Whether it unmaps memory.
    pub(crate) fn unmaps(&self) -> bool {
        self.number == UNMAP
    }

    /// Whether it splits a mapping.
    pub(crate) fn splits(&self) -> bool {
        self.number == ADVISE
    }

    /// The addresses that it maps, unmaps or splits off.
    pub(crate) fn range(&self) -> Range<u64> {
        let [at, len, ..] = self.arguments;
        at..at.saturating_add(len)
    }

    /// Whether this mapping is exactly what the call maps or unmaps, not one that the process has made
    /// at the same place.
    pub(crate) fn matches(&self, mapping: &Mapping) -> bool {
        let [_, _, protection, flags, _, offset] = self.arguments;
        let wants = |bit: i32| protection & bit as u64 != 0;
        let is_shared = flags & libc::MAP_TYPE as u64 == libc::MAP_SHARED as u64;
        let is_of_file = if is_shared {
            mapping.inode != 0 && mapping.offset == offset
        } else {
            mapping.inode == 0
        };
        // personality(2): with READ_IMPLIES_EXEC, more can be executed.
        let is_executable = mapping.executable || !wants(libc::PROT_EXEC);
        (mapping.start.0..mapping.end.0) == self.range()
            && mapping.is_readable() == wants(libc::PROT_READ)
            && mapping.is_writable() == wants(libc::PROT_WRITE)
            && is_executable
            && mapping.shared == is_shared
            && is_of_file
    }
}

/// A call at its place in the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedCall {
    pub(crate) call: InjectedCall,
    /// The address after its `syscall` instruction.
    returns_to: LiveAddr,
}

impl PlacedCall {
    /// Returns the call as seccomp filters see it.
    pub(crate) fn as_filters_see_it(&self) -> SeccompData {
        SeccompData {
            number: self.call.number,
            instruction_pointer: self.returns_to.0,
            arguments: self.call.arguments,
        }
    }
}

/// Returns where calls are in their code, which is written at `at`.
pub(crate) fn placed(calls: &[InjectedCall], at: LiveAddr) -> impl Iterator<Item = PlacedCall> {
    let calls = calls.iter().copied().zip(1..);
    calls.map(move |(call, index)| PlacedCall {
        call,
        returns_to: entry(at).plus(CALL_LEN as u64 * index),
    })
}

/// Precedes the code; never executed.
const MARK: [u8; 8] = *b"o-p goes";

/// The length of the mark in bytes. It is written first and cleared last, so that code of which only a
/// part was written is recognized.
pub(crate) const MARK_LEN: usize = MARK.len();

/// The length in bytes that the code of two calls fits in.
pub(crate) const MAX_LEN: usize = 320;

/// Returns how many calls have code that fits in `len` bytes, which are [`MAX_LEN`] at least.
pub(crate) fn most_within(len: usize) -> usize {
    2 + len.saturating_sub(MAX_LEN) / CALL_LEN
}

/// Where code that is written at `at` is entered.
pub(crate) fn entry(at: LiveAddr) -> LiveAddr {
    at.plus(MARK_LEN as u64)
}

/// Whether code may be written over these bytes: they are zero, or code of a tool that was killed.
pub(crate) fn is_free(bytes: &[u8]) -> bool {
    let (mark, code) = bytes.split_at(MARK_LEN.min(bytes.len()));
    let is_part = mark
        .iter()
        .zip(MARK)
        .all(|(&byte, of_mark)| byte == 0 || byte == of_mark);
    mark == MARK || is_part && code.iter().all(|&byte| byte == 0)
}

/// Returns calls that unmap the memory that the code in these bytes maps, or unmaps for another
/// killed tool. If the code is still there, the tool that wrote it was killed.
pub(crate) fn orphaned_mappings(bytes: &[u8]) -> Vec<InjectedCall> {
    let calls = bytes.strip_prefix(&MARK).unwrap_or_default();
    let operand = |call: &[u8], index: usize| u64_at(call, MOV_LEN * index + 2).unwrap_or(0);
    let is_call = |call: &&[u8]| call.ends_with(&SYSCALL);
    let calls = calls.chunks_exact(CALL_LEN).take_while(is_call);
    let of_memory = [MAP, UNMAP].map(u64::from);
    let memory_calls = calls.filter(|call| of_memory.contains(&operand(call, 6)));
    let unmap = |call: &[u8]| {
        let call = InjectedCall {
            number: operand(call, 6) as u32,
            arguments: std::array::from_fn(|index| operand(call, index)),
        };
        call.unmapping()
    };
    memory_calls.map(unmap).collect()
}

/// `movabs $operand,%register`, with the operand in its last eight bytes.
const MOV_LEN: usize = 10;

const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The length of the code of every call, by which [`orphaned_mappings`] distinguishes the calls.
const CALL_LEN: usize = 7 * MOV_LEN + SYSCALL.len();

/// Where a thread lingers in code that is written at `at`, with the result of the last call in `rax`, if it
/// lingers.
pub(crate) fn lingers_at(calls: &[InjectedCall], at: LiveAddr) -> LiveAddr {
    entry(at).plus((CALL_LEN * calls.len() + MOV_LEN) as u64)
}

/// How often a thread that lingers repeats one instruction: for a tenth of a second or so.
const LINGER: u64 = 1 << 26;

/// Returns the code of `calls` for a thread with these registers. It can be written anywhere. If it
/// `lingers`, the thread goes on executing the code for a while after the last call.
pub(crate) fn code(calls: &[InjectedCall], registers: &CallRegisters, lingers: bool) -> Vec<u8> {
    assemble(calls, &registers.resumed(), lingers)
        .unwrap_or_else(|error| unreachable!("each instruction can be encoded: {error}"))
}

fn assemble(
    calls: &[InjectedCall],
    after: &CallRegisters,
    lingers: bool,
) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let set = |a: &mut CodeAssembler, registers: &[(AsmRegister64, u64)]| {
        let mut registers = registers.iter();
        registers.try_for_each(|&(register, value)| a.mov(register, value))
    };
    a.db(&MARK)?;
    for call in calls {
        let [first, second, third, fourth, fifth, sixth] = call.arguments;
        let arguments = [
            (rdi, first),
            (rsi, second),
            (rdx, third),
            (r10, fourth),
            (r8, fifth),
            (r9, sixth),
            (rax, u64::from(call.number)),
        ];
        set(&mut a, &arguments)?;
        a.syscall()?;
    }
    if lingers {
        a.mov(rcx, LINGER)?;
        // `loop` keeps the flags.
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.loop_(again)?;
    }
    let restored = [
        (rdi, after.rdi),
        (rsi, after.rsi),
        (rdx, after.rdx),
        (r10, after.r10),
        (r8, after.r8),
        (r9, after.r9),
        (rax, after.rax),
        (rcx, after.rcx),
        (r11, after.r11),
    ];
    set(&mut a, &restored)?;
    let mut address = a.create_label();
    a.jmp(qword_ptr(address))?;
    a.set_label(&mut address)?;
    a.dq(&[after.rip])?;
    a.assemble(0)
}

impl CallRegisters {
    /// Returns the registers of a thread that continues at `entry`. The kernel is not to restart the
    /// system call that the thread was in: the code does.
    pub(crate) fn redirected_to(self, entry: LiveAddr) -> CallRegisters {
        CallRegisters {
            rip: entry.0,
            orig_rax: NO_CALL,
            ..self
        }
    }

    /// Whether these are the registers of a thread that has just returned from the code, if it had the
    /// registers `before` when it was stopped.
    pub(crate) fn has_returned(&self, before: &CallRegisters) -> bool {
        let after = before.resumed();
        *self == after.redirected_to(LiveAddr(after.rip))
    }

    /// Returns the registers as the kernel would set them if the thread were resumed now: a system call
    /// that the stop has interrupted is restarted (signal(7); the kernel's arch_do_signal_or_restart).
    fn resumed(self) -> CallRegisters {
        const RESTART_BLOCK: i64 = -516;
        let restarted = |number| CallRegisters {
            rax: number,
            rip: self.rip.wrapping_sub(SYSCALL.len() as u64),
            ..self
        };
        match self.rax as i64 {
            _ if (self.orig_rax as i64).is_negative() => self,
            // ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND
            -514..=-512 => restarted(self.orig_rax),
            RESTART_BLOCK => restarted(libc::SYS_restart_syscall as u64),
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps;

    const IN_READ: CallRegisters = CallRegisters {
        rax: -512_i64 as u64,
        rcx: 1,
        rdx: 2,
        rsi: 3,
        rdi: 4,
        r8: 5,
        r9: 6,
        r10: 7,
        r11: 8,
        rip: 0x7f00_0000_1002,
        orig_rax: 0,
    };

    #[test]
    fn interrupted_system_call_is_restarted() {
        let again = IN_READ.resumed();
        assert_eq!((again.rax, again.rip), (0, 0x7f00_0000_1000));
        let sleeps = CallRegisters {
            rax: -516_i64 as u64,
            orig_rax: 230,
            ..IN_READ
        };
        assert_eq!(sleeps.resumed().rax, 219);
        // One that is over, or none at all.
        let over = CallRegisters { rax: 17, ..IN_READ };
        assert_eq!(over.resumed(), over);
        let outside = CallRegisters {
            orig_rax: NO_CALL,
            ..IN_READ
        };
        assert_eq!(outside.resumed(), outside);
    }

    #[test]
    fn returned_thread_restarts_its_interrupted_call() {
        let sent = IN_READ.redirected_to(LiveAddr(0x5000));
        assert_eq!((sent.rip, sent.orig_rax), (0x5000, NO_CALL));
        assert!(!sent.has_returned(&IN_READ) && !IN_READ.has_returned(&IN_READ));
        let begins = IN_READ.resumed();
        let back = begins.redirected_to(LiveAddr(begins.rip));
        assert!(back.has_returned(&IN_READ) && !begins.has_returned(&IN_READ));
        assert!(!CallRegisters { rcx: 0, ..back }.has_returned(&IN_READ));
    }

    #[test]
    fn two_calls_fit() {
        let call = InjectedCall::map(LiveAddr(0x1000), 0x1000, libc::PROT_READ);
        let longest = super::code(&[call, call], &IN_READ, true);
        assert!(longest.len() <= MAX_LEN, "{}", longest.len());
        let lingers = lingers_at(&[call, call], LiveAddr(0)).0 as usize;
        // `loop` to itself.
        assert_eq!(longest[lingers..][..2], [0xe2, 0xfe]);
        let code = code(&[call, call], &IN_READ, false);
        let one = super::code(&[call], &IN_READ, false);
        assert_eq!((code.len() - one.len(), CALL_LEN), (72, 72));
        assert!(is_free(&code) && is_free(&[0; MAX_LEN]));
        for len in [MAX_LEN, MAX_LEN + CALL_LEN - 1, MAX_LEN + CALL_LEN, 4096] {
            let most = vec![call; most_within(len)];
            assert!(super::code(&most, &IN_READ, true).len() <= len, "{len}");
        }
        assert_eq!(most_within(MAX_LEN + CALL_LEN), 3);
        for (placed, index) in placed(&[call, call], LiveAddr(0)).zip(1..) {
            let end = placed.returns_to.0 as usize;
            assert_eq!(end, MARK_LEN + CALL_LEN * index);
            assert_eq!(code[end - SYSCALL.len()..end], SYSCALL);
        }
        assert!(is_free(b"o-p \0\0\0\0\0") && is_free(b"\0\0\0\0goes\0"));
        assert!(!is_free(b"o-p hash\0") && !is_free(b"o-p \0\0\0\0x"));
        assert!(code.ends_with(&IN_READ.resumed().rip.to_le_bytes()));
        let unmaps = InjectedCall::unmap(&(0x1000..0x2000), libc::PROT_READ);
        assert_eq!(orphaned_mappings(&code), [unmaps; 2]);
        assert_eq!(orphaned_mappings(&[0; MAX_LEN]), []);
        let code = super::code(&[unmaps; 2], &IN_READ, false);
        assert_eq!(orphaned_mappings(&code), [unmaps; 2]);
    }

    #[test]
    fn orphaned_advice_unmaps_nothing() {
        let at = LiveAddr(0x40_0000);
        let over = InjectedCall::map_over(at, 0x2000);
        let wipe = InjectedCall::wipe_on_fork(at, 0x1000);
        assert_eq!(
            [over, wipe].map(|call| (call.maps(), call.splits(), call.unmaps())),
            [(true, false, false), (false, true, false)]
        );
        assert_eq!(
            (over.range(), wipe.range()),
            (0x40_0000..0x40_2000, 0x40_0000..0x40_1000)
        );
        let code = code(&[wipe], &IN_READ, false);
        assert!(code.len() <= MAX_LEN && orphaned_mappings(&code).is_empty());
        let line = b"400000-402000 rw-p 00000000 00:00 0 ";
        assert!(over.matches(&maps::parse(line)[0]));
    }

    #[test]
    fn mappings_of_others_are_not_taken_for_ours() {
        let (read, write, execute) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
        let at = LiveAddr(0x40_0000);
        let code = InjectedCall::map(at, 0x2000, read | execute);
        let data = InjectedCall::map(at, 0x2000, read | write);
        let shared = InjectedCall::map_shared(at, 0x2000, 3, 0x1000);
        let left = InjectedCall::unmap(&(0x40_0000..0x40_2000), read | execute);
        assert_eq!(code.unmapping(), left);
        // Of memory that a killed tool has left: as a tool finds it, by the call that maps or unmaps it.
        let with_children = InjectedCall::map_shared_with_children(at, 0x2000);
        let [calls, again] = [with_children, with_children.unmapping()].map(|call| {
            let code = super::code(&[call], &IN_READ, false);
            orphaned_mappings(&code)[0]
        });
        assert_eq!(calls, again);
        let line = b"400000-402000 rw-s 00000000 00:01 7 /dev/zero (deleted)";
        let private = b"400000-402000 rw-p 00000000 00:00 0 ";
        for call in [with_children, calls] {
            assert!(call.matches(&maps::parse(line)[0]));
            assert!(!call.matches(&maps::parse(private)[0]));
        }
        let about = |line: &str| {
            let mapping = &maps::parse(line.as_bytes())[0];
            [code, data, shared, left].map(|call| call.matches(mapping))
        };
        let not = [false; 4];
        assert_eq!(
            about("400000-402000 r-xp 00000000 00:00 0 "),
            [true, false, false, true]
        );
        assert_eq!(
            about("400000-402000 rw-p 00000000 00:00 0 "),
            [false, true, false, false]
        );
        assert_eq!(
            about("400000-402000 rw-s 00001000 00:01 7 /memfd:x (deleted)"),
            [false, false, true, false]
        );
        // With READ_IMPLIES_EXEC.
        assert_eq!(
            about("400000-402000 rwxp 00000000 00:00 0 "),
            [false, true, false, false]
        );
        for other in [
            "400000-401000 r-xp 00000000 00:00 0 ",
            "400000-403000 r-xp 00000000 00:00 0 ",
            "3ff000-402000 rw-p 00000000 00:00 0 ",
            "400000-402000 ---p 00000000 00:00 0 ",
            "400000-402000 r-xp 00000000 08:02 7 /usr/lib/x",
            "400000-402000 rw-s 00000000 00:01 7 /memfd:x (deleted)",
        ] {
            assert_eq!(about(other), not, "{other}");
        }
    }
}
