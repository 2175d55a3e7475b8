//! [`DataSource`]: where recorded data are read: in the memory of the process or, if the program was
//! launched to be observed, in a file that it shares with us. The file outlives the process.

use std::collections::TryReserveError;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, IoSliceMut};
use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Result};
use crate::inject::injected_call::InjectedCall;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::process::memory::{MAX_IOVECS, ProcessMemory};

/// How much memory must be left after a large read: for the stack of a thread that removes the observation, and what it
/// usually allocates. If a small allocation fails, Rust aborts.
const MARGIN: usize = 3 << 20;

/// A read of this many bytes is large.
const LARGE: usize = 64 << 10;

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
    fn map(&self, arena: &Arena) -> InjectedCall {
        let data = arena.data();
        let before = self.places.iter().take_while(|(at, _)| *at != data);
        let offset = before.map(|(_, len)| len).sum();
        InjectedCall::map_shared(data, arena.data_len(), self.descriptor(), offset)
    }

    /// Returns the call that closes the descriptor in the process, which does not know of it.
    pub(crate) fn close(&self) -> InjectedCall {
        InjectedCall::close(self.descriptor())
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
    use nix::fcntl::OFlag;
    use test_support::{Talker, fixture};

    use super::*;
    use crate::memory::double::SliceMemory;
    use crate::observe::layout::arena::{HeaderVersion, LINE};
    use crate::observe::layout::observer_record::ObserverRecord;
    use crate::observe::layout::shared::SharedLayout;
    use crate::observe::point::{Point, PointKind};
    use crate::process::Process;
    use crate::process::memory::random_bytes_at;
    use crate::testing::memory_file;

    /// An arena of one point.
    fn arena(code: u64) -> Arena {
        let point = Point {
            address: LiveAddr(code),
            kind: PointKind::Site { operand: [0; 4] },
        };
        Arena {
            code: LiveAddr(code),
            points: vec![point],
            semaphores: Vec::new(),
            trampoline_len: LINE,
            lead: 0,
            shared: SharedLayout::default(),
            is_filtered: false,
            is_sampled: false,
            id: 1,
            version: HeaderVersion::Current(ObserverRecord::default()),
        }
    }

    #[test]
    fn shared_data_of_arenas_follow_each_other() {
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
        let source = DataSource::Shared(&data);
        let text = |at: LiveAddr, len| read(1, &source, at, len);
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
    fn data_are_private_or_shared_with_children() {
        let arena = arena(0x20_0000);
        let (at, len) = (arena.data(), arena.data_len());
        let (read, write) = (libc::PROT_READ, libc::PROT_WRITE);
        let private = DataMapping::Private.map(&arena);
        assert_eq!(private, InjectedCall::map(at, len, read | write));
        let shared = DataMapping::SharedWithChildren.map(&arena);
        assert_eq!(shared, InjectedCall::map_shared_with_children(at, len));
        assert!(!DataMapping::Private.is_shared() && DataMapping::SharedWithChildren.is_shared());
        // Both are unmapped by the same call.
        assert_eq!(shared.range(), private.range());
        assert!(shared.maps() && shared.name() == "mmap of writable memory");
    }

    #[test]
    fn recorded_data_are_read_from_their_address() {
        let memory = SliceMemory::new([(0x1000, vec![1, 2, 3, 4])]);
        assert_eq!(read(1, &memory, LiveAddr(0x1001), 2).unwrap(), [2, 3]);
        assert!(read(1, &memory, LiveAddr(0x1003), 2).is_err());
    }
}
