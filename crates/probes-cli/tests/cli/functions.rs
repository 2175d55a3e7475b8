//! `list -functions`, in all formats.

use std::fs;
use std::process::Command;

use serde_json::Value;
use test_support::{Scratch, SymbolFile, Talker, fixture, fixture_forms, program, program_forms};

use crate::count_functions::start_observing;
use crate::support::{command, object, run, run_command, run_on};

fn names(json: &Value) -> Vec<&str> {
    let functions = json["functions"].as_array().unwrap().iter();
    functions.map(|it| it["name"].as_str().unwrap()).collect()
}

#[test]
fn plain_lines_have_the_name_last() {
    for file in program_forms("service") {
        let answer = run_on("list -functions Stdlib.List.rev*", &file).answer();
        let lines: Vec<Vec<&str>> = answer
            .lines()
            .map(|line| line.splitn(6, ' ').collect())
            .collect();
        let rev = lines.iter().find(|line| line[5] == "Stdlib.List.rev");
        let [address, size, object, source, can, _] = rev.unwrap()[..] else {
            panic!("{answer}");
        };
        assert!(address.starts_with("0x"), "{answer}");
        assert!(size.parse::<u32>().unwrap() > 4, "{answer}");
        assert_eq!(object, file.file_name().unwrap().to_str().unwrap());
        assert!(source.starts_with("list.ml:"), "{answer}");
        assert_eq!(can, "count,time");
        assert!(lines.len() >= 5, "{answer}");
        assert!(
            lines
                .iter()
                .all(|line| line[5].starts_with("Stdlib.List.rev"))
        );
    }
}

#[test]
fn comma_lists_are_those_of_counting() {
    let file = program("service");
    let listed = |globs: &str| run_on(&format!("list -functions {globs}"), &file).answer();
    let apart = listed("Stdlib.List.rev Stdlib.List.rev_append main");
    assert_eq!(apart.lines().count(), 3);
    assert_eq!(listed("Stdlib.List.rev,Stdlib.List.rev_append main"), apart);
    // A comma that a space follows belongs to a name.
    let mut tool = command(["list", "-functions", "f(int, int),main", "-prog"]);
    let failure = run_command(tool.arg(&file)).failure();
    assert!(failure.contains(" matches f(int, int)\n"), "{failure}");
    let refused = run_on("list -functions main,", &file);
    assert!(
        refused.stderr.contains("a name in the comma list is empty"),
        "{refused:?}"
    );
}

#[test]
fn all_functions_are_listed_without_a_glob() {
    let file = program("service");
    let all = run_on("list -functions", &file);
    let count = all.stdout.lines().count();
    assert!(count > 1000);
    let table = run_on("list -functions -format table", &file).answer();
    assert_eq!(table.lines().count(), count + 2);
    assert!(
        table.lines().next().unwrap().contains("| function"),
        "{table}"
    );
    let json = run_on("list -functions -json", &file).json();
    let functions = json["functions"].as_array().unwrap();
    assert_eq!(functions.len(), count);
    let without = |field: &str| functions.iter().filter(|it| it[field] == false).count();
    let mut sum = format!("{count} functions");
    for (field, what) in [("can_count", "counted"), ("can_time", "timed")] {
        match without(field) {
            0 => {}
            refused => sum += &format!(", {refused} that cannot be {what}"),
        }
    }
    assert_eq!(all.stderr, sum + "\n");
}

