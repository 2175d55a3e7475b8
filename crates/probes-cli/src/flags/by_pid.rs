//! `-by pid`: whether several processes are distinguished.

// Of several processes.
#[derive(Debug, clap::Args)]
pub(crate) struct ByPidFlag {
    /// Each process by itself: -by pid
    #[arg(id = "by", long, value_name = "pid", value_parser = by_pid)]
    by: Option<ByPid>,
}

/// What `pid` says.
#[derive(Clone, Debug)]
struct ByPid;

fn by_pid(typed: &str) -> Result<ByPid, String> {
    if typed == "pid" {
        return Ok(ByPid);
    }
    Err(format!(
        "\"{typed}\" is not pid, the only thing that is distinguished here; `count -by` counts by any expression"
    ))
}

impl ByPidFlag {
    pub(crate) fn is_given(&self) -> bool {
        self.by.is_some()
    }
}
