//! Sections of debugging information whose bytes are compressed: as elf(5) says, or in the older way of GNU.

use std::io::Read;

use gimli::SectionId;
use goblin::elf::SectionHeader;
use goblin::elf::section_header::SHF_COMPRESSED;
use object::{CompressedData, CompressionFormat};
use ruzstd::decoding::StreamingDecoder;
use ruzstd::decoding::errors::FrameDecoderError::ReadFrameHeaderError;
use ruzstd::decoding::errors::ReadFrameHeaderError::SkipFrame;

use super::ElfFile;
use crate::numbers::{u32_at, u64_at};

/// What errors name.
pub(super) const WHAT: &str = "the debugging information";

/// How many bytes the header of a compressed section has: that of elf(5), `Elf64_Chdr`.
const HEADER_LEN: usize = 24;

/// The same of the older one of GNU.
const OLD_HEADER_LEN: usize = 12;

/// How the bytes of a section are compressed.
struct Compression {
    format: CompressionFormat,
    header_len: usize,
    /// How many bytes they become, as the header says.
    len: u64,
}

impl ElfFile {
    /// Returns how many bytes a section has once it is decompressed; 0 if it is not compressed. If it has more than its header says,
    /// which is found for zstd only, these are counted up to `most`: zlib is decompressed into as many as the header says.
    pub(super) fn decompressed_len(&self, section: &SectionHeader, most: u64) -> u64 {
        if !self.has_compressed(section) {
            return 0;
        }
        let mut header = [0; HEADER_LEN];
        let start = &mut header[..section.sh_size.min(HEADER_LEN as u64) as usize];
        let read = self.read_at(section.sh_offset, start, WHAT);
        let Some(compression) = read.ok().and_then(|()| compression(section, start)) else {
            return 0;
        };
        if compression.format != CompressionFormat::Zstandard || compression.len > most {
            return compression.len;
        }
        let bytes = self.section_up_to(most, section, WHAT);
        let data = bytes.unwrap_or_default();
        let data = data.get(HEADER_LEN..).unwrap_or_default();
        zstd_len(data, most).max(compression.len)
    }

    /// Returns whether the bytes of a section are compressed.
    fn has_compressed(&self, section: &SectionHeader) -> bool {
        has_compression_flag(section) || self.is_named(section, b".zdebug_")
    }

    /// Returns the bytes of a section of the debugging information, decompressed; `None` if it is missing, cannot be read, or has
    /// more than `most`. That of a stripped file is in its separate debug file, if that is there.
    pub(super) fn debug_section(&self, id: SectionId, most: u64) -> Option<Vec<u8>> {
        self.with_debugging_information()
            .debug_section_of_this_file(id, most)
    }

    fn debug_section_of_this_file(&self, id: SectionId, most: u64) -> Option<Vec<u8>> {
        let old_name = id.name().replacen(".debug_", ".zdebug_", 1);
        let section = self.section(id.name()).or_else(|| self.section(&old_name));
        let section = section?;
        if self.decompressed_len(section, most) > most {
            return None;
        }
        let bytes = self.section_up_to(most, section, WHAT);
        let bytes = bytes.ok()?;
        if !self.has_compressed(section) {
            return Some(bytes);
        }
        let compression = compression(section, &bytes)?;
        let data = CompressedData {
            format: compression.format,
            data: bytes.get(compression.header_len..)?,
            uncompressed_size: compression.len,
        };
        data.decompress().ok().map(|it| it.into_owned())
    }
}

/// Returns whether the bytes of a section are compressed as elf(5) says.
pub(super) fn has_compression_flag(section: &SectionHeader) -> bool {
    section.sh_flags & u64::from(SHF_COMPRESSED) != 0
}

/// Reads the header of a compressed section.
fn compression(section: &SectionHeader, bytes: &[u8]) -> Option<Compression> {
    const ELFCOMPRESS_ZLIB: u32 = 1;
    const ELFCOMPRESS_ZSTD: u32 = 2;
    if has_compression_flag(section) {
        let format = match u32_at(bytes, 0)? {
            ELFCOMPRESS_ZLIB => CompressionFormat::Zlib,
            ELFCOMPRESS_ZSTD => CompressionFormat::Zstandard,
            _ => CompressionFormat::Unknown,
        };
        return Some(Compression {
            format,
            header_len: HEADER_LEN,
            len: u64_at(bytes, 8)?,
        });
    }
    let len = bytes.strip_prefix(b"ZLIB")?.first_chunk()?;
    Some(Compression {
        format: CompressionFormat::Zlib,
        header_len: OLD_HEADER_LEN,
        len: u64::from_be_bytes(*len),
    })
}

