// Included by the target `code` and by the tests of the library.

/// Returns code at 0x40_1000, with data after it, and the ranges of its functions. The first byte is their number; then
/// each function has a byte for its start and one for its length, in units of four bytes; the rest is code, of which
/// the last eighth is data.
fn code_input(bytes: &[u8]) -> Option<(Code, Vec<CodeRange>)> {
    const AT: u64 = 0x40_1000;
    let (count, rest) = bytes.split_first()?;
    let (ranges, rest) = rest.split_at(rest.len().min(2 * usize::from(*count)));
    let range = |pair: &[u8]| CodeRange {
        start: FileAddr(AT + 4 * u64::from(pair[0])),
        len: 4 * u64::from(pair[1]),
    };
    let ranges: Vec<CodeRange> = ranges.chunks_exact(2).map(range).collect();
    let (text, data) = rest.split_at(rest.len() - rest.len() / 8);
    let mut code = Code::default();
    code.add(FileAddr(AT), text.to_vec(), true);
    code.add(FileAddr(AT + 0x1000), data.to_vec(), false);
    Some((code, ranges))
}
