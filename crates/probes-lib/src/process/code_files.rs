//! [`CodeFiles`]: the files whose code is in the memory of a process, with or without probes, and the code that
//! the kernel adds (vDSO).

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::address::{LiveAddr, LoadBias};
use crate::elf::table::NOTE_SECTION;
use crate::elf::{ElfFile, Segment};
use crate::error::{Error, Operation, ProcessError, Result};
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::denial;
use crate::process::image::{bias_of_executable, id_of_executable, open_executable, read_auxv};
use crate::process::load_bias;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::object::{FileId, UnreadableObject};
use crate::process::objects::{code_file, unreadable, without_deleted_mark};

/// How much of the vDSO is read at most, in bytes. That of x86-64 has 2 pages, with some debugging options 4.
const MAX_VDSO: u64 = 64 << 10;

/// How many times the files are read if the loader seems to be mapping one. If that does not change, there is another
/// reason: the file was written over, or the program has mapped it itself.
const ATTEMPTS: usize = 3;

/// How long the loader takes to map the parts of a file, at most as a rule.
const MAPPING_TIME: Duration = Duration::from_millis(1);

/// How many second mappings of code are looked for at most.
const MAX_COPIES: usize = 64;

/// What the kernel calls the vDSO in the maps.
const VDSO: &str = "[vdso]";

/// The files whose code is in the memory of a process.
pub(crate) struct CodeFiles {
    /// The path of the executable.
    pub(crate) program: PathBuf,
    /// The executable first, then the others in the order of the first mappings of their code. A file that is loaded
    /// several times is there as often, in a row.
    pub(crate) files: Vec<CodeFile>,
    pub(crate) copies: Vec<CodeCopy>,
    pub(crate) unreadable: Vec<UnreadableObject>,
    pub(crate) mapped: MappedCode,
}

/// Code of a file that the process has mapped once more, where no loader does: V8 (node, Chrome) does so with its own.
#[derive(Debug)]
pub(crate) struct CodeCopy {
    /// The path of the file.
    pub(crate) path: PathBuf,
    /// That of the code, as if all of the file were there.
    pub(crate) bias: LoadBias,
    /// Where it is mapped.
    pub(crate) range: Range<LiveAddr>,
}

/// Where files are mapped with code: device, inode, and the address that the file's first byte has or would have.
#[derive(Clone, Debug, Default)]
pub(crate) struct MappedCode(HashSet<((u32, u32), u64, u64)>);

impl MappedCode {
    /// Adds a mapping if it is of the code of a file; returns whether it was added, at a place that was not known.
    pub(crate) fn insert(&mut self, mapping: &Mapping) -> bool {
        let place = mapping.start.0.wrapping_sub(mapping.offset);
        let is_code = mapping.executable && mapping.inode != 0;
        is_code && self.0.insert((mapping.device, mapping.inode, place))
    }

    /// Returns whether all of these are among `others`.
    pub(crate) fn is_within(&self, others: &MappedCode) -> bool {
        self.0.is_subset(&others.0)
    }
}

/// A file with code, and where it is loaded.
pub(crate) struct CodeFile {
    pub(crate) elf: Arc<ElfFile>,
    pub(crate) bias: LoadBias,
    pub(crate) kind: CodeKind,
}

/// What a file with code is in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeKind {
    /// The executable, or a file that is looked at by itself.
    Executable,
    /// A library or plugin.
    Library,
    /// The code that the kernel adds (vDSO).
    Kernel,
}

/// Returns how many libraries and plugins there are among files of these kinds.
pub(crate) fn library_count(kinds: impl Iterator<Item = CodeKind>) -> usize {
    kinds.filter(|kind| *kind == CodeKind::Library).count()
}

/// The files of a process, each with what was read of it.
pub(crate) struct EachFile<T> {
    pub(crate) program: PathBuf,
    /// In the order of [`CodeFiles::files`]. A file that is loaded more than once shares what was read of it.
    pub(crate) files: Vec<(CodeFile, Arc<T>)>,
    pub(crate) copies: Vec<CodeCopy>,
    pub(crate) unreadable: Vec<UnreadableObject>,
    pub(crate) mapped: MappedCode,
}

impl CodeFiles {
    /// Same as [`CodeFiles::of`], of the process with this pid.
    ///
    /// # Errors
    ///
    /// Those of [`CodeFiles::of`], and if there is no such process, or it has no program.
    pub(crate) fn of_pid(pid: i32) -> Result<CodeFiles> {
        let process = Process::open(pid)?;
        process.refuse_without_program()?;
        CodeFiles::of(&process)
    }

    /// Calls `read` with each file once, even if it is loaded several times. If that fails, the file is among the
    /// unreadable ones, once.
    pub(crate) fn each<T>(self, read: impl Fn(&ElfFile) -> Result<T>) -> EachFile<T> {
        let mut unreadable = self.unreadable;
        let mut files = Vec::new();
        let mut known: HashMap<*const ElfFile, Option<Arc<T>>> = HashMap::new();
        for file in self.files {
            let found = known.entry(Arc::as_ptr(&file.elf)).or_insert_with(|| {
                let found = read(&file.elf).map_err(|why| {
                    unreadable.push(UnreadableObject {
                        path: file.elf.path().to_owned(),
                        why: Arc::new(why),
                        may_have_usdt_probes: file.elf.has_section(NOTE_SECTION),
                    });
                });
                found.ok().map(Arc::new)
            });
            if let Some(found) = found.clone() {
                files.push((file, found));
            }
        }
        EachFile {
            program: self.program,
            files,
            copies: self.copies,
            unreadable,
            mapped: self.mapped,
        }
    }

