//! Address -> function and source line (gimli, through addr2line).
//!
//! addr2line maps files into memory, and a process that reads a mapped file gets SIGBUS if the file was shortened. So it gets a copy
//! of what it reads of a file.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use addr2line::Loader;

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::elf::bytecode::OCAML_FRAMETABLE;
use crate::elf::compression::WHAT;
use crate::elf::debug_copy::{self, DebugCopy};
use crate::elf::entry_lines::EntryLines;
use crate::elf::mangling;
use crate::error::{Error, FileError, Result};

/// Each file with OCaml code has one of these symbols: a program, or a plugin.
const OCAML_SYMBOLS: [&str; 2] = [OCAML_FRAMETABLE, "caml_plugin_header"];

/// The symbols and line table of one file.
///
/// ```no_run
/// use probes_lib::{ProbeTable, SourceMap};
///
/// let table = ProbeTable::read("server.exe")?;
/// let sources = SourceMap::read("server.exe")?;
/// for site in table.probes().flat_map(|probe| probe.sites()) {
///     println!("{:?}", sources.locate(site.address()));
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct SourceMap {
    /// `None` if the file has neither symbols nor lines.
    loaded: Option<Loaded>,
    /// What has the symbols, if that is another file.
    symbols: Option<Loaded>,
    /// Read when they are asked for.
    entry_lines: OnceLock<EntryLines>,
}

struct Loaded {
    loader: Loader,
    /// What the loader has mapped.
    copy: Arc<DebugCopy>,
}

/// Where code is in the source; what the file does not say is `None`.
///
/// ```no_run
/// use probes_lib::{FileAddr, SourceMap};
///
/// let location = SourceMap::read("server.exe")?.locate(FileAddr(0x561ee));
/// if let (Some(file), Some(line)) = (location.file, location.line) {
///     println!("{file}:{line}");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct SourceLocation {
    /// The function, by its name in the source: `Http.handle`.
    pub function: Option<String>,
    /// The path of the source file as it was given to the compiler, if the ELF file records that.
    pub file: Option<String>,
    /// The line in it, from 1.
    pub line: Option<u32>,
}

impl SourceMap {
    /// Opens the file at `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or is not an ELF file.
    pub fn read(path: impl AsRef<Path>) -> Result<SourceMap> {
        SourceMap::of(&ElfFile::open(path.as_ref())?)
    }

    /// Opens the same file as `elf`, even if its path leads to another one by now.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn of(elf: &ElfFile) -> Result<SourceMap> {
        let (with_lines, with_symbols) = (elf.with_debugging_information(), elf.with_symbols());
        let symbols = if std::ptr::eq(with_lines, with_symbols) {
            None
        } else {
            Loaded::of(with_symbols)?
        };
        let loaded = match Loaded::of(with_lines) {
            // The names are known without the separate debug file.
            Err(_) if symbols.is_some() => None,
            loaded => loaded?,
        };
        Ok(SourceMap {
            loaded,
            symbols,
            entry_lines: OnceLock::new(),
        })
    }

    /// Returns the files whose source lines no [`SourceMap`] has read so far, because the debugging information of all
    /// files together may have no more than 1 GiB, and take no more than 1 GiB beside that once it is loaded.
    ///
    /// ```
    /// for file in probes_lib::SourceMap::left_out() {
    ///     eprintln!("no source lines are shown of {}", file.display());
    /// }
    /// ```
    pub fn left_out() -> Vec<PathBuf> {
        debug_copy::left_out()
    }

    /// Returns what the file says of the code at `address`.
    pub fn locate(&self, address: FileAddr) -> SourceLocation {
        // Without `.symtab`, the nearest dynamic symbol may be that of another function.
        let loader = self.symbols.as_ref().map(|it| &it.loader);
        let loader = loader.or(self.loader());
        let loader = loader.filter(|it| it.get_section_range(b".symtab").is_some());
        let function = loader.and_then(|it| it.find_symbol(address.0));
        let (file, line) = self.line(address);
        SourceLocation {
            function: function.map(mangling::demangle),
            file: file.map(str::to_owned),
            line,
        }
    }

    /// Returns the path of the source file and the line of the code at `address`, as far as the debugging information
    /// tells: see [`SourceLocation`].
    pub fn line(&self, address: FileAddr) -> (Option<&str>, Option<u32>) {
        // Without debugging information, or if it is corrupt, there are no lines.
        let location = self.loader().map(|it| it.find_location(address.0));
        let location = location.and_then(|found| found.ok().flatten());
        location.map_or((None, None), |location| (location.file, location.line))
    }

    /// Same as [`SourceMap::line`], of the function that begins at `address`. Of one of OCaml, the line is in its own source file,
    /// also if it begins with code of another file that was inlined.
    pub fn line_of_entry(&self, address: FileAddr) -> (Option<&str>, Option<u32>) {
        let read = || {
            let copy = self.loaded.as_ref().map(|it| &it.copy);
            let file = copy.and_then(|copy| copy.file.try_clone().ok());
            let elf = file.and_then(|file| ElfFile::read(file, PathBuf::new()).ok());
            // The debugging information of other languages may be large, and is not needed.
            let elf =
                elf.filter(|elf| OCAML_SYMBOLS.iter().any(|it| elf.data_symbol(it).is_some()));
            elf.as_ref().map(EntryLines::of).unwrap_or_default()
        };
        match self.entry_lines.get_or_init(read).at(address) {
            Some((file, line)) => (Some(file), Some(line)),
            None => self.line(address),
        }
    }

    /// Same as [`SourceMap::line`], but in the source of the function that contains the code. For code of another
    /// function that was inlined into it, this is the line of the call.
    pub(crate) fn line_of_function(&self, address: FileAddr) -> (Option<&str>, Option<u32>) {
        // To find frames in split units, the loader would open files whose paths the target chooses, and map them into memory: what
        // these units have in this file has the line.
        let loaded = self.loaded.as_ref();
        let whole = loaded.filter(|it| !it.copy.cost.has_split_units);
        let frames = whole.map(|it| it.loader.find_frames(address.0));
        let Some(Ok(mut frames)) = frames else {
            return self.line(address);
        };
        let mut outermost = None;
        while let Ok(Some(frame)) = frames.next() {
            outermost = frame.location;
        }
        outermost.map_or_else(|| self.line(address), |it| (it.file, it.line))
    }

    fn loader(&self) -> Option<&Loader> {
        self.loaded.as_ref().map(|it| &it.loader)
    }
}

