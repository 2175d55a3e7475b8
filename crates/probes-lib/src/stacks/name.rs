//! Names of frames and threads.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::address::LiveAddr;
use crate::elf::source::SourceMap;
use crate::functions::Functions;
use crate::unwind::RawFrame;

/// How many frames are kept with their names.
const KEPT: usize = 1 << 16;

/// One frame of a stack, with its names.
///
/// ```no_run
/// let threads = probes_lib::Stacks::of_process(4242)?.read(true)?.threads;
/// for frame in &threads[0].frames {
///     match (&frame.function, &frame.file, frame.line) {
///         (Some(function), Some(file), Some(line)) => println!("{function} ({file}:{line})"),
///         _ => println!("{}", frame.address),
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackFrame {
    /// The instruction that is executed next: of the innermost frame, or of a caller when the call returns.
    pub address: LiveAddr,
    /// The function, by its name in the source; `None` if it is not known.
    pub function: Option<String>,
    /// How many bytes after the beginning of the function the address is.
    pub offset: Option<u64>,
    /// The file that has the code; `None` if none is known.
    pub object: Option<PathBuf>,
    /// The path of the source file as it was given to the compiler, if that is known.
    pub file: Option<String>,
    /// The line of the call, or of the instruction in the innermost frame, from 1.
    pub line: Option<u32>,
}

impl StackFrame {
    /// Of an address of which nothing is known.
    pub(crate) fn unnamed(address: LiveAddr) -> StackFrame {
        StackFrame {
            address,
            function: None,
            offset: None,
            object: None,
            file: None,
            line: None,
        }
    }
}

/// What a thread is for the runtime of OCaml.
///
/// ```no_run
/// use probes_lib::{Stacks, ThreadRole};
///
/// let threads = Stacks::of_process(4242)?.read(true)?.threads;
/// let domains = threads.iter().filter(|it| matches!(it.role, ThreadRole::Main | ThreadRole::Domain));
/// println!("{} domains", domains.count());
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum ThreadRole {
    /// The first thread of the program, or one that runs the main function of the runtime.
    Main,
    /// The first thread of a domain (OCaml 5).
    Domain,
    /// A thread of the library systhreads.
    Systhread,
    /// The thread that has systhreads take turns.
    Tick,
    /// The thread that works for the collector while its domain is blocked (OCaml 5).
    Backup,
    /// Another one, or nothing tells what it is.
    Other,
}

impl std::fmt::Display for ThreadRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ThreadRole::Main => "main thread",
            ThreadRole::Domain => "domain",
            ThreadRole::Systhread => "systhread",
            ThreadRole::Tick => "tick thread",
            ThreadRole::Backup => "backup thread of a domain",
            ThreadRole::Other => "thread",
        })
    }
}

/// The functions of the runtime that threads begin with: runtime/domain.c, otherlibs/systhreads/st_stubs.c,
/// runtime/startup_nat.c.
const FIRST_FUNCTIONS: [(&str, ThreadRole); 5] = [
    ("domain_thread_func", ThreadRole::Domain),
    ("backup_thread_func", ThreadRole::Backup),
    ("caml_thread_start", ThreadRole::Systhread),
    ("caml_thread_tick", ThreadRole::Tick),
    ("caml_main", ThreadRole::Main),
];

/// Among how many of the outermost frames those functions are.
const OUTERMOST: usize = 8;

impl ThreadRole {
    /// Finds out by the outermost frames.
    pub(crate) fn of(frames: &[Arc<StackFrame>], is_first: bool) -> ThreadRole {
        if is_first {
            return ThreadRole::Main;
        }
        let mut outermost = frames.iter().rev().take(OUTERMOST);
        let role = outermost.find_map(|frame| {
            let name = frame.function.as_deref()?;
            // The compiler may have made a copy: caml_thread_start.part.0.
            let name = name.split_once('.').map_or(name, |(name, _)| name);
            let mut known = FIRST_FUNCTIONS.iter();
            known
                .find(|(known, _)| *known == name)
                .map(|(_, role)| *role)
        });
        role.unwrap_or(ThreadRole::Other)
    }
}

/// The names of frames, each looked up once.
#[derive(Default)]
pub(super) struct FrameNames {
    known: HashMap<RawFrame, Arc<StackFrame>>,
    /// By the address of the object in memory, because two files may have had the same path; `None` if a file cannot be
    /// read.
    sources: HashMap<usize, Option<SourceMap>>,
}

impl FrameNames {
    pub(super) fn of(&mut self, functions: &Functions, frame: RawFrame) -> Arc<StackFrame> {
        if let Some(known) = self.known.get(&frame) {
            return known.clone();
        }
        if self.known.len() >= KEPT {
            self.known.clear();
        }
        let named = Arc::new(self.look_up(functions, frame));
        self.known.insert(frame, named.clone());
        named
    }

    fn look_up(&mut self, functions: &Functions, frame: RawFrame) -> StackFrame {
        let mut named = StackFrame::unnamed(frame.address);
        let Some((object, bias)) = functions.object_at(frame.within) else {
            return named;
        };
        let within = bias.file(frame.within);
        named.object = Some(object.table().path().to_owned());
        if let Some(function) = object.table().function_or_part_at(within) {
            named.function = function.name().map(|name| name.text);
            let start = bias.live(function.address());
            named.offset = Some(frame.address.0.wrapping_sub(start.0));
        }
        if object.is_kernels() {
            return named;
        }
        let file = std::ptr::from_ref(object.table()).addr();
        let source = self.sources.entry(file);
        if let Some(source) = source.or_insert_with(|| object.source_map().ok()) {
            let (file, line) = source.line_of_function(within);
            named.file = file.map(str::to_owned);
            named.line = line;
        }
        named
    }
}

#[cfg(test)]
mod tests {
    use test_support::{Talker, fixture};

    use super::super::Stacks;
    use super::*;

    #[test]
    fn parts_name_their_code() {
        let target = Talker::start(&fixture("usdt_cold.pie"));
        let mut stacks = Stacks::of_process(target.pid()).unwrap();
        let executable = stacks.functions.executable().unwrap();
        let (table, bias) = (executable.table(), executable.load_bias().unwrap());
        let starts = table.parts().into_iter().map(|part| part.start);
        let starts: Vec<LiveAddr> = starts.map(|start| bias.live(start)).collect();
        let frames = starts.into_iter().map(|start| {
            let address = LiveAddr(start.0 + 1);
            let within = start;
            stacks.name(RawFrame { address, within })
        });
        let names: Vec<_> = frames.map(|it| (it.function.clone(), it.offset)).collect();
        let expected = (Some("cold_round.cold".to_owned()), Some(1));
        assert!(names.contains(&expected), "{names:?}");
    }
}
