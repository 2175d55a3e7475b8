use std::path::PathBuf;

use proptest::prelude::*;
use test_support::{DEADLINE, Scratch, SymbolFile, fixture, program, program_forms};

use super::*;
use crate::testing::{memory_file, properties};

fn table(file: &Path) -> FunctionTable {
    FunctionTable::read(file).unwrap()
}

fn named<'t>(table: &'t FunctionTable, name: &str) -> Vec<Function<'t>> {
    let has_name = |it: &Function<'_>| it.names().any(|found| found.text == name);
    table.functions().filter(has_name).collect()
}

/// Writes a stripped copy of a file; returns its path.
fn strip(file: &Path, copy: PathBuf, flags: &[&str]) -> PathBuf {
    let mut strip = std::process::Command::new("strip");
    strip.args(flags).arg("-o").arg(&copy).arg(file);
    assert!(strip.status().unwrap().success());
    copy
}

#[test]
fn functions_have_names_of_the_source() {
    for file in program_forms("service") {
        let table = table(&file);
        let map = named(&table, "Stdlib.List.map");
        assert_eq!(map.len(), 1);
        let name = map[0].name().unwrap();
        assert!(name.symbol.starts_with("camlStdlib__List"), "{name:?}");
        assert_eq!(name.language, Some(Language::Ocaml));
        assert_eq!(name.source, NameSource::Symbol);
        assert!(map[0].len() > 16 && map[0].len() < 1000);
        let main = named(&table, "main");
        assert_eq!(main.len(), 1);
        assert_eq!(main[0].name().unwrap().language, None);
    }
}

#[test]
fn table_for_selection_has_all_names() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let whole = ElfFile::open(&file).unwrap();
        let known = table(&file);
        let map = named(&known, "Stdlib.List.map")[0].name().unwrap().symbol;
        let strip = |name: &str, flags: &[&str]| {
            ElfFile::open(&strip(&file, scratch.file(name), flags)).unwrap()
        };
        let lacks_one = strip("lacks_one", &["--strip-debug", "-N", &map]);
        for elf in [&whole, &strip("stripped", &[]), &lacks_one] {
            let all = FunctionTable::of(elf).unwrap();
            let to_select = FunctionTable::with_names_of(elf).unwrap();
            let names = |table: &FunctionTable| -> Vec<(FileAddr, Vec<String>)> {
                let names = |it: Function<'_>| it.names().map(|name| name.text).collect();
                table
                    .functions()
                    .map(|it| (it.address(), names(it)))
                    .collect()
            };
            assert!(names(&to_select) == names(&all));
            assert_eq!(named(&to_select, "Stdlib.List.map").len(), 1);
        }
        // First calls are not read: no function needs them for its name.
        let to_select = FunctionTable::with_names_of(&whole).unwrap();
        assert!(to_select.functions().all(|it| it.first_call().is_none()));
    }
}

#[test]
fn library_with_only_data_has_no_functions() {
    let scratch = Scratch::new();
    let (source, library) = (scratch.file("data.s"), scratch.file("libdata.so"));
    for (len, has_only_data) in [(16, true), (4096, false)] {
        std::fs::write(
            &source,
            format!(".text\n.skip {len}, 0x90\n.data\n.quad 1\n"),
        )
        .unwrap();
        let mut gcc = std::process::Command::new("gcc");
        gcc.args(["-nostdlib", "-shared", "-s", "-o"]);
        assert!(gcc.arg(&library).arg(&source).status().unwrap().success());
        let found = FunctionTable::read(&library).map(|table| table.functions().count());
        if has_only_data {
            assert_eq!(found.unwrap(), 0);
        } else {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("neither symbols nor .eh_frame"), "{error}");
        }
    }
}

// promise: Observations: Functions that ppx_probe makes for probe sites are distinguished from the functions whose names they have (2 programs)
#[test]
fn code_of_probe_sites_is_recognised() {
    let of_sites = |file: &Path| -> Vec<FileAddr> {
        let table = table(file);
        let marked = table
            .functions()
            .filter(|it| it.kind() == FunctionKind::ProbeSite);
        marked.map(|it| it.address()).collect()
    };
    for file in program_forms("service") {
        let probes = crate::ProbeTable::read(&file).unwrap();
        let sites = probes.probes().flat_map(|probe| probe.sites());
        let mut starts: Vec<FileAddr> = sites.map(|it| FileAddr(it.address().0 - 5)).collect();
        starts.sort_unstable();
        assert_eq!(of_sites(&file), starts);
        let table = table(&file);
        let kinds: Vec<FunctionKind> = named(&table, "Service.serve")
            .iter()
            .map(Function::kind)
            .collect();
        let site = FunctionKind::ProbeSite;
        assert_eq!(kinds, [FunctionKind::Function, site, site]);
    }
    // Probes that are built into the compiler have their sites in the functions themselves.
    assert!(of_sites(&fixture("gen_ocaml_2.pie")).is_empty());
}

