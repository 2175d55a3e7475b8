//! [`LoaderHook`]: makes the dynamic loader of a process tell its tracer when it has mapped or unmapped
//! objects.
//!
//! Loaders call an empty function for debuggers, `_dl_debug_state`, when the list of objects changes
//! (`r_brk` of `struct r_debug`, link.h): after new objects have been mapped, and before anything of
//! theirs runs. Debuggers put a breakpoint there. A breakpoint whose debugger has died kills the
//! program; ours must not. So the function is made to jump to a trampoline instead:
//!
//! ```text
//! _dl_debug_state   ret   ─▶  jmp trampoline
//! trampoline              holds signals back, starts a thread that ends at once, lets signals through,
//!                   ret
//! ```
//!
//! A tracer is told of a new thread (`PTRACE_EVENT_CLONE`), while the one that has started it stands
//! in the trampoline. Without a tracer, that is all that happens: 20 µs are lost at each `dlopen`.
//!
//! The trampoline lies behind the loader's code, in the rest of its last page, which is zero. Nothing about
//! it is known to us alone: what was there before is in the loader's file.

use std::io;
use std::ops::Range;

use goblin::elf::ProgramHeader;
use goblin::elf::program_header::{PT_DYNAMIC, PT_PHDR};

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::elf::{CTX, ElfFile, Segment};
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::load_bias;
use crate::process::maps::{self, Mapping};
use crate::process::memory::ProcessMemory;
use crate::process::objects;
use crate::process::seccomp::OwnFilters;

/// What the function is called, in glibc and in musl.
const FUNCTION: &str = "_dl_debug_state";

const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const RET: u8 = 0xc3;
const JMP: u8 = 0xe9;
/// Opcode and displacement.
const JMP_LEN: usize = 5;

/// Keeps all registers, as callers may know that the function changes none. The new thread shares
/// the stack, and uses none of it.
#[rustfmt::skip]
const HOOK_CODE: [u8; 84] = [
    0x50, 0x57, 0x56, 0x52, 0x51,       // push rax, rdi, rsi, rdx, rcx
    0x41, 0x52, 0x41, 0x53,             // push r10, r11
    0x6a, 0xff,                         // push -1: all signals
    0x50,                               // push rax: room for the mask
    0x6a, 0x0e, 0x58,                   // rax = SYS_rt_sigprocmask
    0x31, 0xff,                         // rdi = SIG_BLOCK
    0x48, 0x8d, 0x74, 0x24, 0x08,       // rsi = all signals
    0x48, 0x89, 0xe2,                   // rdx = the mask
    0x6a, 0x08, 0x41, 0x5a,             // r10 = 8
    0x0f, 0x05,                         // syscall
    0xbf, 0x00, 0x0f, 0x05, 0x00,       // rdi = CLONE_VM|FS|FILES|SIGHAND|THREAD|SYSVSEM
    0x31, 0xf6,                         // rsi = 0: the same stack
    0x6a, 0x38, 0x58,                   // rax = SYS_clone
    0x0f, 0x05,                         // syscall
    0x85, 0xc0,                         // test eax,eax
    0x75, 0x04,                         // jne: the one that was here before
    0xb0, 0x3c,                         // rax = SYS_exit
    0x0f, 0x05,                         // syscall
    0x6a, 0x0e, 0x58,                   // rax = SYS_rt_sigprocmask
    0x6a, 0x02, 0x5f,                   // rdi = SIG_SETMASK
    0x48, 0x89, 0xe6,                   // rsi = the mask
    0x31, 0xd2,                         // rdx = 0
    0x6a, 0x08, 0x41, 0x5a,             // r10 = 8
    0x0f, 0x05,                         // syscall
    0x58, 0x58,                         // pop the mask, all signals
    0x41, 0x5b, 0x41, 0x5a,             // pop r11, r10
    0x59, 0x5a, 0x5e, 0x5f, 0x58,       // pop rcx, rdx, rsi, rdi, rax
    RET,
    b'o', b'-', b'p', 1,                // whose it is, and which version
];

/// Why the loader of a process cannot be made to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoLoaderHook {
    /// It has none: it is static, or was started by calling the loader.
    NoLoader,
    /// The loader is not like those that we know, or cannot be changed: why.
    Impossible(&'static str),
}

