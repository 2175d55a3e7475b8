//! [`FunctionTable`]: the functions of a file: where they are, how long they are, and what they are called.
//!
//! They are found in `.symtab` and `.dynsym`. A function may have several names there (aliases), and many
//! functions of different files, or of one, may have the same name. Functions without a symbol are found in
//! `.eh_frame` (`unwind_ranges.rs`), and OCaml's have names in the frametables (`frametables.rs`).
//!
//! The table refers to the names in the file's own bytes, and demangles one when it is asked for: hostile tables
//! make many long names of few bytes.

mod frametables;
mod probe_sites;
mod ranges;
mod unwind_ranges;

use std::fmt;
use std::path::{Path, PathBuf};

use goblin::elf::Sym;
use goblin::elf::sym::{STB_GLOBAL, STB_WEAK, STT_FUNC, STT_GNU_IFUNC};

use crate::address::{CodeRange, FileAddr};
use crate::build_id::BuildId;
use crate::elf::functions::frametables::{Frametables, TextPlace, frametables, may_have_calls};
use crate::elf::functions::ranges::RangeSet;
use crate::elf::functions::unwind_ranges::{UnwindRange, unwind_ranges};
use crate::elf::mangling::{self, Language};
use crate::elf::symbols::SymbolTable;
use crate::elf::{ElfFile, Linking};
use crate::error::{ElfDefect, Error, FileError, Result};

/// The longest symbol that is a name, in bytes. Those of C++ templates have some thousands.
const MAX_SYMBOL: usize = 16 << 10;

/// How long all symbols of a small file may be together, in bytes. Those of a larger one may be
/// [`MAX_REPEATED`] times as long as its string tables.
const MAX_SYMBOLS: usize = 16 << 20;

/// How many symbols a byte of the string tables may belong to, on average. A symbol can share the end of another one,
/// and static functions of one name share the whole.
const MAX_REPEATED: usize = 4;

/// How many functions that begin before an address are searched for the one that contains it: the last ones may be
/// inside that one, and end before the address.
const MAX_NESTED: usize = 64;

/// The functions of a file, in the order of their addresses.
///
/// ```no_run
/// let table = probes_lib::FunctionTable::read("server.exe")?;
/// for function in table.functions() {
///     if let Some(name) = function.name() {
///         println!("{} {} {name}", function.address(), function.len());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct FunctionTable {
    path: PathBuf,
    linking: Linking,
    build_id: Option<BuildId>,
    /// What the names are in: the string tables, and the data with the frametables.
    strings: Strings,
    names: Vec<NamePlace>,
    functions: Vec<NamedFunction>,
    /// The parts of functions that the compiler has moved away, in order.
    parts: Vec<NamedFunction>,
}

/// One function of a file.
///
/// ```no_run
/// use probes_lib::{FileAddr, FunctionTable};
///
/// let table = FunctionTable::read("server.exe")?;
/// if let Some(function) = table.function_at(FileAddr(0x561ee)) {
///     println!("{} bytes from {}", function.len(), function.address());
///     for name in function.names() {
///         println!("{name}");
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Function<'t> {
    table: &'t FunctionTable,
    entry: &'t NamedFunction,
}

/// What a symbol of a function stands for.
///
/// ```no_run
/// use probes_lib::{FunctionKind, FunctionTable};
///
/// let table = FunctionTable::read("/lib/x86_64-linux-gnu/libc.so.6")?;
/// let resolvers = table.functions().filter(|it| it.kind() == FunctionKind::Resolver);
/// println!("{} functions have several versions", resolvers.count());
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionKind {
    /// The code that runs when the function is called.
    Function,
    /// Code that runs once, when the program is loaded, and chooses the code that runs when the function is called
    /// (`STT_GNU_IFUNC`): the C library has several `memcpy`, for different processors.
    Resolver,
    /// The code of a probe site, which ppx_probe makes a function of its own, with the name of the function that the site
    /// is in. Globs do not select it.
    ProbeSite,
}

