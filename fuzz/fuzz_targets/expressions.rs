//! Reads expressions, and asks them of a point with arguments of all kinds and of a hit with arbitrary ones. The tests of the library
//! check the corpus in the same way.

#![no_main]

use libfuzzer_sys::fuzz_target;
use probes_lib::{Expression, Hit, Parameter, ParameterKind, Scope};

struct Words<'w>(&'w [u8]);

impl Hit for Words<'_> {
    fn argument(&self, index: usize) -> Option<u64> {
        let bytes = self.0.get(8 * index..8 * index + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    }

    fn word_at(&self, address: u64) -> Option<u64> {
        self.argument(address as usize % 64 / 8)
    }
}

fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    let parameter = |name: Option<&str>, kind| Parameter {
        name: name.map(str::to_owned),
        kind,
    };
    let scope = Scope::of(
        "probe p",
        "p",
        vec![
            parameter(Some("request"), ParameterKind::Value),
            parameter(None, ParameterKind::Word),
            parameter(None, ParameterKind::Float),
            parameter(None, ParameterKind::Number { bits: 32, signed: true }),
            parameter(None, ParameterKind::Unread),
        ],
    );
    match text.parse::<Expression>().and_then(|it| it.filter(&scope)) {
        Ok(filter) => {
            filter.answer(&Words(input));
        }
        Err(error) => {
            let place = error.place();
            assert!(place.start <= place.end && text.get(place).is_some());
            assert!(error.to_string().len() < 5000 && error.marked().len() < 1000);
        }
    }
});
