//! Source line -> addresses: where the code of a line begins, as the line tables (DWARF, `.debug_line`) say.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use gimli::{AttributeValue, Dwarf, FileEntry, IncompleteLineProgram, LineProgramHeader, Unit};

use crate::address::FileAddr;
use crate::elf::line_tables::LineTables;
use crate::elf::{DwarfBytes, ElfFile};

/// The most bytes of names of source files that are read for suggestions.
const MAX_NAMES: usize = 1 << 20;

/// The most bytes of paths of source files that are built. No program has so many; a hostile file may have long names that it uses for
/// each of a million files.
const MAX_PATHS: usize = 2 << 30;

/// The most places of one line that are found. No compiler makes so many.
const MAX_PLACES: usize = 1 << 16;

/// A source line that is looked for in one ELF file after another.
pub(crate) struct LineSearch {
    /// The end of the path of the source file.
    suffix: String,
    line: u32,
    /// Whether any of those files has line tables.
    pub(crate) has_tables: bool,
    /// The paths of the source files that end with `suffix` and have code.
    pub(crate) paths: BTreeSet<String>,
    /// The last line before it, and the first after it, with code.
    pub(crate) neighbours: (Option<u32>, Option<u32>),
    /// The names of other source files.
    pub(crate) names: BTreeSet<String>,
    names_len: usize,
    /// How many bytes of paths may still be built.
    paths_left: usize,
}

/// A place where the line begins in a function.
struct Start {
    function: FileAddr,
    /// Whether the next line begins at the same address: the line has no code of its own there.
    is_empty: bool,
}

impl LineSearch {
    /// Looks for line `line` of a source file whose path ends with `path`.
    pub(crate) fn new(path: &str, line: u32) -> LineSearch {
        LineSearch {
            suffix: normalised(path),
            line,
            has_tables: false,
            paths: BTreeSet::new(),
            neighbours: (None, None),
            names: BTreeSet::new(),
            names_len: 0,
            paths_left: MAX_PATHS,
        }
    }

    /// Returns where the line begins in the code of a file: the first instruction of each stretch of code that belongs
    /// to it, in each function. A place where the line has no code of its own is returned only if the line has none
    /// elsewhere in that function. `function_at` returns the address of the function that an address is in; rows for
    /// code in no function give no place: the linker has removed it.
    ///
    /// Tables that cannot be read, or only in part, are searched as far as they can be read.
    pub(crate) fn places_in(
        &mut self,
        elf: &ElfFile,
        function_at: impl Fn(FileAddr) -> Option<FileAddr>,
    ) -> Vec<FileAddr> {
        self.places(&LineTables::of(elf), function_at)
    }

    /// Same as [`LineSearch::places_in`], for a file with these tables.
    fn places(
        &mut self,
        tables: &LineTables,
        function_at: impl Fn(FileAddr) -> Option<FileAddr>,
    ) -> Vec<FileAddr> {
        let mut starts = BTreeMap::new();
        let mut rows_left = tables.max_rows();
        self.has_tables |= rows_left > 0;
        tables.for_each(|dwarf, unit, table| {
            let files = self.files_of(dwarf, unit, &table);
            if !files.is_empty() {
                self.read_rows(table, &files, &function_at, &mut rows_left, &mut starts);
            }
        });
        let has_code = |start: &&Start| !start.is_empty;
        let with_code = starts.values().filter(has_code).map(|start| start.function);
        let with_code: HashSet<FileAddr> = with_code.collect();
        starts
            .retain(|_, start: &mut Start| !start.is_empty || !with_code.contains(&start.function));
        starts.into_keys().collect()
    }

    /// Returns the indices and paths of the source files whose paths end with `suffix`. Notes the names of the others.
    fn files_of(
        &mut self,
        dwarf: &Dwarf<DwarfBytes<'_>>,
        unit: &Unit<DwarfBytes<'_>>,
        table: &IncompleteLineProgram<DwarfBytes<'_>>,
    ) -> BTreeMap<u64, String> {
        let header = table.header();
        let first = u64::from(header.version() < 5);
        let mut files = BTreeMap::new();
        for (index, file) in (first..).zip(header.file_names()) {
            let Some(path) = path_of(dwarf, unit, header, file) else {
                continue;
            };
            let path = normalised(&path);
            self.paths_left = self.paths_left.saturating_sub(path.len());
            if self.paths_left == 0 {
                break;
            }
            if has_suffix(&path, &self.suffix) {
                files.insert(index, path);
            } else if self.names_len < MAX_NAMES {
                let name = path.rsplit('/').next().unwrap_or_default();
                self.names_len += name.len();
                self.names.insert(name.to_owned());
            }
        }
        files
    }

