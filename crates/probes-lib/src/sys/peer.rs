//! Who is at the other end of a Unix socket.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The process at the other end of a socket when it was connected, as unix(7) says (`SO_PEERCRED`), in our
/// namespaces; the pid is 0 if it is in none of ours.
pub(crate) struct Credentials {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

/// Returns who is at the other end of a stream.
pub(crate) fn credentials(stream: &UnixStream) -> io::Result<Credentials> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the kernel writes no more than `len` bytes, which are those of a struct ucred.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Credentials {
        pid: found.pid,
        uid: found.uid,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = credentials(&one).unwrap();
        assert_eq!(peer.pid, std::process::id() as i32);
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
    }
}
