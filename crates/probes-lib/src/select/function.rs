//! [`FunctionSelector`]: which functions of a program are meant.

use crate::address::LiveAddr;
use crate::select::glob::Glob;

/// Selects functions of a program.
///
/// ```
/// use probes_lib::{FunctionSelector, LiveAddr};
///
/// let lists = FunctionSelector::Glob("Stdlib.List.*".parse().unwrap());
/// let one = FunctionSelector::Address(LiveAddr(0x55d0_c3b0));
/// let line = FunctionSelector::Line { file: "src/http.ml".into(), line: 42 };
/// # let _ = (lists, one, line);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FunctionSelector {
    /// Those with a name, as in the source, that matches.
    Glob(Glob),
    /// The function that begins at this address of the process, or the instruction there.
    Address(LiveAddr),
    /// Where a source line begins: in each function with code of it, also code that was inlined there, the first
    /// instruction of each stretch of that code, as the debugging information (DWARF) says.
    Line {
        /// The path of the source file, or the end of it if no other file's path ends so.
        file: String,
        /// The line, from 1.
        line: u32,
    },
}
