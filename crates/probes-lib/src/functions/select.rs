//! Selects functions, and places in functions, by names, patterns, addresses, source lines and USDT probes.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::address::{FileAddr, LiveAddr};
use crate::elf::functions::{Function, FunctionKind};
use crate::elf::lines::LineSearch;
use crate::elf::mangling::demangle;
use crate::elf::usdt::{is_foreign, usdt_sites};
use crate::error::{Error, FunctionError, Result};
use crate::functions::{FunctionObject, Functions, SelectedFunction};
use crate::near::{near_functions, near_names};
use crate::select::function::{CollectorWork, FunctionSelector, OCAML_5_SYMBOL};
use crate::select::glob::Glob;

/// A place in a function that was selected.
#[derive(Clone)]
pub(crate) struct FunctionPlace<'f> {
    pub(crate) function: SelectedFunction<'f>,
    /// In bytes; 0 is the entry of the function.
    pub(crate) offset: u64,
    /// The index of the selector that names it (a name, an address, a line, or work of the collector); `None` if only
    /// patterns select it.
    pub(crate) named_by: Option<usize>,
    /// Whether it is the only place that this selector names; not known before all places are.
    pub(crate) is_named_alone: bool,
    pub(crate) selected_by: SelectedBy,
}

impl FunctionPlace<'_> {
    /// Returns where its function begins in the process.
    fn function_start(&self) -> Option<LiveAddr> {
        let start = self.function.function.range().start;
        let bias = self.function.object.load_bias();
        bias.map(|bias| bias.live(start))
    }

    /// Returns whether it is a site of a USDT probe at the first instruction of its function.
    pub(crate) fn is_probe_at_entry(&self) -> bool {
        self.offset == 0 && self.selected_by.is_usdt()
    }

    /// Returns whether it is in the function at this address of the process.
    pub(crate) fn is_in_function_at(&self, address: LiveAddr) -> bool {
        self.function_start() == Some(address)
    }

    /// Returns whether it is at this address of the process.
    pub(crate) fn is_at(&self, address: LiveAddr) -> bool {
        let start = self.function_start();
        start.is_some_and(|start| start.plus(self.offset) == address)
    }
}

/// Whether globs also select the functions that ppx_probe makes for probe sites, each of which has the name of another
/// function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProbeSites {
    Selected,
    LeftOut,
}

/// What a place was selected by.
#[derive(Clone)]
pub(crate) enum SelectedBy {
    /// A name or pattern of the function, an address, or work of the collector.
    Function,
    /// A source line, `http.ml:42`.
    Line(Arc<str>),
    /// A USDT probe that it is a site of.
    Usdt {
        name: Arc<str>,
        semaphore: Option<FileAddr>,
        /// The argument string of its note.
        arguments: Arc<[u8]>,
    },
}

impl SelectedBy {
    /// Returns the line, or the name of the probe.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            SelectedBy::Function => None,
            SelectedBy::Line(name) | SelectedBy::Usdt { name, .. } => Some(name),
        }
    }

    pub(crate) fn is_usdt(&self) -> bool {
        matches!(self, SelectedBy::Usdt { .. })
    }

    /// Returns the semaphore of the probe, if it has one.
    pub(crate) fn semaphore(&self) -> Option<FileAddr> {
        match self {
            SelectedBy::Usdt { semaphore, .. } => *semaphore,
            SelectedBy::Function | SelectedBy::Line(_) => None,
        }
    }
}

impl Functions {
    /// Returns whether a selector selects something, or may do so. It may if notes could not be read, or if it fails
    /// for another reason than that nothing matches.
    pub(crate) fn may_have(&self, selector: &FunctionSelector) -> bool {
        match self.places(std::slice::from_ref(selector)) {
            Ok(places) => !places.is_empty(),
            // The notes that cannot be read may be those of a probe that it selects.
            Err(_) if !self.unreadable_notes().is_empty() => true,
            Err(error) => !error.is_missing_function(),
        }
    }

