//! What a tool asks of a follower that lends it a process, and the answers: words of 64 bits behind their
//! number, through a socket.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;

use crate::address::LiveAddr;
use crate::sys::ptrace::Wait;

/// How many words a message has at most.
const MAX_WORDS: usize = 1 << 17;

const WORD: usize = size_of::<u64>();

/// The registers of a thread.
pub(crate) type Registers = libc::user_regs_struct;

/// What is asked of the follower. All threads are of the process that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// To stop all threads of a process, and leave them to us until `Release`.
    Hold {
        pid: i32,
        limit_ms: u64,
        /// A descriptor of ours, by which we may write the memory of the process.
        proof: i32,
    },
    /// To resume them.
    Release,
    Wait(i32),
    Resume(i32),
    Registers(i32),
    SetRegisters(i32, Box<Registers>),
    RseqAddress(i32),
    SeccompFilter(i32, usize),
    Poke(i32, LiveAddr, Vec<u8>),
}

/// The answer of the follower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Done,
    /// These threads are stopped.
    Held(Vec<i32>),
    NotHeld(NotHeld),
    Wait(Wait),
    Registers(Box<Registers>),
    RseqAddress(Option<LiveAddr>),
    SeccompFilter(Option<Vec<libc::sock_filter>>),
    Failed(Errno),
}

/// Why a process is not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotHeld {
    /// It is not followed (any more), or we may not change it.
    Refused,
    Exited,
    Executed,
    /// This thread has not stopped in time.
    Busy(i32),
    ThreadsKeepStarting,
}

macro_rules! registers {
    ($($name:ident)*) => {
        fn register_words(registers: &Registers) -> Vec<u64> {
            vec![$(registers.$name),*]
        }

        fn registers_of(words: &[u64]) -> Option<Box<Registers>> {
            let [$($name),*] = *words else { return None };
            Some(Box::new(Registers { $($name),* }))
        }
    };
}

registers! {
    r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base
    gs_base ds es fs gs
}

impl Request {
    pub(crate) fn send(&self, to: &UnixStream) -> io::Result<()> {
        send(&self.words(), to)
    }

