//! [`Image`]: what a process has in memory at one time: its executable and other objects, where they
//! are loaded, and which mappings hold their probes.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::OFlag;

use crate::address::{LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::file_version::FileVersion;
use crate::elf::table::ProbeTable;
use crate::error::{
    Error, ErrorKind, FileError, MemoryError, MemoryPart, Operation, ProbeError, ProcessError,
    Result,
};
use crate::process::Process;
use crate::process::code_fragments::OcamlCode;
use crate::process::denial;
use crate::process::load_bias;
use crate::process::maps::{self, Mapping, read_maps};
use crate::process::object::{FileId, Object, UnreadableObject};
use crate::process::objects::{
    self, Files, KnownFile, OtherObjects, has_no_probes, without_deleted_mark,
};
use crate::process::program::Program;
use crate::process::translator;

const GIGABYTE: u64 = 1 << 30;

/// A program in the memory of a process.
pub(crate) struct Image {
    pub(crate) program: Arc<Program>,
    /// The auxiliary vector, which the kernel passed to the program when it was executed: it has random
    /// addresses, so that no two executions have the same (unless the target runs without ASLR).
    auxv: Vec<u8>,
    executable: FileId,
    files: Arc<Files>,
    /// The lines of the maps for files with code: while they stay the same, so do the objects.
    code_lines: Vec<Vec<u8>>,
    /// Only if this process is our own: the load biases of the objects that its dynamic loader
    /// reports as loaded. An object that the loader is still mapping is not among them.
    loaded: Option<Vec<LoadBias>>,
    /// What the symbols of its objects say of OCaml's code.
    pub(crate) ocaml_code: OcamlCode,
    /// What executes a translation of its code, if anything does.
    translator: Option<&'static str>,
}

impl Image {
    /// Reads the objects of `process` and finds where they are loaded. Files that `files` knows are
    /// not read again.
    ///
    /// # Errors
    ///
    /// If none has probes, or they have no effect, or the executable cannot be read.
    pub(crate) fn of(process: &Process, files: Arc<Files>) -> Result<Image> {
        match Image::read(process, files)? {
            (_, Some(error)) => Err(error),
            (image, None) => Ok(image),
        }
    }

    /// The same for the current process. If it runs bytecode, it switches its probes without effect, so that a
    /// program can be built as bytecode and as native code.
    ///
    /// # Errors
    ///
    /// See [`Image::of`].
    pub(crate) fn of_own(process: &Process, files: Arc<Files>) -> Result<Image> {
        match Image::read(process, files)? {
            (image, Some(error)) if is_bytecode(&error) && !image.program.objects().is_empty() => {
                Ok(image)
            }
            (_, Some(error)) => Err(error),
            (image, None) => Ok(image),
        }
    }

    /// The same for a process that may have no probes yet, or whose probes may have no effect.
    ///
    /// # Errors
    ///
    /// If the executable cannot be read.
    pub(crate) fn even_without_probes(process: &Process, files: Arc<Files>) -> Result<Image> {
        Ok(Image::read(process, files)?.0)
    }

    /// Returns the image of a process that this one has forked: files that are known are not read again.
    ///
    /// # Errors
    ///
    /// If the executable cannot be read.
    pub(crate) fn of_child(&self, child: &Process) -> Result<Image> {
        Image::even_without_probes(child, self.files.clone())
    }

    /// Refuses a process whose code is executed in translation: a change of it has no effect, or sends the translator to
    /// code that it does not know.
    ///
    /// # Errors
    ///
    /// [`ProcessError::Translated`].
    pub(crate) fn refuse_translated(&self, process: &Process) -> Result<()> {
        match self.translator {
            Some(translator) => Err(error_translated(process, translator)),
            None => Ok(()),
        }
    }

    /// Returns the image, and the error to report if it has no probes, or they have no effect.
    fn read(process: &Process, files: Arc<Files>) -> Result<(Image, Option<Error>)> {
        let denied = |source: io::Error| denial::denied_or_exited(process, Operation::Read, source);
        let auxv = read_auxv(process)?;
        let (name, file) = open_executable(process).map_err(denied)?;
        let metadata = file.metadata().map_err(denied)?;
        let path = without_deleted_mark(name.clone(), metadata.nlink());
        let (known, no_probes) = read_executable(file, &metadata, &path, &files)?;
        let maps = read_maps(process)?;
        // If the process has executed a new program meanwhile, the executable and the maps are
        // those of two different programs.
        if read_auxv(process)? != auxv {
            return Err(Error::of_process(process.pid(), ProcessError::Executed));
        }
        let executable = id_of_executable(&name, metadata.ino(), &maps);
        let OtherObjects {
            objects: others,
            unreadable,
        } = objects::others(process, &maps, executable, &files);
        let interprets_bytecode = match &known {
            Some((elf, _)) => elf.interprets_bytecode(),
            // Without any probes, it makes no difference.
            None if others.is_empty() => false,
            // Only other objects have probes: the executable is read again, which is rare.
            None => open_executable(process)
                .ok()
                .and_then(|(path, file)| ElfFile::read(file, path).ok())
                .is_some_and(|elf| elf.interprets_bytecode()),
        };
        let mut objects = Vec::with_capacity(1 + others.len());
        if let Some((elf, table)) = known {
            objects.push(Object {
                bias: bias_of_executable(process, &elf, executable, &auxv, &maps)?,
                table,
                elf,
                file: executable,
            });
        }
        objects.extend(others);
        let translator = translator::translator(&path, &maps);
        let program = Program::of(path, objects);
        let (program, error) = if let Some(translator) = translator {
            (program, Some(error_translated(process, translator)))
        } else if interprets_bytecode {
            let error = Error::of_process(process.pid(), ProcessError::Bytecode);
            (program, Some(error))
        } else if program.objects().is_empty() {
            (program, Some(error_without_probes(unreadable, no_probes)))
        } else {
            (program.with_unreadable(unreadable), None)
        };
        let image = Image {
            program: Arc::new(program),
            auxv,
            executable,
            files,
            code_lines: code_lines(&maps),
            loaded: None,
            ocaml_code: OcamlCode::default(),
            translator,
        };
        Ok((image, error))
    }

    /// Returns the image as it is now, if objects have been loaded or unloaded since. If `loaded`
    /// gives the load biases of the loaded objects, the image has no other objects.
    pub(crate) fn renewed(
        &self,
        process: &Process,
        maps: &[Mapping],
        loaded: Option<Vec<LoadBias>>,
    ) -> Option<Image> {
        if self.still_matches(maps) && loaded == self.loaded {
            return None;
        }
        let known = self.program.objects();
        let OtherObjects {
            mut objects,
            unreadable,
        } = objects::others(process, maps, self.executable, &self.files);
        if let Some(loaded) = &loaded {
            objects.retain(|object| loaded.contains(&object.bias));
        }
        let of_executable = known.iter().filter(|it| it.file == self.executable);
        let objects = of_executable.cloned().chain(objects).collect();
        let program = Program::of(self.program.path().to_owned(), objects);
        Some(Image {
            program: Arc::new(program.with_unreadable(unreadable)),
            auxv: self.auxv.clone(),
            executable: self.executable,
            files: self.files.clone(),
            code_lines: code_lines(maps),
            loaded,
            ocaml_code: OcamlCode::default(),
            translator: self.translator,
        })
    }

    /// Returns the image with only these of its objects.
    pub(crate) fn only(&self, objects: Vec<Object>) -> Image {
        Image {
            program: Arc::new(Program::of(self.program.path().to_owned(), objects)),
            auxv: self.auxv.clone(),
            executable: self.executable,
            files: self.files.clone(),
            code_lines: self.code_lines.clone(),
            loaded: self.loaded.clone(),
            ocaml_code: OcamlCode::default(),
            translator: self.translator,
        }
    }

    /// Returns whether the same objects are still loaded at the same places.
    pub(crate) fn still_matches(&self, maps: &[Mapping]) -> bool {
        code_lines(maps) == self.code_lines
    }

    /// Returns whether the process has executed a new program, or this one again, since.
    pub(crate) fn is_replaced(&self, process: &Process) -> bool {
        let auxv = process.read_of_living_thread("auxv");
        auxv.is_ok_and(|auxv| auxv != self.auxv)
    }

    /// Returns the executable and its load bias if it has no probes, and so is not among the objects.
    /// Reads it at the first call.
    pub(crate) fn executable_without_probes(
        &self,
        process: &Process,
    ) -> Option<(&ElfFile, LoadBias)> {
        let read = || self.read_executable_without_probes(process);
        let executable = self.ocaml_code.executable.get_or_init(read).as_ref();
        executable.map(|(elf, bias)| (elf, *bias))
    }

    fn read_executable_without_probes(&self, process: &Process) -> Option<(ElfFile, LoadBias)> {
        let mut objects = self.program.objects().iter();
        if objects.any(|object| object.file == self.executable) {
            return None;
        }
        let (_, file) = open_executable(process).ok()?;
        let elf = ElfFile::read(file, self.program.path().to_owned()).ok()?;
        let maps = read_maps(process).ok()?;
        let bias = bias_of_executable(process, &elf, self.executable, &self.auxv, &maps).ok()?;
        Some((elf, bias))
    }

    /// Returns the mappings that hold these ranges, every page of which is to be changed.
    /// Unless `gigatext`, mappings on huge pages of 1 GiB are refused.
    ///
    /// # Errors
    ///
    /// If a range is not mapped, is of an object that is not loaded as a whole any more, or is in memory that
    /// must not be changed.
    pub(crate) fn mappings(
        &self,
        process: &Process,
        ranges: impl Iterator<Item = (LiveAddr, u64, MemoryPart)>,
        gigatext: bool,
    ) -> Result<Vec<Mapping>> {
        let maps = read_maps(process)?;
        let mut found: Vec<&Mapping> = Vec::new();
        let mut checked: Vec<&Object> = Vec::new();
        for (address, len, part) in ranges {
            // The object may have been unloaded since, and be loaded again at this moment: the loader first maps
            // the whole file as it is, so that its code looks right, but other bytes are where counters will be.
            let object = self.program.object_at(address);
            if let Some(object) =
                object.filter(|object| !checked.iter().any(|it| it.is_same(object)))
            {
                if !self.is_loaded(object, &maps) {
                    return Err(self.not_mapped(process, address, part));
                }
                checked.push(object);
            }
            // Each page of the range has to be mapped, so the range's mappings have to be adjacent.
            let mut at = address;
            while at.0 < address.0.saturating_add(len) {
                let mapping =
                    maps::find(&maps, at, 1).ok_or_else(|| self.not_mapped(process, at, part))?;
                if mapping.shared {
                    return Err(Error::of_process(
                        process.pid(),
                        MemoryError::Shared { part, address: at },
                    ));
                }
                if found.last() != Some(&mapping) && !found.contains(&mapping) {
                    found.push(mapping);
                }
                at = mapping.end;
            }
        }
        if !gigatext {
            self.refuse_gigatext(process, &found)?;
        }
        Ok(found.into_iter().cloned().collect())
    }

    /// Returns whether the object at this address can be unloaded, so that another one may be
    /// mapped there at any time. True also if no known object is there.
    pub(crate) fn can_be_unloaded(&self, address: LiveAddr) -> bool {
        let object = self.program.object_at(address);
        object.is_none_or(|object| self.program.can_unload(object))
    }

    /// Returns the error for an address that is not mapped, or no longer as in this image.
    pub(crate) fn not_mapped(
        &self,
        process: &Process,
        address: LiveAddr,
        part: MemoryPart,
    ) -> Error {
        let object = self.path_at(address);
        let kind = MemoryError::NotMapped {
            part,
            object,
            address,
        };
        Error::of_process(process.pid(), kind)
    }

    /// Returns whether an object of this image is loaded as a whole in these maps. The executable always is.
    fn is_loaded(&self, object: &Object, maps: &[Mapping]) -> bool {
        let segments = object.table.segments();
        object.file == self.executable
            || load_bias::is_loaded(segments, object.bias, maps, |it| object.is_mapped_by(it))
    }

    fn path_at(&self, address: LiveAddr) -> PathBuf {
        let object = self.program.object_at(address);
        object.map_or(self.program.path(), Object::path).to_owned()
    }

    /// Checks that these mappings are not on huge pages of 1 GiB. Only code that is not mapped from
    /// its file can be on them: some programs move their text to such pages. To tell the page size
    /// of a mapping, the kernel walks all its pages, so no other mapping is checked.
    fn refuse_gigatext(&self, process: &Process, mappings: &[&Mapping]) -> Result<()> {
        let objects = self.program.objects();
        let of_file = |mapping: &Mapping| objects.iter().any(|object| object.is_mapped_by(mapping));
        let moved = |mapping: &&&Mapping| mapping.executable && !of_file(mapping);
        let mut moved = mappings.iter().filter(moved).peekable();
        if moved.peek().is_none() {
            return Ok(());
        }
        let smaps = process
            .read_of_living_thread("smaps")
            .map_err(|source| process.exited_or(source))?;
        let mut sizes = moved.filter_map(|mapping| maps::page_size(&smaps, mapping.start));
        if sizes.any(|size| size >= GIGABYTE) {
            let pid = process.pid();
            return Err(Error::of_process(pid, MemoryError::GigaText));
        }
        Ok(())
    }
}

/// Returns whether an error says that a process runs bytecode.
pub(crate) fn is_bytecode(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Process(ProcessError::Bytecode))
}