#[test]
fn functions_say_whether_they_can_be_observed() {
    let scratch = Scratch::new();
    let (source, file) = (scratch.file("short.s"), scratch.file("short"));
    // `first` has no padding after it; the exit of `exit` is a branch target; `second` ends with padding; `third` has
    // a conditional jump to a part of the code that belongs to no function.
    let functions = [
        ("first", "ret"),
        (
            "exit",
            "mov %rdi, %rax; mov $1, %eax; test %edi, %edi; jne 1f; mov $2, %eax; 1: ret",
        ),
        ("second", "mov %rdi, %rax; ret; .skip 8, 0x90"),
        ("third", "mov $1, %eax; test %edi, %edi; je hidden; ret"),
    ];
    let mut assembly = String::from(".text\n.globl _start\n_start: ret\n");
    for (name, code) in functions {
        assembly += &format!(".type {name}, @function\n{name}: {code}\n.size {name}, . - {name}\n");
    }
    assembly += "hidden: ret\n";
    fs::write(&source, assembly).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-nostdlib", "-no-pie", "-static", "-o"]);
    assert!(gcc.arg(&file).arg(&source).status().unwrap().success());
    let line = "list -functions first exit second third";
    let plain = run_on(line, &file);
    let words: Vec<&str> = plain
        .stdout
        .lines()
        .map(|line| line.split(' ').nth(4).unwrap())
        .collect();
    assert_eq!(
        words,
        [
            "no(too_short)",
            "count(too_short)",
            "count,time",
            "count(unknown_code)"
        ]
    );
    let table = run_on(&format!("{line} -format table"), &file).answer();
    assert!(table.contains(" | no(too_short)       | first"), "{table}");
    let json = run_on(&format!("{line} -json"), &file).json();
    let shown = |index: usize| {
        let function = &json["functions"][index];
        (
            &function["can_count"],
            &function["can_time"],
            &function["refusal"],
        )
    };
    let (yes, no) = (Value::Bool(true), Value::Bool(false));
    let refusal = |reason, text| serde_json::json!({"reason": reason, "text": text});
    let short = refusal("too_short", "is too short: 1 byte, and a jump takes 5");
    assert_eq!(shown(0), (&no, &no, &short));
    let exit = "has an exit at +0x11 that is too short: 1 byte, and a jump takes 5";
    assert_eq!(shown(1), (&yes, &no, &refusal("too_short", exit)));
    assert_eq!(shown(2), (&yes, &yes, &Value::Null));
    let hidden = "has a jump at +0x7 to code that belongs to no known function, or to several";
    assert_eq!(shown(3), (&yes, &no, &refusal("unknown_code", hidden)));
}

// promise: Functions: Functions of a stripped program that its separate debug file names are listed as before, and counted to the last
// call; those of another build are not used (2 targets)
#[test]
fn stripped_programs_have_names_of_debug_files() {
    let other = fixture("churn.nopie");
    for original in fixture_forms("calls") {
        let scratch = Scratch::new();
        let program = scratch.copy(&original, "program");
        let list = || run_on("list -functions -json burst", &program);
        let named = list().json()["functions"].clone();
        let objcopy = |arguments: &[&str]| {
            let mut objcopy = Command::new("objcopy");
            objcopy.args(arguments).current_dir(scratch.path());
            assert!(objcopy.status().unwrap().success(), "{objcopy:?}");
        };
        objcopy(&["--only-keep-debug", "program", "program.debug"]);
        objcopy(&[
            "--strip-all",
            "--add-gnu-debuglink=program.debug",
            "program",
        ]);
        assert_eq!(list().json()["functions"], named);
        let mut target = Talker::start(&program);
        let running = start_observing("count", "-fn burst -json", target.pid());
        assert_eq!(target.ask("bursts 1 3", "done"), "done");
        let answer = object(running.end().answer().lines().next().unwrap());
        assert_eq!(answer["functions"][0]["hits"], 3000, "{answer}");
        fs::copy(&other, scratch.file("program.debug")).unwrap();
        let error = run_on("list -functions burst", &program).failure();
        let unnamed = "no function in program matches burst; ";
        assert!(error.contains(unnamed), "{error}");
        let debug_file = scratch.file("program.debug");
        let why = format!(
            " functions of program have no name: it is stripped, and {} cannot be used: it is of another build, ",
            debug_file.display()
        );
        assert!(error.contains(&why), "{error}");
    }
}

