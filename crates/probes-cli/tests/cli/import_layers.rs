//! Arrows run downwards: a file of the library imports only from its own layer, as ARCHITECTURE.md lists them, and
//! lower ones, and so does a file of `observe` from its steps; and no files of the library or the command line import
//! each other in a circle.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use super::{collect_files, root};

/// Returns the layer of each module that a table of ARCHITECTURE.md lists, the lowest first. `before` are words before
/// the table.
fn layers(before: &str) -> BTreeMap<String, usize> {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = page.split_once(before).unwrap();
    let rows = table.lines().skip_while(|line| !line.starts_with('|'));
    let rows = rows.take_while(|line| line.starts_with('|')).skip(2);
    let mut layers = BTreeMap::new();
    for (layer, row) in rows.enumerate() {
        let names = row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2);
        for name in names {
            assert_eq!(layers.insert(name.to_owned(), layer), None, "{name}");
        }
    }
    layers
}

/// Returns code up to its tests.
fn without_tests(code: &str) -> &str {
    let tests = [
        "#[cfg(test)]\nmod tests",
        "#[cfg(test)]\npub(super) mod tests",
        "#[cfg(test)]\npub(crate) mod tests",
    ];
    let ends = tests.into_iter().filter_map(|start| code.find(start));
    &code[..ends.min().unwrap_or(code.len())]
}

/// Returns the modules right below the path `above` that code imports from, without its tests, each with its line.
fn imported<'c>(code: &'c str, above: &str) -> impl Iterator<Item = (&'c str, &'c str)> {
    let code = without_tests(code);
    assert!(!code.contains("crate::{"), "one path a line: {code}");
    let lines = code.lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    // The macros that let tests fail any call of the kernel are for all layers.
    let lines = lines.filter(|line| !line.ends_with("::fault_point;"));
    lines.flat_map(move |line| {
        let paths = line.split(above).skip(1);
        let ends = |it: char| !(it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_');
        paths.map(move |path| (path.split(ends).next().unwrap_or_default(), line))
    })
}

/// Returns the module at the top of a directory that a file belongs to, by its path from there; `None` for the root of
/// the library, and for files of tests.
fn module_of(path: &Path) -> Option<String> {
    let path = path.with_extension("");
    let is_of_tests = path.iter().any(|it| it == "tests" || it == "testing");
    let module = path.iter().next()?.to_str()?.to_owned();
    (!is_of_tests && module != "lib").then_some(module)
}

/// Returns how many imports the files of a directory have from the modules right below the path `above`, which `layers`
/// has, and those that lead upwards.
fn imports_upwards(
    directory: &str,
    above: &str,
    layers: &BTreeMap<String, usize>,
) -> (usize, Vec<String>) {
    let directory = root().join("crates/probes-lib").join(directory);
    let mut files: Vec<PathBuf> = Vec::new();
    collect_files(&directory, "rs", &mut files);
    let (mut imports, mut upwards) = (0, Vec::new());
    for file in files {
        let Some(module) = module_of(file.strip_prefix(&directory).unwrap()) else {
            continue;
        };
        let own = layers
            .get(&module)
            .unwrap_or_else(|| panic!("{module} is in no layer of ARCHITECTURE.md"));
        let code = fs::read_to_string(&file).unwrap();
        for (other, line) in imported(&code, above) {
            let Some(layer) = layers.get(other) else {
                continue;
            };
            imports += 1;
            if layer > own {
                upwards.push(format!("{}: {}", file.display(), line.trim()));
            }
        }
    }
    (imports, upwards)
}

#[test]
fn imports_lead_to_lower_layers() {
    let layers = layers("the lowest layer first");
    assert!(layers.len() > 30, "{layers:?}");
    let (imports, upwards) = imports_upwards("src", "crate::", &layers);
    assert!(imports > 1000, "{imports}");
    assert!(upwards.is_empty(), "{upwards:#?}");
}

#[test]
fn imports_of_observe_lead_to_lower_steps() {
    let steps = layers("the lowest step first");
    assert!(steps.len() > 10, "{steps:?}");
    let (imports, upwards) = imports_upwards("src/observe", "crate::observe::", &steps);
    assert!(imports > 300, "{imports}");
    assert!(upwards.is_empty(), "{upwards:#?}");
}

/// The path of a module in its crate, such as `["output", "view"]`.
type ModulePath = Vec<String>;

/// Returns the files of a crate, by their modules, without the root and files of tests.
fn modules(sources: &Path) -> BTreeMap<ModulePath, String> {
    let mut files: Vec<PathBuf> = Vec::new();
    collect_files(sources, "rs", &mut files);
    let modules = files.into_iter().filter_map(|file| {
        let path = file.strip_prefix(sources).unwrap().with_extension("");
        let names = path.iter().map(|it| it.to_str().unwrap().to_owned());
        let module: ModulePath = names.collect();
        let is_of_tests = module.iter().any(|it| it == "tests" || it == "testing");
        let is_root = module == ["lib"] || module == ["main"];
        (!is_of_tests && !is_root).then(|| (module, fs::read_to_string(&file).unwrap()))
    });
    modules.collect()
}

/// Returns the paths that code names from the root of the crate, its own module or the module above: the path, then
/// each name of a list at its end.
fn paths(code: &str) -> Vec<ModulePath> {
    let mut paths = Vec::new();
    let lines = without_tests(code).lines();
    let code: Vec<&str> = lines
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n");
    let is_of_path = |it: char| it.is_ascii_alphanumeric() || it == '_' || it == ':';
    let mut rest = code.as_str();
    while let Some(start) = rest.find(is_of_path) {
        let path = &rest[start..];
        let (path, after) = path.split_at(path.find(|it| !is_of_path(it)).unwrap_or(path.len()));
        rest = after;
        let names: ModulePath = path.split("::").map(str::to_owned).collect();
        if !["crate", "self", "super"].contains(&path.split(':').next().unwrap()) {
            continue;
        }
        let list = after.strip_prefix('{').filter(|_| path.ends_with("::"));
        let list = list.and_then(|it| it.split_once('}')).map(|it| it.0);
        let Some(list) = list else {
            paths.push(names);
            continue;
        };
        assert!(!list.contains('{'), "no list in a list: {list}");
        let start = &names[..names.len() - 1];
        let ends = list.split(',').map(str::trim);
        paths.extend(ends.map(|end| {
            let end: ModulePath = end.split("::").map(str::to_owned).collect();
            [start, &end].concat()
        }));
    }
    paths
}

/// Returns the module whose file defines what a path names in `module`.
fn resolve<'m>(
    path: &[String],
    module: &[String],
    modules: &'m BTreeMap<ModulePath, String>,
) -> Option<&'m ModulePath> {
    let mut resolved = module.to_vec();
    for name in path {
        match name.as_str() {
            "crate" => resolved.clear(),
            "super" => drop(resolved.pop()),
            "self" => {}
            name => resolved.push(name.to_owned()),
        }
    }
    let lengths = (0..=resolved.len()).rev();
    let mut found = lengths.map(|len| modules.get_key_value(&resolved[..len]));
    found.find_map(|it| it).map(|(module, _)| module)
}

