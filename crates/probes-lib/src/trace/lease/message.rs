//! The requests of a tool to the follower that lends it a process, and the replies: words of 64 bits, the first of
//! which says what the others are.

use std::time::Duration;

use libc::user_regs_struct;
use nix::errno::Errno;

use crate::address::LiveAddr;
use crate::numbers::{nanoseconds, words};
use crate::sys::ptrace::TraceeState;

/// The version of these messages. A follower lends to tools of the same version only.
pub(crate) const VERSION: u64 = 1;

/// Begins the first message, and the reply to it, in all versions; the version is next.
const MAGIC: u64 = u64::from_le_bytes(*b"o-p lend");

/// The length of the longest message in bytes. A socket's send buffer is a little larger by default.
pub(crate) const MAX_LEN: usize = 192 << 10;

/// How many threads the reply to a request to stop can name.
pub(crate) const MAX_THREADS: usize = MAX_LEN / WORD - 1;

/// How many bytes one message writes at most.
pub(crate) const MAX_WRITE: usize = 16 << 10;

const WORD: usize = size_of::<u64>();

/// The first message. With it the tool sends a descriptor of the memory of the process (/proc/PID/mem), open for
/// writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hello {
    Process {
        pid: i32,
        /// Whether the tool holds the update lock of the process until it closes the connection.
        holds_lock: bool,
    },
    OtherVersion(u64),
}

/// The reply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Welcome {
    Accepted,
    /// The process is not followed (any more), or the tool may not change it.
    Refused,
    /// The follower is of this version.
    OtherVersion(u64),
}

/// A request to the follower. All threads are of the process that the first message is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// To stop all threads of the process within this many milliseconds, until `ResumeAll`.
    Stop(u64),
    /// To resume them.
    ResumeAll,
    /// What waitid(2) would report of the thread; the follower neither waits nor consumes it.
    State(i32),
    ResumeThread(i32),
    Registers(i32),
    SetRegisters(i32, Box<user_regs_struct>),
    RseqAddress(i32),
    SeccompFilter(i32, usize),
    /// To write memory through the descriptor that the tool has sent.
    Write(LiveAddr, Vec<u8>),
    /// To write memory with ptrace(2), which the kernel may permit where it refuses `Write`.
    Poke(i32, LiveAddr, Vec<u8>),
}

/// The reply of the follower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Done,
    /// All threads are resumed; the process was stopped for this long.
    Resumed(Duration),
    /// These threads are stopped.
    Stopped(Vec<i32>),
    NotStopped(NotStopped),
    State(TraceeState),
    Registers(Box<user_regs_struct>),
    RseqAddress(Option<LiveAddr>),
    SeccompFilter(Option<Vec<libc::sock_filter>>),
    Failed(Errno),
}

/// Why a process was not stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotStopped {
    /// It is not followed any more.
    NotLent,
    Exited,
    /// Its program is not the one whose memory the tool has opened.
    Executed,
    /// This thread has not stopped in time.
    Busy(i32),
    ThreadsKeepStarting,
    /// The follower failed to stop the process, or to check whether the tool may change it.
    Failed(Errno),
}

macro_rules! registers {
    ($($name:ident)*) => {
        fn register_words(registers: &user_regs_struct) -> Vec<u64> {
            vec![$(registers.$name),*]
        }

        fn registers_of(words: &[u64]) -> Option<Box<user_regs_struct>> {
            let [$($name),*] = *words else { return None };
            Some(Box::new(user_regs_struct { $($name),* }))
        }
    };
}

registers! {
    r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base
    gs_base ds es fs gs
}

