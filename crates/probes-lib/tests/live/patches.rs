//! Plans of patches of real code: how much of it can be patched.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use probes_lib::{
    CodeRange, FileAddr, Functions, Jump, Linking, ObservableFunctions, PatchPlanner, PatchSite,
    ProbeTable, Refusal, SITE_LEN, SelectedFunction,
};
use test_support::program_forms;

/// An object, with its functions.
pub(crate) struct Object {
    pub(crate) planner: PatchPlanner,
    /// Where its functions are.
    pub(crate) functions: Vec<CodeRange>,
    pub(crate) linking: Linking,
}

impl Object {
    pub(crate) fn read(path: &Path) -> Object {
        let functions = Functions::of_file(path).unwrap();
        let object = &functions.objects()[0];
        Object {
            planner: object.patch_planner().unwrap(),
            linking: object.table().linking(),
            functions: object.table().functions().map(|it| it.range()).collect(),
        }
    }
}

/// The C library that this process has loaded.
pub(crate) fn libc() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with("/libc.so.6"));
    let (_, path) = line.unwrap().split_once('/').unwrap();
    Path::new("/").join(path)
}

/// OCaml's own compiler, which is a large OCaml program.
pub(crate) fn ocamlopt() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files = std::env::split_paths(&path).map(|directory| directory.join("ocamlopt.opt"));
    let mut found = files.filter(|file| file.exists());
    found
        .next()
        .expect("the tests need OCaml")
        .canonicalize()
        .unwrap()
}

/// How many functions can be patched, and how.
#[derive(Default)]
struct Coverage {
    functions: usize,
    near: usize,
    padded: usize,
    punned: usize,
    short: usize,
    /// Those whose calls an observation counts.
    counted: usize,
    /// Those whose every exit can be patched, too.
    timed: usize,
    /// How often each reason was given for an entry or for the exits.
    refusals: BTreeMap<(&'static str, &'static str), usize>,
}

impl Coverage {
    /// That of the functions whose symbols are `meant`: what an observation would say of each.
    fn of(all: &Functions, meant: impl Fn(&str) -> bool) -> Coverage {
        let object = &all.objects()[0];
        let planner = object.patch_planner().unwrap();
        let observable = ObservableFunctions::of(all, object).unwrap();
        let mut coverage = Coverage::default();
        let is_meant = |it: &SelectedFunction<'_>| {
            let name = it.name();
            meant(name.as_ref().map_or("", |name| &*name.symbol))
        };
        for function in all.select(&[]).unwrap().into_iter().filter(is_meant) {
            coverage.functions += 1;
            if let Ok(candidates) = planner.function(function.function.range()).entry {
                *coverage.kind(&candidates[0]) += 1;
            }
            match observable.can_count(&function) {
                Ok(()) => coverage.counted += 1,
                Err(refusal) => coverage.refuse("entry", &refusal),
            }
            match observable.can_time(&function) {
                Ok(()) => coverage.timed += 1,
                Err(refusal) => coverage.refuse("exits", &refusal),
            }
        }
        coverage
    }

    fn kind(&mut self, site: &PatchSite) -> &mut usize {
        match site.jump() {
            Jump::Near { padding: 0 } => &mut self.near,
            Jump::Near { .. } => &mut self.padded,
            Jump::Punned { .. } => &mut self.punned,
            _ => &mut self.short,
        }
    }

    fn refuse(&mut self, what: &'static str, refusal: &Refusal) {
        *self.refusals.entry((what, refusal.name())).or_default() += 1;
    }

    /// Asserts that at least these shares, in thousandths, have entries that can be patched, are counted, and are timed.
    fn assert(&self, what: &str, [patched, counted, timed]: [usize; 3]) {
        let Coverage {
            functions,
            near,
            padded,
            punned,
            short,
            ..
        } = self;
        println!(
            "{what}: {functions} functions; entries: {near} near, {padded} padded, {punned} punned, {short} short; \
             counted: {}; timed: {}; refused: {:?}",
            self.counted, self.timed, self.refusals
        );
        let entries = near + padded + punned + short;
        assert!(entries * 1000 >= functions * patched, "{what}");
        assert!(self.counted * 1000 >= functions * counted, "{what}");
        assert!(self.timed * 1000 >= functions * timed, "{what}");
    }
}

fn is_ocaml(symbol: &str) -> bool {
    let name = symbol.strip_prefix("caml");
    name.is_some_and(|name| name.starts_with(|first: char| first.is_ascii_uppercase()))
}

#[test]
fn nearly_all_functions_can_be_patched() {
    let [service, at_fixed_addresses] = program_forms("service");
    // At fixed addresses, nothing is below the program: a few returns cannot be reached.
    for (file, timed) in [(service, 995), (at_fixed_addresses, 980), (ocamlopt(), 995)] {
        let all = Functions::of_file(&file).unwrap();
        let what = |language: &str| format!("{} {language}", file.display());
        let ocaml = Coverage::of(&all, is_ocaml);
        let others = Coverage::of(&all, |symbol| !is_ocaml(symbol));
        assert!(ocaml.functions > 1000 && others.functions > 500);
        ocaml.assert(&what("OCaml"), [999, 999, timed]);
        // Debian's compiler has no symbols of static functions, which may be OCaml's then: what writes to the stack is not
        // displaced in these.
        others.assert(&what("C"), [995, 950, 940]);
    }
}

#[test]
fn nearly_all_entries_of_libc_can_be_patched() {
    let all = Functions::of_file(libc()).unwrap();
    let coverage = Coverage::of(&all, |_| true);
    assert!(coverage.functions > 1000);
    coverage.assert("libc", [995, 995, 950]);
}

#[test]
fn patches_leave_probe_sites_alone() {
    for program in program_forms("service") {
        let object = Object::read(&program);
        let table = ProbeTable::read(&program).unwrap();
        let sites = table.probes().flat_map(|probe| probe.sites());
        let sites: BTreeSet<u64> = sites.map(|site| site.address().0).collect();
        assert!(!sites.is_empty());
        let (mut patches, mut refused) = (0, 0);
        for function in &object.functions {
            let plan = object.planner.function(*function);
            let exits = plan.exits.iter();
            let exits = exits.flat_map(|it| it.sites.iter().chain([&it.entry]));
            for site in plan.entry.iter().flatten().chain(exits) {
                for range in site.reserved() {
                    let near = range.start.0.saturating_sub(SITE_LEN as u64 - 1)..range.end.0;
                    assert_eq!(sites.range(near).next(), None, "{site:x?}");
                }
                patches += 1;
            }
            let start = function.start.0;
            for &site in sites.range(start..start + function.len) {
                let refusal = object.planner.instruction(*function, FileAddr(site));
                let offset = site - start;
                let what = "a probe site";
                assert_eq!(refusal, Err(Refusal::Unmovable { offset, what }));
                refused += 1;
            }
        }
        assert!(patches > 1000 && refused == sites.len());
    }
}
