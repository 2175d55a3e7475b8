//! [`Moves`]: where threads continue that are stopped at an instruction which is about to be
//! overwritten: at its copy, or where it jumps to.

use crate::address::LiveAddr;

/// Maps the addresses of instructions to those at which threads that are stopped there continue.
#[derive(Debug, Default)]
pub(crate) struct Moves(Vec<(LiveAddr, LiveAddr)>);

impl Moves {
    /// Each pair is the address of an instruction, and where threads that are stopped there continue.
    pub(crate) fn of(mut moves: Vec<(LiveAddr, LiveAddr)>) -> Moves {
        moves.sort_unstable();
        Moves(moves)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns where a thread that is stopped at `address` continues, if that is elsewhere.
    pub(crate) fn of_address(&self, address: u64) -> Option<u64> {
        let found = self.0.binary_search_by_key(&address, |(from, _)| from.0);
        found.ok().map(|index| self.0[index].1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_moved_instructions_have_a_new_address() {
        let moves = Moves::of(vec![
            (LiveAddr(9), LiveAddr(100)),
            (LiveAddr(4), LiveAddr(200)),
        ]);
        let moved = [3, 4, 5, 9, u64::MAX].map(|address| moves.of_address(address));
        assert_eq!(moved, [None, Some(200), None, Some(100), None]);
        assert!(!moves.is_empty() && Moves::default().is_empty());
    }
}
