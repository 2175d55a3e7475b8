//! [`Status`]: what `/proc/PID/status` and `/proc/PID/stat` say of a process or thread, parsed from
//! bytes.

use std::str;
use std::time::Duration;

/// `PF_EXITING`, `PF_FORKNOEXEC` and `PF_KTHREAD` of the kernel's `include/linux/sched.h`.
const PF_EXITING: u64 = 0x4;
const PF_FORKNOEXEC: u64 = 0x40;
const PF_KTHREAD: u64 = 0x0020_0000;

/// `CAP_SYS_ADMIN` of capability.h.
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// `USER_HZ` of amd64: clock ticks of `stat` per second.
const TICKS: u64 = 100;

/// For how long after its fork a process may be about to execute a program.
pub(super) const JUST_FORKED: Duration = Duration::from_secs(1);

/// The fields of `/proc/…/status` that are used here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) name: String,
    pub(crate) state: char,
    pub(crate) tgid: i32,
    pub(crate) ppid: i32,
    pub(crate) tracer: i32,
    pub(crate) uid: u32,
    /// Its filesystem uid and gid and its supplementary groups, which decide what files it may access: credentials(7).
    pub(crate) file_uid: u32,
    pub(crate) file_gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) threads: usize,
    /// Its ids in its pid namespaces, from that of this /proc inwards.
    pub(crate) ids: Vec<i32>,
    /// In how many pid namespaces it has an id, counted inwards from the namespace of this /proc.
    pub(crate) levels: usize,
    /// Its id in the innermost of them, which is the one that it knows.
    pub(crate) innermost: i32,
    /// The seccomp mode: 0 for none, 1 for strict mode (only read(2), write(2), _exit(2) and sigreturn(2)), 2 for
    /// filters.
    pub(crate) seccomp: u32,
    /// How many filters there are.
    pub(crate) filters: u32,
    /// Capabilities, as bits.
    pub(crate) permitted: u64,
    pub(crate) effective: u64,
    pub(crate) bounding: u64,
    /// How much is mapped, and how much of that is private and writable, without stacks; in bytes.
    pub(crate) address_space: u64,
    pub(crate) data: u64,
    /// How much is in memory, and how much of what is mapped may not leave it; in bytes.
    pub(crate) resident: u64,
    pub(crate) locked: u64,
}

impl Status {
    /// Returns whether it may do what takes `CAP_SYS_ADMIN` in its user namespace.
    pub(crate) fn is_admin(&self) -> bool {
        self.effective & CAP_SYS_ADMIN != 0
    }

    /// Parses `/proc/…/status`. Missing fields are 0 or empty, and so are those that cannot be parsed, except
    /// `file_uid` and `file_gid`: these are -1 then, not root's 0.
    pub(crate) fn parse(bytes: &[u8]) -> Status {
        let mut status = Status::default();
        for line in bytes.split(|&byte| byte == b'\n') {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else {
                continue;
            };
            let value = String::from_utf8_lossy(line[colon + 1..].trim_ascii());
            let first = value.split_ascii_whitespace().next().unwrap_or_default();
            match &line[..colon] {
                b"Name" => status.name = value.into_owned(),
                b"State" => status.state = first.chars().next().unwrap_or('?'),
                b"Tgid" => status.tgid = first.parse().unwrap_or(0),
                b"PPid" => status.ppid = first.parse().unwrap_or(0),
                b"NSpid" => {
                    let ids = value.split_ascii_whitespace();
                    status.ids = ids.map(|id| id.parse().unwrap_or(0)).collect();
                    status.levels = status.ids.len();
                    status.innermost = status.ids.last().copied().unwrap_or(0);
                }
                b"TracerPid" => status.tracer = first.parse().unwrap_or(0),
                b"Uid" => {
                    status.uid = first.parse().unwrap_or(0);
                    status.file_uid = last_of(&value);
                }
                b"Gid" => status.file_gid = last_of(&value),
                b"Groups" => {
                    let groups = value.split_ascii_whitespace();
                    status.groups = groups.filter_map(|it| it.parse().ok()).collect();
                }
                b"Threads" => status.threads = first.parse().unwrap_or(0),
                b"Seccomp" => status.seccomp = first.parse().unwrap_or(0),
                b"Seccomp_filters" => status.filters = first.parse().unwrap_or(0),
                b"CapPrm" => status.permitted = u64::from_str_radix(first, 16).unwrap_or(0),
                b"CapBnd" => status.bounding = u64::from_str_radix(first, 16).unwrap_or(0),
                b"VmSize" => status.address_space = bytes_of(first),
                b"VmData" => status.data = bytes_of(first),
                b"VmRSS" => status.resident = bytes_of(first),
                b"VmLck" => status.locked = bytes_of(first),
                b"CapEff" => status.effective = u64::from_str_radix(first, 16).unwrap_or(0),
                _ => {}
            }
        }
        status
    }
}

/// The bytes of a number of KiB; 0 if it is none.
fn bytes_of(kib: &str) -> u64 {
    kib.parse().map_or(0, |kib: u64| kib.saturating_mul(1024))
}

