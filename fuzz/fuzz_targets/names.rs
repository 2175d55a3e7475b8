//! Demangles arbitrary bytes as the symbol of a function. The tests of the library check the corpus in the same way.

#![no_main]

mod memory_file;

use libfuzzer_sys::fuzz_target;
use probes_lib::FunctionTable;

include!("sections_input.rs");
include!("names_input.rs");

fuzz_target!(|symbol: &[u8]| {
    let file = sections_input(&names_input(symbol)).expect("it is long enough");
    let Ok(table) = FunctionTable::read(memory_file::file_with(&file)) else {
        return;
    };
    for name in table.functions().flat_map(|function| function.names()) {
        assert!(!name.text.is_empty());
        // A demangled name may be longer than its symbol, but not without end.
        assert!(name.text.len() <= name.symbol.len().max(8 << 10), "{}", name.symbol);
    }
});
