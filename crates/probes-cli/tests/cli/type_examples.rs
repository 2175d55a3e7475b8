//! The documentation of each type of the library shows how it is used.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::type_names::type_defined;
use super::{collect_files, root};

/// Returns the types that a `lib.rs` exports.
fn exported_types(lib: &str) -> Vec<&str> {
    let uses = lib.split("\npub use ").skip(1);
    let paths = uses.filter_map(|it| it.split(';').next());
    let names = paths.flat_map(|it| it.split(['{', '}', ',']));
    let names = names.filter_map(|it| it.rsplit("::").next());
    let is_type = |it: &&str| it.starts_with(char::is_uppercase) && it.contains(char::is_lowercase);
    names.map(str::trim).filter(is_type).collect()
}

/// Adds the lines of the doc comments of the public types of a file.
fn add_docs(source: &str, docs: &mut BTreeMap<String, Vec<String>>) {
    let mut doc = Vec::new();
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("///") {
            doc.push(text.trim().to_owned());
        } else if let Some(name) = type_defined(line).filter(|_| line.starts_with("pub ")) {
            docs.insert(name.to_owned(), std::mem::take(&mut doc));
        } else if line.is_empty() {
            doc.clear();
        }
    }
}

fn has_example(doc: &[String]) -> bool {
    let fences = doc.iter().filter(|line| line.starts_with("```"));
    fences.step_by(2).any(|opening| opening != "```text")
}

/// Returns the type that has the example, if the doc comment says so: "[`Type`] has an example.", with a path or
/// without; also that of "[`Type::function`] has an example."
fn linked(doc: &[String]) -> Option<String> {
    let text = doc.join(" ");
    let (before, _) = text.split_once(" has an example.")?;
    let (_, link) = before.rsplit_once("[`")?;
    let name = link.split(|it: char| !it.is_alphanumeric()).next()?;
    Some(name.to_owned())
}

#[test]
fn each_public_type_has_an_example() {
    let sources = root().join("crates/probes-lib/src");
    let lib = fs::read_to_string(sources.join("lib.rs")).unwrap();
    let mut files: Vec<PathBuf> = Vec::new();
    collect_files(&sources, "rs", &mut files);
    let mut docs = BTreeMap::new();
    for file in files {
        add_docs(&fs::read_to_string(file).unwrap(), &mut docs);
    }
    let types = exported_types(&lib);
    assert!(types.len() > 180, "{}", types.len());
    let shown = |name: &str| docs.get(name).is_some_and(|doc| has_example(doc));
    let without = types.iter().filter(|name| {
        let doc = docs.get(**name).map_or(&[][..], |doc| doc);
        !has_example(doc) && !linked(doc).is_some_and(|it| shown(&it))
    });
    let without: Vec<_> = without.collect();
    assert!(
        without.is_empty(),
        "give them examples, or link to a type that has one (\"[`Type`] has an example.\"): {without:#?}"
    );
}
