//! The last lines of the screen: which keys work now, a message, or help.

use ratatui::style::{Style, Stylize};
use ratatui::text::Line;

use crate::commands::top::model::{Model, RowKind};
use crate::text::Escaped;

/// The last lines of the screen.
#[derive(Debug, Default)]
pub(super) struct Foot {
    pub(super) lines: Vec<Line<'static>>,
    /// How many of them are more important than the title.
    pub(super) needed: usize,
    /// How many pages of help there are, shown or not.
    pub(super) help_pages: usize,
}

/// What is between two keys in a line.
const GAP: &str = "  ";

/// The last lines of a screen of this width, which has `room` lines for them and the title.
pub(super) fn foot(model: &Model, width: u16, room: usize) -> Foot {
    let width = usize::from(width);
    if model.is_typing() {
        let lines = typed_filter(model, width);
        return Foot {
            needed: lines.len(),
            lines,
            help_pages: pages(&help(model), width, room).len(),
        };
    }
    let lines = |text: Option<&str>, style: Style| -> Vec<Line<'static>> {
        let words = text.map(|text| Escaped(text).to_string());
        let lines = words.map(|words| wrapped(words.split(' '), " ", width));
        let lines = lines.into_iter().flatten();
        let lines = lines.map(|line| Line::styled(line, style)).collect();
        cut(lines, LONGEST_MESSAGE, width)
    };
    let caution = lines(model.caution(), Style::new().red());
    let help = pages(&help(model), width, room.saturating_sub(caution.len()));
    let mut foot = Foot {
        help_pages: help.len(),
        lines: caution,
        needed: 0,
    };
    foot.lines
        .extend(lines(model.message(), Style::new().bold()));
    foot.needed = foot.lines.len().max(1);
    if let Some(page) = model.help_page().and_then(|page| help.get(page)) {
        foot.needed = foot.lines.len() + page.len();
        foot.lines.extend(page.iter().cloned().map(Line::from));
    } else if model.message().is_none() {
        foot.lines.push(keys(model, width).into());
    }
    foot
}

/// How many lines a message has at most.
const LONGEST_MESSAGE: usize = 4;

/// The first `count` of these lines; if there are more, the last one ends with an ellipsis.
pub(super) fn cut(mut lines: Vec<Line<'static>>, count: usize, width: usize) -> Vec<Line<'static>> {
    if lines.len() > count {
        lines.truncate(count);
        if let Some(last) = lines.last_mut() {
            let mut text = last.to_string();
            while Line::from(text.as_str()).width() >= width.max(1) {
                text.pop();
            }
            *last = Line::from(text + "…").style(last.style);
        }
    }
    lines
}

/// The filter that is being typed, and the keys that work meanwhile.
fn typed_filter(model: &Model, width: usize) -> Vec<Line<'static>> {
    const KEYS: [&str; 3] = ["Enter keep", "Esc drop", "Ctrl-U clear"];
    let filter = Escaped(model.filter()).to_string();
    let mut typed = Line::from(vec!["filter: ".bold(), filter.into(), "_".into()]);
    let keys = KEYS.join(GAP);
    if typed.width() + GAP.len() + keys.len() <= width {
        typed.push_span(format!("{GAP}{keys}"));
        return vec![typed];
    }
    let keys = wrapped(KEYS.into_iter(), GAP, width);
    std::iter::once(typed)
        .chain(keys.into_iter().map(Line::from))
        .collect()
}

/// The keys that work now, the least important left out if there is no room for them.
fn keys(model: &Model, width: usize) -> String {
    if model.shown_count() == 0 && !model.filter().is_empty() {
        return "no row has the filter in its name: / changes it, Esc clears it".to_owned();
    }
    let (sort, reverse, switch) = ("s sort", "r reverse", "e enable or disable");
    let filter = if model.filter().is_empty() {
        "/ filter"
    } else {
        "/ filter  Esc clears it"
    };
    let (pause, left_out) = if model.is_paused() {
        ("p resume", [reverse, sort, filter, switch, "p resume"])
    } else {
        ("p pause", [reverse, sort, "p pause", filter, switch])
    };
    let mut keys = vec!["q quit", sort, reverse, filter, switch, pause, "? keys"];
    if !has_switch(model) {
        keys.retain(|key| *key != switch);
    }
    for key in left_out {
        if keys.join(GAP).len() > width {
            keys.retain(|one| *one != key);
        }
    }
    keys.join(GAP)
}

/// Whether there may be probes to enable or disable: false if only functions are shown.
fn has_switch(model: &Model) -> bool {
    model.kinds().contains(&RowKind::Probe)
}

/// What each key does now.
fn help(model: &Model) -> Vec<&'static str> {
    let filter: &[&str] = if model.filter().is_empty() {
        &["/: filter names, Enter keeps it, Esc drops it"]
    } else {
        &[
            "/: change the filter, Ctrl-U clears it, Enter keeps it, Esc drops the change",
            "Esc: clear the filter, once help is closed",
        ]
    };
    let pause = if model.is_paused() {
        "p: resume; the figures are frozen, states are updated, counting continues"
    } else {
        "p: pause the display; counting continues"
    };
    let switch = "e Enter space: enable or disable the selected probe, or the only one";
    let mut before = vec!["arrows j k PgUp PgDn Home End: select"];
    before.extend(has_switch(model).then_some(switch));
    before.extend(["s: sort by rate, hits, name", "r: reverse"]);
    let after = [
        pause,
        "Ctrl-L: redraw",
        "Ctrl-Z: suspend",
        "q Ctrl-C: quit",
        "Quitting removes all instrumentation, and undoes what was enabled or disabled here.",
    ];
    let events: &[&str] = if model.are_events_off() {
        &["No line for the GC: runtime events are off; `gc` switches them on."]
    } else {
        &[]
    };
    [&before[..], filter, &after, events].concat()
}

/// Breaks help into pages of `room` lines. The last line of each says which key shows the next page, or closes help.
fn pages(help: &[&str], width: usize, room: usize) -> Vec<Vec<String>> {
    let mut lines = Vec::new();
    for item in help {
        let last = lines.last().filter(|last: &&String| {
            Line::from(last.as_str()).width() + GAP.len() + item.len() <= width
        });
        match last {
            Some(last) => {
                let joined = format!("{last}{GAP}{item}");
                lines.pop();
                lines.push(joined);
            }
            None => lines.extend(wrapped(item.split(' '), " ", width)),
        }
    }
    let on_page = room.saturating_sub(1).max(1);
    let count = lines.len().div_ceil(on_page);
    let pages = lines.chunks(on_page).enumerate().map(|(index, lines)| {
        let next = if index + 1 < count {
            format!("?: more ({} of {count})", index + 1)
        } else {
            "? Esc: less help".to_owned()
        };
        lines.iter().cloned().chain([next]).collect()
    });
    pages.collect()
}

/// Joins words to lines that are at most `width` wide, except for a word that is wider.
fn wrapped<'w>(words: impl Iterator<Item = &'w str>, gap: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words {
        let Some(line) = lines.last_mut() else { break };
        let joined = if line.is_empty() {
            word.to_owned()
        } else {
            format!("{line}{gap}{word}")
        };
        if line.is_empty() || Line::from(joined.as_str()).width() <= width {
            *line = joined;
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}