impl Hello {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        to_bytes(&match self {
            Hello::Process { pid, holds_lock } => {
                vec![MAGIC, VERSION, word(pid), u64::from(holds_lock)]
            }
            Hello::OtherVersion(version) => vec![MAGIC, version],
        })
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Hello> {
        match *to_words(bytes)? {
            [MAGIC, VERSION, pid, holds_lock @ (0 | 1)] => Some(Hello::Process {
                pid: number(pid)?,
                holds_lock: holds_lock == 1,
            }),
            [MAGIC, VERSION, ..] => None,
            // What follows is of that version.
            [MAGIC, version, ..] => Some(Hello::OtherVersion(version)),
            _ => None,
        }
    }
}

impl Welcome {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        to_bytes(&match self {
            Welcome::Accepted => vec![MAGIC, VERSION, 1],
            Welcome::Refused => vec![MAGIC, VERSION, 0],
            Welcome::OtherVersion(version) => vec![MAGIC, version],
        })
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Welcome> {
        match *to_words(bytes)? {
            [MAGIC, VERSION, 1] => Some(Welcome::Accepted),
            [MAGIC, VERSION, 0] => Some(Welcome::Refused),
            [MAGIC, VERSION, ..] => None,
            [MAGIC, version, ..] => Some(Welcome::OtherVersion(version)),
            _ => None,
        }
    }
}

/// The first word of each request.
mod request_kind {
    pub(super) const STOP: u64 = 0;
    pub(super) const RESUME_ALL: u64 = 1;
    pub(super) const STATE: u64 = 2;
    pub(super) const RESUME_THREAD: u64 = 3;
    pub(super) const REGISTERS: u64 = 4;
    pub(super) const SET_REGISTERS: u64 = 5;
    pub(super) const RSEQ_ADDRESS: u64 = 6;
    pub(super) const SECCOMP_FILTER: u64 = 7;
    pub(super) const WRITE: u64 = 8;
    pub(super) const POKE: u64 = 9;
}

/// The first word of each reply.
mod reply_kind {
    pub(super) const DONE: u64 = 0;
    pub(super) const STOPPED: u64 = 1;
    pub(super) const NOT_STOPPED: u64 = 2;
    pub(super) const STATE: u64 = 3;
    pub(super) const REGISTERS: u64 = 4;
    pub(super) const RSEQ_ADDRESS: u64 = 5;
    pub(super) const NO_SECCOMP_FILTER: u64 = 6;
    pub(super) const SECCOMP_FILTER: u64 = 7;
    pub(super) const FAILED: u64 = 8;
    pub(super) const RESUMED: u64 = 9;
}

impl Request {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        to_bytes(&self.words())
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Request> {
        Request::from_words(&to_words(bytes)?)
    }

    fn words(&self) -> Vec<u64> {
        let of = |kind, tid: i32| vec![kind, word(tid)];
        match self {
            Request::Stop(limit_ms) => vec![request_kind::STOP, *limit_ms],
            Request::ResumeAll => vec![request_kind::RESUME_ALL],
            Request::State(tid) => of(request_kind::STATE, *tid),
            Request::ResumeThread(tid) => of(request_kind::RESUME_THREAD, *tid),
            Request::Registers(tid) => of(request_kind::REGISTERS, *tid),
            Request::SetRegisters(tid, registers) => [
                of(request_kind::SET_REGISTERS, *tid),
                register_words(registers),
            ]
            .concat(),
            Request::RseqAddress(tid) => of(request_kind::RSEQ_ADDRESS, *tid),
            Request::SeccompFilter(tid, index) => {
                vec![request_kind::SECCOMP_FILTER, word(*tid), *index as u64]
            }
            Request::Write(at, bytes) => [vec![request_kind::WRITE, at.0], padded(bytes)].concat(),
            Request::Poke(tid, at, bytes) => {
                [of(request_kind::POKE, *tid), vec![at.0], padded(bytes)].concat()
            }
        }
    }

