//! [`UsdtProbes`]: the USDT probes of all providers, in a file or in a process with everything that it has loaded.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::functions::FunctionTable;
use crate::elf::source::SourceMap;
use crate::elf::usdt::{UsdtSite, UsdtSites, usdt_sites};
use crate::error::{Error, FunctionError, Result};
use crate::near::near_names;
use crate::process::code_files::{CodeFile, CodeFiles, CodeKind, EachFile, library_count};
use crate::process::object::UnreadableObject;
use crate::select::glob::Glob;

/// The USDT probes of a program, of all providers: also those of OCaml, under the provider that their notes name.
///
/// ```no_run
/// use probes_lib::UsdtProbes;
///
/// let probes = UsdtProbes::of_process(4242)?;
/// let postgresql = "postgresql".parse().unwrap();
/// for probe in probes.select(Some(&postgresql), &["query__*".parse().unwrap()])? {
///     println!("{}:{}", probe.provider(), probe.name());
///     for site in probe.sites() {
///         println!("  {:?} in {}", site.address(), site.object.path().display());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct UsdtProbes {
    program: PathBuf,
    objects: Vec<UsdtObject>,
    unreadable: Vec<UnreadableObject>,
}

/// A file that may have USDT probes, and where it is loaded if it is of a process.
///
/// [`UsdtSite`] has an example.
#[derive(Debug)]
pub struct UsdtObject {
    found: Arc<UsdtSites>,
    bias: Option<LoadBias>,
    elf: Arc<ElfFile>,
    kind: CodeKind,
}

/// A USDT probe that was selected: all sites of one provider and name.
///
/// [`UsdtProbes`] has an example.
#[derive(Clone, Debug)]
pub struct UsdtProbe<'u> {
    /// At least one.
    sites: Vec<PlacedUsdtSite<'u>>,
}

/// A site of a USDT probe, and the file that it is in.
///
/// [`UsdtProbes`] has an example.
#[derive(Clone, Copy, Debug)]
pub struct PlacedUsdtSite<'u> {
    /// The file that it is in.
    pub object: &'u UsdtObject,
    /// What the note in the file says. Its addresses are those in the file.
    pub site: &'u UsdtSite,
}

impl UsdtProbes {
    /// Reads the probes of the file at `path`.
    ///
    /// # Errors
    ///
    /// If it cannot be read, is not an ELF file or has no section headers, or one of its notes is malformed.
    pub fn of_file(path: impl AsRef<Path>) -> Result<UsdtProbes> {
        let elf = Arc::new(ElfFile::open(path.as_ref())?);
        Ok(UsdtProbes {
            program: path.as_ref().to_owned(),
            objects: vec![UsdtObject {
                found: Arc::new(all_sites(&elf)?),
                bias: None,
                elf,
                kind: CodeKind::Executable,
            }],
            unreadable: Vec::new(),
        })
    }

    /// Reads the probes of a process: of its executable, and of each library and plugin that is loaded now. Does not
    /// stop it. A file without section headers or with malformed notes is one of [`UsdtProbes::unreadable`].
    ///
    /// # Errors
    ///
    /// If there is no such process, or it or its executable may not be read.
    pub fn of_process(pid: i32) -> Result<UsdtProbes> {
        let EachFile {
            program,
            files,
            unreadable,
            ..
        } = CodeFiles::of_pid(pid)?.each(all_sites);
        // The code of the kernel (vDSO) has no notes of probes.
        let files = files.into_iter();
        let files = files.filter(|(file, _)| file.kind != CodeKind::Kernel);
        let objects = files.map(|(CodeFile { elf, bias, kind }, found)| UsdtObject {
            found,
            bias: Some(bias),
            elf,
            kind,
        });
        Ok(UsdtProbes {
            program,
            objects: objects.collect(),
            unreadable,
        })
    }

    /// The path of the program, as the kernel names it.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The files that could be read: that of the program, and in a process the others by their addresses.
    pub fn objects(&self) -> &[UsdtObject] {
        &self.objects
    }

    /// The files that are mapped with code in them, and whose probes could not be read.
    pub fn unreadable(&self) -> &[UnreadableObject] {
        &self.unreadable
    }

