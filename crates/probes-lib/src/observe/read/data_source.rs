//! [`DataSource`]: where recorded data are read: in the memory of the process or, if the program was
//! launched to be observed, in a file that it shares with us. The file outlives the process.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Result};
use crate::inject::remote_call::RemoteCall;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::process::memory::ProcessMemory;

/// Where recorded data are read.
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

/// Returns recorded data, from an address of the process.
///
/// # Errors
///
/// If they cannot be read, or the process has exited.
pub(crate) fn read(pid: i32, source: &impl ReadMemory, at: LiveAddr, len: u64) -> Result<Vec<u8>> {
    let mut data = vec![0; len as usize];
    let read = source.read(at, &mut data);
    read.map_err(|source| Error::of_read(pid, MemoryPart::ObservationData, at, source))?;
    Ok(data)
}

/// The data of arenas in an unnamed file, one after the other.
pub(crate) struct SharedData {
    file: File,
    /// Of each arena, the address of its data in the process, and their length.
    places: Vec<(LiveAddr, u64)>,
}

impl SharedData {
    /// Makes room for the data in a file that the process has inherited under the same descriptor.
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
    pub(crate) fn map(&self, arena: &Arena) -> RemoteCall {
        let data = arena.data();
        let before = self.places.iter().take_while(|(at, _)| *at != data);
        let offset = before.map(|(_, len)| len).sum();
        RemoteCall::map_shared(data, arena.data_len(), self.descriptor(), offset)
    }

    /// Returns the call that closes the descriptor in the process, which does not know of it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::double::SliceMemory;

    #[test]
    fn recorded_data_are_read_from_their_address() {
        let memory = SliceMemory::new([(0x1000, vec![1, 2, 3, 4])]);
        assert_eq!(read(1, &memory, LiveAddr(0x1001), 2).unwrap(), [2, 3]);
        assert!(read(1, &memory, LiveAddr(0x1003), 2).is_err());
    }
}
