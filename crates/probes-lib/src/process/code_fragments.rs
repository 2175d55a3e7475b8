//! [`CodeFragments`]: the table in which the OCaml runtime registers the parts of a process's code, with a digest of
//! each. Marshal identifies the code of a closure by that digest (`Marshal.Closures`).
//!
//! ```text
//! OCaml        symbol                      table                        fields of a fragment
//! 4.11         caml_code_fragments_table   array of pointers            start, end, digest, computed
//! 4.12 - 4.14  code_fragments_by_pc        skip list, by start          start, end, number, digest, status
//! 5.0          code_fragments_by_pc        lock-free skip list          the same
//! 5.1 -        code_fragments_by_pc        lock-free skip list          start, end, number, status, digest, mutex
//! ```
//!
//! From `runtime/codefrag.c`, `skiplist.c`, `lf_skiplist.c` and the headers in `runtime/caml/` of these versions; of
//! 4.11, `runtime/extern.c`, `intern.c` and `caml/stack.h`. OxCaml has the layout of 5.1.
//! Anything inconsistent is rejected: any bytes may be there.

use std::ops::Range;
use std::sync::OnceLock;

use goblin::elf::Sym;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::symbols::{Symbol, SymbolTable};
use crate::memory::ReadMemory;
use crate::numbers::u64_at;

/// More fragments than any process has: each plugin adds one.
const MAX_FRAGMENTS: usize = 1 << 16;

/// `NUM_LEVELS` of both kinds of skip list.
const LEVELS: u64 = 17;

/// `DIGEST_LATER`, `DIGEST_PROVIDED` and `DIGEST_IGNORE` of `enum digest_status`. (`DIGEST_NOW` is replaced by
/// `DIGEST_PROVIDED` before a fragment is in the table.)
const LATER: u32 = 0;
const PROVIDED: u32 = 2;
const IGNORE: u32 = 3;

/// An MD5.
pub(crate) type Digest = [u8; 16];

/// How the table is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableKind {
    /// `struct ext_table { int size; int capacity; void ** contents; }`
    Array,
    /// `struct skiplist { struct skipcell * forward[NUM_LEVELS]; int level; }`
    SkipList,
    /// `struct lf_skiplist { struct lf_skipcell *head, *tail; uintnat search_level;
    /// struct lf_skipcell *garbage_head; }`
    LockFree,
}

impl TableKind {
    /// In bytes.
    fn len(self) -> u64 {
        match self {
            TableKind::Array => 16,
            TableKind::SkipList => LEVELS * 8 + 8,
            TableKind::LockFree => 32,
        }
    }
}

/// Where `struct code_fragment` has its digest and status; both are preceded by its start and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FragmentLayout {
    /// In bytes.
    len: usize,
    digest: usize,
    status: Field,
    /// The status of a digest that is not computed yet.
    later: u32,
    /// That of one that is computed.
    provided: u32,
    /// That of one that is never computed, if there is such a status.
    ignore: Option<u32>,
}

/// Offset and length of an integer, in bytes.
type Field = (usize, usize);

const WITH_FLAG: FragmentLayout = FragmentLayout {
    len: 40,
    digest: 16,
    status: (32, 1),
    later: 0,
    provided: 1,
    ignore: None,
};

const STATUS_LAST: FragmentLayout = FragmentLayout {
    len: 40,
    digest: 20,
    status: (36, 4),
    later: LATER,
    provided: PROVIDED,
    ignore: Some(IGNORE),
};

const WITH_MUTEX: FragmentLayout = FragmentLayout {
    len: 40,
    digest: 24,
    status: (20, 4),
    later: LATER,
    provided: PROVIDED,
    ignore: Some(IGNORE),
};

/// Whether the runtime has a digest of a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DigestStatus {
    /// It is computed when it is needed.
    Later,
    Computed(Digest),
    /// The code is not identified by a digest.
    Never,
}

