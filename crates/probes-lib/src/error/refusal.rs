//! [`Refusal`]: why a place in code cannot be patched.

use crate::address::LiveAddr;

/// Why a place cannot be patched; displayed as the end of a sentence that begins with its name.
///
/// Offsets are in bytes from the start of the function.
///
/// ```
/// let refusal = probes_lib::Refusal::TooShort { len: 1, exit: None };
/// assert_eq!(refusal.to_string(), "is too short: 1 byte, and a jump takes 5");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, strum::IntoStaticStr, thiserror::Error)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// Its range is empty, or not all of it is code that the file has.
    #[error("is not in the code of its file")]
    NotCode,
    /// It is the site of a USDT probe in no known function, or a part of a function (`.cold`) to which no known function
    /// jumps, or several.
    #[error("is in no known function")]
    NoFunction,
    /// It is in code that the process has mapped once more, where no loader does. The function itself is elsewhere, and may
    /// be patched.
    #[error("is in a second mapping of its file, which is left as it is")]
    MappedAgain,
    /// The address is not that of an instruction of the function.
    #[error("is in the middle of an instruction")]
    NoInstruction {
        /// Where.
        offset: u64,
    },
    /// Some of its bytes are no instruction: they may be data.
    #[error("has bytes at +{offset:#x} that are not an instruction")]
    Undecodable {
        /// Where the first of them is.
        offset: u64,
    },
    /// It is longer than any real function, or overlaps so many others that planning them all would take too long.
    #[error("is too large: {len} bytes")]
    TooLarge {
        /// Its length in bytes.
        len: u64,
    },
    /// The place has too few bytes for a jump, and what follows it allows no shorter jump.
    #[error("{}", too_short(*len, *exit))]
    TooShort {
        /// The length of the place in bytes, with the padding that follows.
        len: u8,
        /// Where the place is, if it is an exit.
        exit: Option<u64>,
    },
    /// Code jumps into the bytes that the jump would take, and no address is free that a shorter one reaches.
    #[error(
        "has a branch target at +{offset:#x}, inside the bytes that the jump to its trampoline would take"
    )]
    BranchTarget {
        /// Where the target is.
        offset: u64,
    },
    /// An instruction cannot be executed at another address.
    #[error("has {what} at +{offset:#x}, which cannot be moved")]
    Unmovable {
        /// Where the instruction is.
        offset: u64,
        /// What it is, with its article.
        what: &'static str,
    },
    /// It jumps through a table that was not found, so that any of its instructions may be a branch target.
    #[error("has a jump at +{offset:#x} whose targets are unknown")]
    UnknownTargets {
        /// Where the jump is.
        offset: u64,
    },
    /// It jumps to code that belongs to no known function: that may be another function, with which this one ends, or a
    /// part of its own. Or it shares a part with another function.
    #[error("has a jump at +{offset:#x} to code that belongs to no known function, or to several")]
    UnknownCode {
        /// Where the jump is.
        offset: u64,
    },
    /// It ends neither with a return nor with a jump: what follows is executed after it. There is no instruction to
    /// patch as its exit.
    #[error("ends neither with a return nor with a jump (+{offset:#x})")]
    FallsThrough {
        /// Where its last instruction is.
        offset: u64,
    },
    /// The patch of this exit would overlap another one of this function, or one of this function that of another function.
    #[error("{}", overlap(*offset))]
    Overlap {
        /// Where the exit is; 0 if the other patch is that of another function.
        offset: u64,
    },
    /// The trampoline is too far from the place, or from what a displaced instruction refers to.
    #[error("is more than 2 GiB from its trampoline, or from what it refers to")]
    OutOfReach,
    /// The bytes that the jump would take are on two pages: they cannot be written atomically.
    #[error("needs a jump across a page boundary, which could not be written atomically")]
    PageBorder,
    /// It is OCaml 4's, and the instructions that would be moved write to the stack. If the stack ends there, OCaml
    /// raises `Stack_overflow` only for a fault in its own code.
    #[error(
        "writes to the stack in the instructions that would be moved: OCaml 4 does not recognize a stack overflow there"
    )]
    StackWrite,
    /// A condition is computed before the instruction and used after it.
    #[error("needs processor flags that a trampoline would change, at +{offset:#x}")]
    LiveFlags {
        /// Where.
        offset: u64,
    },
    /// It is an instruction within a function: only calls of whole functions are timed.
    #[error("is not the beginning of a function, and only calls of functions can be timed")]
    NotEntry,
    /// It is code of OCaml 5, which runs on the stacks of fibers, and where the runtime keeps the address of the
    /// current stack is not known.
    #[error("runs on fibers of OCaml 5 that cannot be distinguished here, so it cannot be timed")]
    UnknownStack,
    /// No memory is free within reach of its jump, or other functions that are selected take it.
    #[error(
        "has no free memory within reach of its jump, or other functions that are selected take it"
    )]
    NoRoom,
    /// It is code that the kernel maps into each process.
    #[error("is code of the kernel (vDSO)")]
    KernelCode,
    /// This tool, which is to read runtime events as well, calls it to switch them on.
    #[error("is called by this tool to switch runtime events on")]
    SwitchesEvents,
    /// Another tool has set a breakpoint there: a debugger, or uprobes of perf or bpftrace.
    #[error("has a breakpoint of another tool, such as gdb or bpftrace, at {at}")]
    Breakpoint {
        /// Where in the process.
        at: LiveAddr,
    },
    /// The mapping of its code is shared (`MAP_SHARED`): a patch would change the file, and the kernel refuses it.
    #[error("is in code that is mapped shared, and cannot be changed for this process alone")]
    SharedCode,
    /// The process has other code there than its file.
    #[error("has other code in the process than in its file")]
    ChangedCode,
    /// An expression asks for an argument that it does not have, or that has another type, or it is not known which arguments
    /// it has.
    #[error("is not known to have an argument of this kind")]
    NoArgument,
}

fn too_short(len: u8, exit: Option<u64>) -> String {
    let place = exit.map_or_else(String::new, |offset| {
        format!("has an exit at +{offset:#x} that ")
    });
    let plural = if len == 1 { "" } else { "s" };
    format!("{place}is too short: {len} byte{plural}, and a jump takes 5")
}

fn overlap(offset: u64) -> String {
    if offset == 0 {
        "has too little room beside the patch of another function".to_owned()
    } else {
        format!("has too little room between two patches, at +{offset:#x}")
    }
}

impl Refusal {
    /// Returns the same refusal, about the exit of the function at this offset.
    pub(crate) fn of_exit(self, offset: u64) -> Refusal {
        match self {
            Refusal::TooShort { len, .. } => Refusal::TooShort {
                len,
                exit: Some(offset),
            },
            other => other,
        }
    }

    /// The name of the reason in JSON: `too_short`, `branch_target`, …; it stays the same.
    ///
    /// ```
    /// assert_eq!(probes_lib::Refusal::NotCode.name(), "not_code");
    /// ```
    pub fn name(&self) -> &'static str {
        self.into()
    }
}
