//! `watch -stack` with the programs of other compilers.

use test_support::{eventually, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::hit_stacks::{StackWatch, has_callers, last_stacks};
use crate::json_stacks::{addresses, functions, read, read_when};

// promise: Stacks: The stacks of calls of read(2) and of probes of OCaml 5, copied at the hit, are those that threads have while they wait,
//    through fibers, handlers of effects, callbacks and 64 KiB of buffers; where a fiber has no link to its parent, they are cut, and said to be
//    (3 programs in each chroot)
#[test]
fn stacks_of_calls_reach_through_fibers() {
    for (name, many) in [("stacks", 8), ("ocaml5/suspended", 9)] {
        let [file, _] = program_forms(name);
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let tool = StackWatch::begin(program.pid, "-stack -fn read");
        program.talker.ask("wait", "waits");
        let is_waiting = |it: &serde_json::Value| it["system_call"]["name"] == "read";
        read_when(program.pid, "", |threads| {
            threads.iter().filter(|it| is_waiting(it)).count() >= many
        });
        let hits = last_stacks(tool.end());
        let threads = eventually("they are known", || {
            let threads = read(program.pid, "");
            threads
                .iter()
                .all(|it| it["stack"] == "complete")
                .then_some(threads)
        });
        let (mut complete, mut cut) = (0, 0);
        for thread in threads.iter().filter(|it| is_waiting(it)) {
            let tid = thread["tid"].as_i64().unwrap() as i32;
            let stack = &hits[&tid];
            let is_complete = stack["state"] == "complete";
            let found = addresses(stack);
            assert!(
                has_callers(&addresses(thread), &found, is_complete),
                "{thread} {stack}"
            );
            let functions = functions(thread);
            // C code has called back in a fiber, so that no link leads from it to its parent.
            let has_called_back = name != "stacks"
                && ["called_back", "in_alloca", "arguments"]
                    .iter()
                    .any(|way| functions.contains(&format!("Suspended.{way}")));
            assert_eq!(is_complete, !has_called_back, "{thread} {stack}");
            if is_complete {
                complete += 1;
            } else {
                assert_eq!(stack["state"], "cut");
                cut += 1;
            }
        }
        assert!(
            complete >= 6 && (cut > 0) == (name != "stacks"),
            "{complete} {cut}"
        );
    }
}

#[test]
fn stacks_of_probes_reach_through_fibers() {
    let [file, _] = program_forms("ocaml5/fibers");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let tool = StackWatch::begin(program.pid, "-stack -probe start -sample 1/997 -limit 20");
    program.talker.ask("nested 20000", "nested");
    let hits = tool.until_end();
    let mut deepest = 0;
    for hit in &hits {
        let stack = &hit["stack"];
        assert_eq!(stack["state"], "complete", "{stack}");
        let functions = functions(stack);
        let many = |name: &str| functions.iter().filter(|it| *it == name).count();
        // The site's own frame, and one for each fiber and the outermost.
        assert_eq!(many("caml_runstack") + 2, many("Fibers.within"), "{stack}");
        deepest = deepest.max(many("caml_runstack"));
    }
    assert!(deepest >= 4, "{} {deepest}", hits.len());
}
