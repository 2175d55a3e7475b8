//! [`Functions`]: the functions of a program, in a file or in a process with everything that it has loaded.

mod select;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub(crate) use self::select::{FunctionPlace, SelectedBy};
use crate::address::{CodeRange, FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::functions::{Function, FunctionName, FunctionTable};
use crate::elf::source::SourceMap;
use crate::elf::symbols::SymbolTable;
use crate::elf::usdt::{UsdtSite, UsdtSites, is_foreign, usdt_sites};
use crate::error::{Error, FunctionError, Result};
use crate::patch_plan::{EntryPlanner, PatchPlanner};
use crate::process::code_files::{
    CodeCopy, CodeFile, CodeFiles, CodeKind, EachFile, MappedCode, library_count,
};
use crate::process::object::UnreadableObject;

/// The functions of a program.
///
/// ```no_run
/// use probes_lib::{FunctionSelector, Functions};
///
/// let functions = Functions::of_process(4242)?;
/// let selector = FunctionSelector::Glob("Http.*".parse().unwrap());
/// for found in functions.select(&[selector])? {
///     println!("{:?} {}", found.address(), found.name().unwrap());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct Functions {
    program: PathBuf,
    objects: Vec<FunctionObject>,
    /// Code of the objects that is mapped once more.
    copies: Vec<CodeCopy>,
    unreadable: Vec<UnreadableObject>,
    /// The mappings that the objects were found in.
    mapped: MappedCode,
}

/// A file with functions, and where it is loaded if it is of a process.
///
/// ```no_run
/// for object in probes_lib::Functions::of_process(4242)?.objects() {
///     let (table, bias) = (object.table(), object.load_bias());
///     println!("{}: {} functions, load bias {bias:?}", table.path().display(), table.functions().len());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct FunctionObject {
    table: Arc<FunctionTable>,
    bias: Option<LoadBias>,
    elf: Arc<ElfFile>,
    kind: CodeKind,
    /// The sites of USDT probes of other providers than OCaml's, once they were needed; an error if its notes cannot be
    /// read.
    usdt: OnceLock<Result<UsdtSites, Arc<Error>>>,
}

/// A function that was selected.
///
/// [`Functions`] has an example.
#[derive(Clone, Copy)]
pub struct SelectedFunction<'f> {
    /// The file that it is in.
    pub object: &'f FunctionObject,
    /// The function; of a site of a USDT probe, perhaps a part of one that the compiler has moved away.
    pub function: Function<'f>,
    /// The index of the name by which it was asked for.
    name: usize,
}

impl Functions {
    /// Reads the functions of the file at `path`.
    ///
    /// # Errors
    ///
    /// See [`FunctionTable::read`].
    pub fn of_file(path: impl AsRef<Path>) -> Result<Functions> {
        Functions::of_elf(ElfFile::open(path.as_ref())?, FunctionTable::of)
    }

    /// Reads the functions of a file, to select them by their names.
    ///
    /// # Errors
    ///
    /// See [`FunctionTable::with_names_of`].
    pub(crate) fn to_select_of_file(elf: ElfFile) -> Result<Functions> {
        Functions::of_elf(elf, FunctionTable::with_names_of)
    }

    fn of_elf(
        elf: ElfFile,
        table_of: impl Fn(&ElfFile) -> Result<FunctionTable>,
    ) -> Result<Functions> {
        Ok(Functions {
            program: elf.path().to_owned(),
            objects: vec![FunctionObject {
                table: Arc::new(table_of(&elf)?),
                bias: None,
                elf: Arc::new(elf),
                kind: CodeKind::Executable,
                usdt: OnceLock::new(),
            }],
            copies: Vec::new(),
            unreadable: Vec::new(),
            mapped: MappedCode::default(),
        })
    }

    /// Reads the functions of a process: of its executable, of each library and plugin that is loaded now, and of the
    /// code that the kernel adds (vDSO). Does not stop it. Code that the program has generated is not known.
    ///
    /// # Errors
    ///
    /// If there is no such process, or it or its executable may not be read.
    pub fn of_process(pid: i32) -> Result<Functions> {
        Functions::read(pid, FunctionTable::of)
    }

    /// The same, to select functions by their names; see [`FunctionTable::with_names_of`].
    ///
    /// # Errors
    ///
    /// Same as [`Functions::of_process`].
    pub(crate) fn to_select_of(pid: i32) -> Result<Functions> {
        Functions::read(pid, FunctionTable::with_names_of)
    }

    fn read(pid: i32, table_of: impl Fn(&ElfFile) -> Result<FunctionTable>) -> Result<Functions> {
        let EachFile {
            program,
            files,
            copies,
            unreadable,
            mapped,
        } = CodeFiles::of_pid(pid)?.each(table_of);
        let objects = files.into_iter();
        let objects = objects.map(|(CodeFile { elf, bias, kind }, table)| FunctionObject {
            table,
            bias: Some(bias),
            elf,
            kind,
            usdt: OnceLock::new(),
        });
        let objects = objects.collect();
        Ok(Functions {
            program,
            objects,
            copies,
            unreadable,
            mapped,
        })
    }

    /// The path of the program: of a process as the kernel names it, of a file as it was given.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The files with functions: that of the program, and in a process the others by their addresses.
    pub fn objects(&self) -> &[FunctionObject] {
        &self.objects
    }

    /// The files that are mapped with code in them, and whose functions could not be read.
    pub fn unreadable(&self) -> &[UnreadableObject] {
        &self.unreadable
    }

