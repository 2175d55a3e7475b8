//! [`Activity`]: what a thread was doing.

use crate::stacks::{SystemCall, ThreadState};

/// What a thread was doing.
///
/// ```
/// use probes_lib::Activity;
///
/// // 0 is the number of read(2).
/// assert_eq!(Activity::Blocked(0).leaf().as_deref(), Some("[read]"));
/// assert_eq!(Activity::Running.leaf(), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activity {
    /// It was on a processor; or about to be, if switches are not recorded.
    Running,
    /// It waited in this system call, by its number.
    Blocked(u32),
    /// It waited in the kernel, and in no system call.
    Waiting,
    /// It was stopped by a signal or a debugger.
    Stopped,
    /// The cgroup freezer kept it from running.
    Frozen,
    /// It waited, but was not looked at during the wait. Its stack is that of the last wait of about this length in
    /// which it was looked at, if there was one.
    Unseen,
}

impl Activity {
    pub(super) fn of(state: &ThreadState) -> Activity {
        match state {
            ThreadState::Running => Activity::Running,
            ThreadState::Blocked { call, .. } => Activity::Blocked(call.number),
            ThreadState::Waiting => Activity::Waiting,
            ThreadState::Stopped => Activity::Stopped,
            ThreadState::Frozen => Activity::Frozen,
        }
    }

    /// Returns what stands for it as the innermost frame of a stack: the name of the system call, or what else the
    /// thread was doing, in brackets; `None` if it was running.
    pub fn leaf(self) -> Option<String> {
        match self {
            Activity::Running => None,
            Activity::Blocked(number) => {
                let arguments = [0; 6];
                Some(format!("[{}]", SystemCall { number, arguments }))
            }
            Activity::Waiting => Some("[kernel]".to_owned()),
            Activity::Stopped => Some("[stopped]".to_owned()),
            Activity::Frozen => Some("[frozen]".to_owned()),
            Activity::Unseen => Some("[unseen waits]".to_owned()),
        }
    }
}
