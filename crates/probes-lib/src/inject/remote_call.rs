//! A detour: system calls that a stopped thread is made to run, and back to where it was. Pure.
//!
//! ```text
//! mark     whose it is
//! calls    mov registers, numbers; syscall        for each call
//! back     mov registers, what they were; jmp *(rip), where it was
//! ```
//!
//! The thread is only sent there: all else is in the code itself. So it comes back, with all its
//! registers, whether we are there to see it or not. The code keeps the flags, and uses no stack.

use std::ops::Range;

use crate::address::LiveAddr;
use crate::process::maps::Mapping;

/// The registers of a thread that a detour changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registers {
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
    /// The system call that it is in; [`NO_CALL`] if it is in none.
    pub(crate) orig_rax: u64,
}

/// What the kernel has for the system call of a thread that is in none.
pub(crate) const NO_CALL: u64 = -1_i64 as u64;

/// A system call: its number and arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteCall {
    pub(crate) number: u32,
    pub(crate) arguments: [u64; 6],
}

const MAP: u32 = libc::SYS_mmap as u32;
const UNMAP: u32 = libc::SYS_munmap as u32;

impl RemoteCall {
    pub(crate) fn maps(&self) -> bool {
        self.number == MAP
    }

    pub(crate) fn unmaps(&self) -> bool {
        self.number == UNMAP
    }

    /// What it maps or unmaps.
    pub(crate) fn range(&self) -> Range<u64> {
        let [at, len, ..] = self.arguments;
        at..at.saturating_add(len)
    }

