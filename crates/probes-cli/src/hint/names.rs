//! Hints about probes and functions that are not there, or cannot be selected or observed.

use probes_lib::{FunctionError, ProbeError, Refusal};

use super::{CommandTarget, NO_BYTECODE, NOT_LIVE, listing, mistaken, repair, shell};

const NO_FUNCTIONS_OF_BYTECODE: &str = "the program is OCaml bytecode, whose functions are no native code: build it with ocamlopt, or as a .exe of dune that is not bytecode";

/// The hint about probes that do not exist, that cannot be selected in the way that was asked for,
/// or that cannot be changed in the state that they are in.
pub(super) fn of_probe(kind: &ProbeError, target: &CommandTarget) -> Option<String> {
    let pid = match target {
        CommandTarget::Process(pid) | CommandTarget::Attached(pid) => Some(*pid),
        CommandTarget::Program(_) | CommandTarget::File(_) => None,
    };
    let hint = match kind {
        ProbeError::NoProbes {
            runs_bytecode: true,
            ..
        } => NO_BYTECODE,
        ProbeError::NoProbes { unreadable, .. } if !unreadable.is_empty() => {
            "root (outside of containers) can read files that others may not read, or that were \
             deleted or replaced"
        }
        ProbeError::NoProbes { .. } => {
            if let Some(hint) = pid.and_then(shell::with_children) {
                return Some(hint);
            }
            let built = "was it built by a compiler with probes, or with ppx_probe? was the code with the probes \
                         linked in? was .note.stapsdt kept when it was stripped?";
            return Some(match target {
                CommandTarget::Process(_) => {
                    format!(
                        "{built} `count -fn GLOB` counts functions of any program, `latency -fn GLOB` times them"
                    )
                }
                CommandTarget::Program(_) => format!(
                    "{built} `trace -count -fn GLOB` counts functions of any program, `trace -latency -fn GLOB` times them"
                ),
                CommandTarget::File(_) => {
                    format!("{built} `list -functions` lists the functions of any program")
                }
                CommandTarget::Attached(_) => built.to_owned(),
            });
        }
        ProbeError::Unknown { name, .. } => {
            let as_function = mistaken::as_function(name, target);
            let list = || format!("`{}` lists the names", listing(target));
            return Some(as_function.unwrap_or_else(list));
        }
        ProbeError::NoMatch { .. } => {
            return Some(format!(
                "`{}` lists the names; a regular expression has to match from the start of a name: `.*_end`, not `_end`",
                listing(target)
            ));
        }
        ProbeError::SelectedTwice { .. } => "select each probe once",
        ProbeError::Conflict { .. } => "either enable the probe or disable it",
        ProbeError::NotEnabled { .. } => {
            "leave it out; -disable-all, -disable-regexp and -disable-pair skip probes that are disabled"
        }
        ProbeError::CounterFull { name } | ProbeError::Inconsistent { name, .. } => {
            return Some(repair(pid?, name));
        }
        ProbeError::UnequalCounters { name, .. } => {
            let pid = pid?;
            return Some(format!(
                "`ocaml-probes attach -pid {pid} -force -disable {name}` disables all its sites"
            ));
        }
        ProbeError::UnexpectedSite { found, .. } if found.has_breakpoint() => {
            "remove the breakpoint or uprobe, or leave this probe out"
        }
        ProbeError::UnexpectedSite { .. } => {
            "something else has changed this code: leave this probe out, or restart the program"
        }
        ProbeError::LiveUnloadable { .. } => NOT_LIVE,
        _ => return None,
    };
    Some(hint.to_owned())
}

