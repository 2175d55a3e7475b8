//! Programs of Debian's archive, which are stripped: `OCAML_PROBES_STRIPPED` names the directory that
//! `scripts/matrix` has unpacked their packages in.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::run_on;

/// The executable in the packages whose name begins with `name`.
fn executable(name: &str) -> PathBuf {
    let directory = std::env::var_os("OCAML_PROBES_STRIPPED").expect("scripts/matrix sets it");
    let files = std::fs::read_dir(Path::new(&directory).join("usr/bin")).unwrap();
    let mut files = files.map(|file| file.unwrap().path());
    let is_it = |file: &PathBuf| {
        let file = file.file_name().unwrap().to_str().unwrap();
        file.starts_with(name) && !file.contains("gtk") && !file.contains("fsmonitor")
    };
    files.find(is_it).unwrap()
}

// promise: Functions: OCaml programs of Debian's archive, which are stripped, have names and lines (liquidsoap, unison)
#[test]
fn stripped_programs_of_debian_have_names() {
    for (name, least) in [("liquidsoap", 12_000), ("unison", 3_500)] {
        let json = run_on("list -functions -json", &executable(name)).json();
        let functions = json["functions"].as_array().unwrap();
        let is_of_ocaml = |it: &&Value| it["language"] == "ocaml";
        let named = functions.iter().filter(is_of_ocaml);
        let (named, calls) = named.fold((0, 0), |(named, calls), it| {
            (named + 1, calls + usize::from(it["first_call"].is_object()))
        });
        assert!(named >= least && calls >= least, "{name}: {named}, {calls}");
    }
}
