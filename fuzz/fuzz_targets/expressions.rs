//! Parses expressions, type-checks them for a point with arguments of all kinds, and evaluates them for a hit with
//! arbitrary arguments. The tests of the library check the corpus in the same way.

#![no_main]

use libfuzzer_sys::fuzz_target;
use probes_lib::{BadExpression, Expression, Hit, Keys, Parameter, ParameterKind, Scope};

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
    let has_place = |error: BadExpression, within: &str| {
        let place = error.place();
        assert!(place.start <= place.end && within.get(place).is_some());
        assert!(error.to_string().len() < 5000 && error.marked().len() < 1000);
    };
    match text.parse::<Expression>() {
        Ok(expression) => {
            let integer = expression.integer(&scope);
            let integer = integer.map(|it| it.value(&Words(input)));
            let answer = expression.filter(&scope).map(|it| it.answer(&Words(input)));
            let errors = [integer.err(), answer.err()];
            errors.into_iter().flatten().for_each(|it| has_place(it, expression.as_str()));
        }
        Err(error) => has_place(error, &text),
    }
    if let Ok(keys) = text.parse::<Keys>() {
        assert!(keys.expressions().all(|key| text.contains(key.as_str())));
    }
});