#[test]
fn code_that_cannot_be_read_is_unknown() {
    // More segments than patches are planned for.
    let file = SymbolFile {
        names: b"\0f\0".to_vec(),
        symbols: vec![(1, 0)],
        segments: 70,
    };
    let scratch = Scratch::new();
    let path = scratch.file("segments");
    fs::write(&path, file.bytes()).unwrap();
    let plain = run_on("list -functions", &path);
    assert!(plain.stdout.ends_with(" - - f\n"), "{}", plain.stdout);
    let warning = "segments has 70 segments with code or data, more than can be read";
    assert!(plain.stderr.contains(warning), "{}", plain.stderr);
    let json = run_on("list -functions -json", &path).json();
    let function = &json["functions"][0];
    for field in ["can_count", "can_time", "refusal"] {
        assert!(function[field].is_null(), "{function}");
    }
}

#[test]
fn several_globs_select_what_any_matches() {
    let file = program("service");
    let line = "list -functions -json Service.serve caml_alloc_s* main";
    let json = run_on(line, &file).json();
    let mut names = names(&json);
    names.dedup();
    assert!(
        names.contains(&"Service.serve") && names.contains(&"main"),
        "{names:?}"
    );
    assert!(names.contains(&"caml_alloc_small"), "{names:?}");
    assert!(!names.contains(&"caml_alloc"), "{names:?}");
}

#[test]
fn name_that_is_asked_for_is_shown() {
    let target = Talker::start(&program("service"));
    let shown = |globs: &str| {
        let answer = run(&format!("list -functions -pid {} {globs}", target.pid())).answer();
        answer.split(' ').next_back().unwrap().trim_end().to_owned()
    };
    // Two names of one function of the C library.
    assert_eq!(shown("free"), "free");
    assert_eq!(shown("[c]free free"), "free");
    assert_eq!(shown("[f]ree cfree"), "cfree");
}

// promise: Functions: The symbol of a function selects that function alone, among those of one name
#[test]
fn symbols_select_one_of_several_functions() {
    for file in program_forms("service") {
        let listed = run_on("list -functions -json Service.*", &file).json();
        let functions = listed["functions"].as_array().unwrap();
        assert!(functions.len() > 3);
        for function in functions {
            let symbol = function["symbol"].as_str().unwrap();
            assert!(symbol.starts_with("caml"), "{symbol}");
            let alone = run_on(&format!("list -functions -json {symbol}"), &file).json();
            assert_eq!(
                alone["functions"].as_array().unwrap(),
                std::slice::from_ref(function)
            );
            // A glob is one of names.
            let glob = format!("{}*", &symbol[..symbol.len() - 1]);
            run_on(&format!("list -functions {glob}"), &file).failure();
        }
    }
}

#[test]
fn addresses_select_the_function_there() {
    for file in program_forms("service") {
        let named = run_on("list -functions main", &file).answer();
        let address = named.split(' ').next().unwrap();
        let inside = u64::from_str_radix(&address[2..], 16).unwrap() + 3;
        for address in [address.to_owned(), format!("{inside:#x}")] {
            let line = format!("list -functions {address}");
            assert_eq!(run_on(&line, &file).answer(), named);
        }
        let error = run_on("list -functions caml_alloc 0x7", &file).failure();
        let start = format!(
            "no function in {} is known at 0x7\n",
            file.file_name().unwrap().to_str().unwrap()
        );
        assert!(error.contains(&start), "{error}");

        let target = Talker::start(&file);
        let line = format!("list -functions -pid {}", target.pid());
        let named = run(&format!("{line} main")).answer();
        let address = named.split(' ').next().unwrap();
        assert_eq!(run(&format!("{line} {address}")).answer(), named);
    }
}

