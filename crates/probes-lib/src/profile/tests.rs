//! Profiles of programs that unload libraries.

use std::collections::BTreeSet;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use test_support::{DEADLINE, Scratch, Talker};

use super::Profiler;

/// Loads a library, says where its function is, and calls it; unloads it, and goes on with the next one.
const HOST: &str = "
    #include <dlfcn.h>
    #include <stdio.h>
    int main(int argc, char **argv) {
        for (int i = 1; i + 1 < argc; i += 2) {
            void *library = dlopen(argv[i], RTLD_NOW);
            void (*function)(void) = (void (*)(void))dlsym(library, argv[i + 1]);
            printf(\"in %p\\n\", (void *)function);
            fflush(stdout);
            function();
            dlclose(library);
        }
    }";

fn compile(scratch: &Scratch, name: &str, text: &str, flags: &[&str]) -> std::path::PathBuf {
    let (source, file) = (scratch.file(&format!("{name}.c")), scratch.file(name));
    std::fs::write(&source, text).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-g", "-O0", "-o"]).arg(&file).arg(&source);
    assert!(gcc.args(flags).status().unwrap().success());
    file
}

// promise: Profiles: Stacks in a library that is unloaded keep their names, also if another one is loaded at its addresses
#[test]
fn unloaded_functions_keep_their_names() {
    let scratch = Scratch::new();
    let host = compile(&scratch, "host", HOST, &["-ldl"]);
    let mut command = Command::new(host);
    // More than are kept whole.
    const FUNCTIONS: [&str; 6] = ["first", "second", "third", "fourth", "fifth", "sixth"];
    for function in FUNCTIONS {
        let text = format!(
            "#include <unistd.h>
             void {function}(void) {{ char c; while (read(0, &c, 1) == 1 && c != '\\n'); }}"
        );
        let library = compile(&scratch, function, &text, &["-shared", "-fPIC"]);
        command.arg(library).arg(function);
    }
    let mut target = Talker::spawn(&mut command);
    let first_at = target.line().unwrap();
    let mut profiler = Profiler::of_process(target.pid(), true).unwrap();
    let sample = |profiler: &mut Profiler| {
        let due = Instant::now() + Duration::from_millis(10);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        profiler.sample(due).unwrap();
    };
    let names = |profiler: &mut Profiler| -> BTreeSet<String> {
        let stacks = profiler.profile().stacks;
        let frames = stacks.iter().flat_map(|stack| &stack.frames);
        let names = frames.filter_map(|frame| frame.function.clone());
        names.filter(|it| FUNCTIONS.contains(&&**it)).collect()
    };
    for loaded in 1..=FUNCTIONS.len() {
        if loaded > 1 {
            assert_eq!(target.ask("go", "in"), first_at, "it is loaded elsewhere");
        }
        let begun = Instant::now();
        let all: BTreeSet<String> = FUNCTIONS[..loaded]
            .iter()
            .map(|it| it.to_string())
            .collect();
        while names(&mut profiler) != all {
            assert!(begun.elapsed() < DEADLINE, "{:?}", names(&mut profiler));
            sample(&mut profiler);
        }
    }
}