pub(super) fn of_function(kind: &FunctionError, target: &CommandTarget) -> Option<String> {
    let list = target.to_list();
    let hint = match kind {
        FunctionError::NoMatch {
            runs_bytecode: true,
            ..
        } => NO_FUNCTIONS_OF_BYTECODE.to_owned(),
        FunctionError::NoMatch {
            is_probe_site: true,
            ..
        } => format!(
            "this is the function that ppx_probe makes for a probe site, named after the function around it; that one may be \
             inlined, and then has no code of its own: `{}` lists the probes, and `count -probe NAME` counts hits",
            listing(target)
        ),
        FunctionError::NoMatch {
            glob,
            unnamed,
            near,
            ..
        } => unmatched(glob, *unnamed > 0 && near.is_empty(), target),
        FunctionError::NoneAt { .. } if matches!(target, CommandTarget::Program(_)) => format!(
            "a position-independent program, and a library, has its addresses only when it runs: give the name; \
             `{list} -functions` lists the names"
        ),
        FunctionError::NoneAt { .. } => {
            format!("`{list} -functions` lists the addresses of its functions")
        }
        // `list -provider any` itself has found none.
        FunctionError::NoUsdt { glob, .. } if glob == "*:*" => return None,
        FunctionError::NoUsdt { is_ocamls: true, .. } => {
            "give -probe NAME for a probe of OCaml; -usdt is for those of other providers".to_owned()
        }
        FunctionError::NoUsdt { .. } => format!("`{list} -provider any` lists the USDT probes"),
        FunctionError::NoRuntime { .. } => {
            "-gc is for OCaml programs that have the symbols of their runtime: do not strip them".to_owned()
        }
        FunctionError::NeedsOcaml5 { .. } => {
            "-gc stw needs OCaml 5; minor, slice, major and compact work with OCaml 4, too".to_owned()
        }
        FunctionError::NoCollector { .. } => {
            format!("`{list} -functions 'caml_*'` lists the functions of its runtime, for -fn")
        }
        FunctionError::NoLines { .. } => {
            "build it with -g, and do not strip it, or install its separate debug file; `-fn NAME` and `-fn 0xADDRESS` need no source lines"
                .to_owned()
        }
        FunctionError::UnknownFile { .. } => {
            format!("`{list} -functions` lists the source line of each function")
        }
        FunctionError::SeveralFiles { .. } => "give more of its path".to_owned(),
        FunctionError::NoCodeAt { file, near, .. } => {
            format!("give {file}:{}, which has code", near.last()?)
        }
        FunctionError::TooManyTimed { .. } => "give globs that match fewer functions".to_owned(),
        FunctionError::NonePossible { refused, is_usdt } => refused_everywhere(refused, *is_usdt, &list),
        _ => return None,
    };
    Some(hint)
}

/// The hint about a glob that matches no function; if the program `is_stripped`, that may be why.
fn unmatched(glob: &str, is_stripped: bool, target: &CommandTarget) -> String {
    if let Some(as_probe) = mistaken::as_probe(glob, target) {
        return as_probe;
    }
    let of_shell = match target {
        CommandTarget::Process(pid) => shell::with_children(*pid),
        _ => None,
    };
    if let Some(of_shell) = of_shell {
        return of_shell;
    }
    if glob.contains(", ") {
        return "a comma with a space after it belongs to a name if there are parentheses or angle brackets: \
                write the list without spaces, or repeat the flag"
            .to_owned();
    }
    if is_stripped {
        return "a separate debug file of the same build has the names (docs/functions.md says where it is looked for); or give \
                addresses: `-fn 0xADDRESS`"
            .to_owned();
    }
    let later = match target {
        CommandTarget::Program(_) => {
            "; functions of libraries that the program loads itself are not found at its start"
        }
        _ => "",
    };
    format!(
        "`{} -functions` lists the names; a glob has to match a whole name: `*.map`, not `map`{later}",
        target.to_list()
    )
}

/// The hint about functions of which none can be observed.
fn refused_everywhere(refused: &[(String, Refusal)], is_usdt: bool, list: &str) -> String {
    let is_breakpoint = |(_, why): &(String, Refusal)| matches!(why, Refusal::Breakpoint { .. });
    if refused.iter().all(is_breakpoint) {
        "remove the breakpoint or uprobe".to_owned()
    } else if let [(_, Refusal::NoInstruction { .. }), ..] = refused {
        "give the address at which an instruction begins: `x/i` of gdb shows instructions with their addresses"
            .to_owned()
    } else if let [(name, Refusal::NotEntry), ..] = refused {
        // A source line is shown with its function: `http.ml:42 in Http.parse`.
        let place = name
            .split_once(" in ")
            .map_or("0xADDRESS", |(line, _)| line);
        format!("`count -fn {place}` counts how often it is executed")
    } else if is_usdt {
        format!(
            "`{list} -provider any -sites` shows where the sites of USDT probes are; docs/functions.md explains the reasons"
        )
    } else {
        format!(
            "`{list} -functions` says of each function whether it can be counted and timed; a glob with *, ? or [ leaves out those that cannot"
        )
    }
}