impl FunctionKind {
    /// Returns what is written in parentheses after the name of such a function; `None` for an ordinary one.
    ///
    /// ```
    /// assert_eq!(probes_lib::FunctionKind::Resolver.remark(), Some("resolver"));
    /// ```
    pub fn remark(self) -> Option<&'static str> {
        match self {
            FunctionKind::Function => None,
            FunctionKind::Resolver => Some("resolver"),
            FunctionKind::ProbeSite => Some("probe site"),
        }
    }
}

/// A name of a function. Displayed as it is in the source.
///
/// ```no_run
/// use probes_lib::{FunctionTable, Language, NameSource};
///
/// let table = FunctionTable::read("server.exe")?;
/// for name in table.functions().flat_map(|function| function.names()) {
///     if name.language == Some(Language::Ocaml) && name.source == NameSource::Symbol {
///         println!("{} is {name}", name.symbol);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionName<'t> {
    /// As in the source: `Stdlib.List.map`, `std::vector<int>::push_back(int&&)`; the symbol, if it is not mangled
    /// or cannot be demangled.
    pub text: String,
    /// As the linker has it: `camlStdlib__List__map_480`; from a frametable, as in backtraces:
    /// `Stdlib__List.map`. Bytes that are not UTF-8 are replaced by U+FFFD.
    pub symbol: std::borrow::Cow<'t, str>,
    /// The language, if the symbol tells: those of C are not mangled.
    pub language: Option<Language>,
    /// Where the name was found.
    pub source: NameSource,
}

/// Where the name of a function was found.
///
/// [`FunctionName`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NameSource {
    /// `.symtab`, which strip(1) removes.
    Symbol,
    /// `.dynsym`, which has what the file exports.
    DynamicSymbol,
    /// The frametables, in which OCaml has the names for backtraces, if it was compiled with `-g`.
    Frametable,
}

/// The call in a function that comes first in its code.
///
/// ```no_run
/// let table = probes_lib::FunctionTable::read("server.exe")?;
/// for function in table.functions() {
///     if let (Some(name), Some(call)) = (function.name(), function.first_call()) {
///         println!("{name} is in {}, and makes its first call in line {}", call.file, call.line);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstCall<'t> {
    /// The path of the source file as it was given to the compiler.
    pub file: std::borrow::Cow<'t, str>,
    /// The line of the call, from 1.
    pub line: u32,
}

/// Returns how many calls the frametables of a file describe, with their source lines.
pub(crate) fn frametable_calls(elf: &ElfFile) -> usize {
    let calls = frametables(elf).calls;
    calls.iter().filter(|call| call.line.is_some()).count()
}

/// What the names are in, by [`NameSource`].
type Strings = [Vec<u8>; 3];

/// How many functions have their preferred name in each place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameCounts {
    /// In `.symtab`.
    pub(crate) symbols: usize,
    /// In `.dynsym`.
    pub(crate) dynamic: usize,
    /// In the frametables of OCaml.
    pub(crate) frametables: usize,
    pub(crate) unnamed: usize,
}

struct NamedFunction {
    address: FileAddr,
    len: u64,
    kind: FunctionKind,
    /// Its names are those from `first_name` up to, but without, `last_name`; the preferred one is first.
    first_name: usize,
    last_name: usize,
    /// The file and line of its first call.
    call: Option<(NamePlace, u32)>,
}

/// Where a name, or the path of a source file, is in the [`Strings`].
#[derive(Clone, Copy)]
struct NamePlace {
    source: NameSource,
    offset: usize,
    len: usize,
}

/// A symbol of a function.
struct FunctionSymbol {
    address: FileAddr,
    len: u64,
    kind: FunctionKind,
    binding: u8,
    /// How many underscores the symbol begins with.
    underscores: usize,
    place: NamePlace,
}

impl FunctionTable {
    /// Reads the functions of the file at `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not an ELF file for x86-64, or has neither symbols of functions nor `.eh_frame`. A
    /// file with next to no code, as a library that has only data, has no functions.
    pub fn read(path: impl AsRef<Path>) -> Result<FunctionTable> {
        FunctionTable::of(&ElfFile::open(path.as_ref())?)
    }

