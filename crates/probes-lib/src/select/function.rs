//! [`FunctionSelector`]: which functions of a program are meant.

use std::fmt;
use std::str::FromStr;

use crate::address::LiveAddr;
use crate::select::glob::Glob;

/// A function of the runtime of OCaml 5, in all its versions, and not of OCaml 4 (runtime/domain.c).
pub(crate) const OCAML_5_SYMBOL: &str = "caml_init_domains";

/// Selects functions of a program.
///
/// ```
/// use probes_lib::{FunctionSelector, LiveAddr};
///
/// let lists = FunctionSelector::Glob("Stdlib.List.*".parse().unwrap());
/// let one = FunctionSelector::Address(LiveAddr(0x55d0_c3b0));
/// let line = FunctionSelector::Line { file: "src/http.ml".into(), line: 42 };
/// let queries = FunctionSelector::Usdt("postgresql:query__*".parse().unwrap());
/// # let _ = (lists, one, line, queries);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FunctionSelector {
    /// Those with a name, as in the source, that matches.
    Glob(Glob),
    /// The function that begins at this address of the process, or the instruction there.
    Address(LiveAddr),
    /// Where a source line begins: in each function that has code of the line, inlined or not, the first instruction of
    /// each stretch of that code, as the debugging information (DWARF) says.
    Line {
        /// The path of the source file, or the end of it if no other file's path ends so.
        file: String,
        /// The line, from 1.
        line: u32,
    },
    /// The function of OCaml's runtime that does this work of the garbage collector.
    Collector(CollectorWork),
    /// The sites of the USDT probes whose `PROVIDER:NAME` matches, of other providers than OCaml's. While they are
    /// observed, their semaphores are raised by one.
    Usdt(Glob),
}

/// Work of OCaml's garbage collector that one function of the runtime does; which one depends on the runtime's version.
///
/// ```
/// use probes_lib::{CollectorWork, FunctionSelector};
///
/// let minor: CollectorWork = "minor".parse()?;
/// assert_eq!(minor, CollectorWork::Minor);
/// let selector = FunctionSelector::Collector(minor);
/// # let _ = selector;
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CollectorWork {
    /// A minor collection; in OCaml 5 of all domains, with the time in which they wait for each other.
    Minor,
    /// A slice of a major collection.
    Slice,
    /// The rest of a major collection, when it is finished at once (`Gc.full_major`, `Gc.major`).
    Major,
    /// A compaction of the heap.
    Compact,
    /// A stop-the-world section: what all domains of OCaml 5 do together while no OCaml code runs.
    StopTheWorld,
}

impl CollectorWork {
    /// All of them.
    pub const ALL: [CollectorWork; 5] = [
        CollectorWork::Minor,
        CollectorWork::Slice,
        CollectorWork::Major,
        CollectorWork::Compact,
        CollectorWork::StopTheWorld,
    ];

    /// Returns the word that [`FromStr`] reads.
    pub fn word(self) -> &'static str {
        match self {
            CollectorWork::Minor => "minor",
            CollectorWork::Slice => "slice",
            CollectorWork::Major => "major",
            CollectorWork::Compact => "compact",
            CollectorWork::StopTheWorld => "stw",
        }
    }

    /// Returns whether no runtime of OCaml 4 does it.
    pub(crate) fn is_of_ocaml_5(self) -> bool {
        self == CollectorWork::StopTheWorld
    }

    /// The functions that do it, of which a runtime has one: those of OCaml 5 first (runtime/minor_gc.c, major_gc.c,
    /// shared_heap.c, domain.c), then those of OCaml 4.
    pub(crate) fn names(self) -> &'static [&'static str] {
        match self {
            CollectorWork::Minor => &["caml_empty_minor_heaps_once", "caml_empty_minor_heap"],
            CollectorWork::Slice => &["caml_major_collection_slice"],
            CollectorWork::Major => &["caml_finish_major_cycle"],
            CollectorWork::Compact => &["caml_compact_heap"],
            CollectorWork::StopTheWorld => &["caml_try_run_on_all_domains_with_spin_work"],
        }
    }
}

impl fmt::Display for CollectorWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for CollectorWork {
    type Err = String;

    /// Reads `minor`, `slice`, `major`, `compact` or `stw`.
    fn from_str(text: &str) -> Result<CollectorWork, String> {
        let mut all = CollectorWork::ALL.into_iter();
        all.find(|work| work.word() == text)
            .ok_or_else(|| format!("\"{text}\" is not minor, slice, major, compact or stw"))
    }
}
