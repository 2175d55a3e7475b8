//! A live process as a test sees it, from outside and without the library under test: its memory,
//! threads, descriptors, children and `/proc` status.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use crate::eventually;

/// The memory of the executable in a process: its mapped segments and the zeroes after its data.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    regions: BTreeMap<u64, Region>,
}

#[derive(Clone, PartialEq, Eq)]
struct Region {
    writable: bool,
    bytes: Vec<u8>,
}

/// One byte that differs between two images.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// Where it is.
    pub address: u64,
    /// The byte in the first image, if it is mapped there.
    pub before: Option<u8>,
    /// The byte in the second.
    pub after: Option<u8>,
}

impl fmt::Debug for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference {
            address,
            before,
            after,
        } = self;
        write!(f, "{address:#x}: {before:02x?} -> {after:02x?}")
    }
}

impl Image {
    /// Reads the executable's memory in process `pid`, which should be blocked, so that nothing
    /// changes.
    pub fn of(pid: i32) -> Image {
        let inode = with_living_thread(pid, "the executable", |task| {
            Some(fs::metadata(task.join("exe")).ok()?.ino())
        });
        let mut regions = BTreeMap::new();
        let mut end_of_last = None;
        for (start, end, perms, mapped, path) in maps(pid) {
            let of_file = mapped == inode;
            let zeroes = mapped == 0 && end_of_last == Some(start) && path.is_empty();
            if !(of_file || zeroes) {
                continue;
            }
            end_of_last = Some(end);
            let region = Region {
                writable: perms.contains('w'),
                bytes: peek(pid, start, (end - start) as usize),
            };
            regions.insert(start, region);
        }
        assert!(!regions.is_empty(), "process {pid} maps its executable");
        Image { regions }
    }

    /// The part that the process itself may not write: code and constants.
    pub fn text(&self) -> Image {
        let regions = self.regions.clone().into_iter();
        Image {
            regions: regions.filter(|(_, region)| !region.writable).collect(),
        }
    }

    /// Sets the bytes at an address, for comparison.
    pub fn set(&mut self, address: u64, bytes: &[u8]) {
        for (at, &byte) in (address..).zip(bytes) {
            let (start, region) = self
                .regions
                .range_mut(..=at)
                .next_back()
                .expect("the address is mapped");
            region.bytes[(at - start) as usize] = byte;
        }
    }

    /// The bytes at an address, which have to be mapped.
    pub fn get(&self, address: u64, len: usize) -> &[u8] {
        let before = self.regions.range(..=address).next_back();
        let (start, region) = before.expect("the address is mapped");
        let at = (address - start) as usize;
        &region.bytes[at..at + len]
    }

    /// Panics with the first differing bytes, if `other` is not the same.
    #[track_caller]
    pub fn assert_same(&self, other: &Image, what: &str) {
        let differences = self.differences(other);
        assert!(
            differences.is_empty(),
            "{what}: {} bytes differ, the first are {:?}",
            differences.len(),
            &differences[..differences.len().min(8)]
        );
    }

    /// Every byte that differs.
    pub fn differences<'i>(&'i self, other: &'i Image) -> Vec<Difference> {
        let mut differences = Vec::new();
        let starts: std::collections::BTreeSet<u64> = self
            .regions
            .keys()
            .chain(other.regions.keys())
            .copied()
            .collect();
        for start in starts {
            let of = |image: &'i Image| image.regions.get(&start).map(|region| &region.bytes[..]);
            let (one, two) = (of(self).unwrap_or_default(), of(other).unwrap_or_default());
            if one == two {
                continue;
            }
            let longer = one.len().max(two.len());
            differences.extend((0..longer).filter(|&i| one.get(i) != two.get(i)).map(|i| {
                Difference {
                    address: start + i as u64,
                    before: one.get(i).copied(),
                    after: two.get(i).copied(),
                }
            }));
        }
        differences
    }
}

/// Calls `use_task` with the directory of a living thread, `/proc/PID/task/TID`: the group leader
/// may be a zombie, whose files cannot be read. Tries again if the thread exits meanwhile.
fn with_living_thread<T>(pid: i32, what: &str, use_task: impl Fn(PathBuf) -> Option<T>) -> T {
    eventually(&format!("{what} of process {pid} can be read"), || {
        use_task(task(pid)?)
    })
}

fn task(pid: i32) -> Option<PathBuf> {
    // The group leader first, even if its id is not the lowest: other threads may be short-lived.
    std::iter::once(pid)
        .chain(threads(pid))
        .map(|tid| PathBuf::from(format!("/proc/{pid}/task/{tid}")))
        .find(|task| {
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            !status.is_empty() && !status.contains("State:\tZ") && !status.contains("State:\tX")
        })
}

/// Start, end, permissions, inode and path of each mapping.
fn maps(pid: i32) -> Vec<(u64, u64, String, u64, String)> {
    let maps = with_living_thread(pid, "the maps", |task| {
        let maps = fs::read_to_string(task.join("maps")).ok()?;
        (!maps.is_empty()).then_some(maps)
    });
    let hex = |digits: &str| u64::from_str_radix(digits, 16).expect("an address");
    maps.lines()
        .map(|line| {
            let mut words = line.split_ascii_whitespace();
            let mut word = || words.next().unwrap_or_default().to_owned();
            let (range, perms, _, _, inode) = (word(), word(), word(), word(), word());
            let (start, end) = range.split_once('-').expect("start-end");
            let inode = inode.parse().expect("an inode");
            (hex(start), hex(end), perms, inode, word())
        })
        .collect()
}

