//! `-follow` of the commands that observe: also the processes that are forked.

// Whether processes that are forked are observed, too.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ForkedFlag {
    /// Also the processes that it has forked, and forks from now on
    #[arg(long)]
    pub(crate) follow: bool,
}
