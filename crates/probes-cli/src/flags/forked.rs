//! `-follow` of the commands that observe: also the processes that are forked.

// Whether processes that are forked are observed, too.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ForkedFlag {
    /// Also processes that it has forked or forks later
    #[arg(long)]
    pub(crate) follow: bool,
}