/// Whether the code of a process's dynamic loader differs from the loader's file. A program without
/// a loader has nothing that could differ.
pub fn is_loader_changed(pid: i32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let is_code = |line: &&str| line.contains(" r-xp ") && line.contains("/ld-");
    let Some(line) = maps.lines().find(is_code) else {
        return false;
    };
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let (start, end) = words[0].split_once('-').expect("start-end");
    let hex = |digits: &str| u64::from_str_radix(digits, 16).expect("an address");
    let read = |file: PathBuf, at| {
        let mut bytes = vec![0; (hex(end) - hex(start)) as usize];
        let read = File::open(file).and_then(|file| file.read_exact_at(&mut bytes, at));
        read.ok().map(|()| bytes)
    };
    let found = read(format!("/proc/{pid}/mem").into(), hex(start));
    // A process that has exited holds no hook any more.
    found.is_some() && found != read(words[5].into(), hex(words[2]))
}

fn memory(pid: i32, write: bool) -> File {
    with_living_thread(pid, "the memory", |task| {
        let mut options = File::options();
        let options = options.read(true).write(write);
        let file = options.open(task.join("mem")).ok()?;
        // The file of a thread that has exited reads as empty at every address.
        (file.read_at(&mut [0], 0).ok() != Some(0)).then_some(file)
    })
}

/// Reads the memory of a process.
pub fn peek(pid: i32, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory(pid, false)
        .read_exact_at(&mut bytes, address)
        .unwrap_or_else(|error| panic!("cannot read {address:#x} of process {pid}: {error}"));
    bytes
}

/// Writes the memory of a process, code too.
pub fn poke(pid: i32, address: u64, bytes: &[u8]) {
    memory(pid, true)
        .write_all_at(bytes, address)
        .unwrap_or_else(|error| panic!("cannot write {address:#x} of process {pid}: {error}"));
}

/// Waits until the process's first living thread is blocked in `read(0, …)`. In a single-threaded
/// program, nothing changes from then on.
pub fn settle(pid: i32) {
    eventually(&format!("process {pid} waits for a line"), || {
        let syscall = fs::read_to_string(task(pid)?.join("syscall")).ok()?;
        syscall.starts_with("0 0x0 ").then_some(())
    });
}

/// A line of `/proc/PID/status` without its name; empty if there is none.
pub fn status(pid: i32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map_or_else(String::new, |value| value.trim().to_owned())
}

/// A field of `/proc/PID/stat` after the name, counted from 1 as in proc(5); empty if there is
/// none.
pub fn stat(pid: i32, field: usize) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let mut fields = after_name.split_ascii_whitespace();
    fields.nth(field - 3).unwrap_or_default().to_owned()
}

/// The state letter of a process; `None` if there is no such process.
pub fn state(pid: i32) -> Option<char> {
    status(pid, "State").chars().next()
}

/// The thread ids of a process.
pub fn threads(pid: i32) -> Vec<i32> {
    numbers(&format!("/proc/{pid}/task"))
}

/// The open descriptors of a process, and what they are.
pub fn descriptors(pid: i32) -> Vec<String> {
    let directory = format!("/proc/{pid}/fd");
    let name = |fd: i32| {
        // If `pid` is our own, the descriptor by which the directory was listed is closed by now.
        let path = fs::read_link(format!("{directory}/{fd}")).ok()?;
        Some(format!("{fd} {}", path.display()))
    };
    numbers(&directory).into_iter().filter_map(name).collect()
}

/// The processes that a process has started and not reaped.
pub fn children(pid: i32) -> Vec<i32> {
    let of_thread = |tid| {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{tid}/children"));
        let children = children.unwrap_or_default();
        let pids = children.split_ascii_whitespace();
        pids.filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
    };
    threads(pid).into_iter().flat_map(of_thread).collect()
}

/// The entries of a directory that are numbers, in order; none if it cannot be read.
fn numbers(directory: &str) -> Vec<i32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut numbers: Vec<i32> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Whether we may open mapped files by the links in `/proc/PID/map_files`.
pub fn can_open_map_files() -> bool {
    let links = fs::read_dir("/proc/self/map_files").expect("our own directory");
    let mut links = links.flatten();
    links.any(|link| File::open(link.path()).is_ok())
}

/// All process ids.
pub fn processes() -> Vec<i32> {
    numbers("/proc")
}

/// The threads of a process and of its descendants, each with what the kernel says of its state, its
/// tracer and its signals: for the message of a test that waited too long.
pub fn describe(pid: i32) -> String {
    const FIELDS: [&str; 10] = [
        "Name:",
        "State:",
        "PPid:",
        "TracerPid:",
        "SigPnd:",
        "ShdPnd:",
        "SigBlk:",
        "SigIgn:",
        "SigCgt:",
        "nonvoluntary_ctxt_switches:",
    ];
    let mut described = String::new();
    let mut pids = vec![pid];
    while let Some(pid) = pids.pop() {
        pids.extend(children(pid));
        for task in fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let status = read("status");
            let lines = status
                .lines()
                .filter(|line| FIELDS.iter().any(|field| line.starts_with(field)));
            let lines: Vec<String> = lines.map(|line| line.replace('\t', " ")).collect();
            let (lines, syscall, wchan) = (lines.join(", "), read("syscall"), read("wchan"));
            described += &format!(
                "\n{}: {lines}, in {wchan}: {}",
                task.path().display(),
                syscall.trim()
            );
        }
    }
    described
}
