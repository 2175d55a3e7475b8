//! Finds where the runtime of OCaml 5 frees the stacks of fibers, if functions are timed on these: calls that are left on
//! a stack then were unwound.

use crate::address::LiveAddr;
use crate::functions::{FunctionPlace, Functions};
use crate::observe::functions::wanted::PlaceKey;
use crate::observe::functions::{ObservedFunction, ObservedFunctions};
use crate::observe::role::{FreedStackRole, StackKind};
use crate::select::function::FunctionSelector;

/// The function that frees a stack.
const FREES: &str = "caml_free_stack";

/// The function that moves a stack that grows. It frees the old one, maybe by calling the other function.
const MOVES: &str = "caml_try_realloc_stack";

/// The function of an object by which stacks are freed.
pub(super) struct FreedStacks<'f> {
    pub(super) place: FunctionPlace<'f>,
    /// Where it begins.
    address: LiveAddr,
    /// See [`FreedStackRole::moves_stacks`].
    moves_stacks: (LiveAddr, u64),
}

impl<'f> FreedStacks<'f> {
    /// Returns the one of each object of the process that has both functions.
    pub(super) fn of(all: &'f Functions) -> Vec<FreedStacks<'f>> {
        let named = |name: &str| {
            let glob = name.parse().ok().map(FunctionSelector::Glob);
            let places = glob.map(|glob| all.places(&[glob]));
            places.and_then(Result::ok).unwrap_or_default()
        };
        let moving = named(MOVES);
        let freeing = named(FREES).into_iter();
        let both = freeing.filter_map(|place| {
            let object = place.function.object;
            let mut moving = moving.iter().map(|it| it.function);
            let moves = moving.find(|it| std::ptr::eq(it.object, object))?;
            Some(FreedStacks {
                address: place.function.address()?,
                moves_stacks: (moves.address()?, moves.function.range().len),
                place,
            })
        });
        both.collect()
    }

    /// Whether it is this place.
    pub(super) fn is_at(&self, place: &FunctionPlace<'_>) -> bool {
        PlaceKey::of(&self.place) == PlaceKey::of(place)
    }
}

impl ObservedFunctions {
    /// Has the calls that are left on a stack counted as unwound where stacks are freed.
    pub(super) fn notice_freed_stacks(&mut self, freed_stacks: &[FreedStacks<'_>]) {
        let is_on_fiber = |it: &&ObservedFunction| {
            let timing = it.timing.as_ref();
            timing.is_some_and(|timing| matches!(timing.stack, StackKind::OfFiber { .. }))
        };
        let mut timed = self.functions.iter().filter(is_on_fiber);
        let Some(first) = timed.next() else {
            self.functions.retain(|it| !it.wanted.is_internal);
            return;
        };
        let are_filtered = first.filter.is_some();
        for function in &mut self.functions {
            let address = function.wanted.address;
            let freed = freed_stacks.iter().find(|it| it.address == address);
            function.freed_stack = freed.map(|freed| FreedStackRole {
                moves_stacks: freed.moves_stacks,
                are_filtered,
                is_from_start: false,
            });
        }
    }
}
