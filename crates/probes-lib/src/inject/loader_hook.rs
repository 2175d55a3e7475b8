//! [`LoaderHook`]: makes the dynamic loader of a process notify its tracer when it has mapped or unmapped
//! objects.
//!
//! Debuggers put a breakpoint on the function that loaders call for them
//! ([`crate::process::dynamic_loader`]). A breakpoint whose debugger has died kills the program; ours must
//! not. So the function is made to jump to a hook instead:
//!
//! ```text
//! _dl_debug_state   ret   ─▶  jmp hook
//! hook              blocks signals, starts a thread that exits at once, restores the signal mask,
//!                   ret
//! ```
//!
//! A tracer is notified of the new thread (`PTRACE_EVENT_CLONE`), while the one that has started it is
//! stopped in the hook. Without a tracer, that is all that happens: each `dlopen` takes 20 µs longer.
//!
//! The hook is in the code cave after the loader's code, which is zero otherwise. All that is needed to
//! remove it is in the process and in the loader's file.

use std::io;
use std::ops::Range;
use std::sync::LazyLock;

use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, al, eax, edi, edx, esi, qword_ptr, r10, r11, rax, rcx, rdi, rdx,
    rsi, rsp,
};
use iced_x86::{Decoder, DecoderOptions, IcedError, Mnemonic};

use crate::address::{FileAddr, LiveAddr, PAGE};
use crate::error::ObserveError;
use crate::inject::permissions::{NamedCall, Permissions};
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::dynamic_loader::{DEBUG_FUNCTION_LEN, DynamicLoader, NoDynamicLoader};
use crate::process::maps::{self, Mapping};
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::filter::SeccompData;
use crate::site::{JMP, JUMP_LEN, RET, near_branch};
use crate::trace::stopped::Stopped;

const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// The length of the hook's code in bytes.
const HOOK_LEN: usize = 84;

/// Follows the code: identifies this tool and the version of the hook.
const MARK: [u8; 4] = *b"o-p\x01";

/// The hook's code.
static HOOK_CODE: LazyLock<[u8; HOOK_LEN]> = LazyLock::new(|| {
    let code = assemble().ok().and_then(|code| code.try_into().ok());
    code.unwrap_or_else(|| unreachable!("the code has HOOK_LEN bytes"))
});

/// The offsets in it of what follows its system calls.
static SYSTEM_CALL_ENDS: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let code = Decoder::with_ip(64, &HOOK_CODE[..], 0, DecoderOptions::NONE).into_iter();
    code.filter(|it| it.mnemonic() == Mnemonic::Syscall)
        .map(|it| it.next_ip())
        .collect()
});

/// Thread-local storage is shared, too: the new thread uses none.
const CLONE_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// Of the kernel's sigset_t, in bytes.
const SIGNAL_SET_LEN: i32 = 8;

/// The code preserves all registers except the flags, as callers may rely on the function being empty.
/// The new thread shares the stack and does not touch it.
fn assemble() -> Result<Vec<u8>, IcedError> {
    const SAVED: [AsmRegister64; 7] = [rax, rdi, rsi, rdx, rcx, r10, r11];

    let mut a = CodeAssembler::new(64)?;
    // The shortest ways to load small numbers.
    let load = |a: &mut CodeAssembler, register: AsmRegister64, number: i32| {
        a.push(number)?;
        a.pop(register)
    };
    SAVED
        .into_iter()
        .try_for_each(|register| a.push(register))?;
    // On the stack: the set of all signals, and below it the old mask.
    a.push(-1)?;
    a.push(rax)?;
    load(&mut a, rax, libc::SYS_rt_sigprocmask as i32)?;
    a.xor(edi, edi)?; // SIG_BLOCK
    a.lea(rsi, qword_ptr(rsp + 8))?;
    a.mov(rdx, rsp)?;
    load(&mut a, r10, SIGNAL_SET_LEN)?;
    a.syscall()?;

    a.mov(edi, CLONE_FLAGS)?;
    a.xor(esi, esi)?; // the same stack
    load(&mut a, rax, libc::SYS_clone as i32)?;
    a.syscall()?;
    let mut parent = a.create_label();
    a.test(eax, eax)?;
    a.jne(parent)?;
    a.mov(al, libc::SYS_exit as i32)?;
    a.syscall()?;

    a.set_label(&mut parent)?;
    load(&mut a, rax, libc::SYS_rt_sigprocmask as i32)?;
    load(&mut a, rdi, libc::SIG_SETMASK)?;
    a.mov(rsi, rsp)?;
    a.xor(edx, edx)?;
    load(&mut a, r10, SIGNAL_SET_LEN)?;
    a.syscall()?;
    a.pop(rax)?;
    a.pop(rax)?;
    SAVED
        .into_iter()
        .rev()
        .try_for_each(|register| a.pop(register))?;
    a.ret()?;
    a.db(&MARK)?;
    a.assemble(0)
}