impl NoLoaderHook {
    const UNKNOWN: NoLoaderHook =
        NoLoaderHook::Impossible("its dynamic loader is not like those of glibc and musl");
    /// The kernel may kill the process for what the trampoline does.
    const FILTERED: NoLoaderHook =
        NoLoaderHook::Impossible("a seccomp filter may not allow what that takes");
    pub(crate) const UNCHANGEABLE: NoLoaderHook =
        NoLoaderHook::Impossible("the code of its dynamic loader cannot be changed");
}

/// Where the loader of a process calls the function, while nobody has changed that; `None` if it has
/// no loader, or one that has no such function.
pub(crate) fn function(process: &Process) -> Option<LiveAddr> {
    let loader = Loader::of(process).ok()?;
    Some(loader.bias.live(loader.function))
}

/// The dynamic loader of a process.
struct Loader {
    maps: Vec<Mapping>,
    elf: ElfFile,
    bias: LoadBias,
    function: FileAddr,
    /// Has the function.
    segment: Segment,
}

impl Loader {
    fn of(process: &Process) -> Result<Loader, NoLoaderHook> {
        let unknown = |_| NoLoaderHook::UNKNOWN;
        let auxv = process.read_program("auxv").map_err(unknown)?;
        let base = load_bias::auxv_value(&auxv, load_bias::AT_BASE).filter(|&base| base != 0);
        let base = LiveAddr(base.ok_or(NoLoaderHook::NoLoader)?);
        let maps = maps::parse(&process.read_program("maps").map_err(unknown)?);
        let loader = maps::find(&maps, base, 1).ok_or(NoLoaderHook::UNKNOWN)?;
        let elf = objects::elf_of(process, &maps, loader).ok_or(NoLoaderHook::UNKNOWN)?;
        let first = elf.loaded().map(|one| one.start.0 & !(PAGE - 1)).min();
        let bias = LoadBias::between(FileAddr(first.unwrap_or(0)), base);
        let function = elf.exported(FUNCTION).ok_or(NoLoaderHook::UNKNOWN)?;
        let has_it = |it: &Segment| it.executable && it.holds(function, FUNCTION_LEN);
        let segment = elf.loaded().find(has_it).ok_or(NoLoaderHook::UNKNOWN)?;
        Ok(Loader {
            maps,
            elf,
            bias,
            function,
            segment,
        })
    }
}

/// The trampoline of one process.
#[derive(Clone, Debug)]
pub(crate) struct LoaderHook {
    /// Of the `ret` that is made a `jmp`.
    call: LiveAddr,
    /// What the file has there.
    original: [u8; JMP_LEN],
    trampoline: LiveAddr,
}

impl LoaderHook {
    /// Puts the trampoline into a process. It may run: what its threads can reach is changed by one byte.
    pub(crate) fn install(
        process: &Process,
        memory: &ProcessMemory,
    ) -> Result<LoaderHook, NoLoaderHook> {
        let hook = LoaderHook::find(process, memory)?;
        hook.write(memory).map_err(|_| NoLoaderHook::UNCHANGEABLE)?;
        Ok(hook)
    }

    /// Where the trampoline is.
    pub(crate) fn range(&self) -> Range<u64> {
        self.trampoline.0..self.trampoline.plus(HOOK_CODE.len() as u64).0
    }

    /// The trampoline that is in a process already.
    pub(crate) fn left_in(process: &Process, memory: &ProcessMemory) -> Option<LoaderHook> {
        let hook = LoaderHook::find(process, memory).ok()?;
        hook.is_in(memory).then_some(hook)
    }

    /// Whether the trampoline is in that memory, closed or not.
    pub(crate) fn is_in(&self, memory: &impl ReadMemory) -> bool {
        let mut trampoline = [0; HOOK_CODE.len()];
        memory.read(self.trampoline, &mut trampoline).is_ok() && trampoline == HOOK_CODE
    }

