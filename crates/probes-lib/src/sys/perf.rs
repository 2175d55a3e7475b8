//! Events of the threads of other processes (perf_event_open(2)), and the rings to which the kernel writes their
//! records.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use libc::c_void;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use perf_event_open_sys::bindings::{
    self, PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_DUMMY, PERF_REG_X86_AX, PERF_REG_X86_IP,
    PERF_REG_X86_R8, PERF_REG_X86_R15, PERF_SAMPLE_ID, PERF_SAMPLE_REGS_USER,
    PERF_SAMPLE_STACK_USER, PERF_SAMPLE_TID, PERF_SAMPLE_TIME, PERF_TYPE_SOFTWARE, perf_event_attr,
    perf_event_mmap_page,
};
use perf_event_open_sys::{ioctls, perf_event_open};

use crate::address::PAGE;

/// The registers of a sample, a bit for each: the general ones and the program counter, in the kernel's order
/// (asm/perf_regs.h).
pub(crate) const SAMPLED_REGISTERS: u64 =
    bits(PERF_REG_X86_AX, PERF_REG_X86_IP) | bits(PERF_REG_X86_R8, PERF_REG_X86_R15);

const fn bits(first: u32, last: u32) -> u64 {
    (2 << last) - (1 << first)
}

/// Samples of a thread while it is on a processor: its registers, and the bytes from the stack pointer on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockSamples {
    /// One is taken each time that the thread has run for so long.
    pub(crate) period: Duration,
    /// How many bytes of the stack; a multiple of 8.
    pub(crate) stack_len: u32,
    /// Whether a sample is taken while the thread is in the kernel, too.
    pub(crate) in_kernel: bool,
    /// Whether the ring becomes readable as soon as it has one (poll(2)).
    pub(crate) wake_reader: bool,
}

/// An event of a thread on one processor. Threads that it creates later inherit it.
#[derive(Debug)]
pub(crate) struct PerfEvent(OwnedFd);

impl PerfEvent {
    /// Opens an event that records when the thread is switched to and from, when it ends, and when threads that it
    /// creates begin and end, with times of `CLOCK_MONOTONIC`; and takes `samples`, if there are any.
    ///
    /// # Errors
    ///
    /// ESRCH if there is no such thread, ENODEV if the processor is offline, EINVAL if there is none with this number,
    /// EACCES or EPERM if the event is not permitted; and others of perf_event_open(2).
    pub(crate) fn of_switches(
        tid: i32,
        processor: i32,
        samples: Option<&ClockSamples>,
    ) -> io::Result<PerfEvent> {
        let mut attributes = perf_event_attr {
            size: size_of::<perf_event_attr>() as u32,
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_DUMMY.into(),
            sample_type: (PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_ID).into(),
            clockid: libc::CLOCK_MONOTONIC,
            ..perf_event_attr::default()
        };
        attributes.set_context_switch(1);
        attributes.set_task(1);
        attributes.set_sample_id_all(1);
        attributes.set_use_clockid(1);
        attributes.set_exclude_kernel(1);
        if let Some(samples) = samples {
            attributes.config = PERF_COUNT_SW_CPU_CLOCK.into();
            let period = samples.period.as_nanos();
            attributes.__bindgen_anon_1.sample_period = u64::try_from(period).unwrap_or(u64::MAX);
            attributes.sample_type |= u64::from(PERF_SAMPLE_REGS_USER | PERF_SAMPLE_STACK_USER);
            attributes.sample_regs_user = SAMPLED_REGISTERS;
            attributes.sample_stack_user = samples.stack_len;
            attributes.set_exclude_kernel(u64::from(!samples.in_kernel));
        }
        attributes.set_exclude_hv(1);
        attributes.set_inherit(1);
        // Without it, child processes inherit the event, too; Linux before 5.13 does not know it.
        attributes.set_inherit_thread(1);
        // No reader is woken for a switch: the rings are read from time to time. A sample is longer than its stack.
        let waking = samples.filter(|it| it.wake_reader);
        attributes.set_watermark(1);
        attributes.__bindgen_anon_2.wakeup_watermark = waking.map_or(u32::MAX, |it| it.stack_len);
        match open(&mut attributes, tid, processor) {
            Err(error) if is_unknown_to_kernel(&error) => {
                attributes.set_inherit_thread(0);
                open(&mut attributes, tid, processor)
            }
            opened => opened,
        }
    }

    /// Returns its number, which is in its records and in those of the events that other threads have inherited
    /// from it.
    ///
    /// # Errors
    ///
    /// Those of the kernel.
    pub(crate) fn id(&self) -> io::Result<u64> {
        let mut id = 0;
        // SAFETY: it is the descriptor of an event, and open; the kernel writes the number to `id`.
        Errno::result(unsafe { ioctls::ID(self.0.as_raw_fd(), &raw mut id) })?;
        Ok(id)
    }

