//! How many arguments functions of OCaml have: from the closures in the static data of a program.
//!
//! ```text
//! closure   +0 code    with one argument: the function
//!           +8 info    how many arguments, in the upper byte (from OCaml 4.12 on) or as an int
//! closure   +0 code    with several: caml_curryN, or caml_tuplifyN if they are a tuple
//!           +8 info    N, or -N
//!          +16 code    the function                                (emit_closure, asmcomp/cmm_helpers.ml)
//! ```
//!
//! A function that uses variables of an outer one has no static closure, and is not found here.

use std::collections::HashMap;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::functions::FunctionTable;
use crate::elf::{ElfFile, Segment};
use crate::memory::ReadMemory;
use crate::numbers::{u64_at, words};

/// How much is read at once, in bytes.
const CHUNK: usize = 1 << 20;

const WORD: usize = 8;

/// No function has more arguments than this.
const MAX_ARITY: i64 = 126;

/// The addresses of `caml_curryN` and `caml_tuplifyN`, the code of closures with several arguments, each with its
/// arity: negative for a tuple.
#[derive(Default)]
pub(crate) struct Currying(HashMap<LiveAddr, i64>);

impl Currying {
    /// Adds the functions of this kind that an object defines.
    pub(crate) fn add(&mut self, table: &FunctionTable, bias: LoadBias) {
        for function in table.functions() {
            let names = function.names().map(|name| arity_in(&name.text));
            if let Some(arity) = names.flatten().next() {
                self.0.insert(bias.live(function.address()), arity);
            }
        }
    }

    /// Returns the number of arguments of functions, by address, as far as the data of an object contain
    /// it.
    pub(crate) fn arities(
        &self,
        elf: &ElfFile,
        bias: LoadBias,
        memory: &impl ReadMemory,
    ) -> HashMap<LiveAddr, usize> {
        let mut arities = HashMap::new();
        // A program that has not run yet is not relocated.
        let relocations = elf.relocations().filter(|it| it.is_relative);
        let mut relocated: HashMap<LiveAddr, LiveAddr> = relocations
            .map(|it| (bias.live(it.at), bias.live(it.addend)))
            .collect();
        let data = || elf.loaded().filter(|segment| segment.writable);
        for segment in data() {
            relocated.extend(packed_relocations(elf, &segment, bias));
        }
        for segment in data() {
            let start = bias.live(segment.start);
            // The closures of data that cannot be read are not found.
            let _ = self.read(start, segment.file_len, memory, &relocated, &mut arities);
        }
        arities
    }

    fn read(
        &self,
        start: LiveAddr,
        len: u64,
        memory: &impl ReadMemory,
        relocated: &HashMap<LiveAddr, LiveAddr>,
        arities: &mut HashMap<LiveAddr, usize>,
    ) -> std::io::Result<()> {
        let first = start.0.checked_next_multiple_of(WORD as u64);
        let mut at = LiveAddr(first.unwrap_or(u64::MAX));
        let end = start.0.saturating_add(len);
        let mut bytes = vec![0; CHUNK];
        while at.0 < end {
            let chunk_len = (end - at.0).min(CHUNK as u64) as usize / WORD * WORD;
            let bytes = &mut bytes[..chunk_len];
            if chunk_len < 2 * WORD {
                break;
            }
            memory.read(at, bytes)?;
            let addresses = (at.0..).step_by(WORD).map(LiveAddr);
            let words = addresses.zip(words(bytes));
            let words: Vec<u64> = words
                .map(|(at, word)| relocated.get(&at).map_or(word, |to| to.0))
                .collect();
            self.find(&words, arities);
            if chunk_len < CHUNK {
                break;
            }
            // A closure may continue in the next chunk.
            at = at.plus((CHUNK - 2 * WORD) as u64);
        }
        Ok(())
    }

    /// Finds closures among words of the data.
    fn find(&self, words: &[u64], arities: &mut HashMap<LiveAddr, usize>) {
        for (index, pair) in words.windows(2).enumerate() {
            let (code, info) = (LiveAddr(pair[0]), pair[1]);
            let Some(arity) = arity(info) else {
                continue;
            };
            if arity == 1 {
                arities.insert(code, 1);
            } else if self.0.get(&code) == Some(&arity) {
                let function = words.get(index + 2).map(|it| LiveAddr(*it));
                let arity = arity.unsigned_abs() as usize;
                arities.extend(function.map(|function| (function, arity)));
            }
        }
    }
}