    pub(crate) fn of(elf: &ElfFile) -> Result<FunctionTable> {
        let mut table = FunctionTable::without_calls(elf)?;
        let has_lines = elf.with_debugging_information().has_lines();
        if !has_lines || table.functions().any(|it| it.has_no_name()) {
            table.add_calls(frametables(elf));
        }
        Ok(table)
    }

    /// Same as [`FunctionTable::of`], to select functions by their names. Takes less time, but no function has a first
    /// call unless some function has no symbol.
    ///
    /// # Errors
    ///
    /// See [`FunctionTable::read`].
    pub(crate) fn with_names_of(elf: &ElfFile) -> Result<FunctionTable> {
        let mut table = FunctionTable::without_calls(elf)?;
        if table.lacks_names(elf) {
            table.add_calls(frametables(elf));
        }
        Ok(table)
    }

    /// Counts the functions by the place of their preferred name.
    pub(crate) fn name_counts(&self) -> NameCounts {
        let mut counts = NameCounts::default();
        for entry in &self.functions {
            let names = self.names.get(entry.first_name..entry.last_name);
            let first = names.and_then(<[NamePlace]>::first);
            *match first.map(|name| name.source) {
                Some(NameSource::Symbol) => &mut counts.symbols,
                Some(NameSource::DynamicSymbol) => &mut counts.dynamic,
                Some(NameSource::Frametable) => &mut counts.frametables,
                None => &mut counts.unnamed,
            } += 1;
        }
        counts
    }

    fn without_calls(elf: &ElfFile) -> Result<FunctionTable> {
        let code = code_of(elf);
        let mut table = FunctionTable::of_symbols(elf, &code)?;
        table.add_unnamed(elf, &code);
        table.mark_probe_sites(elf);
        if table.functions.is_empty() && !has_only_data(elf) {
            let defect = FileError::Elf(ElfDefect::NoFunctions);
            return Err(Error::of_file(elf.path(), defect));
        }
        Ok(table)
    }

    /// Returns whether the frametables may have the names of functions that have no symbol.
    fn lacks_names(&self, elf: &ElfFile) -> bool {
        let unnamed = self.functions().filter(Function::has_no_name);
        let unnamed: Vec<_> = unnamed.map(|function| function.range()).collect();
        may_have_calls(elf, &unnamed)
    }

    /// Returns the functions and parts of functions that have a symbol.
    fn of_symbols(elf: &ElfFile, code: &RangeSet) -> Result<FunctionTable> {
        let NamedCode {
            functions: found,
            parts,
            boundaries,
            strings,
        } = NamedCode::read(elf, code)?;
        let mut table = FunctionTable {
            path: elf.path().to_owned(),
            linking: elf.linking(),
            build_id: elf.build_id(),
            functions: Vec::new(),
            parts: Vec::new(),
            names: found.iter().map(|found| found.place).collect(),
            strings,
        };
        let mut first_name = 0;
        for aliases in found.chunk_by(|one, other| one.address == other.address) {
            let entry = NamedFunction::of(aliases, first_name, &boundaries, code);
            first_name = entry.last_name;
            table.functions.push(entry);
        }
        for part in parts {
            let name = table.names.len();
            table.names.push(part.place);
            table.parts.push(NamedFunction {
                address: part.address,
                len: part.len,
                kind: part.kind,
                first_name: name,
                last_name: name + 1,
                call: None,
            });
        }
        table.sort_parts();
        Ok(table)
    }

