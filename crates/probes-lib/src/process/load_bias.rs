//! Where an object is loaded: the cases of load bias, as pure functions.
//!
//! ```text
//! ET_EXEC     file   0x400000 ├─ text ─┤        bias 0: the linker's addresses are final
//!             memory 0x400000 ├─ text ─┤
//!
//! ET_DYN      file   0x0      ├─ text ─┤        bias = AT_ENTRY - e_entry
//! (PIE)       memory 0x55d0c0000000 ├─ text ─┤
//!
//! ET_DYN, loaded by an explicit `ld.so prog`:    AT_ENTRY is the loader's own; then
//!             the mapping of the file at offset 0x2000 starts at 0x7f1c20002000, and the segment
//!             with that offset at 0x3000 (0x1000 of padding):  bias = 0x7f1c20002000 - 0x3000
//!
//! prelinked   the file's own addresses are high; the bias is small or "negative" (modulo 2⁶⁴)
//! ```

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::elf::{Linking, Segment};
use crate::process::maps::{self, Mapping};

/// `AT_ENTRY` of getauxval(3): "The entry address of the executable."
pub(crate) const AT_ENTRY: u64 = 9;

/// `AT_PHDR`: "The address of the program headers of the executable."
pub(crate) const AT_PHDR: u64 = 3;

/// `AT_PHNUM`: "The number of program headers."
pub(crate) const AT_PHNUM: u64 = 5;

/// `AT_BASE`: "The base address of the program interpreter (usually, the dynamic linker)."
pub(crate) const AT_BASE: u64 = 7;

/// Returns the bias of a process's executable.
///
/// `is_file` returns whether a mapping is of the executable's file. The auxiliary vector counts only if
/// the maps agree with it, or if the file is not mapped any more (its text was moved to huge pages).
pub(crate) fn of_executable(
    linking: Linking,
    entry: FileAddr,
    segments: &[Segment],
    auxv: &[u8],
    maps: &[Mapping],
    is_file: impl Fn(&Mapping) -> bool,
) -> Option<LoadBias> {
    if linking == Linking::Fixed {
        return Some(LoadBias::NONE);
    }
    let by_maps: Vec<LoadBias> = maps
        .iter()
        .filter(|mapping| is_file(mapping))
        .filter_map(|mapping| of_mapping(segments, mapping))
        .collect();
    let by_entry = auxv_value(auxv, AT_ENTRY).map(|at| LoadBias::between(entry, LiveAddr(at)));
    match by_entry {
        Some(bias) if by_maps.is_empty() || by_maps.contains(&bias) => Some(bias),
        _ => by_maps.first().copied(),
    }
}

/// Returns the biases of an object that is not the executable: one for each place where its file is
/// loaded.
///
/// Each mapping of its first segment is a candidate. The object is loaded there, and not merely mapped
/// to be read, if its code and data are where they belong: `dlopen` maps the whole file as it is, and
/// then one segment after the other over it.
pub(crate) fn of_object(
    segments: &[Segment],
    maps: &[Mapping],
    is_file: impl Fn(&Mapping) -> bool,
) -> impl Iterator<Item = LoadBias> {
    let first = segments.iter().min_by_key(|segment| segment.start);
    let mut biases: Vec<LoadBias> = Vec::new();
    for mapping in maps.iter().filter(|mapping| is_file(mapping)) {
        let Some(first) = first.filter(|it| page_start(it.offset) == mapping.offset) else {
            continue;
        };
        let bias = LoadBias::between(FileAddr(page_start(first.start.0)), mapping.start);
        if !biases.contains(&bias) && is_loaded(segments, bias, maps, &is_file) {
            biases.push(bias);
        }
    }
    biases.into_iter()
}

/// Returns whether all code and data of an object are mapped where the bias puts them.
pub(crate) fn is_loaded(
    segments: &[Segment],
    bias: LoadBias,
    maps: &[Mapping],
    is_file: impl Fn(&Mapping) -> bool,
) -> bool {
    let mut parts = segments.iter().filter(|it| it.executable || it.writable);
    parts.all(|segment| {
        is_in_place(segment, bias, maps, &is_file)
            && has_zeroes_in_place(segment, bias, maps, &is_file)
    })
}

/// Returns whether the end of a segment's part of the file is mapped where the bias puts it. The
/// beginning of data is made read-only later (RELRO), and may be in a mapping of its own.
fn is_in_place(
    segment: &Segment,
    bias: LoadBias,
    maps: &[Mapping],
    is_file: impl Fn(&Mapping) -> bool,
) -> bool {
    let Some(last) = segment.file_len.checked_sub(1) else {
        return true;
    };
    let address = bias.live(FileAddr(segment.start.0.wrapping_add(last)));
    let offset = segment.offset.wrapping_add(last);
    maps::find(maps, address, 1).is_some_and(|mapping| {
        let mapped = mapping.offset.wrapping_add(address.0 - mapping.start.0);
        is_file(mapping) && mapped == offset && mapping.executable == segment.executable
    })
}

