//! [`Program`]: the probes of all objects of a process under their names, each site and semaphore
//! with an index of its own. Pure.
//!
//! If several objects have probes of one name, they are one probe, all of whose sites and counters are
//! switched together.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address::{LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::table::{Probe, ProbeTable, Site};
use crate::process::object::{FileId, Object, UnreadableObject};

/// Index of a name in its program, in order of names.
pub(crate) type ProbeId = usize;

/// The objects of a process that have probes.
#[derive(Debug)]
pub(crate) struct Program {
    /// The executable.
    path: PathBuf,
    objects: Vec<Object>,
    /// Files that could not be read and may have probes, too.
    unreadable: Vec<UnreadableObject>,
    /// For each name its run of `parts`; sorted by name.
    names: Vec<Range<usize>>,
    /// Index of an object, and of a probe in its table.
    parts: Vec<(usize, usize)>,
    /// Index of the first site of each object; then the number of all sites.
    sites: Vec<usize>,
    /// Index of the first semaphore of each object; then the number of all semaphores.
    semaphores: Vec<usize>,
}

impl Program {
    /// Merges the names of the `objects` of a process that runs the executable `path`.
    pub(crate) fn of(path: PathBuf, objects: Vec<Object>) -> Program {
        let tables = || objects.iter().map(|object| &*object.table);
        let mut parts: Vec<(usize, usize)> = Vec::new();
        for (index, table) in tables().enumerate() {
            parts.extend((0..table.probes().len()).map(|probe| (index, probe)));
        }
        let name = |&(object, probe): &(usize, usize)| objects[object].table.by_index(probe).name();
        if objects.len() > 1 {
            parts.sort_by_key(|part| (name(part), part.0));
        }
        let mut names: Vec<Range<usize>> = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            match names.last_mut() {
                Some(last) if objects.len() > 1 && name(&parts[last.start]) == name(part) => {
                    last.end = index + 1;
                }
                _ => names.push(index..index + 1),
            }
        }
        Program {
            path,
            sites: starts(tables().map(ProbeTable::site_count)),
            semaphores: starts(tables().map(ProbeTable::semaphore_count)),
            objects,
            unreadable: Vec::new(),
            names,
            parts,
        }
    }

    /// Returns the program with the files that could not be read.
    pub(crate) fn with_unreadable(self, unreadable: Vec<UnreadableObject>) -> Program {
        Program { unreadable, ..self }
    }

    pub(crate) fn unreadable(&self) -> &[UnreadableObject] {
        &self.unreadable
    }

    /// The executable, whether it has probes or not.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a program of one object that is not loaded anywhere: to choose among its probes.
    pub(crate) fn alone(elf: ElfFile, table: Arc<ProbeTable>, bias: LoadBias) -> Program {
        let path = table.path().to_owned();
        let object = Object {
            table,
            bias,
            elf: Arc::new(elf),
            file: FileId {
                device: None,
                inode: 0,
            },
        };
        Program::of(path, vec![object])
    }

    /// Returns whether an object may be unloaded at any time: that is assumed of all but the executable.
    pub(crate) fn can_unload(&self, object: &Object) -> bool {
        object.path() != self.path
    }

    pub(crate) fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// All names, in order.
    pub(crate) fn probes(&self) -> impl ExactSizeIterator<Item = MergedProbe<'_>> {
        (0..self.names.len()).map(|id| self.by_id(id))
    }

    /// Returns the probe of that name.
    pub(crate) fn probe(&self, name: &str) -> Option<MergedProbe<'_>> {
        let id = self
            .names
            .binary_search_by(|parts| self.name_of(parts).cmp(name))
            .ok()?;
        Some(self.by_id(id))
    }

    pub(crate) fn by_id(&self, id: ProbeId) -> MergedProbe<'_> {
        MergedProbe { program: self, id }
    }

    fn name_of(&self, parts: &Range<usize>) -> &str {
        let (object, probe) = self.parts[parts.start];
        self.objects[object].table.by_index(probe).name()
    }

    pub(crate) fn site_count(&self) -> usize {
        self.sites.last().copied().unwrap_or(0)
    }

    pub(crate) fn semaphore_count(&self) -> usize {
        self.semaphores.last().copied().unwrap_or(0)
    }

    /// All sites, object by object, by their addresses in the file.
    pub(crate) fn sites_by_address(&self) -> impl Iterator<Item = PlacedSite> {
        let objects = self.objects.iter().zip(&self.sites).enumerate();
        objects.flat_map(|(number, (object, start))| {
            let sites = object.table.sites_by_address();
            sites.map(move |index| PlacedSite {
                address: object.bias.live(object.table.site(index).address()),
                index: (start + index) as u32,
                object: number as u32,
            })
        })
    }

    /// Returns the site with this index.
    pub(crate) fn site(&self, index: usize) -> LiveSite<'_> {
        let number = number_of(&self.sites, index);
        let object = &self.objects[number];
        LiveSite {
            object,
            site: object.table.site(index - self.sites[number]),
        }
    }

    /// Returns the address of the counter with this index.
    pub(crate) fn counter(&self, index: usize) -> LiveAddr {
        let number = number_of(&self.semaphores, index);
        let object = &self.objects[number];
        let semaphore = object.table.semaphore(index - self.semaphores[number]);
        object.bias.live(semaphore.counter())
    }

    /// Returns the object whose segments hold this address of the process.
    pub(crate) fn object_at(&self, address: LiveAddr) -> Option<&Object> {
        self.objects.iter().find(|object| {
            let address = object.bias.file(address);
            let mut segments = object.table.segments().iter();
            segments.any(|segment| segment.holds_in_memory(address, 1))
        })
    }
}