/// A part of the code of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeFragment {
    pub(crate) code: Range<LiveAddr>,
    pub(crate) status: DigestStatus,
    at: LiveAddr,
    layout: FragmentLayout,
}

impl CodeFragment {
    /// Returns what to write, in this order, so that the runtime has that digest and does not compute one.
    pub(crate) fn writes(&self, digest: Digest) -> [(LiveAddr, Vec<u8>); 2] {
        let (status, len) = self.layout.status;
        let provided = self.layout.provided.to_le_bytes();
        [
            (self.at.plus(self.layout.digest as u64), digest.to_vec()),
            (self.at.plus(status as u64), provided[..len].to_vec()),
        ]
    }
}

/// The table is not one that is known, or it is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnknownTable;

/// What the symbols of the objects of a process say of its OCaml code; looked up when it is first needed.
#[derive(Default)]
pub(crate) struct OcamlCode {
    /// The table of code fragments of its runtime, if it has one.
    pub(crate) table: OnceLock<Option<Result<CodeFragments, UnknownTable>>>,
    /// Where the OCaml code of each object is.
    pub(crate) areas: OnceLock<Vec<Range<LiveAddr>>>,
    /// The executable and its load bias, if it has no probes.
    pub(crate) executable: OnceLock<Option<(ElfFile, LoadBias)>>,
}

/// The table of code fragments of an OCaml runtime, and the code that computes digests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeFragments {
    kind: TableKind,
    at: LiveAddr,
    /// Where the runtime's own code begins, whose digest is never computed.
    system_code: Option<LiveAddr>,
    /// The functions that compute a digest: no thread is to be in them while one is written.
    pub(crate) computing: Vec<Range<u64>>,
}

impl CodeFragments {
    /// Finds the table by the symbols of a file; `None` if the runtime is not in this file, or it has no symbols.
    ///
    /// # Errors
    ///
    /// If the file has a table of unknown layout.
    pub(crate) fn of(elf: &ElfFile, bias: LoadBias) -> Option<Result<CodeFragments, UnknownTable>> {
        let symbols = elf.symbols(SymbolTable::Static).ok()??;
        // The symbols of both tables contain this; most files have neither.
        symbols.has_name_with("code_fragments").then_some(())?;
        let found = symbols.find([
            "caml_code_fragments_table",
            "code_fragments_by_pc",
            "caml_md5_block",
            "caml_MD5Final",
            "caml_digest_of_code_fragment",
            "caml_find_code_fragment_by_digest",
            "caml_system__code_begin",
        ]);
        let [
            arrays,
            lists,
            md5_block,
            md5_final,
            digest,
            by_digest,
            system,
        ] = found.ok()?;
        if arrays.is_empty() && lists.is_empty() {
            return None;
        }
        let table = table_of(&arrays, &lists);
        Some(table.and_then(|(kind, table)| {
            let computing = match kind {
                TableKind::Array => [md5_block, md5_final],
                TableKind::SkipList | TableKind::LockFree => [digest, by_digest],
            };
            let range = |symbols: &Vec<Symbol>| match symbols[..] {
                [Symbol { address, len }] if len > 0 => {
                    let start = bias.live(address).0;
                    Ok(start..start.wrapping_add(len))
                }
                _ => Err(UnknownTable),
            };
            Ok(CodeFragments {
                kind,
                at: bias.live(table),
                system_code: system.first().map(|system| bias.live(system.address)),
                computing: computing.iter().map(range).collect::<Result<_, _>>()?,
            })
        }))
    }

