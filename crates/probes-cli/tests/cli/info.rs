//! States of running programs, in all formats.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use test_support::{Talker, fixture, program, program_forms};

use crate::support::{Directory, both_forms, image, number, poke, probe, run, run_on, states};

fn json(pid: i32) -> Value {
    run(&format!("info -json -quiet -pid {pid}")).json()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn plain_lines_are_names_and_states_sorted() {
    for file in program_forms("init") {
        let target = Talker::start(&file);
        assert_eq!(
            states(target.pid()),
            "starts_off disabled\nstarts_on enabled\nstarts_on_twice enabled\ntested_only disabled\n"
        );
    }
}

#[test]
fn json_has_exactly_the_documented_fields() {
    for file in program_forms("init") {
        let target = Talker::start(&file);
        let json = json(target.pid());
        assert_eq!(json["version"], 1);
        assert_eq!(json["pid"], target.pid());
        let program = Path::new(json["program"].as_str().unwrap())
            .canonicalize()
            .unwrap();
        assert_eq!(program, file.canonicalize().unwrap());
        assert_eq!(
            keys(&json),
            [
                "build_id",
                "observed_functions",
                "observed_sites",
                "observer",
                "pid",
                "probes",
                "program",
                "type",
                "version"
            ]
            .into()
        );

        let twice = probe(&json, "starts_on_twice");
        assert_eq!(
            keys(twice),
            ["counter", "name", "semaphores", "sites", "state"].into()
        );
        assert_eq!(
            (&twice["state"], &twice["counter"]),
            (&json!("enabled"), &json!(1))
        );
        assert_eq!(twice["sites"].as_array().unwrap().len(), 2);
        let site = &twice["sites"][0];
        let expected = [
            "address",
            "arguments",
            "bytes",
            "enabled",
            "file",
            "file_address",
            "function",
            "generation",
            "line",
            "object",
        ];
        assert_eq!(keys(site), expected.into());
        assert_eq!(
            (&site["enabled"], &site["bytes"]),
            (&json!(true), &Value::Null)
        );
        assert!(site["file"].as_str().unwrap().ends_with("init.ml"));
        assert!(site["arguments"].is_array() && site["line"].is_u64());
        let semaphore = &twice["semaphores"][0];
        assert_eq!(
            keys(semaphore),
            ["address", "file_address", "object", "value"].into()
        );
        assert_eq!(semaphore["value"], 1);

        let tested = probe(&json, "tested_only");
        assert_eq!(tested["sites"], json!([]));
        assert_eq!(
            (&tested["state"], &tested["counter"]),
            (&json!("disabled"), &json!(0))
        );
    }
}

#[test]
fn addresses_are_file_addresses_plus_one_bias() {
    for target in both_forms("segments") {
        let json = json(target.pid());
        let sites = json["probes"].as_array().unwrap().iter();
        let biases: BTreeSet<u64> = sites
            .flat_map(|probe| probe["sites"].as_array().unwrap())
            .map(|site| number(&site["address"]) - number(&site["file_address"]))
            .collect();
        assert_eq!(biases.len(), 1);
    }
}

#[test]
fn sites_and_tables_show_the_same_as_json() {
    let target = Talker::start(&program("init"));
    let pid = target.pid();
    let json = json(pid);
    let site = &probe(&json, "starts_on")["sites"][0];
    let address = site["address"].as_str().unwrap();
    let file = site["file"].as_str().unwrap();
    let full = format!(" {file}:{}\n", site["line"]);
    let line = full.replace(file, file.rsplit('/').next().unwrap());
    let line = line.trim_end();
    let plain = run(&format!("info -sites -paths full -pid {pid}")).answer();
    assert!(file.starts_with('/') && plain.contains(&full), "{plain}");
    let plain = run(&format!("info -sites -pid {pid}")).answer();
    let expected = format!("starts_on enabled\n  site {address} enabled ");
    assert!(plain.contains(&expected) && plain.contains(line), "{plain}");
    let semaphore = &probe(&json, "starts_on")["semaphores"][0]["address"];
    let expected = format!("\n  semaphore {} 1\n", semaphore.as_str().unwrap());
    assert!(plain.contains(&expected), "{plain}");

    let table = run(&format!("info -format table -pid {pid}")).answer();
    assert!(
        table.contains(" starts_on_twice | enabled  | 1       | 2     \n"),
        "{table}"
    );
    let table = run(&format!("info -sites -format table -pid {pid}")).answer();
    assert!(table.contains(address) && table.contains(line), "{table}");
}

#[test]
fn disagreeing_counters_and_sites_are_inconsistent() {
    for mut target in both_forms("interrupted") {
        let pid = target.pid();
        let expected =
            "counter inconsistent\npart inconsistent\nsite inconsistent\nwhole disabled\n";
        let info = run(&format!("info -pid {pid}"));
        assert_eq!(
            info.stderr,
            format!(
                "ocaml-probes: warning: counters and sites of 3 probes disagree: counter, part, site\n\
                 hint: `ocaml-probes attach -pid {pid} -force -enable-all` or `-force -disable-all` \
                 repairs all\n"
            )
        );
        assert_eq!(info.answer(), expected);

        let quiet = run(&format!("info -quiet -pid {pid}"));
        assert_eq!(
            (quiet.stdout.as_str(), quiet.stderr.as_str()),
            (expected, "")
        );
        let sites = json(pid);
        let sites = probe(&sites, "part")["sites"].as_array().unwrap();
        let enabled: Vec<_> = sites
            .iter()
            .filter(|site| site["enabled"] == true)
            .collect();
        assert_eq!(enabled.len(), 1);
        assert!(target.guard().is_running());
    }
}

#[test]
fn foreign_bytes_at_a_site_are_shown() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        let address = probe(&json(pid), "plain")["sites"][0]["address"].clone();
        poke(pid, &json!(format!("{:#x}", number(&address) + 1)), &[0x0f]);
        assert!(states(pid).contains("plain inconsistent\n"));
        let site = &probe(&json(pid), "plain")["sites"][0].clone();
        assert_eq!(site["enabled"], Value::Null);
        assert!(
            site["bytes"].as_str().unwrap().starts_with("90 0f "),
            "{site}"
        );
        let sites = run(&format!("info -sites -pid {pid}"));
        let expected = format!("  site {} foreign(900f", address.as_str().unwrap());
        assert!(sites.stdout.contains(&expected), "{sites:?}");
        assert!(
            sites.stderr.contains("1 holds foreign bytes, and"),
            "{sites:?}"
        );

        poke(pid, &address, &[0xcc, 0x3d]);
        let site = &probe(&json(pid), "plain")["sites"][0].clone();
        assert_eq!(site["enabled"], false);
        assert!(
            site["bytes"].as_str().unwrap().starts_with("cc 3d "),
            "{site}"
        );
    }
}