    /// Selects functions, each once. Without selectors, returns all of them, also those without a name. The result
    /// includes functions of probe sites ([`FunctionKind::ProbeSite`]), although these are observed only if an address
    /// or line selects them. The order is that of [`Functions::objects`], then that of the addresses. If `self` is of
    /// a file, the addresses in selectors are addresses in the file.
    ///
    /// # Errors
    ///
    /// A [`FunctionError`] if one of the selectors selects no function.
    pub fn select(&self, selectors: &[FunctionSelector]) -> Result<Vec<SelectedFunction<'_>>> {
        if selectors.is_empty() {
            let mut all = Vec::new();
            for object in &self.objects {
                all.extend(object.table.functions().map(|function| SelectedFunction {
                    object,
                    function,
                    name: 0,
                }));
            }
            return Ok(all);
        }
        let places = self
            .find_places(selectors, ProbeSites::Selected)?
            .into_iter();
        let mut functions: Vec<SelectedFunction<'_>> = places.map(|it| it.function).collect();
        functions.dedup_by(|one, other| one.is_same(other));
        Ok(functions)
    }

    /// Selects functions and places in functions, each once, in the order of their objects and addresses.
    ///
    /// # Errors
    ///
    /// Same as [`Functions::select`].
    pub(crate) fn places(&self, selectors: &[FunctionSelector]) -> Result<Vec<FunctionPlace<'_>>> {
        self.find_places(selectors, ProbeSites::LeftOut)
    }

    fn find_places(
        &self,
        selectors: &[FunctionSelector],
        probe_sites: ProbeSites,
    ) -> Result<Vec<FunctionPlace<'_>>> {
        let mut globs = Vec::new();
        let (mut places, mut at_addresses) = (Vec::new(), Vec::new());
        for (index, selector) in selectors.iter().enumerate() {
            match selector {
                FunctionSelector::Glob(glob) => globs.push((index, glob)),
                FunctionSelector::Address(address) => {
                    let (function, offset) = self.at(*address)?;
                    at_addresses.push(FunctionPlace {
                        function,
                        offset,
                        named_by: Some(index),
                        is_named_alone: false,
                        selected_by: SelectedBy::Function,
                    });
                }
                FunctionSelector::Line { file, line } => {
                    places.extend(self.at_line(index, file, *line)?);
                }
                FunctionSelector::Collector(work) => {
                    places.extend(self.of_collector(index, *work)?);
                }
                FunctionSelector::Usdt(glob) => places.extend(self.usdt_sites(index, glob)?),
            }
        }
        // A place that is selected several times is named after the USDT probe, else the line unless it is the entry of a
        // function that is selected, else the name that was asked for.
        places.append(&mut self.matching(&globs, probe_sites)?);
        places.append(&mut at_addresses);
        Ok(self.merged(places))
    }

    /// Returns the places in the order of their objects and addresses, each once. Of several at one address, the first
    /// stays. It takes `named_by` from the others if it has none, and takes over a USDT probe, or the function if it is a
    /// line. But a function and a probe at its entry stay two: the function cannot be observed there, and its exits and
    /// arguments are not those of the probe.
    pub(crate) fn merged<'f>(&self, mut places: Vec<FunctionPlace<'f>>) -> Vec<FunctionPlace<'f>> {
        let order = |place: &FunctionPlace<'_>| {
            let object = self.index_of(place.function.object);
            let address = place.function.function.address();
            (object, address, place.offset, place.is_probe_at_entry())
        };
        places.sort_by_cached_key(order);
        places.dedup_by(|other, one| {
            let is_same = one.offset == other.offset
                && one.function.is_same(&other.function)
                && one.is_probe_at_entry() == other.is_probe_at_entry();
            if is_same {
                one.named_by = one.named_by.or(other.named_by);
                match (&one.selected_by, &other.selected_by) {
                    (_, SelectedBy::Usdt { .. }) => one.selected_by = other.selected_by.clone(),
                    (SelectedBy::Line(_), SelectedBy::Function) if one.offset == 0 => {
                        one.selected_by = SelectedBy::Function;
                        one.function = other.function;
                    }
                    _ => {}
                }
            }
            is_same
        });
        places
    }

    /// Returns the functions that globs match; each glob comes with the index of its selector.
    ///
    /// # Errors
    ///
    /// If a glob matches no function. The error has the names that are similar, and finding these takes a while.
    fn matching(
        &self,
        globs: &[(usize, &Glob)],
        probe_sites: ProbeSites,
    ) -> Result<Vec<FunctionPlace<'_>>> {
        let (places, has_match) = self.matches(globs, probe_sites);
        match has_match.iter().position(|has_match| !has_match) {
            None => Ok(places),
            Some(index) => Err(self.no_match(globs[index].1)),
        }
    }

    /// Returns the functions that globs match, and which globs match any.
    fn matches(
        &self,
        globs: &[(usize, &Glob)],
        probe_sites: ProbeSites,
    ) -> (Vec<FunctionPlace<'_>>, Vec<bool>) {
        let mut has_match = vec![false; globs.len()];
        let mut places = Vec::new();
        if globs.is_empty() {
            return (places, has_match);
        }
        for object in &self.objects {
            for function in object.table.functions() {
                let is_of_site = function.kind() == FunctionKind::ProbeSite;
                if is_of_site && probe_sites == ProbeSites::LeftOut {
                    continue;
                }
                let matched = best_match(function, globs, &mut has_match);
                places.extend(matched.map(|(name, named_by)| FunctionPlace {
                    function: SelectedFunction {
                        object,
                        function,
                        name,
                    },
                    offset: 0,
                    named_by,
                    is_named_alone: false,
                    selected_by: SelectedBy::Function,
                }));
            }
        }
        (places, has_match)
    }

    /// Returns the function that does this work of the collector; `index` is that of the selector that asks for it.
    fn of_collector(&self, index: usize, work: CollectorWork) -> Result<Vec<FunctionPlace<'_>>> {
        let find = |name: &str| {
            let glob: Glob = name.parse().ok()?;
            let (found, _) = self.matches(&[(index, &glob)], ProbeSites::LeftOut);
            (!found.is_empty()).then_some(found)
        };
        let mut found = work.names().iter().filter_map(|name| find(name));
        found.next().ok_or_else(|| {
            let libraries = self.library_count();
            // Every runtime has this function, if it has symbols at all.
            let kind = if find("caml_alloc_shr").is_none() {
                FunctionError::NoRuntime { libraries }
            } else if find(OCAML_5_SYMBOL).is_none() && work.is_of_ocaml_5() {
                FunctionError::NeedsOcaml5 { work: work.word() }
            } else {
                let names = work.names();
                FunctionError::NoCollector { names, libraries }
            };
            Error::of_file(&self.program, kind)
        })
    }

    /// Returns the sites of the USDT probes that a glob matches; `index` is that of its selector.
    fn usdt_sites(&self, index: usize, glob: &Glob) -> Result<Vec<FunctionPlace<'_>>> {
        let mut places = Vec::new();
        let mut names = BTreeSet::new();
        let mut outside = None;
        for object in self.objects.iter().filter(|object| !object.is_kernels()) {
            for site in object.usdt_sites() {
                let (probe, Some(address)) = (site.probe(), site.address) else {
                    continue;
                };
                if !glob.matches(&probe) {
                    names.insert(probe);
                    continue;
                }
                let Some(function) = object.table.function_or_part_at(address) else {
                    outside.get_or_insert((object, probe, address));
                    continue;
                };
                let named_by = glob.is_name().then_some(index);
                let selected_by = SelectedBy::Usdt {
                    name: probe.into(),
                    semaphore: site.semaphore,
                    arguments: (&*site.arguments).into(),
                };
                places.push(object.place(function, address, named_by, selected_by));
            }
        }
        // Sites outside of known functions are left out if there are others.
        if let (Some((object, name, address)), true) = (outside, places.is_empty()) {
            let kind = FunctionError::SiteOutside { name, address };
            return Err(Error::of_file(object.table.path(), kind));
        }
        if places.is_empty() {
            let unreadable = self.unreadable.iter().cloned();
            let unreadable = unreadable.chain(self.unreadable_notes());
            let kind = FunctionError::NoUsdt {
                glob: glob.to_string(),
                libraries: self.library_count(),
                is_ocamls: self.has_ocaml_probe(glob),
                unreadable: unreadable.map(|one| one.path).collect(),
                near: near_names(&names, glob.as_str()),
            };
            return Err(Error::of_file(&self.program, kind));
        }
        Ok(places)
    }

    /// Returns the sites of USDT probes that a selector asks for, and that are in no known function: their
    /// objects, names and addresses.
    pub(crate) fn usdt_sites_outside(
        &self,
        selector: &FunctionSelector,
    ) -> Vec<(&FunctionObject, String, FileAddr)> {
        let FunctionSelector::Usdt(glob) = selector else {
            return Vec::new();
        };
        let objects = self.objects.iter().filter(|object| !object.is_kernels());
        let sites =
            objects.flat_map(|object| object.usdt_sites().iter().map(move |it| (object, it)));
        let outside = sites.filter_map(|(object, site)| {
            let (probe, address) = (site.probe(), site.address?);
            let is_outside = object.table.function_or_part_at(address).is_none();
            (is_outside && glob.matches(&probe)).then_some((object, probe, address))
        });
        outside.collect()
    }

    /// Returns whether a glob for USDT probes matches one of OCaml's.
    fn has_ocaml_probe(&self, glob: &Glob) -> bool {
        let mut objects = self.objects.iter();
        objects.any(|object| {
            let found = usdt_sites(&object.elf, |provider| !is_foreign(provider));
            found.is_ok_and(|found| found.sites.iter().any(|site| glob.matches(&site.probe())))
        })
    }

    /// Returns the places where a source line begins; `index` is that of the selector that asks for it.
    fn at_line(&self, index: usize, file: &str, line: u32) -> Result<Vec<FunctionPlace<'_>>> {
        let mut search = LineSearch::new(file, line);
        let shown: Arc<str> = format!("{file}:{line}").into();
        let mut places = Vec::new();
        for object in self.objects.iter().filter(|object| !object.is_kernels()) {
            let at = |address| object.table.function_at(address);
            let start = |address| at(address).map(|function| function.address());
            for address in search.places_in(&object.elf, start) {
                let Some(function) = at(address) else {
                    continue;
                };
                let line = SelectedBy::Line(shown.clone());
                places.push(object.place(function, address, Some(index), line));
            }
        }
        if places.is_empty() || search.paths.len() > 1 {
            let error = self.no_code_at(search, file, line);
            return Err(Error::of_file(&self.program, error));
        }
        Ok(places)
    }

    /// Returns why it is not known where a source line begins.
    fn no_code_at(&self, search: LineSearch, file: &str, line: u32) -> FunctionError {
        let (file, libraries) = (file.to_owned(), self.library_count());
        if !search.has_tables {
            return FunctionError::NoLines { libraries };
        }
        match search.paths.len() {
            0 => FunctionError::UnknownFile {
                near: near_names(&search.names, &file),
                file,
                libraries,
            },
            1 => FunctionError::NoCodeAt {
                file,
                line,
                near: [search.neighbours.0, search.neighbours.1]
                    .into_iter()
                    .flatten()
                    .collect(),
            },
            _ => FunctionError::SeveralFiles {
                file,
                paths: search.paths.into_iter().collect(),
            },
        }
    }

    fn index_of(&self, object: &FunctionObject) -> usize {
        let is_other = |other: &&FunctionObject| !std::ptr::eq(*other, object);
        self.objects.iter().take_while(is_other).count()
    }

    fn no_match(&self, glob: &Glob) -> Error {
        let is_site = |it: &Function<'_>| it.kind() == FunctionKind::ProbeSite;
        let (mut is_probe_site, mut near) = (false, Vec::new());
        let wanted = demangle(glob.as_str());
        // Those of the executable come first. Libraries have many functions, of which hardly one was meant.
        let (first, others) = self.objects.split_at(self.objects.len().min(1));
        for objects in [first, others] {
            let functions = objects.iter().flat_map(|object| object.table.functions());
            let (sites, functions): (Vec<_>, Vec<_>) = functions.partition(is_site);
            let mut names_of_sites = sites.iter().flat_map(Function::names);
            is_probe_site |= names_of_sites.any(|name| glob.matches(&name.text));
            if near.is_empty() {
                let names = functions.iter().flat_map(Function::names);
                near = near_functions(names.map(|name| name.text), &wanted);
            }
        }
        let executable = self.executable();
        let unnamed = executable.map_or(0, FunctionObject::unnamed);
        let debug_file = executable.and_then(|it| it.elf.unusable_debug_file());
        let kind = FunctionError::NoMatch {
            glob: glob.to_string(),
            runs_bytecode: executable.is_some_and(|it| it.elf.interprets_bytecode()),
            is_probe_site,
            libraries: self.library_count(),
            unnamed,
            unusable_debug_file: debug_file.filter(|_| unnamed > 0).map(Path::to_owned),
            unreadable: self.unreadable.iter().map(|one| one.path.clone()).collect(),
            near,
        };
        Error::of_file(&self.program, kind)
    }
}