impl Loaded {
    /// Loads a file; `None` if it has neither symbols nor lines.
    fn of(elf: &ElfFile) -> Result<Option<Loaded>> {
        // Most libraries have neither: a process may have hundreds, and a copy keeps a file open.
        if !elf.has_section(".symtab") && !elf.has_lines() {
            return Ok(None);
        }
        let unreadable = |source| {
            let what = WHAT;
            Error::of_file(elf.path(), FileError::Read { what, source })
        };
        let copy = elf.debugging_information()?;
        let path = format!("/proc/self/fd/{}", copy.file.as_raw_fd());
        let loader = Loader::new(path);
        let loader = loader.map_err(|error| unreadable(std::io::Error::other(error.to_string())));
        Ok(Some(Loaded {
            loader: loader?,
            copy,
        }))
    }
}

#[cfg(test)]
mod tests {
    use test_support::Scratch;

    use super::*;
    use crate::testing::compile;

    #[test]
    fn files_without_symbols_and_lines_are_not_copied() {
        let scratch = Scratch::new();
        let program = compile(
            &scratch,
            "program.c",
            "int main(void) { return 0; }",
            &["-s"],
        );
        let map = SourceMap::read(&program).unwrap();
        assert!(map.loaded.is_none());
        let address = ElfFile::open(&program).unwrap().header.e_entry;
        assert_eq!(map.locate(FileAddr(address)), SourceLocation::default());
        assert_eq!(map.line_of_function(FileAddr(address)), (None, None));
    }

    /// Has code at `place` that was inlined.
    const INLINED: &str = "static inline __attribute__((always_inline)) void inner(void) {
                               __asm__ volatile(\".globl place\\nplace: nop\");
                           }
                           int main(void) {
                               inner();
                               return 0;
                           }";

    /// The source lines of a program, and where its `place` is.
    fn place_in(program: &Path) -> (SourceMap, FileAddr) {
        let elf = ElfFile::open(program).unwrap();
        let symbols = elf.symbols(crate::elf::symbols::SymbolTable::Static);
        let found = symbols.unwrap().unwrap().find(["place"]).unwrap();
        let [place] = found[0][..] else {
            panic!("{found:?}");
        };
        (SourceMap::of(&elf).unwrap(), place.address)
    }

    #[test]
    fn inlined_code_has_the_line_of_its_call() {
        let scratch = Scratch::new();
        let flags = ["-g", "-O2", "-no-pie"];
        let (map, place) = place_in(&compile(&scratch, "program.c", INLINED, &flags));
        assert_eq!(map.line(place).1, Some(2));
        assert_eq!(map.line_of_function(place).1, Some(5));
    }

    #[test]
    fn split_units_are_not_opened() {
        let scratch = Scratch::new();
        for version in ["-gdwarf-4", "-gdwarf-5"] {
            let flags = [version, "-gsplit-dwarf", "-O2", "-no-pie"];
            let (map, place) = place_in(&compile(&scratch, "program.c", INLINED, &flags));
            // The other file says which line calls the inlined function; the path of that file may lead to a device.
            assert_eq!(map.line_of_function(place), map.line(place));
            assert_eq!(map.line(place).1, Some(2), "{version}");
        }
    }
}