    /// Reads the fragments; none if the runtime has not started yet.
    ///
    /// # Errors
    ///
    /// If they cannot be read, or contradict each other.
    pub(crate) fn read(&self, memory: &impl ReadMemory) -> Result<Vec<CodeFragment>, UnknownTable> {
        let places = match self.kind {
            TableKind::Array => array(memory, self.at)?,
            TableKind::SkipList => skip_list(memory, self.at)?,
            TableKind::LockFree => lock_free_list(memory, self.at)?,
        };
        let layouts = match self.kind {
            TableKind::Array => &[WITH_FLAG][..],
            TableKind::SkipList => &[STATUS_LAST],
            TableKind::LockFree => &[STATUS_LAST, WITH_MUTEX],
        };
        let mut found = layouts
            .iter()
            .filter_map(|&layout| self.parse(memory, &places, layout));
        match (found.next(), found.next()) {
            (Some(fragments), None) => Ok(fragments),
            // An empty table fits every layout.
            (Some(fragments), Some(_)) if fragments.is_empty() => Ok(fragments),
            _ => Err(UnknownTable),
        }
    }

    /// Reads fragments in one layout; `None` if they contradict it.
    fn parse(
        &self,
        memory: &impl ReadMemory,
        places: &[FragmentPlace],
        layout: FragmentLayout,
    ) -> Option<Vec<CodeFragment>> {
        let mut fragments = Vec::with_capacity(places.len());
        for place in places {
            let mut bytes = vec![0; layout.len];
            memory.read(place.fragment, &mut bytes).ok()?;
            let (start, end) = (word(&bytes, 0), word(&bytes, 8));
            let (at, len) = layout.status;
            let mut status = [0; 4];
            status[..len].copy_from_slice(&bytes[at..at + len]);
            let status = u32::from_le_bytes(status);
            let status = if status == layout.later {
                DigestStatus::Later
            } else if status == layout.provided {
                let digest = bytes[layout.digest..][..16].try_into().ok()?;
                DigestStatus::Computed(digest)
            } else if Some(status) == layout.ignore {
                DigestStatus::Never
            } else {
                return None;
            };
            let is_system = self.system_code == Some(LiveAddr(start));
            let is_ignored = status == DigestStatus::Never;
            let is_as_listed = place.key.is_none_or(|key| key == start);
            if start > end || !is_as_listed || (is_system && layout.ignore.is_some() && !is_ignored)
            {
                return None;
            }
            fragments.push(CodeFragment {
                code: LiveAddr(start)..LiveAddr(end),
                status,
                at: place.fragment,
                layout,
            });
        }
        Some(fragments)
    }
}

/// Returns the kind and the address of the table: the only symbol of either name, if it has the length of that kind.
fn table_of(arrays: &[Symbol], lists: &[Symbol]) -> Result<(TableKind, FileAddr), UnknownTable> {
    let (kinds, symbol) = match (arrays, lists) {
        ([one], []) => (&[TableKind::Array][..], one),
        ([], [one]) => (&[TableKind::SkipList, TableKind::LockFree][..], one),
        _ => return Err(UnknownTable),
    };
    let kind = kinds.iter().find(|kind| kind.len() == symbol.len);
    Ok((*kind.ok_or(UnknownTable)?, symbol.address))
}

/// Where a fragment is, and the start of its code if the table says that, too.
struct FragmentPlace {
    fragment: LiveAddr,
    key: Option<u64>,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64_at(bytes, at).unwrap_or(0)
}

fn words<const N: usize>(memory: &impl ReadMemory, at: u64) -> Result<[u64; N], UnknownTable> {
    let mut bytes = vec![0; N * 8];
    let read = memory.read(LiveAddr(at), &mut bytes);
    read.map_err(|_| UnknownTable)?;
    Ok(std::array::from_fn(|index| word(&bytes, index * 8)))
}

fn array(memory: &impl ReadMemory, at: LiveAddr) -> Result<Vec<FragmentPlace>, UnknownTable> {
    let [sizes, contents] = words(memory, at.0)?;
    let (size, capacity) = (sizes as u32 as usize, (sizes >> 32) as usize);
    if size > capacity || size > MAX_FRAGMENTS {
        return Err(UnknownTable);
    }
    let place = |index: usize| {
        let [fragment] = words(memory, contents.wrapping_add(index as u64 * 8))?;
        Ok(FragmentPlace {
            fragment: LiveAddr(fragment),
            key: None,
        })
    };
    (0..size).map(place).collect()
}

