//! The names that may have been meant by one that is not there.

/// Returns up to three of `names` that are similar to `name`, the most similar first.
pub(crate) fn near_names<N: AsRef<str>>(
    names: impl IntoIterator<Item = N>,
    name: &str,
) -> Vec<String> {
    const SIMILAR: f64 = 0.75;
    // A name as long as this was not typed by hand: it is not worth comparing with thousands of
    // others.
    const LONGEST: usize = 200;
    if name.len() > LONGEST {
        return Vec::new();
    }
    let score = |other: &str| {
        // Transposed letters and a missing or wrong suffix are what people mistype.
        let score = strsim::normalized_damerau_levenshtein(name, other);
        let long_enough = name.len().min(other.len()) >= 2;
        let prefix = long_enough && (other.starts_with(name) || name.starts_with(other));
        if prefix || other.eq_ignore_ascii_case(name) {
            score.max(0.8)
        } else {
            score
        }
    };
    let mut near: Vec<(f64, N)> = names
        .into_iter()
        .filter(|other| other.as_ref().len() <= 2 * LONGEST)
        .map(|other| (score(other.as_ref()), other))
        .filter(|&(score, _)| score >= SIMILAR)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.as_ref().cmp(b.1.as_ref())));
    near.dedup_by(|one, other| one.1.as_ref() == other.1.as_ref());
    near.into_iter()
        .take(3)
        .map(|(_, name)| name.as_ref().to_owned())
        .collect()
}
