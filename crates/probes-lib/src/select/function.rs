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
/// # let _ = (lists, one);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FunctionSelector {
    /// Those with a name, as in the source, that matches.
    Glob(Glob),
    /// The function that begins at this address of the process, or the instruction there.
    Address(LiveAddr),
}
