//! [`Point`]: a place in the code of a process whose executions, called hits, can be observed; and
//! [`Role`]: what is recorded of each hit. Only computes: no access to processes or files.
//!
//! A point is patched by a call of its trampoline, or a jump to it. The trampoline records the hit, does what
//! the displaced bytes did, and continues where they continue.
//!
//! ```text
//! site of a probe            not observed                observed
//! +0            90           nop                         nop
//! +1 the patch  3d <rel32>   cmp: the probe is disabled  call trampoline, which ends with ret
//!               e8 <rel32>   call wrapper: enabled       call trampoline, which ends with jmp wrapper
//! +6                         both return to here
//!
//! instruction (patch_plan)   as the file has it          jmp trampoline, which ends with the displaced
//!                                                        instructions and a jump to what follows them
//! ```

use std::num::NonZeroU64;
use std::sync::Arc;

use iced_x86::Register;

use crate::address::{LiveAddr, PAGE};
use crate::elf::arguments::{Argument, Operand};
use crate::expression::typed::KeyPart;
use crate::expression::{Filter, IntegerExpression};
use crate::observe::buckets::Linear;
use crate::observe::frame_id::FrameId;
use crate::patch_plan::jump::{SHORT_JMP, SHORT_LEN};
use crate::site::{CALL, CMP, INT3, JMP, OPCODE_OFFSET, SITE_LEN, SiteCode};

/// How many bytes a patch overwrites at most: an opcode and a displacement.
pub(crate) const PATCH_LEN: usize = 5;

/// The bytes of a patch, or those that it replaces: at most [`PATCH_LEN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchBytes {
    /// Zeros from `len` on.
    bytes: [u8; PATCH_LEN],
    len: u8,
}

impl PatchBytes {
    /// Returns the first of these bytes, as many as fit.
    pub(crate) fn of(from: &[u8]) -> PatchBytes {
        let len = from.len().min(PATCH_LEN);
        let mut bytes = [0; PATCH_LEN];
        bytes[..len].copy_from_slice(&from[..len]);
        PatchBytes {
            bytes,
            len: len as u8,
        }
    }
}

impl std::ops::Deref for PatchBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// A place in the code of a process that can be observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// Where it begins: at the nop of a probe's site, or at an instruction.
    pub(crate) address: LiveAddr,
    pub(crate) kind: PointKind,
}

/// What is patched at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PointKind {
    /// The site of a probe.
    Site {
        /// The operand of the displaced instruction: the distance (rel32) from the end of the site to the
        /// wrapper. Whether the displaced opcode was `cmp` or `call` is recorded in the tail of the trampoline.
        operand: [u8; 4],
    },
    /// An instruction, which a jump replaces.
    Instruction {
        /// The bytes that are overwritten at its address.
        before: PatchBytes,
        /// If the jump there is a short one, where it leads.
        island: Option<Island>,
        /// Whether it is an exit of a function whose entry is another point.
        is_exit: bool,
    },
}

/// Padding that a jump to a trampoline overwrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Island {
    pub(crate) at: LiveAddr,
    pub(crate) before: [u8; PATCH_LEN],
}

/// Bytes of a process that the patch of a point overwrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchPlace {
    pub(crate) at: LiveAddr,
    /// What is there while the point is not patched; of a site, while its probe is disabled, too.
    pub(crate) before: PatchBytes,
    /// What is there while it is patched.
    pub(crate) after: PatchBytes,
}

/// What the bytes of a place, found in memory, say of its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaceState {
    /// Its patch.
    Patched,
    /// Some bytes of its patch and some original ones: the process has discarded a page of the patch, or a tool was
    /// killed while it wrote.
    PartlyPatched,
    /// Its patch with breakpoints of another tool in it, which will write the original bytes over them.
    UnderBreakpoint,
    /// The original bytes: it was patched, and no longer is.
    Unpatched,
    /// Neither: something else has changed the code.
    Other,
}

impl Point {
    /// Returns the point for the site of a probe.
    pub(crate) fn probe_site(address: LiveAddr, code: SiteCode) -> Point {
        let operand = code.operand();
        Point {
            address,
            kind: PointKind::Site { operand },
        }
    }

    /// Returns the places that its patch overwrites: the island, if there is one, and that at the point. The trampoline
    /// must be within reach.
    pub(crate) fn places(&self, trampoline: LiveAddr) -> impl Iterator<Item = PatchPlace> + use<> {
        let near = |opcode, at: LiveAddr| {
            let displacement = trampoline.0.wrapping_sub(at.plus(PATCH_LEN as u64).0) as u32;
            let [a, b, c, d] = displacement.to_le_bytes();
            [opcode, a, b, c, d]
        };
        let (first, last) = match self.kind {
            PointKind::Site { .. } => {
                let at = self.address.plus(OPCODE_OFFSET);
                let place = PatchPlace {
                    at,
                    before: PatchBytes::of(&self.site_code(CMP)),
                    after: PatchBytes::of(&near(CALL, at)),
                };
                (None, place)
            }
            PointKind::Instruction { before, island, .. } => {
                let at = self.address;
                let after = match island {
                    None => near(JMP, at),
                    Some(Island { at: island, .. }) => {
                        let short = island.0.wrapping_sub(at.plus(SHORT_LEN).0);
                        [SHORT_JMP, short as u8, 0, 0, 0]
                    }
                };
                let place = PatchPlace {
                    at,
                    before,
                    after: PatchBytes::of(&after[..before.len()]),
                };
                let island = island.map(|Island { at, before }| PatchPlace {
                    at,
                    before: PatchBytes::of(&before),
                    after: PatchBytes::of(&near(JMP, at)),
                });
                (island, place)
            }
        };
        first.into_iter().chain([last])
    }