#[test]
fn parts_have_names_and_belong_to_no_function() {
    let table = table(&fixture("usdt_cold.pie"));
    let part = |len: &dyn Fn(u64) -> u64| {
        let part = table.parts().into_iter().find(|it| {
            let found = table.function_or_part_at(it.start);
            found.is_some_and(|it| it.name().is_some_and(|name| name.text == "cold_round.cold"))
        });
        let part = part.unwrap();
        FileAddr(part.start.0 + len(part.len))
    };
    let at = |address| {
        table
            .function_or_part_at(address)
            .map(|it| it.name().unwrap().text)
    };
    assert_eq!(at(part(&|len| len - 1)).as_deref(), Some("cold_round.cold"));
    assert_ne!(at(part(&|len| len)).as_deref(), Some("cold_round.cold"));
    assert!(table.function_at(part(&|_| 0)).is_none());
}

#[test]
fn parts_of_functions_are_no_functions() {
    for symbol in ["parse.cold", "parse.cold.3", "_Z1fv.cold"] {
        assert!(is_part(symbol.as_bytes()), "{symbol}");
    }
    for symbol in [
        "cold",
        "parse.isra.0",
        "parse.cold_path",
        "a.coldest",
        "1",
        "",
        "x.1",
    ] {
        assert!(!is_part(symbol.as_bytes()), "{symbol}");
    }
}

#[test]
fn stripped_files_still_have_parts() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let stripped = strip(&file, scratch.file("stripped"), &[]);
        let elf = ElfFile::open(&file).unwrap();
        let mut named = Vec::new();
        let visit = |symbol: &Sym, name: &[u8]| {
            if is_part(name) {
                named.push(CodeRange {
                    start: FileAddr(symbol.st_value),
                    len: symbol.st_size,
                });
            }
        };
        elf.each_symbol(SymbolTable::Static, visit).unwrap();
        let with_symbols = table(&file);
        assert!(named.iter().all(|it| with_symbols.parts().contains(it)));
        let found = table(&stripped);
        assert!(!found.parts().is_empty());
        for part in &found.parts() {
            assert!(named.contains(part), "{part:x?}");
        }
    }
}

#[test]
fn versions_are_no_part_of_names() {
    for (symbol, name) in [
        ("realpath@@GLIBC_2.3", "realpath"),
        ("sigvec@GLIBC_2.2.5", "sigvec"),
        ("plain", "plain"),
        ("*Pool@Object#two:Int32", "*Pool@Object#two:Int32"),
        ("@", "@"),
        ("a@", "a@"),
        ("a@@", "a@@"),
        ("@b", "@b"),
        ("a@b@c", "a@b@c"),
    ] {
        assert_eq!(without_version(symbol.as_bytes()), name.as_bytes());
    }
}

#[test]
fn aliases_are_names_of_one_function() {
    let libc = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc = libc
        .lines()
        .find(|line| line.contains("/libc.so.6"))
        .unwrap();
    let table = table(Path::new(&libc[libc.find('/').unwrap()..]));
    let write = named(&table, "write");
    assert_eq!(write.len(), 1);
    let names: Vec<String> = write[0].names().map(|name| name.text).collect();
    // The separate debug file of the C library, if it is installed, has more.
    assert_eq!(names[..2], ["write", "__write"]);
    // `__nanosleep` is the global symbol; `nanosleep`, which programs call, is weak.
    let nanosleep = named(&table, "nanosleep")[0].name().unwrap();
    assert_eq!(nanosleep.text, "nanosleep");
    let memcpy = named(&table, "memcpy");
    assert!(memcpy.iter().any(|it| it.kind() == FunctionKind::Resolver));
}

#[test]
fn function_of_unknown_length_ends_at_the_next() {
    let table = table(&program("service"));
    let start = named(&table, "deregister_tm_clones");
    let next = named(&table, "register_tm_clones");
    assert_eq!(start[0].len(), next[0].address().0 - start[0].address().0);
    // `_fini` is the last function of its section, and ends where that ends.
    let elf = ElfFile::open(&program("service")).unwrap();
    let (address, len) = elf.section_range(".fini").unwrap();
    let fini = named(&table, "_fini");
    assert_eq!((fini[0].address(), fini[0].len()), (address, len));
}

