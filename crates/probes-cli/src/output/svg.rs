//! The times of pairs and functions as a picture: one chart of bars below the other.

use std::fmt::{self, Write};

use super::latencies::{Bucket, Latencies, Subject, of_nanoseconds};
use crate::text::is_unprintable;

// In pixels.
const WIDTH: u64 = 720;
const MARGIN: u64 = 20;
const LINE_HEIGHT: u64 = 22;
const LABEL_WIDTH: u64 = 170;
const COUNT_WIDTH: u64 = 100;

impl Latencies<'_> {
    /// A document of SVG 1.1.
    pub(crate) fn picture(&self) -> String {
        let lines = |subject: &Subject<'_>| {
            let caution = u64::from(subject.caution.is_some());
            3 + caution + subject.buckets.len().max(1) as u64
        };
        let height = 2 * MARGIN + LINE_HEIGHT * self.subjects().map(|it| lines(&it)).sum::<u64>();
        let mut svg = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
        );
        let mut top = MARGIN;
        for subject in self.subjects() {
            chart(&mut svg, &subject, top);
            top += LINE_HEIGHT * lines(&subject);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn chart(svg: &mut String, subject: &Subject<'_>, top: u64) {
    let mut baseline = top + LINE_HEIGHT;
    text(
        svg,
        MARGIN,
        baseline,
        "font-weight=\"bold\"",
        &subject.title,
    );
    baseline += LINE_HEIGHT;
    text(
        svg,
        MARGIN,
        baseline,
        "fill=\"#555\"",
        &subject.summary.line(),
    );
    if let Some(caution) = &subject.caution {
        baseline += LINE_HEIGHT;
        text(svg, MARGIN, baseline, "fill=\"#c00\"", caution);
    }
    let most = subject.buckets.iter().map(|it| it.count).max().unwrap_or(0);
    for bucket in subject.buckets {
        baseline += LINE_HEIGHT;
        bar(svg, bucket, most.max(1), baseline);
    }
}

fn bar(svg: &mut String, bucket: &Bucket, most: u64, baseline: u64) {
    let range = format!(
        "{} .. {}",
        of_nanoseconds(bucket.from_ns),
        of_nanoseconds(bucket.to_ns)
    );
    let left = MARGIN + LABEL_WIDTH;
    text(svg, left - 10, baseline, "text-anchor=\"end\"", &range);
    let room = WIDTH - 2 * MARGIN - LABEL_WIDTH - COUNT_WIDTH;
    let width = (bucket.count as f64 / most as f64) * room as f64;
    let (y, height) = (baseline - LINE_HEIGHT * 3 / 4, LINE_HEIGHT - 4);
    // Writing to a string does not fail.
    let _ = writeln!(
        svg,
        "<rect x=\"{left}\" y=\"{y}\" width=\"{width:.1}\" height=\"{height}\" fill=\"#c60\"/>"
    );
    let right = left + width.ceil() as u64 + 6;
    text(svg, right, baseline, "", &bucket.count.to_string());
}

fn text(svg: &mut String, x: u64, y: u64, attributes: &str, text: &str) {
    let text = Escaped(text);
    // Writing to a string does not fail.
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" {attributes}>{text}</text>");
}

/// Text with the characters escaped that XML uses for markup, or does not allow.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '&' => f.write_str("&amp;")?,
                character if is_unprintable(character) => {
                    write!(f, "{}", character.escape_default())?;
                }
                character => f.write_char(character)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_names_is_escaped() {
        let escaped = Escaped("a<b>&\"c\"\u{1b}").to_string();
        assert_eq!(escaped, "a&lt;b&gt;&amp;\"c\"\\u{1b}");
    }
}