/// Returns the words of a segment that packed relocations refer to, with the load bias added, as the loader does.
fn packed_relocations(
    elf: &ElfFile,
    segment: &Segment,
    bias: LoadBias,
) -> impl Iterator<Item = (LiveAddr, LiveAddr)> {
    let (from, len) = (segment.start.0, segment.file_len);
    let places = elf.packed_relocations();
    let places = places.filter(move |at| at.0.checked_sub(from).is_some_and(|at| at < len));
    // A hostile file can name the same word many times: no more places than the segment has words.
    let places = places.take(len as usize / WORD);
    let mut places = places.peekable();
    let bytes = places.peek().and_then(|_| elf.read_segment(segment).ok());
    relocated(places, segment.start, bytes.unwrap_or_default(), bias)
}

/// Returns the words at `places`, in bytes that begin at `start` in the file's address space, with the load bias added.
fn relocated(
    places: impl Iterator<Item = FileAddr>,
    start: FileAddr,
    bytes: Vec<u8>,
    bias: LoadBias,
) -> impl Iterator<Item = (LiveAddr, LiveAddr)> {
    places.filter_map(move |at| {
        let word = u64_at(&bytes, at.0.checked_sub(start.0)? as usize)?;
        Some((bias.live(at), bias.live(FileAddr(word))))
    })
}

/// Decodes the arity in the word after a code address: negative if the arguments are a tuple.
fn arity(info: u64) -> Option<i64> {
    let high = info as i64 >> 56;
    let arity = if high == 0 || high == -1 && info as i64 >> 1 >= -MAX_ARITY {
        info as i64 >> 1
    } else {
        high
    };
    let is_possible = arity == 1 || (2..=MAX_ARITY).contains(&arity.abs());
    (info & 1 == 1 && is_possible).then_some(arity)
}

/// Returns the arity in the name of a function such as `caml_curry3`.
fn arity_in(name: &str) -> Option<i64> {
    let (number, sign) = match name.strip_prefix("caml_tuplify") {
        Some(number) => (number, -1),
        None => (name.strip_prefix("caml_curry")?, 1),
    };
    Some(sign * number.parse::<u8>().ok().map(i64::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CURRY_3: u64 = 0x1000;
    const TUPLIFY_2: u64 = 0x1100;
    const FUNCTION: u64 = 0x2000;

    fn found(words: &[u64]) -> Option<usize> {
        let currying = Currying(HashMap::from([
            (LiveAddr(CURRY_3), 3),
            (LiveAddr(TUPLIFY_2), -2),
        ]));
        let mut arities = HashMap::new();
        currying.find(words, &mut arities);
        arities.get(&LiveAddr(FUNCTION)).copied()
    }

    #[test]
    fn closures_give_the_arity_of_functions() {
        // From OCaml 4.12 on: the arity, and where the variables begin (Closinfo_val of caml/mlvalues.h).
        let info = |arity: i64| (arity << 56) as u64 | 3 << 1 | 1;
        // Before OCaml 4.12: the arity as an OCaml int.
        let int = |arity: i64| (arity << 1) as u64 | 1;
        for info in [info, int] {
            assert_eq!(found(&[0, FUNCTION, info(1), 0]), Some(1));
            assert_eq!(found(&[0, CURRY_3, info(3), FUNCTION]), Some(3));
            assert_eq!(found(&[0, TUPLIFY_2, info(-2), FUNCTION]), Some(2));
            // The arity is not that of `caml_curry3`; the code is no `caml_curryN`.
            assert_eq!(found(&[0, CURRY_3, info(2), FUNCTION]), None);
            assert_eq!(found(&[0, FUNCTION, info(3), FUNCTION]), None);
        }
        assert_eq!(found(&[FUNCTION, 0x4000, 0, FUNCTION]), None);
        assert_eq!(found(&[FUNCTION, u64::MAX, 1]), None);
    }

    #[test]
    fn packed_relocations_add_the_load_bias() {
        let bytes = [0_u64, 0x2000, 7].map(u64::to_le_bytes).concat();
        let places = [0x1008, 0xff8, 0x1010, 0x1018].map(FileAddr);
        let found = relocated(
            places.into_iter(),
            FileAddr(0x1000),
            bytes,
            LoadBias(0x50_0000),
        );
        let expected = [(0x50_1008, 0x50_2000), (0x50_1010, 0x50_0007)];
        let expected = expected.map(|(at, word)| (LiveAddr(at), LiveAddr(word)));
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn arity_is_in_the_names_of_currying_functions() {
        assert_eq!(arity_in("caml_curry3"), Some(3));
        assert_eq!(arity_in("caml_tuplify2"), Some(-2));
        for name in [
            "caml_curry3_1",
            "caml_curry3_1_app",
            "caml_curry",
            "caml_apply2",
        ] {
            assert_eq!(arity_in(name), None, "{name}");
        }
    }
}
