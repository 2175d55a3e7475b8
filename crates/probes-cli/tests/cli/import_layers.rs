//! Arrows run downwards: a file of the library imports only from its own layer, as ARCHITECTURE.md lists them, and
//! lower ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{collect_files, root};

/// Returns the layer of each module at the top of the library, the lowest first.
fn layers() -> BTreeMap<String, usize> {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = page.split_once("the lowest layer first").unwrap();
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

/// Returns the modules at the top of the library that code imports from, without its tests.
fn imported(code: &str) -> impl Iterator<Item = (&str, &str)> {
    let tests = [
        "#[cfg(test)]\nmod tests",
        "#[cfg(test)]\npub(super) mod tests",
        "#[cfg(test)]\npub(crate) mod tests",
    ];
    let ends = tests.into_iter().filter_map(|start| code.find(start));
    let code = &code[..ends.min().unwrap_or(code.len())];
    assert!(!code.contains("crate::{"), "one path a line: {code}");
    let lines = code.lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    // The macros that let tests fail any call of the kernel are for all layers.
    let lines = lines.filter(|line| !line.ends_with("::fault_point;"));
    lines.flat_map(|line| {
        let paths = line.split("crate::").skip(1);
        let ends = |it: char| !(it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_');
        paths.map(move |path| (path.split(ends).next().unwrap_or_default(), line))
    })
}

/// Returns the module at the top of the library that a file belongs to; `None` for the root, and for files of tests.
fn module_of(path: &Path) -> Option<String> {
    let path = path.with_extension("");
    let is_of_tests = path.iter().any(|it| it == "tests" || it == "testing");
    let module = path.iter().next()?.to_str()?.to_owned();
    (!is_of_tests && module != "lib").then_some(module)
}

#[test]
fn imports_lead_to_lower_layers() {
    let layers = layers();
    assert!(layers.len() > 30, "{layers:?}");
    let sources = root().join("crates/probes-lib/src");
    let mut files: Vec<PathBuf> = Vec::new();
    collect_files(&sources, "rs", &mut files);
    let (mut imports, mut upwards) = (0, Vec::new());
    for file in files {
        let Some(module) = module_of(file.strip_prefix(&sources).unwrap()) else {
            continue;
        };
        let own = layers
            .get(&module)
            .unwrap_or_else(|| panic!("{module} is in no layer of ARCHITECTURE.md"));
        let code = fs::read_to_string(&file).unwrap();
        for (other, line) in imported(&code) {
            let Some(layer) = layers.get(other) else {
                continue;
            };
            imports += 1;
            if layer > own {
                upwards.push(format!("{}: {}", file.display(), line.trim()));
            }
        }
    }
    assert!(imports > 1000, "{imports}");
    assert!(upwards.is_empty(), "{upwards:#?}");
}