/// Why the loader of a process cannot be hooked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoLoaderHook {
    /// The process has none: its program is static, or the loader was executed as its program.
    NoLoader,
    /// There is a loader, but it cannot be hooked; the text says why.
    Impossible(&'static str),
}

impl NoLoaderHook {
    const UNKNOWN: NoLoaderHook =
        NoLoaderHook::Impossible("its dynamic loader is not like those of glibc and musl");
    /// A filter could not be read: it may refuse the system calls of the hook, or kill the process for them.
    const FILTERED: NoLoaderHook = NoLoaderHook::Impossible(
        "a seccomp filter may forbid the system calls of the hook in its dynamic loader",
    );
    /// A filter was read that refuses one of them.
    const FORBIDDEN: NoLoaderHook = NoLoaderHook::Impossible(
        "a seccomp filter forbids the system calls of the hook in its dynamic loader",
    );
    pub(crate) const UNCHANGEABLE: NoLoaderHook =
        NoLoaderHook::Impossible("the code of its dynamic loader cannot be changed");
}

impl From<NoDynamicLoader> for NoLoaderHook {
    fn from(reason: NoDynamicLoader) -> NoLoaderHook {
        match reason {
            NoDynamicLoader::Absent => NoLoaderHook::NoLoader,
            NoDynamicLoader::Unknown => NoLoaderHook::UNKNOWN,
        }
    }
}

/// The hook of one process.
#[derive(Clone, Debug)]
pub(crate) struct LoaderHook {
    /// The address of the `ret` that is replaced by a `jmp`.
    jump_at: LiveAddr,
    /// The bytes that the loader's file has there.
    original: [u8; JUMP_LEN],
    code_at: LiveAddr,
}

impl LoaderHook {
    /// Installs the hook in a stopped process, if the seccomp filters of all its threads allow its system calls; with
    /// `despite_seccomp`, those that cannot be read are taken to allow them.
    pub(crate) fn install(
        stopped: &Stopped<'_>,
        memory: &ProcessMemory,
        despite_seccomp: bool,
    ) -> Result<LoaderHook, NoLoaderHook> {
        let process = stopped.process();
        let hook = LoaderHook::find(process, memory)?;
        let permissions = Permissions::of(process, despite_seccomp);
        match permissions.refusal_of_any(stopped, &hook.system_calls()) {
            Ok(None) => {}
            Ok(Some(ObserveError::SeccompUnreadable { .. })) | Err(_) => {
                return Err(NoLoaderHook::FILTERED);
            }
            Ok(Some(_)) => return Err(NoLoaderHook::FORBIDDEN),
        }
        hook.write(memory).map_err(|_| NoLoaderHook::UNCHANGEABLE)?;
        Ok(hook)
    }