/// Returns the index of the name by which a function is selected. This is the first name that a selector without
/// wildcards gives, or its symbol, with the index of that selector; else the first name that a glob matches, with `None`. Sets
/// `has_match` for each glob that matches a name.
fn best_match(
    function: Function<'_>,
    globs: &[(usize, &Glob)],
    has_match: &mut [bool],
) -> Option<(usize, Option<usize>)> {
    let mut best: Option<(usize, Option<usize>)> = None;
    for (index, symbol) in function.symbols().enumerate() {
        // Most names need not be demangled.
        if !globs.iter().any(|(_, glob)| glob.may_match(symbol)) {
            continue;
        }
        let Some(name) = function.nth_name(index) else {
            continue;
        };
        for ((selector, glob), has_match) in globs.iter().zip(&mut *has_match) {
            // As perf(1) and gdb(1) show it.
            let is_symbol = glob.is_name() && glob.as_str().as_bytes() == symbol;
            if !is_symbol && !glob.matches(&name.text) {
                continue;
            }
            *has_match = true;
            let named_by = glob.is_name().then_some(*selector);
            let is_better = |best: (usize, Option<usize>)| best.1.is_none() && named_by.is_some();
            if best.is_none_or(is_better) {
                best = Some((index, named_by));
            }
        }
    }
    best
}

