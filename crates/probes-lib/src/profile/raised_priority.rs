//! [`RaisedPriority`]: a profiler that gets a processor when a sample is due.

use std::marker::PhantomData;

use crate::sys::priority;

/// While this exists, the thread has a nice value of -20, the best ordinary priority, if that is permitted (it is for
/// root). Programs that the thread starts meanwhile inherit it.
///
/// On a machine with many more busy threads than processors, a profiler without it looks at threads late and seldom.
///
/// ```no_run
/// use std::time::Instant;
/// use probes_lib::{Profiler, RaisedPriority};
///
/// let priority = RaisedPriority::of_this_thread();
/// let mut profiler = Profiler::of_process(4242, false)?;
/// for _ in 0..100 {
///     std::thread::sleep(profiler.min_pause());
///     profiler.sample(Instant::now())?;
/// }
/// drop(priority);
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct RaisedPriority {
    /// The nice value before.
    before: i32,
    /// Not `Send`: the priority is that of one thread.
    of_thread: PhantomData<*const ()>,
}

impl RaisedPriority {
    /// Raises the priority of the calling thread until the value is dropped, in the same thread.
    pub fn of_this_thread() -> RaisedPriority {
        RaisedPriority {
            before: priority::make_best(),
            of_thread: PhantomData,
        }
    }
}

impl Drop for RaisedPriority {
    fn drop(&mut self) {
        priority::set_nice(self.before);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The nice value of this thread: the 19th field of its stat, after its name in parentheses.
    fn nice() -> i32 {
        let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split(' ').nth(16).unwrap().parse().unwrap()
    }

    #[test]
    fn priority_is_as_before_in_the_end() {
        let before = nice();
        let priority = RaisedPriority::of_this_thread();
        let raised = nice();
        assert!(raised == -20 || raised == before, "{raised}");
        drop(priority);
        assert_eq!(nice(), before);
    }
}
