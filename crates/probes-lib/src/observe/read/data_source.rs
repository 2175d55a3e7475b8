//! [`DataSource`]: where what was results is read: in the process, or, of a program that was launched to be
//! observed, in a file that it shares with us and that is there when it has ended.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use crate::address::LiveAddr;
use crate::inject::remote_call::RemoteCall;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::process::memory::ProcessMemory;

/// Where what was results is read.
pub(crate) enum DataSource<'d> {
    Process(&'d ProcessMemory),
    Shared(&'d SharedData),
}

impl ReadMemory for DataSource<'_> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            DataSource::Process(memory) => memory.read(at, bytes),
            DataSource::Shared(data) => data.read(at, bytes),
        }
    }
}

/// The data of arenas in a file of no name, one behind the other.
pub(crate) struct SharedData {
    file: File,
    /// Of each arena, where its data are in the process, and how long they are.
    places: Vec<(LiveAddr, u64)>,
}

impl SharedData {
    /// In a file that the process has inherited as the descriptor of the same number.
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

    /// What maps the data of an arena in the process.
    pub(crate) fn map(&self, arena: &Arena) -> RemoteCall {
        let data = arena.data();
        let before = self.places.iter().take_while(|(at, _)| *at != data);
        let offset = before.map(|(_, len)| len).sum();
        RemoteCall::map_shared(data, arena.data_len(), self.descriptor(), offset)
    }

    /// What closes the descriptor in the process, which nobody there knows of.
    pub(crate) fn close(&self) -> RemoteCall {
        RemoteCall::close(self.descriptor())
    }

    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
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
