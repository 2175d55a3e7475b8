//! A picture: one chart of bars below the other.

use std::fmt::{self, Write};

use crate::text::is_unprintable;

// In pixels.
const WIDTH: u64 = 720;
const MARGIN: u64 = 20;
const LINE_HEIGHT: u64 = 22;
const LABEL_WIDTH: u64 = 170;
const COUNT_WIDTH: u64 = 100;

/// A chart of bars.
pub(super) struct Chart {
    pub(super) title: String,
    /// What is below the title.
    pub(super) figures: String,
    /// What is wrong, if anything.
    pub(super) caution: Option<String>,
    /// The label of each bar, and its count, which is shown as its length.
    pub(super) bars: Vec<(String, u64)>,
}

impl Chart {
    /// How many lines high it is, with an empty one below it.
    fn lines(&self) -> u64 {
        let caution = u64::from(self.caution.is_some());
        3 + caution + self.bars.len().max(1) as u64
    }
}

/// Returns charts as a document of SVG 1.1.
pub(super) fn picture(charts: &[Chart]) -> String {
    let lines: u64 = charts.iter().map(Chart::lines).sum();
    let height = 2 * MARGIN + LINE_HEIGHT * lines;
    let mut svg = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    );
    let mut top = MARGIN;
    for one in charts {
        chart(&mut svg, one, top);
        top += LINE_HEIGHT * one.lines();
    }
    svg.push_str("</svg>\n");
    svg
}

fn chart(svg: &mut String, chart: &Chart, top: u64) {
    let mut baseline = top + LINE_HEIGHT;
    text(svg, MARGIN, baseline, "font-weight=\"bold\"", &chart.title);
    baseline += LINE_HEIGHT;
    text(svg, MARGIN, baseline, "fill=\"#555\"", &chart.figures);
    if let Some(caution) = &chart.caution {
        baseline += LINE_HEIGHT;
        text(svg, MARGIN, baseline, "fill=\"#c00\"", caution);
    }
    let most = chart.bars.iter().map(|(_, count)| *count).max();
    for (label, count) in &chart.bars {
        baseline += LINE_HEIGHT;
        bar(svg, label, *count, most.unwrap_or(0).max(1), baseline);
    }
}

fn bar(svg: &mut String, label: &str, count: u64, most: u64, baseline: u64) {
    let left = MARGIN + LABEL_WIDTH;
    text(svg, left - 10, baseline, "text-anchor=\"end\"", label);
    let room = WIDTH - 2 * MARGIN - LABEL_WIDTH - COUNT_WIDTH;
    let width = (count as f64 / most as f64) * room as f64;
    let (y, height) = (baseline - LINE_HEIGHT * 3 / 4, LINE_HEIGHT - 4);
    // Writing to a string does not fail.
    let _ = writeln!(
        svg,
        "<rect x=\"{left}\" y=\"{y}\" width=\"{width:.1}\" height=\"{height}\" fill=\"#c60\"/>"
    );
    let right = left + width.ceil() as u64 + 6;
    text(svg, right, baseline, "", &count.to_string());
}

fn text(svg: &mut String, x: u64, y: u64, attributes: &str, text: &str) {
    let text = XmlEscaped(text);
    // Writing to a string does not fail.
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" {attributes}>{text}</text>");
}

/// Text with the characters escaped that XML uses for markup, or does not allow.
struct XmlEscaped<'a>(&'a str);

impl fmt::Display for XmlEscaped<'_> {
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
        let escaped = XmlEscaped("a<b>&\"c\"\u{1b}").to_string();
        assert_eq!(escaped, "a&lt;b&gt;&amp;\"c\"\\u{1b}");
    }
}
