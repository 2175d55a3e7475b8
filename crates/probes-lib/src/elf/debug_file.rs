//! The separate debug file of a stripped file: what strip(1) removed of it, as distributions ship it (`-dbgsym`, `-dbg` and
//! `-debuginfo` packages) and `objcopy --only-keep-debug` writes it. Found in the places where gdb looks:
//!
//! ```text
//! /usr/lib/debug/.build-id/AB/CDEF….debug       the build-id of the stripped file
//! DIRECTORY/NAME                              ┐
//! DIRECTORY/.debug/NAME                       │ its directory, and the name in its .gnu_debuglink
//! /usr/lib/debug/DIRECTORY/NAME               ┘
//! ```
//!
//! It is used only if it is of the same build: if the build-ids are equal, the sections with code have the same places, and, where
//! `.gnu_debuglink` leads to it, the checksum of all its bytes is the one that is written there. Symbols of another build
//! would lead to patches in the middle of instructions.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use flate2::Crc;
use goblin::elf::section_header::{SHF_EXECINSTR, SHT_NOBITS};

use crate::elf::ElfFile;
use crate::elf::file_version::FileVersion;
use crate::elf::symbols::SymbolTable;
use crate::numbers::u32_at;
use crate::regular_file;

/// The directory in which separate debug files are installed.
const INSTALLED: &str = "/usr/lib/debug";

/// The longest `.gnu_debuglink` that is read: a file name, padded, and a checksum.
const MAX_LINK: usize = 1024;

/// The longest file whose checksum is computed, which takes all its bytes.
const MAX_SUMMED: u64 = 1 << 30;

/// What was found where the separate debug file of a file may be.
#[derive(Debug)]
pub(super) enum Found {
    Usable(Box<ElfFile>),
    /// The first of the files that are there: it is of another build, damaged, or cannot be read.
    Unusable(PathBuf),
    Nothing,
}

/// What `.gnu_debuglink` says.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    name: OsString,
    /// Of all bytes of the debug file: the CRC-32 of zlib.
    checksum: u32,
}

