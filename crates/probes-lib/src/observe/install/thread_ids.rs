//! [`ThreadIds`]: what is known of the ids of threads that trampolines record.

/// Which thread ids records have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadIds {
    /// None.
    Unknown,
    /// Ids of our pid namespace.
    OfOurNamespace,
    /// Ids of another pid namespace.
    OfAnotherNamespace,
}
