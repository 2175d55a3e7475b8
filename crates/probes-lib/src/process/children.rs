//! The children of a process.

use super::{Process, is_task_gone, pids};

/// Returns the pids of the children of all threads of a process.
pub(crate) fn children(process: &Process) -> Vec<i32> {
    let threads = process.threads().and_then(|mut threads| threads.read());
    let mut children = Vec::new();
    for tid in threads.unwrap_or_default() {
        match process.read(&format!("task/{tid}/children")) {
            Ok(pids) => children.extend(numbers(&String::from_utf8_lossy(&pids))),
            // A kernel without CONFIG_PROC_CHILDREN, unless the thread has just exited.
            Err(error) if is_task_gone(&error) && process.thread_status(tid).is_ok() => {
                return children_among_all(process.pid());
            }
            Err(_) => {}
        }
    }
    children
}

/// Returns the children of a process, each with the id that it has in the pid namespace of the process.
pub(crate) fn children_by_own_id(process: &Process) -> Vec<(i32, i32)> {
    let Ok(of_process) = process.status() else {
        return Vec::new();
    };
    let with_id = |pid: i32| {
        let status = Process::open(pid).ok()?.status().ok()?;
        // A kernel without pid namespaces says nothing of them.
        let own_id = match of_process.levels.checked_sub(1) {
            Some(level) => *status.ids.get(level)?,
            None => pid,
        };
        Some((own_id, pid))
    };
    children(process).into_iter().filter_map(with_id).collect()
}

fn numbers(text: &str) -> impl Iterator<Item = i32> {
    let words = text.split_ascii_whitespace();
    words.filter_map(|pid| pid.parse().ok())
}

/// Returns the pids of the children of a process: looks at the parent of each process.
pub(crate) fn children_among_all(parent: i32) -> Vec<i32> {
    let is_child = |pid: &i32| {
        let status =
            Process::open(*pid).and_then(|it| it.status().map_err(|error| it.exited_or(error)));
        status.is_ok_and(|status| status.ppid == parent)
    };
    pids().into_iter().flatten().filter(is_child).collect()
}
