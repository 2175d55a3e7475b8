//! [`FileVersion`]: tells whether a file is still the one that was read.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// A file as stat(2) has it, and what changes if it is written to, or its inode is that of another file by now: its length,
/// and the time of its last change (inode(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    device: u64,
    inode: u64,
    len: u64,
    changed: (i64, i64),
}

impl FileVersion {
    pub(crate) fn of(metadata: &Metadata) -> FileVersion {
        FileVersion {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_changes_when_a_file_is_written() {
        let scratch = test_support::Scratch::new();
        let path = scratch.file("program");
        let written = |text: &str| {
            std::fs::write(&path, text).unwrap();
            FileVersion::of(&std::fs::metadata(&path).unwrap())
        };
        let first = written("first");
        test_support::eventually("the clock of the file system has ticked", || {
            (written("again") != first).then_some(())
        });
    }
}
