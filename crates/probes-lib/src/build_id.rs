//! The build-id of a file.

use std::fmt;

/// The identity that the linker gave a file (`NT_GNU_BUILD_ID`); displayed in hex.
///
/// ```no_run
/// let table = probes_lib::ProbeTable::read("server.exe")?;
/// if let Some(build_id) = table.build_id() {
///     println!("{build_id}");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BuildId(Box<[u8]>);

impl BuildId {
    pub(crate) fn new(bytes: &[u8]) -> BuildId {
        BuildId(bytes.into())
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
