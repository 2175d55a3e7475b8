//! What is recorded of the calls of a function that is watched: how many arguments, where they are, and what is copied
//! of what they point to.

use std::collections::HashMap;
use std::num::NonZeroU64;

use iced_x86::Register;
use nix::fcntl::OFlag;

use crate::address::{FileAddr, LiveAddr};
use crate::elf::functions::FunctionName;
use crate::elf::mangling::Language;
use crate::elf::parameters::{self, RegisterValue, Signature};
use crate::expression::MAX_ARGUMENTS;
use crate::expression::{Parameter, ParameterKind, Scope};
use crate::functions::{FunctionObject, FunctionPlace, Functions, SelectedBy};
use crate::observe::functions::arities::Currying;
use crate::observe::functions::usdt_arguments::{UsdtArgument, usdt_arguments};
use crate::observe::observation::Observation;
use crate::observe::role::{
    ArgumentFormat, ArgumentSource, FunctionPart, WatchRole, WatchedFunction, WordKind,
};
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;

/// How the calls of a function are recorded.
#[derive(Clone, Debug)]
pub(crate) struct Watching {
    pub(crate) function: WatchedFunction,
    /// How many arguments are recorded.
    arguments: usize,
    /// Whether the function is known to have that many, or at least that many if they are six. An instruction has none.
    is_number_known: bool,
    /// The arguments of a USDT probe.
    usdt: Option<Vec<UsdtArgument>>,
    /// The signature of a function of C, C++ or Rust, if it is known.
    signature: Option<Signature>,
    /// See [`WatchRole::sample`].
    sample: Option<NonZeroU64>,
}

/// What is known of the arguments and results of functions, and which of them are recorded.
pub(crate) struct KnownArguments {
    /// Whether trampolines may ask the kernel which memory can be read.
    may_ask_kernel: bool,
    /// How many arguments are recorded if it is not known how many there are.
    unknown_arguments: usize,
    /// Whether results are recorded.
    has_results: bool,
    /// Whether all exits are recorded.
    has_exits: bool,
    sample: Option<NonZeroU64>,
    /// How many arguments functions of OCaml have.
    ocaml_arguments: HashMap<LiveAddr, usize>,
    /// What other functions are passed in general registers.
    signatures: HashMap<LiveAddr, Signature>,
}

