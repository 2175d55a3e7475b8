//! The two address spaces, as distinct types, and the only conversion between them.
//!
//! A [`FileAddr`] is an address as the linker wrote it (SVMA: stated virtual memory address); a
//! [`LiveAddr`] is an address in the memory of one process. They differ by the object's
//! [`LoadBias`] in that process. Nothing else converts one into the other.

use std::fmt;

/// Size of a page in bytes on x86-64.
pub(crate) const PAGE: u64 = 4096;

/// A link-time virtual address (SVMA), in bytes, as stored in the ELF file.
///
/// [`LoadBias`] has an example.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileAddr(pub u64);

/// An address in the memory of a process, in bytes.
///
/// [`LoadBias`] has an example.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LiveAddr(pub u64);

/// A range of code in a file: a function, or the part of one that the compiler moved away (`.cold`).
///
/// [`PatchPlanner::new`](crate::PatchPlanner::new) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CodeRange {
    /// The address of its first byte.
    pub start: FileAddr,
    /// In bytes.
    pub len: u64,
}

impl CodeRange {
    /// Returns the address after the last byte.
    pub(crate) fn end(self) -> u64 {
        self.start.0.saturating_add(self.len)
    }

    pub(crate) fn contains(self, address: u64) -> bool {
        (self.start.0..self.end()).contains(&address)
    }
}

/// What is added to a [`FileAddr`] to get its [`LiveAddr`] in one process, modulo 2⁶⁴.
///
/// Modular, because an object linked at a high address may be loaded at a lower one.
///
/// ```
/// use probes_lib::{FileAddr, LiveAddr, LoadBias};
///
/// let bias = LoadBias::between(FileAddr(0x1040), LiveAddr(0x5555_5555_5040));
/// assert_eq!(bias, LoadBias(0x5555_5555_4000));
/// assert_eq!(bias.live(FileAddr(0x61ee)), LiveAddr(0x5555_5555_a1ee));
/// assert_eq!(bias.file(LiveAddr(0x5555_5555_a1ee)).to_string(), "0x61ee");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LoadBias(pub u64);

impl LoadBias {
    /// The bias of an object that was loaded where it was linked (`ET_EXEC`).
    pub const NONE: LoadBias = LoadBias(0);

    /// The bias that makes `file` appear at `live`.
    pub fn between(file: FileAddr, live: LiveAddr) -> LoadBias {
        LoadBias(live.0.wrapping_sub(file.0))
    }

    /// Converts an address in the process to the address in the file.
    pub fn file(self, address: LiveAddr) -> FileAddr {
        FileAddr(address.0.wrapping_sub(self.0))
    }

    /// Converts an address in the file to the address in the process.
    pub fn live(self, address: FileAddr) -> LiveAddr {
        LiveAddr(address.0.wrapping_add(self.0))
    }
}

impl LiveAddr {
    /// The address `bytes` further on.
    pub(crate) fn plus(self, bytes: u64) -> LiveAddr {
        LiveAddr(self.0.wrapping_add(bytes))
    }
}

macro_rules! hex {
    ($($ty:ty),*) => {$(
        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
        impl fmt::Debug for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($ty), "({:#x})"), self.0)
            }
        }
    )*};
}
hex!(FileAddr, LiveAddr, LoadBias);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_maps_file_to_live_address_and_wraps() {
        let bias = LoadBias::between(FileAddr(0x1040), LiveAddr(0x5555_5555_5040));
        assert_eq!(bias.live(FileAddr(0x561ee)), LiveAddr(0x5555_555a_a1ee));
        assert_eq!(bias.file(LiveAddr(0x5555_555a_a1ee)), FileAddr(0x561ee));

        let down = LoadBias::between(FileAddr(0x30_0000_0000), LiveAddr(0x10_0000_0000));
        assert_eq!(
            down.live(FileAddr(0x30_0000_0010)),
            LiveAddr(0x10_0000_0010)
        );
    }
}