    /// Returns whether its thread, and all threads that have inherited it, have exited. Then the event is always
    /// readable.
    pub(crate) fn has_exited(&self) -> bool {
        let mut event = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        let polled = poll(&mut event, PollTimeout::ZERO);
        let hung_up = event[0].revents().unwrap_or(PollFlags::empty());
        polled.is_ok() && hung_up.contains(PollFlags::POLLHUP)
    }

    /// Has the kernel write its records to the ring of another event, of the same processor.
    ///
    /// # Errors
    ///
    /// Those of the kernel.
    pub(crate) fn write_to(&self, ring: &Ring) -> io::Result<()> {
        let (event, of_ring) = (self.0.as_raw_fd(), ring.event.0.as_raw_fd());
        // SAFETY: both are descriptors of events, and open; no memory is passed.
        Errno::result(unsafe { ioctls::SET_OUTPUT(event, of_ring) })?;
        Ok(())
    }
}

impl AsFd for PerfEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn is_unknown_to_kernel(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::E2BIG))
}

fn open(attributes: &mut perf_event_attr, tid: i32, processor: i32) -> io::Result<PerfEvent> {
    const ALONE: i32 = -1;
    let flags = bindings::PERF_FLAG_FD_CLOEXEC.into();
    // SAFETY: the attributes are as long as their size says, and the kernel does not keep the pointer.
    let fd = Errno::result(unsafe { perf_event_open(attributes, tid, processor, ALONE, flags) })?;
    // SAFETY: the kernel has just opened it for us, and no other code has it.
    Ok(PerfEvent(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// The ring to which the kernel writes the records of events of one processor: a page that says where the kernel writes
/// and we read, and after it the records.
#[derive(Debug)]
pub(crate) struct Ring {
    event: PerfEvent,
    start: NonNull<c_void>,
    /// The bytes of the records; a power of two.
    len: usize,
}

// SAFETY: the mapping is ours alone, and is used by one thread at a time: reading takes `&mut`.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring of an event, with so many bytes: a power of two, a page at least.
    ///
    /// # Errors
    ///
    /// EPERM if it is more than may be locked (`kernel.perf_event_mlock_kb`), and those of mmap(2).
    pub(crate) fn map(event: PerfEvent, len: usize) -> io::Result<Ring> {
        let is_whole = len.is_power_of_two() && len >= PAGE as usize;
        let whole = NonZeroUsize::new(len.saturating_add(PAGE as usize));
        let Some(whole) = whole.filter(|_| is_whole) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED;
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let start = unsafe { mmap(None, whole, access, flags, event.0.as_fd(), 0) }?;
        Ok(Ring { event, start, len })
    }

    /// Its event.
    pub(crate) fn event(&self) -> &PerfEvent {
        &self.event
    }

    /// How many bytes it has room for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn head(&self) -> &AtomicU64 {
        let page = self.start.cast::<perf_event_mmap_page>();
        // SAFETY: the page is mapped as long as `self` is; the field is aligned, and is accessed atomically by us and
        // the kernel.
        unsafe { AtomicU64::from_ptr(&raw mut (*page.as_ptr()).data_head) }
    }

    fn tail(&self) -> &AtomicU64 {
        let page = self.start.cast::<perf_event_mmap_page>();
        // SAFETY: as above; the kernel only reads it.
        unsafe { AtomicU64::from_ptr(&raw mut (*page.as_ptr()).data_tail) }
    }

    /// Appends what the kernel has written since the last call, and lets it write there again.
    pub(crate) fn read(&mut self, records: &mut Vec<u8>) {
        // What is before the head was written before the head was: linux/perf_event.h asks for this order.
        let head = self.head().load(Ordering::Acquire);
        let tail = self.tail().load(Ordering::Relaxed);
        let unread = usize::try_from(head.wrapping_sub(tail)).unwrap_or(usize::MAX);
        let unread = unread.min(self.len);
        let from = (tail % self.len as u64) as usize;
        let to_end = unread.min(self.len - from);
        for (at, len) in [(from, to_end), (0, unread - to_end)] {
            // SAFETY: `at + len` is at most the length of the records, which are mapped after the first page, and the
            // kernel does not write between tail and head.
            let part = unsafe {
                let start = self.start.cast::<u8>().add(PAGE as usize + at);
                std::slice::from_raw_parts(start.as_ptr(), len)
            };
            records.extend_from_slice(part);
        }
        self.tail().store(head, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start, self.len + PAGE as usize) };
    }
}