    /// Returns whether its patch can have been written by this tool: that of an instruction is within a page.
    pub(crate) fn is_possible(&self) -> bool {
        let PointKind::Instruction { before, island, .. } = self.kind else {
            return true;
        };
        let is_on_one_page = !crosses(self.address, PAGE);
        is_on_one_page
            && match island {
                None => !before.is_empty(),
                Some(island) => before.len() as u64 == SHORT_LEN && !crosses(island.at, PAGE),
            }
    }

    /// Returns whether a place may be written in steps: of a site, the opcode `cmp` first.
    pub(crate) fn is_written_in_steps(&self) -> bool {
        self.is_site()
    }

    /// Returns whether it is the site of a probe.
    pub(crate) fn is_site(&self) -> bool {
        matches!(self.kind, PointKind::Site { .. })
    }

    /// Returns whether it is an exit of a function whose entry is another point.
    pub(crate) fn is_exit(&self) -> bool {
        matches!(self.kind, PointKind::Instruction { is_exit: true, .. })
    }

    /// Returns where its trampoline jumps to in the end if it is the site of an enabled probe: the wrapper that the
    /// displaced call calls.
    pub(crate) fn wrapper(&self) -> Option<LiveAddr> {
        let PointKind::Site { operand } = self.kind else {
            return None;
        };
        let displacement = i64::from(i32::from_le_bytes(operand));
        let next = self.address.plus(SITE_LEN as u64);
        Some(next.plus(displacement as u64))
    }

    /// Returns the original bytes of one of its places; of a site, those of a probe that is enabled or disabled.
    pub(crate) fn unpatched(&self, place: &PatchPlace, enabled: bool) -> PatchBytes {
        match self.kind {
            PointKind::Site { .. } if enabled => PatchBytes::of(&self.site_code(CALL)),
            _ => place.before,
        }
    }

    fn site_code(&self, opcode: u8) -> [u8; PATCH_LEN] {
        let [a, b, c, d] = match self.kind {
            PointKind::Site { operand } => operand,
            PointKind::Instruction { .. } => [0; 4],
        };
        [opcode, a, b, c, d]
    }

    /// Returns whether the code found in memory is the site of this point, without a patch.
    pub(crate) fn is_unpatched(&self, found: SiteCode) -> bool {
        let PointKind::Site { operand } = self.kind else {
            return false;
        };
        found.is_pristine() && found.operand() == operand
    }

    /// Returns what the bytes `found` at a place say.
    pub(crate) fn judge(&self, place: &PatchPlace, found: [u8; PATCH_LEN]) -> PlaceState {
        let PointKind::Site { .. } = self.kind else {
            // It is written at once, so that it is never half patched.
            return match PatchBytes::of(&found[..place.after.len()]) {
                found if found == place.after => PlaceState::Patched,
                found if found == place.before => PlaceState::Unpatched,
                found if is_under_breakpoint(place, &found) => PlaceState::UnderBreakpoint,
                _ => PlaceState::Other,
            };
        };
        if found[..] == *place.after {
            PlaceState::Patched
        } else if is_half_patched(place, &found) {
            PlaceState::PartlyPatched
        } else if matches!(found[0], CMP | CALL) && is_mixed(place, &found) {
            PlaceState::Unpatched
        } else {
            PlaceState::Other
        }
    }
}

/// Returns whether `found` is a half-written patch of a site: the opcode is that of a disabled probe, and
/// each byte of the operand is either the original one or that of the patch. All four may be
/// original only if the patch crosses a page boundary, where patches are always written in
/// steps. There, the opcode may also be that of the patch, if the process has discarded the second page.
fn is_half_patched(place: &PatchPlace, found: &[u8; PATCH_LEN]) -> bool {
    let is_operand_changed = found[1..] != place.before[1..];
    let crosses = crosses(place.at, PAGE);
    let is_begun = match found[0] {
        CMP => is_operand_changed || crosses,
        CALL => is_operand_changed && crosses,
        _ => false,
    };
    is_begun && is_mixed(place, found)
}

/// Returns whether `found` is the patch of an instruction, except for breakpoints.
fn is_under_breakpoint(place: &PatchPlace, found: &[u8]) -> bool {
    let mut ours = found
        .iter()
        .zip(&*place.after)
        .filter(|(found, _)| **found != INT3)
        .peekable();
    ours.peek().is_some() && ours.all(|(found, after)| found == after)
}

/// Returns whether each byte of a displacement is either the original one or that of the patch.
fn is_mixed(place: &PatchPlace, found: &[u8; PATCH_LEN]) -> bool {
    let both = place.before.iter().zip(place.after.iter());
    let mut bytes = found.iter().zip(both).skip(1);
    bytes.all(|(byte, (own, patched))| byte == own || byte == patched)
}

/// Returns whether a patch at an address crosses a border between blocks of this size.
pub(crate) fn crosses(patch_at: LiveAddr, block: u64) -> bool {
    patch_at.0 / block != patch_at.plus(PATCH_LEN as u64 - 1).0 / block
}