    /// Whether this is just what it maps, or what is said of what it unmaps: somebody else may have come
    /// to map memory there.
    pub(crate) fn is_about(&self, mapping: &Mapping) -> bool {
        let [_, _, protection, flags, _, offset] = self.arguments;
        let wants = |bit: i32| protection & bit as u64 != 0;
        let is_shared = flags & libc::MAP_TYPE as u64 == libc::MAP_SHARED as u64;
        let is_of_file = match is_shared {
            true => mapping.inode != 0 && mapping.offset == offset,
            false => mapping.inode == 0,
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

/// Maps memory of nobody's at an address where nothing is.
pub(crate) fn map(at: LiveAddr, len: u64, protection: i32) -> RemoteCall {
    // Most of a large one is never touched, and is not to count as if it were.
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    RemoteCall {
        number: MAP,
        arguments: [at.0, len, protection as u64, flags as u64, u64::MAX, 0],
    }
}

/// Maps the file of a descriptor at an address where nothing is, to be read and written.
pub(crate) fn map_shared(at: LiveAddr, len: u64, descriptor: i32, offset: u64) -> RemoteCall {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    RemoteCall {
        number: MAP,
        arguments: [
            at.0,
            len,
            protection as u64,
            flags as u64,
            descriptor as u64,
            offset,
        ],
    }
}

/// Closes a descriptor.
pub(crate) fn close(descriptor: i32) -> RemoteCall {
    RemoteCall {
        number: libc::SYS_close as u32,
        arguments: [descriptor as u64, 0, 0, 0, 0, 0],
    }
}

/// Unmaps memory, which has this protection in the beginning: the kernel does not ask for it, but who
/// finds the detour knows by it what was there.
pub(crate) fn unmap(range: &Range<u64>, protection: i32) -> RemoteCall {
    let len = range.end.saturating_sub(range.start);
    RemoteCall {
        number: UNMAP,
        arguments: [range.start, len, protection as u64, 0, 0, 0],
    }
}

/// What every detour begins with, where nobody goes.
const MARK: [u8; 8] = *b"o-p goes";

/// Room for a detour of two calls.
pub(crate) const ROOM: usize = 320;

/// Where a thread is sent.
pub(crate) fn entry(at: LiveAddr) -> LiveAddr {
    at.plus(MARK.len() as u64)
}

/// How many bytes of a detour are the mark, which is written first and applied away last: a detour that
/// was written in part is known by it.
pub(crate) const MARK_LEN: usize = MARK.len();

/// Whether a detour may be put where these bytes are: nothing, or one that nobody needs.
pub(crate) fn is_free(bytes: &[u8]) -> bool {
    let (mark, code) = bytes.split_at(MARK_LEN.min(bytes.len()));
    let is_part = mark
        .iter()
        .zip(MARK)
        .all(|(&byte, of_mark)| byte == 0 || byte == of_mark);
    mark == MARK || is_part && code.iter().all(|&byte| byte == 0)
}

/// What unmaps the memory that a detour was to map, or to unmap because somebody else's had been to map
/// it: it is left if whoever made the detour was killed.
pub(crate) fn mapped_by(bytes: &[u8]) -> Vec<RemoteCall> {
    let calls = bytes.strip_prefix(&MARK).unwrap_or_default();
    let number = |call: &[u8], index: usize| {
        let word = call[MOV_LEN * index + 2..][..8].try_into();
        word.map_or(0, u64::from_le_bytes)
    };
    let is_call = |call: &&[u8]| call.ends_with(&SYSCALL);
    let calls = calls
        .chunks_exact(7 * MOV_LEN + SYSCALL.len())
        .take_while(is_call);
    let of_memory = [MAP, UNMAP].map(u64::from);
    let maps = calls.filter(|call| of_memory.contains(&number(call, 6)));
    let unmaps = |call: &[u8]| {
        let (at, len) = (number(call, 0), number(call, 1));
        unmap(&(at..at.saturating_add(len)), number(call, 2) as i32)
    };
    maps.map(unmaps).collect()
}

/// The code for a thread with these registers.
pub(crate) fn code(calls: &[RemoteCall], registers: &Registers) -> Vec<u8> {
    let back = registers.resumed();
    let mut code = MARK.to_vec();
    for call in calls {
        let [rdi, rsi, rdx, r10, r8, r9] = call.arguments;
        let numbers = [rdi, rsi, rdx, r10, r8, r9, u64::from(call.number)];
        for (register, number) in [RDI, RSI, RDX, R10, R8, R9, RAX].into_iter().zip(numbers) {
            code.extend(set(register, number));
        }
        code.extend(SYSCALL);
    }
    for (register, number) in [
        (RDI, back.rdi),
        (RSI, back.rsi),
        (RDX, back.rdx),
        (R10, back.r10),
        (R8, back.r8),
        (R9, back.r9),
        (RAX, back.rax),
        (RCX, back.rcx),
        (R11, back.r11),
    ] {
        code.extend(set(register, number));
    }
    code.extend(JUMP_BY_NEXT_WORD);
    code.extend(back.rip.to_le_bytes());
    code
}

// Numbers of registers, as instructions have them.
const RAX: u8 = 0;
const RCX: u8 = 1;
const RDX: u8 = 2;
const RSI: u8 = 6;
const RDI: u8 = 7;
const R8: u8 = 8;
const R9: u8 = 9;
const R10: u8 = 10;
const R11: u8 = 11;

const MOV_LEN: usize = 10;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
const JUMP_BY_NEXT_WORD: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];

/// `movabs $number,%register`.
fn set(register: u8, number: u64) -> [u8; MOV_LEN] {
    let mut code = [0; MOV_LEN];
    code[0] = if register < 8 { 0x48 } else { 0x49 };
    code[1] = 0xb8 | (register & 7);
    code[2..].copy_from_slice(&number.to_le_bytes());
    code
}

impl Registers {
    /// Of a thread that goes to `entry`. The kernel sees no system call any more to begin anew: the
    /// detour does that.
    pub(crate) fn redirected_to(self, entry: LiveAddr) -> Registers {
        Registers {
            rip: entry.0,
            orig_rax: NO_CALL,
            ..self
        }
    }

    /// Whether they are those of a thread that is just back from a detour, having been as `before`.
    pub(crate) fn has_returned(&self, before: &Registers) -> bool {
        let back = before.resumed();
        *self == back.redirected_to(LiveAddr(back.rip))
    }

    /// The same as the kernel would leave them if the thread were let go now: a system call that was
    /// interrupted by the stop begins anew (signal(7); arch_do_signal_or_restart of the kernel).
    fn resumed(self) -> Registers {
        const RESTART_BLOCK: i64 = -516;
        let anew = |rax| Registers {
            rax,
            rip: self.rip.wrapping_sub(SYSCALL.len() as u64),
            ..self
        };
        match self.rax as i64 {
            _ if (self.orig_rax as i64).is_negative() => self,
            // ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND
            -514..=-512 => anew(self.orig_rax),
            RESTART_BLOCK => anew(libc::SYS_restart_syscall as u64),
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps;

    const IN_READ: Registers = Registers {
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
        let sleeps = Registers {
            rax: -516_i64 as u64,
            orig_rax: 230,
            ..IN_READ
        };
        assert_eq!(sleeps.resumed().rax, 219);
        // One that is over, or none at all.
        let over = Registers { rax: 17, ..IN_READ };
        assert_eq!(over.resumed(), over);
        let outside = Registers {
            orig_rax: NO_CALL,
            ..IN_READ
        };
        assert_eq!(outside.resumed(), outside);
    }

    #[test]
    fn returned_thread_is_about_to_make_its_call() {
        let sent = IN_READ.redirected_to(LiveAddr(0x5000));
        assert_eq!((sent.rip, sent.orig_rax), (0x5000, NO_CALL));
        assert!(!sent.has_returned(&IN_READ) && !IN_READ.has_returned(&IN_READ));
        let begins = IN_READ.resumed();
        let back = begins.redirected_to(LiveAddr(begins.rip));
        assert!(back.has_returned(&IN_READ) && !begins.has_returned(&IN_READ));
        assert!(!Registers { rcx: 0, ..back }.has_returned(&IN_READ));
    }

    #[test]
    fn two_calls_fit() {
        let call = map(LiveAddr(0x1000), 0x1000, libc::PROT_READ);
        let code = code(&[call, call], &IN_READ);
        assert!(code.len() <= ROOM, "{}", code.len());
        assert!(is_free(&code) && is_free(&[0; ROOM]));
        assert!(is_free(b"o-p \0\0\0\0\0") && is_free(b"\0\0\0\0goes\0"));
        assert!(!is_free(b"o-p hash\0") && !is_free(b"o-p \0\0\0\0x"));
        assert!(code.ends_with(&IN_READ.resumed().rip.to_le_bytes()));
        let unmaps = unmap(&(0x1000..0x2000), libc::PROT_READ);
        assert_eq!(mapped_by(&code), [unmaps; 2]);
        assert_eq!(mapped_by(&[0; ROOM]), []);
        let code = super::code(&[unmaps; 2], &IN_READ);
        assert_eq!(mapped_by(&code), [unmaps; 2]);
    }

    #[test]
    fn mappings_of_others_are_not_taken_for_ours() {
        let (read, write, execute) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
        let at = LiveAddr(0x40_0000);
        let code = map(at, 0x2000, read | execute);
        let data = map(at, 0x2000, read | write);
        let shared = map_shared(at, 0x2000, 3, 0x1000);
        let left = unmap(&(0x40_0000..0x40_2000), read | execute);
        let about = |line: &str| {
            let mapping = &maps::parse(line.as_bytes())[0];
            [code, data, shared, left].map(|call| call.is_about(mapping))
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