/// Whether a file could not be opened because it is not there.
fn is_absence(error: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

impl Found {
    fn usable(&self) -> Option<&ElfFile> {
        match self {
            Found::Usable(elf) => Some(elf),
            Found::Unusable(_) | Found::Nothing => None,
        }
    }
}

impl ElfFile {
    /// Returns the file that has the symbols (`.symtab`): this one, or its separate debug file.
    pub(super) fn with_symbols(&self) -> &ElfFile {
        if self.has_symbols() {
            return self;
        }
        let debug_file = self.debug_file().filter(|it| it.has_symbols());
        debug_file.unwrap_or(self)
    }

    /// Returns the file that has the debugging information (DWARF): this one, or its separate debug file.
    pub(super) fn with_debugging_information(&self) -> &ElfFile {
        if self.has_debugging_information() {
            return self;
        }
        let debug_file = self.debug_file();
        let debug_file = debug_file.filter(|it| it.has_debugging_information());
        debug_file.unwrap_or(self)
    }

    /// Returns whether it has symbols itself. eu-strip(1) writes debug files whose symbols are in the stripped file.
    fn has_symbols(&self) -> bool {
        let section = self.section(".symtab");
        section.is_some_and(|it| it.sh_type != SHT_NOBITS)
    }

    fn has_debugging_information(&self) -> bool {
        let mut names = [".debug_info", ".zdebug_info"].into_iter();
        self.has_lines() || names.any(|name| self.has_section(name))
    }

    /// Returns whether it has source lines itself.
    pub(super) fn has_lines(&self) -> bool {
        let mut names = [".debug_line", ".zdebug_line"].into_iter();
        names.any(|name| self.has_section(name))
    }

    /// Returns the path of the separate debug file that has its symbols, if there is one.
    pub(crate) fn path_of_symbols(&self) -> Option<&Path> {
        let symbols = self.with_symbols();
        (!std::ptr::eq(symbols, self)).then(|| symbols.path())
    }

    /// Returns the path of a file that should be its separate debug file, and cannot be used.
    pub(crate) fn unusable_debug_file(&self) -> Option<&Path> {
        match self.found_debug_file() {
            Found::Unusable(path) => Some(path),
            Found::Usable(_) | Found::Nothing => None,
        }
    }

    /// Returns the separate debug file, if there is one.
    fn debug_file(&self) -> Option<&ElfFile> {
        self.found_debug_file().usable()
    }

    /// Looks for the separate debug file, once.
    fn found_debug_file(&self) -> &Found {
        let find = || self.find_debug_file(Path::new(INSTALLED));
        self.debug_file.get_or_init(find)
    }

    fn find_debug_file(&self, installed: &Path) -> Found {
        let build_id = self.build_id();
        let link = self.debug_link();
        let by_id = build_id.iter().map(|id| {
            let id = id.to_string();
            let (first, rest) = id.split_at(id.len().min(2));
            installed.join(format!(".build-id/{first}/{rest}.debug"))
        });
        let linked = link.iter();
        let by_name = linked.flat_map(|link| {
            let places = places_of(self.path(), &link.name, installed);
            places.into_iter().map(|path| (path, link.checksum))
        });
        let by_id = by_id.map(|path| (path, None));
        let by_name = by_name.map(|(path, checksum)| (path, Some(checksum)));
        let mut unusable = None;
        for (path, wanted) in by_id.chain(by_name) {
            let file = match open_regular(&path) {
                Err(error) if is_absence(&error) => continue,
                Ok(file) if is_same(&file, &self.file) => continue,
                file => file,
            };
            let elf = file
                .ok()
                .and_then(|it| ElfFile::read(it, path.clone()).ok());
            let usable = elf.filter(|elf| {
                elf.build_id() == build_id
                    && self.has_code_of(elf)
                    && elf.has_what_was_removed()
                    // Last, because it takes all bytes.
                    && wanted.is_none_or(|wanted| checksum(&elf.file) == Some(wanted))
            });
            match usable {
                Some(elf) => return Found::Usable(Box::new(elf)),
                None => unusable = unusable.or(Some(path)),
            }
        }
        unusable.map_or(Found::Nothing, Found::Unusable)
    }

    /// Returns whether the sections with code, and the unwind tables, have the same places and lengths in another file.
    fn has_code_of(&self, other: &ElfFile) -> bool {
        fn places(elf: &ElfFile) -> impl Iterator<Item = (u64, u64)> {
            let sections = elf.sections.iter().filter(|section| {
                let has_code = section.sh_flags & u64::from(SHF_EXECINSTR) != 0;
                has_code || elf.is_named(section, b".eh_frame\0")
            });
            sections.map(|section| (section.sh_addr, section.sh_size))
        }
        self.header.e_type == other.header.e_type && places(self).eq(places(other))
    }

    /// Returns whether it has what strip(1) removes, and symbols that can be read, if it has any.
    fn has_what_was_removed(&self) -> bool {
        let symbols = self.symbols_of_this_file(SymbolTable::Static);
        symbols.is_ok() && (self.has_symbols() || self.has_debugging_information())
    }

    fn debug_link(&self) -> Option<Link> {
        let section = self.contents(".gnu_debuglink").ok()??;
        let mut bytes = vec![0; section.len.min(MAX_LINK)];
        section.read(0, &mut bytes).ok()?;
        Link::of(&bytes)
    }
}

impl Link {
    /// Reads a name, padding to a multiple of 4 bytes, and the checksum.
    fn of(bytes: &[u8]) -> Option<Link> {
        let len = memchr::memchr(0, bytes)?;
        let name = OsStr::from_bytes(&bytes[..len]);
        let checksum = u32_at(bytes, (len + 1).next_multiple_of(4))?;
        // The file may be anybody's: it does not choose the directory.
        let is_name = Path::new(name).components().eq([Component::Normal(name)]);
        is_name.then_some(Link {
            name: name.to_owned(),
            checksum,
        })
    }
}

/// Returns where the separate debug file of the file at `path` may be, if this is its name.
fn places_of(path: &Path, name: &OsStr, installed: &Path) -> Vec<PathBuf> {
    // In another mount namespace, there may be no such path.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let Some(directory) = path.parent() else {
        return Vec::new();
    };
    let mut places = vec![directory.join(name), directory.join(".debug").join(name)];
    if let Ok(below) = directory.strip_prefix("/") {
        places.push(installed.join(below).join(name));
    }
    places
}

/// Opens a regular file for reading.
fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let found = options.read(true).custom_flags(libc::O_PATH).open(path)?;
    regular_file::open_found(&found)
}

fn is_same(one: &File, other: &File) -> bool {
    let [one, other] = [one, other].map(|it| it.metadata().ok());
    one.zip(other)
        .is_some_and(|(one, other)| FileVersion::of(&one) == FileVersion::of(&other))
}

