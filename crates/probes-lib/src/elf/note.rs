//! Parses the notes of a `.note.stapsdt` section. Any bytes give notes or an error, and never a
//! panic.
//!
//! ```text
//! u32 namesz = 8   u32 descsz   u32 type = 3   "stapsdt\0"
//! desc:  u64 pc   u64 base   u64 semaphore   provider\0   name\0   args\0
//! entries are padded to 4 bytes
//! ```
//!
//! Source: <https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation>.

use crate::error::{MalformedNote, NoteDefect};

const HEADER_LEN: usize = 12;
const ADDRESSES_LEN: usize = 24;
const OWNER: &[u8] = b"stapsdt\0";
const TYPE: u32 = 3;

/// One note of any provider. Addresses are as stored: link-time, not yet corrected for prelinking.
///
/// ```
/// let mut section = b"\x08\0\0\0\x2c\0\0\0\x03\0\0\0stapsdt\0".to_vec();
/// for address in [0x561ee_u64, 0, 0x8a010] {
///     section.extend(address.to_le_bytes());
/// }
/// section.extend(b"ocaml_2\0tick\x008@%rax\0");
/// let note = probes_lib::notes(&section).next().unwrap()?;
/// assert_eq!((note.provider, note.name), (&b"ocaml_2"[..], &b"tick"[..]));
/// assert_eq!((note.pc, note.semaphore, note.arguments), (0x561ee, 0x8a010, &b"8@%rax"[..]));
/// # Ok::<(), probes_lib::MalformedNote>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note<'a> {
    /// Index of the note in its section, from 0. Notes of other providers, owners and types count.
    pub index: usize,
    /// Offset of the note's header from the start of its section, in bytes.
    pub offset: usize,
    /// Address of the site; 0 means that there is none.
    pub pc: u64,
    /// Address of `.stapsdt.base` when the file was linked.
    pub base: u64,
    /// Address of the SystemTap semaphore; 0 means that there is none.
    pub semaphore: u64,
    /// The provider, without its NUL.
    pub provider: &'a [u8],
    /// The probe's name, without its NUL.
    pub name: &'a [u8],
    /// The argument string, without its NUL.
    pub arguments: &'a [u8],
}

/// Iterates over the notes of a section; ends after the first malformed one.
///
/// [`Note`] has an example.
#[derive(Clone, Debug)]
pub struct Notes<'a> {
    section: &'a [u8],
    /// The offset of `section` in the whole section, of which it may be only a part.
    part_offset: usize,
    offset: usize,
    index: usize,
}

/// Iterates over the notes of a `.note.stapsdt` section; notes of another owner or type are skipped.
///
/// ```no_run
/// let section = std::fs::read("section.bin")?;
/// for note in probes_lib::notes(&section) {
///     println!("{:#x}", note?.pc);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn notes(section: &[u8]) -> Notes<'_> {
    notes_from(section, Position::default())
}

/// Iterates over the notes of a part of a section, which begins at `position`.
fn notes_from(section: &[u8], position: Position) -> Notes<'_> {
    Notes {
        section,
        part_offset: position.offset,
        offset: 0,
        index: position.index,
    }
}

/// Reads the notes of a section of `len` bytes part by part and calls `visit` with each: for a large section,
/// that takes less time and memory than reading it at once. `read` fills a buffer from an offset.
pub(crate) fn each_note<E>(
    len: usize,
    mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    mut visit: impl FnMut(Result<Note<'_>, MalformedNote>) -> Result<(), E>,
) -> Result<(), E> {
    let mut part = Vec::new();
    let mut part_len = PART;
    let mut position = Position::default();
    while position.offset < len {
        let rest = len - position.offset;
        part.resize(part_len.min(rest), 0);
        read(position.offset, &mut part)?;
        let mut notes = notes_from(&part, position);
        let next = loop {
            let before = notes.position();
            match notes.next() {
                Some(Err(error)) if part.len() < rest && error.defect.is_cut() => break before,
                Some(note) => visit(note)?,
                None => break notes.position(),
            }
        };
        // The next note is larger than the part.
        let stuck = next.offset == position.offset;
        part_len = if stuck { 2 * part.len() } else { PART };
        position = next;
    }
    Ok(())
}

/// Length of the parts in bytes: large enough that the cost of the system calls does not matter.
const PART: usize = 32 << 10;

/// How far in a section notes have been read.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    /// In bytes.
    offset: usize,
    /// In notes.
    index: usize,
}