    fn find(process: &Process, memory: &ProcessMemory) -> Result<LoaderHook, NoLoaderHook> {
        let loader = Loader::of(process)?;
        let is_filtered = OwnFilters::of(process).has_any();
        if is_filtered.map_err(|_| NoLoaderHook::UNKNOWN)? {
            return Err(NoLoaderHook::FILTERED);
        }
        let hook = LoaderHook::at(&loader).ok_or(NoLoaderHook::UNKNOWN)?;
        match hook.is_possible(memory, &loader.maps) {
            Ok(true) => Ok(hook),
            Ok(false) => Err(NoLoaderHook::UNKNOWN),
            Err(_) => Err(NoLoaderHook::UNCHANGEABLE),
        }
    }

    /// The hook of a loader whose function is empty, and followed by nothing up to the next.
    fn at(loader: &Loader) -> Option<LoaderHook> {
        let Loader {
            elf,
            segment,
            function,
            bias,
            ..
        } = loader;
        let function = *function;
        let mut code = [0; FUNCTION_LEN as usize];
        elf.read_loaded(segment, function, &mut code).ok()?;
        let skipped = if code.starts_with(&ENDBR64) {
            ENDBR64.len()
        } else {
            0
        };
        let original: [u8; JMP_LEN] = code.get(skipped..skipped + JMP_LEN)?.try_into().ok()?;
        if original[0] != RET || !is_padding(&original[1..]) {
            return None;
        }
        let end = segment.start.0.checked_add(segment.file_len)?;
        // Aligned, and not quite at the end.
        let trampoline = end.checked_next_multiple_of(16)?;
        let fits = end % PAGE != 0 && trampoline % PAGE + HOOK_CODE.len() as u64 <= PAGE;
        (fits && trampoline / PAGE == end / PAGE).then(|| LoaderHook {
            call: bias.live(FileAddr(function.0 + skipped as u64)),
            original,
            trampoline: bias.live(FileAddr(trampoline)),
        })
    }

    /// Whether the process has what is expected in the places that would be written to.
    fn is_possible(&self, memory: &impl ReadMemory, maps: &[Mapping]) -> io::Result<bool> {
        let private_code = |at, len: usize| {
            let mapping = maps::find(maps, at, len as u64);
            mapping.is_some_and(|mapping| mapping.executable && !mapping.shared)
        };
        if !private_code(self.call, JMP_LEN) || !private_code(self.trampoline, HOOK_CODE.len()) {
            return Ok(false);
        }
        let (mut call, mut trampoline) = ([0; JMP_LEN], [0; HOOK_CODE.len()]);
        memory.read(self.call, &mut call)?;
        memory.read(self.trampoline, &mut trampoline)?;
        // Or one of ours that was killed has left it so, half written perhaps.
        let is_free = trampoline
            .iter()
            .zip(HOOK_CODE)
            .all(|(&is, ours)| is == 0 || is == ours);
        let is_ours = call[0] == RET && call[1..] == self.jump()[1..] || call == self.jump();
        Ok(is_free && (call == self.original || is_ours && trampoline == HOOK_CODE))
    }

    /// `jmp trampoline`.
    fn jump(&self) -> [u8; JMP_LEN] {
        let next = self.call.plus(JMP_LEN as u64);
        let displacement = self.trampoline.0.wrapping_sub(next.0) as u32;
        let mut jump = [JMP; JMP_LEN];
        jump[1..].copy_from_slice(&displacement.to_le_bytes());
        jump
    }

    /// Nobody gets into the trampoline before the last byte is written.
    fn write(&self, memory: &ProcessMemory) -> io::Result<()> {
        let jump = self.jump();
        let mut memory = memory.while_it_runs();
        memory.write_code(self.trampoline, &HOOK_CODE)?;
        memory.write_code(self.call.plus(1), &jump[1..])?;
        memory.write_code(self.call, &jump[..1])
    }

    /// Nobody gets into the trampoline any more.
    pub(crate) fn close(&self, memory: &ProcessMemory) -> io::Result<()> {
        let mut memory = memory.while_it_runs();
        memory.write_code(self.call, &self.original[..1])?;
        memory.write_code(self.call.plus(1), &self.original[1..])
    }

    /// Takes the trampoline away, which nobody is in.
    pub(crate) fn remove(&self, memory: &ProcessMemory) -> io::Result<()> {
        self.close(memory)?;
        let mut memory = memory.while_it_runs();
        memory.write_code(self.trampoline, &[0; HOOK_CODE.len()])
    }
}

