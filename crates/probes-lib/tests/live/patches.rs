//! Plans of patches of real code: how much of it can be patched.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use goblin::elf::{Elf, program_header::PF_X, program_header::PT_LOAD, sym};
use probes_lib::{Code, CodeRange, FileAddr, Jump, PatchPlanner, PatchSite, Refusal};
use test_support::program_forms;

/// An object, with its functions as its symbols tell.
pub(crate) struct Object {
    pub(crate) planner: PatchPlanner,
    pub(crate) functions: Vec<Function>,
    /// The lowest address that is loaded.
    pub(crate) lowest: u64,
}

#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) range: CodeRange,
    pub(crate) parts: Vec<CodeRange>,
}

impl Object {
    pub(crate) fn read(path: &Path) -> Object {
        let bytes = fs::read(path).unwrap();
        let elf = Elf::parse(&bytes).unwrap();
        let mut code = Code::default();
        let loaded = |header: &&goblin::elf::ProgramHeader| header.p_type == PT_LOAD;
        for segment in elf.program_headers.iter().filter(loaded) {
            let contents = bytes[segment.file_range()].to_vec();
            code.add(
                FileAddr(segment.p_vaddr),
                contents,
                segment.p_flags & PF_X != 0,
            );
        }
        let segments = elf.program_headers.iter().filter(loaded);
        let lowest = segments.map(|it| it.p_vaddr).min().unwrap();
        if elf.header.e_type == goblin::elf::header::ET_EXEC {
            code.set_fixed();
        }
        let text = elf.section_headers.iter();
        let text = text
            .filter(|it| elf.shdr_strtab.get_at(it.sh_name) == Some(".text"))
            .map(|it| it.vm_range())
            .next()
            .unwrap();
        let mut extra = Vec::new();
        let mut ranges = BTreeMap::new();
        for (symbols, names) in [(&elf.syms, &elf.strtab), (&elf.dynsyms, &elf.dynstrtab)] {
            for symbol in symbols.iter() {
                if symbol.st_shndx == 0 || !text.contains(&(symbol.st_value as usize)) {
                    continue;
                }
                extra.push(FileAddr(symbol.st_value));
                if symbol.st_type() == sym::STT_FUNC && symbol.st_size > 0 {
                    let name = names.get_at(symbol.st_name).unwrap_or("");
                    let at = ranges.entry(symbol.st_value).or_insert((0, String::new()));
                    *at = (symbol.st_size.max(at.0), name.to_owned());
                }
            }
        }
        let addends = elf.dynrelas.iter().filter_map(|it| it.r_addend);
        extra.extend(addends.map(|addend| FileAddr(addend as u64)));
        let range = |(start, (len, name)): (&u64, &(u64, String))| {
            let start = FileAddr(*start);
            (CodeRange { start, len: *len }, name.clone())
        };
        let all: Vec<(CodeRange, String)> = ranges.iter().map(range).collect();
        let cold: BTreeMap<&str, CodeRange> = all
            .iter()
            .filter_map(|(range, name)| Some((name.split_once(".cold")?.0, *range)))
            .collect();
        let functions = all
            .iter()
            .filter(|(_, name)| !name.contains(".cold"))
            .map(|(range, name)| Function {
                name: name.clone(),
                range: *range,
                parts: cold.get(name.as_str()).copied().into_iter().collect(),
            })
            .collect();
        let ranges: Vec<CodeRange> = all.iter().map(|(range, _)| *range).collect();
        Object {
            planner: PatchPlanner::new(code, &ranges, extra),
            functions,
            lowest,
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
    let files = std::env::split_paths(&path).map(|folder| folder.join("ocamlopt.opt"));
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
    /// Those whose every exit can be patched, too.
    timed: usize,
    /// How often each reason was given for an entry or for the exits.
    refusals: BTreeMap<(&'static str, &'static str), usize>,
}

impl Coverage {
    fn of<'f>(object: &Object, functions: impl Iterator<Item = &'f Function>) -> Coverage {
        let mut coverage = Coverage::default();
        for function in functions {
            coverage.functions += 1;
            let plan = object.planner.function(function.range, &function.parts);
            match &plan.entry {
                Ok(ways) => *coverage.kind(&ways[0]) += 1,
                Err(refusal) => coverage.refuse("entry", refusal),
            }
            match &plan.exits {
                Ok(_) => coverage.timed += 1,
                Err(refusal) => coverage.refuse("exits", refusal),
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

    /// Asserts that at least these shares, in thousandths, can be counted and timed.
    fn assert(&self, what: &str, counted: usize, timed: usize) {
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
             timed: {}; refused: {:?}",
            self.timed, self.refusals
        );
        let entries = near + padded + punned + short;
        assert!(entries * 1000 >= functions * counted, "{what}");
        assert!(self.timed * 1000 >= functions * timed, "{what}");
    }
}

fn is_ocaml(function: &&Function) -> bool {
    let name = function.name.strip_prefix("caml");
    name.is_some_and(|name| name.starts_with(|first: char| first.is_ascii_uppercase()))
}

#[test]
fn nearly_all_functions_can_be_patched() {
    let [service, at_fixed_addresses] = program_forms("service");
    // At fixed addresses, nothing is below the program: a few returns cannot be reached.
    for (file, timed) in [(service, 995), (at_fixed_addresses, 985), (ocamlopt(), 995)] {
        let object = Object::read(&file);
        let (ocaml, others): (Vec<_>, _) = object.functions.iter().partition(is_ocaml);
        assert!(ocaml.len() > 1000 && others.len() > 500);
        let what = |language: &str| format!("{} {language}", file.display());
        let ocaml = Coverage::of(&object, ocaml.into_iter());
        ocaml.assert(&what("OCaml"), 999, timed);
        let others = Coverage::of(&object, others.into_iter());
        // Debian's compiler has no symbols of static functions.
        others.assert(&what("C"), 995, 950);
    }
}

#[test]
fn nearly_all_entries_of_libc_can_be_patched() {
    let libc = libc();
    let object = Object::read(&libc);
    assert!(object.functions.len() > 1000);
    let coverage = Coverage::of(&object, object.functions.iter());
    coverage.assert("libc", 995, 800);
}