/// Returns whether the zeroes at the end of a segment (`.bss`), which are in no file, are mapped where the bias
/// puts them. They are mapped last; before that, another part of the file is there. Counters may be among them.
/// True also if they are all in the last page of the segment's part of the file.
fn has_zeroes_in_place(
    segment: &Segment,
    bias: LoadBias,
    maps: &[Mapping],
    is_file: impl Fn(&Mapping) -> bool,
) -> bool {
    let address_of = |offset: u64| FileAddr(segment.start.0.wrapping_add(offset));
    let Some(last) = segment.len.checked_sub(1) else {
        return true;
    };
    let last = address_of(last);
    let last_of_file = segment.file_len.checked_sub(1).map(address_of);
    if last_of_file.is_some_and(|of_file| page_start(of_file.0) == page_start(last.0)) {
        return true;
    }
    let mapping = maps::find(maps, bias.live(last), 1);
    mapping.is_some_and(|mapping| !is_file(mapping))
}

/// Returns the bias at which the mapping is the beginning of one of the segments; `None` if it begins none.
pub(crate) fn of_mapping(segments: &[Segment], mapping: &Mapping) -> Option<LoadBias> {
    let segment = segments
        .iter()
        .filter(|segment| segment.executable == mapping.executable)
        .find(|segment| page_start(segment.offset) == mapping.offset)?;
    let start = FileAddr(page_start(segment.start.0));
    Some(LoadBias::between(start, mapping.start))
}

/// Returns the bias at which the mapping is a part of one of the segments with code; `None` if it is of none.
pub(crate) fn of_code(segments: &[Segment], mapping: &Mapping) -> Option<LoadBias> {
    let has_it = |segment: &&Segment| {
        let end = segment.offset.saturating_add(segment.file_len);
        segment.executable && (page_start(segment.offset)..end).contains(&mapping.offset)
    };
    let segment = segments.iter().find(has_it)?;
    let moved = mapping.offset.wrapping_sub(segment.offset);
    let start = FileAddr(segment.start.0.wrapping_add(moved));
    Some(LoadBias::between(start, mapping.start))
}

fn page_start(address: u64) -> u64 {
    address & !(PAGE - 1)
}

