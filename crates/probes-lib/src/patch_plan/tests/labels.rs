//! Labels that gcc writes into its assembly are the truth about branch targets: no patch overwrites or moves one,
//! except as its first byte.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use test_support::Scratch;

use super::*;
use crate::Functions;

/// Returns functions with switches of all kinds: with cases that are moved away, that are impossible, in loops, two
/// in one function, and with labels in an array.
fn source() -> String {
    let mut c = String::from(
        "volatile int sink;\n\
         __attribute__((cold, noinline)) void fail(int it) { sink = it; asm volatile(\"\"); }\n\
         __attribute__((noinline)) int other(int it) { sink += it; asm volatile(\"\"); return it; }\n\
         typedef int function(int);\n\
         function *const functions[] = { other, other, other, other };\n\
         const int numbers[] = { 16, 32, 48, 64, 80, 96 };\n",
    );
    let body = |index: usize, case: usize| match (index + case) % 6 {
        0 => format!("asm volatile(\"nop\"); return {case};"),
        1 => format!("sink = {case}; break;"),
        2 if index % 2 == 0 => "fail(y); break;".to_owned(),
        2 => "if (__builtin_expect(y == 7, 0)) fail(y); return 1;".to_owned(),
        3 => format!("y = other(y + {case}); break;"),
        4 => "y ^= sink; x++; break;".to_owned(),
        _ => format!("return other(y) + {case};"),
    };
    for index in 0..24 {
        let switch = |kind: usize| {
            let mut text = String::from("switch (x) {\n");
            for case in 0..6 + index % 9 {
                writeln!(text, "case {case}: {}", body(index + kind, case)).unwrap();
            }
            let default = match index % 3 {
                0 => "default: __builtin_unreachable();",
                1 => "default: fail(x);",
                _ => "",
            };
            writeln!(text, "{default}\n}}").unwrap();
            text
        };
        let (one, two) = (switch(0), switch(1));
        let text = match index % 4 {
            0 => one,
            1 => format!("for (int i = 0; i < y; i++) {{ x = (x + i) & 7; {one} }}"),
            2 => format!("{one} x = sink; {two} y += numbers[x & 3];"),
            _ => format!(
                "static void *const labels[] = {{ &&a, &&b, &&c }};\n\
                 goto *labels[x & 1];\n\
                 a: y++; asm volatile(\"nop\"); goto *labels[(y & 1) + 1];\n\
                 b: if (y == 3) fail(y); {one} return y;\n\
                 c: return functions[y & 3](x);"
            ),
        };
        writeln!(c, "int f{index}(int x, int y) {{\n{text}\nreturn y; }}").unwrap();
    }
    c
}

fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    output.stdout
}

/// Returns the addresses of the labels of a file, as nm(1) prints them.
fn labels(file: &Path) -> BTreeSet<u64> {
    let symbols = String::from_utf8(run(Command::new("nm").arg(file))).unwrap();
    let label = |line: &str| {
        let mut words = line.split(' ');
        let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
        let number = name.strip_prefix(".L")?;
        let is_label = kind == "t" && number.bytes().all(|it| it.is_ascii_digit());
        is_label.then(|| u64::from_str_radix(address, 16).unwrap())
    };
    symbols.lines().filter_map(label).collect()
}

/// Asserts that no patch of code which is compiled with these options has a label inside.
fn check(options: &str) {
    let scratch = Scratch::new();
    let [c, labelled, program] = ["a.c", "labelled", "program"].map(|it| scratch.file(it));
    std::fs::write(&c, source()).unwrap();
    let common = ["-nostdlib", "-Wl,-e,f0", "-Wa,--keep-locals", "-w", "-o"];
    let mut gcc = Command::new("gcc");
    gcc.args(common).arg(&labelled).args(options.split(' '));
    run(gcc.arg(&c));
    // Without the labels: all symbols are targets.
    let mut objcopy = Command::new("objcopy");
    run(objcopy
        .args(["-w", "-N", ".L*"])
        .arg(&labelled)
        .arg(&program));
    let labels = labels(&labelled);
    assert!(labels.len() > 100);
    let functions = Functions::of_file(&program).unwrap();
    let object = &functions.objects()[0];
    let planner = object.patch_planner().unwrap();
    let (mut count, mut planned, mut unknown) = (0, 0, 0);
    for function in object.table().functions() {
        let range = function.range();
        let plan = planner.function(range);
        let anywhere = (0..range.len).filter_map(|offset| {
            let address = FileAddr(range.start.0 + offset);
            planner.instruction(range, address).ok()
        });
        let exits = plan.exits.iter();
        let exits = exits.flat_map(|it| it.sites.iter().chain([&it.entry]).cloned());
        for site in anywhere.flatten().chain(exits) {
            let inside = patched(&site).filter(|it| *it != site.address().0);
            for address in inside {
                assert!(
                    !labels.contains(&address),
                    "{options}: {address:#x}: {site:x?}"
                );
            }
        }
        count += 1;
        planned += usize::from(plan.entry.is_ok());
        // Exits that are refused for other reasons, such as their length, do not count.
        if let Err(Refusal::UnknownTargets { .. } | Refusal::UnknownCode { .. }) = plan.exits {
            unknown += 1;
        }
    }
    assert!(
        count > 24 && planned >= count - 2,
        "{options}: {planned} of {count}"
    );
    // Where labels are in an array, it is not known whether other jumps lead out; and some functions share a part.
    assert!(unknown <= 10, "{options}: {unknown} of {count}");
}

/// Returns the addresses of the bytes that a patch overwrites or moves.
fn patched(site: &PatchSite) -> impl Iterator<Item = u64> + use<> {
    let displaced = site.address().0..site.address().0 + site.displaced().len() as u64;
    let written = site.writes(LoadBias::NONE, site.trampolines(LoadBias::NONE).start);
    let written = written.into_iter().flatten();
    let written = written.flat_map(|(at, bytes)| at.0..at.0 + bytes.len() as u64);
    displaced.chain(written)
}

#[test]
fn no_patch_has_a_label_inside() {
    check("-O2 -fPIC -shared");
    check("-Os -fPIE -static-pie -fcf-protection=full");
    check("-O2 -fno-pie -no-pie -static -fcf-protection=none");
}

#[test]
fn tables_in_executable_segments_are_read() {
    check("-Os -fno-pie -no-pie -static -Wl,-z,noseparate-code");
    check("-O3 -fPIC -shared -Wl,-z,noseparate-code");
}
