//! [`SymbolFile`]: generated ELF files with many symbols, as only a hostile program has them.

/// A generated ELF file with functions of one byte at [`SymbolFile::CODE`].
#[derive(Clone, Debug)]
pub struct SymbolFile {
    /// The string table: names that each end with a NUL.
    pub names: Vec<u8>,
    /// Of each symbol, the offset of its name and that of its function in the code, which has 128 KiB.
    pub symbols: Vec<(u32, u32)>,
    /// How many executable segments there are. The last one has the functions.
    pub segments: u16,
}

impl SymbolFile {
    /// The address of the code.
    pub const CODE: u64 = 0x40_0000;

    /// The file:
    ///
    /// ```text
    /// header, segments | code | names | symbols | section names | 4 sections
    /// ```
    pub fn bytes(&self) -> Vec<u8> {
        const CODE_LEN: u64 = 128 << 10;
        const SECTION_NAMES: &[u8] = b"\0.symtab\0.strtab\0.shstrtab\0";
        let code_at = 64 + 56 * u64::from(self.segments);
        let names_at = code_at + CODE_LEN;
        let symbols_at = names_at + self.names.len() as u64;
        let symbols_len = 24 * self.symbols.len() as u64;
        let section_names_at = symbols_at + symbols_len;
        let sections_at = section_names_at + SECTION_NAMES.len() as u64;

        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]); // ET_EXEC, x86-64, version 1
        for word in [SymbolFile::CODE, 64, sections_at] {
            file.extend(word.to_le_bytes());
        }
        file.extend([0; 4]);
        for half in [64, 56, self.segments, 64, 4, 3] {
            file.extend(half.to_le_bytes());
        }
        for segment in 1..=u64::from(self.segments) {
            let (address, len) = if segment == u64::from(self.segments) {
                (SymbolFile::CODE, CODE_LEN)
            } else {
                (0x1000_0000 + 16 * segment, 16)
            };
            // PT_LOAD, readable and executable
            file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
            for word in [code_at, address, address, len, len, 1] {
                file.extend(word.to_le_bytes());
            }
        }
        file.resize(names_at as usize, 0xc3); // ret
        file.extend(&self.names);
        for &(name, function) in &self.symbols {
            file.extend(name.to_le_bytes());
            // A global function, in section 1
            file.extend([0x12, 0, 1, 0]);
            for word in [SymbolFile::CODE + u64::from(function), 1] {
                file.extend(word.to_le_bytes());
            }
        }
        file.extend(SECTION_NAMES);
        file.resize(file.len() + 64, 0);
        for (name, kind, at, len, entry) in [
            (1u32, 2u32, symbols_at, symbols_len, 24u64),
            (9, 3, names_at, self.names.len() as u64, 0),
            (17, 3, section_names_at, SECTION_NAMES.len() as u64, 0),
        ] {
            file.extend(name.to_le_bytes());
            file.extend(kind.to_le_bytes());
            for word in [0, 0, at, len, 0, 1, entry] {
                file.extend(word.to_le_bytes());
            }
        }
        file
    }
}