#[test]
fn glob_without_a_match_names_similar_functions() {
    let file = program("service");
    for globs in ["Stdlib.List.mpa", "main Stdlib.List.mpa"] {
        let error = run_on(&format!("list -functions {globs}"), &file).failure();
        let (error, hint) = error.split_once('\n').unwrap();
        let start = "ocaml-probes: no function in service.exe matches Stdlib.List.mpa; did you mean \"Stdlib.List.map\"";
        assert!(error.starts_with(start), "{error}");
        assert!(hint.contains("-functions` lists the names"), "{hint}");
    }
    for glob in ["Sevrice.*", "service.*", "Service.rend?rr"] {
        let error = run_on(&format!("list -functions {glob}"), &file).failure();
        let message = format!("matches {glob}; did you mean \"Service.");
        assert!(error.contains(&message), "{error}");
    }
    let error = run_on("list -functions -json nothing_like_it", &file);
    assert_eq!(error.code, Some(1));
    assert!(
        error.stderr.contains("\"kind\":\"function.no_match\""),
        "{}",
        error.stderr
    );
}

#[test]
fn process_shows_all_loaded_objects() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let line = format!("list -functions -json -pid {}", target.pid());
        let json = run(&line).json();
        assert_eq!(json["pid"], target.pid());
        assert_eq!(json["program"], file.to_str().unwrap());
        assert_eq!(json["unreadable"], Value::Array(Vec::new()));
        let functions = json["functions"].as_array().unwrap();
        let of = |object: &str| {
            let is_of = |it: &&Value| it["object"].as_str().unwrap().contains(object);
            functions.iter().filter(is_of).count()
        };
        assert!(of("service") > 1000 && of("libc.so") > 1000 && of("[vdso]") > 2);
        let value = |it: &Value, field: &str| {
            let text = it[field]
                .as_str()
                .unwrap()
                .trim_start_matches("0x")
                .to_owned();
            u64::from_str_radix(&text, 16).unwrap()
        };
        let main = functions.iter().find(|it| it["name"] == "main").unwrap();
        let bias = value(main, "address") - value(main, "file_address");
        assert_eq!(
            bias == 0,
            file.to_str().unwrap().contains("nopie"),
            "{main}"
        );
    }
}

// promise: Bad input: A mapped file whose functions cannot be read is named, and the others are listed (1)
#[test]
fn unreadable_library_is_named_in_a_warning() {
    let scratch = Scratch::new();
    let plugin = scratch.copy(&fixture("objects/plugin.so"), "plugin.so");
    let mut target = Talker::start(&fixture("objects/host.pie"));
    target.ask(&format!("load {}", plugin.display()), "loaded");
    fs::remove_file(&plugin).unwrap();
    fs::write(&plugin, "another file").unwrap();
    let run = run(&format!("list -functions -json -pid {} main", target.pid()));
    // As root, a deleted file can be opened through /proc/PID/map_files.
    if nix::unistd::geteuid().is_root() && run.stderr.is_empty() {
        let json = run.json();
        assert_eq!(json["unreadable"], Value::Array(Vec::new()));
        let line = format!("list -functions -json -pid {}", target.pid());
        let all = crate::support::run(&line).json();
        let mut functions = all["functions"].as_array().unwrap().iter();
        assert!(functions.any(|it| it["object"].as_str().unwrap().contains("plugin.so")));
        return;
    }
    assert!(
        run.stderr.contains("\"kind\":\"unreadable_file\""),
        "{}",
        run.stderr
    );
    let json = run.json();
    assert_eq!(names(&json), ["main"]);
    let unreadable = json["unreadable"][0]["object"].as_str().unwrap();
    assert!(unreadable.contains("plugin.so"), "{unreadable}");
}

#[test]
fn programs_without_probes_have_functions_too() {
    let cat = test_support::Guard::spawn(Command::new("cat").stdin(std::process::Stdio::piped()));
    let line = format!("list -functions -pid {} read", cat.pid());
    test_support::eventually("cat has loaded its libraries", || {
        let run = run_command(&mut command(line.split(' ')));
        (run.code == Some(0) && run.stdout.contains("libc.so")).then_some(())
    });
}