    /// Adds the functions and parts of functions that only the unwind tables know.
    fn add_unnamed(&mut self, elf: &ElfFile, code: &RangeSet) {
        let mut ranges = unwind_ranges(elf, |address| {
            let functions = &self.functions;
            let is_function = functions.binary_search_by_key(&address, |it| it.address);
            let is_part = || self.parts.binary_search_by_key(&address, |it| it.address);
            is_function.is_ok() || is_part().is_ok()
        });
        ranges.retain(|range| {
            let end = range.address.0.checked_add(range.len);
            let code_end = code.end_at(range.address.0).unwrap_or(0);
            range.len > 0 && end.is_some_and(|end| end <= code_end)
        });
        ranges.sort_by_key(|range| (range.address, range.len));
        ranges.dedup_by_key(|range| range.address);
        let plt = elf
            .code_sections()
            .filter(|(name, ..)| name.starts_with(b".plt"));
        let plt = RangeSet::of(plt.map(|(_, address, len)| (address.0, len)));
        let known = self.functions.len();
        // Where the functions known so far end; a shorter one may be inside a longer one.
        let mut ends: Vec<u64> = Vec::with_capacity(known);
        for function in &self.functions {
            let before = ends.last().copied().unwrap_or(0);
            ends.push(before.max(function.address.0 + function.len));
        }
        for UnwindRange {
            address,
            len,
            is_entry,
        } in ranges
        {
            let next = self.functions[..known].partition_point(|it| it.address.0 < address.0 + len);
            let overlaps = next > 0 && ends[next - 1] > address.0;
            if overlaps || plt.end_at(address.0).is_some() {
                continue;
            }
            let found = if is_entry {
                &mut self.functions
            } else {
                &mut self.parts
            };
            found.push(NamedFunction {
                address,
                len,
                kind: FunctionKind::Function,
                first_name: 0,
                last_name: 0,
                call: None,
            });
        }
        self.functions.sort_by_key(|entry| entry.address);
        self.sort_parts();
    }

    fn sort_parts(&mut self) {
        self.parts.sort_by_key(|part| (part.address, part.len));
    }

    /// Finds the functions that are the code of probe sites.
    fn mark_probe_sites(&mut self, elf: &ElfFile) {
        for start in probe_sites::possible_starts(elf) {
            let Ok(at) = (self.functions).binary_search_by_key(&start, |it| it.address) else {
                continue;
            };
            let function = &mut self.functions[at];
            if probe_sites::is_of_site(elf, start, function.len) {
                function.kind = FunctionKind::ProbeSite;
            }
        }
    }

    /// Adds what the frametables say: names of functions that have no symbol, and the lines of calls.
    fn add_calls(&mut self, frametables: Frametables) {
        let place = |text: TextPlace| NamePlace {
            source: NameSource::Frametable,
            offset: text.offset,
            len: text.len,
        };
        for call in &frametables.calls {
            // The call may be the last instruction.
            let address = call.return_address.0.saturating_sub(1);
            let next = self.functions.partition_point(|it| it.address.0 <= address);
            let Some(function) = next.checked_sub(1).map(|at| &mut self.functions[at]) else {
                continue;
            };
            if address - function.address.0 >= function.len {
                continue;
            }
            if let Some(line) = call.line {
                function.call.get_or_insert((place(call.file), line));
            }
            if function.first_name == function.last_name {
                function.first_name = self.names.len();
                self.names.push(place(call.function));
                function.last_name = self.names.len();
            }
            // If a local function `loop` of `f` was compiled as a loop in `f`, the frametables name its calls
            // `f.loop`. So the shortest name is nearest to that of the function itself.
            let name = &mut self.names[function.first_name];
            if name.source == NameSource::Frametable && call.function.len < name.len {
                *name = place(call.function);
            }
        }
        self.strings[NameSource::Frametable as usize] = frametables.data;
    }

    /// The path of the file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How its addresses relate to where it is loaded.
    pub fn linking(&self) -> Linking {
        self.linking
    }

    /// Its build-id, if it has one.
    pub fn build_id(&self) -> Option<&BuildId> {
        self.build_id.as_ref()
    }

