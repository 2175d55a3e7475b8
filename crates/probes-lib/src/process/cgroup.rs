//! The memory limit of the cgroups that a process is in (cgroups(7)), of version 2 and 1.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{MemoryLimit, MemoryLimitKind};
use crate::process::Process;
use crate::process::mounts::{self, Mount};

/// The files with the limit and the usage of a cgroup, and the names of the lines of `memory.stat` that count the page
/// cache.
struct Version {
    filesystem: &'static str,
    limit: &'static str,
    used: &'static str,
    page_cache: [&'static str; 2],
}

const VERSIONS: [Version; 2] = [
    Version {
        filesystem: "cgroup2",
        limit: "memory.max",
        used: "memory.current",
        page_cache: ["active_file", "inactive_file"],
    },
    Version {
        filesystem: "cgroup",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        page_cache: ["total_active_file", "total_inactive_file"],
    },
];

/// In version 1, a cgroup without a limit has one that is larger than any memory. It is at least this.
const NO_LIMIT: u64 = 1 << 62;

/// A mounted cgroup file system with the memory controller.
struct Hierarchy {
    version: &'static Version,
    /// The cgroup that is mounted.
    root: PathBuf,
    /// The directory where it is mounted.
    mounted_at: PathBuf,
}

/// Returns the limit that leaves a process the least memory, among those of its cgroup and of the ancestors of that.
/// `None` if there is none, or none can be read.
pub(super) fn memory_limit(process: &Process) -> Option<MemoryLimit> {
    let own_mounts = mounts::own();
    let cgroups = String::from_utf8(process.read_of_living_thread("cgroup").ok()?).ok()?;
    let hierarchies = mounts::of(&own_mounts).filter_map(hierarchy);
    let limits = hierarchies.flat_map(|hierarchy| {
        let directories = directories(&hierarchy, &cgroups);
        let limits = directories.into_iter();
        limits.filter_map(move |directory| limit_in(hierarchy.version, &directory))
    });
    limits.min_by_key(|it| it.limit.saturating_sub(it.used))
}

fn hierarchy(mount: Mount<'_>) -> Option<Hierarchy> {
    let version = VERSIONS
        .iter()
        .find(|it| it.filesystem == mount.filesystem)?;
    let is_meant = version.filesystem == "cgroup2" || mount.options().any(|it| it == "memory");
    is_meant.then(|| Hierarchy {
        version,
        root: mount.root.into(),
        mounted_at: mount.mounted_at.into(),
    })
}

/// Returns the directories of the cgroup of a process and of its ancestors. `cgroups` is the process's
/// `/proc/PID/cgroup`.
fn directories(hierarchy: &Hierarchy, cgroups: &str) -> Vec<PathBuf> {
    let path = cgroups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let is_meant = match hierarchy.version.filesystem {
            "cgroup2" => controllers.is_empty(),
            _ => controllers.split(',').any(|it| it == "memory"),
        };
        is_meant.then_some(path)
    });
    let below = path.and_then(|path| Path::new(path).strip_prefix(&hierarchy.root).ok());
    let directory = below.map(|below| hierarchy.mounted_at.join(below));
    let all = directory.iter().flat_map(|it| it.ancestors());
    let all = all.take_while(|it| it.starts_with(&hierarchy.mounted_at));
    all.map(Path::to_owned).collect()
}

fn limit_in(version: &Version, directory: &Path) -> Option<MemoryLimit> {
    let read = |name| fs::read_to_string(directory.join(name)).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let limit = read(version.limit).and_then(number);
    let limit = limit.filter(|&limit| limit < NO_LIMIT)?;
    let used = read(version.used).and_then(number)?;
    let stat = read("memory.stat");
    let cached = stat.map_or(0, |stat| page_cache_bytes(&stat, version.page_cache));
    Some(MemoryLimit {
        kind: MemoryLimitKind::Cgroup,
        limit,
        used: used.saturating_sub(cached),
    })
}

/// Returns how many bytes are page cache.
fn page_cache_bytes(stat: &str, names: [&str; 2]) -> u64 {
    let lines = stat.lines().filter_map(|line| line.split_once(' '));
    let of_page_cache = lines.filter(|(name, _)| names.contains(name));
    of_page_cache
        .filter_map(|(_, bytes)| bytes.parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "35 30 0:31 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";

    fn of(mount: &str, cgroups: &str) -> Vec<String> {
        let mount = mounts::of(mount).next().unwrap();
        let directories = directories(&hierarchy(mount).unwrap(), cgroups);
        directories
            .iter()
            .map(|it| it.display().to_string())
            .collect()
    }

    #[test]
    fn cgroups_of_both_versions_are_found() {
        let cgroups = "4:memory:/docker/1/a/b\n3:cpu,cpuacct:/x\n0::/a.slice/b.service\n";
        let v2 = [
            "/sys/fs/cgroup/a.slice/b.service",
            "/sys/fs/cgroup/a.slice",
            "/sys/fs/cgroup",
        ];
        assert_eq!(of(V2, cgroups), v2);
        let v1 = [
            "/sys/fs/cgroup/memory/a/b",
            "/sys/fs/cgroup/memory/a",
            "/sys/fs/cgroup/memory",
        ];
        assert_eq!(of(V1, cgroups), v1);
    }

    #[test]
    fn other_mounts_and_cgroups_are_ignored() {
        let others = [
            "35 30 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            "35 30 0:31 / /proc rw - proc proc rw",
        ];
        for other in others {
            let mount = mounts::of(other).next().unwrap();
            assert!(hierarchy(mount).is_none(), "{other}");
        }
        // A cgroup outside of the mounted one; no memory controller; a malformed line; no lines.
        for cgroups in ["4:memory:/docker/2", "4:cpu:/docker/1", "4:memory", ""] {
            assert!(of(V1, cgroups).is_empty(), "{cgroups}");
        }
    }

    #[test]
    fn page_cache_does_not_count_as_used() {
        let stat = "anon 1\nfile 100\ninactive_file 30\nactive_file 4\ntotal_active_file 900\nactive_file x\n";
        assert_eq!(page_cache_bytes(stat, VERSIONS[0].page_cache), 34);
        assert_eq!(page_cache_bytes(stat, VERSIONS[1].page_cache), 900);
    }
}
