//! [`Functions`]: the functions of a program, in a file or in a process with everything that it has loaded.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address::{LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::functions::{Function, FunctionName, FunctionTable};
use crate::elf::source::SourceMap;
use crate::error::{Error, FunctionError, Result};
use crate::patch_plan::PatchPlanner;
use crate::process::Process;
use crate::process::code_files::{CodeFile, CodeFiles};
use crate::process::object::UnreadableObject;
use crate::select::glob::Glob;
use crate::select::near::near_names;

/// The functions of a program.
///
/// ```no_run
/// use probes_lib::{Functions, Glob};
///
/// let functions = Functions::of_process(4242)?;
/// let globs = ["Http.*".parse::<Glob>().unwrap()];
/// for found in functions.select(&globs)? {
///     println!("{:?} {}", found.address(), found.name().unwrap());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct Functions {
    program: PathBuf,
    objects: Vec<FunctionObject>,
    unreadable: Vec<UnreadableObject>,
}

/// A file with functions, and where it is loaded if it is of a process.
#[derive(Debug)]
pub struct FunctionObject {
    table: Arc<FunctionTable>,
    bias: Option<LoadBias>,
    elf: Arc<ElfFile>,
}

/// A function that was selected.
#[derive(Clone, Copy)]
pub struct SelectedFunction<'f> {
    /// The file that it is in.
    pub object: &'f FunctionObject,
    /// The function.
    pub function: Function<'f>,
    /// The index of the first of its names that matches.
    name: usize,
}

impl Functions {
    /// Reads the functions of the file at `path`.
    ///
    /// # Errors
    ///
    /// See [`FunctionTable::read`].
    pub fn of_file(path: impl AsRef<Path>) -> Result<Functions> {
        let elf = Arc::new(ElfFile::open(path.as_ref())?);
        Ok(Functions {
            program: path.as_ref().to_owned(),
            objects: vec![FunctionObject {
                table: Arc::new(FunctionTable::of(&elf)?),
                bias: None,
                elf,
            }],
            unreadable: Vec::new(),
        })
    }

    /// Reads the functions of a process: of its executable, of each library and plugin that is loaded now, and of the
    /// code that the kernel adds (vDSO). Does not stop it. Code that the program has generated is not known.
    ///
    /// # Errors
    ///
    /// If there is no such process, or it or its executable may not be read.
    pub fn of_process(pid: i32) -> Result<Functions> {
        let process = Process::open(pid)?;
        process.refuse_without_program()?;
        let CodeFiles {
            program,
            files,
            mut unreadable,
        } = CodeFiles::of(&process)?;
        let mut objects: Vec<FunctionObject> = Vec::new();
        let mut known: HashMap<*const ElfFile, Arc<FunctionTable>> = HashMap::new();
        for CodeFile { elf, bias } in files {
            let table = match known.get(&Arc::as_ptr(&elf)) {
                Some(table) => Ok(table.clone()),
                None => FunctionTable::of(&elf).map(Arc::new),
            };
            match table {
                Ok(table) => {
                    known.insert(Arc::as_ptr(&elf), table.clone());
                    let bias = Some(bias);
                    objects.push(FunctionObject { table, bias, elf });
                }
                Err(why) => unreadable.push(UnreadableObject {
                    path: elf.path().to_owned(),
                    why: Arc::new(why),
                }),
            }
        }
        Ok(Functions {
            program,
            objects,
            unreadable,
        })
    }

    /// The path of the program, as the kernel names it.
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

    /// Selects the functions with a name that one of `globs` matches; all of them, also those without a name, if
    /// there are no globs. They are in the order of [`Functions::objects`], then of their addresses.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoMatch`] if one of the globs matches no function.
    pub fn select(&self, globs: &[Glob]) -> Result<Vec<SelectedFunction<'_>>> {
        let mut has_match = vec![false; globs.len()];
        let mut selected = Vec::new();
        for object in &self.objects {
            for function in object.table.functions() {
                let name = if globs.is_empty() {
                    Some(0)
                } else {
                    first_match(function, globs, &mut has_match)
                };
                selected.extend(name.map(|name| SelectedFunction {
                    object,
                    function,
                    name,
                }));
            }
        }
        match has_match.iter().position(|has_match| !has_match) {
            None => Ok(selected),
            Some(index) => Err(self.no_match(&globs[index])),
        }
    }

    /// Returns the function of a process whose code is at this address, and how many bytes behind its beginning that is.
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
        let functions = self.objects.iter().flat_map(|object| {
            let at = object.bias.map(|bias| bias.file(address));
            let function = at.and_then(|at| object.table.function_at(at));
            function.map(|function| SelectedFunction {
                object,
                function,
                name: 0,
            })
        });
        let mut functions = functions.filter_map(|selected| {
            let offset = address.0.checked_sub(selected.address()?.0)?;
            Some((selected, offset))
        });
        functions.next().ok_or_else(|| {
            let kind = FunctionError::NoneAt { address };
            Error::of_file(&self.program, kind)
        })
    }

    fn no_match(&self, glob: &Glob) -> Error {
        let tables = self.objects.iter().map(|object| &object.table);
        let names = tables.flat_map(|table| table.functions().flat_map(|it| it.names()));
        let kind = FunctionError::NoMatch {
            glob: glob.to_string(),
            unreadable: self.unreadable.iter().map(|one| one.path.clone()).collect(),
            near: near_names(names.map(|name| name.text), glob.as_str()),
        };
        Error::of_file(&self.program, kind)
    }
}

/// Returns the index of the first name of the function that a glob matches; notes in `has_match` which globs match a name.
fn first_match(function: Function<'_>, globs: &[Glob], has_match: &mut [bool]) -> Option<usize> {
    let mut first = None;
    for (index, name) in function.names().enumerate() {
        let mut matches = false;
        for (glob, has_match) in globs.iter().zip(&mut *has_match) {
            let is_match = glob.matches(&name.text);
            *has_match |= is_match;
            matches |= is_match;
        }
        if matches && first.is_none() {
            first = Some(index);
        }
    }
    first
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

    pub(crate) fn elf(&self) -> &ElfFile {
        &self.elf
    }

    /// Reads the code of the file, to plan patches of its functions.
    ///
    /// ```no_run
    /// let functions = probes_lib::Functions::of_file("server.exe")?;
    /// let object = &functions.objects()[0];
    /// let planner = object.patch_planner()?;
    /// for function in object.table().functions() {
    ///     if let Err(refusal) = planner.function(function.range()).entry {
    ///         println!("the function at {} {refusal}", function.address());
    ///     }
    /// }
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn patch_planner(&self) -> Result<PatchPlanner> {
        PatchPlanner::read(&self.elf, &self.table)
    }

    /// Opens the file for source lines.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn source_map(&self) -> Result<SourceMap> {
        let own = format!("/proc/self/fd/{}", self.elf.as_raw_fd());
        SourceMap::open(Path::new(&own), self.elf.path())
    }
}

impl<'f> SelectedFunction<'f> {
    /// The first of its names that matches, or of all; `None` if it has no name. It is demangled each time.
    pub fn name(&self) -> Option<FunctionName<'f>> {
        self.function.nth_name(self.name)
    }

    /// Its address in the process; `None` if it is of no process.
    pub fn address(&self) -> Option<LiveAddr> {
        let bias = self.object.bias?;
        Some(bias.live(self.function.address()))
    }
}
