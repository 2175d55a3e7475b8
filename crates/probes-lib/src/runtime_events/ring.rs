//! One ring of a file of runtime events: its items in order, while the runtime goes on to write, and how many words
//! it has overwritten before they were read.
//!
//! ```text
//!    head                 position            tail
//!     │ overwritten next   │ not read so far   │
//! ────▼────────────────────▼───────────────────▼────▶ words since the beginning; in the ring, modulo its length
//! ```
//!
//! The runtime advances the head, from item to item, before it overwrites what was there, and the tail after it has
//! written an item. So whatever is copied between reading the tail and reading the head is valid from that head on.

use std::io;

use super::RingEntry;
use super::header::{Header, RING_HEADER_LEN};
use super::item::{self, Item};
use super::names::Names;
use crate::numbers::words;

/// The bytes of a file of runtime events, which change while they are read.
pub(super) trait RingBytes {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Why a ring cannot be read.
#[derive(Debug)]
pub(super) enum RingError {
    Read(io::Error),
    /// What is wrong with it, as what follows a colon.
    Malformed(String),
}

impl From<io::Error> for RingError {
    fn from(error: io::Error) -> RingError {
        RingError::Read(error)
    }
}

/// How many words are copied at once: more than the longest item has.
const MAX_COPIED: u64 = 1 << 16;

/// Reads one ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingReader {
    pub(super) domain: u32,
    /// How many words of the ring were read or lost so far.
    pub(super) position: u64,
}

/// Where words are copied to, which is kept between reads.
#[derive(Debug, Default)]
pub(super) struct CopyBuffer {
    bytes: Vec<u8>,
    words: Vec<u64>,
}

impl RingReader {
    /// Calls `visit` with each event up to `tail`, which the caller has read, and with how much was lost
    /// before an event.
    pub(super) fn read(
        &mut self,
        ring: &impl RingBytes,
        header: &Header,
        names: &Names,
        tail: u64,
        copied: &mut CopyBuffer,
        mut visit: impl FnMut(RingEntry<'_>),
    ) -> Result<(), RingError> {
        let domain = self.domain;
        let wrong = |why: &str| RingError::Malformed(format!("the ring of domain {domain} {why}"));
        if tail < self.position {
            return Err(wrong("goes back"));
        }
        if tail == self.position {
            return Ok(());
        }
        if tail - self.position > header.ring_words {
            self.skip_to(self.head(ring, header)?, &mut visit);
        }
        if tail.saturating_sub(self.position) > header.ring_words {
            return Err(wrong("holds more than it has room for"));
        }
        while self.position < tail {
            let start = self.position;
            let end = tail.min(start.saturating_add(MAX_COPIED));
            copied.read(ring, header, domain, start..end)?;
            self.skip_to(self.head(ring, header)?, &mut visit);
            let valid = usize::try_from(self.position - start).ok();
            let mut rest = valid
                .and_then(|at| copied.words.get(at..))
                .unwrap_or_default();
            while let Some(&first) = rest.first() {
                let len = item::item_len(first);
                if len == 0 {
                    return Err(wrong("has an event without words"));
                }
                let Some((words, others)) = rest.split_at_checked(len) else {
                    if end < tail {
                        // The next part begins with it.
                        break;
                    }
                    return Err(wrong("has an event beyond its end"));
                };
                let item = item::parse(words, names);
                let item = item.map_err(|why| wrong(&format!("is damaged: {why}")))?;
                if let Item::Event(time, event) = item {
                    visit(RingEntry::Event {
                        domain,
                        time,
                        kind: event,
                    });
                }
                self.position += len as u64;
                rest = others;
            }
        }
        Ok(())
    }

    /// Goes on from `head`, if that is ahead; reports how many words are skipped.
    fn skip_to(&mut self, head: u64, visit: &mut impl FnMut(RingEntry<'_>)) {
        let skipped = head.saturating_sub(self.position);
        if skipped > 0 {
            self.position += skipped;
            visit(RingEntry::Lost {
                domain: self.domain,
                words: skipped,
            });
        }
    }

    fn head(&self, ring: &impl RingBytes, header: &Header) -> io::Result<u64> {
        let mut head = [0; 8];
        ring.read(
            header.headers_at + u64::from(self.domain) * RING_HEADER_LEN,
            &mut head,
        )?;
        Ok(u64::from_le_bytes(head))
    }
}

impl CopyBuffer {
    /// Copies words of a ring, by their numbers since its beginning.
    fn read(
        &mut self,
        ring: &impl RingBytes,
        header: &Header,
        domain: u32,
        range: std::ops::Range<u64>,
    ) -> io::Result<()> {
        let ring_at = header.data_at + u64::from(domain) * header.ring_words * 8;
        let first = range.start & (header.ring_words - 1);
        let len = range.end - range.start;
        // The rest is at the beginning of the ring.
        let until_end = len.min(header.ring_words - first);
        self.bytes.resize(len as usize * 8, 0);
        let (before, after) = self.bytes.split_at_mut(until_end as usize * 8);
        ring.read(ring_at + first * 8, before)?;
        if !after.is_empty() {
            ring.read(ring_at, after)?;
        }
        self.words.clear();
        self.words.extend(words(&self.bytes));
        Ok(())
    }
}

/// Returns the tails of all rings.
pub(super) fn tails(ring: &impl RingBytes, header: &Header) -> io::Result<Vec<u64>> {
    let positions = positions(ring, header)?;
    Ok(positions.into_iter().map(|(_, tail)| tail).collect())
}

/// Returns the tails of all rings.
///
/// # Errors
///
/// If a ring says that it has much more than it has room for.
pub(super) fn plausible_tails(
    ring: &impl RingBytes,
    header: &Header,
) -> Result<Vec<u64>, RingError> {
    let positions = positions(ring, header)?;
    // The two are not read at the same moment.
    let most = header.ring_words.saturating_mul(2);
    let is_wrong = |&(head, tail): &(u64, u64)| tail < head || tail - head > most;
    if let Some(domain) = positions.iter().position(is_wrong) {
        let why = format!("the ring of domain {domain} holds more than it has room for");
        return Err(RingError::Malformed(why));
    }
    Ok(positions.into_iter().map(|(_, tail)| tail).collect())
}

/// Returns the heads and tails of all rings.
fn positions(ring: &impl RingBytes, header: &Header) -> io::Result<Vec<(u64, u64)>> {
    let mut headers = vec![0; header.domains as usize * RING_HEADER_LEN as usize];
    ring.read(header.headers_at, &mut headers)?;
    let positions = headers.chunks_exact(RING_HEADER_LEN as usize);
    let positions = positions.filter_map(|header| {
        let (head, rest) = header.split_first_chunk()?;
        let tail = rest.first_chunk()?;
        Some((u64::from_le_bytes(*head), u64::from_le_bytes(*tail)))
    });
    Ok(positions.collect())
}

#[cfg(test)]
mod tests;