    /// Selects the probes whose provider matches `provider`, if it is given, and whose name matches one of `names`, if
    /// there are any. They are sorted by `PROVIDER:NAME`, and their sites by object and address.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoUsdt`] if no probe is of such a provider, or one of `names` matches none of these probes.
    pub fn select(&self, provider: Option<&Glob>, names: &[Glob]) -> Result<Vec<UsdtProbe<'_>>> {
        let all = self.all();
        let of_provider = |probe: &&UsdtProbe<'_>| {
            provider.is_none_or(|provider| provider.matches(probe.provider()))
        };
        let probes: Vec<&UsdtProbe<'_>> = all.iter().filter(of_provider).collect();
        if probes.is_empty() {
            let providers = all.iter().map(|probe| format!("{}:*", probe.provider()));
            let glob = provider.map_or("*", Glob::as_str);
            return Err(self.no_match(format!("{glob}:*"), &providers.collect()));
        }
        let mut has_match = vec![false; names.len()];
        let mut selected = Vec::new();
        for probe in &probes {
            let mut is_selected = names.is_empty();
            for (glob, has_match) in names.iter().zip(&mut has_match) {
                if glob.matches(probe.name()) {
                    *has_match = true;
                    is_selected = true;
                }
            }
            selected.extend(is_selected.then(|| (*probe).clone()));
        }
        if let Some(index) = has_match.iter().position(|has_match| !has_match) {
            let name = names[index].as_str();
            let (glob, near) = match provider {
                Some(provider) => {
                    let names = probes.iter().map(|probe| probe.sites[0].site.probe());
                    (format!("{provider}:{name}"), names.collect())
                }
                None => {
                    let names = probes.iter().map(|probe| probe.name().to_owned());
                    (name.to_owned(), names.collect())
                }
            };
            return Err(self.no_match(glob, &near));
        }
        Ok(selected)
    }

    /// Returns all probes, in order.
    fn all(&self) -> Vec<UsdtProbe<'_>> {
        let mut sites: Vec<(usize, PlacedUsdtSite<'_>)> = Vec::new();
        for (index, object) in self.objects.iter().enumerate() {
            let placed = |site| (index, PlacedUsdtSite { object, site });
            sites.extend(object.found.sites.iter().map(placed));
        }
        sites.sort_by(|(index, one), (other_index, other)| {
            let by_name = by_name(one.site, other.site);
            by_name
                .then(index.cmp(other_index))
                .then(one.site.address.cmp(&other.site.address))
                .then(one.site.semaphore.cmp(&other.site.semaphore))
                .then_with(|| one.site.arguments.cmp(&other.site.arguments))
        });
        // A linker that folds equal functions leaves two notes of one site.
        sites.dedup_by(|(one_index, one), (index, other)| {
            one_index == index && one.site == other.site
        });
        let probes = sites.chunk_by(|(_, one), (_, other)| is_same_probe(one.site, other.site));
        let probes = probes.map(|sites| UsdtProbe {
            sites: sites.iter().map(|(_, site)| *site).collect(),
        });
        probes.collect()
    }

    fn no_match(&self, glob: String, names: &BTreeSet<String>) -> Error {
        let kind = FunctionError::NoUsdt {
            near: near_names(names, &glob),
            libraries: library_count(self.objects.iter().map(|object| object.kind)),
            is_ocamls: false,
            unreadable: self.unreadable.iter().map(|one| one.path.clone()).collect(),
            glob,
        };
        Error::of_file(&self.program, kind)
    }
}

fn all_sites(elf: &ElfFile) -> Result<UsdtSites> {
    usdt_sites(elf, |_| true)
}

fn is_same_probe(one: &UsdtSite, other: &UsdtSite) -> bool {
    (&one.provider, &one.name) == (&other.provider, &other.name)
}

/// Compares `PROVIDER:NAME` of two sites.
fn by_name(one: &UsdtSite, other: &UsdtSite) -> Ordering {
    if one.provider == other.provider {
        return one.name.cmp(&other.name);
    }
    fn text(site: &UsdtSite) -> impl Iterator<Item = u8> {
        let UsdtSite { provider, name, .. } = site;
        provider.bytes().chain([b':']).chain(name.bytes())
    }
    // The texts of two providers may be equal, because a provider may contain a colon.
    text(one)
        .cmp(text(other))
        .then(one.provider.cmp(&other.provider))
}

impl UsdtObject {
    /// The file, as it was given or as the kernel names it.
    pub fn path(&self) -> &Path {
        self.elf.path()
    }

    /// What is added to an address in the file to get the address in the process; `None` if it is of no process.
    pub fn load_bias(&self) -> Option<LoadBias> {
        self.bias
    }

    /// Its sites of all providers, in the order of the notes.
    pub fn sites(&self) -> &[UsdtSite] {
        &self.found.sites
    }

    /// How many of its notes are left out, because their addresses are outside of the file's segments, or their names
    /// cannot be printed.
    pub fn left_out(&self) -> usize {
        self.found.left_out
    }

    /// Reads the functions of the file, to find those that the sites are in.
    ///
    /// # Errors
    ///
    /// See [`FunctionTable::read`].
    pub fn functions(&self) -> Result<FunctionTable> {
        FunctionTable::of(&self.elf)
    }

    /// Opens the file for source lines.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn source_map(&self) -> Result<SourceMap> {
        SourceMap::of(&self.elf)
    }

    /// Returns where an address of the file is in the process; `None` if the file was not read from a process.
    pub fn live(&self, address: FileAddr) -> Option<LiveAddr> {
        self.bias.map(|bias| bias.live(address))
    }
}

impl<'u> UsdtProbe<'u> {
    /// Its provider: `postgresql`.
    pub fn provider(&self) -> &'u str {
        &self.sites[0].site.provider
    }

    /// Its name: `query__start`.
    pub fn name(&self) -> &'u str {
        &self.sites[0].site.name
    }

    /// Its sites, by object and address; at least one. One without an address has only a semaphore.
    pub fn sites(&self) -> &[PlacedUsdtSite<'u>] {
        &self.sites
    }
}

impl PlacedUsdtSite<'_> {
    /// The address of the site in the process; `None` if it is of no process, or if its note has only a semaphore.
    pub fn address(&self) -> Option<LiveAddr> {
        self.object.live(self.site.address?)
    }
}