impl KnownArguments {
    /// Finds out what is known of the functions of a process that are `watched`, and of those whose calls are
    /// `filtered`.
    pub(crate) fn of(
        pid: i32,
        observation: &Observation,
        functions: &Functions,
        watched: &[FunctionPlace<'_>],
        filtered: &[FunctionPlace<'_>],
    ) -> KnownArguments {
        let mut known = KnownArguments {
            may_ask_kernel: false,
            unknown_arguments: observation.unknown_arguments.min(MAX_ARGUMENTS),
            has_results: observation.watches_results,
            has_exits: observation.watches_exits,
            sample: observation.sample,
            ocaml_arguments: HashMap::new(),
            signatures: HashMap::new(),
        };
        let asks_of_functions = !watched.is_empty() || !filtered.is_empty();
        if !asks_of_functions && observation.usdt_ends().is_empty() {
            return known;
        }
        if let Ok(process) = Process::open(pid) {
            known.may_ask_kernel = OwnFilters::of(&process).allow_questions();
            if !asks_of_functions {
                return known;
            }
            known.ocaml_arguments = arities(&process, functions.objects());
            known.signatures = signatures(watched);
            known.signatures.extend(signatures(filtered));
        }
        known
    }

    /// Returns whether results are recorded, too.
    pub(crate) fn has_results(&self) -> bool {
        self.has_results
    }

    /// Returns whether all exits are recorded, too.
    pub(crate) fn has_exits(&self) -> bool {
        self.has_exits
    }

    /// Returns what expressions can ask of the calls of a function, and where its arguments are. Blocks of OCaml are
    /// read only if an argument is certainly a value. Strings of C, and arguments that may be anywhere in memory, are
    /// read only if the kernel may be asked whether the memory is readable.
    pub(crate) fn scope(
        &self,
        name: &str,
        place: &FunctionPlace<'_>,
        address: LiveAddr,
        is_ocaml: bool,
        may_be_ocaml: bool,
    ) -> (Scope, Vec<ArgumentSource>) {
        if let SelectedBy::Usdt { name, .. } = &place.selected_by {
            let arguments = of_usdt(place);
            let parameters = arguments.iter();
            let parameters = parameters.map(|it| it.parameter(self.may_ask_kernel));
            let scope = Scope::of(format!("USDT probe {name}"), &**name, parameters.collect());
            let scope = self.limited(scope);
            return (scope, arguments.iter().map(|it| it.source).collect());
        }
        let is_inside = place.offset > 0 || place.selected_by.name().is_some();
        let may_be_go = !is_ocaml && has_go(place);
        let (kinds, registers) = if is_ocaml {
            let count = self.ocaml_arguments.get(&address);
            let kinds = count.map(|count| vec![ParameterKind::Value; *count]);
            (kinds, &OCAML_ARGUMENTS)
        } else {
            let known = self.signatures.get(&address);
            let kinds = known.map(|it| {
                it.arguments
                    .iter()
                    .map(|it| format_of(*it).kind())
                    .collect()
            });
            // Expressions can ask for the word in any argument register of C, whatever it is.
            let words = || (!may_be_go).then(|| vec![ParameterKind::Word; MAX_ARGUMENTS]);
            (kinds.or_else(words), &C_ARGUMENTS)
        };
        let point = match &place.selected_by {
            SelectedBy::Line(line) => format!("source line {line}"),
            _ if is_inside => format!("instruction {name}"),
            _ if may_be_go && kinds.is_none() => format!("function {name} of Go"),
            _ => format!("function {name}"),
        };
        // A function without a name may have either calling convention.
        let kinds = kinds.filter(|_| !is_inside && is_ocaml == may_be_ocaml);
        let scope = match kinds {
            Some(kinds) => {
                let kinds = kinds.into_iter().take(MAX_ARGUMENTS);
                let parameters = kinds.map(|kind| Parameter { name: None, kind });
                Scope::of(point, name, parameters.collect())
            }
            None => Scope::without_arguments(point, name),
        };
        let scope = if is_inside { scope } else { scope.of_entry() };
        let scope = self.limited(scope);
        (scope, registers.map(ArgumentSource::Register).to_vec())
    }

    /// Returns a scope in which the kernel is asked only if it may be.
    fn limited(&self, scope: Scope) -> Scope {
        scope.asking_kernel_if(self.may_ask_kernel)
    }

    /// Returns what expressions can ask where a function returns, and where the result is.
    pub(crate) fn scope_of_exits(
        &self,
        name: &str,
        address: LiveAddr,
        is_ocaml: bool,
    ) -> (Scope, Vec<ArgumentSource>) {
        let result = if is_ocaml {
            ParameterKind::Value
        } else {
            let known = self.signatures.get(&address);
            let result = known.and_then(|it| it.result);
            result.map_or(ParameterKind::Word, |it| format_of(it).kind())
        };
        let scope = Scope::of_exits(format!("function {name}"), name, result);
        (self.limited(scope), vec![ArgumentSource::RESULT])
    }

    /// Returns how calls are recorded at a place in a function, without its results.
    pub(crate) fn of_place(
        &self,
        place: &FunctionPlace<'_>,
        address: LiveAddr,
        is_ocaml: bool,
        may_be_ocaml: bool,
    ) -> Watching {
        let is_inside = place.offset > 0 || place.selected_by.name().is_some();
        // A function without a name may have either calling convention.
        let has_arguments = !is_inside && is_ocaml == may_be_ocaml;
        let signature = self.signatures.get(&address).filter(|_| !is_ocaml);
        let known = if is_ocaml {
            self.ocaml_arguments.get(&address).copied()
        } else {
            signature.map(|it| it.arguments.len())
        };
        // OxCaml has functions whose results are no values.
        let result = if !self.may_ask_kernel {
            WordKind::Numbers
        } else if is_ocaml {
            WordKind::MaybeValues
        } else {
            WordKind::Text
        };
        let are_values = is_ocaml && known.is_some();
        let usdt = place.selected_by.is_usdt().then(|| of_usdt(place));
        let words = if usdt.is_some() && self.may_ask_kernel {
            WordKind::Text
        } else if are_values {
            WordKind::Values
        } else {
            result
        };
        let unknown_arguments = if !is_ocaml && has_go(place) {
            0
        } else {
            self.unknown_arguments
        };
        let arguments = known.unwrap_or(unknown_arguments);
        Watching {
            function: WatchedFunction {
                words,
                result,
                has_results: false,
                has_only_results: false,
                exits_on: None,
                part: if is_inside {
                    FunctionPart::Inside
                } else {
                    FunctionPart::Entry
                },
                is_ocaml,
                is_from_start: false,
            },
            arguments: if has_arguments {
                arguments.min(MAX_ARGUMENTS)
            } else {
                0
            },
            is_number_known: is_inside || known.is_some(),
            usdt,
            signature: signature.filter(|_| !is_inside).cloned(),
            sample: self.sample,
        }
    }
}

/// Returns the general register of the first argument of a USDT probe, if it may distinguish the probe's events.
pub(crate) fn marking_register(place: &FunctionPlace<'_>) -> Option<Register> {
    let UsdtArgument { source, format } = *of_usdt(place).first()?;
    source
        .register_of_number(format.size)
        .filter(|_| !format.is_float)
}

/// Returns the arguments of the site of a USDT probe.
fn of_usdt(place: &FunctionPlace<'_>) -> Vec<UsdtArgument> {
    let SelectedBy::Usdt { arguments, .. } = &place.selected_by else {
        return Vec::new();
    };
    let object = place.function.object;
    usdt_arguments(arguments, |name, offset, size| {
        let found = object.elf().data_symbol(name)?;
        let address = FileAddr(found.0.wrapping_add(offset as u64));
        let mut segments = object.elf().loaded();
        let is_mapped = segments.any(|segment| segment.holds_in_memory(address, size.into()));
        Some(object.load_bias()?.live(address)).filter(|_| is_mapped)
    })
}

/// Returns whether functions of unknown signature in the file of a place may be of Go, which passes arguments in other
/// registers.
fn has_go(place: &FunctionPlace<'_>) -> bool {
    place.function.object.elf().has_go()
}

/// Returns what a value of C in a general register is.
fn format_of(value: RegisterValue) -> ArgumentFormat {
    ArgumentFormat {
        size: value.size,
        signed: value.signed,
        is_float: false,
    }
}

/// Returns the arguments that functions of C, C++ and Rust have in general registers, by the addresses of the
/// functions, as far as the debugging information tells. A function that the compiler has derived from another
/// (`f.isra.0`) is left out: its arguments may differ from those that the debugging information describes.
fn signatures(watched: &[FunctionPlace<'_>]) -> HashMap<LiveAddr, Signature> {
    let is_same = |one: &FunctionPlace<'_>, other: &FunctionPlace<'_>| {
        std::ptr::eq(one.function.object, other.function.object)
    };
    let is_derived = |name: FunctionName<'_>| {
        let mut suffixes = [".isra.", ".constprop.", ".part."].into_iter();
        suffixes.any(|suffix| name.symbol.contains(suffix))
    };
    let mut known = HashMap::new();
    for places in watched.chunk_by(is_same) {
        let object = places[0].function.object;
        let Some(bias) = object.load_bias() else {
            continue;
        };
        let functions = places.iter().map(|place| place.function.function);
        let functions = functions.filter(|it| !it.names().any(is_derived));
        let functions = functions.map(|it| it.range().start).collect();
        let found = parameters::in_general_registers(object.elf(), &functions);
        known.extend(found.into_iter().map(|(at, it)| (bias.live(at), it)));
    }
    known
}

/// Returns the number of arguments of OCaml functions, by address, as far as the data of the process contain it.
fn arities(process: &Process, objects: &[FunctionObject]) -> HashMap<LiveAddr, usize> {
    let Ok(memory) = ProcessMemory::open(process, OFlag::O_RDONLY) else {
        return HashMap::new();
    };
    let is_ocaml = |object: &&FunctionObject| {
        let mut functions = object.table().functions();
        let is_ocaml = |name: FunctionName<'_>| name.language == Some(Language::Ocaml);
        functions.any(|function| function.names().any(is_ocaml))
    };
    let objects: Vec<&FunctionObject> = objects.iter().filter(is_ocaml).collect();
    let mut currying = Currying::default();
    for object in &objects {
        if let Some(bias) = object.load_bias() {
            currying.add(object.table(), bias);
        }
    }
    let arities = objects.iter().filter_map(|object| {
        let bias = object.load_bias()?;
        Some(currying.arities(object.elf(), bias, &memory))
    });
    arities.flatten().collect()
}

impl Watching {
    /// Returns whether it is known how many arguments the function has.
    pub(crate) fn is_number_known(&self) -> bool {
        self.is_number_known
    }

    pub(crate) fn has_arguments(&self) -> bool {
        !self.arguments().is_empty()
    }

    /// Returns what is recorded at a part of the function: its entry, 0, or an exit.
    pub(crate) fn role(&self, part: usize, is_from_start: bool) -> WatchRole {
        let is_exit = part > 0;
        let mut function = WatchedFunction {
            is_from_start,
            ..self.function
        };
        if is_exit {
            function.part = FunctionPart::Exit;
        }
        WatchRole {
            point: 0,
            arguments: if is_exit {
                Vec::new()
            } else {
                self.arguments()
            },
            sample: self.sample,
            formats: self.formats(),
            result_format: match &self.signature {
                Some(signature) => signature.result.map(format_of),
                None => Some(ArgumentFormat::WORD),
            },
            function: Some(function),
            is_ocaml: function.is_ocaml,
        }
    }

    /// Returns the formats of the recorded arguments, as far as they are known.
    fn formats(&self) -> Vec<ArgumentFormat> {
        let of_usdt = self.usdt.iter().flatten().map(|it| it.format);
        let of_function = self.signature.iter().flat_map(|it| &it.arguments);
        let of_function = of_function.take(MAX_ARGUMENTS).map(|it| format_of(*it));
        of_usdt.chain(of_function).collect()
    }

    /// Returns where the recorded arguments are: for a function, the registers in which it is passed them.
    fn arguments(&self) -> Vec<ArgumentSource> {
        if let Some(arguments) = &self.usdt {
            let arguments = arguments.iter().take(MAX_ARGUMENTS);
            return arguments.map(|it| it.source).collect();
        }
        let registers: &[Register] = if self.function.is_ocaml {
            &OCAML_ARGUMENTS
        } else {
            &C_ARGUMENTS
        };
        let registers = registers.iter().take(self.arguments);
        registers.map(|it| ArgumentSource::Register(*it)).collect()
    }
}

/// The registers of the first arguments (asmcomp/amd64/proc.ml of OCaml; psABI 3.2.3).
const OCAML_ARGUMENTS: [Register; MAX_ARGUMENTS] = [
    Register::RAX,
    Register::RBX,
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
];
const C_ARGUMENTS: [Register; MAX_ARGUMENTS] = [
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
];