    /// The functions, in the order of their addresses.
    pub fn functions(&self) -> impl ExactSizeIterator<Item = Function<'_>> {
        let function = |entry| Function { table: self, entry };
        self.functions.iter().map(function)
    }

    /// Returns the function whose code is at this address in the file; if one is inside another, the one that begins last.
    ///
    /// ```no_run
    /// use probes_lib::{FileAddr, FunctionTable};
    ///
    /// let functions = FunctionTable::read("server.exe")?;
    /// if let Some(function) = functions.function_at(FileAddr(0x561ee)) {
    ///     println!("{:?} begins at {}", function.name(), function.address());
    /// }
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn function_at(&self, address: FileAddr) -> Option<Function<'_>> {
        let next = self.functions.partition_point(|it| it.address <= address);
        // Few functions are inside another.
        let before = self.functions[..next].iter().rev().take(MAX_NESTED);
        let mut before = before.map(|entry| Function { table: self, entry });
        before.find(|function| function.range().contains(address.0))
    }

    /// The parts of functions that the compiler has moved away because they rarely run, in the order of their
    /// addresses. They have a symbol such as `parse.cold`, or the unwind tables say that they are entered with
    /// something on the stack.
    pub(crate) fn parts(&self) -> Vec<CodeRange> {
        let part = |entry| Function { table: self, entry };
        self.parts.iter().map(|it| part(it).range()).collect()
    }

    /// Returns the function whose code is at this address in the file, or else the part of a function.
    pub(crate) fn function_or_part_at(&self, address: FileAddr) -> Option<Function<'_>> {
        self.function_at(address).or_else(|| {
            let next = self.parts.partition_point(|it| it.address <= address);
            let entry = &self.parts[next.checked_sub(1)?];
            let part = Function { table: self, entry };
            part.range().contains(address.0).then_some(part)
        })
    }

    fn name(&self, place: NamePlace) -> FunctionName<'_> {
        let symbol = String::from_utf8_lossy(text_at(&self.strings, place));
        let (language, text) = match place.source {
            NameSource::Symbol | NameSource::DynamicSymbol => mangling::source_name(&symbol),
            NameSource::Frametable => {
                let name = mangling::name_of_backtrace(&symbol);
                (Some(Language::Ocaml), name)
            }
        };
        FunctionName {
            text,
            symbol,
            language,
            source: place.source,
        }
    }
}

impl<'t> Function<'t> {
    /// The address of its first instruction.
    pub fn address(&self) -> FileAddr {
        self.entry.address
    }

    /// Its length in bytes. If its symbol has no length, it ends at the next symbol or at the end of the section.
    #[expect(clippy::len_without_is_empty, reason = "code is never empty")]
    pub fn len(&self) -> u64 {
        self.entry.len
    }

    /// Its code.
    pub fn range(&self) -> CodeRange {
        CodeRange {
            start: self.address(),
            len: self.len(),
        }
    }

    /// Whether it is what runs when the function is called.
    pub fn kind(&self) -> FunctionKind {
        self.entry.kind
    }

    /// Its names: exported ones before local ones, otherwise those with fewer leading underscores first, then global ones before
    /// weak ones, then shorter ones.
    pub fn names(&self) -> impl ExactSizeIterator<Item = FunctionName<'t>> + use<'t> {
        let table = self.table;
        let names = &table.names[self.entry.first_name..self.entry.last_name];
        names.iter().map(|&place| table.name(place))
    }

    fn has_no_name(&self) -> bool {
        self.entry.first_name == self.entry.last_name
    }

    /// The [`symbol`](FunctionName::symbol) of each of its [`names`](Function::names), as it is in the file.
    pub(crate) fn symbols(&self) -> impl Iterator<Item = &'t [u8]> + use<'t> {
        let table = self.table;
        let names = &table.names[self.entry.first_name..self.entry.last_name];
        names.iter().map(|&place| text_at(&table.strings, place))
    }

    /// The one of [`names`](Function::names) with this index.
    pub(crate) fn nth_name(&self, index: usize) -> Option<FunctionName<'t>> {
        let names = &self.table.names[self.entry.first_name..self.entry.last_name];
        names.get(index).map(|&place| self.table.name(place))
    }

    /// Its first call, if it is a function of OCaml and the frametables describe the call. The frametables are not
    /// read if the file has debugging information and symbols of all functions.
    pub fn first_call(&self) -> Option<FirstCall<'t>> {
        let (file, line) = self.entry.call?;
        let file = String::from_utf8_lossy(text_at(&self.table.strings, file));
        Some(FirstCall { file, line })
    }

    /// The first of its names.
    pub fn name(&self) -> Option<FunctionName<'t>> {
        self.nth_name(0)
    }
}

