//! Which entries of `.eh_frame` are read.

use gimli::{FrameDescriptionEntry, Reader};

/// Whether an entry and its CIE have few instructions, as those of compilers have: they are executed anew for each address.
pub(crate) fn is_short<R: Reader<Offset = usize>>(fde: &FrameDescriptionEntry<R>) -> bool {
    const MAX_CIE: usize = 4096;
    const MAX_FDE: usize = 1 << 20;
    fde.cie().entry_len() <= MAX_CIE && fde.entry_len() <= MAX_FDE
}
