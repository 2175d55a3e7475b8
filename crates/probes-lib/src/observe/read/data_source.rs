//! [`DataSource`]: where recorded data are read: in the memory of the process or, if the program was
//! launched to be observed, in a file that it shares with us.

use std::collections::TryReserveError;
use std::hint::black_box;
use std::io::{self, IoSliceMut};
use std::mem;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Result};
use crate::memory::ReadMemory;
use crate::observe::install::data_mapping::SharedData;
use crate::observe::layout::arena::Arena;
use crate::process::memory::{MAX_IOVECS, ProcessMemory};

/// How much memory must be left after a large read: for the stack of a thread that removes the observation, and what it
/// usually allocates. If a small allocation fails, Rust aborts.
const MARGIN: usize = 4 << 20;

/// A read of this many bytes is large.
pub(super) const LARGE: usize = 64 << 10;

/// Where recorded data are read.
pub(crate) enum DataSource<'d> {
    Process(ProcessData<'d>),
    Shared(&'d SharedData),
}

/// Data in the memory of a process.
pub(crate) struct ProcessData<'d> {
    pub(crate) pid: i32,
    /// `None` if only several pieces at once are read: opening it takes longer than reading them.
    pub(crate) memory: Option<&'d ProcessMemory>,
    /// The arenas of the observation.
    pub(crate) arenas: &'d [Arena],
}

impl ReadMemory for DataSource<'_> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            DataSource::Process(data) => match data.memory {
                Some(memory) => memory.read(at, bytes),
                None => Err(io::ErrorKind::UnexpectedEof.into()),
            },
            DataSource::Shared(data) => data.read(at, bytes),
        }
    }

    fn read_pieces(
        &self,
        pieces: &mut [(LiveAddr, &mut [u8])],
    ) -> Result<(), (LiveAddr, io::Error)> {
        let are_read = match self {
            DataSource::Process(data) if pieces.len() > 1 || is_large(pieces) => {
                data.read_at_once(pieces)
            }
            DataSource::Process(_) | DataSource::Shared(_) => false,
        };
        if are_read {
            return Ok(());
        }
        let mut pieces = pieces.iter_mut();
        pieces.try_for_each(|(at, bytes)| self.read(*at, bytes).map_err(|error| (*at, error)))
    }
}

impl ProcessData<'_> {
    /// Fills each buffer from its address, a thousand of them by one system call. Returns whether that was possible:
    /// the kernel may not let us, or the process may have executed a new program, which has no arena with our id.
    fn read_at_once(&self, pieces: &mut [(LiveAddr, &mut [u8])]) -> bool {
        let Some(arena) = self.arenas.first() else {
            return false;
        };
        pieces.chunks_mut(MAX_IOVECS - 1).all(|batch| {
            let mut id = [0; 8];
            let places = batch.iter().map(|(at, bytes)| (*at, bytes.len()));
            let places = [(arena.id_at(), id.len())].into_iter().chain(places);
            let remote: Vec<RemoteIoVec> = places
                .map(|(at, len)| RemoteIoVec {
                    base: at.0 as usize,
                    len,
                })
                .collect();
            let buffers = batch.iter_mut().map(|(_, bytes)| IoSliceMut::new(bytes));
            let mut local = vec![IoSliceMut::new(&mut id)];
            local.extend(buffers);
            let read = process_vm_readv(Pid::from_raw(self.pid), &mut local, &remote);
            let is_whole = read == Ok(remote.iter().map(|it| it.len).sum());
            is_whole && u64::from_le_bytes(id) == arena.id
        })
    }
}

/// Returns whether it takes long to copy these from a file in /proc: the kernel copies them twice.
fn is_large(pieces: &[(LiveAddr, &mut [u8])]) -> bool {
    pieces.iter().any(|(_, bytes)| bytes.len() >= LARGE)
}

/// Returns `len` bytes of recorded data, from an address of the process.
///
/// # Errors
///
/// See [`read_pieces`].
pub(crate) fn read(pid: i32, source: &impl ReadMemory, at: LiveAddr, len: u64) -> Result<Vec<u8>> {
    read_pieces(pid, source, &[(at, len)])
}

