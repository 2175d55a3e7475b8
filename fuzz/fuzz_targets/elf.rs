//! Reads the probe table of a file with arbitrary bytes (a memfd). The tests of the library check the
//! corpus in the same way.

#![no_main]

mod memory_file;

use libfuzzer_sys::fuzz_target;
use probes_lib::ProbeTable;

fuzz_target!(|bytes: &[u8]| {
    match ProbeTable::read(memory_file::file_with(bytes)) {
        // Writing the message must not panic.
        Err(error) => drop(error.to_string()),
        Ok(table) => {
            assert!(table.probes().len() > 0);
            for probe in table.probes() {
                assert!(probe.semaphores().len() > 0);
                let found = table.probe(probe.name()).expect("it is found by its name");
                assert_eq!(found.sites().len(), probe.sites().len());
                for site in probe.sites() {
                    assert!(site.code().is_pristine());
                    site.arguments().for_each(drop);
                }
            }
        }
    }
});
