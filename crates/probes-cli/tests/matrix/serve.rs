//! `serve -gc`, compared with what the program's own consumer of runtime events reads.

use nix::sys::signal::Signal;
use test_support::{eventually, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::events::own_lines;
use crate::gc::sums;
use crate::serving::Serving;

// promise: Serving: Number and sum of pauses and allocated bytes are those of the program's own events (2 programs in each chroot)
#[test]
fn scraped_pauses_equal_the_own_consumer() {
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        program.talker.ask("start", "started");
        let serving = Serving::start(&format!("-gc -pid {}", program.pid));
        program.talker.ask("work 3 10", "worked");
        let expected = sums(&own_lines(&mut program));
        let value = |name: &str| {
            let metrics = serving.scrape();
            let mut found = metrics.iter();
            let found = found.find(|(it, _)| it.starts_with(&format!("ocaml_probes_gc_{name}{{")));
            *found.unwrap().1
        };
        eventually("all events are read", || {
            (value("pause_seconds_count") == expected.pauses.0 as f64).then_some(())
        });
        let sum = value("pause_seconds_sum") * 1e9;
        assert_eq!(sum.round() as u64, expected.pauses.1);
        assert_eq!(
            value("minor_allocated_bytes_total"),
            expected.bytes.0 as f64
        );
        assert_eq!(value("promoted_bytes_total"), expected.bytes.1 as f64);
        assert_eq!(value("lost_words_total"), 0.0);
        program.end();
        serving.end(Signal::SIGTERM);
    }
}