/// What the symbol tables of a file name in its code.
struct NamedCode {
    /// By address; those of one address by how well their names suit, the best one first.
    functions: Vec<FunctionSymbol>,
    parts: Vec<FunctionSymbol>,
    /// The addresses of all symbols, and the ends of sections, in order.
    boundaries: Vec<u64>,
    strings: Strings,
}

impl NamedCode {
    fn read(elf: &ElfFile, code: &RangeSet) -> Result<NamedCode> {
        let mut named = NamedCode {
            functions: Vec::new(),
            parts: Vec::new(),
            boundaries: code_boundaries(elf),
            strings: Strings::default(),
        };
        let (mut symbols_len, mut strings_len) = (0, 0);
        for source in [NameSource::Symbol, NameSource::DynamicSymbol] {
            let symbols = elf.symbols(match source {
                NameSource::Symbol => SymbolTable::Static,
                _ => SymbolTable::Dynamic,
            })?;
            let Some(symbols) = symbols else {
                continue;
            };
            let names = symbols.names()?;
            strings_len += names.len();
            let most = MAX_SYMBOLS.max(strings_len.saturating_mul(MAX_REPEATED));
            symbols.each(|symbol| {
                if code.end_at(symbol.st_value).is_none() {
                    return Ok(());
                }
                named.boundaries.push(symbol.st_value);
                let Some(function) = FunctionSymbol::of(symbol, &names, source) else {
                    return Ok(());
                };
                symbols_len += function.place.len;
                if symbols_len > most {
                    let defect = FileError::Elf(ElfDefect::LongSymbols { most });
                    return Err(Error::of_file(elf.path(), defect));
                }
                if is_part(text_in(&names, function.place)) {
                    named.parts.push(function);
                } else {
                    named.functions.push(function);
                }
                Ok(())
            })?;
            named.strings[source as usize] = names;
        }
        named.boundaries.sort_unstable();
        named.boundaries.dedup();
        named.sort_functions();
        Ok(named)
    }

    /// Sorts the functions, and leaves out names that are in both tables, as most dynamic symbols are.
    fn sort_functions(&mut self) {
        let text = |place: NamePlace| text_at(&self.strings, place);
        self.functions.sort_by(|one, other| {
            (one.preference().cmp(&other.preference()))
                .then_with(|| text(one.place).cmp(text(other.place)))
                .then(one.place.source.cmp(&other.place.source))
        });
        self.functions.dedup_by(|one, other| {
            one.address == other.address && text(one.place) == text(other.place)
        });
    }
}

impl FunctionSymbol {
    fn of(symbol: &Sym, names: &[u8], source: NameSource) -> Option<FunctionSymbol> {
        let kind = match symbol.st_type() {
            STT_FUNC => FunctionKind::Function,
            STT_GNU_IFUNC => FunctionKind::Resolver,
            _ => return None,
        };
        let name = names.get(symbol.st_name..)?;
        let len = memchr::memchr(0, &name[..name.len().min(MAX_SYMBOL)])?;
        let len = match source {
            NameSource::Symbol => without_version(&name[..len]).len(),
            _ => len,
        };
        if len == 0 {
            return None;
        }
        let other = name[..len].iter().position(|&byte| byte != b'_');
        Some(FunctionSymbol {
            address: FileAddr(symbol.st_value),
            len: symbol.st_size,
            kind,
            binding: symbol.st_bind(),
            underscores: other.unwrap_or(len),
            place: NamePlace {
                source,
                offset: symbol.st_name,
                len,
            },
        })
    }

    /// Orders symbols by address, and those of one address by how well their names suit, the best one first: a name that
    /// programs use may be weak, and `__nanosleep` global.
    fn preference(&self) -> impl Ord + use<> {
        let is_local = !matches!(self.binding, STB_GLOBAL | STB_WEAK);
        let is_weak = self.binding == STB_WEAK;
        (
            self.address,
            is_local,
            self.underscores,
            is_weak,
            self.place.len,
        )
    }
}

