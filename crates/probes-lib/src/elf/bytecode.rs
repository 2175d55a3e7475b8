//! Programs of OCaml bytecode: handlers of probes never run in them, whatever counters and sites their C code has.

use crate::elf::ElfFile;

/// The table of C primitives that every runtime for bytecode has: `ocamlrun`, and the executables of
/// `ocamlc -custom` and `-output-complete-exe`. They export it.
const OF_BYTECODE: &str = "caml_names_of_builtin_cprim";

/// What every native OCaml program has, even one that also interprets bytecode.
pub(crate) const OCAML_FRAMETABLE: &str = "caml_frametable";

impl ElfFile {
    /// Returns whether the file interprets OCaml bytecode and has no native OCaml code.
    pub(crate) fn interprets_bytecode(&self) -> bool {
        let look_up = || self.exports(OF_BYTECODE) && !self.exports(OCAML_FRAMETABLE);
        *self.interprets_bytecode.get_or_init(look_up)
    }
}
