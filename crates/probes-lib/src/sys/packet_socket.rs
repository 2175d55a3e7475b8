//! [`PacketSocket`]: a Unix socket with an abstract address, whose messages arrive whole or not at all (unix(7),
//! `SOCK_SEQPACKET`), and can carry a descriptor. No call blocks, except [`PacketSocket::wait_for_message`].

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 16;

/// The longest single wait for a message.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// The length of a control message with one descriptor (cmsg(3)). With its padding, it has room for a second one.
const CONTROL_LEN: usize = 24;

/// A control buffer, aligned as its header has to be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

#[derive(Debug)]
pub(crate) struct PacketSocket(OwnedFd);

/// The process at the other end of a socket, as it was when it connected or listened (`SO_PEERCRED`). The
/// ids are those of our namespaces; the pid is 0 if it has none there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) pid: i32,
    /// Its effective uid.
    pub(crate) uid: u32,
}

impl PacketSocket {
    /// Returns a socket that listens at an address.
    pub(crate) fn listen(name: &str) -> io::Result<PacketSocket> {
        let socket = PacketSocket::new()?;
        let (address, len) = address(name)?;
        // SAFETY: `address` is a sockaddr_un, and at least `len` bytes long.
        Errno::result(unsafe { libc::bind(socket.raw(), (&raw const address).cast(), len) })?;
        // SAFETY: it takes no pointers.
        Errno::result(unsafe { libc::listen(socket.raw(), BACKLOG) })?;
        Ok(socket)
    }

    /// Connects to an address; fails with EAGAIN if too many connections wait to be accepted there.
    pub(crate) fn connect(name: &str) -> io::Result<PacketSocket> {
        let socket = PacketSocket::new()?;
        let (address, len) = address(name)?;
        // SAFETY: `address` is a sockaddr_un, and at least `len` bytes long.
        Errno::result(unsafe { libc::connect(socket.raw(), (&raw const address).cast(), len) })?;
        Ok(socket)
    }

    /// Returns the next connection; fails with EAGAIN if there is none.
    pub(crate) fn accept(&self) -> io::Result<PacketSocket> {
        let (none, flags) = (
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
        );
        // SAFETY: no address is wanted.
        let accepted = unsafe { libc::accept4(self.raw(), none, std::ptr::null_mut(), flags) };
        owned(accepted).map(PacketSocket)
    }

    /// Returns two sockets that are connected to each other.
    #[cfg(test)]
    pub(crate) fn pair() -> io::Result<(PacketSocket, PacketSocket)> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let mut pair = [0; 2];
        // SAFETY: the kernel writes two descriptors.
        Errno::result(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) })?;
        let [one, other] = pair;
        Ok((PacketSocket(owned(one)?), PacketSocket(owned(other)?)))
    }

    fn new() -> io::Result<PacketSocket> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: it takes no pointers.
        owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }).map(PacketSocket)
    }

    fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Returns which process is at the other end.
    pub(crate) fn peer(&self) -> io::Result<Peer> {
        let mut found = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut len = size_of_val(&found) as libc::socklen_t;
        // SAFETY: the kernel writes no more than `len` bytes, which are those of a struct ucred.
        let result = unsafe {
            libc::getsockopt(
                self.raw(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        Errno::result(result)?;
        Ok(Peer {
            pid: found.pid,
            uid: found.uid,
        })
    }

    /// Waits until a message, or the end of the connection, can be received: for `limit`, and longer if this process is
    /// stopped (SIGSTOP) meanwhile, as the other end may have been stopped with it.
    ///
    /// # Errors
    ///
    /// `TimedOut` after that.
    pub(crate) fn wait_for_message(&self, limit: Duration) -> io::Result<()> {
        let mut left = limit;
        loop {
            let longest = left.min(LONGEST_WAIT);
            // At least a millisecond: a shorter wait would be rounded down to none.
            let timeout = u16::try_from(longest.as_millis() + 1).unwrap_or(u16::MAX);
            let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            let begun = Instant::now();
            let polled = poll(&mut fds, PollTimeout::from(timeout));
            left = left.saturating_sub(begun.elapsed().min(longest));
            match polled {
                Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Returns whether the other end is closed. True even if messages from it were not received yet.
    pub(crate) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        // POLLHUP is reported without being asked for.
        let is_ready = poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
        is_ready && fds[0].any().unwrap_or(true)
    }

    /// Sends a message, with a descriptor if there is one.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no room for it now.
    pub(crate) fn send(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut control = Control([0; CONTROL_LEN]);
        let mut part = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let mut message = message(&mut part);
        if let Some(descriptor) = descriptor {
            message.msg_control = control.0.as_mut_ptr().cast();
            // SAFETY: it only computes.
            let len = unsafe { libc::CMSG_LEN(size_of::<i32>() as u32) } as usize;
            message.msg_controllen = CONTROL_LEN;
            // SAFETY: the buffer is aligned, and long enough for the header and one descriptor.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = len;
                libc::CMSG_DATA(header)
                    .cast::<i32>()
                    .write_unaligned(descriptor.as_raw_fd());
            }
        }
        // If the other end is closed, sending is an error (EPIPE) without SIGPIPE.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the message points to `part` and `control`, which outlive the call; it is only read.
        let sent = unsafe { libc::sendmsg(self.raw(), &raw const message, flags) };
        Errno::result(sent)?;
        Ok(())
    }

    /// Receives a message into `buffer`; returns its length, and the descriptor that came with it.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if none has come; `UnexpectedEof` if the other end is closed, `ConnectionReset` if it was closed
    /// before it had received all messages; `InvalidData` for a message that is longer than the buffer, or has several
    /// descriptors.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        let mut control = Control([0; CONTROL_LEN]);
        let mut part = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        let mut message = message(&mut part);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_LEN;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the message points to `part` and `control`, which outlive the call, with their lengths.
        let received = unsafe { libc::recvmsg(self.raw(), &raw mut message, flags) };
        let len = usize::try_from(Errno::result(received)?).unwrap_or_default();
        // They are closed when this value is dropped, however many have come.
        let mut descriptors = descriptors(&message);
        let is_cut = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
        if is_cut || descriptors.len() > 1 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok((len, descriptors.pop()))
    }
}

/// Returns a message of one part, without control data.
fn message(part: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: msghdr is plain data, for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message
}

/// Takes the descriptors that have come with a message.
fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    // SAFETY: the kernel has filled in the control data and their length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers within the control data.
        let (level, kind, len) = unsafe {
            (
                (*header).cmsg_level,
                (*header).cmsg_type,
                (*header).cmsg_len,
            )
        };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: it only computes.
            let start = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = len.saturating_sub(start) / size_of::<i32>();
            for index in 0..count {
                // SAFETY: the kernel has written `count` descriptors there, which nothing else owns.
                found.extend(unsafe {
                    let data = libc::CMSG_DATA(header).cast::<i32>();
                    let descriptor = data.add(index).read_unaligned();
                    (descriptor >= 0).then(|| OwnedFd::from_raw_fd(descriptor))
                });
            }
        }
        // SAFETY: `header` is one of this message.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    found
}