    /// Returns the system calls of its code as seccomp filters see them. The signal sets are on the stack of the thread
    /// that loads an object, which is not known yet: their addresses are those of a stack of a main thread.
    fn system_calls(&self) -> Vec<NamedCall> {
        const OLD_MASK: u64 = 0x7fff_ffff_e000;
        const SET_LEN: u64 = SIGNAL_SET_LEN as u64;
        let flags = CLONE_FLAGS as u64;
        let [block, set_mask] = [libc::SIG_BLOCK, libc::SIG_SETMASK].map(|how| how as u64);
        let calls = [
            (
                "rt_sigprocmask",
                libc::SYS_rt_sigprocmask,
                [block, OLD_MASK + 8, OLD_MASK, SET_LEN],
            ),
            ("clone", libc::SYS_clone, [flags, 0, OLD_MASK, SET_LEN]),
            ("exit", libc::SYS_exit, [flags, 0, OLD_MASK, SET_LEN]),
            (
                "rt_sigprocmask",
                libc::SYS_rt_sigprocmask,
                [set_mask, OLD_MASK, 0, SET_LEN],
            ),
        ];
        let seen = |((name, number, [a, b, c, d]), &end): ((_, i64, [u64; 4]), &u64)| {
            let call = SeccompData {
                number: number as u32,
                instruction_pointer: self.code_at.plus(end).0,
                arguments: [a, b, c, d, 0, 0],
            };
            (name, call)
        };
        calls
            .into_iter()
            .zip(&*SYSTEM_CALL_ENDS)
            .map(seen)
            .collect()
    }

    /// Returns the addresses of the hook's code.
    pub(crate) fn range(&self) -> Range<u64> {
        self.code_at.0..self.code_at.plus(HOOK_LEN as u64).0
    }

    /// Returns the hook that an earlier tool has installed in a process.
    pub(crate) fn find_stale(process: &Process, memory: &ProcessMemory) -> Option<LoaderHook> {
        let hook = LoaderHook::find(process, memory).ok()?;
        hook.is_in(memory).then_some(hook)
    }

    /// Whether the hook's code is in that memory, whether the loader jumps to it or not.
    pub(crate) fn is_in(&self, memory: &impl ReadMemory) -> bool {
        let mut code = [0; HOOK_LEN];
        memory.read(self.code_at, &mut code).is_ok() && code == *HOOK_CODE
    }

    /// Returns where the hook of a process is, or can be installed.
    fn find(process: &Process, memory: &ProcessMemory) -> Result<LoaderHook, NoLoaderHook> {
        let loader = DynamicLoader::of(process)?;
        let hook = LoaderHook::of(&loader).ok_or(NoLoaderHook::UNKNOWN)?;
        match hook.is_possible(memory, &loader.maps) {
            Ok(true) => Ok(hook),
            Ok(false) => Err(NoLoaderHook::UNKNOWN),
            Err(_) => Err(NoLoaderHook::UNCHANGEABLE),
        }
    }

    /// Returns the hook of a loader whose function is empty, and followed by padding.
    fn of(loader: &DynamicLoader) -> Option<LoaderHook> {
        let DynamicLoader {
            elf, segment, bias, ..
        } = loader;
        let mut code = [0; DEBUG_FUNCTION_LEN as usize];
        elf.read_loaded(segment, loader.debug_function, &mut code)
            .ok()?;
        let skipped = if code.starts_with(&ENDBR64) {
            ENDBR64.len()
        } else {
            0
        };
        let original: [u8; JUMP_LEN] = code.get(skipped..skipped + JUMP_LEN)?.try_into().ok()?;
        let after = code.get(skipped + 1..)?;
        if original[0] != RET || !is_padding(after, JUMP_LEN - 1) {
            return None;
        }
        let end = segment.start.0.checked_add(segment.file_len)?;
        // Aligned, at the start of the cave: injected calls are written at its end.
        let code_at = end.checked_next_multiple_of(16)?;
        let fits = end % PAGE != 0 && code_at % PAGE + HOOK_LEN as u64 <= PAGE;
        (fits && code_at / PAGE == end / PAGE).then(|| LoaderHook {
            jump_at: bias.live(loader.debug_function).plus(skipped as u64),
            original,
            code_at: bias.live(FileAddr(code_at)),
        })
    }