impl FunctionObject {
    /// Returns a place in one of its functions.
    fn place<'f>(
        &'f self,
        function: Function<'f>,
        address: FileAddr,
        named_by: Option<usize>,
        selected_by: SelectedBy,
    ) -> FunctionPlace<'f> {
        FunctionPlace {
            function: SelectedFunction {
                object: self,
                function,
                name: 0,
            },
            offset: address.0 - function.address().0,
            named_by,
            is_named_alone: false,
            selected_by,
        }
    }
}

impl SelectedFunction<'_> {
    fn is_same(&self, other: &SelectedFunction<'_>) -> bool {
        let addresses = [self, other].map(|it| it.function.address());
        std::ptr::eq(self.object, other.object) && addresses[0] == addresses[1]
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use test_support::{Scratch, program};

    use super::*;

    #[test]
    fn names_of_probe_sites_alone_match_nothing() {
        let scratch = Scratch::new();
        let library = scratch.file("probes.so");
        let source = program("service").with_file_name("service_probes.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(source);
        assert!(gcc.status().unwrap().success());
        let functions = Functions::of_file(&library).unwrap();
        let selector = FunctionSelector::Glob("Service.serve".parse().unwrap());
        let listed = functions.select(std::slice::from_ref(&selector)).unwrap();
        assert_eq!(listed.len(), 2);
        assert!(!functions.may_have(&selector));
        let error = functions.places(&[selector]).err().unwrap();
        let expected =
            "no function in probes.so matches Service.serve, except the code of probe sites";
        assert_eq!(error.to_string(), expected);
        // By its address, it is found.
        let address = LiveAddr(listed[0].function.address().0);
        let places = functions.places(&[FunctionSelector::Address(address)]);
        assert_eq!(places.unwrap().len(), 1);
    }
}
