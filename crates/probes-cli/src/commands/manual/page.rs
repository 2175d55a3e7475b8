//! Manual pages in the man(7) language. Flags are written with one dash, as in the documents.

use std::fmt::Write;

use clap::{Arg, Command};

use crate::spelling::{long, value_name};

/// The longest line of the text of a paragraph, in bytes.
const WIDTH: usize = 76;

/// The name of the command that the pages are about.
const TOOL: &str = "ocaml-probes";

/// Where the pages are that the help names as `docs/PAGE.md`.
const FILES: &str = "The pages of docs/ are in /usr/share/doc/ocaml-probes if the tool was installed as a package, and in \
/usr/local/share/doc/ocaml-probes after `make install`. index.md lists them; tutorial.md is for a first hour.";

/// The heading of the flags that have no heading in the help.
const FLAGS: &str = "Flags";

/// A manual page.
pub(super) struct Page {
    /// What it is called, without its section, which is 1.
    pub(super) name: String,
    pub(super) text: String,
}

/// The page about the tool.
pub(super) fn of_tool(root: &Command) -> Page {
    let mut page = Page::begin(TOOL.to_owned(), root);
    page.notes(root);
    page.section("SUBCOMMANDS");
    for subcommand in shown(root) {
        let about = text_of(subcommand.get_about());
        page.item(
            &format!("\\fB{}\\fR", escaped(subcommand.get_name())),
            &about,
        );
    }
    page.flags(root);
    page.files();
    let pages = shown(root).filter(|it| it.get_name() != "help");
    page.see_also(pages.map(|it| format!("{TOOL}-{}", it.get_name())));
    page
}

/// The page about a subcommand.
pub(super) fn of_subcommand(subcommand: &Command) -> Page {
    let mut page = Page::begin(format!("{TOOL}-{}", subcommand.get_name()), subcommand);
    page.notes(subcommand);
    page.flags(subcommand);
    page.files();
    page.see_also(std::iter::once(TOOL.to_owned()));
    page
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|it| !it.is_hide_set())
}

fn text_of(text: Option<&clap::builder::StyledStr>) -> String {
    text.map(ToString::to_string).unwrap_or_default()
}

impl Page {
    /// A page with its title, name and synopsis.
    fn begin(name: String, command: &Command) -> Page {
        let title = name.to_uppercase();
        let about = text_of(command.get_about());
        let version = env!("CARGO_PKG_VERSION");
        // Without a date, so that the page is the same whenever it is made.
        let text = format!(
            ".TH \"{}\" 1 \"\" \"{TOOL} {version}\" \"User Commands\"\n.SH NAME\n{} \\- {}\n",
            escaped(&title),
            escaped(&name),
            escaped(&about)
        );
        let mut page = Page { name, text };
        page.section("SYNOPSIS");
        let usage = command.clone().render_usage().to_string();
        let usage = usage.trim().strip_prefix("Usage:").unwrap_or(&usage);
        for line in usage.lines().map(str::trim).filter(|it| !it.is_empty()) {
            page.line(&format!("\\fB{}\\fR", escaped(line)));
            page.line(".br");
        }
        let end = page.text.len() - ".br\n".len();
        page.text.truncate(end);
        page
    }

    fn section(&mut self, title: &str) {
        self.line(&format!(".SH \"{}\"", escaped(title)));
    }

    fn line(&mut self, line: &str) {
        self.text += line;
        self.text.push('\n');
    }

    /// A term with its description.
    fn item(&mut self, term: &str, description: &str) {
        self.line(".TP");
        self.line(term);
        self.paragraph(description);
    }

