//! [`ShownPaths`]: the paths of source files and objects, as short as they can be.

use std::collections::HashMap;

/// How paths are shown to people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PathForm {
    /// By its shortest end that no other of the shown paths has.
    #[default]
    Short,
    /// As they are in the file or in the process.
    Full,
}

/// The form in which each path is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShownPaths {
    /// How much of the start of each path is left out; a path that is not here is shown in full.
    left_out: HashMap<String, usize>,
}

impl ShownPaths {
    /// Chooses how each of `paths` is shown; they must be all the paths that are shown together.
    pub(crate) fn new<P: Into<String>>(
        form: PathForm,
        paths: impl IntoIterator<Item = P>,
    ) -> ShownPaths {
        if form == PathForm::Full {
            return ShownPaths::default();
        }
        let paths: HashMap<String, usize> = paths.into_iter().map(|it| (it.into(), 0)).collect();
        let mut sorted: Vec<&str> = paths.keys().map(String::as_str).collect();
        // Compared from the last component on: paths with the longest common end become neighbours.
        sorted.sort_by(|one, other| components_from_end(one).cmp(components_from_end(other)));
        // Two spellings of a path are one path.
        sorted.dedup_by(|one, other| components_from_end(one).eq(components_from_end(other)));
        let common: Vec<usize> = sorted
            .windows(2)
            .map(|pair| common_components(pair[0], pair[1]))
            .collect();
        let needed = |index: usize| {
            let before = index.checked_sub(1).and_then(|before| common.get(before));
            1 + before.max(common.get(index)).copied().unwrap_or(0)
        };
        let needed_components = sorted
            .iter()
            .enumerate()
            .map(|(index, path)| (components_from_end(path).collect(), needed(index)));
        let needed_components: HashMap<Vec<&str>, usize> = needed_components.collect();
        let left_out = paths.keys().map(|path| {
            let components: Vec<&str> = components_from_end(path).collect();
            let needed = needed_components.get(&components);
            let needed = needed.copied().unwrap_or(usize::MAX);
            (path.clone(), start_of(path, needed))
        });
        ShownPaths {
            left_out: left_out.collect(),
        }
    }

    /// The part of `path` that is shown.
    pub(crate) fn show<'p>(&self, path: &'p str) -> &'p str {
        let start = self.left_out.get(path).copied().unwrap_or(0);
        path.get(start..).unwrap_or(path)
    }
}

/// The components of a path, the last one first. For an absolute path, an empty one follows them.
fn components_from_end(path: &str) -> impl Iterator<Item = &str> {
    let is_absolute = path.starts_with('/');
    let components = path.rsplit('/').filter(|it| !matches!(*it, "" | "."));
    components.chain(is_absolute.then_some(""))
}

/// How many components at the end of two paths are the same.
fn common_components(one: &str, other: &str) -> usize {
    let pairs = components_from_end(one).zip(components_from_end(other));
    pairs.take_while(|(one, other)| one == other).count()
}

/// Where the last `count` components of a path begin; 0 if it does not have more.
fn start_of(path: &str, count: usize) -> usize {
    let place = |component: &str| component.as_ptr() as usize - path.as_ptr() as usize;
    let components = components_from_end(path).filter(|it| !it.is_empty());
    let mut starts = components.map(place).skip(count.saturating_sub(1));
    let start = starts.next().unwrap_or(0);
    let has_more = starts.next().is_some();
    // Nothing is gained by leaving out the slash alone.
    if has_more { start } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(paths: &[&'static str]) -> Vec<&'static str> {
        let all = ShownPaths::new(PathForm::Short, paths.iter().copied());
        paths.iter().map(|path| all.show(path)).collect()
    }

    #[test]
    fn shortest_unambiguous_end_is_shown() {
        assert_eq!(
            shown(&[
                "/home/u/app/lib/http.ml",
                "/home/u/app/lib/util.ml",
                "/home/u/app/bin/util.ml",
                "/home/u/app/bin/./main.ml",
            ]),
            ["http.ml", "lib/util.ml", "bin/util.ml", "main.ml"]
        );
        assert_eq!(
            shown(&["/a/x/b/c.ml", "/a/y/b/c.ml"]),
            ["x/b/c.ml", "y/b/c.ml"]
        );
    }

    #[test]
    fn paths_without_unique_end_are_shown_in_full() {
        assert_eq!(
            shown(&["a.ml", "/a.ml", "", "/"]),
            ["a.ml", "/a.ml", "", "/"]
        );
        // `lib/a.ml` is also the end of `/x/lib/a.ml`.
        assert_eq!(
            shown(&["lib/a.ml", "/x/lib/a.ml"]),
            ["lib/a.ml", "/x/lib/a.ml"]
        );
        let full = ShownPaths::new(PathForm::Full, ["/x/a.ml"]);
        assert_eq!(full.show("/x/a.ml"), "/x/a.ml");
        assert_eq!(full.show("/unknown/é.ml"), "/unknown/é.ml");
    }

    #[test]
    fn two_spellings_are_one_path() {
        assert_eq!(shown(&["/x/a.ml", "/x/./a.ml"]), ["a.ml", "a.ml"]);
    }
}
