//! An exporter for Prometheus: `cargo run -p probes-lib --example exporter -- PID 127.0.0.1:9464` serves how often
//! the probes of a process are hit, and restores it on Ctrl-C. To leave one running, there is `ocaml-probes serve`.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use probes_lib::{Observation, Options, Selector, Target};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [pid, address] = &args[..] else {
        return Err("usage: exporter PID ADDRESS:PORT".into());
    };
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    signals.thread_block()?;
    let (listener, end) = (TcpListener::bind(address)?, SignalFd::new(&signals)?);
    serve(pid.parse()?, &listener, &end)
}

/// Observes a process, and answers clients until `end` is readable or the process exits.
pub(crate) fn serve(pid: i32, listener: &TcpListener, end: impl AsFd) -> Result<()> {
    let observation = Observation::new().count(Selector::All);
    let mut observer = Target::open(pid)?.observe(&observation, Options::default())?;
    loop {
        let fds = [listener.as_fd(), end.as_fd()];
        let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        poll(&mut fds, PollTimeout::NONE)?;
        if fds[1].any() == Some(true) {
            observer.remove()?;
            return Ok(());
        }
        let mut page = "# TYPE probe_hits_total counter\n".to_owned();
        for (name, hits) in observer.counts()?.probes() {
            // The three characters that a label's value cannot have are written `\\`, `\"` and `\n`.
            let name = name.replace('\\', r"\\").replace('"', "\\\"");
            let name = name.replace('\n', r"\n");
            writeln!(page, "probe_hits_total{{probe=\"{name}\"}} {hits}")?;
        }
        // A client that has gone, or is slow, gets no answer.
        let _ = listener.accept().and_then(|it| answer(it.0, &page));
    }
}

fn answer(mut client: TcpStream, page: &str) -> std::io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(1)))?;
    client.set_write_timeout(Some(Duration::from_secs(1)))?;
    let _request = client.read(&mut [0; 4096])?;
    let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n";
    client.write_all((head.to_owned() + page).as_bytes())
}
