//! The other ends of the sockets of a process, by the tables of its network namespace (proc_pid_net(5)).

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use nix::fcntl::OFlag;

use super::Process;

/// The tables of sockets with addresses of the internet.
const TABLES: [&str; 4] = ["net/tcp", "net/tcp6", "net/udp", "net/udp6"];

/// How many bytes of a table are read at most: some hundred thousand sockets.
const MAX_TABLE: u64 = 64 << 20;

/// Returns the inode of a socket, from the name that /proc has for its descriptor: `socket:[1234]`.
pub(crate) fn inode(path: &Path) -> Option<u64> {
    let name = path.to_str()?.strip_prefix("socket:[")?;
    name.strip_suffix(']')?.parse().ok()
}

/// Returns the addresses of the other ends of sockets that are connected, or just being connected, by the inodes of the
/// sockets. Those of Unix sockets, and of sockets that the process has from another network namespace, are not known.
pub(crate) fn peers(process: &Process, inodes: HashSet<u64>) -> HashMap<u64, SocketAddr> {
    let (mut peers, mut unseen) = (HashMap::new(), inodes);
    for table in TABLES {
        if unseen.is_empty() {
            break;
        }
        let opened = process.with_thread_directory(|directory| {
            let path = format!("{directory}/{table}");
            process.open_file(&path, OFlag::O_RDONLY).map(Some)
        });
        let Ok(file) = opened else {
            continue;
        };
        let lines = BufReader::new(file.take(MAX_TABLE)).lines();
        for line in lines.map_while(Result::ok) {
            if let Some((inode, peer)) = socket(&line).filter(|(inode, _)| unseen.remove(inode)) {
                peers.extend(peer.map(|peer| (inode, peer)));
            }
            if unseen.is_empty() {
                break;
            }
        }
    }
    peers
}

/// Returns the inode of a socket, and the address of its other end if it has one, from its line of a table.
fn socket(line: &str) -> Option<(u64, Option<SocketAddr>)> {
    let mut fields = line.split_ascii_whitespace().skip(2);
    let (address, port) = fields.next()?.split_once(':')?;
    let inode = fields.nth(6)?.parse().ok()?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let peer = SocketAddr::new(ip_address(address)?, port);
    Some((inode, (port > 0).then_some(peer)))
}

/// Parses an address: words of 32 bits in hexadecimal, each of four bytes in the order of the network.
fn ip_address(digits: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let word = u32::from_str_radix(digits.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match digits.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?].concat();
            let bytes: [u8; 16] = words.try_into().ok()?;
            Some(Ipv6Addr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The inode, and the peer or an empty string.
    fn found(line: &str) -> Option<(u64, String)> {
        let (inode, peer) = socket(line)?;
        Some((
            inode,
            peer.map_or_else(String::new, |peer| peer.to_string()),
        ))
    }

    #[test]
    fn peers_are_those_of_the_lines() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode";
        assert_eq!(found(head), None);
        let of = |peer: &str, state: &str| {
            let (queues, timer) = ("00000000:00000000", "00:00000000 00000000");
            let rest = format!("{queues} {timer}  1000        0 77123 1 0 20 4 30 10 -1");
            found(&format!("   1: 0100007F:A0B2 {peer} {state} {rest}"))
        };
        let connected_to = |peer: &str| Some((77123, peer.to_owned()));
        assert_eq!(of("0504030A:1538", "01"), connected_to("10.3.4.5:5432"));
        let local = "00000000000000000000000001000000:D431";
        assert_eq!(of(local, "01"), connected_to("[::1]:54321"));
        let mapped = "0000000000000000FFFF00000100007F:0051";
        assert_eq!(of(mapped, "01"), connected_to("127.0.0.1:81"));
        // It listens.
        assert_eq!(of("00000000:0000", "0A"), connected_to(""));
    }

    #[test]
    fn damaged_lines_have_no_peer() {
        for line in [
            "",
            "0: a",
            "0: a b",
            "0: a 0100007F:0050 1 2 3 4 5",
            "0: a 0100007F:1ffff 1 2 3 4 5 6 7",
            "0: a 0100007é:0050 1 2 3 4 5 6 7",
            "0: a 0100007F0:0050 1 2 3 4 5 6 7",
        ] {
            assert_eq!(found(line), None, "{line}");
        }
    }

    #[test]
    fn inodes_are_those_of_sockets() {
        assert_eq!(inode(Path::new("socket:[4711]")), Some(4711));
        for other in [
            "socket:[x]",
            "pipe:[4711]",
            "/tmp/socket:[4711]",
            "socket:[4711",
        ] {
            assert_eq!(inode(Path::new(other)), None, "{other}");
        }
    }
}
