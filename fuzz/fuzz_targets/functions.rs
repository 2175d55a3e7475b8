//! Reads the functions of a file with arbitrary bytes (a memfd). The tests of the library check the corpus in the
//! same way.

#![no_main]

mod memory_file;

use libfuzzer_sys::fuzz_target;
use probes_lib::FunctionTable;

fuzz_target!(|bytes: &[u8]| {
    match FunctionTable::read(memory_file::file_with(bytes)) {
        // Writing the message must not panic.
        Err(error) => drop(error.to_string()),
        Ok(table) => {
            let mut last = None;
            for function in table.functions() {
                assert!(last < Some(function.address()) && function.len() > 0);
                last = Some(function.address());
                for name in function.names() {
                    assert!(!name.text.is_empty());
                }
            }
        }
    }
});
