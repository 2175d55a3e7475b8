//! The text that a scrape is answered with: OpenMetrics 1.0, or Prometheus' text format 0.0.4. Pure.
//!
//! The formats are described by <https://prometheus.io/docs/specs/om/open_metrics_spec/> and
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use std::fmt::{self, Display, Write as _};
use std::time::Duration;

/// One of the two formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextFormat {
    OpenMetrics,
    Prometheus,
}

/// What a family of metrics is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    /// It only increases. The names of its samples end with `_total`.
    Counter,
    Gauge,
    Histogram,
    /// The labels hold the information, the value is always 1. The names of its samples end with `_info`.
    Info,
}

/// Metrics of one name, which differ in their labels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// Without `_total` or `_info`.
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    /// With which the name ends, as OpenMetrics demands.
    pub(super) unit: &'static str,
    pub(super) help: &'static str,
}

/// The most bytes of a label's value.
const MAX_BYTES: usize = 200;

/// A text that grows family by family.
#[derive(Debug)]
pub(super) struct Exposition {
    format: TextFormat,
    text: String,
}

impl TextFormat {
    /// The format that the `Accept` header of a request asks for: the one that it prefers, if it names both, and the
    /// text format if it names none.
    pub(super) fn accepted(accept: &str) -> TextFormat {
        let (mut open_metrics, mut prometheus) = (0.0_f32, 0.0_f32);
        for range in accept.split(',') {
            let quality = parameter(range, "q").map_or(Ok(1.0), str::parse);
            let quality = quality.unwrap_or(0.0);
            let is_known = matches!(parameter(range, "version"), None | Some("1.0.0" | "0.0.1"));
            match range.split(';').next().unwrap_or_default().trim() {
                "application/openmetrics-text" if is_known => {
                    open_metrics = open_metrics.max(quality);
                }
                "text/plain" => prometheus = prometheus.max(quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= prometheus {
            TextFormat::OpenMetrics
        } else {
            TextFormat::Prometheus
        }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            TextFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            TextFormat::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// A parameter of a media range.
fn parameter<'r>(range: &'r str, name: &str) -> Option<&'r str> {
    let parameters = range.split(';').skip(1);
    let mut named = parameters.filter_map(|it| it.split_once('='));
    let found = named.find(|(of, _)| of.trim().eq_ignore_ascii_case(name));
    found.map(|(_, value)| value.trim())
}

impl Family {
    /// The suffix of its samples.
    fn suffix(&self) -> &'static str {
        match self.kind {
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
            MetricKind::Gauge | MetricKind::Histogram => "",
        }
    }
}

impl Exposition {
    pub(super) fn new(format: TextFormat) -> Exposition {
        Exposition {
            format,
            text: String::new(),
        }
    }

    /// Begins a family: the samples that follow are its.
    pub(super) fn family<'e>(&'e mut self, family: &'static Family) -> Samples<'e> {
        let Family {
            name, unit, help, ..
        } = family;
        let (kind, suffix) = match (family.kind, self.format) {
            // In the text format, a family has the name of its samples.
            (MetricKind::Counter, TextFormat::Prometheus) => ("counter", family.suffix()),
            (MetricKind::Info, TextFormat::Prometheus) => ("gauge", family.suffix()),
            (MetricKind::Counter, TextFormat::OpenMetrics) => ("counter", ""),
            (MetricKind::Info, TextFormat::OpenMetrics) => ("info", ""),
            (MetricKind::Gauge, _) => ("gauge", ""),
            (MetricKind::Histogram, _) => ("histogram", ""),
        };
        self.line(format_args!("# HELP {name}{suffix} {help}"));
        self.line(format_args!("# TYPE {name}{suffix} {kind}"));
        if self.format == TextFormat::OpenMetrics && !unit.is_empty() {
            self.line(format_args!("# UNIT {name} {unit}"));
        }
        Samples {
            exposition: self,
            family,
        }
    }

    pub(super) fn finish(mut self) -> String {
        if self.format == TextFormat::OpenMetrics {
            self.text += "# EOF\n";
        }
        self.text
    }

    fn line(&mut self, line: fmt::Arguments<'_>) {
        // A string can always be written to.
        let _ = self.text.write_fmt(line);
        self.text.push('\n');
    }
}

/// The samples of a family.
#[derive(Debug)]
pub(super) struct Samples<'e> {
    exposition: &'e mut Exposition,
    family: &'static Family,
}

impl Samples<'_> {
    pub(super) fn add(&mut self, labels: &Labels, value: impl Display) {
        let (name, suffix) = (self.family.name, self.family.suffix());
        let labels = labels.in_braces();
        self.exposition
            .line(format_args!("{name}{suffix}{labels} {value}"));
    }

    /// Adds a duration, in seconds.
    pub(super) fn add_seconds(&mut self, labels: &Labels, time: Duration) {
        self.add(labels, time.as_secs_f64());
    }

    /// Adds a histogram of durations: for each bound, how many are not longer (cumulative), then the sum and the number
    /// of all.
    pub(super) fn add_histogram<'b>(
        &mut self,
        labels: &Labels,
        buckets: impl Iterator<Item = (&'b Duration, &'b u64)>,
        count: u64,
        sum: Duration,
    ) {
        let name = self.family.name;
        for (bound, below) in buckets {
            let le = Bound(*bound);
            let labels = labels.with("le", &le.to_string());
            let labels = labels.in_braces();
            self.exposition
                .line(format_args!("{name}_bucket{labels} {below}"));
        }
        let all = labels.with("le", "+Inf");
        let all = all.in_braces();
        self.exposition
            .line(format_args!("{name}_bucket{all} {count}"));
        let (labels, sum) = (labels.in_braces(), sum.as_secs_f64());
        self.exposition
            .line(format_args!("{name}_sum{labels} {sum}"));
        self.exposition
            .line(format_args!("{name}_count{labels} {count}"));
    }
}

