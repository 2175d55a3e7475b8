//! `stack` with the programs of other compilers, from outside of their root.

use test_support::program_forms;

use crate::chroot::{ChrootProgram, Isolation};
use crate::json_stacks::{check_collections, check_complete, check_waiting};

// promise: Stacks: The stacks of OCaml 5 are those of gdb in its fibers, in the handlers of effects, through callbacks from C within fibers, where gdb stops early,
//    and in domains; also in other namespaces (4 programs of 9 to 20 threads)
#[test]
fn stacks_reach_through_fibers_and_callbacks() {
    let ways = [
        "plain",
        "callback",
        "in_alloca",
        "arguments",
        "raised",
        "library",
        "finaliser",
    ];
    for file in program_forms("stacks") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("wait", "waits");
        // In OCaml 5, gdb does not find the callers of C code that is called directly.
        check_waiting(program.pid, &ways, "Stacks", |way| way.is_some());
    }
    let ways = [
        "nested",
        "called_back",
        "in_alloca",
        "arguments",
        "in_handler",
        "resumed",
        "passed_on",
        "grown",
    ];
    // Their fibers have no link to their parents, because C code has called back.
    let cut_by_gdb = ["called_back", "in_alloca", "arguments"];
    for (file, isolation) in program_forms("ocaml5/suspended").iter().zip(Isolation::ALL) {
        let mut program = ChrootProgram::start(isolation, file, &[]);
        program.talker.ask("wait", "waits");
        check_waiting(program.pid, &ways, "Suspended", |way| {
            way.is_none_or(|way| !cut_by_gdb.contains(&way))
        });
    }
}

// promise: Profiles: Stacks of running OCaml 5 are complete wherever it is interrupted, also in nested fibers (2 programs in each
//    chroot, all but one of 20 or more)
#[test]
fn stacks_of_running_code_are_complete() {
    for (name, work) in [
        ("calls", "run 1 10000000000"),
        ("ocaml5/fibers", "nested 100000000"),
    ] {
        let [file, _] = program_forms(name);
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.send(work);
        check_complete(program.pid);
    }
}

#[test]
fn collections_of_ocaml_5_are_told_apart() {
    let [file, _] = program_forms("stacks");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    program.talker.ask("collect", "collects");
    check_collections(program.pid);
}