    fn read_rows(
        &mut self,
        table: IncompleteLineProgram<DwarfBytes<'_>>,
        files: &BTreeMap<u64, String>,
        function_at: impl Fn(FileAddr) -> Option<FileAddr>,
        rows_left: &mut usize,
        starts: &mut BTreeMap<FileAddr, Start>,
    ) {
        // The function and address of the last statement, if it was of the line.
        let mut last: Option<(FileAddr, FileAddr)> = None;
        let mut rows = table.rows();
        while let Ok(Some((_, row))) = rows.next_row() {
            *rows_left = rows_left.saturating_sub(1);
            if *rows_left == 0 || starts.len() > MAX_PLACES {
                return;
            }
            if row.end_sequence() {
                last = None;
                continue;
            }
            let Some(line) = row.line().filter(|_| row.is_stmt()) else {
                continue;
            };
            let address = FileAddr(row.address());
            let path = files.get(&row.file_index());
            let function = path.and_then(|_| function_at(address));
            let line = u32::try_from(line.get()).unwrap_or(u32::MAX);
            if let (Some(path), Some(function)) = (path, function) {
                self.note(path, line);
                if line == self.line {
                    if last.is_none_or(|(last, _)| last != function) {
                        starts.entry(address).or_insert(Start {
                            function,
                            is_empty: false,
                        });
                    }
                    last = Some((function, address));
                    continue;
                }
            }
            if let Some((_, at)) = last.take().filter(|(_, at)| *at == address) {
                if let Some(start) = starts.get_mut(&at) {
                    start.is_empty = true;
                }
            }
        }
    }

    /// Notes that a line of a file has code.
    fn note(&mut self, path: &str, line: u32) {
        if !self.paths.contains(path) {
            self.paths.insert(path.to_owned());
        }
        let (before, after) = &mut self.neighbours;
        if line < self.line {
            *before = (*before).max(Some(line));
        } else if line > self.line {
            *after = Some(after.map_or(line, |after| after.min(line)));
        }
    }
}

/// Returns the path of a source file, as it was given to the compiler.
pub(super) fn path_of(
    dwarf: &Dwarf<DwarfBytes<'_>>,
    unit: &Unit<DwarfBytes<'_>>,
    header: &LineProgramHeader<DwarfBytes<'_>>,
    file: &FileEntry<DwarfBytes<'_>>,
) -> Option<String> {
    let text = |value: AttributeValue<DwarfBytes<'_>>| {
        let text = dwarf.attr_string(unit, value).ok()?;
        Some(text.to_string_lossy().into_owned())
    };
    let directory = unit.comp_dir.as_ref().map(|it| it.to_string_lossy());
    let mut path = directory.unwrap_or_default().into_owned();
    // DWARF 5, 6.2.4: the first directory is that of the compilation.
    if file.directory_index() != 0 {
        push(&mut path, &file.directory(header).and_then(text)?);
    }
    push(&mut path, &text(file.path_name())?);
    Some(path)
}

/// Appends `part` to the path of a directory; an absolute `part` replaces it.
fn push(path: &mut String, part: &str) {
    if part.starts_with('/') {
        path.clear();
    } else if !path.is_empty() {
        path.push('/');
    }
    path.push_str(part);
}

/// Resolves `.` and `..` in a path, without looking at the file system; a leading `..` stays.
fn normalised(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let root = if path.starts_with('/') { "/" } else { "" };
    root.to_owned() + &parts.join("/")
}

/// Returns whether a path ends with the parts of `suffix`.
fn has_suffix(path: &str, suffix: &str) -> bool {
    let before = path.strip_suffix(suffix);
    before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
}

#[cfg(test)]
mod tests;
