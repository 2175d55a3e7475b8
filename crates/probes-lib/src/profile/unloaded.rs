//! [`UnloadedFiles`]: the files of a process before some of them were unloaded. The addresses of stacks that were found then may be
//! those of other functions since.

use std::collections::VecDeque;
use std::sync::Arc;

use super::time_sums::ProfileKey;
use crate::stacks::{StackFrame, Stacks};

/// How often files may be unloaded while the names of stacks that were found before are still known: each time, the functions of
/// all files are kept.
const MAX_KEPT: usize = 4;

/// The files before some were unloaded, the latest last, each with how often that had happened.
#[derive(Default)]
pub(super) struct UnloadedFiles {
    unloads: u32,
    before: VecDeque<(u32, Stacks)>,
}

impl UnloadedFiles {
    /// How often files were unloaded.
    pub(super) fn unloads(&self) -> u32 {
        self.unloads
    }

    /// Keeps the files of which some were unloaded just now.
    pub(super) fn add(&mut self, before: Stacks) {
        self.before.push_back((self.unloads, before));
        self.unloads = self.unloads.saturating_add(1);
        if self.before.len() > MAX_KEPT {
            self.before.pop_front();
        }
    }

    /// Returns the frames of a stack, named by the files that were loaded when it was found; without names, if they are not known
    /// any more. `now`: the files that are loaded.
    pub(super) fn frames(&mut self, now: &mut Stacks, key: &ProfileKey) -> Vec<Arc<StackFrame>> {
        let stacks = if key.unloads == self.unloads {
            Some(now)
        } else {
            let mut before = self.before.iter_mut();
            let found = before.find(|(unloads, _)| *unloads == key.unloads);
            found.map(|(_, stacks)| stacks)
        };
        let frames = key.stack.as_deref().map_or(&[][..], |stack| &stack.frames);
        match stacks {
            Some(stacks) => frames.iter().map(|frame| stacks.name(*frame)).collect(),
            None => frames
                .iter()
                .map(|it| Arc::new(StackFrame::unnamed(it.address)))
                .collect(),
        }
    }
}