/// Returns running sums: where each run starts, and where the last ends.
fn starts(lens: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut next = 0;
    let mut starts = vec![0];
    starts.extend(lens.map(|len| {
        next += len;
        next
    }));
    starts
}

/// Returns the number of the run that an index is in.
fn number_of(starts: &[usize], index: usize) -> usize {
    match starts {
        [_, _] => 0,
        _ => starts.partition_point(|&start| start <= index) - 1,
    }
}

/// A name of a program, with its sites and semaphores in all objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergedProbe<'p> {
    program: &'p Program,
    id: ProbeId,
}

/// The sites and semaphores of one name in one object.
#[derive(Clone, Debug)]
pub(crate) struct ObjectProbe<'p> {
    pub(crate) object: &'p Object,
    pub(crate) probe: Probe<'p>,
    /// Indices in the program.
    pub(crate) sites: Range<usize>,
    /// Indices in the program.
    pub(crate) semaphores: Range<usize>,
}

/// A site's address, with its indices. Small, as there are many, which are sorted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedSite {
    /// The address of its nop.
    pub(crate) address: LiveAddr,
    index: u32,
    object: u32,
}

impl PlacedSite {
    /// Its index in the program.
    pub(crate) fn index(&self) -> usize {
        self.index as usize
    }

    /// The number of its object.
    pub(crate) fn object(&self) -> usize {
        self.object as usize
    }
}

/// One site in the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveSite<'p> {
    pub(crate) object: &'p Object,
    pub(crate) site: Site<'p>,
}

impl<'p> MergedProbe<'p> {
    pub(crate) fn id(self) -> ProbeId {
        self.id
    }

    pub(crate) fn name(self) -> &'p str {
        self.program.name_of(&self.program.names[self.id])
    }

    /// Returns its sites and semaphores in each object that has it.
    pub(crate) fn parts(self) -> impl Iterator<Item = ObjectProbe<'p>> {
        let program = self.program;
        let parts = program.parts[program.names[self.id].clone()].iter();
        parts.map(move |&(number, probe)| {
            let object = &program.objects[number];
            let probe = object.table.by_index(probe);
            let shifted = |range: Range<usize>, by: usize| range.start + by..range.end + by;
            ObjectProbe {
                object,
                probe,
                sites: shifted(probe.site_range(), program.sites[number]),
                semaphores: shifted(probe.semaphore_range(), program.semaphores[number]),
            }
        })
    }

    /// Indices of its sites.
    pub(crate) fn sites(self) -> impl Iterator<Item = usize> {
        self.parts().flat_map(|part| part.sites)
    }

    /// Indices of its semaphores.
    pub(crate) fn semaphores(self) -> impl Iterator<Item = usize> {
        self.parts().flat_map(|part| part.semaphores)
    }
}

impl LiveSite<'_> {
    /// Returns the address of its nop in the process.
    pub(crate) fn address(&self) -> LiveAddr {
        self.object.bias.live(self.site.address())
    }
}