impl<'a> Iterator for Notes<'a> {
    type Item = Result<Note<'a>, MalformedNote>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.offset < self.section.len() {
            let (offset, index) = (self.offset, self.index);
            self.index += 1;
            match self.read(offset, index) {
                Ok(Some(note)) => return Some(Ok(note)),
                Ok(None) => {}
                Err(defect) => {
                    self.offset = self.section.len();
                    return Some(Err(MalformedNote {
                        index,
                        offset: self.part_offset + offset,
                        defect,
                    }));
                }
            }
        }
        None
    }
}

impl<'a> Notes<'a> {
    fn position(&self) -> Position {
        Position {
            offset: self.part_offset + self.offset,
            index: self.index,
        }
    }

    /// Reads the note at `start` and advances; returns `None` for a note that is not SystemTap's.
    fn read(&mut self, start: usize, index: usize) -> Result<Option<Note<'a>>, NoteDefect> {
        let note = RawNote::read(&self.section[start..])?;
        self.offset = self.section.len().min(start + note.len);
        if (note.kind, note.owner) != (TYPE, OWNER) {
            return Ok(None);
        }
        let Some((addresses, strings)) = note.description.split_at_checked(ADDRESSES_LEN) else {
            return Err(NoteDefect::ShortDescription(note.description.len() as u32));
        };
        let (provider, strings) = split_string(strings, "provider")?;
        let (name, strings) = split_string(strings, "name")?;
        let (arguments, _) = split_string(strings, "argument string")?;
        Ok(Some(Note {
            index,
            offset: self.part_offset + start,
            pc: long(addresses, 0),
            base: long(addresses, 8),
            semaphore: long(addresses, 16),
            provider,
            name,
            arguments,
        }))
    }
}

/// A note of any owner and type.
pub(crate) struct RawNote<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) kind: u32,
    pub(crate) description: &'a [u8],
    /// Of the whole note with its padding, in bytes. The padding of the last note of a section may be missing.
    len: usize,
}

/// Iterates over all notes of a section, of any owner and type, up to the first malformed one.
pub(crate) fn raw_notes(section: &[u8]) -> impl Iterator<Item = RawNote<'_>> {
    let mut rest = section;
    std::iter::from_fn(move || {
        let note = RawNote::read(rest).ok()?;
        rest = rest.get(note.len..).unwrap_or_default();
        Some(note)
    })
}

impl<'a> RawNote<'a> {
    /// Reads the note at the start of `bytes`.
    fn read(bytes: &'a [u8]) -> Result<RawNote<'a>, NoteDefect> {
        let Some((header, body)) = bytes.split_at_checked(HEADER_LEN) else {
            return Err(NoteDefect::HeaderCut { left: bytes.len() });
        };
        let (namesz, descsz, kind) = (word(header, 0), word(header, 4), word(header, 8));
        let needed = padded(namesz) + u64::from(descsz);
        if needed > body.len() as u64 {
            return Err(NoteDefect::BodyCut {
                needed,
                left: body.len(),
            });
        }
        // Both fit into `body`, so they fit into usize.
        let owner_len = padded(namesz) as usize;
        Ok(RawNote {
            owner: &body[..namesz as usize],
            kind,
            description: &body[owner_len..needed as usize],
            len: HEADER_LEN + owner_len + padded(descsz) as usize,
        })
    }
}

fn padded(size: u32) -> u64 {
    u64::from(size).next_multiple_of(4)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | (u64::from(word(bytes, at + 4)) << 32)
}

fn split_string<'a>(
    bytes: &'a [u8],
    what: &'static str,
) -> Result<(&'a [u8], &'a [u8]), NoteDefect> {
    let end = memchr::memchr(0, bytes).ok_or(NoteDefect::Unterminated(what))?;
    Ok((&bytes[..end], &bytes[end + 1..]))
}

#[cfg(test)]
mod tests;
