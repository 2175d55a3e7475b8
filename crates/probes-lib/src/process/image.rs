//! [`Image`]: what a process has in memory at a time: its executable and other objects, where they
//! are loaded, and which mappings hold their probes.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use nix::fcntl::OFlag;

use crate::address::{LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::table::ProbeTable;
use crate::error::{
    ElfDefect, Error, ErrorKind, FileError, MemoryError, MemoryPart, Operation, ProbeError,
    ProcessError, Result,
};
use crate::process::Process;
use crate::process::denial;
use crate::process::load_bias;
use crate::process::maps::{self, Mapping, read_maps};
use crate::process::object::{FileId, Object, UnreadableObject};
use crate::process::objects::{self, Files, OtherObjects, without_deleted_mark};
use crate::process::program::Program;

const GIGABYTE: u64 = 1 << 30;

/// A program in the memory of a process.
pub(crate) struct Image {
    pub(crate) program: Arc<Program>,
    /// What the kernel told the program when it was executed: addresses at random among it, so that
    /// no other execution is told the same.
    auxv: Vec<u8>,
    executable: FileId,
    files: Arc<Files>,
    /// How files with code were mapped: as long as it stays the same, so do the objects.
    code: Vec<Vec<u8>>,
    /// Where the loader had objects, if it was asked: in between, it maps them piece by piece.
    loaded: Option<Vec<LoadBias>>,
}

impl Image {
    /// Reads the objects of `process`, but for those that `files` knows, and finds where they are
    /// loaded.
    ///
    /// # Errors
    ///
    /// If none has probes, or the executable cannot be read.
    pub(crate) fn of(process: &Process, files: Arc<Files>) -> Result<Image> {
        match Image::look(process, files)? {
            (_, Some(error)) => Err(error),
            (image, None) => Ok(image),
        }
    }

    /// As `of`, of a process that may have no probes yet.
    pub(crate) fn even_without(process: &Process, files: Arc<Files>) -> Result<Image> {
        Ok(Image::look(process, files)?.0)
    }

    /// The image, and what is wrong if it has no probes.
    fn look(process: &Process, files: Arc<Files>) -> Result<(Image, Option<Error>)> {
        let denied = |source: io::Error| denial::denied_or_exited(process, Operation::Read, source);
        let auxv = process.read_program("auxv").map_err(denied)?;
        // In the midst of an exec it is empty, and the new program not mapped yet.
        if load_bias::auxv_value(&auxv, load_bias::AT_ENTRY).is_none() {
            let pid = process.pid();
            return Err(Error::of_process(pid, ProcessError::Executed));
        }
        let exe = process.with_thread_folder(|folder| {
            let exe = format!("{folder}/exe");
            let path = process.read_link(&exe)?;
            Ok(Some((path, process.open_file(&exe, OFlag::O_RDONLY)?)))
        });
        let (path, file) = exe.map_err(denied)?;
        let metadata = file.metadata().map_err(denied)?;
        let name = path.clone();
        let path = without_deleted_mark(path, metadata.nlink());
        // OtherObjects may have some even if it has none.
        let mut has_none = Error::of_file(
            &path,
            ProbeError::NoProbes {
                build_id: None,
                unreadable: Vec::new(),
            },
        );
        let known = files.get((metadata.dev(), metadata.ino()), || {
            let elf = ElfFile::read(file, path.clone())?;
            match ProbeTable::of(&elf) {
                Ok(table) => Ok(Some((Arc::new(elf), Arc::new(table)))),
                Err(error) if says_none(error.kind()) => {
                    has_none = error;
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        })?;
        let maps = read_maps(process)?;
        // What was read in between is of one program only if this is so.
        if process.read_program("auxv").map_err(denied)? != auxv {
            let pid = process.pid();
            return Err(Error::of_process(pid, ProcessError::Executed));
        }
        let inode = metadata.ino();
        // The same inode may be another file's on another device.
        let named = |mapping: &&Mapping| {
            mapping.inode == inode && mapping.path() == name.as_os_str().as_encoded_bytes()
        };
        let executable = FileId {
            device: maps.iter().find(named).map(|mapping| mapping.device),
            inode,
        };
        let OtherObjects {
            objects: others,
            unreadable,
        } = objects::others(process, &maps, executable, &files);
        let mut objects = Vec::with_capacity(1 + others.len());
        if let Some((elf, table)) = known {
            objects.push(Object {
                bias: bias_of_executable(process, &table, executable, &auxv, &maps)?,
                table,
                elf,
                file: executable,
            });
        }
        objects.extend(others);
        let program = Program::of(path, objects);
        let (program, none) = match program.objects().is_empty() {
            true => (program, Some(none_but(unreadable, has_none))),
            false => (program.beside(unreadable), None),
        };
        let image = Image {
            program: Arc::new(program),
            auxv,
            executable,
            files,
            code: code(&maps),
            loaded: None,
        };
        Ok((image, none))
    }

    /// The image as it is now, if objects have been loaded or unloaded since. Where it is known which
    /// are `loaded`, it has no others.
    pub(crate) fn renewed(
        &self,
        process: &Process,
        maps: &[Mapping],
        loaded: Option<Vec<LoadBias>>,
    ) -> Option<Image> {
        if self.is_as_in(maps) && loaded == self.loaded {
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
            program: Arc::new(program.beside(unreadable)),
            auxv: self.auxv.clone(),
            executable: self.executable,
            files: self.files.clone(),
            code: code(maps),
            loaded,
        })
    }

    /// The same as far as some of the objects go.
    pub(crate) fn only(&self, objects: Vec<Object>) -> Image {
        Image {
            program: Arc::new(Program::of(self.program.path().to_owned(), objects)),
            auxv: self.auxv.clone(),
            executable: self.executable,
            files: self.files.clone(),
            code: self.code.clone(),
            loaded: self.loaded.clone(),
        }
    }

    /// Whether the objects are still those, where they were.
    pub(crate) fn is_as_in(&self, maps: &[Mapping]) -> bool {
        code(maps) == self.code
    }

    /// Whether the process has executed another program, or this one anew, since.
    pub(crate) fn is_replaced(&self, process: &Process) -> bool {
        let auxv = process.read_program("auxv");
        auxv.is_ok_and(|auxv| auxv != self.auxv)
    }

    /// The mappings that hold these ranges, in each page of which there is something to be changed.
    ///
    /// # Errors
    ///
    /// If something is not mapped, or not in a way in which it could be changed.
    pub(crate) fn mappings(
        &self,
        process: &Process,
        ranges: impl Iterator<Item = (LiveAddr, u64, MemoryPart)>,
        gigatext: bool,
    ) -> Result<Vec<Mapping>> {
        let maps = read_maps(process)?;
        let mut found: Vec<&Mapping> = Vec::new();
        for (address, len, part) in ranges {
            // There is something in each of its pages, so its mappings follow on each other.
            let mut at = address;
            while at.0 < address.0.saturating_add(len) {
                let mapping = maps::find(&maps, at, 1).ok_or_else(|| {
                    Error::of_process(
                        process.pid(),
                        MemoryError::NotMapped {
                            part,
                            object: self.path_at(at),
                            address: at,
                        },
                    )
                })?;
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

    /// Whether there may be something else at this address at any time.
    pub(crate) fn is_unloadable(&self, address: LiveAddr) -> bool {
        let object = self.program.object_at(address);
        object.is_none_or(|object| self.program.can_unload(object))
    }

    fn path_at(&self, address: LiveAddr) -> PathBuf {
        let object = self.program.object_at(address);
        object.map_or(self.program.path(), Object::path).to_owned()
    }

    /// Only memory that is not a file's any more can lie on huge pages of 1 GiB: some programs
    /// move their text there. Telling the size of its pages walks them all, so we ask for no other.
    fn refuse_gigatext(&self, process: &Process, mappings: &[&Mapping]) -> Result<()> {
        let objects = self.program.objects();
        let of_file = |mapping: &Mapping| objects.iter().any(|object| object.is_mapped(mapping));
        let moved = |mapping: &&&Mapping| mapping.executable && !of_file(mapping);
        let mut moved = mappings.iter().filter(moved).peekable();
        if moved.peek().is_none() {
            return Ok(());
        }
        let smaps = process
            .read_program("smaps")
            .map_err(|source| process.exited_or(source))?;
        let mut sizes = moved.filter_map(|mapping| maps::page_size(&smaps, mapping.start));
        if sizes.any(|size| size >= GIGABYTE) {
            let pid = process.pid();
            return Err(Error::of_process(pid, MemoryError::GigaText));
        }
        Ok(())
    }
}

/// Whether the file could be read, and says that it has no probes.
fn says_none(kind: &ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Probe(ProbeError::NoProbes { .. })
            | ErrorKind::File(FileError::Elf(ElfDefect::NoSectionHeaders))
    )
}

/// The error of a process in which no probe was found, beside what could not be looked into.
fn none_but(mut unreadable: Vec<UnreadableObject>, mut has_none: Error) -> Error {
    // Only files that have notes of probes have damaged ones.
    let damaged = unreadable.iter().position(|one| {
        matches!(
            one.why.kind(),
            ErrorKind::File(FileError::MalformedNote(_) | FileError::WrongNote { .. })
        )
    });
    let damaged = damaged.map(|index| unreadable.swap_remove(index));
    if let Some(why) = damaged.and_then(|one| Arc::into_inner(one.why)) {
        return why;
    }
    if let ErrorKind::Probe(ProbeError::NoProbes {
        unreadable: files, ..
    }) = has_none.kind_mut()
    {
        files.extend(unreadable.into_iter().map(|one| one.path));
    }
    has_none
}

fn bias_of_executable(
    process: &Process,
    table: &ProbeTable,
    file: FileId,
    auxv: &[u8],
    maps: &[Mapping],
) -> Result<LoadBias> {
    let bias = load_bias::of_executable(
        table.linking(),
        table.entry(),
        table.segments(),
        auxv,
        maps,
        |mapping| file.is_of(mapping),
    );
    bias.ok_or_else(|| {
        Error::of_process(
            process.pid(),
            MemoryError::UnknownLoadBias {
                object: table.path().to_owned(),
            },
        )
    })
}

/// The lines of `maps` that tell of files with code.
fn code(maps: &[Mapping]) -> Vec<Vec<u8>> {
    let file = |mapping: &Mapping| (mapping.device, mapping.inode);
    let is_code = |mapping: &&Mapping| mapping.executable && mapping.inode != 0;
    let with_code: HashSet<_> = maps.iter().filter(is_code).map(file).collect();
    let of_them = maps.iter().filter(|it| with_code.contains(&file(it)));
    of_them.map(|mapping| mapping.line.clone()).collect()
}
