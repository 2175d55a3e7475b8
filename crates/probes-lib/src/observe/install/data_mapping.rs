//! [`DataMapping`]: how the memory for recorded data is mapped in the process; if the program was launched to be
//! observed, from a file that it shares with us. The file outlives the process.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use crate::address::LiveAddr;
use crate::inject::injected_call::InjectedCall;
use crate::observe::layout::arena::Arena;

/// How the data of arenas are mapped in the process.
#[derive(Clone, Copy)]
pub(crate) enum DataMapping<'d> {
    /// Forked children have copies.
    Private,
    /// Forked children share them.
    SharedWithChildren,
    /// Forked children share them, and so do we.
    File(&'d SharedData),
}

impl DataMapping<'_> {
    /// Returns the call that maps the data of an arena.
    pub(crate) fn map(self, arena: &Arena) -> InjectedCall {
        let (data, len) = (arena.data(), arena.data_len());
        match self {
            DataMapping::Private => {
                InjectedCall::map(data, len, libc::PROT_READ | libc::PROT_WRITE)
            }
            DataMapping::SharedWithChildren => InjectedCall::map_shared_with_children(data, len),
            DataMapping::File(file) => file.map(arena),
        }
    }

    /// Returns whether forked children record in the same data.
    pub(crate) fn is_shared(self) -> bool {
        !matches!(self, DataMapping::Private)
    }
}

/// The data of arenas in an unnamed file, one after the other.
pub(crate) struct SharedData {
    file: File,
    /// The address in the process of the data of each arena, and their length.
    places: Vec<(LiveAddr, u64)>,
}

impl SharedData {
    /// Extends `file` to the length of the data. The process has inherited it, under the same descriptor.
    pub(crate) fn of(file: File, arenas: &[Arena]) -> io::Result<SharedData> {
        let places = arenas.iter().map(|arena| (arena.data(), arena.data_len()));
        let data = SharedData {
            places: places.collect(),
            file,
        };
        let len = data.places.iter().map(|(_, len)| len).sum();
        data.file.set_len(len)?;
        Ok(data)
    }

    fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the call that maps the data of an arena in the process.
    fn map(&self, arena: &Arena) -> InjectedCall {
        let data = arena.data();
        let before = self.places.iter().take_while(|(at, _)| *at != data);
        let offset = before.map(|(_, len)| len).sum();
        InjectedCall::map_shared(data, arena.data_len(), self.descriptor(), offset)
    }

    /// Returns the call that closes the descriptor in the process, whose program does not use it.
    pub(crate) fn close(&self) -> InjectedCall {
        InjectedCall::close(self.descriptor())
    }

    /// Reads recorded data, from an address of the process.
    pub(crate) fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        let mut before = 0;
        for &(start, len) in &self.places {
            let offset = at.0.wrapping_sub(start.0);
            if at >= start && offset.saturating_add(bytes.len() as u64) <= len {
                return self.file.read_exact_at(bytes, before + offset);
            }
            before += len;
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{arena, memory_file};

    #[test]
    fn file_has_the_data_of_arenas_in_order() {
        let file = memory_file(&[]);
        let descriptor = file.as_raw_fd();
        let writer = file.try_clone().unwrap();
        let arenas = [arena(0x80_0000), arena(0x20_0000)];
        let [one, other] = arenas.each_ref().map(Arena::data);
        let len = arenas[0].data_len();
        let data = SharedData::of(file, &arenas).unwrap();
        assert_eq!(writer.metadata().unwrap().len(), 2 * len);
        writer.write_all_at(b"one", 8).unwrap();
        writer.write_all_at(b"other", len + 16).unwrap();
        writer.write_all_at(b"!", 2 * len - 1).unwrap();
        let text = |at: LiveAddr, len: usize| {
            let mut bytes = vec![0; len];
            data.read(at, &mut bytes).map(|()| bytes)
        };
        assert_eq!(text(one.plus(8), 3).unwrap(), b"one");
        assert_eq!(text(other.plus(16), 5).unwrap(), b"other");
        assert_eq!(text(other.plus(len - 1), 1).unwrap(), b"!");
        for (at, len) in [(one.plus(len - 1), 2), (other.plus(len - 1), 2)] {
            assert!(text(at, len).is_err(), "{at}");
        }
        for at in [LiveAddr(one.0 - 1), LiveAddr(other.0 - 1), LiveAddr(0)] {
            assert!(text(at, 1).is_err(), "{at}");
        }
        let map = |at, offset| InjectedCall::map_shared(at, len, descriptor, offset);
        assert_eq!(data.map(&arenas[0]), map(one, 0));
        assert_eq!(data.map(&arenas[1]), map(other, len));
        assert_eq!(data.close(), InjectedCall::close(descriptor));
    }

    #[test]
    fn data_are_private_or_shared_with_children() {
        let arena = arena(0x20_0000);
        let (at, len) = (arena.data(), arena.data_len());
        let (read, write) = (libc::PROT_READ, libc::PROT_WRITE);
        let private = DataMapping::Private.map(&arena);
        assert_eq!(private, InjectedCall::map(at, len, read | write));
        let shared = DataMapping::SharedWithChildren.map(&arena);
        assert_eq!(shared, InjectedCall::map_shared_with_children(at, len));
        assert!(!DataMapping::Private.is_shared() && DataMapping::SharedWithChildren.is_shared());
        // Both mappings cover the same range, so the same call unmaps them.
        assert_eq!(shared.range(), private.range());
        assert!(shared.maps() && shared.name() == "mmap of writable memory");
    }
}
