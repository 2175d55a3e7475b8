//! [`DynamicLoader`]: the dynamic loader of a process, and whether it has loaded all objects.
//!
//! Loaders call an empty function for debuggers, `_dl_debug_state` (`r_brk` of `struct r_debug`,
//! link.h), before and after they change the list of objects: the second time, new objects have
//! been mapped, and none of their code has run.

use goblin::elf::ProgramHeader;
use goblin::elf::program_header::{PT_DYNAMIC, PT_PHDR};

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::elf::{CTX, ElfFile, Segment};
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::load_bias;
use crate::process::maps::{self, Mapping};
use crate::process::objects;

/// The name of the function in glibc and in musl.
pub(crate) const DEBUG_FUNCTION: &str = "_dl_debug_state";

/// How many bytes are read at the function's address: an `endbr64`, room for a near jump, and the rest of a long nop
/// that the jump overwrites.
pub(crate) const DEBUG_FUNCTION_LEN: u64 = 24;

/// The dynamic loader of a process.
pub(crate) struct DynamicLoader {
    /// The mappings of the process.
    pub(crate) maps: Vec<Mapping>,
    pub(crate) elf: ElfFile,
    pub(crate) bias: LoadBias,
    /// The function that it calls for debuggers.
    pub(crate) debug_function: FileAddr,
    /// The segment that the function is in.
    pub(crate) segment: Segment,
}

/// Why a process has no known dynamic loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoDynamicLoader {
    /// It has none: its program is static, or the loader was executed as its program.
    Absent,
    /// It cannot be read, or is not like those of glibc and musl.
    Unknown,
}

impl DynamicLoader {
    /// Finds the dynamic loader of a process.
    pub(crate) fn of(process: &Process) -> Result<DynamicLoader, NoDynamicLoader> {
        let auxv = process.read_of_living_thread("auxv");
        let auxv = auxv.map_err(|_| NoDynamicLoader::Unknown)?;
        let base = load_bias::auxv_value(&auxv, load_bias::AT_BASE).filter(|&base| base != 0);
        let base = LiveAddr(base.ok_or(NoDynamicLoader::Absent)?);
        DynamicLoader::at(process, base).ok_or(NoDynamicLoader::Unknown)
    }

    fn at(process: &Process, base: LiveAddr) -> Option<DynamicLoader> {
        let maps = maps::parse(&process.read_of_living_thread("maps").ok()?);
        let elf = objects::elf_of(process, &maps, maps::find(&maps, base, 1)?)?;
        let first = elf.loaded().map(|one| one.start.0 & !(PAGE - 1)).min();
        let bias = LoadBias::between(FileAddr(first.unwrap_or(0)), base);
        let debug_function = elf.exported(DEBUG_FUNCTION)?;
        let has_it =
            |it: &Segment| it.executable && it.holds_in_file(debug_function, DEBUG_FUNCTION_LEN);
        let segment = elf.loaded().find(has_it)?;
        Some(DynamicLoader {
            maps,
            elf,
            bias,
            debug_function,
            segment,
        })
    }
}

/// Returns the address of the function that the loader of a process calls for debuggers; `None` if it has
/// no loader, or one without such a function.
pub(crate) fn debug_function(process: &Process) -> Option<LiveAddr> {
    let loader = DynamicLoader::of(process).ok()?;
    Some(loader.bias.live(loader.debug_function))
}

/// Returns whether the loader has mapped all objects of a process and is not changing their list
/// (`r_state` is `RT_CONSISTENT`); `None` if that is not known.
pub(crate) fn has_loaded(process: &Process, memory: &impl ReadMemory) -> Option<bool> {
    const RT_CONSISTENT: u32 = 0;
    /// The offset of the state in struct r_debug: version, list of objects, function, state (link.h).
    const STATE: u64 = 24;
    let auxv = process.read_of_living_thread("auxv").ok()?;
    let debug = r_debug(&auxv, memory)?;
    if debug.0 == 0 {
        return Some(false);
    }
    let mut state = [0; 4];
    memory.read(debug.plus(STATE), &mut state).ok()?;
    Some(u32::from_le_bytes(state) == RT_CONSISTENT)
}

/// Returns the address of struct r_debug, which the loader has written into the executable's `DT_DEBUG`;
/// 0 if it has not yet.
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
    // The dynamic section consists of pairs of words, like the auxiliary vector.
    load_bias::auxv_value(&bytes, DT_DEBUG).map(LiveAddr)
}
