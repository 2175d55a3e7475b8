//! Which stack a function is called on. OCaml 5 executes OCaml code, and a few functions of its runtime, on the stacks
//! of fibers, which move when they grow; everything else on the stacks of threads. Only reads files.
//!
//! In OCaml code r14 points to the state of the domain, whose field `current_stack` has the address of the description
//! of the fiber's stack. The offset of the field is found in the code of `caml_c_call`, which stores the stack pointer
//! in the description before it switches to the stack of C:
//!
//! ```text
//! caml_c_call   mov current_stack(%r14), %r10      runtime/amd64.S of OCaml 5: SWITCH_OCAML_TO_C
//!               mov %rsp, (%r10)
//! ```

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::elf::ElfFile;
use crate::elf::symbols::SymbolTable;
use crate::error::Refusal;
use crate::observe::frame_id::has_runtime_5;
use crate::observe::layout::stack_copies::FiberFields;
use crate::observe::role::StackKind;

/// Functions of the runtime that are entered and left on the stack of a fiber, like OCaml code (runtime/amd64.S).
const FIBER_FUNCTIONS: [&str; 14] = [
    "caml_alloc1",
    "caml_alloc2",
    "caml_alloc3",
    "caml_allocN",
    "caml_c_call",
    "caml_c_call_copy_stack_args",
    "caml_c_call_stack_args",
    "caml_call_gc",
    "caml_call_realloc_stack",
    "caml_perform",
    "caml_raise_exn",
    "caml_reperform",
    "caml_resume",
    "caml_runstack",
];

/// How many bytes of the code of `caml_c_call` are read.
const C_CALL_LEN: usize = 64;

/// The stacks of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessStacks {
    /// There are only those of threads.
    OfThreads,
    /// OCaml code is on the stacks of fibers, which are found by these fields of the domain's state; `None`: not
    /// known.
    OfFibers {
        current_stack: Option<u8>,
        c_stack: Option<u8>,
    },
}

impl ProcessStacks {
    /// Returns the stacks of a process that has loaded these files.
    pub(crate) fn of<'e>(mut files: impl Iterator<Item = &'e ElfFile>) -> ProcessStacks {
        match files.find(|elf| has_runtime_5(elf)) {
            None => ProcessStacks::OfThreads,
            Some(runtime) => {
                let code = code_of_c_call(runtime);
                let instructions = code.as_ref().map(|it| instructions(it)).unwrap_or_default();
                ProcessStacks::OfFibers {
                    current_stack: current_stack(&instructions),
                    c_stack: c_stack(&instructions),
                }
            }
        }
    }

    /// Returns the fields by which trampolines find the stacks of fibers, if both are known.
    pub(crate) fn fibers(self) -> Option<FiberFields> {
        match self {
            ProcessStacks::OfFibers {
                current_stack: Some(current_stack),
                c_stack: Some(c_stack),
            } => Some(FiberFields {
                current_stack,
                c_stack,
            }),
            _ => None,
        }
    }

    /// Returns the stack that a function is called on, if it is the same for OCaml code and other code.
    ///
    /// # Errors
    ///
    /// If OCaml code and other code are on different stacks.
    pub(crate) fn of_any(self) -> Result<StackKind, Refusal> {
        match self {
            ProcessStacks::OfThreads => Ok(StackKind::OfThread),
            ProcessStacks::OfFibers { .. } => Err(Refusal::UnknownStack),
        }
    }

    /// Returns the stack that a function is called on.
    ///
    /// # Errors
    ///
    /// If it is called on a fiber's stack, and the offset of `current_stack` was not found.
    pub(crate) fn of_function(self, name: &str, is_ocaml: bool) -> Result<StackKind, Refusal> {
        match self {
            ProcessStacks::OfFibers { current_stack, .. }
                if is_ocaml || FIBER_FUNCTIONS.contains(&name) =>
            {
                let current_stack = current_stack.ok_or(Refusal::UnknownStack)?;
                Ok(StackKind::OfFiber { current_stack })
            }
            _ => Ok(StackKind::OfThread),
        }
    }
}

/// Returns whether a function of this name is one that OCaml's compiler generates, such as `caml_curry3_1`. It is
/// OCaml code, although its symbol looks like that of a C function.
pub(crate) fn is_generated(name: &str) -> bool {
    const PREFIXES: [&str; 4] = ["caml_apply", "caml_curry", "caml_send", "caml_tuplify"];
    let has_number = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    let mut rests = PREFIXES
        .iter()
        .filter_map(|prefix| name.strip_prefix(prefix));
    rests.any(has_number) || name == "caml_program"
}

/// Returns the first bytes of the code of `caml_c_call`.
fn code_of_c_call(runtime: &ElfFile) -> Option<[u8; C_CALL_LEN]> {
    let mut tables = [SymbolTable::Static, SymbolTable::Dynamic].into_iter();
    let address = tables.find_map(|table| {
        let symbols = runtime.symbols(table).ok().flatten()?;
        let [found] = symbols.find(["caml_c_call"]).ok()?;
        found.first().map(|symbol| symbol.address)
    })?;
    let mut code = [0; C_CALL_LEN];
    runtime.read_address(address, &mut code)?;
    Some(code)
}