/// Returns how many bytes the frames of zstd have that begin with `data`, up to the first that is damaged: of that, those that were
/// decompressed, without the last window. Counts little more than `most`.
fn zstd_len(mut data: &[u8], most: u64) -> u64 {
    let mut len = 0;
    let mut piece = [0; 1 << 14];
    while !data.is_empty() && len <= most {
        match StreamingDecoder::new(&mut data) {
            Ok(mut frame) => {
                while len <= most {
                    match frame.read(&mut piece) {
                        Ok(0) => break,
                        Ok(read) => len += read as u64,
                        Err(_) => return len,
                    }
                }
            }
            Err(ReadFrameHeaderError(SkipFrame { length, .. })) => {
                data = data.get(length as usize..).unwrap_or_default();
            }
            Err(_) => return len,
        }
    }
    len
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use test_support::Scratch;

    use super::*;
    use crate::testing::compile;

    /// How many bytes a block of zstd has at most.
    const BLOCK: u32 = 128 << 10;

    /// Frames of zstd (RFC 8878), each with so many blocks of zeroes; each begins with a frame that is skipped.
    fn zstd(frames: usize, blocks: usize) -> Vec<u8> {
        let skipped = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        let magic = 0xfd2f_b528_u32.to_le_bytes();
        // No checksum, no length; a window of 128 KiB.
        let header = [0, 7 << 3];
        let mut frame = [&skipped[..], &magic, &header].concat();
        for block in 1..=blocks {
            const RLE: u32 = 1 << 1;
            let is_last = u32::from(block == blocks);
            let bytes = (BLOCK << 3 | RLE | is_last).to_le_bytes();
            frame.extend(&bytes[..3]);
            frame.push(0);
        }
        frame.repeat(frames)
    }

    #[test]
    fn bytes_of_zstd_frames_are_counted() {
        let of_block = u64::from(BLOCK);
        assert_eq!(zstd_len(&zstd(3, 5), u64::MAX), 15 * of_block);
        let counted = zstd_len(&zstd(3, 100), of_block);
        assert!((of_block + 1..of_block * 2).contains(&counted), "{counted}");
        let cut = zstd(1, 5);
        // The last block before the damage is in the window, which is not read then.
        assert_eq!(zstd_len(&cut[..cut.len() - 2], u64::MAX), 3 * of_block);
    }

    #[test]
    fn section_is_read_only_up_to_a_limit() {
        let scratch = Scratch::new();
        // Many names, as others are not worth compressing.
        let names: Vec<_> = (0..500).map(|it| format!("name_{it}")).collect();
        let text = format!(
            "enum {{ {} }} e; int main(void) {{ return e; }}",
            names.join(",")
        );
        let compiled = |name: &str, flag: &str| {
            let program = compile(&scratch, "program.c", &text, &["-g", flag]);
            let named = scratch.file(name);
            std::fs::rename(program, &named).unwrap();
            named
        };
        let zlib = compiled("zlib", "-gz=zlib");
        for path in [&zlib, &compiled("old", "-gz=zlib-gnu")] {
            let elf = ElfFile::open(path).unwrap();
            let section = elf.section(".debug_str").or(elf.section(".zdebug_str"));
            let bytes = elf.debug_section(SectionId::DebugStr, 1 << 20).unwrap();
            assert!(bytes.len() as u64 > section.unwrap().sh_size, "{path:?}");
            assert!(memchr::memmem::find(&bytes, b"name_499\0").is_some());
            let read = |most| elf.debug_section(SectionId::DebugStr, most as u64);
            assert!(read(bytes.len()).is_some_and(|it| it == bytes));
            assert!(read(bytes.len() - 1).is_none());
        }
        // As many bytes as there is room for, from a header that claims none.
        let elf = ElfFile::open(&zlib).unwrap();
        let section = elf.section(".debug_str").unwrap();
        let mut header = [0; HEADER_LEN];
        header[0] = 2;
        let frames = zstd(1, (section.sh_size as usize - HEADER_LEN - 17) / 4);
        let mut bytes = [&header[..], &frames].concat();
        bytes.resize(section.sh_size as usize, 0);
        let file = OpenOptions::new().write(true).open(&zlib).unwrap();
        file.write_all_at(&bytes, section.sh_offset).unwrap();
        assert!(elf.decompressed_len(section, 1 << 20) > 1 << 20);
        assert!(elf.debug_section(SectionId::DebugStr, 1 << 20).is_none());
    }
}