    pub(crate) fn receive(from: &UnixStream) -> io::Result<Request> {
        Request::of(&receive(from)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn words(&self) -> Vec<u64> {
        let of = |kind, tid: i32| vec![kind, word(tid)];
        match self {
            Request::Hold {
                pid,
                limit_ms,
                proof,
            } => vec![0, word(*pid), *limit_ms, word(*proof)],
            Request::Release => vec![1],
            Request::Wait(tid) => of(2, *tid),
            Request::Resume(tid) => of(3, *tid),
            Request::Registers(tid) => of(4, *tid),
            Request::SetRegisters(tid, registers) => {
                [of(5, *tid), register_words(registers)].concat()
            }
            Request::RseqAddress(tid) => of(6, *tid),
            Request::SeccompFilter(tid, index) => vec![7, word(*tid), *index as u64],
            Request::Poke(tid, at, bytes) => {
                let head = vec![8, word(*tid), at.0, bytes.len() as u64];
                let padded = bytes.chunks(WORD).map(|piece| {
                    let mut word = [0; WORD];
                    word[..piece.len()].copy_from_slice(piece);
                    u64::from_le_bytes(word)
                });
                head.into_iter().chain(padded).collect()
            }
        }
    }

    fn of(words: &[u64]) -> Option<Request> {
        let (kind, rest) = words.split_first()?;
        Some(match (kind, rest) {
            (0, &[pid, limit_ms, proof]) => Request::Hold {
                pid: number(pid)?,
                limit_ms,
                proof: number(proof)?,
            },
            (1, []) => Request::Release,
            (2, &[tid]) => Request::Wait(number(tid)?),
            (3, &[tid]) => Request::Resume(number(tid)?),
            (4, &[tid]) => Request::Registers(number(tid)?),
            (5, [tid, registers @ ..]) => {
                Request::SetRegisters(number(*tid)?, registers_of(registers)?)
            }
            (6, &[tid]) => Request::RseqAddress(number(tid)?),
            (7, &[tid, index]) => Request::SeccompFilter(number(tid)?, index.try_into().ok()?),
            (8, [tid, at, len, padded @ ..]) => {
                let mut bytes: Vec<u8> = padded.iter().flat_map(|it| it.to_le_bytes()).collect();
                let len = usize::try_from(*len).ok()?;
                if len.div_ceil(WORD) != padded.len() {
                    return None;
                }
                bytes.truncate(len);
                Request::Poke(number(*tid)?, LiveAddr(*at), bytes)
            }
            _ => return None,
        })
    }
}

impl Reply {
    pub(crate) fn send(&self, to: &UnixStream) -> io::Result<()> {
        send(&self.words(), to)
    }

    pub(crate) fn receive(from: &UnixStream) -> io::Result<Reply> {
        Reply::of(&receive(from)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn words(&self) -> Vec<u64> {
        match self {
            Reply::Done => vec![0],
            Reply::Held(tids) => [1]
                .into_iter()
                .chain(tids.iter().map(|tid| word(*tid)))
                .collect(),
            Reply::NotHeld(why) => match why {
                NotHeld::Refused => vec![2, 0, 0],
                NotHeld::Exited => vec![2, 1, 0],
                NotHeld::Executed => vec![2, 2, 0],
                NotHeld::Busy(tid) => vec![2, 3, word(*tid)],
                NotHeld::ThreadsKeepStarting => vec![2, 4, 0],
            },
            Reply::Wait(wait) => match wait {
                Wait::Running => vec![3, 0, 0],
                Wait::Signal(signal) => vec![3, 1, word(*signal)],
                Wait::Trapped => vec![3, 2, 0],
                Wait::GroupStopped => vec![3, 3, 0],
                Wait::Cloned(child) => vec![3, 4, word(*child)],
                Wait::Executed => vec![3, 5, 0],
                Wait::Exited => vec![3, 6, 0],
                Wait::Gone => vec![3, 7, 0],
            },
            Reply::Registers(registers) => [vec![4], register_words(registers)].concat(),
            Reply::RseqAddress(None) => vec![5],
            Reply::RseqAddress(Some(at)) => vec![5, at.0],
            Reply::SeccompFilter(None) => vec![6],
            Reply::SeccompFilter(Some(filter)) => {
                let instructions = filter.iter().map(|it| {
                    let (code, jumps) = (u64::from(it.code), [it.jt, it.jf].map(u64::from));
                    code | jumps[0] << 16 | jumps[1] << 24 | u64::from(it.k) << 32
                });
                [7].into_iter().chain(instructions).collect()
            }
            Reply::Failed(errno) => vec![8, word(*errno as i32)],
        }
    }

    fn of(words: &[u64]) -> Option<Reply> {
        let (kind, rest) = words.split_first()?;
        Some(match (kind, rest) {
            (0, []) => Reply::Done,
            (1, tids) => {
                let tids: Option<Vec<i32>> = tids.iter().map(|tid| number(*tid)).collect();
                Reply::Held(tids?)
            }
            (2, &[why, tid]) => Reply::NotHeld(match why {
                0 => NotHeld::Refused,
                1 => NotHeld::Exited,
                2 => NotHeld::Executed,
                3 => NotHeld::Busy(number(tid)?),
                4 => NotHeld::ThreadsKeepStarting,
                _ => return None,
            }),
            (3, &[wait, about]) => Reply::Wait(match wait {
                0 => Wait::Running,
                1 => Wait::Signal(number(about)?),
                2 => Wait::Trapped,
                3 => Wait::GroupStopped,
                4 => Wait::Cloned(number(about)?),
                5 => Wait::Executed,
                6 => Wait::Exited,
                7 => Wait::Gone,
                _ => return None,
            }),
            (4, registers) => Reply::Registers(registers_of(registers)?),
            (5, []) => Reply::RseqAddress(None),
            (5, &[at]) => Reply::RseqAddress(Some(LiveAddr(at))),
            (6, []) => Reply::SeccompFilter(None),
            (7, instructions) => {
                let filter = instructions.iter().map(|it| libc::sock_filter {
                    code: *it as u16,
                    jt: (it >> 16) as u8,
                    jf: (it >> 24) as u8,
                    k: (it >> 32) as u32,
                });
                Reply::SeccompFilter(Some(filter.collect()))
            }
            (8, &[errno]) => Reply::Failed(Errno::from_raw(number(errno)?)),
            _ => return None,
        })
    }
}

fn word(number: i32) -> u64 {
    i64::from(number) as u64
}

fn number(word: u64) -> Option<i32> {
    i32::try_from(word as i64).ok()
}

fn send(words: &[u64], mut to: &UnixStream) -> io::Result<()> {
    if words.len() > MAX_WORDS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = (words.len() as u64).to_le_bytes().to_vec();
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    to.write_all(&bytes)
}

fn receive(mut from: &UnixStream) -> io::Result<Vec<u64>> {
    let mut count = [0; WORD];
    from.read_exact(&mut count)?;
    let count = u64::from_le_bytes(count);
    if count > MAX_WORDS as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    // Grows as the words come.
    from.take(count * WORD as u64).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != count * WORD as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let words = bytes.chunks_exact(WORD).map(|bytes| {
        let mut word = [0; WORD];
        word.copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    Ok(words.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn registers() -> Box<Registers> {
        let words: Vec<u64> = (1..=27).collect();
        registers_of(&words).unwrap()
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let requests = [
            Request::Hold {
                pid: 4242,
                limit_ms: 500,
                proof: 7,
            },
            Request::Release,
            Request::Wait(1),
            Request::Resume(2),
            Request::Registers(3),
            Request::SetRegisters(4, registers()),
            Request::RseqAddress(5),
            Request::SeccompFilter(6, 1),
            Request::Poke(7, LiveAddr(0x1000), vec![1, 2, 3, 4, 5, 6, 7, 8, 9]),
            Request::Poke(7, LiveAddr(0x1000), Vec::new()),
        ];
        let filter = libc::sock_filter {
            code: 0x1234,
            jt: 0x56,
            jf: 0x78,
            k: 0x9abc_def0,
        };
        let replies = [
            Reply::Done,
            Reply::Held(vec![]),
            Reply::Held(vec![4242, 4243]),
            Reply::NotHeld(NotHeld::Refused),
            Reply::NotHeld(NotHeld::Exited),
            Reply::NotHeld(NotHeld::Executed),
            Reply::NotHeld(NotHeld::Busy(4243)),
            Reply::NotHeld(NotHeld::ThreadsKeepStarting),
            Reply::Wait(Wait::Running),
            Reply::Wait(Wait::Signal(10)),
            Reply::Wait(Wait::Trapped),
            Reply::Wait(Wait::GroupStopped),
            Reply::Wait(Wait::Cloned(4244)),
            Reply::Wait(Wait::Executed),
            Reply::Wait(Wait::Exited),
            Reply::Wait(Wait::Gone),
            Reply::Registers(registers()),
            Reply::RseqAddress(None),
            Reply::RseqAddress(Some(LiveAddr(u64::MAX))),
            Reply::SeccompFilter(None),
            Reply::SeccompFilter(Some(Vec::new())),
            Reply::SeccompFilter(Some(vec![filter])),
            Reply::Failed(Errno::ESRCH),
        ];
        let (one, other) = UnixStream::pair().unwrap();
        for request in requests {
            request.send(&one).unwrap();
            assert_eq!(Request::receive(&other).unwrap(), request);
        }
        for reply in replies {
            reply.send(&one).unwrap();
            assert_eq!(Reply::receive(&other).unwrap(), reply);
        }
        drop(one);
        assert!(Request::receive(&other).is_err());
    }

    #[test]
    fn too_long_messages_are_refused() {
        let (one, other) = UnixStream::pair().unwrap();
        assert!(send(&vec![0; MAX_WORDS + 1], &one).is_err());
        (&one).write_all(&u64::MAX.to_le_bytes()).unwrap();
        assert!(receive(&other).is_err());
    }

    proptest! {
        #[test]
        fn any_words_give_a_message_or_none(words in prop::collection::vec(
            prop_oneof![0..10_u64, any::<u64>()], 0..40)) {
            if let Some(request) = Request::of(&words) {
                prop_assert_eq!(Request::of(&request.words()), Some(request));
            }
            if let Some(reply) = Reply::of(&words) {
                prop_assert_eq!(Reply::of(&reply.words()), Some(reply));
            }
        }
    }
}