fn instructions(code: &[u8]) -> Vec<Instruction> {
    let all = Decoder::new(64, code, DecoderOptions::NONE).into_iter();
    all.take_while(|it| !it.is_invalid()).collect()
}

/// Returns whether it is `mov offset(%r14), %r`.
fn is_load(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Mov
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Memory
        && instruction.memory_base() == Register::R14
        && instruction.memory_index() == Register::None
}

/// Returns the offset of the field `c_stack` in the state of a domain. The field points to where the stack of C
/// code continues. Its offset is that of the first `mov offset(%r14), %r` whose register is later moved to the
/// stack pointer.
fn c_stack(instructions: &[Instruction]) -> Option<u8> {
    let switch = instructions.iter().position(|it| {
        it.mnemonic() == Mnemonic::Mov
            && it.op0_register() == Register::RSP
            && it.op1_kind() == OpKind::Register
    })?;
    let register = instructions[switch].op1_register();
    let mut loads = instructions[..switch].iter().filter(|it| is_load(it));
    let load = loads.find(|it| it.op0_register() == register)?;
    u8::try_from(load.memory_displacement64()).ok()
}

/// Returns the offset of the field `current_stack` in the state of a domain. The field points to a `struct
/// stack_info`. Its offset is that of `mov offset(%r14), %r; mov %rsp, (%r)`.
fn current_stack(instructions: &[Instruction]) -> Option<u8> {
    instructions.windows(2).find_map(|both| {
        let is_store = both[1].mnemonic() == Mnemonic::Mov
            && both[1].op1_register() == Register::RSP
            && both[1].memory_base() == both[0].op0_register()
            && both[1].memory_displacement64() == 0;
        let field = u8::try_from(both[0].memory_displacement64()).ok()?;
        (is_load(&both[0]) && is_store).then_some(field)
    })
}

#[cfg(test)]
mod tests {
    use test_support::program;

    use super::*;

    #[test]
    fn offsets_are_found_in_the_code() {
        let in_code = |code: &[u8]| current_stack(&instructions(code));
        // Of 5.3 and 5.4; with another field; with a load instead of the store; with r13 instead of r14.
        let found = b"\x4d\x8b\x56\x28\x49\x89\x22\x4d\x8b\x5e\x40";
        assert_eq!(in_code(found), Some(0x28));
        assert_eq!(in_code(b"\x90\x4d\x8b\x56\x20\x49\x89\x22"), Some(0x20));
        assert_eq!(in_code(b"\x4d\x8b\x56\x28\x49\x8b\x22"), None);
        assert_eq!(in_code(b"\x4d\x8b\x55\x28\x49\x89\x22"), None);
        assert_eq!(in_code(b""), None);
        // The beginning of caml_c_call of 5.3 and 5.4.
        let c_call =
            b"\x4d\x8b\x56\x28\x49\x89\x22\x4d\x8b\x5e\x40\x49\x89\x63\x08\x4d\x89\x13\x4c\x89\xdc";
        let c_call = instructions(c_call);
        assert_eq!(
            (current_stack(&c_call), c_stack(&c_call)),
            (Some(0x28), Some(0x40))
        );
        assert_eq!(c_stack(&c_call[..5]), None);
    }

    #[test]
    fn ocaml_4_has_only_stacks_of_threads() {
        let service = ElfFile::open(&program("service")).unwrap();
        assert_eq!(
            ProcessStacks::of([&service].into_iter()),
            ProcessStacks::OfThreads
        );
    }

    #[test]
    fn ocaml_code_is_on_fibers() {
        let known = ProcessStacks::OfFibers {
            current_stack: Some(0x28),
            c_stack: None,
        };
        let fiber = Ok(StackKind::OfFiber {
            current_stack: 0x28,
        });
        assert_eq!(known.of_function("List.map", true), fiber);
        assert_eq!(known.of_function("caml_call_gc", false), fiber);
        let malloc = known.of_function("malloc", false);
        assert_eq!(malloc, Ok(StackKind::OfThread));
        let unknown = ProcessStacks::OfFibers {
            current_stack: None,
            c_stack: None,
        };
        let refused = unknown.of_function("List.map", true);
        assert_eq!(refused, Err(Refusal::UnknownStack));
        assert_eq!(known.of_any(), Err(Refusal::UnknownStack));
        assert_eq!(ProcessStacks::OfThreads.of_any(), Ok(StackKind::OfThread));
    }

    #[test]
    fn generated_functions_are_of_ocaml() {
        for name in [
            "caml_apply2",
            "caml_curry3_1",
            "caml_tuplify4",
            "caml_program",
        ] {
            assert!(is_generated(name), "{name}");
        }
        for name in ["caml_apply", "caml_send_it", "caml_alloc", "apply2"] {
            assert!(!is_generated(name), "{name}");
        }
    }
}
