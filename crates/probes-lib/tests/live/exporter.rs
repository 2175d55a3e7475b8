//! The exporter of `examples/`, on live processes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;

use probes_lib::Target;
use test_support::{DEADLINE, Talker, fixture_forms};

#[path = "../../examples/exporter.rs"]
#[allow(dead_code, reason = "its main function")]
mod example;

#[test]
fn example_exports_hits_and_restores_the_process() {
    for file in fixture_forms("gen_ocaml") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (end, ended) = UnixStream::pair().unwrap();
        let serve = move || {
            let served = example::serve(pid, &listener, &ended);
            served.map_err(|error| error.to_string())
        };
        let serving = thread::spawn(serve);
        let scrape = || {
            let mut client = TcpStream::connect(address).unwrap();
            client.set_read_timeout(Some(DEADLINE)).unwrap();
            client.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.0 200 OK"), "{head}");
            body.to_owned()
        };
        let page = |shared: u32, only_alpha: u32| {
            format!(
                "# TYPE probe_hits_total counter\nprobe_hits_total{{probe=\"only_alpha\"}} {only_alpha}\n\
                 probe_hits_total{{probe=\"shared\"}} {shared}\n"
            )
        };
        assert_eq!(scrape(), page(0, 0));
        target.hits();
        // One that asks for nothing.
        drop(TcpStream::connect(address).unwrap());
        assert_eq!(scrape(), page(3, 1));
        drop(end);
        serving.join().unwrap().unwrap();
        let states = Target::open(pid).unwrap().states().unwrap();
        assert_eq!(states.observed_sites(), 0);
    }
}
