//! One meaning a word: no two types of a crate have the same name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{collect_files, root};

/// The name that each command's flags have: clap's.
const FLAGS_OF_COMMAND: &str = "Args";

/// Returns the name of the type that `line` defines. Types in functions and in inline modules of tests, and the types
/// of traits are indented, and do not count.
pub(super) fn type_defined(line: &str) -> Option<&str> {
    let public = line
        .strip_prefix("pub")
        .map(|rest| match rest.strip_prefix('(') {
            Some(rest) => rest.split_once(')').map_or("", |(_, rest)| rest),
            None => rest,
        });
    let line = public.map_or(line, |it| it.trim_start());
    let keywords = ["struct ", "enum ", "union ", "trait ", "type "];
    let rest = keywords.iter().find_map(|it| line.strip_prefix(it))?;
    rest.split(|it: char| !it.is_alphanumeric()).next()
}

/// Whether a file of sources holds nothing but tests.
fn is_of_tests(path: &Path) -> bool {
    path.with_extension("").iter().any(|it| it == "tests")
}

/// Adds where each type of a crate is defined.
fn add_types(sources: &Path, defined: &mut BTreeMap<String, Vec<String>>) {
    let mut files: Vec<PathBuf> = Vec::new();
    collect_files(sources, "rs", &mut files);
    for file in files {
        let path = file.strip_prefix(sources).unwrap();
        if is_of_tests(path) {
            continue;
        }
        for line in fs::read_to_string(&file).unwrap().lines() {
            if let Some(name) = type_defined(line).filter(|it| *it != FLAGS_OF_COMMAND) {
                let places = defined.entry(name.to_owned()).or_default();
                places.push(path.display().to_string());
            }
        }
    }
}

#[test]
fn no_two_types_have_the_same_name() {
    let mut types = 0;
    let mut several = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let directory = entry.unwrap();
        let mut defined = BTreeMap::new();
        add_types(&directory.path().join("src"), &mut defined);
        types += defined.len();
        for (name, places) in defined.iter().filter(|(_, places)| places.len() > 1) {
            several.push(format!(
                "{}: {name}: {places:?}",
                directory.path().display()
            ));
        }
    }
    assert!(types > 900, "{types}");
    assert!(
        several.is_empty(),
        "give them different names: {several:#?}"
    );
}