    /// Reads the headers of the files.
    ///
    /// # Errors
    ///
    /// If the executable cannot be read, or the process executes another program meanwhile.
    pub(crate) fn of(process: &Process) -> Result<CodeFiles> {
        for _ in 1..ATTEMPTS {
            let (files, is_complete) = CodeFiles::at_once(process)?;
            if is_complete {
                return Ok(files);
            }
            thread::sleep(MAPPING_TIME);
        }
        Ok(CodeFiles::at_once(process)?.0)
    }

    /// Returns also whether each file is where one of its mappings says, as it is once the loader has mapped all of it.
    fn at_once(process: &Process) -> Result<(CodeFiles, bool)> {
        let denied = |source: io::Error| denial::denied_or_exited(process, Operation::Read, source);
        let auxv = read_auxv(process)?;
        let (name, file) = open_executable(process).map_err(denied)?;
        let metadata = file.metadata().map_err(denied)?;
        let path = without_deleted_mark(name.clone(), metadata.nlink());
        let elf = ElfFile::read(file, path.clone())?;
        let maps = read_maps(process)?;
        if read_auxv(process)? != auxv {
            return Err(Error::of_process(process.pid(), ProcessError::Executed));
        }
        let executable = id_of_executable(&name, metadata.ino(), &maps);
        let bias = bias_of_executable(process, &elf, executable, &auxv, &maps)?;
        let mut files = CodeFiles {
            program: path,
            files: vec![CodeFile {
                elf: Arc::new(elf),
                bias,
                kind: CodeKind::Executable,
            }],
            copies: Vec::new(),
            unreadable: Vec::new(),
            mapped: MappedCode::default(),
        };
        let mut read = vec![(executable, 0)];
        let mut seen = HashSet::from([executable]);
        let mut is_complete = true;
        for mapping in maps.iter().filter(|mapping| mapping.executable) {
            files.mapped.insert(mapping);
            let file = FileId {
                device: Some(mapping.device),
                inode: mapping.inode,
            };
            if mapping.path() == VDSO.as_bytes() {
                // Unlike all else here, reading its memory takes the permission to trace the process.
                let vdso = vdso(process, mapping).unwrap_or_else(|source| Err(denied(source)));
                let bias = |elf: &ElfFile| load_bias::of_mapping(&segments(elf), mapping);
                files.add(vdso, |elf| bias(elf).into_iter().collect(), mapping);
            } else if mapping.inode != 0 && !executable.is_of(mapping) && seen.insert(file) {
                let biases = |elf: &ElfFile| {
                    load_bias::of_object(&segments(elf), &maps, |it| file.is_of(it)).collect()
                };
                let first = files.files.len();
                is_complete &= files.add(code_file(process, &maps, mapping), biases, mapping);
                if files.files.len() > first {
                    read.push((file, first));
                }
            }
        }
        for mapping in maps.iter().filter(|it| it.executable && it.inode != 0) {
            let of_file = read.iter().find(|(file, _)| file.is_of(mapping));
            if let Some((_, first)) = of_file {
                files.add_copy(*first, mapping);
            }
        }
        Ok((files, is_complete))
    }

    /// Adds a mapping of code of the file whose first place is `first`, if it is at none of its places, and there are not
    /// many of these already.
    fn add_copy(&mut self, first: usize, mapping: &Mapping) {
        if self.copies.len() >= MAX_COPIES {
            return;
        }
        let Some(CodeFile { elf, .. }) = self.files.get(first) else {
            return;
        };
        let Some(bias) = load_bias::of_code(&segments(elf), mapping) else {
            return;
        };
        let mut places = self.files.iter().filter(|it| Arc::ptr_eq(&it.elf, elf));
        if !places.any(|it| it.bias == bias) {
            self.copies.push(CodeCopy {
                path: elf.path().to_owned(),
                bias,
                range: mapping.start..mapping.end,
            });
        }
    }

    /// Adds the file of a mapping for each of its biases. Returns false if it has none: the loader may still be mapping it.
    fn add(
        &mut self,
        read: Result<Option<ElfFile>>,
        biases: impl FnOnce(&ElfFile) -> Vec<LoadBias>,
        mapping: &Mapping,
    ) -> bool {
        match read {
            Ok(Some(elf)) => {
                let elf = Arc::new(elf);
                let kind = match mapping.inode {
                    0 => CodeKind::Kernel,
                    _ => CodeKind::Library,
                };
                let file = |bias| CodeFile {
                    elf: elf.clone(),
                    bias,
                    kind,
                };
                let biases = biases(&elf);
                let has_biases = !biases.is_empty();
                self.files.extend(biases.into_iter().map(file));
                has_biases
            }
            Ok(None) => true,
            Err(why) => {
                self.unreadable.push(unreadable(mapping, why));
                true
            }
        }
    }
}

fn segments(elf: &ElfFile) -> Vec<Segment> {
    elf.loaded().collect()
}

/// Reads the vDSO, which is an ELF file in memory.
fn vdso(process: &Process, mapping: &Mapping) -> io::Result<Result<Option<ElfFile>>> {
    let len = mapping.end.0.saturating_sub(mapping.start.0).min(MAX_VDSO);
    let mut bytes = vec![0; len as usize];
    ProcessMemory::open(process, OFlag::O_RDONLY)?.read(mapping.start, &mut bytes)?;
    let file = File::from(memfd_create(c"vdso", MFdFlags::MFD_CLOEXEC)?);
    file.write_all_at(&bytes, 0)?;
    Ok(ElfFile::read(file, VDSO.into()).map(Some))
}
