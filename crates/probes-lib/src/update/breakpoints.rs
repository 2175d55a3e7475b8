//! Finds breakpoints of debuggers: the `cc` bytes that code has in memory and not in its file. A debugger
//! may remove its breakpoint at any time, so none is ever written over.

use crate::address::LiveAddr;
use crate::error::Result;
use crate::process::object::Object;
use crate::site::INT3;
use crate::update::snapshot::CodeRun;

/// Returns the breakpoints in `code`, which is sorted by address.
///
/// # Errors
///
/// If the file cannot be read.
pub(crate) fn find(objects: &[Object], code: &[CodeRun]) -> Result<Vec<LiveAddr>> {
    let mut found = Vec::new();
    let mut in_file = Vec::new();
    for run in code {
        let CodeRun { start, bytes, .. } = run;
        let Object {
            table, bias, elf, ..
        } = &objects[run.object];
        let segments = || table.segments().iter().filter(|it| it.executable);
        let mut from = 0;
        // A run may reach from one segment into the next.
        while from < bytes.len() {
            let address = bias.file(start.plus(from as u64));
            let holding = segments().find(|segment| segment.holds_in_file(address, 1));
            let len = match holding {
                Some(segment) => {
                    let rest = segment.file_len - (address.0 - segment.start.0);
                    (bytes.len() - from).min(rest as usize)
                }
                // Every site is in a segment, and so is the code between two sites, except for gaps that
                // the linker leaves.
                None => 1,
            };
            in_file.clear();
            in_file.resize(len, 0);
            if let Some(segment) = holding {
                elf.read_loaded(segment, address, &mut in_file)?;
            }
            let here = &bytes[from..from + len];
            let foreign = memchr::memchr_iter(INT3, here).filter(|&at| in_file[at] != INT3);
            found.extend(foreign.map(|at| start.plus((from + at) as u64)));
            from += len;
        }
    }
    Ok(found)
}