fn owned(descriptor: i32) -> io::Result<OwnedFd> {
    let descriptor = Errno::result(descriptor)?;
    // SAFETY: the kernel has just returned it, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Returns an abstract address, and its length.
fn address(name: &str) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: sockaddr_un is plain data, for which all zeroes is a valid value.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte is 0.
    let path = address
        .sun_path
        .get_mut(1..=name.len())
        .ok_or(io::ErrorKind::InvalidInput)?;
    for (place, byte) in path.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    let len = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use test_support::eventually;

    use super::*;

    #[test]
    fn both_ends_know_their_peer() {
        let name = format!("ocaml-probes-test-{}", std::process::id());
        let listener = PacketSocket::listen(&name).unwrap();
        assert_eq!(
            listener.accept().unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        let client = PacketSocket::connect(&name).unwrap();
        let accepted = listener.accept().unwrap();
        let own = Peer {
            pid: std::process::id() as i32,
            uid: nix::unistd::geteuid().as_raw(),
        };
        assert_eq!(
            (client.peer().unwrap(), accepted.peer().unwrap()),
            (own, own)
        );
        drop((listener, accepted));
        // A child that another test starts now has copies of both until its exec.
        eventually("nobody listens", || PacketSocket::connect(&name).err());
    }

    #[test]
    fn messages_are_whole_and_carry_one_descriptor() {
        let (one, other) = PacketSocket::pair().unwrap();
        let mut buffer = [0; 16];
        let none = other.receive(&mut buffer).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        let file = File::open("/proc/self/comm").unwrap();
        one.send(b"with", Some(file.as_fd())).unwrap();
        one.send(b"without", None).unwrap();
        let (len, descriptor) = other.receive(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], b"with");
        let mut text = String::new();
        File::from(descriptor.unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert!(text.ends_with('\n'));
        let (len, descriptor) = other.receive(&mut buffer).unwrap();
        assert_eq!(
            (&buffer[..len], descriptor.is_none()),
            (&b"without"[..], true)
        );
        one.send(&[0; 17], None).unwrap();
        let cut = other.receive(&mut buffer).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::InvalidData);
        assert!(!other.is_closed());
        drop(one);
        // A child that another test starts now has a copy until its exec.
        eventually("the socket is closed", || other.is_closed().then_some(()));
        other.wait_for_message(Duration::from_secs(30)).unwrap();
        let end = other.receive(&mut buffer).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn wait_for_a_message_times_out() {
        let (_one, other) = PacketSocket::pair().unwrap();
        let error = other.wait_for_message(Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
