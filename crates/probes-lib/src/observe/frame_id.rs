//! [`FrameId`]: which registers identify the stack frame that a site executes in, so that two hits in
//! the same frame are recognized.
//!
//! ```text
//! site within OCaml code             rsp is the stack pointer of that code
//! site of ppx_probe, a C function    OCaml 4: called on the stack of the OCaml code: rsp
//!                                    OCaml 5: called on the stack of C; rbx has the stack pointer of the OCaml code
//! ```
//!
//! From `Iextcall` in `asmcomp/amd64/emit.mlp` of OCaml 5, for functions that do not allocate.

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::elf::symbols::SymbolTable;
use crate::process::program::{LiveSite, Program};

/// The registers that differ between two active frames of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum FrameId {
    /// The stack pointer.
    #[default]
    Stack,
    /// The stack pointer and rbx, combined: either may be that of the OCaml code.
    StackAndRbx,
}

/// `mov $1, %eax`, which precedes each site of ppx_probe: OCaml's `false` is 1.
const FALSE: [u8; 5] = [0xb8, 1, 0, 0, 0];

impl FrameId {
    /// Returns what identifies the frames of a site; `is_ocaml_4` is called only if the answer
    /// depends on it.
    pub(crate) fn of(site: LiveSite<'_>, is_ocaml_4: impl Fn() -> bool) -> FrameId {
        let is_in_own_function = is_in_own_function(&site.object.elf, site.site.address());
        if is_in_own_function && !is_ocaml_4() {
            FrameId::StackAndRbx
        } else {
            FrameId::Stack
        }
    }
}

/// Returns whether a site is of ppx_probe: OCaml code calls its function directly.
pub(crate) fn is_called_by_ocaml(site: LiveSite<'_>) -> bool {
    is_in_own_function(&site.object.elf, site.site.address())
}

/// Returns whether a site is in a function of its own, as those of ppx_probe.
fn is_in_own_function(elf: &ElfFile, site: FileAddr) -> bool {
    let Some(start) = site.0.checked_sub(FALSE.len() as u64).map(FileAddr) else {
        return false;
    };
    let mut before = [0; FALSE.len()];
    elf.read_address(start, &mut before).is_some() && before == FALSE
}

/// Returns whether the executable is known to have the native runtime of OCaml 4.
pub(crate) fn is_ocaml_4(program: &Program) -> bool {
    let mut objects = program.objects().iter();
    let executable = objects.find(|object| !program.can_unload(object));
    executable.is_some_and(|executable| has_runtime_4(&executable.elf))
}

/// Returns whether a file is known to define the native runtime of OCaml 5.
pub(crate) fn has_runtime_5(elf: &ElfFile) -> bool {
    runtime_symbols(elf)[1]
}

/// Returns whether a file is known to define a native runtime of OCaml.
pub(crate) fn has_runtime(elf: &ElfFile) -> bool {
    runtime_symbols(elf)[0]
}

/// Returns whether a file defines `caml_start_program`, and not `caml_perform` of OCaml 5, which is in the same
/// object file.
fn has_runtime_4(elf: &ElfFile) -> bool {
    runtime_symbols(elf) == [true, false]
}

/// Returns whether a file defines `caml_start_program`, and `caml_perform`.
fn runtime_symbols(elf: &ElfFile) -> [bool; 2] {
    const NAMES: [&str; 2] = ["caml_start_program", "caml_perform"];
    // ocamlopt makes most executables export their symbols, and strip(1) keeps dynamic symbols.
    let mut tables = [SymbolTable::Static, SymbolTable::Dynamic].into_iter();
    let symbols = tables.find_map(|table| elf.symbols(table).ok().flatten());
    let found = symbols.and_then(|symbols| symbols.find(NAMES).ok());
    found.map_or([false; 2], |found| found.map(|found| !found.is_empty()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use test_support::{fixture, program};

    use super::*;
    use crate::elf::table::ProbeTable;

    #[test]
    fn runtime_is_known_by_its_symbols() {
        let has_runtime_4 = |file: PathBuf| has_runtime_4(&ElfFile::open(&file).unwrap());
        assert!(has_runtime_4(program("service")) && !has_runtime_4(fixture("timed.pie")));
    }

    #[test]
    fn sites_of_ppx_probe_are_called() {
        let are_called = |file: PathBuf| {
            let elf = ElfFile::open(&file).unwrap();
            let table = ProbeTable::of(&elf).unwrap();
            let sites = table.sites_by_address();
            let called: Vec<bool> = sites
                .map(|site| is_in_own_function(&elf, table.site(site).address()))
                .collect();
            assert!(!called.is_empty());
            assert!(called.iter().all(|it| *it == called[0]));
            called[0]
        };
        assert!(are_called(program("service")) && !are_called(fixture("timed.pie")));
        let elf = ElfFile::open(&fixture("timed.pie")).unwrap();
        for address in [0, 4, u64::MAX] {
            assert!(!is_in_own_function(&elf, FileAddr(address)));
        }
    }
}