    /// Whether the process has the expected bytes in the places to be written.
    fn is_possible(&self, memory: &impl ReadMemory, maps: &[Mapping]) -> io::Result<bool> {
        let private_code = |at, len: usize| {
            let mapping = maps::find(maps, at, len as u64);
            mapping.is_some_and(|mapping| mapping.executable && !mapping.shared)
        };
        if !private_code(self.jump_at, JUMP_LEN) || !private_code(self.code_at, HOOK_LEN) {
            return Ok(false);
        }
        let (mut jump, mut code) = ([0; JUMP_LEN], [0; HOOK_LEN]);
        memory.read(self.jump_at, &mut jump)?;
        memory.read(self.code_at, &mut code)?;
        // A tool that was killed may have left the hook, or a part of it.
        let is_free = code
            .iter()
            .zip(*HOOK_CODE)
            .all(|(&found, ours)| found == 0 || found == ours);
        let is_ours = jump[0] == RET && jump[1..] == self.jump()[1..] || jump == self.jump();
        Ok(is_free && (jump == self.original || is_ours && code == *HOOK_CODE))
    }

    /// Returns the `jmp` to the hook.
    fn jump(&self) -> [u8; JUMP_LEN] {
        near_branch(JMP, self.jump_at, self.code_at)
    }

    /// Writes the hook. No thread can enter it before the last byte is written.
    fn write(&self, memory: &ProcessMemory) -> io::Result<()> {
        let jump = self.jump();
        let mut memory = memory.while_it_runs();
        memory.write_code(self.code_at, &*HOOK_CODE)?;
        memory.write_code(self.jump_at.plus(1), &jump[1..])?;
        memory.write_code(self.jump_at, &jump[..1])
    }

    /// Restores the function: no thread can enter the hook any more.
    pub(crate) fn restore_function(&self, memory: &ProcessMemory) -> io::Result<()> {
        let mut memory = memory.while_it_runs();
        memory.write_code(self.jump_at, &self.original[..1])?;
        memory.write_code(self.jump_at.plus(1), &self.original[1..])
    }

    /// Removes the hook, which no thread may be in.
    pub(crate) fn remove(&self, memory: &ProcessMemory) -> io::Result<()> {
        self.restore_function(memory)?;
        let mut memory = memory.while_it_runs();
        memory.write_code(self.code_at, &[0; HOOK_LEN])
    }
}