    /// That of the program; `None` if its functions could not be read.
    pub(crate) fn executable(&self) -> Option<&FunctionObject> {
        self.objects.iter().find(|object| object.is_executable())
    }

    pub(crate) fn copies(&self) -> &[CodeCopy] {
        &self.copies
    }

    /// The mappings of code that the files were found in.
    pub(crate) fn mapped(&self) -> &MappedCode {
        &self.mapped
    }

    /// Returns the function whose code is at this address, of the process or of the file, and how many bytes after its
    /// entry that is.
    ///
    /// ```no_run
    /// use probes_lib::{Functions, LiveAddr};
    ///
    /// let functions = Functions::of_process(4242)?;
    /// let (function, offset) = functions.at(LiveAddr(0x55d0_c3b4))?;
    /// println!("{}+{offset:#x}", function.name().unwrap());
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoneAt`] if no function is known to be there.
    pub fn at(&self, address: LiveAddr) -> Result<(SelectedFunction<'_>, u64)> {
        let mut functions = self.objects.iter().filter_map(|object| {
            let in_file = FileAddr(address.0);
            let at = object.bias.map_or(in_file, |bias| bias.file(address));
            let function = object.table.function_at(at)?;
            let selected = SelectedFunction {
                object,
                function,
                name: 0,
            };
            Some((selected, at.0.checked_sub(function.address().0)?))
        });
        functions.next().ok_or_else(|| {
            let libraries = self.library_count();
            let kind = FunctionError::NoneAt { address, libraries };
            Error::of_file(&self.program, kind)
        })
    }

    /// Returns the file of a process that has code at this address, and where it is loaded.
    pub(crate) fn object_at(&self, address: LiveAddr) -> Option<(&FunctionObject, LoadBias)> {
        self.objects.iter().find_map(|object| {
            let bias = object.bias?;
            let FileAddr(at) = bias.file(address);
            let mut segments = object.elf.loaded();
            let has_it = segments.any(|segment| {
                segment.executable && at.wrapping_sub(segment.start.0) < segment.len
            });
            has_it.then_some((object, bias))
        })
    }

    /// Returns the files whose notes were needed and could not be read. Their functions are known nevertheless.
    pub(crate) fn unreadable_notes(&self) -> Vec<UnreadableObject> {
        let mut named = HashSet::new();
        let mut unreadable = Vec::new();
        for object in &self.objects {
            let Some(Err(why)) = object.usdt.get() else {
                continue;
            };
            // A file may be loaded more than once.
            if named.insert(Arc::as_ptr(&object.elf)) {
                unreadable.push(UnreadableObject {
                    path: object.elf.path().to_owned(),
                    why: why.clone(),
                    may_have_usdt_probes: true,
                });
            }
        }
        unreadable
    }

    fn library_count(&self) -> usize {
        library_count(self.objects.iter().map(|object| object.kind))
    }
}

impl FunctionObject {
    /// Its functions.
    pub fn table(&self) -> &FunctionTable {
        &self.table
    }

    /// What is added to an address in the file to get the address in the process; `None` if it is of no process.
    pub fn load_bias(&self) -> Option<LoadBias> {
        self.bias
    }

    /// Returns how many functions have no name because the file is stripped.
    fn unnamed(&self) -> usize {
        let is_stripped = matches!(self.elf.symbols(SymbolTable::Static), Ok(None));
        if is_stripped {
            self.table.name_counts().unnamed
        } else {
            0
        }
    }

    pub(crate) fn elf(&self) -> &ElfFile {
        &self.elf
    }

    /// Whether it is the code that the kernel maps into each process (vDSO).
    pub(crate) fn is_kernels(&self) -> bool {
        self.kind == CodeKind::Kernel
    }

    pub(crate) fn is_executable(&self) -> bool {
        self.kind == CodeKind::Executable
    }

    /// Returns the sites of USDT probes of other providers than OCaml's; none if the notes of the file cannot be read
    /// ([`Functions::unreadable_notes`]).
    fn usdt_sites(&self) -> &[UsdtSite] {
        let read = || usdt_sites(&self.elf, is_foreign).map_err(Arc::new);
        let found = self.usdt.get_or_init(read);
        found.as_ref().map_or(&[], |found| &found.sites)
    }

    /// Reads the code of the file, to plan patches of its functions.
    ///
    /// [`PatchPlanner`] has an example.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn patch_planner(&self) -> Result<PatchPlanner> {
        PatchPlanner::read(&self.elf, &self.table)
    }

    /// Reads the code of the file, to plan patches of the entries and instructions of some of its functions.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn entry_planner(&self, wanted: &[CodeRange]) -> Result<EntryPlanner<'static>> {
        EntryPlanner::read(&self.elf, &self.table, wanted)
    }

    /// Opens the file for source lines.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn source_map(&self) -> Result<SourceMap> {
        SourceMap::of(&self.elf)
    }
}

impl<'f> SelectedFunction<'f> {
    /// The name by which it was asked for, or the first that matches the pattern, or else the first of its names;
    /// `None` if it has none. It is demangled each time.
    pub fn name(&self) -> Option<FunctionName<'f>> {
        self.function.nth_name(self.name)
    }

    /// Its address in the process; `None` if it is of no process.
    pub fn address(&self) -> Option<LiveAddr> {
        let bias = self.object.bias?;
        Some(bias.live(self.function.address()))
    }
}