/// Returns the CRC-32 of all bytes of a file; `None` if it cannot be read, or is longer than [`MAX_SUMMED`]. Of a file that many
/// processes execute, it is computed once.
fn checksum(file: &File) -> Option<u32> {
    const MAX_KNOWN: usize = 256;
    static KNOWN: Mutex<Vec<(FileVersion, u32)>> = Mutex::new(Vec::new());
    let metadata = file.metadata().ok()?;
    if metadata.len() > MAX_SUMMED {
        return None;
    }
    let version = FileVersion::of(&metadata);
    // Locked while it is computed, so that two threads do not compute the same.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, sum)) = known.iter().find(|(of, _)| *of == version) {
        return Some(*sum);
    }
    let sum = sum_of(file)?;
    if known.len() >= MAX_KNOWN {
        known.clear();
    }
    known.push((version, sum));
    Some(sum)
}

fn sum_of(file: &File) -> Option<u32> {
    let mut sum = Crc::new();
    let mut piece = vec![0; 1 << 16];
    let mut at = 0;
    loop {
        let read = file.read_at(&mut piece, at).ok()?;
        if read == 0 {
            return Some(sum.sum());
        }
        sum.update(&piece[..read]);
        at += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use test_support::Scratch;

    use super::*;
    use crate::address::FileAddr;
    use crate::elf::functions::{Function, FunctionTable};
    use crate::elf::source::SourceMap;
    use crate::testing::compile;

    const SOURCE: &str = "static __attribute__((noinline)) int hidden(int n) { return n * 3; }
int main(int argc, char **argv) {
    return hidden(argc);
}";

    /// A program that was stripped, and what `objcopy --only-keep-debug` kept of it, in the same directory.
    struct Stripped {
        directory: Scratch,
        program: PathBuf,
        debug_file: PathBuf,
    }

    fn run(command: &mut Command) {
        let status = command.status().unwrap();
        assert!(status.success(), "{command:?}: {status}");
    }

    impl Stripped {
        fn new(flags: &[&str]) -> Stripped {
            Stripped::by(flags, &[], &[])
        }

        /// One that strip(1) strips with `kept`, and whose debug file is what `objcopy --only-keep-debug` makes with `removed`.
        fn by(flags: &[&str], kept: &[&str], removed: &[&str]) -> Stripped {
            let directory = Scratch::new();
            let flags = [flags, &["-g", "-O1"]].concat();
            let program = compile(&directory, "program.c", SOURCE, &flags);
            let debug_file = directory.file("program.debug");
            let mut objcopy = Command::new("objcopy");
            run(objcopy
                .arg("--only-keep-debug")
                .args(removed)
                .args([&program, &debug_file]));
            run(Command::new("strip").args(kept).arg(&program));
            let mut link = Command::new("objcopy");
            let link = link.current_dir(program.parent().unwrap());
            run(link.arg("--add-gnu-debuglink=program.debug").arg(&program));
            Stripped {
                directory,
                program,
                debug_file,
            }
        }

        fn elf(&self) -> ElfFile {
            ElfFile::open(&self.program).unwrap()
        }

        /// Where the stripped program has `hidden`, and in which line.
        fn hidden(&self) -> Option<(FileAddr, Option<u32>)> {
            let elf = self.elf();
            let table = FunctionTable::of(&elf).unwrap();
            let mut functions = table.functions();
            let is_hidden =
                |it: &Function<'_>| it.name().is_some_and(|name| name.to_string() == "hidden");
            let address = functions.find(is_hidden)?.address();
            let location = SourceMap::of(&elf).unwrap().locate(address);
            assert_eq!(location.function.as_deref(), Some("hidden"));
            Some((address, location.line))
        }
    }

    #[test]
    fn stripped_file_has_what_its_debug_file_has() {
        for flags in [
            &["-Wl,--build-id"][..],
            &["-Wl,--build-id=none"],
            &["-no-pie"],
        ] {
            let stripped = Stripped::new(flags);
            let (_, line) = stripped.hidden().unwrap();
            assert_eq!(line, Some(1), "{flags:?}");
            let hidden = stripped.directory.file(".debug");
            fs::create_dir(&hidden).unwrap();
            fs::rename(&stripped.debug_file, hidden.join("program.debug")).unwrap();
            assert!(stripped.hidden().is_some(), "{flags:?}");
            fs::remove_dir_all(&hidden).unwrap();
            assert!(stripped.hidden().is_none(), "{flags:?}");
        }
    }

    #[test]
    fn debug_file_of_another_build_is_not_used() {
        // The last one is that of every build.
        for flag in [
            "-Wl,--build-id",
            "-Wl,--build-id=none",
            "-Wl,--build-id=0x1234",
        ] {
            let stripped = Stripped::new(&[flag]);
            let other = Stripped::new(&[flag, "-fno-inline", "-fno-omit-frame-pointer"]);
            fs::copy(&other.debug_file, &stripped.debug_file).unwrap();
            assert!(stripped.hidden().is_none(), "{flag}");
            let elf = stripped.elf();
            let unusable = Some(&*stripped.debug_file);
            assert_eq!(
                (elf.path_of_symbols(), elf.unusable_debug_file()),
                (None, unusable)
            );
            assert!(!stripped.elf().has_code_of(&other.elf()), "{flag}");
        }
    }

    #[test]
    fn debug_file_is_found_by_any_path() {
        let stripped = Stripped::new(&[]);
        let link = stripped.directory.file("link");
        let elsewhere = stripped.directory.file("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        symlink(&stripped.program, &link).unwrap();
        for path in [link, elsewhere.join("../program")] {
            assert!(
                ElfFile::open(&path).unwrap().debug_file().is_some(),
                "{path:?}"
            );
        }
    }

    #[test]
    fn installed_debug_file_is_found_by_build_id() {
        let stripped = Stripped::new(&["-Wl,--build-id"]);
        let installed = stripped.directory.file("installed");
        let elf = stripped.elf();
        let id = elf.build_id().unwrap().to_string();
        let directory = installed.join(".build-id").join(&id[..2]);
        fs::create_dir_all(&directory).unwrap();
        let place = directory.join(format!("{}.debug", &id[2..]));
        fs::rename(&stripped.debug_file, &place).unwrap();
        let found = elf.find_debug_file(&installed);
        let found = found.usable().unwrap();
        assert_eq!(found.path(), place);
        assert!(
            elf.find_debug_file(stripped.directory.path())
                .usable()
                .is_none()
        );
        let bytes = fs::read(&place).unwrap();
        for len in [0, 10, 64, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&place, &bytes[..len]).unwrap();
            assert!(elf.find_debug_file(&installed).usable().is_none(), "{len}");
        }
        // Of another build, once with the same build-id, and once without what was removed.
        let other = Stripped::new(&["-Wl,--build-id", "-fno-omit-frame-pointer"]);
        let objcopy = |arguments: &[&str]| {
            let mut objcopy = Command::new("objcopy");
            run(objcopy.args(arguments).arg(&other.debug_file).arg(&place));
        };
        objcopy(&[]);
        assert!(elf.find_debug_file(&installed).usable().is_none());
        let id = stripped.directory.file("build-id");
        let note = format!(".note.gnu.build-id={}", id.display());
        let copy = stripped.directory.file("copy");
        let mut dump = Command::new("objcopy");
        run(dump
            .args(["--dump-section", &note])
            .args([&stripped.program, &copy]));
        objcopy(&["--update-section", &note]);
        let same_id = ElfFile::open(&place).unwrap();
        assert_eq!(same_id.build_id(), elf.build_id());
        assert!(!elf.has_code_of(&same_id) && elf.find_debug_file(&installed).usable().is_none());
        fs::write(&place, fs::read(&stripped.program).unwrap()).unwrap();
        assert!(elf.find_debug_file(&installed).usable().is_none());
    }

    #[test]
    fn names_stay_beside_a_file_of_lines() {
        let flags = ["-Wl,--build-id=none"];
        let named = Stripped::new(&flags).hidden();
        // As eu-strip writes them: the symbols stay in the program.
        let stripped = Stripped::by(&flags, &["--strip-debug"], &["--remove-section=.symtab"]);
        let elf = stripped.elf();
        assert!(!std::ptr::eq(
            elf.with_debugging_information(),
            elf.with_symbols()
        ));
        assert!(named.is_some());
        assert_eq!(stripped.hidden(), named);
    }

    #[test]
    fn damaged_debug_file_is_not_used() {
        let stripped = Stripped::new(&[]);
        let bytes = fs::read(&stripped.debug_file).unwrap();
        for len in [0, 10, 64, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&stripped.debug_file, &bytes[..len]).unwrap();
            assert!(
                stripped.hidden().is_none(),
                "{len} of {} bytes",
                bytes.len()
            );
        }
        fs::remove_file(&stripped.debug_file).unwrap();
        run(Command::new("mkfifo").arg(&stripped.debug_file));
        assert!(stripped.hidden().is_none());
    }

    #[test]
    fn link_has_a_name_without_directories() {
        let link = |name: &[u8]| {
            let mut bytes = [name, &[0]].concat();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(7_u32.to_le_bytes());
            Link::of(&bytes).map(|it| (it.name, it.checksum))
        };
        assert_eq!(link(b"a.debug"), Some(("a.debug".into(), 7)));
        for name in ["", ".", "..", "/etc/passwd", "a/b", "../a", "a/"] {
            assert_eq!(link(name.as_bytes()), None, "{name}");
        }
        assert_eq!(Link::of(b"a.debug\0\x07"), None);
        assert_eq!(Link::of(b"a.debug"), None);
    }
}