/// What the trampoline of a point records before it does what the displaced bytes did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Role {
    pub(crate) is_counted: bool,
    /// Which hits are counted, watched, timed or in the histogram; ends of pairs have `pair_filter`.
    pub(crate) filter: Option<Arc<FilterRole>>,
    /// The histogram of a value of each hit.
    pub(crate) histogram: Option<HistogramRole>,
    /// By what the hits of a point are counted; its own counter then has those for which there is no room. If the point
    /// has a histogram, there is one for each key.
    pub(crate) keys: Option<Arc<KeyRole>>,
    /// Which ends of pairs it is: stops come before starts.
    pub(crate) ends: Vec<PairEnd>,
    /// Of a point that is an end of a pair.
    pub(crate) marks: Marks,
    /// Of such a point: the key by which a stop finds its start, in whichever thread that was. `None`: a stop belongs
    /// to the last start of its thread.
    pub(crate) pair_key: Option<Arc<KeyRole>>,
    pub(crate) pair_filter: PairFilter,
    /// Of the stop of a pair, and of a function that is timed: by what its times are distinguished. The last part is
    /// the name; that of a pair is its number.
    pub(crate) time_keys: Option<Arc<KeyRole>>,
    /// Of such a point, or the start of a pair, if slow times are reported: what is recorded of them here.
    pub(crate) reported: Option<WatchRole>,
    pub(crate) watched: Option<WatchRole>,
    /// Of an entry or an exit of a function that is timed.
    pub(crate) timed: Option<TimedRole>,
    /// Of an end of a pair, and of a function that is timed: whether only times of a range are recorded
    /// ([`TIMES_FROM`](crate::observe::layout::shared::TIMES_FROM)).
    pub(crate) is_in_range: bool,
    /// Of a function that is counted or has a histogram, if it is asked for its results: hits are its returns.
    pub(crate) exits: Option<ExitsRole>,
}

/// Of a function whose hits are its returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ExitsRole {
    /// Whether it is of OCaml, which does not use the x87 unit.
    pub(crate) is_ocaml: bool,
}

/// Which hits of a point are recorded.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct FilterRole {
    pub(crate) filter: Filter,
    /// Where the arguments are.
    pub(crate) arguments: Vec<ArgumentSource>,
}

/// An integer of each hit of a point.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct IntegerRole {
    pub(crate) integer: IntegerExpression,
    /// Where the arguments are.
    pub(crate) arguments: Vec<ArgumentSource>,
}

/// By what the hits of a point are counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyRole {
    pub(crate) parts: Vec<KeyPart>,
    /// Where each argument is.
    pub(crate) arguments: Vec<ArgumentSource>,
    /// The number of the point's name.
    pub(crate) name: u32,
}

/// What a part of a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Integer,
    Text,
    Thread,
    Caller,
    Probe,
}

impl KeyRole {
    /// The same, with the name as the last part.
    pub(crate) fn with_name(mut self) -> KeyRole {
        self.parts.push(KeyPart::Probe);
        self
    }

    pub(crate) fn kinds(&self) -> Vec<KeyKind> {
        let kinds = self.parts.iter().map(|part| match part {
            KeyPart::Number(..) => KeyKind::Integer,
            KeyPart::Text(_) => KeyKind::Text,
            KeyPart::Thread => KeyKind::Thread,
            KeyPart::Caller => KeyKind::Caller,
            KeyPart::Probe => KeyKind::Probe,
        });
        kinds.collect()
    }

    /// Returns a bit for each part that may be negative.
    pub(crate) fn signs(&self) -> u8 {
        let parts = self.parts.iter().enumerate();
        let signed = parts.filter(|(_, part)| matches!(part, KeyPart::Number(_, true)));
        signed.fold(0, |signs, (index, _)| signs | 1 << index)
    }

    /// Returns whether the key has a string of C.
    pub(crate) fn reads_text_of_c(&self) -> bool {
        let is_it = |part: &KeyPart| matches!(part, KeyPart::Text(text) if text.is_of_c());
        self.parts.iter().any(is_it)
    }

    /// Returns whether the key reads memory, the stack included.
    pub(crate) fn reads_memory(&self) -> bool {
        self.parts.iter().any(|part| {
            part.reads_memory() || part.has_argument(&|index| is_on_stack(&self.arguments, index))
        })
    }
}

/// A histogram to which each hit of a point adds a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HistogramRole {
    /// Its index.
    pub(crate) number: u32,
    pub(crate) integer: Arc<IntegerRole>,
    /// Its buckets, if they are not those of powers of two.
    pub(crate) linear: Option<Linear>,
}

impl HistogramRole {
    /// Returns whether its values may be negative.
    pub(crate) fn is_signed(&self) -> bool {
        self.integer.integer.is_signed()
    }
}

/// Which pairs are timed, by a filter of their starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum PairFilter {
    #[default]
    All,
    /// The point is a start: those at whose start this is true.
    Starts(Arc<FilterRole>),
    /// The point is only a stop: what the filter says is known at the start.
    Stops,
}

/// What is recorded where calls of a function begin or end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TimedRole {
    /// The index of the function among those that are timed.
    pub(crate) function: u32,
    pub(crate) stack: StackKind,
    /// Whether it is of OCaml, which does not use the x87 unit.
    pub(crate) is_ocaml: bool,
    /// Whether calls begin at the point: its displaced instructions may have exits. If not, they have exits only.
    pub(crate) is_entry: bool,
    /// Whether it is timed from the program's first instruction on, when its thread has no control block yet.
    pub(crate) is_from_start: bool,
}

/// Which stack a function is called on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StackKind {
    /// That of its thread.
    OfThread,
    /// That of a fiber of OCaml 5.
    OfFiber {
        /// Where the state of the domain, to which r14 points, has the address of the fiber's stack, in bytes.
        current_stack: u8,
    },
}

/// By what the trampolines of a pair recognize that a stop belongs to another start than the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Marks {
    /// The general register of the first argument.
    pub(crate) argument: Option<Register>,
    pub(crate) frame: FrameId,
}

