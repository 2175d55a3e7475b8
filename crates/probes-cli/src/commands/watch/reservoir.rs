//! [`Reservoir`]: some of the hits of a second, chosen at random.

use fastrand::Rng;

/// At most `size` of the items that it is offered, each with the same chance, whether it comes early or late, in a
/// burst or alone. (Vitter, "Random sampling with a reservoir", 1985, Algorithm R.)
pub(super) struct Reservoir<T> {
    size: u64,
    offered: u64,
    /// Each with its number, by which [`Reservoir::take`] sorts them: an item that replaces another is out of order.
    chosen: Vec<(u64, T)>,
    random: Rng,
}

impl<T> Reservoir<T> {
    pub(super) fn new(size: u64, random: Rng) -> Reservoir<T> {
        Reservoir {
            size,
            offered: 0,
            chosen: Vec::new(),
            random,
        }
    }

    pub(super) fn offer(&mut self, item: T) {
        let number = self.offered;
        self.offered += 1;
        if number < self.size {
            self.chosen.push((number, item));
            return;
        }
        let place = self.random.u64(..self.offered) as usize;
        if let Some(replaced) = self.chosen.get_mut(place) {
            *replaced = (number, item);
        }
    }

    /// Empties it. Returns the chosen items, in the order in which they were offered, and how many were left
    /// out.
    pub(super) fn take(&mut self) -> (Vec<T>, u64) {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.sort_unstable_by_key(|(number, _)| *number);
        let left_out = std::mem::take(&mut self.offered) - chosen.len() as u64;
        (chosen.into_iter().map(|(_, item)| item).collect(), left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reservoir(size: u64) -> Reservoir<u64> {
        Reservoir::new(size, Rng::with_seed(7))
    }

    #[test]
    fn all_are_chosen_if_they_fit() {
        let mut reservoir = reservoir(3);
        assert_eq!(reservoir.take(), (vec![], 0));
        (0..3).for_each(|item| reservoir.offer(item));
        assert_eq!(reservoir.take(), (vec![0, 1, 2], 0));
        reservoir.offer(9);
        assert_eq!(reservoir.take(), (vec![9], 0));
    }

    #[test]
    fn chosen_are_spread_and_in_order() {
        let mut reservoir = reservoir(100);
        (0..10_000).for_each(|item| reservoir.offer(item));
        let (chosen, left_out) = reservoir.take();
        assert_eq!((chosen.len(), left_out), (100, 9_900));
        assert!(chosen.is_sorted());
        for tenth in 0..10 {
            let of_tenth = chosen.iter().filter(|&&item| item / 1000 == tenth);
            assert!((3..=25).contains(&of_tenth.count()), "{chosen:?}");
        }
        // A program that alternates between two probes: both are shown about as often.
        let even = chosen.iter().filter(|&&item| item % 2 == 0).count();
        assert!((30..=70).contains(&even), "{chosen:?}");
    }
}
