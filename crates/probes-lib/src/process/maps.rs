//! `/proc/PID/maps`, read as bytes: which addresses are mapped from which file, and how.

use std::str;

use crate::address::LiveAddr;
use crate::error::{Operation, Result};
use crate::process::Process;
use crate::process::denial;

/// One line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First byte.
    pub(crate) start: LiveAddr,
    /// One past the last byte.
    pub(crate) end: LiveAddr,
    pub(crate) executable: bool,
    pub(crate) shared: bool,
    /// Offset of `start` in the file, in bytes.
    pub(crate) offset: u64,
    /// Major and minor number of the device, as maps shows them.
    pub(crate) device: (u32, u32),
    /// 0 for memory that is not mapped from a file.
    pub(crate) inode: u64,
    /// The line itself: if it is still there, nothing about the mapping has changed.
    pub(crate) line: Vec<u8>,
}

/// What follows the path of a file that has no name any more.
pub(crate) const DELETED: &[u8] = b" (deleted)";

impl Mapping {
    /// Returns whether the file has no name any more.
    pub(crate) fn is_deleted(&self) -> bool {
        self.path().ends_with(DELETED)
    }

    pub(crate) fn contains(&self, address: LiveAddr, len: u64) -> bool {
        self.start <= address
            && address
                .0
                .checked_add(len)
                .is_some_and(|end| end <= self.end.0)
    }

    pub(crate) fn is_readable(&self) -> bool {
        let mut fields = self.line.splitn(3, |&byte| byte == b' ');
        fields.nth(1).is_some_and(|access| access.starts_with(b"r"))
    }

    pub(crate) fn is_writable(&self) -> bool {
        let mut fields = self.line.splitn(3, |&byte| byte == b' ');
        fields
            .nth(1)
            .is_some_and(|access| access.get(1) == Some(&b'w'))
    }

    /// Returns whether it can be read and executed, not written, and is not shared.
    pub(crate) fn is_plain_code(&self) -> bool {
        let mut fields = self.line.splitn(3, |&byte| byte == b' ');
        fields.nth(1) == Some(b"r-xp")
    }

    /// Returns the path of the file, or the name of another kind of memory, with newlines escaped.
    pub(crate) fn path(&self) -> &[u8] {
        let mut fields = self.line.splitn(6, |&byte| byte == b' ');
        fields.nth(5).unwrap_or_default().trim_ascii_start()
    }

    fn parse(line: &[u8]) -> Option<Mapping> {
        // "55d0c000-55d0d000 r-xp 00001000 fe:01 1234   /path that may hold anything"
        let mut fields = line.splitn(6, |&byte| byte == b' ');
        let (start, end) = pair(fields.next()?, '-')?;
        let perms = fields.next()?;
        let offset = hex(text(fields.next()?)?)?;
        let (major, minor) = pair(fields.next()?, ':')?;
        let inode = text(fields.next()?)?.parse().ok()?;
        Some(Mapping {
            start: LiveAddr(start),
            end: LiveAddr(end),
            executable: perms.get(2) == Some(&b'x'),
            shared: perms.get(3) == Some(&b's'),
            offset,
            device: (major as u32, minor as u32),
            inode,
            line: line.to_owned(),
        })
    }
}

/// Parses the lines of a process's maps, which are in order of address; skips invalid ones.
pub(crate) fn parse(maps: &[u8]) -> Vec<Mapping> {
    maps.split(|&byte| byte == b'\n')
        .filter_map(Mapping::parse)
        .collect()
}

/// Reads the mappings of a process.
pub(crate) fn read_maps(process: &Process) -> Result<Vec<Mapping>> {
    let maps = process
        .read_of_living_thread("maps")
        .map_err(|source| denial::denied_or_exited(process, Operation::Read, source))?;
    Ok(parse(&maps))
}