/// Returns recorded data from several places, one after the other: of each, its address in the process and how many
/// bytes.
///
/// # Errors
///
/// If they cannot be read, or the process has exited, or we have too little memory for them: they may be megabytes.
pub(crate) fn read_pieces(
    pid: i32,
    source: &impl ReadMemory,
    places: &[(LiveAddr, u64)],
) -> Result<Vec<u8>> {
    let lens = places.iter().map(|(_, len)| *len as usize);
    let len = lens.clone().fold(0, usize::saturating_add);
    let mut data = Vec::new();
    let read = match reserve_exact(&mut data, len) {
        Ok(()) => {
            data.resize(len, 0);
            let mut rest = &mut data[..];
            let starts = places.iter().map(|(at, _)| *at);
            let pieces = starts.zip(lens).map(|(at, len)| {
                let (piece, after) = mem::take(&mut rest).split_at_mut(len);
                rest = after;
                (at, piece)
            });
            source.read_pieces(&mut pieces.collect::<Vec<_>>())
        }
        Err(_) => {
            let first = places.first().map_or(LiveAddr(0), |(at, _)| *at);
            Err((first, Errno::ENOMEM.into()))
        }
    };
    read.map_err(|(at, source)| Error::of_read(pid, MemoryPart::ObservationData, at, source))?;
    Ok(data)
}

/// Reserves memory for recorded data, if [`MARGIN`] is left beside large ones.
pub(super) fn reserve_exact(
    data: &mut Vec<u8>,
    len: usize,
) -> std::result::Result<(), TryReserveError> {
    let mut margin: Vec<u8> = Vec::new();
    if len >= LARGE {
        margin.try_reserve_exact(MARGIN)?;
    }
    data.try_reserve_exact(len)?;
    // Otherwise the allocation, which nothing uses, is optimized away.
    black_box(&margin);
    Ok(())
}

/// Returns recorded data from several places, given as offsets from an address.
pub(crate) fn read_pieces_from(
    pid: i32,
    source: &impl ReadMemory,
    from: LiveAddr,
    places: &[(u64, u64)],
) -> Result<Vec<u8>> {
    let places = places
        .iter()
        .map(|(offset, len)| (from.plus(*offset), *len));
    read_pieces(pid, source, &places.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use nix::fcntl::OFlag;
    use test_support::{Talker, fixture};

    use super::*;
    use crate::memory::double::SliceMemory;
    use crate::process::Process;
    use crate::process::memory::random_bytes_at;
    use crate::testing::arena;

    #[test]
    fn pieces_are_read_at_once_from_their_arena() {
        let target = Talker::start(&fixture("calls.pie"));
        let process = Process::open(target.pid()).unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDONLY).unwrap();
        let random = random_bytes_at(&process).unwrap().unwrap();
        // An arena whose id is where its header would have it.
        let mut arena = arena(random.0);
        arena.code = LiveAddr(random.0 - (arena.id_at().0 - random.0));
        arena.id = memory.read_word(random).unwrap();
        assert_eq!(arena.id_at(), random);
        let mut expected = [0; 16];
        memory.read(random, &mut expected).unwrap();
        let read = |arena: &Arena, last: LiveAddr| {
            let arenas = [arena.clone()];
            let data = ProcessData {
                pid: target.pid(),
                memory: Some(&memory),
                arenas: &arenas,
            };
            let mut bytes = vec![0; 3000];
            let starts = (0..).map(|index| random.plus(index % 16));
            let mut pieces: Vec<_> = starts.zip(bytes.chunks_mut(1)).collect();
            pieces.last_mut().unwrap().0 = last;
            let at_once = data.read_at_once(&mut pieces);
            let whole = DataSource::Process(data).read_pieces(&mut pieces);
            (at_once, whole.is_ok(), bytes)
        };
        let (at_once, is_whole, bytes) = read(&arena, random.plus(2999 % 16));
        assert!(at_once && is_whole);
        assert!(
            bytes
                .iter()
                .zip(expected.iter().cycle())
                .all(|(one, other)| one == other)
        );
        let (at_once, is_whole, _) = read(&arena, LiveAddr(8));
        assert!(!at_once && !is_whole);
        // As if the process had executed another program.
        arena.id = !arena.id;
        let (at_once, is_whole, again) = read(&arena, random.plus(2999 % 16));
        assert!(!at_once && is_whole);
        assert_eq!(again, bytes);
    }

    #[test]
    fn recorded_data_are_read_from_their_address() {
        let memory = SliceMemory::new([(0x1000, vec![1, 2, 3, 4])]);
        assert_eq!(read(1, &memory, LiveAddr(0x1001), 2).unwrap(), [2, 3]);
        assert!(read(1, &memory, LiveAddr(0x1003), 2).is_err());
    }
}