#[test]
fn info_changes_nothing() {
    for target in both_forms("mixed_generations") {
        let before = image(target.pid());
        json(target.pid());
        assert!(image(target.pid()) == before);
    }
}

#[test]
fn running_program_is_read_after_deletion_or_replacement() {
    let directory = Directory::new("deleted");
    let file = directory.copy(&fixture("gen_ocaml_2.pie"), "prog");
    let target = Talker::start(&file);
    let expected = states(target.pid());
    std::fs::remove_file(&file).unwrap();
    assert_eq!(states(target.pid()), expected);
    directory.copy(&fixture("gen_ocaml.pie"), "prog");
    assert_eq!(states(target.pid()), expected);
    let names = |text: &str| -> Vec<String> {
        let names = text.lines().filter_map(|line| line.split(' ').next());
        names.map(str::to_owned).collect()
    };
    let replacement = run_on("list", &file).answer();
    assert_ne!(names(&replacement), names(&expected));
}

#[test]
fn running_fixtures_are_readable() {
    for name in [
        "gen_ocaml",
        "gen_ocaml_dot1",
        "gen_ocaml_1",
        "gen_ocaml_2_static",
        "arguments",
        "multi_semaphore",
        "prelinked",
        "page_borders",
        "edge_semaphore_ocaml",
        "edge_semaphore_ocaml_2",
        "foreign",
        "execonly",
        "shared_text",
        "zombie_leader",
    ] {
        for target in both_forms(name) {
            let states = states(target.pid());
            assert!(
                !states.contains("inconsistent") && !states.is_empty(),
                "{name}: {states}"
            );
        }
    }
}
