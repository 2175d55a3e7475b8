//! Suggestions for a name that was not found: the most similar of the names that there are.

/// Returns up to three of `names` that are similar to `name`, or to what it matches if it is a glob; the most similar first.
pub(crate) fn near_names<N: AsRef<str>>(
    names: impl IntoIterator<Item = N>,
    name: &str,
) -> Vec<String> {
    match Pattern::of(name) {
        Some(pattern) => nearest(names, name, |_, other| pattern.similarity(other)),
        None => nearest(names, name, similarity),
    }
}

/// The same for functions. Also returns those with the same last component in another module or in none, and C
/// functions with a prefix before the name (`caml_unix_sleep` for `unix_sleep`). Symbols of ocamlopt leave out modules
/// inside a file.
pub(crate) fn near_functions<N: AsRef<str>>(
    names: impl IntoIterator<Item = N>,
    name: &str,
) -> Vec<String> {
    if let Some(pattern) = Pattern::of(name) {
        let has_module = name.contains(['.', ':']);
        return nearest(names, name, |_, other| {
            let score = pattern.similarity(other);
            if has_module {
                return score;
            }
            // `Stdlib.List.map` is near to `ma*`, which does not match it.
            score.max(0.9 * pattern.similarity(last_component(other)))
        });
    }
    let last = last_component(name);
    nearest(names, name, |name, other| {
        let score = similarity(name, other);
        let before = other.strip_suffix(name);
        if name.len() >= 3 && before.is_some_and(|before| before.ends_with('_')) {
            return 0.95;
        }
        if last.is_empty() || last_component(other) != last {
            return score;
        }
        // `Stdlib.List.init` is nearer to `List.init` than `Stdlib.Array.init`.
        if before.is_some_and(|before| before.is_empty() || before.ends_with(['.', ':'])) {
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
    // People transpose letters, leave out or add a suffix, and get the case wrong.
    let score = strsim::normalized_damerau_levenshtein(name, other);
    let long_enough = name.len().min(other.len()) >= 2;
    let prefix = long_enough && (other.starts_with(name) || name.starts_with(other));
    if prefix || other.eq_ignore_ascii_case(name) {
        score.max(0.8)
    } else {
        score
    }
}

/// A glob, in the form in which names are compared with it.
struct Pattern {
    parts: Vec<PatternPart>,
    /// How many of its characters stand for themselves.
    literals: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PatternPart {
    /// A character that stands for itself.
    Literal(char),
    /// One character, whichever: `?`, or a set, whose members are ignored here.
    One,
    /// Any number of characters: `*`.
    Any,
}

impl Pattern {
    /// Parses a glob; `None` if `text` has no wildcard, or is malformed (`[`, or a backslash at the end).
    fn of(text: &str) -> Option<Pattern> {
        let mut parts = Vec::new();
        let mut rest = text.chars();
        while let Some(next) = rest.next() {
            parts.push(match next {
                '*' => PatternPart::Any,
                '?' => PatternPart::One,
                // A `]` that comes first in a set is a member of it.
                '[' => {
                    let is_first = |inside: &str| inside.starts_with(']');
                    let inside = rest.as_str();
                    let inside = inside.strip_prefix('!').unwrap_or(inside);
                    let skipped = usize::from(is_first(inside));
                    let end = inside[skipped..].find(']')?;
                    rest = inside[skipped + end + 1..].chars();
                    PatternPart::One
                }
                '\\' => PatternPart::Literal(rest.next()?),
                literal => PatternPart::Literal(literal),
            });
        }
        let is_literal = |part: &&PatternPart| matches!(part, PatternPart::Literal(_));
        let literals = parts.iter().filter(is_literal).count();
        let is_glob = parts.iter().any(|part| !is_literal(&part));
        is_glob.then_some(Pattern { parts, literals })
    }

    /// Returns how similar a name is to the names that the glob matches: 1 less the number of edits per literal
    /// character. 1 is a match; it is negative if there are more edits than literals. A wrong case is a quarter of an
    /// edit.
    fn similarity(&self, name: &str) -> f64 {
        const EDIT: usize = 4;
        const OTHER_CASE: usize = 1;
        if self.literals == 0 {
            return 0.0;
        }
        let name: Vec<char> = name.chars().collect();
        // The edit distances between the parts before this one and each prefix of the name; `earlier` has those
        // without the previous part, for transposed characters.
        let mut before: Vec<usize> = (0..=name.len()).map(|len| EDIT * len).collect();
        let mut earlier = before.clone();
        for (at, &part) in self.parts.iter().enumerate() {
            let mut row = Vec::with_capacity(name.len() + 1);
            let missing = if part == PatternPart::Any { 0 } else { EDIT };
            row.push(before[0] + missing);
            for (index, &found) in name.iter().enumerate() {
                let same = match part {
                    PatternPart::Any => {
                        row.push(before[index + 1].min(row[index]));
                        continue;
                    }
                    PatternPart::One => 0,
                    PatternPart::Literal(wanted) if wanted == found => 0,
                    PatternPart::Literal(wanted) if wanted.eq_ignore_ascii_case(&found) => {
                        OTHER_CASE
                    }
                    PatternPart::Literal(_) => EDIT,
                };
                let mut cost = before[index] + same;
                cost = cost.min(before[index + 1] + EDIT).min(row[index] + EDIT);
                let is_transposed = at > 0
                    && index > 0
                    && part == PatternPart::Literal(name[index - 1])
                    && self.parts[at - 1] == PatternPart::Literal(found);
                if is_transposed {
                    cost = cost.min(earlier[index - 1] + EDIT);
                }
                row.push(cost);
            }
            earlier = std::mem::replace(&mut before, row);
        }
        let edits = before[name.len()] as f64 / EDIT as f64;
        1.0 - edits / self.literals as f64
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
            "Unix.sleep",
            "caml_unix_sleep",
        ];
        let near = |name| near_functions(names, name);
        assert_eq!(near("unix_sleep"), ["caml_unix_sleep", "Unix.sleep"]);
        assert_eq!(near("App.Work.fib"), ["App.fib"]);
        assert_eq!(near("fib"), ["App.fib"]);
        assert_eq!(near("List.init"), ["Stdlib.List.init", "Stdlib.Array.init"]);
        assert_eq!(near("read"), ["std::fs::read"]);
        assert_eq!(near("App.biuld"), ["App.build"]);
        assert_eq!(near("Work.*"), [""; 0]);
        assert_eq!(near("Std.List.m*"), [""; 0]);
        assert_eq!(near("Work."), [""; 0]);
        // For files and probes, an equal ending does not make names similar.
        assert_eq!(near_names(["other.ml"], "app.ml"), [""; 0]);
    }

    #[test]
    fn names_similar_to_a_glob_are_near() {
        let names = [
            "Service.render",
            "Service.serve",
            "Service.tick",
            "Stdlib.List.map",
            "Stdlib.List.mapi",
        ];
        let near = |glob| near_functions(names, glob);
        let of_service = ["Service.render", "Service.serve", "Service.tick"];
        for glob in [
            "Sevrice.*",
            "Servce.*",
            "service.*",
            "Service_*",
            "*rvise.*",
        ] {
            assert_eq!(near(glob), of_service, "{glob}");
        }
        assert_eq!(near("*.rendr"), ["Service.render"]);
        assert_eq!(near("Sevrice.ti?k"), ["Service.tick"]);
        assert_eq!(near("Sevrice.[!s]ick"), ["Service.tick"]);
        // A glob without a module is compared with the last component.
        assert_eq!(near("mapi*"), ["Stdlib.List.mapi"]);
        for glob in ["*", "?", "X*", "Unix.*", "[", "[]", "\\", "*\\"] {
            assert_eq!(near(glob), [""; 0], "{glob}");
        }
        let probes = ["req_start", "req_end", "tick"];
        assert_eq!(near_names(probes, "rqe_*"), ["req_end", "req_start"]);
        assert_eq!(near_names(probes, "req*"), ["req_end", "req_start"]);
        assert_eq!(near_names(probes, "*_strat"), ["req_start"]);
        assert_eq!(near_names(probes, r"\*req*"), ["req_end", "req_start"]);
    }
}