/// An end of the pair of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairEnd {
    Start(u32),
    Stop(u32),
}

/// What is recorded of each hit of a point that is watched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct WatchRole {
    /// The index of the point in its plan, which identifies its records.
    pub(crate) point: u32,
    pub(crate) arguments: Vec<ArgumentSource>,
    /// What they are, of a USDT probe; of others it is known by the site, or they are words.
    pub(crate) formats: Vec<ArgumentFormat>,
    /// One in so many hits is recorded; `None`: all.
    pub(crate) sample: Option<NonZeroU64>,
    /// Of a point in a function; the others are sites.
    pub(crate) function: Option<WatchedFunction>,
    /// Whether it is executed by OCaml code, or called by it directly: r14 has the state of a domain, in OCaml 5.
    pub(crate) is_ocaml: bool,
}

/// What is recorded of a point in a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WatchedFunction {
    /// What its arguments are, and its result.
    pub(crate) words: Words,
    pub(crate) result: Words,
    /// Whether its results are recorded: then there are points at its returns.
    pub(crate) has_results: bool,
    /// Whether only these are recorded, not its calls.
    pub(crate) has_only_results: bool,
    /// On which stack it is called, if all of its exits are recorded, and where its calls are on that stack.
    pub(crate) exits_on: Option<StackKind>,
    pub(crate) part: FunctionPart,
    /// Whether it is of OCaml, which does not use the x87 unit.
    pub(crate) is_ocaml: bool,
    /// Whether the program is observed from its first instruction: the thread may have no control block yet.
    pub(crate) is_from_start: bool,
}

/// Where in a function a point is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FunctionPart {
    /// At its entry, where nothing is below the stack pointer.
    Entry,
    /// At an instruction within it.
    Inside,
    /// At a return or another exit, but not at its entry.
    Exit,
}

/// What the words in registers are, and what is copied of the memory that they point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Words {
    /// Values of OCaml.
    Values,
    /// The same, or anything: before memory is read, the kernel is asked whether it can be.
    MaybeValues,
    /// Of C: integers, and addresses of text, for which the kernel is asked.
    Text,
    /// The same, or anything; no memory is read.
    Numbers,
}

impl Words {
    /// Whether the kernel is asked before memory is read.
    fn ask_kernel(self) -> bool {
        matches!(self, Words::MaybeValues | Words::Text)
    }
}

impl WatchedFunction {
    /// Returns whether the kernel is asked what can be read of the words of a call or a return.
    pub(crate) fn asks_kernel(&self) -> bool {
        self.words.ask_kernel() || (self.has_results && self.result.ask_kernel())
    }
}

/// Where a trampoline takes an argument from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArgumentSource {
    /// A general register.
    Register(Register),
    /// The low 8 bytes of a vector register.
    Vector(Register),
    /// 8 bytes on the stack, at this offset from the stack pointer at the point.
    Stack(u32),
    /// Anywhere in memory; only of USDT probes.
    Memory(MemorySource),
    /// A number; only of USDT probes.
    Constant(u64),
    /// Somewhere else: it is not read.
    Unknown,
}

/// An operand in memory: the sum of registers and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MemorySource {
    pub(crate) base: Option<Register>,
    /// A register, and by what it is multiplied.
    pub(crate) index: Option<(Register, u8)>,
    /// Without registers, the address of data of the object that the point is in, which are mapped as long as that is.
    pub(crate) displacement: i64,
    /// How many bytes it has: 1, 2, 4 or 8.
    pub(crate) size: u8,
}

impl MemorySource {
    pub(crate) fn is_static(self) -> bool {
        self.base.is_none() && self.index.is_none()
    }

    /// Returns whether it usually is in the frame of the point: relative to the stack pointer, or to the frame pointer.
    pub(crate) fn is_near_stack(self) -> bool {
        matches!(self.base, Some(Register::RSP | Register::RBP))
    }
}

/// What an argument of a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ArgumentFormat {
    /// How many bytes it has.
    pub(crate) size: u8,
    pub(crate) signed: bool,
    pub(crate) is_float: bool,
}

impl ArgumentFormat {
    /// Any word.
    pub(crate) const WORD: ArgumentFormat = ArgumentFormat {
        size: 8,
        signed: false,
        is_float: false,
    };
}

/// Only offsets from the stack pointer below this many bytes are read: frames are smaller.
pub(crate) const STACK_OFFSET_LIMIT: i32 = 1 << 16;

impl FilterRole {
    /// Returns whether the filter reads memory, the stack included.
    pub(crate) fn reads_memory(&self) -> bool {
        let test = &self.filter.test;
        test.reads_memory() || test.has_argument(&|index| is_on_stack(&self.arguments, index))
    }
}

impl IntegerRole {
    /// Returns whether the integer reads memory, the stack included.
    pub(crate) fn reads_memory(&self) -> bool {
        let number = &self.integer.number;
        number.reads_memory() || number.has_argument(&|index| is_on_stack(&self.arguments, index))
    }
}

fn is_on_stack(arguments: &[ArgumentSource], index: u8) -> bool {
    let source = arguments.get(usize::from(index));
    match source {
        Some(ArgumentSource::Stack(_)) => true,
        Some(ArgumentSource::Memory(memory)) => !memory.is_static(),
        _ => false,
    }
}