/// Returns whether all `mappings` are still there as they were.
pub(crate) fn still_mapped(process: &Process, mappings: &[Mapping]) -> Result<bool> {
    let mut mappings: Vec<&Mapping> = mappings.iter().collect();
    mappings.sort_unstable_by_key(|mapping| mapping.start);
    let lines: Vec<&[u8]> = mappings.iter().map(|it| it.line.as_slice()).collect();
    process
        .has_lines("maps", &lines)
        .map_err(|source| process.exited_or(source))
}

/// Returns whether all `mappings` are among `maps`, which are in order of address.
pub(crate) fn are_among(mappings: &[Mapping], maps: &[Mapping]) -> bool {
    let is_there = |mapping: &Mapping| {
        let found = maps.binary_search_by_key(&mapping.start, |it| it.start);
        found.is_ok_and(|index| maps[index] == *mapping)
    };
    mappings.iter().all(is_there)
}

/// Returns the mapping that holds `len` bytes at `address`.
pub(crate) fn find(mappings: &[Mapping], address: LiveAddr, len: u64) -> Option<&Mapping> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    let mapping = &mappings[after.checked_sub(1)?];
    mapping.contains(address, len).then_some(mapping)
}

/// Returns the page size in bytes of the mapping that begins at `start`, from `/proc/PID/smaps`.
pub(crate) fn page_size(smaps: &[u8], start: LiveAddr) -> Option<u64> {
    let mut lines = smaps.split(|&byte| byte == b'\n');
    lines.find(|line| Mapping::parse(line).is_some_and(|mapping| mapping.start == start))?;
    let size = lines.find_map(|line| line.strip_prefix(b"KernelPageSize:"))?;
    let kib: u64 = text(size)?.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

fn pair(field: &[u8], separator: char) -> Option<(u64, u64)> {
    let (one, other) = text(field)?.split_once(separator)?;
    Some((hex(one)?, hex(other)?))
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

fn text(field: &[u8]) -> Option<&str> {
    str::from_utf8(field).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/dbus-daemon\n\
00e03000-00e24000 rw-p 00000000 00:00 0           [heap]\n\
7f0000000000-7f0000001000 rw-s 00001000 fe:01 12 /SYSV\n\
7f0000002000-7f0000003000 r-xp 00000000 fe:01 99 /tmp/\xff name\\012 (deleted)\n\
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n";

    #[test]
    fn maps_with_any_path_are_read() {
        let maps = parse(MAPS);
        assert_eq!(maps.len(), 5);
        let exe = find(&maps, LiveAddr(0x0045_1ffa), 6).unwrap();
        assert!(exe.executable && !exe.shared && exe.inode == 173_521);
        assert_eq!(exe.device, (8, 2));
        assert!(maps[2].shared && maps[2].offset == 0x1000);
        assert_eq!(maps[3].inode, 99);
    }

    #[test]
    fn addresses_outside_a_mapping_are_not_found() {
        let maps = parse(MAPS);
        for address in [0, 0x3f_ffff, 0x0045_1ffb, 0x0045_2000, u64::MAX] {
            assert_eq!(find(&maps, LiveAddr(address), 6), None, "{address:#x}");
        }
        assert_eq!(find(&[], LiveAddr(0), 0), None);
    }

    #[test]
    fn lines_that_are_no_mappings_are_skipped() {
        assert_eq!(parse(b"\n\nx\n1-2\n1-2 r 0 0:0\nzz-2 r-xp 0 0:0 0 x\n"), []);
    }

    #[test]
    fn page_size_follows_the_line_of_its_mapping() {
        let smaps = b"\
00400000-80000000 r-xp 00000000 00:0f 7   /anon_hugepage (deleted)\n\
Size:            1048576 kB\nKernelPageSize:  1048576 kB\nMMUPageSize:     1048576 kB\n\
80000000-80001000 rw-p 00000000 00:00 0\nSize: 4 kB\nKernelPageSize:        4 kB\n";
        assert_eq!(page_size(smaps, LiveAddr(0x40_0000)), Some(1 << 30));
        assert_eq!(page_size(smaps, LiveAddr(0x8000_0000)), Some(4096));
        assert_eq!(page_size(smaps, LiveAddr(0x1000)), None);
    }
}