/// Reads the auxiliary vector.
///
/// # Errors
///
/// If the process is in the middle of an execve: the vector is empty then, and nothing mapped yet.
pub(super) fn read_auxv(process: &Process) -> Result<Vec<u8>> {
    let auxv = process
        .read_of_living_thread("auxv")
        .map_err(|source| denial::denied_or_exited(process, Operation::Read, source))?;
    if load_bias::auxv_value(&auxv, load_bias::AT_ENTRY).is_none() {
        return Err(Error::of_process(process.pid(), ProcessError::Executed));
    }
    Ok(auxv)
}

/// Opens the executable; returns its path as the kernel names it, too.
pub(crate) fn open_executable(process: &Process) -> io::Result<(PathBuf, File)> {
    process.with_thread_directory(|directory| {
        let exe = format!("{directory}/exe");
        let path = process.read_link(&exe)?;
        Ok(Some((path, process.open_file(&exe, OFlag::O_RDONLY)?)))
    })
}

/// Reads the probes of the executable, unless `files` knows them. Also returns the error to report
/// if no object has probes.
fn read_executable(
    file: File,
    metadata: &Metadata,
    path: &Path,
    files: &Files,
) -> Result<(Option<KnownFile>, Error)> {
    let mut no_probes = Error::of_file(
        path,
        ProbeError::NoProbes {
            build_id: None,
            runs_bytecode: false,
            unreadable: Vec::new(),
        },
    );
    let version = Some(FileVersion::of(metadata));
    let known = files.get((metadata.dev(), metadata.ino()), version, || {
        let elf = ElfFile::read(file, path.to_owned())?;
        match ProbeTable::of(&elf) {
            Ok(table) => Ok(Some((Arc::new(elf), Arc::new(table)))),
            Err(error) if has_no_probes(error.kind()) => {
                no_probes = error;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    })?;
    Ok((known, no_probes))
}

/// Returns what identifies the mappings of the executable. Its inode number alone does not: a file
/// on another device may have the same.
pub(super) fn id_of_executable(name: &Path, inode: u64, maps: &[Mapping]) -> FileId {
    let is_it = |mapping: &&Mapping| {
        mapping.inode == inode && mapping.path() == name.as_os_str().as_encoded_bytes()
    };
    FileId {
        device: maps.iter().find(is_it).map(|mapping| mapping.device),
        inode,
    }
}

fn error_translated(process: &Process, translator: &'static str) -> Error {
    Error::of_process(process.pid(), ProcessError::Translated { translator })
}

/// Returns the error for a process in which no probe was found, in view of the files that could not be
/// read.
fn error_without_probes(mut unreadable: Vec<UnreadableObject>, mut no_probes: Error) -> Error {
    // That a file has notes that cannot be used, or could not be read this time, says more than "no probes".
    let position = unreadable.iter().position(|one| {
        let is_damaged = matches!(
            one.why.kind(),
            ErrorKind::File(
                FileError::MalformedNote(_)
                    | FileError::WrongNote { .. }
                    | FileError::UnknownLayout { .. }
            )
        );
        is_damaged || one.why.is_failed_call()
    });
    let found = position.map(|index| unreadable.swap_remove(index));
    if let Some(why) = found.and_then(|one| Arc::into_inner(one.why)) {
        return why;
    }
    if let ErrorKind::Probe(ProbeError::NoProbes {
        unreadable: files, ..
    }) = no_probes.kind_mut()
    {
        files.extend(unreadable.into_iter().map(|one| one.path));
    }
    no_probes
}

/// Returns the load bias of the executable of a process, which is this `file`.
///
/// # Errors
///
/// [`MemoryError::UnknownLoadBias`].
pub(crate) fn bias_of_executable(
    process: &Process,
    elf: &ElfFile,
    file: FileId,
    auxv: &[u8],
    maps: &[Mapping],
) -> Result<LoadBias> {
    let segments: Vec<_> = elf.loaded().collect();
    let is_file = |mapping: &Mapping| file.is_of(mapping);
    let (linking, entry) = (elf.linking(), elf.entry());
    let bias = load_bias::of_executable(linking, entry, &segments, auxv, maps, is_file);
    bias.ok_or_else(|| {
        let object = elf.path().to_owned();
        Error::of_process(process.pid(), MemoryError::UnknownLoadBias { object })
    })
}

/// Returns the lines of `maps` for files with code.
fn code_lines(maps: &[Mapping]) -> Vec<Vec<u8>> {
    let file = |mapping: &Mapping| (mapping.device, mapping.inode);
    let is_code = |mapping: &&Mapping| mapping.executable && mapping.inode != 0;
    let with_code: HashSet<_> = maps.iter().filter(is_code).map(file).collect();
    let of_them = maps.iter().filter(|it| with_code.contains(&file(it)));
    of_them.map(|mapping| mapping.line.clone()).collect()
}
