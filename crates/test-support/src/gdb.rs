//! Stacks as gdb finds them: it stops the process, and has all registers.

use std::collections::HashMap;
use std::fs;
use std::process::Command;

use crate::{Scratch, output};

/// Prints a line for each thread: `STACK TID ADDRESS ADDRESS ...`.
const SCRIPT: &str = "\
python
for thread in gdb.selected_inferior().threads():
    thread.switch()
    frame, addresses = gdb.newest_frame(), []
    try:
        while frame is not None and len(addresses) < 2000:
            if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
                addresses.append('%x' % frame.pc())
            frame = frame.older()
    except gdb.error:
        pass
    print('STACK', thread.ptid[1], *addresses)
end
";

/// Returns the addresses of the frames of each thread, the innermost first.
pub fn stacks(pid: i32) -> HashMap<i32, Vec<u64>> {
    let scratch = Scratch::new();
    let script = scratch.file("script");
    fs::write(&script, SCRIPT).expect("cannot write the script");
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-ex", "set debuginfod enabled off"]);
    gdb.args([
        "-ex",
        "set auto-load off",
        "-ex",
        "set exec-file-mismatch off",
    ]);
    gdb.args([
        "-ex",
        "set backtrace past-main on",
        "-ex",
        "set backtrace past-entry on",
    ]);
    gdb.args(["-ex", "set backtrace limit 2000"]);
    gdb.args(["-ex", &format!("file /proc/{pid}/exe")]);
    gdb.args(["-ex", &format!("set sysroot /proc/{pid}/root")]);
    gdb.args(["-ex", &format!("attach {pid}")]);
    let said = output(gdb.arg("-x").arg(&script));
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let lines = text.lines().filter_map(|line| line.strip_prefix("STACK "));
    let stacks: HashMap<i32, Vec<u64>> = lines
        .map(|line| {
            let mut words = line.split(' ');
            let tid = words.next().and_then(|tid| tid.parse().ok());
            let addresses = words.map(|it| u64::from_str_radix(it, 16).expect("an address"));
            (tid.expect("a thread"), addresses.collect())
        })
        .collect();
    assert!(!stacks.is_empty(), "gdb: {text}");
    stacks
}