/// Returns a symbol of `.symtab` without the version that the linker has appended to it: `realpath@@GLIBC_2.3`. Names of other
/// languages than C may have an `@`, too: those that are no names of C stay whole.
fn without_version(symbol: &[u8]) -> &[u8] {
    let Some(at) = memchr::memchr(b'@', symbol) else {
        return symbol;
    };
    let (name, version) = symbol.split_at(at);
    let is_name = |part: &[u8]| {
        let mut bytes = part.iter();
        !part.is_empty() && bytes.all(|it| it.is_ascii_alphanumeric() || b"_.$".contains(it))
    };
    let version = version.strip_prefix(b"@@").unwrap_or(&version[1..]);
    if is_name(name) && is_name(version) {
        name
    } else {
        symbol
    }
}

impl NamedFunction {
    /// The function that these symbols, at least one, stand for; the first one's name has the index `first_name`.
    fn of(
        aliases: &[FunctionSymbol],
        first_name: usize,
        boundaries: &[u64],
        code: &RangeSet,
    ) -> NamedFunction {
        let address = aliases[0].address;
        let longest = aliases.iter().map(|alias| alias.len).max().unwrap_or(0);
        // The C library has local names of the same code that do not say it.
        let is_resolver = aliases
            .iter()
            .any(|alias| alias.kind == FunctionKind::Resolver);
        let len = if longest > 0 {
            longest
        } else {
            let next = boundaries.partition_point(|&boundary| boundary <= address.0);
            boundaries
                .get(next)
                .map_or(u64::MAX, |next| next - address.0)
        };
        let end = code.end_at(address.0).unwrap_or(address.0);
        NamedFunction {
            address,
            len: len.min(end - address.0),
            kind: if is_resolver {
                FunctionKind::Resolver
            } else {
                FunctionKind::Function
            },
            first_name,
            last_name: first_name + aliases.len(),
            call: None,
        }
    }
}

impl fmt::Display for FunctionName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for FunctionTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionTable")
            .field("path", &self.path)
            .field("functions", &self.functions.len())
            .finish_non_exhaustive()
    }
}

fn text_at(strings: &Strings, place: NamePlace) -> &[u8] {
    text_in(&strings[place.source as usize], place)
}

fn text_in(strings: &[u8], place: NamePlace) -> &[u8] {
    &strings[place.offset..place.offset + place.len]
}

/// Whether the symbol names a part of a function that the compiler has moved away because it rarely runs: gcc's
/// `parse.cold`, `parse.cold.3`.
fn is_part(symbol: &[u8]) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let end = symbol.iter().rposition(|byte| !is_digit(byte));
    let without_number = &symbol[..end.map_or(0, |end| end + 1)];
    let without_number = without_number.strip_suffix(b".").unwrap_or(symbol);
    without_number.ends_with(b".cold") || symbol.ends_with(b".cold")
}

/// The executable bytes that come from the file.
fn code_of(elf: &ElfFile) -> RangeSet {
    let segments = elf.loaded().filter(|segment| segment.executable);
    RangeSet::of(segments.map(|segment| (segment.start.0, segment.file_len)))
}

/// Whether a file without known functions has none, as a library that has only data: what the linker adds to each library
/// is less code than this.
fn has_only_data(elf: &ElfFile) -> bool {
    const MAX_ADDED: u64 = 1024;
    let is_program = elf.interpreter().is_some() || elf.linking() == Linking::Fixed;
    let lens = elf.code_sections().map(|(_, _, len)| len);
    let len = lens.fold(0, u64::saturating_add);
    // Without section headers, its code may be anything.
    elf.has_sections() && !is_program && len <= MAX_ADDED
}

/// Where the sections of code begin and end: a function of unknown length ends there at the latest.
fn code_boundaries(elf: &ElfFile) -> Vec<u64> {
    let sections = elf.code_sections();
    let both = |(_, start, len): (_, FileAddr, u64)| [start.0, start.0.saturating_add(len)];
    sections.flat_map(both).collect()
}

#[cfg(test)]
mod tests;
