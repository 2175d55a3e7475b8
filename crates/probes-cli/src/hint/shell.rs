//! The hint for users who give the pid of a shell, which has started the program that they mean.

use std::fs;

use crate::flags::program_of;
use crate::text::join_first_few;

const SHELLS: [&str; 6] = ["sh", "dash", "bash", "zsh", "fish", "busybox"];

/// The hint if a process is a shell: which processes it has started. `None` if it is not a shell, or has started none.
pub(super) fn with_children(pid: i32) -> Option<String> {
    let shell = program_of(pid)
        .ok()
        .filter(|it| SHELLS.contains(&it.as_str()))?;
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let described = children.split_ascii_whitespace().filter_map(|child| {
        let program = program_of(child.parse().ok()?).ok()?;
        Some(format!("{program} (-pid {child})"))
    });
    let described: Vec<String> = described.collect();
    let children = join_first_few(&described)?;
    Some(format!(
        "process {pid} is a shell ({shell}); it has started {children}"
    ))
}
