//! The layout of what is copied of the stack of a hit, at the end of its record, as offsets. Pure.
//!
//! ```text
//! registers   at the point: the stack pointer, and those that a callee saves
//! used, count how many bytes of the stacks were copied, and how many parts there are
//! part list   of each part: its address, and how many bytes
//! scratch     for the trampoline
//! bytes       the parts, one after the other
//! ```
//!
//! A part is a stack from its stack pointer on, as far as it is known to be mapped. The last part is the stack of the
//! thread. With OCaml 5, there are two parts before it for each fiber, from the innermost to the outermost: the
//! beginning of the fiber's description (`struct stack_info` of runtime/caml/fiber.h), and its stack. At a hit in C
//! code, the first bytes of the thread's stack are the first part, and the rest of it the last.

/// The registers, eight bytes each: the stack pointer, rbx, rbp and r12 to r15.
pub(crate) const STACK_POINTER: u64 = 0;
pub(crate) const RBX: u64 = 8;
pub(crate) const RBP: u64 = 16;
pub(crate) const R12: u64 = 24;
pub(crate) const R13: u64 = 32;
pub(crate) const R14: u64 = 40;
pub(crate) const R15: u64 = 48;

/// Four bytes each.
pub(crate) const USED: u64 = 56;
pub(crate) const COUNT: u64 = 60;

/// Sixteen bytes for each part: its address, and its length.
pub(crate) const PART_LIST: u64 = 64;
/// Binary logarithm of the bytes of an entry.
pub(crate) const ENTRY_BITS: u32 = 4;
/// The most parts: two for each fiber, and one or two for the thread.
pub(crate) const PARTS: u64 = 64;

/// Only the trampoline uses these: eight bytes each, `KEPT` sixteen.
pub(crate) const FIBER: u64 = PART_LIST + (PARTS << ENTRY_BITS);
pub(crate) const FROM: u64 = FIBER + 8;
pub(crate) const OF_THREAD: u64 = FIBER + 16;
pub(crate) const END: u64 = FIBER + 24;
pub(crate) const KEPT: u64 = FIBER + 32;
pub(crate) const LINK: u64 = FIBER + 48;
pub(crate) const FIRST_END: u64 = FIBER + 56;

/// Four bytes: 1 while a thread uses all this. If the thread is preempted meanwhile, others may have gone once around
/// the ring before it continues. It stays 1 if a signal handler leaves the trampoline by siglongjmp(3).
pub(crate) const IS_TAKEN: u64 = FIBER + 64;

/// The bytes of the parts.
pub(crate) const BYTES: u64 = FIBER + 128;

/// How many there are at most: more than the 64 KiB that functions of OCaml's library unix have as a buffer on the
/// stack.
pub(crate) const MAX_BYTES: u64 = 80 << 10;

/// Most stacks have no more. Of a record, the bytes up to here are read first, and the rest only if there are more.
pub(crate) const USUAL_BYTES: u64 = 4 << 10;

/// The length of all this.
pub(crate) const LEN: u64 = BYTES + MAX_BYTES;
const _: () = assert!(LEN % 64 == 0);

/// The fields by which the stacks of a thread of OCaml 5 are found: offsets in the state of a domain, to which r14
/// points in OCaml code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FiberFields {
    /// The address of the description of the current fiber.
    pub(crate) current_stack: u8,
    /// Where the stack of C code continues.
    pub(crate) c_stack: u8,
}

/// Offsets in the description of a fiber: its stack pointer, unless it runs, and the address of its handler, which is
/// above its stack.
pub(crate) const FIBER_POINTER: u64 = 0;
pub(crate) const FIBER_HANDLER: u64 = 16;
/// The length of the beginning of a description that is copied.
pub(crate) const FIBER_FIELDS_LEN: u64 = 24;
/// The offset of the parent in a handler: its last field.
pub(crate) const HANDLER_PARENT: u64 = 24;
pub(crate) const HANDLER_LEN: u64 = 32;

/// Whether the stack of each hit is copied, and which stacks there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum StackCopies {
    #[default]
    None,
    Copied {
        /// `None` if only the stacks of threads are known.
        fibers: Option<FiberFields>,
        /// Whether trampolines may ask the kernel which memory can be read.
        may_ask_kernel: bool,
    },
}

impl StackCopies {
    /// Copies of the stacks of threads only, without asking the kernel.
    pub(crate) const OF_THREADS: StackCopies = StackCopies::Copied {
        fibers: None,
        may_ask_kernel: false,
    };

    /// Returns how many bytes of a record are for a stack.
    pub(crate) fn len(self) -> u32 {
        match self {
            StackCopies::None => 0,
            StackCopies::Copied { .. } => LEN as u32,
        }
    }

    /// Returns the fields by which the stacks of fibers are found, if they are known.
    pub(crate) fn fibers(self) -> Option<FiberFields> {
        match self {
            StackCopies::None => None,
            StackCopies::Copied { fibers, .. } => fibers,
        }
    }

    /// Returns whether trampolines may ask the kernel which memory can be read.
    pub(crate) fn may_ask_kernel(self) -> bool {
        matches!(
            self,
            StackCopies::Copied {
                may_ask_kernel: true,
                ..
            }
        )
    }
}