/// Whether the bytes begin with `len` bytes of the padding that assemblers put between functions: zeroes, `int3` and nops, of which the
/// last may be longer.
fn is_padding(bytes: &[u8], len: usize) -> bool {
    let mut at = 0;
    while at < len {
        let rest = bytes.get(at..).unwrap_or_default();
        if rest.first() == Some(&0) {
            at += 1;
            continue;
        }
        let instruction = Decoder::new(64, rest, DecoderOptions::NONE).decode();
        if !matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3) {
            return false;
        }
        at += instruction.len();
    }
    true
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::fcntl::OFlag;
    use test_support::{Scratch, output};

    use super::*;
    use crate::process::dynamic_loader::DEBUG_FUNCTION;

    /// What objdump prints of the hook, without addresses.
    const LISTING: [&str; 45] = [
        "push rax",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r10",
        "push r11",
        "push 0xffffffffffffffff",
        "push rax",
        "push 0xe",
        "pop rax",
        "xor edi,edi",
        "lea rsi,[rsp+0x8]",
        "mov rdx,rsp",
        "push 0x8",
        "pop r10",
        "syscall",
        "mov edi,0x50f00",
        "xor esi,esi",
        "push 0x38",
        "pop rax",
        "syscall",
        "test eax,eax",
        "jne 0x33",
        "mov al,0x3c",
        "syscall",
        "push 0xe",
        "pop rax",
        "push 0x2",
        "pop rdi",
        "mov rsi,rsp",
        "xor edx,edx",
        "push 0x8",
        "pop r10",
        "syscall",
        "pop rax",
        "pop rax",
        "pop r11",
        "pop r10",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rax",
        "ret",
    ];

    #[test]
    fn code_after_the_function_is_no_padding() {
        for (bytes, is_so) in [
            (&[0x90, 0x90, 0xcc, 0, 0xc3][..], true),
            (&[0, 0, 0, 0], true),
            // nopw 0(%rax,%rax,1), data16 cs nopw, xchg %ax,%ax
            (&[0x66, 0x0f, 0x1f, 0x44, 0, 0], true),
            (&[0xcc, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0], true),
            (&[0x90, 0x90, 0x66, 0x90], true),
            (&[0x90, 0x90, 0x90, 0x66, 0x90], true),
            // pxor %xmm0,%xmm0; cs jne; mov %rsp,%rbp
            (&[0x66, 0x0f, 0xef, 0xc0], false),
            (&[0xcc, 0xcc, 0xcc, 0x66, 0x0f, 0xef, 0xc0], false),
            (&[0x2e, 0x75, 0x02, 0x90], false),
            (&[0x90, 0x48, 0x89, 0xe5], false),
            // The end of what was read.
            (&[0x90, 0x90, 0x90, 0x66], false),
            (&[0x90, 0x90, 0x90], false),
        ] {
            assert_eq!(is_padding(bytes, JUMP_LEN - 1), is_so, "{bytes:x?}");
        }
    }

    fn printed(command: &mut Command) -> String {
        let output = output(command);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    // promise: Following: objdump disassembles the loader hook to the intended instructions
    #[test]
    fn objdump_shows_the_intended_hook_code() {
        let directory = Scratch::new();
        let file = directory.file("hook");
        let (code, mark) = HOOK_CODE.split_at(HOOK_LEN - MARK.len());
        assert_eq!(mark, MARK);
        std::fs::write(&file, code).unwrap();
        let mut objdump = Command::new("objdump");
        objdump.args(["-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel"]);
        let listing = printed(objdump.arg("--no-show-raw-insn").arg(&file));
        let lines = listing.lines().filter_map(|line| line.split_once(":\t"));
        let lines: Vec<(&str, String)> = lines
            .map(|(at, code)| {
                (
                    at.trim(),
                    code.split_whitespace().collect::<Vec<_>>().join(" "),
                )
            })
            .collect();
        let code: Vec<&str> = lines.iter().map(|(_, code)| code.as_str()).collect();
        assert_eq!(code, LISTING);
        let ends = SYSTEM_CALL_ENDS.iter().map(|end| format!("{end:x}"));
        let found = lines.windows(2).filter(|pair| pair[0].1 == "syscall");
        assert!(found.map(|pair| pair[1].0).eq(ends));
        assert_eq!(SYSTEM_CALL_ENDS.len(), 4);
        // The parent's label is after the `exit` of the new thread.
        assert_eq!((lines[25].1.as_str(), lines[26].0), ("syscall", "33"));
    }

    #[test]
    fn hook_is_where_readelf_places_the_function() {
        let own = Process::open(std::process::id() as i32).unwrap();
        let memory = ProcessMemory::open(&own, OFlag::O_RDWR).unwrap();
        let hook = LoaderHook::find(&own, &memory).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let loader = maps.lines().find(|line| line.contains("/ld-")).unwrap();
        let (start, path) = (
            loader.split('-').next().unwrap(),
            loader.split(' ').next_back(),
        );
        let base = u64::from_str_radix(start, 16).unwrap();
        let symbols = printed(Command::new("readelf").args(["-W", "--dyn-syms", path.unwrap()]));
        let symbol = symbols
            .lines()
            .find(|line| line.contains(DEBUG_FUNCTION))
            .unwrap();
        let value = symbol.split_whitespace().nth(1).unwrap();
        let function = base + u64::from_str_radix(value, 16).unwrap();
        let mut code = [0; ENDBR64.len()];
        memory.read(LiveAddr(function), &mut code).unwrap();
        let skipped = if code == ENDBR64 { 4 } else { 0 };
        assert_eq!(hook.jump_at.0, function + skipped);
        // Its jump leads to the code.
        let jump = hook.jump();
        let by = i32::from_le_bytes(jump[1..].try_into().unwrap());
        assert_eq!(
            hook.jump_at.0.wrapping_add_signed(5 + i64::from(by)),
            hook.code_at.0
        );
        assert!(!hook.is_in(&memory));
    }
}