/// `struct skipcell { uintnat key, data; struct skipcell * forward[]; }`
fn skip_list(memory: &impl ReadMemory, at: LiveAddr) -> Result<Vec<FragmentPlace>, UnknownTable> {
    let [level] = words(memory, at.0.wrapping_add(LEVELS * 8))?;
    if u64::from(level as u32) >= LEVELS {
        return Err(UnknownTable);
    }
    let [mut next] = words(memory, at.0)?;
    let mut places = Vec::new();
    while next != 0 {
        let [key, fragment, after] = words(memory, next)?;
        add(&mut places, key, fragment)?;
        next = after;
    }
    Ok(places)
}

/// `struct lf_skipcell { uintnat key, data, top_level; void *stat_block;
/// struct lf_skipcell *garbage_next, *forward[]; }`
///
/// There are sentinels at both ends. The lowest bit of `forward` is set in a cell that is removed.
fn lock_free_list(
    memory: &impl ReadMemory,
    at: LiveAddr,
) -> Result<Vec<FragmentPlace>, UnknownTable> {
    const REMOVED: u64 = 1;
    let [head, tail] = words(memory, at.0)?;
    if (head, tail) == (0, 0) {
        return Ok(Vec::new());
    }
    let [first_key, _, first_level, _, _, mut next] = words(memory, head)?;
    let [last_key, _, last_level] = words(memory, tail)?;
    if (first_key, last_key) != (0, u64::MAX)
        || (first_level, last_level) != (LEVELS - 1, LEVELS - 1)
    {
        return Err(UnknownTable);
    }
    next &= !REMOVED;
    let mut places = Vec::new();
    let mut cells = 0;
    while next != tail {
        let [key, fragment, _, _, _, after] = words(memory, next)?;
        if after & REMOVED == 0 {
            add(&mut places, key, fragment)?;
        }
        next = after & !REMOVED;
        cells += 1;
        if cells > MAX_FRAGMENTS {
            return Err(UnknownTable);
        }
    }
    Ok(places)
}

/// Adds a cell of a list, whose keys have to increase.
fn add(places: &mut Vec<FragmentPlace>, key: u64, fragment: u64) -> Result<(), UnknownTable> {
    let last = places.last().and_then(|place| place.key);
    if last.is_some_and(|last| last >= key) || places.len() >= MAX_FRAGMENTS {
        return Err(UnknownTable);
    }
    places.push(FragmentPlace {
        fragment: LiveAddr(fragment),
        key: Some(key),
    });
    Ok(())
}

/// Returns the code of all OCaml compilation units of a file, as its symbols say: what the runtime registers as one
/// fragment when it starts. `None` if it has none, or no symbols.
pub(crate) fn code_area(elf: &ElfFile) -> Option<Range<FileAddr>> {
    // Most libraries have no such symbol, and then not every symbol is looked at.
    let symbols = elf.symbols(SymbolTable::Static).ok()??;
    symbols.has_name_ending("code_begin").then_some(())?;
    let (mut start, mut end) = (u64::MAX, 0);
    let visit = |symbol: &Sym, name: &[u8]| {
        let of_runtime = [&b"caml_system"[..], b"caml_hot"];
        if !name.starts_with(b"caml") || of_runtime.iter().any(|own| name.starts_with(own)) {
            return;
        }
        if name.ends_with(b"code_begin") {
            start = start.min(symbol.st_value);
        } else if name.ends_with(b"code_end") {
            end = end.max(symbol.st_value);
        }
    };
    elf.each_symbol(SymbolTable::Static, visit).ok()?;
    (start < end).then_some(FileAddr(start)..FileAddr(end))
}

#[cfg(test)]
mod tests;