/// How much of the function is looked at: `endbr64`, and what becomes the jump.
const FUNCTION_LEN: u64 = (ENDBR64.len() + JMP_LEN) as u64;

/// Whether these are the first bytes of what assemblers put between functions.
fn is_padding(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    // `nop`, `int3` and zeroes, one by one; the first prefix or opcode of a longer no-op.
    while let [0x90 | 0xcc | 0x00, after @ ..] = rest {
        rest = after;
    }
    rest.is_empty() || rest.starts_with(&[0x0f, 0x1f]) || rest[0] == 0x66 || rest[0] == 0x2e
}

/// Whether the objects that the program of a process is linked with have all been mapped; `None` if
/// that cannot be told.
pub(crate) fn has_loaded(process: &Process, memory: &impl ReadMemory) -> Option<bool> {
    const RT_CONSISTENT: u32 = 0;
    let auxv = process.read_program("auxv").ok()?;
    let debug = r_debug(&auxv, memory)?;
    if debug.0 == 0 {
        return Some(false);
    }
    // struct r_debug: version, list of objects, function, state; link.h.
    let mut state = [0; 4];
    memory.read(debug.plus(24), &mut state).ok()?;
    Some(u32::from_le_bytes(state) == RT_CONSISTENT)
}

/// What the executable's `DT_DEBUG` says, which the loader fills in.
fn r_debug(auxv: &[u8], memory: &impl ReadMemory) -> Option<LiveAddr> {
    const DT_DEBUG: u64 = 21;
    const MAX_DYNAMIC: u64 = 1 << 16;
    let value = |key| load_bias::auxv_value(auxv, key);
    let table = LiveAddr(value(load_bias::AT_PHDR)?);
    let count = value(load_bias::AT_PHNUM)?.min(u64::from(u16::MAX)) as usize;
    let mut bytes = vec![0; count * ProgramHeader::size(CTX)];
    memory.read(table, &mut bytes).ok()?;
    let headers = ProgramHeader::parse(&bytes, 0, count, CTX).ok()?;
    let of_type = |kind| headers.iter().find(|header| header.p_type == kind);
    let bias = LoadBias::between(FileAddr(of_type(PT_PHDR)?.p_vaddr), table);
    let dynamic = of_type(PT_DYNAMIC)?;
    let mut bytes = vec![0; dynamic.p_memsz.min(MAX_DYNAMIC) as usize];
    memory
        .read(bias.live(FileAddr(dynamic.p_vaddr)), &mut bytes)
        .ok()?;
    // Pairs of words, as the auxiliary vector is.
    load_bias::auxv_value(&bytes, DT_DEBUG).map(LiveAddr)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::fcntl::OFlag;
    use test_support::{Scratch, output};

    use super::*;

    /// What objdump is to say of the trampoline, without addresses.
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

    fn printed(command: &mut Command) -> String {
        let output = output(command);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    // promise: Following: The loader hook's code is what objdump says it is
    #[test]
    fn hook_code_is_what_objdump_shows() {
        let folder = Scratch::new();
        let file = folder.file("trampoline");
        // Without the name behind its end.
        std::fs::write(&file, &HOOK_CODE[..HOOK_CODE.len() - 4]).unwrap();
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
        // Where the thread goes on that has started the other: behind its exit.
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
            .find(|line| line.contains(FUNCTION))
            .unwrap();
        let value = symbol.split_whitespace().nth(1).unwrap();
        let function = base + u64::from_str_radix(value, 16).unwrap();
        let mut code = [0; ENDBR64.len()];
        memory.read(LiveAddr(function), &mut code).unwrap();
        let skipped = if code == ENDBR64 { 4 } else { 0 };
        assert_eq!(hook.call.0, function + skipped);
        // Its jump leads to the trampoline.
        let jump = hook.jump();
        let by = i32::from_le_bytes(jump[1..].try_into().unwrap());
        assert_eq!(
            hook.call.0.wrapping_add_signed(5 + i64::from(by)),
            hook.trampoline.0
        );
        assert!(!hook.is_in(&memory));
    }
}