impl Role {
    /// Returns whether an expression reads memory.
    pub(crate) fn filters_memory(&self) -> bool {
        let filter = self.filter.as_ref();
        let histogram = self.histogram.as_ref();
        filter.is_some_and(|filter| filter.reads_memory())
            || histogram.is_some_and(|histogram| histogram.integer.reads_memory())
            || self.keys.as_ref().is_some_and(|keys| keys.reads_memory())
            || self.pair_key.as_ref().is_some_and(|key| key.reads_memory())
            || self.time_keys.as_ref().is_some_and(|it| it.reads_memory())
            || matches!(&self.pair_filter, PairFilter::Starts(filter) if filter.reads_memory())
    }

    /// Returns whether an expression reads strings of C, for which the kernel is asked.
    pub(crate) fn reads_text_of_c(&self) -> bool {
        let starts = match &self.pair_filter {
            PairFilter::Starts(filter) => Some(filter),
            _ => None,
        };
        let filters = self.filter.iter().chain(starts);
        let keys = [&self.keys, &self.pair_key, &self.time_keys];
        let mut keys = keys.into_iter().flatten();
        filters
            .into_iter()
            .any(|it| it.filter.test.reads_text_of_c())
            || keys.any(|it| it.reads_text_of_c())
    }

    /// Returns whether expressions are evaluated at the point.
    pub(crate) fn has_expressions(&self) -> bool {
        self.filter.is_some()
            || self.histogram.is_some()
            || self.keys.is_some()
            || self.pair_key.is_some()
            || self.time_keys.is_some()
            || matches!(self.pair_filter, PairFilter::Starts(_))
    }

    /// Returns whether hits are counted that an expression has no answer for.
    pub(crate) fn may_be_untyped(&self) -> bool {
        self.filter.is_some() || self.histogram.is_some() || self.keys.is_some()
    }

    /// Returns whether nothing is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Role::default()
    }

    /// Returns whether hits are counted, all of them, and nothing else is recorded.
    pub(crate) fn is_only_counted(&self) -> bool {
        let counted = Role {
            is_counted: true,
            ..Role::default()
        };
        *self == counted
    }

    /// Returns whether only the hits for which a filter is true are watched.
    pub(crate) fn chooses_records(&self) -> bool {
        self.watched.is_some() && self.filter.is_some()
    }

    /// Returns whether hits are watched, and nothing else is recorded of them.
    pub(crate) fn is_only_watched(&self) -> bool {
        let others = !self.ends.is_empty() || self.timed.is_some() || self.histogram.is_some();
        self.watched.is_some() && !self.is_counted && !others
    }

    /// Returns whether the trampoline reads the time stamp counter.
    pub(crate) fn is_timed(&self) -> bool {
        !self.ends.is_empty() || self.watched.is_some() || self.timed.is_some()
    }
}

impl ArgumentSource {
    /// Where a function leaves its result.
    pub(crate) const RESULT: ArgumentSource = ArgumentSource::Register(Register::RAX);

    /// Returns the source of an argument of a note; `None` stands for one that could not be parsed.
    pub(crate) fn of(argument: Option<&Argument<'_>>) -> ArgumentSource {
        match argument.map(|argument| &argument.operand) {
            Some(Operand::Register(name)) => register_source(name),
            Some(&Operand::Memory {
                offset,
                base: "rsp",
            }) if (0..STACK_OFFSET_LIMIT).contains(&offset) => ArgumentSource::Stack(offset as u32),
            _ => ArgumentSource::Unknown,
        }
    }
}

/// Returns the 64-bit register of this name, the stack pointer included.
pub(crate) fn base_register(name: &str) -> Option<Register> {
    if name == "rsp" {
        return Some(Register::RSP);
    }
    let is_whole = name.starts_with('r') && !name.ends_with(['d', 'w', 'b']);
    general(name).filter(|_| is_whole)
}

/// Returns the source for a register of this name.
pub(crate) fn register_source(name: &str) -> ArgumentSource {
    if let Some(register) = general(name) {
        return ArgumentSource::Register(register);
    }
    let number = ["xmm", "ymm", "zmm"]
        .iter()
        .find_map(|kind| name.strip_prefix(kind)?.parse::<u32>().ok());
    match number {
        Some(number @ 0..16) => ArgumentSource::Vector(Register::XMM0 + number),
        _ => ArgumentSource::Unknown,
    }
}