/// Returns the value of `key` in an auxiliary vector, which consists of pairs of 64-bit words.
pub(crate) fn auxv_value(auxv: &[u8], key: u64) -> Option<u64> {
    auxv.chunks_exact(16).find_map(|pair| {
        let (found, value) = pair.split_first_chunk()?;
        let value = u64::from_le_bytes(*value.first_chunk()?);
        (u64::from_le_bytes(*found) == key).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps;

    /// Numbers of a real PIE (gcc 12, OCaml 4.13): its headers by `readelf -lW`, its maps and
    /// AT_ENTRY from a run.
    const ENTRY: FileAddr = FileAddr(0x1_4400);
    const MAPS: &[u8] = b"\
5637d2a00000-5637d2a12000 r--p 00000000 fe:01 4711   /srv/server.exe\n\
5637d2a12000-5637d2a5d000 r-xp 00012000 fe:01 4711   /srv/server.exe\n\
5637d2a5d000-5637d2a74000 r--p 0005d000 fe:01 4711   /srv/server.exe\n\
5637d2a75000-5637d2aa0000 rw-p 00074000 fe:01 4711   /srv/server.exe\n\
7f1c20000000-7f1c20028000 r-xp 00012000 fe:01 99     /lib/libc.so.6\n";
    const BIAS: LoadBias = LoadBias(0x5637_d2a0_0000);

    fn segments() -> Vec<Segment> {
        [
            (0x0, 0x0, 0x11b30, false, false),
            (0x12000, 0x12000, 0x4a5d1, true, false),
            (0x5d000, 0x5d000, 0x164c0, false, false),
            (0x75338, 0x74338, 0x29e60, false, true),
        ]
        .map(|(start, offset, len, executable, writable)| Segment {
            start: FileAddr(start),
            offset,
            file_len: len,
            len,
            executable,
            writable,
        })
        .to_vec()
    }

    fn auxv(entry: u64) -> Vec<u8> {
        let words = [3, 0x5637_d2a0_0040, AT_ENTRY, entry, 0, 0];
        words
            .iter()
            .flat_map(|word: &u64| word.to_le_bytes())
            .collect()
    }

    fn bias(linking: Linking, auxv: &[u8], maps: &[u8]) -> Option<LoadBias> {
        let maps = maps::parse(maps);
        of_executable(linking, ENTRY, &segments(), auxv, &maps, |mapping| {
            mapping.inode == 4711
        })
    }

    #[test]
    fn part_of_code_is_anywhere() {
        let maps = maps::parse(
            b"\
7f0000012000-7f0000013000 r-xp 00012000 fe:01 4711   /srv/server.exe\n\
7f0000020000-7f0000021000 r-xp 0001a000 fe:01 4711   /srv/server.exe\n\
7f0000030000-7f0000031000 r-xp 0005d000 fe:01 4711   /srv/server.exe\n",
        );
        let biases = maps.iter().map(|it| of_code(&segments(), it));
        let expected = [Some(0x7f00_0000_0000), Some(0x7f00_0000_6000), None];
        assert!(biases.eq(expected.map(|it| it.map(LoadBias))));
    }

    #[test]
    fn fixed_address_program_has_no_bias() {
        assert_eq!(bias(Linking::Fixed, &auxv(77), MAPS), Some(LoadBias::NONE));
    }

    #[test]
    fn pie_is_where_its_entry_is() {
        let entry = BIAS.live(ENTRY).0;
        let pie = Linking::PositionIndependent;
        assert_eq!(bias(pie, &auxv(entry), MAPS), Some(BIAS));
        // Its text may have been moved to huge pages, which come from another file.
        let (no_maps, _) = MAPS.split_at(0);
        assert_eq!(bias(pie, &auxv(entry), no_maps), Some(BIAS));
    }

    #[test]
    fn object_is_loaded_once_code_and_data_match() {
        let biases = |maps: &[u8]| -> Vec<LoadBias> {
            let maps = maps::parse(maps);
            of_object(&segments(), &maps, |mapping| mapping.inode == 4711).collect()
        };
        assert_eq!(biases(MAPS), [BIAS]);
        // Its data are not mapped yet: `dlopen` is about to map them over its first mapping, which is of
        // the whole file.
        let half = b"\
5637d2a00000-5637d2a12000 r--p 00000000 fe:01 4711   /srv/server.exe\n\
5637d2a12000-5637d2a5d000 r-xp 00012000 fe:01 4711   /srv/server.exe\n\
5637d2a5d000-5637d2aa0000 r--p 0005d000 fe:01 4711   /srv/server.exe\n";
        assert_eq!(biases(half), []);
        // The file is mapped to be read.
        let read = b"5637d2a00000-5637d2aa0000 r--p 00000000 fe:01 4711   /srv/server.exe\n";
        assert_eq!(biases(read), []);
        // Twice, the second time with the beginning of its data made read-only.
        let twice = [
            MAPS,
            b"\
7f0000000000-7f0000012000 r--p 00000000 fe:01 4711   /srv/server.exe\n\
7f0000012000-7f000005d000 r-xp 00012000 fe:01 4711   /srv/server.exe\n\
7f000005d000-7f0000074000 r--p 0005d000 fe:01 4711   /srv/server.exe\n\
7f0000075000-7f0000077000 r--p 00074000 fe:01 4711   /srv/server.exe\n\
7f0000077000-7f00000a0000 rw-p 00076000 fe:01 4711   /srv/server.exe\n",
        ];
        assert_eq!(biases(&twice.concat()), [BIAS, LoadBias(0x7f00_0000_0000)]);
    }

    #[test]
    fn object_is_loaded_once_its_zeroes_are_mapped() {
        let biases = |len: u64, zeroes: &[u8]| -> Vec<LoadBias> {
            let mut segments = segments();
            segments[3].len = len;
            let mut maps = maps::parse(&[MAPS, zeroes].concat());
            maps.sort_by_key(|mapping| mapping.start);
            of_object(&segments, &maps, |mapping| mapping.inode == 4711).collect()
        };
        let of_file = b"5637d2aa0000-5637d2ab0000 r--p 000a0000 fe:01 4711   /srv/server.exe\n";
        let of_no_file = b"5637d2aa0000-5637d2ab0000 rw-p 00000000 00:00 0\n";
        // In the last page of the data.
        assert_eq!(biases(0x2acc8, b""), [BIAS]);
        assert_eq!(biases(0x2acc9, b""), []);
        assert_eq!(biases(0x2acc9, of_file), []);
        assert_eq!(biases(0x2acc9, of_no_file), [BIAS]);
        assert_eq!(biases(u64::MAX, of_no_file), []);
    }

    #[test]
    fn every_mapping_of_a_segment_gives_the_bias() {
        for mapping in maps::parse(MAPS).iter().filter(|it| it.inode == 4711) {
            assert_eq!(of_mapping(&segments(), mapping), Some(BIAS), "{mapping:?}");
        }
        // No segment begins at this offset, or has this protection.
        for line in [
            "5637d2a00000-5637d2a12000 r--p 00001000 fe:01 4711   /srv/server.exe\n",
            "5637d2a00000-5637d2a12000 r-xp 00000000 fe:01 4711   /srv/server.exe\n",
        ] {
            let mapping = &maps::parse(line.as_bytes())[0];
            assert_eq!(of_mapping(&segments(), mapping), None, "{line}");
        }
    }

    #[test]
    fn maps_decide_if_the_entry_is_wrong() {
        let pie = Linking::PositionIndependent;
        assert_eq!(bias(pie, &auxv(0x7f1c_2001_0000), MAPS), Some(BIAS));
        assert_eq!(bias(pie, b"", MAPS), Some(BIAS));
        assert_eq!(bias(pie, b"", b""), None);
    }
}