/// The bound of a bucket in seconds, with a point as OpenMetrics demands.
struct Bound(Duration);

impl Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        let point = if seconds.fract() == 0.0 { ".0" } else { "" };
        write!(f, "{seconds}{point}")
    }
}

/// The labels of a sample, as they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Labels(String);

impl Labels {
    /// The same with another label, whose value may be anything.
    #[must_use]
    pub(super) fn with(&self, name: &str, value: &str) -> Labels {
        let separator = if self.0.is_empty() { "" } else { "," };
        let value = LabelValue(value);
        Labels(format!("{}{separator}{name}=\"{value}\"", self.0))
    }

    fn in_braces(&self) -> String {
        if self.0.is_empty() {
            String::new()
        } else {
            format!("{{{}}}", self.0)
        }
    }
}

/// The value of a label, escaped, and shortened if it is long.
struct LabelValue<'v>(&'v str);

impl Display for LabelValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shortened = shortened(self.0);
        for character in shortened.chars() {
            match character {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                character => f.write_char(character)?,
            }
        }
        Ok(())
    }
}

/// A text of at most [`MAX_BYTES`]: a longer one ends with a hash of all of it, so that two of them stay apart.
pub(super) fn shortened(text: &str) -> std::borrow::Cow<'_, str> {
    if text.len() <= MAX_BYTES {
        return text.into();
    }
    // FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let end = format!("...{hash:016x}");
    let most = MAX_BYTES - end.len();
    let cut = (0..=most).rev().find(|&at| text.is_char_boundary(at));
    format!("{}{end}", &text[..cut.unwrap_or(0)]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    static HITS: Family = Family {
        name: "x_hits",
        kind: MetricKind::Counter,
        unit: "",
        help: "Hits.",
    };
    static TIMES: Family = Family {
        name: "x_time_seconds",
        kind: MetricKind::Histogram,
        unit: "seconds",
        help: "Times.",
    };
    static BUILD: Family = Family {
        name: "x_build",
        kind: MetricKind::Info,
        unit: "",
        help: "Build.",
    };

    fn text(format: TextFormat) -> String {
        let mut exposition = Exposition::new(format);
        let labels = Labels::default().with("probe", "a\"b\\c\nd");
        exposition.family(&HITS).add(&labels, 3);
        let (bounds, below) = ([1, 1000].map(Duration::from_millis), [1, 2]);
        let buckets = bounds.iter().zip(&below);
        let sum = Duration::from_millis(3501);
        let mut times = exposition.family(&TIMES);
        times.add_histogram(&Labels::default(), buckets, 3, sum);
        exposition.family(&BUILD).add(&Labels::default(), 1);
        exposition.finish()
    }

    #[test]
    fn openmetrics_has_units_and_an_end() {
        let expected = r#"# HELP x_hits Hits.
# TYPE x_hits counter
x_hits_total{probe="a\"b\\c\nd"} 3
# HELP x_time_seconds Times.
# TYPE x_time_seconds histogram
# UNIT x_time_seconds seconds
x_time_seconds_bucket{le="0.001"} 1
x_time_seconds_bucket{le="1.0"} 2
x_time_seconds_bucket{le="+Inf"} 3
x_time_seconds_sum 3.501
x_time_seconds_count 3
# HELP x_build Build.
# TYPE x_build info
x_build_info 1
# EOF
"#;
        assert_eq!(text(TextFormat::OpenMetrics), expected);
    }

    #[test]
    fn families_of_the_text_format_are_sample_names() {
        let text = text(TextFormat::Prometheus);
        let types: Vec<&str> = text.lines().filter(|it| it.contains("TYPE")).collect();
        let expected = [
            "# TYPE x_hits_total counter",
            "# TYPE x_time_seconds histogram",
            "# TYPE x_build_info gauge",
        ];
        assert_eq!(types, expected);
        assert!(!text.contains("UNIT") && !text.contains("EOF"));
    }

    #[test]
    fn accept_header_selects_the_format() {
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2";
        let protobuf_first =
            "application/vnd.google.protobuf;proto=x;q=0.9,text/plain;version=0.0.4;q=0.3";
        for (accept, expected) in [
            ("", TextFormat::Prometheus),
            ("*/*", TextFormat::Prometheus),
            ("application/openmetrics-text", TextFormat::OpenMetrics),
            (prometheus_3, TextFormat::OpenMetrics),
            (protobuf_first, TextFormat::Prometheus),
            (
                "application/openmetrics-text;version=2.0.0",
                TextFormat::Prometheus,
            ),
            ("application/openmetrics-text;q=0", TextFormat::Prometheus),
            (
                "text/plain, application/openmetrics-text;q=x",
                TextFormat::Prometheus,
            ),
            (";;;=,,q=", TextFormat::Prometheus),
        ] {
            assert_eq!(TextFormat::accepted(accept), expected, "{accept}");
        }
    }

    #[test]
    fn long_values_are_shortened_and_stay_apart() {
        let [one, other] = ["b", "c"].map(|end| "ä".repeat(150) + end);
        let [one, other] = [&one, &other].map(|it| shortened(it).into_owned());
        assert!(one.len() <= MAX_BYTES && one.starts_with("ää") && one != other);
        assert_eq!(shortened("short"), "short");
    }
}
