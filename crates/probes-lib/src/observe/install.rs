//! Installs an observation in a process, and removes it.

pub(crate) mod at_launch;
pub(crate) mod context;
pub(crate) mod patch_sites;
pub(crate) mod prepare;
pub(crate) mod remove;
