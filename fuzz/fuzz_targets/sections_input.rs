// Included by the target `sections` and by the tests of the library.

/// The sections of the file: name, type, flags, address (0 if it is not loaded), and the length of its entries.
const SECTIONS: [(&str, u32, u64, u64, u64); 9] = [
    (".text", 1, 6, 0x40_0000, 0),
    (".eh_frame", 1, 2, 0x41_0000, 0),
    (".data", 1, 3, 0x42_0000, 0),
    (".rela.dyn", 4, 2, 0x43_0000, 24),
    (".symtab", 2, 0, 0, 24),
    (".strtab", 3, 0, 0, 0),
    (".debug_line", 1, 0, 0, 0),
    (".debug_info", 1, 0, 0, 0),
    (".debug_abbrev", 1, 0, 0, 0),
];

/// Returns an ELF file with these contents of its sections: the first byte says whether it is position independent, then
/// each section but the last one has two bytes for its length, then they follow each other.
fn sections_input(bytes: &[u8]) -> Option<Vec<u8>> {
    let (is_pie, rest) = bytes.split_first()?;
    let (lens, mut rest) = rest.split_at_checked(2 * (SECTIONS.len() - 1))?;
    let mut contents = Vec::new();
    for len in lens.chunks_exact(2) {
        let len = usize::from(u16::from_le_bytes([len[0], len[1]]));
        let (section, others) = rest.split_at(len.min(rest.len()));
        contents.push(section);
        rest = others;
    }
    contents.push(rest);
    let loaded = SECTIONS.iter().filter(|it| it.3 != 0).count();
    let mut names = vec![0];
    let mut file = vec![0; 64 + 56 * loaded];
    let mut headers = vec![0; 64];
    let mut segments = Vec::new();
    let mut header = |name: &str, kind: u32, flags, address, at: usize, len: usize, entry: u64| {
        headers.extend((names.len() as u32).to_le_bytes());
        headers.extend(kind.to_le_bytes());
        // The names of the symbols are in the next section.
        let link = if kind == 2 { 6 } else { 0 };
        for word in [flags, address, at as u64, len as u64, link, 1, entry] {
            headers.extend(word.to_le_bytes());
        }
        names.extend(name.bytes().chain([0]));
    };
    for ((name, kind, flags, address, entry), contents) in SECTIONS.into_iter().zip(contents) {
        let (at, len) = (file.len(), contents.len());
        header(name, kind, flags, address, at, len, entry);
        if address != 0 {
            let access: u32 = if flags & 4 != 0 { 5 } else { 4 | (flags as u32 & 1) << 1 };
            segments.extend([1_u32, access].map(u32::to_le_bytes).concat());
            let words = [at as u64, address, address, len as u64, len as u64, 1];
            segments.extend(words.map(u64::to_le_bytes).concat());
        }
        file.extend(contents);
    }
    let names_len = ".shstrtab".len() + 1;
    let names_at = file.len();
    let all = SECTIONS.iter().map(|it| it.0.len() + 1).sum::<usize>();
    header(".shstrtab", 3, 0, 0, names_at, 1 + all + names_len, 0);
    file.extend(names);
    let headers_at = file.len() as u64;
    file.extend(headers);
    file[64..64 + segments.len()].copy_from_slice(&segments);
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[16..24].copy_from_slice(&[2 + (is_pie & 1), 0, 62, 0, 1, 0, 0, 0]);
    file[24..48].copy_from_slice(&[0x40_0000, 64, headers_at].map(u64::to_le_bytes).concat());
    let count = SECTIONS.len() as u16 + 2;
    let halves = [64, 56, loaded as u16, 64, count, count - 1];
    file[52..64].copy_from_slice(&halves.map(u16::to_le_bytes).concat());
    Some(file)
}
