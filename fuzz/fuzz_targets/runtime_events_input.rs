// Included by the target `runtime_events` and by the tests of the library.

/// Returns a program with nothing but the version of OCaml that it was compiled by.
fn program_of_ocaml_5_4() -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    // `Sys.ocaml_release` and `Sys.ocaml_version`, each with the header of its block.
    let data = [4 << 10 | 3 << 8, 11, 9, 3, 1, 1 << 10 | 3 << 8 | 252, u64::from_le_bytes(*b"5.4.1\0\0\x02")];
    let len = data.len() as u64 * 8;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    // Entry; where program headers and section headers are.
    file.extend([0, 64, 0].map(u64::to_le_bytes).concat());
    // Flags; how long and how many the headers are.
    file.extend([0, 0, 64, 56, 1, 64, 0, 0].map(u16::to_le_bytes).concat());
    // One segment that is loaded, and can be read and written.
    file.extend([1, 6].map(u32::to_le_bytes).concat());
    file.extend([HEADERS, HEADERS, HEADERS, len, len, 8].map(u64::to_le_bytes).concat());
    file.extend(data.map(u64::to_le_bytes).concat());
    file
}