    /// Words in lines of a bounded length.
    fn paragraph(&mut self, text: &str) {
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && line.len() + 1 + word.len() > WIDTH {
                let full = std::mem::take(&mut line);
                self.line(&escaped(&full));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        self.line(&escaped(&line));
    }

    fn files(&mut self) {
        self.section("FILES");
        self.paragraph(FILES);
    }

    /// The flags and operands, by their headings.
    fn flags(&mut self, command: &Command) {
        let all: Vec<&Arg> = command
            .get_arguments()
            .filter(|it| !it.is_hide_set())
            .collect();
        let mut headings: Vec<&str> = Vec::new();
        for arg in &all {
            let heading = arg.get_help_heading().unwrap_or(FLAGS);
            if !headings.contains(&heading) {
                headings.push(heading);
            }
        }
        for heading in headings {
            self.section(&heading.to_uppercase());
            let of_heading = all
                .iter()
                .filter(|it| it.get_help_heading().unwrap_or(FLAGS) == heading);
            for arg in of_heading {
                let defaults = defaults(arg);
                self.item(&term(arg), &(text_of(arg.get_help()) + &defaults));
            }
        }
    }

    /// The text that the help has after the flags: indented lines stay as they are; others are joined to paragraphs.
    fn notes(&mut self, command: &Command) {
        let notes = text_of(command.get_after_help());
        if notes.is_empty() {
            return;
        }
        self.section("DESCRIPTION");
        let mut paragraph = String::new();
        let mut is_literal = false;
        for line in notes.lines().chain([""]) {
            let is_indented = line.starts_with("    ");
            if (is_indented || line.is_empty()) && !paragraph.is_empty() {
                let text = std::mem::take(&mut paragraph);
                self.paragraph(&text);
            }
            if is_indented != is_literal {
                self.line(if is_indented {
                    ".RS 4\n.nf"
                } else {
                    ".fi\n.RE"
                });
                is_literal = is_indented;
            }
            if is_indented {
                self.line(&escaped(line.strip_prefix("    ").unwrap_or(line)));
            } else if line.is_empty() {
                self.line(".PP");
            } else {
                paragraph += line;
                paragraph.push(' ');
            }
        }
        // A `.PP` that no paragraph follows has no effect: those at the end, at the start and before another are
        // removed.
        while self.text.ends_with(".PP\n") {
            let end = self.text.len() - ".PP\n".len();
            self.text.truncate(end);
        }
        self.text = self
            .text
            .replace(".SH \"DESCRIPTION\"\n.PP\n", ".SH \"DESCRIPTION\"\n");
        while self.text.contains(".PP\n.PP\n") {
            self.text = self.text.replace(".PP\n.PP\n", ".PP\n");
        }
    }

    fn see_also(&mut self, pages: impl Iterator<Item = String>) {
        self.section("SEE ALSO");
        let pages: Vec<String> = pages
            .map(|page| format!("\\fB{}\\fR(1)", escaped(&page)))
            .collect();
        for (index, page) in pages.iter().enumerate() {
            let comma = if index + 1 < pages.len() { "," } else { "" };
            let _ = writeln!(self.text, "{page}{comma}");
        }
    }
}

/// How a flag is typed: `-p, -pid N`. An operand is its name.
fn term(arg: &Arg) -> String {
    let Some(_) = arg.get_long() else {
        return format!("\\fI{}\\fR", escaped(value_name(arg)));
    };
    let mut term = String::new();
    for letter in arg.get_short_and_visible_aliases().unwrap_or_default() {
        let _ = write!(term, "\\fB{}\\fR, ", escaped(&format!("-{letter}")));
    }
    let _ = write!(term, "\\fB{}\\fR", escaped(&format!("-{}", long(arg))));
    if arg.get_action().takes_values() {
        let _ = write!(term, " \\fI{}\\fR", escaped(value_name(arg)));
    }
    term
}

/// The values that a flag has if it is not given, as the help shows them.
fn defaults(arg: &Arg) -> String {
    let values = arg.get_default_values();
    if values.is_empty() || !arg.get_action().takes_values() || arg.is_hide_default_value_set() {
        return String::new();
    }
    let values: Vec<_> = values.iter().map(|it| it.to_string_lossy()).collect();
    format!(" [default: {}]", values.join(" "))
}

/// Text that man(7) shows as it is: no escapes, no requests, and dashes and quotes that can be copied.
fn escaped(text: &str) -> String {
    let mut shown = String::new();
    if text.starts_with('.') {
        shown += "\\&";
    }
    for character in text.chars() {
        match character {
            '\\' => shown += "\\e",
            '-' => shown += "\\-",
            '\'' => shown += "\\(aq",
            '`' => shown += "\\(ga",
            '^' => shown += "\\(ha",
            '~' => shown += "\\(ti",
            other => shown.push(other),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_has_no_requests_or_escapes() {
        for (text, expected) in [
            ("-pid N", "\\-pid N"),
            (".SH x", "\\&.SH x"),
            ("'x'", "\\(aqx\\(aq"),
            ("`~a^b`", "\\(ga\\(tia\\(hab\\(ga"),
            ("a\\b", "a\\eb"),
        ] {
            assert_eq!(escaped(text), expected);
        }
    }
}