    fn from_words(words: &[u64]) -> Option<Request> {
        let (kind, rest) = words.split_first()?;
        Some(match (*kind, rest) {
            (request_kind::STOP, &[limit_ms]) => Request::Stop(limit_ms),
            (request_kind::RESUME_ALL, []) => Request::ResumeAll,
            (request_kind::STATE, &[tid]) => Request::State(number(tid)?),
            (request_kind::RESUME_THREAD, &[tid]) => Request::ResumeThread(number(tid)?),
            (request_kind::REGISTERS, &[tid]) => Request::Registers(number(tid)?),
            (request_kind::SET_REGISTERS, [tid, registers @ ..]) => {
                Request::SetRegisters(number(*tid)?, registers_of(registers)?)
            }
            (request_kind::RSEQ_ADDRESS, &[tid]) => Request::RseqAddress(number(tid)?),
            (request_kind::SECCOMP_FILTER, &[tid, index]) => {
                Request::SeccompFilter(number(tid)?, index.try_into().ok()?)
            }
            (request_kind::WRITE, [at, padded @ ..]) => {
                Request::Write(LiveAddr(*at), unpadded(padded)?)
            }
            (request_kind::POKE, [tid, at, padded @ ..]) => {
                Request::Poke(number(*tid)?, LiveAddr(*at), unpadded(padded)?)
            }
            _ => return None,
        })
    }
}

impl Reply {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        to_bytes(&self.words())
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Reply> {
        Reply::from_words(&to_words(bytes)?)
    }

    fn words(&self) -> Vec<u64> {
        match self {
            Reply::Done => vec![reply_kind::DONE],
            Reply::Stopped(tids) => [reply_kind::STOPPED]
                .into_iter()
                .chain(tids.iter().map(|tid| word(*tid)))
                .collect(),
            Reply::NotStopped(why) => match why {
                NotStopped::NotLent => vec![reply_kind::NOT_STOPPED, 0, 0],
                NotStopped::Exited => vec![reply_kind::NOT_STOPPED, 1, 0],
                NotStopped::Executed => vec![reply_kind::NOT_STOPPED, 2, 0],
                NotStopped::Busy(tid) => vec![reply_kind::NOT_STOPPED, 3, word(*tid)],
                NotStopped::ThreadsKeepStarting => vec![reply_kind::NOT_STOPPED, 4, 0],
                NotStopped::Failed(errno) => vec![reply_kind::NOT_STOPPED, 5, word(*errno as i32)],
            },
            Reply::State(state) => match state {
                TraceeState::Running => vec![reply_kind::STATE, 0, 0],
                TraceeState::Signal(signal) => vec![reply_kind::STATE, 1, word(*signal)],
                TraceeState::EventStopped => vec![reply_kind::STATE, 2, 0],
                TraceeState::GroupStopped => vec![reply_kind::STATE, 3, 0],
                TraceeState::Cloned(child) => vec![reply_kind::STATE, 4, word(*child)],
                TraceeState::Executed => vec![reply_kind::STATE, 5, 0],
                TraceeState::Exited => vec![reply_kind::STATE, 6, 0],
                TraceeState::Gone => vec![reply_kind::STATE, 7, 0],
            },
            Reply::Registers(registers) => {
                [vec![reply_kind::REGISTERS], register_words(registers)].concat()
            }
            Reply::RseqAddress(None) => vec![reply_kind::RSEQ_ADDRESS],
            Reply::RseqAddress(Some(at)) => vec![reply_kind::RSEQ_ADDRESS, at.0],
            Reply::SeccompFilter(None) => vec![reply_kind::NO_SECCOMP_FILTER],
            Reply::SeccompFilter(Some(filter)) => {
                let instructions = filter.iter().map(|it| {
                    let (code, jumps) = (u64::from(it.code), [it.jt, it.jf].map(u64::from));
                    code | jumps[0] << 16 | jumps[1] << 24 | u64::from(it.k) << 32
                });
                [reply_kind::SECCOMP_FILTER]
                    .into_iter()
                    .chain(instructions)
                    .collect()
            }
            Reply::Failed(errno) => vec![reply_kind::FAILED, word(*errno as i32)],
            Reply::Resumed(stop_time) => {
                vec![reply_kind::RESUMED, nanoseconds(*stop_time)]
            }
        }
    }

