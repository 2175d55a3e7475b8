//! What is mounted where: `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::fs;

/// A mount.
pub(crate) struct Mount<'t> {
    /// Which directory of the file system is mounted.
    pub(crate) root: &'t str,
    pub(crate) mounted_at: &'t str,
    /// The type of the file system.
    pub(crate) filesystem: &'t str,
    /// Those of the file system itself.
    options: &'t str,
}

impl<'t> Mount<'t> {
    pub(crate) fn options(&self) -> impl Iterator<Item = &'t str> {
        self.options.split(',')
    }

    /// Returns the value of its option `hidepid`, if that hides something.
    fn hidepid(&self) -> Option<&'t str> {
        let value = self.options().find_map(|it| it.strip_prefix("hidepid="))?;
        (!["0", "off"].contains(&value)).then_some(value)
    }
}

/// Returns the text about the mounts of this process; nothing if it cannot be read.
pub(crate) fn own() -> String {
    fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()
}

/// Returns the mounts of a text, those that are mounted over others after them.
pub(crate) fn of(text: &str) -> impl DoubleEndedIterator<Item = Mount<'_>> {
    text.lines().filter_map(parse)
}

fn parse(line: &str) -> Option<Mount<'_>> {
    let (mount, filesystem) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let mut filesystem = filesystem.split(' ');
    Some(Mount {
        root: mount.next()?,
        mounted_at: mount.next()?,
        filesystem: filesystem.next()?,
        options: filesystem.nth(1)?,
    })
}

/// Returns how /proc hides processes (proc(5), `hidepid`) by these mounts; `None` if it hides none.
pub(crate) fn hidepid(text: &str) -> Option<&str> {
    let proc = of(text).rfind(|it| it.mounted_at == "/proc")?;
    proc.hidepid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_after_optional_ones() {
        let text = "24 30 0:22 / /proc rw,nosuid shared:13 master:1 - proc proc rw,hidepid=2\n\
                    35 30 0:31 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let fields = |it: Mount<'_>| {
            let options = it.options().last().unwrap().to_owned();
            format!("{} {} {} {options}", it.root, it.mounted_at, it.filesystem)
        };
        let mounts: Vec<_> = of(text).map(fields).collect();
        let expected = [
            "/ /proc proc hidepid=2",
            "/docker/1 /sys/fs/cgroup cgroup2 rw",
        ];
        assert_eq!(mounts, expected);
    }

    #[test]
    fn values_of_hidepid_are_understood() {
        for (options, expected) in [
            ("rw", None),
            ("rw,hidepid=0", None),
            ("rw,gid=4,hidepid=off", None),
            ("rw,hidepid=2", Some("2")),
            ("rw,gid=4,hidepid=invisible", Some("invisible")),
        ] {
            let text = format!("24 30 0:22 / /proc rw - proc proc {options}\n");
            assert_eq!(hidepid(&text), expected, "{options}");
        }
        // What is mounted last hides what is below.
        let text = "24 30 0:22 / /proc rw - proc proc rw,hidepid=2\n25 24 0:23 / /proc rw - proc proc rw\n";
        assert_eq!(hidepid(text), None);
    }

    #[test]
    fn other_lines_are_skipped() {
        for line in [
            "",
            " - ",
            "35 30 0:31 / - cgroup2",
            "1 2 3 / /a rw - proc proc",
        ] {
            assert!(of(line).next().is_none(), "{line}");
        }
    }
}
