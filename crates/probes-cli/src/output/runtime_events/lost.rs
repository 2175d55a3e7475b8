//! Words of runtime events that were overwritten before they were read, by domain.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::super::format::{Format, VERSION};
use crate::text::number_of;

/// How many words were lost in which domains.
#[derive(Clone, Debug, Default)]
pub(crate) struct LostWords(BTreeMap<u32, u64>);

/// How many words were lost in one domain.
#[derive(Debug, Serialize)]
pub(crate) struct LostOfDomain {
    pub(crate) domain: u32,
    pub(crate) words: u64,
}

/// What was lost in one domain, as a JSON line among those of events.
#[derive(Serialize)]
#[serde(tag = "type", rename = "runtime_events_lost")]
struct LostLine {
    version: u32,
    #[serde(flatten)]
    lost: LostOfDomain,
}

impl LostWords {
    pub(crate) fn add(&mut self, domain: u32, words: u64) {
        let sum = self.0.entry(domain).or_default();
        *sum = sum.saturating_add(words);
    }

    /// How many words were lost in each domain, in the order of the domains.
    pub(crate) fn each(&self) -> impl Iterator<Item = (u32, u64)> {
        self.0.iter().map(|(domain, words)| (*domain, *words))
    }

    /// What was lost since `before`.
    pub(crate) fn since(&self, before: &LostWords) -> LostWords {
        let of = |domain| before.0.get(domain).copied().unwrap_or(0);
        let lost = self.0.iter();
        let lost = lost.map(|(domain, words)| (*domain, words.saturating_sub(of(domain))));
        LostWords(lost.filter(|(_, words)| *words > 0).collect())
    }

    /// `12 of domain 0, 3 of domain 2`; `None` if nothing was lost.
    pub(crate) fn list(&self) -> Option<String> {
        let lost = self.each();
        let lost: Vec<String> = lost
            .map(|(domain, words)| format!("{words} of domain {domain}"))
            .collect();
        (!lost.is_empty()).then(|| lost.join(", "))
    }
}

/// What was lost, as answers have it: a value for each domain, in the order of the domains.
pub(crate) fn lost_of_domains(lost: &LostWords) -> Vec<LostOfDomain> {
    let lost = lost.each();
    lost.map(|(domain, words)| LostOfDomain { domain, words })
        .collect()
}

/// The lines below an answer in the table or the plain format; in the latter, each begins with `prefix`.
pub(in crate::output) fn lost_lines(lost: &[LostOfDomain], format: Format, prefix: &str) -> String {
    let mut text = String::new();
    for it in lost {
        let (domain, words) = (it.domain, it.words);
        // Writing to a string does not fail.
        let _ = match format {
            Format::Table => writeln!(
                text,
                "lost: {} of domain {domain}",
                number_of(words, "word")
            ),
            _ => writeln!(text, "{prefix}lost {words} domain {domain}"),
        };
    }
    text
}

/// The JSON line of a domain among those of events.
pub(super) fn view(domain: u32, words: u64) -> impl Serialize {
    LostLine {
        version: VERSION,
        lost: LostOfDomain { domain, words },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_listed_by_domain() {
        let mut lost = LostWords::default();
        assert_eq!(lost.list(), None);
        lost.add(4, 10);
        let before = lost.clone();
        lost.add(4, 2);
        lost.add(0, 1);
        assert_eq!(lost.list().unwrap(), "1 of domain 0, 12 of domain 4");
        assert_eq!(
            lost.since(&before).list().unwrap(),
            "1 of domain 0, 2 of domain 4"
        );
        assert_eq!(before.since(&lost).list(), None);
        let all = lost_of_domains(&lost);
        assert_eq!(
            lost_lines(&all, Format::Plain, "1.0 "),
            "1.0 lost 1 domain 0\n1.0 lost 12 domain 4\n"
        );
    }
}
