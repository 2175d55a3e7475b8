//! Functions as arguments: by globs for their names, by address, or by source line.

use probes_lib::{CollectorWork, FunctionSelector, Glob, LiveAddr};

use super::checked::{EMPTY_NAME, each_once};
use crate::text::is_number;

// Some functions, by what they are called or where they are.
#[derive(Debug, clap::Args)]
pub(crate) struct NamedFunctionFlags {
    /// Observe functions: globs, 0xADDRESS, FILE:LINE; may be repeated
    #[arg(id = "fn", long, value_name = "GLOBS", value_parser = functions)]
    lists: Vec<FunctionList>,
}

// Some functions.
#[derive(Debug, clap::Args)]
pub(crate) struct FunctionFlags {
    #[command(flatten)]
    named: NamedFunctionFlags,
    /// Observe OCaml's GC, a comma list: minor, slice, major, compact, stw
    #[arg(id = "gc", long, value_name = "WORK", value_delimiter = ',', value_parser = work)]
    collector: Vec<CollectorWork>,
}

/// The functions that one flag or argument selects, each as it was typed and what that means.
#[derive(Clone, Debug)]
pub(crate) struct FunctionList(pub(crate) Vec<FunctionArgument>);

/// A function, or several, as it was typed and what that means.
#[derive(Clone, Debug)]
pub(crate) struct FunctionArgument {
    pub(crate) typed: String,
    pub(crate) selector: FunctionSelector,
}

impl NamedFunctionFlags {
    /// The functions, each glob or address once.
    pub(crate) fn selectors(self) -> Result<Vec<FunctionSelector>, String> {
        let lists = self.lists.into_iter();
        let (typed, selectors): (Vec<String>, Vec<FunctionSelector>) = lists
            .flat_map(|list| list.0)
            .map(|it| (it.typed, it.selector))
            .unzip();
        each_once("-fn", &typed)?;
        Ok(selectors)
    }
}

impl FunctionFlags {
    /// The functions, each glob or address once.
    pub(crate) fn selectors(self) -> Result<Vec<FunctionSelector>, String> {
        let selectors = self.named.selectors()?;
        each_once("-gc", &self.collector)?;
        let collector = self.collector.into_iter();
        let collector = collector.map(FunctionSelector::Collector);
        Ok(selectors.into_iter().chain(collector).collect())
    }
}

// Functions, or the collector, of a program that is started. The same as above, but -gc may be without WORK.
#[derive(Debug, clap::Args)]
pub(crate) struct FunctionOrCollectorFlags {
    #[command(flatten)]
    named: NamedFunctionFlags,
    /// Report OCaml 5's GC, or observe minor, slice, major, compact, stw
    #[arg(id = "gc", long, value_name = "WORK", value_parser = collected, num_args = 0..=1, default_missing_value = "")]
    collector: Vec<Collected>,
}

/// A value of -gc.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Collected {
    Report,
    Work(Vec<CollectorWork>),
}

impl FunctionOrCollectorFlags {
    /// The functions, each glob or address once, and whether the collector is reported.
    pub(crate) fn check(self) -> Result<(Vec<FunctionSelector>, bool), String> {
        let mut is_reported = false;
        let mut collector = Vec::new();
        for collected in self.collector {
            match collected {
                Collected::Report => is_reported = true,
                Collected::Work(work) => collector.extend(work),
            }
        }
        let named = self.named;
        let functions = FunctionFlags { named, collector };
        Ok((functions.selectors()?, is_reported))
    }
}

fn collected(typed: &str) -> Result<Collected, String> {
    if typed.is_empty() {
        return Ok(Collected::Report);
    }
    let work = typed.split(',').map(work);
    work.collect::<Result<_, _>>().map(Collected::Work)
}

/// Reads one WORK of the collector, which may have spaces around it in a comma list.
fn work(typed: &str) -> Result<CollectorWork, String> {
    typed.trim().parse()
}

/// Reads a comma list of functions.
pub(crate) fn functions(typed: &str) -> Result<FunctionList, String> {
    let list = parts(typed).into_iter().map(function);
    list.collect::<Result<_, String>>().map(FunctionList)
}

/// Splits a comma list at the commas that [`ends_part`] accepts.
fn parts(list: &str) -> Vec<&str> {
    let mut start = 0;
    let commas = list.match_indices(',').map(|(at, _)| at);
    let commas = commas.filter(|&at| ends_part(list, at));
    let parts = commas.chain([list.len()]).map(|end| {
        let part = &list[start..end];
        start = end + 1;
        part.trim()
    });
    parts.collect()
}