/// The last of the four ids of a line: the filesystem id.
fn last_of(ids: &str) -> u32 {
    let last = ids.split_ascii_whitespace().next_back();
    last.and_then(|id| id.parse().ok()).unwrap_or(u32::MAX)
}

/// Fields of `stat`, by their numbers in proc(5), from 1.
const FLAGS: usize = 9;
const STARTTIME: usize = 22;

/// Returns whether `stat` is that of a thread which has begun to exit.
pub(super) fn is_exiting(stat: &[u8]) -> bool {
    has_flag(stat, PF_EXITING)
}

/// Returns whether `stat` is that of a kernel thread.
pub(super) fn is_kernel_thread(stat: &[u8]) -> bool {
    has_flag(stat, PF_KTHREAD)
}

/// Returns whether `stat` is that of a process which was forked within the last second and has executed
/// nothing so far. `now` is the time since boot.
pub(super) fn was_just_forked(stat: &[u8], now: Duration) -> bool {
    was_only_forked(stat) && age(stat, now).is_some_and(|age| age < JUST_FORKED)
}

/// Returns for how long the process of `stat` has run at the time `now` since boot.
pub(crate) fn age(stat: &[u8], now: Duration) -> Option<Duration> {
    let start = Duration::from_millis(start_time(stat)?.saturating_mul(1000 / TICKS));
    Some(now.saturating_sub(start))
}

/// Returns whether `stat` is that of a process which was forked and has executed nothing since; kernel threads are none.
pub(crate) fn was_only_forked(stat: &[u8]) -> bool {
    has_flag(stat, PF_FORKNOEXEC) && !has_flag(stat, PF_KTHREAD)
}

/// Returns when the process of `stat` was started, in clock ticks since boot.
pub(crate) fn start_time(stat: &[u8]) -> Option<u64> {
    field(stat, STARTTIME)
}

fn has_flag(stat: &[u8], flag: u64) -> bool {
    field(stat, FLAGS).is_some_and(|flags| flags & flag != 0)
}

/// Returns a field after the second, the name, which is in parentheses and may contain spaces and parentheses itself:
/// only the last `)` is certain to end it.
fn field(stat: &[u8], field: usize) -> Option<u64> {
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = str::from_utf8(stat.get(end_of_name + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(field - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_read_despite_a_hostile_name() {
        let status = Status::parse(
            b"Name:\t\xff) R 1\\n\nState:\tZ (zombie)\nTgid:\t42\nPPid:\t1\nTracerPid:\t7\n\
              Uid:\t1000\t1001\t1002\t1003\nNSpid:\t42\t7\t5\nThreads:\t3\n\
              CapPrm:\t0000000000080000\nCapEff:\t0000000000000001\nCapBnd:\t00000000000000ff\n\
              Seccomp:\t2\nSeccomp_filters:\t4\n",
        );
        assert_eq!(status.name, "\u{fffd}) R 1\\n");
        assert_eq!((status.state, status.tgid, status.ppid), ('Z', 42, 1));
        assert_eq!((status.tracer, status.uid, status.threads), (7, 1000, 3));
        assert_eq!((status.levels, status.innermost), (3, 5));
        assert_eq!((status.permitted, status.effective), (0x80000, 1));
        assert_eq!(status.bounding, 0xff);
        assert_eq!((status.seccomp, status.filters), (2, 4));

        let stat = b"42 (a) b (c) R 1 42 42 0 -1 2097152 0";
        assert_eq!(field(stat, FLAGS), Some(PF_KTHREAD));
        assert!(is_kernel_thread(stat) && !is_exiting(stat));
        let exiting = b"42 (a) b (c) R 1 42 42 0 -1 4 0";
        assert!(is_exiting(exiting) && !is_kernel_thread(exiting));
        assert_eq!(field(b"42 (a", FLAGS), None);
        assert_eq!(field(b"42 (a) R", FLAGS), None);
    }

    #[test]
    fn newborn_process_was_just_forked_without_exec() {
        let stat = |flags: u64| {
            format!("42 (a) R 1 42 42 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 3000 0").into_bytes()
        };
        let ms = Duration::from_millis;
        assert!(was_just_forked(&stat(PF_FORKNOEXEC), ms(30_000)));
        assert!(was_just_forked(
            &stat(PF_FORKNOEXEC | 0x0040_0000),
            ms(30_999)
        ));
        assert!(!was_just_forked(&stat(PF_FORKNOEXEC), ms(31_001)));
        // No kernel thread executes anything.
        assert!(!was_just_forked(
            &stat(PF_FORKNOEXEC | PF_KTHREAD),
            ms(30_000)
        ));
        assert!(!was_just_forked(&stat(0x0040_0000), ms(30_000)));
        assert!(!was_just_forked(b"42 (a) R", ms(30_000)));
        // It has begun just after `now` was read.
        assert_eq!(age(&stat(0), ms(29_990)), Some(Duration::ZERO));
        assert_eq!(age(&stat(0), ms(32_500)), Some(ms(2_500)));
    }
}