#[test]
fn file_without_functions_is_refused() {
    let error = FunctionTable::read(fixture("corrupt/section_headers_stripped.pie")).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("so its functions cannot be found"),
        "{error}"
    );
}

fn functions_of(file: &SymbolFile) -> Result<FunctionTable> {
    let elf = ElfFile::read(memory_file(&file.bytes()), "/srv/server.exe".into());
    FunctionTable::of(&elf?)
}

#[test]
fn symbols_that_are_too_long_together_are_refused() {
    // Each name is a suffix of one string of 16,000 characters.
    let aliases = SymbolFile {
        names: format!("\0{}\0", "_".repeat(16_000)).into(),
        symbols: (0..50_000).map(|it| (1 + it % 16_000, 0)).collect(),
        segments: 1,
    };
    let error = functions_of(&aliases).unwrap_err().to_string();
    assert!(
        error.contains("the names of its symbols have more than 16777216 bytes"),
        "{error}"
    );

    let symbols = aliases.symbols.into_iter().take(1000).collect();
    let table = functions_of(&SymbolFile { symbols, ..aliases }).unwrap();
    let function = table.functions().next().unwrap();
    let lens: Vec<usize> = function.names().map(|name| name.symbol.len()).collect();
    assert!(lens.is_sorted());
    assert_eq!((lens.len(), lens[0]), (1000, 15_001));
}

#[test]
fn many_segments_are_searched_fast() {
    let file = SymbolFile {
        names: b"\0f\0".into(),
        symbols: (0..100_000).map(|at| (1, at)).collect(),
        segments: 60_000,
    };
    let start = std::time::Instant::now();
    let table = functions_of(&file).unwrap();
    assert_eq!(table.functions().len(), 100_000);
    assert!(table.functions().all(|function| function.len() == 1));
    // To look at each segment for each symbol takes minutes.
    assert!(start.elapsed() < DEADLINE / 4, "{:?}", start.elapsed());
}

/// Reads the functions of a file with these bytes and checks what holds of all tables.
fn check(bytes: &[u8]) {
    let elf = ElfFile::read(memory_file(bytes), "/srv/server.exe".into());
    let Ok(table) = elf.and_then(|elf| FunctionTable::of(&elf)) else {
        return;
    };
    let mut last = None;
    for function in table.functions() {
        assert!(last < Some(function.address()) && function.len() > 0);
        assert!(function.address().0.checked_add(function.len()).is_some());
        last = Some(function.address());
        for name in function.names() {
            assert!(!name.text.is_empty() && !name.symbol.is_empty());
        }
    }
}

// promise: Bad input: Any file gives functions or an error (the corpus, 256 damaged files, and a fuzz target)
#[test]
fn functions_of_the_corpus_are_read() {
    for corpus in ["elf", "functions"] {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus");
        for entry in std::fs::read_dir(Path::new(root).join(corpus)).unwrap() {
            check(&std::fs::read(entry.unwrap().path()).unwrap());
        }
    }
}

#[test]
fn function_is_named_by_symbol_or_frametable() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/functions");
    for (file, symbol) in [("symbols", "camlA__go_1"), ("frametable", "A.go")] {
        let table = table(&Path::new(root).join(file));
        let mut functions = table.functions();
        let function = functions.next().unwrap();
        assert_eq!(functions.len(), 0, "there is only one");
        assert_eq!(function.len(), 6);
        let name = function.name().unwrap();
        assert_eq!((&*name.text, &*name.symbol), ("A.go", symbol));
        let call = function.first_call().unwrap();
        assert_eq!((&*call.file, call.line), ("a.ml", 9));
    }
}

proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn damaged_files_give_functions_or_an_error(
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
        section in prop::sample::select(vec![".symtab", ".dynsym", ".eh_frame", ".data", ""]),
        seed in prop::sample::select(vec!["symbols", "frametable", ""]),
    ) {
        let seeds = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/functions"));
        let path = match seed {
            "" => fixture("gen_ocaml_2.pie"),
            seed => seeds.join(seed),
        };
        let mut bytes = std::fs::read(&path).unwrap();
        let elf = ElfFile::open(&path).unwrap();
        let contents = elf.contents(section).unwrap();
        for (index, byte) in damages {
            // In a section or anywhere.
            let at = match &contents {
                Some(it) if it.len > 0 => it.offset as usize + index.index(it.len),
                _ => index.index(bytes.len()),
            };
            bytes[at] = byte;
        }
        check(&bytes);
    }
}