/// Returns whether the comma at `at` is between two functions. One that a space follows belongs to a name of C++ or
/// Rust, such as `f(int, int)`, if the list has the brackets of such names.
pub(crate) fn ends_part(list: &str, at: usize) -> bool {
    !list[at + 1..].starts_with(' ') || !list.contains(['(', ')', '<', '>'])
}

/// Reads a glob, an address or a source line.
fn function(typed: &str) -> Result<FunctionArgument, String> {
    Ok(FunctionArgument {
        typed: typed.to_owned(),
        selector: selector(typed)?,
    })
}

fn selector(typed: &str) -> Result<FunctionSelector, String> {
    if typed.is_empty() {
        return Err(EMPTY_NAME.to_owned());
    }
    if typed.starts_with('-') {
        return Err(format!("\"{typed}\" is not the name of a function"));
    }
    if let Some(digits) = typed.strip_prefix("0x") {
        // `from_str_radix` would also take a sign.
        let is_number = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let address = u64::from_str_radix(digits, 16).ok().filter(|_| is_number);
        let address = address.ok_or_else(|| format!("\"{typed}\" is not an address"))?;
        return Ok(FunctionSelector::Address(LiveAddr(address)));
    }
    if let Some((file, line)) = source_line(typed) {
        let line = line.parse().ok().filter(|&line| line > 0);
        let line = line.ok_or_else(|| format!("\"{typed}\" is not a line of a file"))?;
        let file = file.to_owned();
        return Ok(FunctionSelector::Line { file, line });
    }
    let glob: Glob = typed
        .parse()
        .map_err(|error| format!("\"{typed}\" is {error}"))?;
    Ok(FunctionSelector::Glob(glob))
}

/// Splits `src/http.ml:42`. No function has a number after a single colon in its name.
fn source_line(typed: &str) -> Option<(&str, &str)> {
    let (file, line) = typed.rsplit_once(':')?;
    let is_file = !file.is_empty() && !file.ends_with(':');
    (is_file && is_number(line)).then_some((file, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_before_spaces_belong_to_bracketed_names() {
        for (list, expected) in [
            ("main", &["main"][..]),
            ("List.*,caml_[ab]?", &["List.*", "caml_[ab]?"]),
            ("f(int, char),g<A, B>::h", &["f(int, char)", "g<A, B>::h"]),
            ("*int, char)", &["*int, char)"]),
            (
                "List.map, List.iter ,main",
                &["List.map", "List.iter", "main"],
            ),
            ("a,,b,", &["a", "", "b", ""]),
            ("", &[""]),
        ] {
            assert_eq!(parts(list), expected, "{list}");
        }
    }

    #[test]
    fn functions_are_globs_addresses_or_lines() {
        let address = selector("0x55d0c3b0");
        assert!(matches!(
            address,
            Ok(FunctionSelector::Address(LiveAddr(0x55d0_c3b0)))
        ));
        let glob = selector("Stdlib.List.*");
        assert!(
            matches!(glob, Ok(FunctionSelector::Glob(glob)) if glob.as_str() == "Stdlib.List.*")
        );
        let line = selector("src/http.ml:42");
        assert!(matches!(
            line,
            Ok(FunctionSelector::Line { file, line: 42 }) if file == "src/http.ml"
        ));
        for glob in ["std::7", "N::f", ":1", "a:b", "a:", "f:1*"] {
            assert!(
                matches!(selector(glob), Ok(FunctionSelector::Glob(_))),
                "{glob}"
            );
        }
        for (typed, error) in [
            ("a.c:0", "\"a.c:0\" is not a line of a file"),
            (
                "a.c:4294967296",
                "\"a.c:4294967296\" is not a line of a file",
            ),
            ("", EMPTY_NAME),
            ("-x", "\"-x\" is not the name of a function"),
            ("0x", "\"0x\" is not an address"),
            ("0x+1", "\"0x+1\" is not an address"),
            (
                "0x10000000000000000",
                "\"0x10000000000000000\" is not an address",
            ),
        ] {
            assert_eq!(selector(typed).err().as_deref(), Some(error));
        }
        let error = selector("a[").err();
        let expected = "\"a[\" is not a glob: it has a [ without a ]";
        assert_eq!(error.as_deref(), Some(expected));
    }
}
