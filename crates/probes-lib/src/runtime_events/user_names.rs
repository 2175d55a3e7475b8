//! [`UserNames`]: the names that a program has given to its own events, from the table in the file of runtime events.

use std::collections::BTreeMap;
use std::io;

use super::header::{NAME_LEN, USER_EVENTS};
use super::ring::RingBytes;

/// The names of user events that were read so far, by their numbers.
#[derive(Debug, Default)]
pub(super) struct UserNames {
    /// Where the table is; `None` if the runtime has no user events.
    at: Option<u64>,
    known: BTreeMap<u16, String>,
}

impl UserNames {
    /// Names that are read from a table at this offset of the file.
    pub(super) fn at(at: Option<u64>) -> UserNames {
        UserNames {
            at,
            known: BTreeMap::new(),
        }
    }

    /// Returns the name with this number; `None` if it has none so far.
    pub(super) fn get(&mut self, file: &impl RingBytes, id: u16) -> io::Result<Option<&str>> {
        if !self.known.contains_key(&id) {
            let Some(name) = self.read(file, id)? else {
                return Ok(None);
            };
            self.known.insert(id, name);
        }
        Ok(self.known.get(&id).map(String::as_str))
    }

    fn read(&self, file: &impl RingBytes, id: u16) -> io::Result<Option<String>> {
        let Some(at) = self.at.filter(|_| u64::from(id) < USER_EVENTS) else {
            return Ok(None);
        };
        let mut name = [0; NAME_LEN as usize];
        file.read(at + u64::from(id) * NAME_LEN, &mut name)?;
        Ok(text(&name))
    }

    /// Returns all names that there are; the runtime numbers them from 0 without a gap.
    pub(super) fn all(&self, file: &impl RingBytes) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        // They are not kept: the program may be writing the last one.
        for id in 0..USER_EVENTS as u16 {
            let Some(name) = self.read(file, id)? else {
                break;
            };
            names.push(name);
        }
        Ok(names)
    }
}

/// A name up to its first zero byte; `None` if it is empty.
fn text(name: &[u8]) -> Option<String> {
    let end = name.iter().position(|&byte| byte == 0);
    let name = &name[..end.unwrap_or(name.len())];
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of names.
    struct Table(Vec<u8>);

    impl RingBytes for Table {
        fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
            let start = at as usize;
            bytes.copy_from_slice(&self.0[start..start + bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn names_end_with_zero_or_their_room() {
        let mut table = vec![0; (USER_EVENTS * NAME_LEN) as usize];
        let len = NAME_LEN as usize;
        table[..4].copy_from_slice(b"a\xffb\0");
        table[len..2 * len].fill(b'x');
        table[3 * len] = b'c';
        let mut names = UserNames::at(Some(0));
        let table = Table(table);
        let all = names.all(&table).unwrap();
        assert_eq!(all, ["a\u{fffd}b".to_owned(), "x".repeat(len)]);
        assert_eq!(names.get(&table, 2).unwrap(), None);
        assert_eq!(names.get(&table, 3).unwrap(), Some("c"));
        assert_eq!(names.get(&table, USER_EVENTS as u16).unwrap(), None);
        assert_eq!(UserNames::at(None).get(&table, 0).unwrap(), None);
    }
}