/// Returns the 64-bit register that `name` is or is a part of, unless it is the stack pointer.
fn general(name: &str) -> Option<Register> {
    if let Some(number) = name.strip_prefix('r') {
        let number = number.trim_end_matches(['d', 'w', 'b']);
        if let Ok(number @ 8..16) = number.parse::<u32>() {
            return Some(Register::RAX + number);
        }
    }
    Some(match name {
        "rax" | "eax" | "ax" | "al" => Register::RAX,
        "rbx" | "ebx" | "bx" | "bl" => Register::RBX,
        "rcx" | "ecx" | "cx" | "cl" => Register::RCX,
        "rdx" | "edx" | "dx" | "dl" => Register::RDX,
        "rsi" | "esi" | "si" | "sil" => Register::RSI,
        "rdi" | "edi" | "di" | "dil" => Register::RDI,
        "rbp" | "ebp" | "bp" | "bpl" => Register::RBP,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expression::{Expression, Keys, Parameter, ParameterKind, Scope};

    const POINT: Point = Point {
        address: LiveAddr(0x1000),
        kind: PointKind::Site {
            operand: [0xfa, 0x0f, 0, 0],
        },
    };
    const TRAMPOLINE: LiveAddr = LiveAddr(0x806);

    /// What bytes say that are found at the only place of a site.
    fn judged(address: u64, found: [u8; PATCH_LEN]) -> PlaceState {
        let point = Point {
            address: LiveAddr(address),
            ..POINT
        };
        // As if the trampoline were as far away as that of POINT.
        let mut place = only(POINT.places(TRAMPOLINE));
        place.at = point.address.plus(1);
        point.judge(&place, found)
    }

    fn only(places: impl Iterator<Item = PatchPlace>) -> PatchPlace {
        let places: Vec<PatchPlace> = places.collect();
        assert_eq!(places.len(), 1);
        places[0]
    }

    #[test]
    fn probe_site_is_patched_with_a_trampoline_call() {
        let code = SiteCode([0x90, CMP, 0xfa, 0x0f, 0, 0]);
        assert_eq!(Point::probe_site(POINT.address, code), POINT);
        assert_eq!(POINT.wrapper(), Some(LiveAddr(0x2000)));
        let place = only(POINT.places(TRAMPOLINE));
        assert_eq!(place.at, LiveAddr(0x1001));
        assert_eq!(*place.after, [CALL, 0, 0xf8, 0xff, 0xff]);
        assert_eq!(*place.before, [CMP, 0xfa, 0x0f, 0, 0]);
        let unpatched = |enabled| POINT.unpatched(&place, enabled);
        assert_eq!(*unpatched(true), [CALL, 0xfa, 0x0f, 0, 0]);
        assert_eq!(unpatched(false), place.before);
        assert!(POINT.is_unpatched(code));
        assert!(!POINT.is_unpatched(SiteCode([0xcc, CMP, 0xfa, 0x0f, 0, 0])));
        assert!(!POINT.is_unpatched(SiteCode([0x90, CMP, 0xfa, 0x0f, 0, 1])));
    }

    #[test]
    fn instruction_is_patched_with_a_jump() {
        let point = |before: &[u8], island| Point {
            address: LiveAddr(0x1000),
            kind: PointKind::Instruction {
                before: PatchBytes::of(before),
                island,
                is_exit: false,
            },
        };
        let near = point(&[1, 2, 3, 4, 5], None);
        let place = only(near.places(TRAMPOLINE));
        assert_eq!((place.at, place.before.len()), (LiveAddr(0x1000), 5));
        assert_eq!(*place.after, [JMP, 1, 0xf8, 0xff, 0xff]);
        assert_eq!(near.unpatched(&place, true), place.before);
        assert_eq!(near.wrapper(), None);
        // The last byte of a punned jump stays as it is.
        let punned = point(&[1, 2, 3, 4], None);
        let place = only(punned.places(TRAMPOLINE));
        assert_eq!(*place.after, [JMP, 1, 0xf8, 0xff]);
        let after = [JMP, 1, 0xf8, 0xff, 9];
        assert_eq!(punned.judge(&place, after), PlaceState::Patched);
        assert_eq!(punned.judge(&place, [1, 2, 3, 4, 9]), PlaceState::Unpatched);
        assert_eq!(punned.judge(&place, [JMP, 2, 3, 4, 9]), PlaceState::Other);
        for under in [[INT3, 1, 0xf8, 0xff, 9], [JMP, 1, 0xf8, INT3, 9]] {
            assert_eq!(punned.judge(&place, under), PlaceState::UnderBreakpoint);
        }
        for other in [[INT3, 2, 3, 4, 9], [INT3; PATCH_LEN]] {
            assert_eq!(punned.judge(&place, other), PlaceState::Other);
        }
        let island = Island {
            at: LiveAddr(0x0ff0),
            before: [0xcc; PATCH_LEN],
        };
        let short = point(&[1, 2], Some(island));
        let places: Vec<PatchPlace> = short.places(TRAMPOLINE).collect();
        let [one, other] = places[..] else {
            panic!("{places:x?}");
        };
        assert_eq!((one.at, &*one.before), (island.at, &[0xcc; PATCH_LEN][..]));
        assert_eq!(*one.after, [JMP, 0x11, 0xf8, 0xff, 0xff]);
        assert_eq!(
            (other.at, &*other.after),
            (short.address, &[0xeb, 0xee][..])
        );
    }

    #[test]
    fn half_written_patch_is_recognized() {
        assert_eq!(
            judged(0x1000, [CALL, 0, 0xf8, 0xff, 0xff]),
            PlaceState::Patched
        );
        for found in [[CMP, 0, 0xf8, 0xff, 0xff], [CMP, 0, 0x0f, 0, 0]] {
            assert_eq!(judged(0x1000, found), PlaceState::PartlyPatched);
        }
        assert_eq!(judged(0x1000, [CALL, 0, 0x0f, 0, 0]), PlaceState::Unpatched);
        assert_eq!(judged(0x1000, [CMP, 1, 0x0f, 0, 0]), PlaceState::Other);
        // Still all original bytes: half written only if the patch crosses a page boundary.
        let own = [CMP, 0xfa, 0x0f, 0, 0];
        assert_eq!(judged(0x1000, own), PlaceState::Unpatched);
        for (address, crosses) in [(0xffa, false), (0xffb, true), (0xffe, true), (0xfff, false)] {
            let expected = if crosses {
                PlaceState::PartlyPatched
            } else {
                PlaceState::Unpatched
            };
            assert_eq!(judged(address, own), expected, "{address}");
        }
    }

    #[test]
    fn discarded_second_page_leaves_a_half_patch() {
        let half = [CALL, 0, 0xf8, 0, 0];
        assert_eq!(judged(0xffc, half), PlaceState::PartlyPatched);
        assert_eq!(judged(0xffa, half), PlaceState::Unpatched);
        assert_eq!(
            judged(0xffc, [CALL, 0xfa, 0x0f, 0, 0]),
            PlaceState::Unpatched
        );
        assert_eq!(judged(0xffc, [0xcc, 0, 0xf8, 0, 0]), PlaceState::Other);
    }

    #[test]
    fn breakpoints_and_other_code_are_not_ours() {
        assert_eq!(
            judged(0x1000, [0xcc, 0, 0xf8, 0xff, 0xff]),
            PlaceState::Other
        );
        assert_eq!(judged(0x1000, [CALL, 1, 2, 3, 4]), PlaceState::Other);
    }

    #[test]
    fn arguments_are_read_from_their_noted_places() {
        let of = |text| ArgumentSource::of(Argument::parse(text).as_ref());
        assert_eq!(of("8@%rdi"), ArgumentSource::Register(Register::RDI));
        assert_eq!(of("4@%edi"), ArgumentSource::Register(Register::RDI));
        assert_eq!(of("1@%al"), ArgumentSource::Register(Register::RAX));
        assert_eq!(of("8@%r15"), ArgumentSource::Register(Register::R15));
        assert_eq!(of("4@%r15d"), ArgumentSource::Register(Register::R15));
        assert_eq!(of("8@%xmm3"), ArgumentSource::Vector(Register::XMM3));
        assert_eq!(of("16@%xmm15"), ArgumentSource::Vector(Register::XMM15));
        assert_eq!(of("8@(%rsp)"), ArgumentSource::Stack(0));
        assert_eq!(of("8@24(%rsp)"), ArgumentSource::Stack(24));
        for text in [
            "8@-8(%rsp)",
            "8@65536(%rsp)",
            "8@8(%rbp)",
            "8@%rsp",
            "8@%xmm16",
            "8@%xyz",
            "8@$5",
            "nothing",
        ] {
            assert_eq!(of(text), ArgumentSource::Unknown, "{text}");
        }
    }

    #[test]
    fn register_is_known_by_all_its_names() {
        for (names, register) in [
            ("rax eax ax al", Register::RAX),
            ("rbx ebx bx bl", Register::RBX),
            ("rcx ecx cx cl", Register::RCX),
            ("rdx edx dx dl", Register::RDX),
            ("rsi esi si sil", Register::RSI),
            ("rdi edi di dil", Register::RDI),
            ("rbp ebp bp bpl", Register::RBP),
            ("r8 r8d r8w r8b", Register::R8),
            ("r15 r15d r15w r15b", Register::R15),
        ] {
            for name in names.split(' ') {
                assert_eq!(general(name), Some(register), "{name}");
            }
        }
        for name in ["r7", "r16", "rsp", "esp", "r", ""] {
            assert_eq!(general(name), None, "{name}");
        }
        assert_eq!(
            register_source("ymm0"),
            ArgumentSource::Vector(Register::XMM0)
        );
        assert_eq!(
            register_source("zmm15"),
            ArgumentSource::Vector(Register::XMM15)
        );
    }

    #[test]
    fn role_tells_if_it_is_empty_or_timed() {
        let counted = Role {
            is_counted: true,
            ..Role::default()
        };
        let timed = Role {
            ends: vec![PairEnd::Start(0)],
            ..Role::default()
        };
        let watched = Role {
            watched: Some(WatchRole::default()),
            ..Role::default()
        };
        let what = |role: &Role| (role.is_empty(), role.is_timed());
        assert_eq!(what(&Role::default()), (true, false));
        assert_eq!(what(&counted), (false, false));
        assert_eq!(what(&timed), (false, true));
        assert_eq!(what(&watched), (false, true));
    }

    #[test]
    fn sites_entries_and_exits_are_distinguished() {
        let instruction = |is_exit| Point {
            address: LiveAddr(0x1000),
            kind: PointKind::Instruction {
                before: PatchBytes::of(&[1, 2, 3, 4, 5]),
                island: None,
                is_exit,
            },
        };
        let what = |point: Point| {
            (
                point.is_site(),
                point.is_written_in_steps(),
                point.is_exit(),
            )
        };
        assert_eq!(what(POINT), (true, true, false));
        assert_eq!(what(instruction(false)), (false, false, false));
        assert_eq!(what(instruction(true)), (false, false, true));
    }

    #[test]
    fn patches_across_pages_are_impossible() {
        let is_possible = |address: u64, before: &[u8], island: Option<u64>| {
            let island = island.map(|at| Island {
                at: LiveAddr(at),
                before: [0xcc; PATCH_LEN],
            });
            let kind = PointKind::Instruction {
                before: PatchBytes::of(before),
                island,
                is_exit: false,
            };
            let address = LiveAddr(address);
            Point { address, kind }.is_possible()
        };
        assert!(is_possible(0x1ffb, &[1; 5], None) && !is_possible(0x1ffc, &[1; 5], None));
        assert!(is_possible(0x1000, &[1], None) && !is_possible(0x1000, &[], None));
        // With an island, the jump to it has two bytes.
        assert!(is_possible(0x1000, &[1; 2], Some(0x1ffb)));
        assert!(!is_possible(0x1000, &[1; 2], Some(0x1ffc)));
        assert!(!is_possible(0x1ffc, &[1; 2], Some(0x1000)));
        assert!(!is_possible(0x1000, &[1; 5], Some(0x1100)));
        assert!(POINT.is_possible());
    }

    #[test]
    fn watched_point_may_record_something_else_too() {
        let watched = || Role {
            watched: Some(WatchRole::default()),
            ..Role::default()
        };
        let timed = TimedRole {
            function: 0,
            stack: StackKind::OfThread,
            is_ocaml: false,
            is_entry: true,
            is_from_start: false,
        };
        assert!(watched().is_only_watched() && !Role::default().is_only_watched());
        let histogram = HistogramRole {
            number: 0,
            integer: integer("arg0", ArgumentSource::Register(Register::RDI)),
            linear: None,
        };
        for other in [
            Role {
                is_counted: true,
                ..watched()
            },
            Role {
                ends: vec![PairEnd::Start(0)],
                ..watched()
            },
            Role {
                timed: Some(timed),
                ..watched()
            },
            Role {
                histogram: Some(histogram),
                ..watched()
            },
        ] {
            assert!(!other.is_only_watched(), "{other:?}");
        }
    }

    const VALUE: Parameter = Parameter {
        name: None,
        kind: ParameterKind::Value,
    };

    /// The scope of a point with one argument of this kind.
    fn scope(kind: ParameterKind) -> Scope {
        let parameter = Parameter { kind, ..VALUE };
        Scope::of("probe a", "a", vec![parameter]).asking_kernel_if(true)
    }

    fn filter(text: &str, kind: ParameterKind, source: ArgumentSource) -> Arc<FilterRole> {
        let expression: Expression = text.parse().unwrap();
        Arc::new(FilterRole {
            filter: expression.filter(&scope(kind)).unwrap(),
            arguments: vec![source],
        })
    }

    fn integer(text: &str, source: ArgumentSource) -> Arc<IntegerRole> {
        let expression: Expression = text.parse().unwrap();
        Arc::new(IntegerRole {
            integer: expression.integer(&scope(ParameterKind::Value)).unwrap(),
            arguments: vec![source],
        })
    }

    fn keys(text: &str, kind: ParameterKind, source: ArgumentSource) -> Option<Arc<KeyRole>> {
        let keys: Keys = text.parse().unwrap();
        Some(Arc::new(KeyRole {
            parts: keys.parts(&scope(kind)).unwrap(),
            arguments: vec![source],
            name: 0,
        }))
    }

    /// Returns roles with one expression each: `test` as a filter and as a filter of starts, `key` as the key of hits,
    /// of pairs and of times.
    fn asking(test: &str, key: &str, kind: ParameterKind, source: ArgumentSource) -> [Role; 5] {
        [
            Role {
                filter: Some(filter(test, kind, source)),
                ..Role::default()
            },
            Role {
                pair_filter: PairFilter::Starts(filter(test, kind, source)),
                ..Role::default()
            },
            Role {
                keys: keys(key, kind, source),
                ..Role::default()
            },
            Role {
                pair_key: keys(key, kind, source),
                ..Role::default()
            },
            Role {
                time_keys: keys(key, kind, source),
                ..Role::default()
            },
        ]
    }

    #[test]
    fn expressions_may_read_memory() {
        let in_register = ArgumentSource::Register(Register::RDI);
        let memory = |base: Option<Register>, index| {
            ArgumentSource::Memory(MemorySource {
                base,
                index,
                displacement: 8,
                size: 8,
            })
        };
        let rbx = Some(Register::RBX);
        for (source, reads) in [
            (in_register, false),
            (ArgumentSource::Stack(8), true),
            (memory(rbx, None), true),
            (memory(None, Some((Register::RBX, 8))), true),
            // Of the object that the point is in.
            (memory(None, None), false),
        ] {
            for role in asking("arg0 == 1", "arg0", ParameterKind::Value, source) {
                assert_eq!(role.filters_memory(), reads, "{role:?}");
                assert!(role.has_expressions(), "{role:?}");
            }
            let histogram = Role {
                histogram: Some(HistogramRole {
                    number: 0,
                    integer: integer("arg0", source),
                    linear: None,
                }),
                ..Role::default()
            };
            assert_eq!(histogram.filters_memory(), reads, "{source:?}");
            assert!(histogram.may_be_untyped() && histogram.has_expressions());
        }
        // What an argument points to.
        let kind = ParameterKind::Value;
        for role in asking("str(arg0) == \"x\"", "str(arg0)", kind, in_register) {
            assert!(role.filters_memory() && !role.reads_text_of_c(), "{role:?}");
        }
        let none = Role::default();
        assert!(!none.filters_memory() && !none.has_expressions());
    }

    #[test]
    fn strings_of_c_are_recognized() {
        let source = ArgumentSource::Register(Register::RDI);
        let kind = ParameterKind::Word;
        for role in asking("str(arg0) == \"x\"", "str(arg0)", kind, source) {
            assert!(role.reads_text_of_c(), "{role:?}");
        }
        for role in asking("arg0 == 1", "arg0", kind, source) {
            assert!(!role.reads_text_of_c(), "{role:?}");
        }
    }

    #[test]
    fn operands_near_the_stack_are_recognized() {
        let memory = |base| MemorySource {
            base,
            index: None,
            displacement: 0,
            size: 8,
        };
        for (base, is_near) in [
            (Some(Register::RSP), true),
            (Some(Register::RBP), true),
            (Some(Register::RBX), false),
            (None, false),
        ] {
            assert_eq!(memory(base).is_near_stack(), is_near, "{base:?}");
        }
    }

    #[test]
    fn kernel_is_asked_about_calls_or_results() {
        let asks = |words, result, has_results| {
            let function = WatchedFunction {
                words,
                result,
                has_results,
                has_only_results: false,
                exits_on: None,
                part: FunctionPart::Entry,
                is_ocaml: false,
                is_from_start: false,
            };
            function.asks_kernel()
        };
        let (none, values) = (Words::Numbers, Words::Values);
        for words in [Words::MaybeValues, Words::Text] {
            assert!(asks(words, none, false) && asks(none, words, true));
            assert!(!asks(values, words, false));
        }
        assert!(!asks(none, values, true) && !asks(values, none, true));
    }
}
