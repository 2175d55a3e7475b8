//! What this process records of itself for other tools to find: its command, its pid namespace, the time, ids.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use crate::process::name_of;

/// Returns the inode of our pid namespace; 0 if it is not known.
pub(crate) fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Returns the time since boot, suspensions included.
pub(crate) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Returns a random id.
pub(crate) fn new_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Its keys are random.
    RandomState::new().hash_one(std::process::id())
}

/// Returns the command line of this process, without the directory of the program.
pub(crate) fn own_command() -> String {
    command_line().unwrap_or_else(|| name_of(std::process::id() as i32))
}

fn command_line() -> Option<String> {
    let command = fs::read("/proc/self/cmdline").ok()?;
    let mut words = command.strip_suffix(b"\0")?.split(|&byte| byte == 0);
    let program = String::from_utf8_lossy(words.next()?);
    let mut text = Path::new(&*program)
        .file_name()?
        .to_string_lossy()
        .into_owned();
    for word in words {
        text.push(' ');
        text += &String::from_utf8_lossy(word);
    }
    Some(text)
}