/// A copy without symbols and debugging information; exported functions keep their names.
fn stripped(scratch: &Scratch, file: &std::path::Path) -> std::path::PathBuf {
    let copy = scratch.file("stripped");
    let mut strip = Command::new("strip");
    assert!(
        strip
            .arg("-o")
            .arg(&copy)
            .arg(file)
            .status()
            .unwrap()
            .success()
    );
    copy
}

#[test]
fn stripped_program_shows_lines_of_first_calls() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let copy = stripped(&scratch, &file);
        let source = |answer: &str| {
            let line = answer.lines().find(|line| line.ends_with(" Service.serve"));
            line.unwrap().split(' ').nth(3).unwrap().to_owned()
        };
        let line = "list -functions Service.serve";
        let (first, call) = (run_on(line, &file).answer(), run_on(line, &copy).answer());
        let (first, call) = (source(&first), source(&call));
        let call = call.strip_suffix("(call)").unwrap();
        let [first, call] = [first.as_str(), call].map(|source| {
            let (file, line) = source.rsplit_once(':').unwrap();
            assert!(file.ends_with("service.ml"), "{source}");
            line.parse::<u32>().unwrap()
        });
        assert!(first < call && call < first + 10, "{first} {call}");

        let json = run_on("list -functions -json Service.serve", &copy).json();
        let function = &json["functions"][0];
        assert_eq!(function["first_call"]["line"], call);
        assert!(function["file"].is_null() && function["line"].is_null());
        let table = run_on("list -functions -format table Service.serve", &copy).answer();
        assert!(
            table.contains(&format!(":{call}(call) | count,time | Service.serve")),
            "{table}"
        );
    }
}

#[test]
fn functions_without_a_name_are_counted() {
    let scratch = Scratch::new();
    let file = fixture("gen_ocaml_2_stripped.pie");
    let copy = stripped(&scratch, &file);
    let json = run_on("list -functions -json", &copy).json();
    let functions = json["functions"].as_array().unwrap();
    let unnamed = functions.iter().filter(|it| it["name"].is_null()).count();
    assert!(unnamed > 0, "{json}");
    let plain = run_on("list -functions", &copy).answer();
    let dashes = plain.lines().filter(|line| line.ends_with(" -")).count();
    assert_eq!(dashes, unnamed, "{plain}");
}

// promise: Bad input: Names that do not fit into memory are written one by one (3 formats)
#[test]
fn names_larger_than_memory_are_listed() {
    // f(P<int, int>, Q<P<int, int>, P<int, int>>, ...): 4 KB from 80 bytes.
    let symbol = "_Z1f1PIiiE1QIS0_S0_E1RIS2_S2_E1SIS4_S4_E1TIS6_S6_E1UIS8_S8_E1VISA_SA_E1WISC_SC_E";
    let functions = 600;
    let memory = 2 << 20;
    let file = SymbolFile {
        names: format!("\0{symbol}\0").into(),
        symbols: (0..functions).map(|at| (1, at)).collect(),
        segments: 1,
    };
    let scratch = Scratch::new();
    let path = scratch.file("templates");
    fs::write(&path, file.bytes()).unwrap();
    for format in ["plain", "table", "json"] {
        let answer = scratch.file(format);
        let mut command = Command::new("prlimit");
        command
            .arg(format!("--data={memory}"))
            .arg(env!("CARGO_BIN_EXE_ocaml-probes"));
        command.args(["list", "-functions", "-format", format, "-prog"]);
        let run = run_command(command.arg(&path).arg("-o").arg(&answer));
        assert_eq!(run.code, Some(0), "{format}: {}", run.stderr);
        let answer = fs::read_to_string(answer).unwrap();
        let names = answer.matches("f(P<int, int>, Q<P<int, int>, ").count();
        assert_eq!(names, functions as usize, "{format}");
        assert!(answer.len() > memory, "{format}: {}", answer.len());
    }
}
