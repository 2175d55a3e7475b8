//! [`UnloadedFiles`]: the files of a process before some of them were unloaded. The addresses of stacks that were found then may be
//! those of other functions since.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::time_sums::ProfileKey;
use crate::stacks::{StackFrame, Stacks};
use crate::unwind::RawFrame;

/// How often files may be unloaded until only the names of those stacks are kept that were found before: each time, the
/// functions of all files are kept.
const MAX_KEPT: usize = 4;

/// The files before some were unloaded.
#[derive(Default)]
pub(super) struct UnloadedFiles {
    unloads: u32,
    /// The latest last, each with how often files had been unloaded.
    before: VecDeque<(u32, Stacks)>,
    /// The frames of those that are not kept any more.
    named: HashMap<(u32, RawFrame), Arc<StackFrame>>,
}

impl UnloadedFiles {
    /// How often files were unloaded.
    pub(super) fn unloads(&self) -> u32 {
        self.unloads
    }

    /// Keeps the files of which some were unloaded just now. `found`: the stacks that were found so far.
    pub(super) fn add<'k>(&mut self, before: Stacks, found: impl Iterator<Item = &'k ProfileKey>) {
        self.before.push_back((self.unloads, before));
        self.unloads = self.unloads.saturating_add(1);
        if self.before.len() <= MAX_KEPT {
            return;
        }
        let Some((unloads, mut oldest)) = self.before.pop_front() else {
            return;
        };
        let stacks = found.filter(|key| key.unloads == unloads);
        let stacks = stacks.filter_map(|key| key.stack.as_deref());
        for frame in stacks.flat_map(|stack| &stack.frames) {
            let named = self.named.entry((unloads, *frame));
            named.or_insert_with(|| oldest.name(*frame));
        }
    }

    /// Returns the frames of a stack, named by the files that were loaded when it was found; without names, if it was
    /// found too long ago and not added up. `now`: the files that are loaded.
    pub(super) fn frames(&mut self, now: &mut Stacks, key: &ProfileKey) -> Vec<Arc<StackFrame>> {
        let stacks = if key.unloads == self.unloads {
            Some(now)
        } else {
            let mut before = self.before.iter_mut();
            let found = before.find(|(unloads, _)| *unloads == key.unloads);
            found.map(|(_, stacks)| stacks)
        };
        let frames = key.stack.as_deref().map_or(&[][..], |stack| &stack.frames);
        let known = |frame: &RawFrame| {
            let named = self.named.get(&(key.unloads, *frame)).cloned();
            named.unwrap_or_else(|| Arc::new(StackFrame::unnamed(frame.address)))
        };
        match stacks {
            Some(stacks) => frames.iter().map(|frame| stacks.name(*frame)).collect(),
            None => frames.iter().map(known).collect(),
        }
    }
}
