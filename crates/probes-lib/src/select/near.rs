//! The names that may have been meant by one that is not there.

/// Returns up to three of `names` that are similar to `name`, the most similar first.
pub(crate) fn near_names<N: AsRef<str>>(
    names: impl IntoIterator<Item = N>,
    name: &str,
) -> Vec<String> {
    nearest(names, name, similarity)
}

/// The same for functions: also those that have another module before the last component, or none. The symbols of ocamlopt leave
/// out modules inside a file.
pub(crate) fn near_functions<N: AsRef<str>>(
    names: impl IntoIterator<Item = N>,
    name: &str,
) -> Vec<String> {
    let last = last_component(name);
    // Globs match many names: `Work.*` is not near to all functions.
    let is_word = !last.is_empty() && !last.contains(['*', '?', '[', ']']);
    nearest(names, name, |name, other| {
        let score = similarity(name, other);
        if !is_word || last_component(other) != last {
            return score;
        }
        // `Stdlib.List.init` is nearer to `List.init` than `Stdlib.Array.init`.
        let is_end = other.strip_suffix(name);
        if is_end.is_some_and(|before| before.is_empty() || before.ends_with(['.', ':'])) {
            return 1.0;
        }
        0.8 + score / 10.0
    })
}

/// Returns what follows the last dot, or the last colon, of the name of a function.
fn last_component(name: &str) -> &str {
    name.rsplit(['.', ':']).next().unwrap_or(name)
}

/// Returns how similar two names are, from 0 to 1.
fn similarity(name: &str, other: &str) -> f64 {
    // Transposed letters and a missing or wrong suffix are what people mistype.
    let score = strsim::normalized_damerau_levenshtein(name, other);
    let long_enough = name.len().min(other.len()) >= 2;
    let prefix = long_enough && (other.starts_with(name) || name.starts_with(other));
    if prefix || other.eq_ignore_ascii_case(name) {
        score.max(0.8)
    } else {
        score
    }
}

fn nearest<N: AsRef<str>>(
    names: impl IntoIterator<Item = N>,
    name: &str,
    score: impl Fn(&str, &str) -> f64,
) -> Vec<String> {
    const SIMILAR: f64 = 0.75;
    // A name as long as this was not typed by hand: it is not worth comparing with thousands of
    // others.
    const LONGEST: usize = 200;
    if name.len() > LONGEST {
        return Vec::new();
    }
    let mut near: Vec<(f64, N)> = names
        .into_iter()
        .filter(|other| other.as_ref().len() <= 2 * LONGEST)
        .map(|other| (score(name, other.as_ref()), other))
        .filter(|&(score, _)| score >= SIMILAR)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.as_ref().cmp(b.1.as_ref())));
    near.dedup_by(|one, other| one.1.as_ref() == other.1.as_ref());
    near.into_iter()
        .take(3)
        .map(|(_, name)| name.as_ref().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_other_modules_are_near() {
        let names = [
            "App.fib",
            "App.build",
            "Stdlib.List.init",
            "Stdlib.Array.init",
            "Stdlib.List.map",
            "std::fs::read",
        ];
        let near = |name| near_functions(names, name);
        assert_eq!(near("App.Work.fib"), ["App.fib"]);
        assert_eq!(near("fib"), ["App.fib"]);
        assert_eq!(near("List.init"), ["Stdlib.List.init", "Stdlib.Array.init"]);
        assert_eq!(near("read"), ["std::fs::read"]);
        assert_eq!(near("App.biuld"), ["App.build"]);
        assert_eq!(near("Work.*"), [""; 0]);
        assert_eq!(near("Work."), [""; 0]);
        // Files and probes have other names: an ending is none of them.
        assert_eq!(near_names(["other.ml"], "app.ml"), [""; 0]);
    }
}
