//! Which descriptors a system call waits for that waits for several: each once, in order. `None` if they cannot be read, or
//! are too many.

use std::io::{BufRead, BufReader, Read};

use nix::fcntl::OFlag;

use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::process::Process;

/// How many descriptors are read at most.
const MAX: usize = 1 << 14;

/// The length of an entry of poll(2), `struct pollfd`: the descriptor, four bytes, and events.
const POLL_ENTRY: usize = 8;

/// How many bytes of a file below fdinfo are read at most: a line for each of a thousand descriptors.
const MAX_INFO: u64 = 1 << 17;

/// Those of poll(2): of `count` entries at an address. Negative ones are left out, as by the kernel.
pub(super) fn of_poll(memory: &impl ReadMemory, at: u64, count: u64) -> Option<Vec<i32>> {
    let count = usize::try_from(count).ok().filter(|&it| it <= MAX)?;
    let mut entries = vec![0; count * POLL_ENTRY];
    memory.read(LiveAddr(at), &mut entries).ok()?;
    let entries = entries.chunks_exact(POLL_ENTRY);
    let descriptors =
        entries.filter_map(|entry| Some(i32::from_le_bytes(entry[..4].try_into().ok()?)));
    Some(in_order(descriptors.filter(|&it| it >= 0)))
}

/// Those of select(2): below `end`, in sets of bits at these addresses; 0 stands for no set.
pub(super) fn of_select(memory: &impl ReadMemory, end: i32, sets: [u64; 3]) -> Option<Vec<i32>> {
    let end = usize::try_from(end).ok().filter(|&it| it <= MAX)?;
    let mut all = vec![0; end.div_ceil(64) * 8];
    for at in sets.into_iter().filter(|&at| at != 0) {
        let mut set = vec![0; all.len()];
        memory.read(LiveAddr(at), &mut set).ok()?;
        for (all, byte) in all.iter_mut().zip(set) {
            *all |= byte;
        }
    }
    let is_set = |descriptor: &usize| all[descriptor / 8] & 1 << (descriptor % 8) != 0;
    let descriptors = (0..end).filter(is_set);
    Some(in_order(descriptors.map(|it| it as i32)))
}

/// Those that an epoll descriptor watches, of a thread whose `directory` is below that of its process (proc_pid_fdinfo(5)).
pub(super) fn of_epoll(process: &Process, directory: &str, descriptor: i32) -> Option<Vec<i32>> {
    let path = format!("{directory}/fdinfo/{descriptor}");
    let file = process.open_file(&path, OFlag::O_RDONLY).ok()?;
    let mut limited = BufReader::new(file.take(MAX_INFO));
    let lines: Vec<String> = limited.by_ref().lines().map_while(Result::ok).collect();
    let is_whole = limited.into_inner().limit() > 0;
    let watched = lines.iter().filter_map(|line| {
        let (number, _) = line.strip_prefix("tfd:")?.trim_start().split_once(' ')?;
        number.parse().ok()
    });
    is_whole.then(|| in_order(watched))
}

fn in_order(descriptors: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut descriptors: Vec<i32> = descriptors.collect();
    descriptors.sort_unstable();
    descriptors.dedup();
    descriptors
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

    use super::*;
    use crate::process::memory::ProcessMemory;

    #[test]
    fn descriptors_are_read_once_in_order() {
        let process = Process::own().unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDONLY).unwrap();
        let entry = |descriptor: i32| libc::pollfd {
            fd: descriptor,
            events: libc::POLLIN,
            revents: 0,
        };
        let polled = [9, -1, 7, 9].map(entry);
        let at = polled.as_ptr() as u64;
        assert_eq!(of_poll(&memory, at, 4), Some(vec![7, 9]));
        assert_eq!(of_poll(&memory, at, 1), Some(vec![9]));
        assert_eq!(of_poll(&memory, 0, 0), Some(vec![]));
        assert_eq!(of_poll(&memory, 8, 1), None);
        assert_eq!(of_poll(&memory, at, u64::MAX), None);

        let sets = [[1_u64 << 5, 1], [1 << 5, 1 << 1]];
        let [one, other] = sets.each_ref().map(|set| set.as_ptr() as u64);
        assert_eq!(
            of_select(&memory, 66, [one, 0, other]),
            Some(vec![5, 64, 65])
        );
        assert_eq!(of_select(&memory, 64, [one, 0, 0]), Some(vec![5]));
        assert_eq!(of_select(&memory, 0, [0; 3]), Some(vec![]));
        for end in [-1, i32::MAX] {
            assert_eq!(of_select(&memory, end, [one, 0, 0]), None);
        }
        assert_eq!(of_select(&memory, 1, [8, 0, 0]), None);

        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let directory = format!("task/{}", nix::unistd::gettid());
        let watched = || of_epoll(&process, &directory, epoll.0.as_raw_fd());
        assert_eq!(watched(), Some(vec![]));
        let ends: [UnixStream; 2] = UnixStream::pair().unwrap().into();
        for end in &ends {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, 0);
            epoll.add(end, event).unwrap();
        }
        let expected = ends.each_ref().map(AsRawFd::as_raw_fd);
        assert_eq!(watched(), Some(in_order(expected.into_iter())));
        assert_eq!(of_epoll(&process, &directory, -1), None);
    }
}