    fn from_words(words: &[u64]) -> Option<Reply> {
        let (kind, rest) = words.split_first()?;
        Some(match (*kind, rest) {
            (reply_kind::DONE, []) => Reply::Done,
            (reply_kind::STOPPED, tids) => {
                let tids: Option<Vec<i32>> = tids.iter().map(|tid| number(*tid)).collect();
                Reply::Stopped(tids?)
            }
            (reply_kind::NOT_STOPPED, &[why, about]) => Reply::NotStopped(match why {
                0 => NotStopped::NotLent,
                1 => NotStopped::Exited,
                2 => NotStopped::Executed,
                3 => NotStopped::Busy(number(about)?),
                4 => NotStopped::ThreadsKeepStarting,
                5 => NotStopped::Failed(Errno::from_raw(number(about)?)),
                _ => return None,
            }),
            (reply_kind::STATE, &[state, about]) => Reply::State(match state {
                0 => TraceeState::Running,
                1 => TraceeState::Signal(number(about)?),
                2 => TraceeState::EventStopped,
                3 => TraceeState::GroupStopped,
                4 => TraceeState::Cloned(number(about)?),
                5 => TraceeState::Executed,
                6 => TraceeState::Exited,
                7 => TraceeState::Gone,
                _ => return None,
            }),
            (reply_kind::REGISTERS, registers) => Reply::Registers(registers_of(registers)?),
            (reply_kind::RSEQ_ADDRESS, []) => Reply::RseqAddress(None),
            (reply_kind::RSEQ_ADDRESS, &[at]) => Reply::RseqAddress(Some(LiveAddr(at))),
            (reply_kind::NO_SECCOMP_FILTER, []) => Reply::SeccompFilter(None),
            (reply_kind::SECCOMP_FILTER, instructions) => {
                let filter = instructions.iter().map(|it| libc::sock_filter {
                    code: *it as u16,
                    jt: (it >> 16) as u8,
                    jf: (it >> 24) as u8,
                    k: (it >> 32) as u32,
                });
                Reply::SeccompFilter(Some(filter.collect()))
            }
            (reply_kind::FAILED, &[errno]) => Reply::Failed(Errno::from_raw(number(errno)?)),
            (reply_kind::RESUMED, &[nanoseconds]) => {
                Reply::Resumed(Duration::from_nanos(nanoseconds))
            }
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

/// Returns how many bytes there are, and then the bytes as words, the last one filled up with zeroes.
fn padded(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.chunks(WORD).map(|piece| {
        let mut word = [0; WORD];
        word[..piece.len()].copy_from_slice(piece);
        u64::from_le_bytes(word)
    });
    [bytes.len() as u64].into_iter().chain(words).collect()
}

/// The opposite of [`padded`].
fn unpadded(words: &[u64]) -> Option<Vec<u8>> {
    let (len, padded) = words.split_first()?;
    let len = usize::try_from(*len).ok()?;
    let mut bytes: Vec<u8> = padded.iter().flat_map(|it| it.to_le_bytes()).collect();
    let is_padding = |rest: &[u8]| rest.len() < WORD && rest.iter().all(|&byte| byte == 0);
    bytes.get(len..).filter(|rest| is_padding(rest))?;
    bytes.truncate(len);
    Some(bytes)
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn to_words(bytes: &[u8]) -> Option<Vec<u64>> {
    let is_whole = bytes.len() % WORD == 0;
    is_whole.then(|| words(bytes).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn registers() -> Box<user_regs_struct> {
        let words: Vec<u64> = (1..=27).collect();
        registers_of(&words).unwrap()
    }

    #[test]
    fn messages_are_parsed_as_they_were_written() {
        let requests = [
            Request::Stop(500),
            Request::ResumeAll,
            Request::State(1),
            Request::ResumeThread(2),
            Request::Registers(3),
            Request::SetRegisters(4, registers()),
            Request::RseqAddress(5),
            Request::SeccompFilter(6, 1),
            Request::Write(LiveAddr(0x1000), vec![1, 2, 3]),
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
            Reply::Stopped(vec![]),
            Reply::Stopped(vec![4242, 4243]),
            Reply::NotStopped(NotStopped::NotLent),
            Reply::NotStopped(NotStopped::Exited),
            Reply::NotStopped(NotStopped::Executed),
            Reply::NotStopped(NotStopped::Busy(4243)),
            Reply::NotStopped(NotStopped::ThreadsKeepStarting),
            Reply::NotStopped(NotStopped::Failed(Errno::EMFILE)),
            Reply::Stopped(vec![i32::MAX; MAX_THREADS]),
            Reply::State(TraceeState::Running),
            Reply::State(TraceeState::Signal(10)),
            Reply::State(TraceeState::EventStopped),
            Reply::State(TraceeState::GroupStopped),
            Reply::State(TraceeState::Cloned(4244)),
            Reply::State(TraceeState::Executed),
            Reply::State(TraceeState::Exited),
            Reply::State(TraceeState::Gone),
            Reply::Registers(registers()),
            Reply::RseqAddress(None),
            Reply::RseqAddress(Some(LiveAddr(u64::MAX))),
            Reply::SeccompFilter(None),
            Reply::SeccompFilter(Some(Vec::new())),
            Reply::SeccompFilter(Some(vec![filter])),
            Reply::Failed(Errno::ESRCH),
            Reply::Resumed(Duration::from_nanos(1_234_567)),
        ];
        for request in requests {
            assert_eq!(Request::parse(&request.to_bytes()), Some(request));
        }
        for reply in replies {
            assert_eq!(Reply::parse(&reply.to_bytes()), Some(reply));
        }
    }

    #[test]
    fn greetings_are_parsed_as_they_were_written() {
        let hello = |holds_lock| Hello::Process {
            pid: 4242,
            holds_lock,
        };
        for hello in [hello(false), hello(true), Hello::OtherVersion(2)] {
            assert_eq!(Hello::parse(&hello.to_bytes()), Some(hello));
        }
        for welcome in [
            Welcome::Accepted,
            Welcome::Refused,
            Welcome::OtherVersion(2),
        ] {
            assert_eq!(Welcome::parse(&welcome.to_bytes()), Some(welcome));
        }
    }

    #[test]
    fn other_versions_are_recognized() {
        let later = to_bytes(&[MAGIC, VERSION + 1, 17, 18]);
        assert_eq!(Hello::parse(&later), Some(Hello::OtherVersion(VERSION + 1)));
        assert_eq!(Hello::parse(&to_bytes(&[VERSION, MAGIC])), None);
        assert_eq!(Welcome::parse(&to_bytes(&[MAGIC])), None);
    }

    #[test]
    fn longest_write_fits_in_a_message() {
        let write = Request::Poke(1, LiveAddr(0), vec![0; MAX_WRITE]);
        assert!(write.to_bytes().len() <= MAX_LEN);
    }

    proptest! {
        #[test]
        fn any_words_give_a_message_or_none(words in prop::collection::vec(
            prop_oneof![0..12_u64, any::<u64>()], 0..40)) {
            let bytes = to_bytes(&words);
            let _ = (Hello::parse(&bytes), Welcome::parse(&bytes), Request::parse(&bytes[..bytes.len() / 2]));
            if let Some(request) = Request::from_words(&words) {
                prop_assert_eq!(Request::from_words(&request.words()), Some(request));
            }
            if let Some(reply) = Reply::from_words(&words) {
                prop_assert_eq!(Reply::from_words(&reply.words()), Some(reply));
            }
        }
    }
}
