//! [`NestingHandlers`]: how long threads are let run before they are stopped again, so that handlers of signals do not nest.

use std::collections::HashMap;
use std::time::Duration;

use crate::trace::stopped::Stopped;

/// How long threads are let run if a stack has grown, the first time, and at most.
const FIRST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

/// What is known of a process that is stopped over and over, because each of its threads has a pending signal.
///
/// Stopped again at once, a thread is in the handler of its signal, which blocks the signal as a rule. If it does not, the
/// next signal interrupts it before its first instruction, and so on, until the stack overflows.
#[derive(Debug, Default)]
pub(super) struct NestingHandlers {
    /// The stack pointers at the last stop, by thread.
    stacks: HashMap<i32, u64>,
    pause: Duration,
}

impl NestingHandlers {
    /// Returns how long to let the threads run: not at all, unless the stack of one has grown since the last stop.
    pub(super) fn pause(&mut self, stopped: &Stopped<'_>) -> Duration {
        let stack = |tid| Some((tid, stopped.calls().registers(tid).ok()?.rsp));
        self.pause_at(stopped.tids().filter_map(stack).collect())
    }

    fn pause_at(&mut self, stacks: HashMap<i32, u64>) -> Duration {
        let has_grown = |(tid, stack): (&i32, &u64)| {
            let before = self.stacks.get(tid);
            before.is_some_and(|before| stack < before)
        };
        self.pause = if stacks.iter().any(has_grown) {
            (self.pause * 2).clamp(FIRST, LONGEST)
        } else {
            Duration::ZERO
        };
        self.stacks = stacks;
        self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_grows_while_a_stack_does() {
        let mut handlers = NestingHandlers::default();
        let mut pause = |one: u64, other: u64| {
            let pause = handlers.pause_at(HashMap::from([(1, one), (2, other)]));
            pause.as_millis()
        };
        assert_eq!(pause(9000, 5000), 0);
        assert_eq!(pause(9000, 4000), 1);
        assert_eq!(pause(8000, 4000), 2);
        assert_eq!(pause(9000, 3000), 4);
        assert_eq!(pause(9000, 5000), 0);
        let pauses: Vec<u128> = (1..12).map(|depth| pause(9000 - depth, 5000)).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 100, 100, 100, 100]);
    }
}