/// Returns which modules each one imports from. A module with files of its own may import from them, though they import
/// from it.
fn imports<'m>(
    modules: &'m BTreeMap<ModulePath, String>,
) -> BTreeMap<&'m ModulePath, BTreeSet<&'m ModulePath>> {
    let of_module = |(module, code): (&'m ModulePath, &String)| {
        let paths = paths(code);
        let others = paths.iter().filter_map(|it| resolve(it, module, modules));
        let others = others.filter(|other| !other.starts_with(module));
        (module, others.collect())
    };
    modules.iter().map(of_module).collect()
}

/// Returns the shortest circle from `start` back to it.
fn circle<'m>(
    start: &'m ModulePath,
    imports: &BTreeMap<&'m ModulePath, BTreeSet<&'m ModulePath>>,
) -> Option<Vec<&'m ModulePath>> {
    let mut reached = BTreeSet::new();
    let mut queue = VecDeque::from([vec![start]]);
    while let Some(way) = queue.pop_front() {
        for other in &imports[way.last().unwrap()] {
            let longer = [way.as_slice(), &[*other]].concat();
            if *other == start {
                return Some(longer);
            }
            if reached.insert(*other) {
                queue.push_back(longer);
            }
        }
    }
    None
}

#[test]
fn no_files_import_each_other_in_circles() {
    for (sources, least) in [("probes-cli/src", 500), ("probes-lib/src", 1000)] {
        let modules = modules(&root().join("crates").join(sources));
        let imports = imports(&modules);
        let number: usize = imports.values().map(BTreeSet::len).sum();
        assert!(number > least, "{sources}: {number}");
        let circles = modules.keys().filter_map(|it| circle(it, &imports));
        if let Some(circle) = circles.min_by_key(Vec::len) {
            let files: Vec<String> = circle.iter().map(|it| it.join("/") + ".rs").collect();
            panic!("{sources}: {} import each other", files.join(" -> "));
        }
    }
}
