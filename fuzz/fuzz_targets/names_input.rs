// Included by the target `names` and by the tests of the library.

/// Returns the contents of the sections of a file with one function, whose symbol is this.
fn names_input(symbol: &[u8]) -> Vec<u8> {
    let symbol = &symbol[..symbol.len().min(1 << 14)];
    let mut input = vec![0];
    let lens = [1, 0, 0, 0, 24, symbol.len() as u16 + 2, 0, 0];
    input.extend(lens.map(u16::to_le_bytes).concat());
    input.push(0xc3);
    // A global function in section 1, at the beginning of the code.
    input.extend([1, 0, 0, 0, 0x12, 0, 1, 0]);
    input.extend([0x40_0000, 1].map(u64::to_le_bytes).concat());
    input.extend([&[0], symbol, &[0]].concat());
    input
}
