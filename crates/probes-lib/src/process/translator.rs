//! Binary translators: programs that map another program and execute a translation of its code, such as
//! valgrind and qemu-user. What is written to the code itself has no effect, or leads to code that
//! the translator does not know.
//!
//! They are recognized by file names: otherwise, their mappings look like those of any program.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::process::maps::Mapping;

/// Files that a translator maps into a process whose executable is the translated program.
const LIBRARIES: [(&str, &str); 3] = [
    ("libdynamorio.so", "DynamoRIO"),
    ("pinbin", "Pin"),
    ("libpinbin.so", "Pin"),
];

/// How the names of qemu-user's files go on after `qemu-`: `qemu-x86_64-static`. There are other programs of qemu, which
/// translate nothing (`qemu-img`), or run a whole kernel (`qemu-system-x86_64`), whose processes are not processes here.
const QEMU_PROCESSORS: [&[u8]; 20] = [
    b"aarch64",
    b"alpha",
    b"arm",
    b"cris",
    b"hexagon",
    b"hppa",
    b"i386",
    b"loongarch",
    b"m68k",
    b"microblaze",
    b"mips",
    b"nios2",
    b"or1k",
    b"ppc",
    b"riscv",
    b"s390x",
    b"sh4",
    b"sparc",
    b"x86_64",
    b"xtensa",
];

/// The tools of valgrind, which executes one of them: `memcheck-amd64-linux`.
const VALGRIND_TOOLS: [&[u8]; 13] = [
    b"cachegrind",
    b"callgrind",
    b"dhat",
    b"drd",
    b"exp-bbv",
    b"exp-dhat",
    b"exp-ptrcheck",
    b"exp-sgcheck",
    b"helgrind",
    b"lackey",
    b"massif",
    b"memcheck",
    b"none",
];

/// Returns the name of the translator that executes the program of a process, given its executable
/// and its mappings.
pub(crate) fn translator(executable: &Path, maps: &[Mapping]) -> Option<&'static str> {
    let name = executable.file_name().unwrap_or_default().as_bytes();
    of_executable(name).or_else(|| {
        let files = maps.iter().filter(|mapping| mapping.inode != 0);
        let mut names = files.filter_map(|mapping| {
            let path = Path::new(OsStr::from_bytes(mapping.path()));
            path.file_name().map(OsStr::as_bytes)
        });
        names.find_map(|name| {
            if name.starts_with(b"vgpreload_") {
                return Some("valgrind");
            }
            let is_it = |(file, _): &&(&str, &str)| name == file.as_bytes();
            LIBRARIES.iter().find(is_it).map(|found| found.1)
        })
    })
}

/// Returns the name of the translator that has an executable of this name.
fn of_executable(name: &[u8]) -> Option<&'static str> {
    let tool = name
        .strip_suffix(b"-amd64-linux")
        .or_else(|| name.strip_suffix(b"-x86-linux"));
    let is_valgrind = tool.is_some_and(|tool| VALGRIND_TOOLS.contains(&tool));
    let of_qemu = name.strip_prefix(b"qemu-");
    let is_qemu = of_qemu.is_some_and(|rest| QEMU_PROCESSORS.iter().any(|it| rest.starts_with(it)));
    match name {
        _ if is_valgrind => Some("valgrind"),
        _ if is_qemu => Some("qemu-user"),
        b"box64" => Some("box64"),
        b"rosetta" => Some("Rosetta"),
        b"FEXInterpreter" | b"FEXLoader" => Some("FEX"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps::parse;

    #[test]
    fn translators_are_recognized_by_file_names() {
        let maps = |path: &str| {
            let line = format!("55d0c000-55d0d000 r-xp 00001000 fe:01 1234   {path}\n");
            parse(line.as_bytes())
        };
        let none = maps("/app/server");
        for (executable, mapped, expected) in [
            (
                "/usr/libexec/valgrind/memcheck-amd64-linux",
                &none,
                Some("valgrind"),
            ),
            ("/usr/bin/qemu-x86_64-static", &none, Some("qemu-user")),
            ("/usr/bin/qemu-aarch64", &none, Some("qemu-user")),
            ("/usr/bin/qemu-system-x86_64", &none, None),
            ("/usr/sbin/qemu-ga", &none, None),
            ("/usr/bin/qemu-storage-daemon", &none, None),
            ("/usr/bin/box64", &none, Some("box64")),
            ("/app/server", &none, None),
            ("/srv/server-amd64-linux", &none, None),
            ("/opt/FEX", &none, None),
            (
                "/app/server",
                &maps("/opt/lib64/release/libdynamorio.so"),
                Some("DynamoRIO"),
            ),
            (
                "/app/server",
                &maps("/opt/pin/intel64/bin/pinbin"),
                Some("Pin"),
            ),
            (
                "/opt/own-amd64-linux",
                &maps("/usr/libexec/valgrind/vgpreload_core-amd64-linux.so"),
                Some("valgrind"),
            ),
            ("/usr/lib64/ld-linux-x86-64.so.2", &none, None),
            ("/", &none, None),
        ] {
            assert_eq!(
                translator(Path::new(executable), mapped),
                expected,
                "{executable}"
            );
        }
    }
}
