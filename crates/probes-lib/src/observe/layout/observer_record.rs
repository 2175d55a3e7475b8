//! [`ObserverRecord`]: the process that has installed an observation, as recorded in the header of
//! each of its arenas, or that is taking it over. Pure functions only: no system calls.

/// The length of a record in bytes.
pub(crate) const OBSERVER_RECORD_LEN: usize = 176;

/// The longest command that a record has room for, in bytes.
const COMMAND_LEN: usize = OBSERVER_RECORD_LEN - COMMAND_AT;

/// Where the fields begin, in bytes.
const PID_AT: usize = 0;
const NAMESPACE_AT: usize = 8;
const PROC_DEVICE_AT: usize = 16;
const BEGUN_AT: usize = 24;
const LOCK_AT: usize = 32;
const COMMAND_AT: usize = 40;

/// The process that has installed an observation, or is taking it over; by default, none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObserverRecord {
    /// Its pid in its own pid namespace.
    pub(crate) pid: i32,
    /// The inode of that namespace.
    pub(crate) namespace: u64,
    /// The device of the /proc in which it has locked a file of the observed process.
    pub(crate) proc_device: u64,
    /// When it began to observe, or to take over, in nanoseconds since boot.
    pub(crate) begun: u64,
    /// The offset of the byte that it has locked in that file: a random number, different for each
    /// observation.
    pub(crate) lock: u64,
    /// Its command line, cut off if it is too long.
    pub(crate) command: String,
}

impl ObserverRecord {
    pub(crate) fn to_bytes(&self) -> [u8; OBSERVER_RECORD_LEN] {
        let mut bytes = [0; OBSERVER_RECORD_LEN];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(PID_AT, &self.pid.to_le_bytes());
        put(NAMESPACE_AT, &self.namespace.to_le_bytes());
        put(PROC_DEVICE_AT, &self.proc_device.to_le_bytes());
        put(BEGUN_AT, &self.begun.to_le_bytes());
        put(LOCK_AT, &self.lock.to_le_bytes());
        put(COMMAND_AT, cut(&self.command, COMMAND_LEN).as_bytes());
        bytes
    }

    /// Returns the record with these bytes, unless nothing was written there.
    pub(crate) fn parse_written(bytes: &[u8; OBSERVER_RECORD_LEN]) -> Option<ObserverRecord> {
        let record = ObserverRecord::parse(bytes);
        (record.pid != 0).then_some(record)
    }

    /// Returns the record with these bytes, whatever they are.
    pub(crate) fn parse(bytes: &[u8; OBSERVER_RECORD_LEN]) -> ObserverRecord {
        let word = |at: usize| u64::from_le_bytes(array(bytes, at));
        let command = bytes[COMMAND_AT..].split(|&byte| byte == 0).next();
        ObserverRecord {
            pid: i32::from_le_bytes(array(bytes, PID_AT)),
            namespace: word(NAMESPACE_AT),
            proc_device: word(PROC_DEVICE_AT),
            begun: word(BEGUN_AT),
            lock: word(LOCK_AT),
            command: String::from_utf8_lossy(command.unwrap_or_default()).into_owned(),
        }
    }
}

fn array<const LEN: usize>(bytes: &[u8], at: usize) -> [u8; LEN] {
    bytes[at..at + LEN].try_into().unwrap_or([0; LEN])
}

/// Returns the text; if it is longer than `len` bytes, its beginning and "...", which fit in `len`
/// bytes.
fn cut(text: &str, len: usize) -> String {
    const MARK: &str = "...";
    if text.len() <= len {
        return text.to_owned();
    }
    let ends = (0..=len - MARK.len()).rev();
    let end = ends.into_iter().find(|&end| text.is_char_boundary(end));
    text[..end.unwrap_or(0)].to_owned() + MARK
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(command: &str) -> ObserverRecord {
        ObserverRecord {
            pid: 4711,
            namespace: 0xefff_fffc,
            proc_device: 21,
            begun: u64::MAX,
            lock: 1 << 61,
            command: command.to_owned(),
        }
    }

    #[test]
    fn record_is_read_as_written() {
        for command in [
            "",
            "ocaml-probes count -pid 7",
            &"é".repeat(COMMAND_LEN / 2),
        ] {
            let record = record(command);
            assert_eq!(ObserverRecord::parse(&record.to_bytes()), record);
        }
    }

    #[test]
    fn long_command_is_cut_between_characters() {
        // The cut would fall into a character of two bytes, or of four.
        for character in ["x", "é", "🐫"] {
            let record = record(&character.repeat(COMMAND_LEN + 1));
            let found = ObserverRecord::parse(&record.to_bytes());
            let kept = found.command.strip_suffix("...").unwrap();
            assert!(record.command.starts_with(kept));
            let room = COMMAND_LEN - found.command.len();
            assert!(room < character.len(), "{room}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record(bytes in prop::collection::vec(any::<u8>(), OBSERVER_RECORD_LEN)) {
            let record = ObserverRecord::parse(&bytes.try_into().unwrap());
            prop_assert!(!record.command.contains('\0'));
        }
    }

    #[test]
    fn nothing_is_written_without_a_pid() {
        let record = ObserverRecord {
            pid: 7,
            ..ObserverRecord::default()
        };
        assert_eq!(
            ObserverRecord::parse_written(&record.to_bytes()),
            Some(record)
        );
        let none = ObserverRecord::default().to_bytes();
        assert_eq!(ObserverRecord::parse_written(&none), None);
    }
}
