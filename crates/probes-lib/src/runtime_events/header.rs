//! The header of a file of runtime events: `struct runtime_events_metadata_header` of runtime/caml/runtime_events.h.
//! Any program may have written the file, so each number is checked before it is used.

/// The version of the format, in all versions of OCaml so far.
const VERSION: u64 = 1;

/// The most domains that a runtime can be asked for, with `d=` in OCAMLRUNPARAM.
const MAX_DOMAINS: u64 = 4096;

/// The length of a ring's header in bytes: head, tail, and padding.
pub(super) const RING_HEADER_LEN: u64 = 80;

/// The most words of a ring: `e=` in OCAMLRUNPARAM is their logarithm.
const MAX_RING_WORDS: u64 = 1 << 28;

/// How many names of user events a file has room for, and the length of each in bytes.
pub(super) const USER_EVENTS: u64 = 1 << 13;
pub(super) const NAME_LEN: u64 = 128;

/// The bytes of the header.
pub(super) const HEADER_LEN: usize = 64;

/// Where the parts of a file of runtime events are, as offsets from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) domains: u32,
    /// The words of one ring, a power of two.
    pub(super) ring_words: u64,
    pub(super) headers_at: u64,
    pub(super) data_at: u64,
    /// The names of user events; `None` if the runtime has no user events.
    pub(super) names_at: Option<u64>,
}

impl Header {
    /// Reads the header of a file of `file_len` bytes.
    ///
    /// # Errors
    ///
    /// What is wrong with it, as the end of a sentence.
    pub(super) fn parse(bytes: &[u8; HEADER_LEN], file_len: u64) -> Result<Header, String> {
        let mut words = bytes.chunks_exact(8).map(|word| {
            word.iter()
                .rev()
                .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
        });
        let mut next = || words.next().unwrap_or_default();
        let (version, domains, ring_header_len) = (next(), next(), next());
        let (ring_len, ring_words) = (next(), next());
        let (headers_at, data_at, names_at) = (next(), next(), next());
        if version != VERSION {
            return Err(format!(
                "its format is version {version}, and version {VERSION} is known"
            ));
        }
        if !(1..=MAX_DOMAINS).contains(&domains) {
            return Err(format!("it has {domains} rings"));
        }
        if ring_header_len != RING_HEADER_LEN {
            return Err(format!("the header of a ring has {ring_header_len} bytes"));
        }
        if !ring_words.is_power_of_two()
            || ring_words > MAX_RING_WORDS
            || ring_len != ring_words * 8
        {
            return Err(format!("a ring has {ring_words} words in {ring_len} bytes"));
        }
        let (headers_len, data_len) = (domains * RING_HEADER_LEN, domains * ring_len);
        let names_len = USER_EVENTS * NAME_LEN;
        let mut end = HEADER_LEN as u64;
        let names_at = (names_at != 0).then_some(names_at);
        let parts = [
            ("headers of rings", headers_at, headers_len),
            ("rings", data_at, data_len),
        ];
        let names = names_at.map(|at| ("names", at, names_len));
        for (what, at, len) in parts.into_iter().chain(names) {
            let is_within = at.checked_add(len).is_some_and(|end| end <= file_len);
            if at < end || at % 8 != 0 || !is_within {
                return Err(format!("its {what} are at {at:#x}, in {file_len} bytes"));
            }
            end = at + len;
        }
        Ok(Header {
            domains: domains as u32,
            ring_words,
            headers_at,
            data_at,
            names_at,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The header of a file with these rings, as the runtime writes it, and the length of the file.
    pub(in crate::runtime_events) fn header(domains: u64, ring_words: u64) -> ([u64; 8], u64) {
        let data_at = 64 + domains * RING_HEADER_LEN;
        let names_at = data_at + domains * ring_words * 8;
        let words = [
            1,
            domains,
            80,
            ring_words * 8,
            ring_words,
            64,
            data_at,
            names_at,
        ];
        (words, names_at + USER_EVENTS * NAME_LEN)
    }

    fn parse(words: [u64; 8], file_len: u64) -> Result<Header, String> {
        let bytes = words.map(u64::to_le_bytes).concat();
        Header::parse(bytes.as_slice().try_into().unwrap(), file_len)
    }

    #[test]
    fn header_of_the_runtime_is_read() {
        let (mut words, len) = header(128, 1 << 16);
        let read = parse(words, len).unwrap();
        assert_eq!((read.domains, read.ring_words), (128, 1 << 16));
        assert_eq!(read.names_at, Some(words[7]));
        words[7] = 0;
        assert_eq!(parse(words, len).unwrap().names_at, None);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let (words, len) = header(128, 1 << 16);
        for (index, values, why) in [
            (0, [0, 2, u64::MAX], "its format is version"),
            (1, [0, 4097, u64::MAX], "it has "),
            (2, [0, 16, u64::MAX], "the header of a ring has"),
            (3, [0, 8, u64::MAX], "a ring has 65536 words in"),
            (4, [0, 3, 1 << 63], "a ring has"),
        ] {
            for value in values {
                let mut words = words;
                words[index] = value;
                let error = parse(words, len).unwrap_err();
                assert!(error.starts_with(why), "{error}");
            }
        }
        for index in 5..8 {
            for value in [1, 8, words[index] + 4, len - 8, len, u64::MAX, u64::MAX - 7] {
                let mut words = words;
                words[index] = value;
                assert!(parse(words, len).is_err(), "{index} {value:#x}");
            }
        }
        assert!(
            parse(words, len - 1)
                .unwrap_err()
                .starts_with("its names are at")
        );
        assert!(
            parse(words, 64)
                .unwrap_err()
                .starts_with("its headers of rings are at")
        );
    }
}
