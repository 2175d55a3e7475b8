//! The patches of a place in a function: what is possible there, and what is tried first.

#[cfg(test)]
use std::path::Path;

use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, Register};

use crate::address::{CodeRange, FileAddr, LiveAddr, LoadBias};
use crate::error::Refusal;
use crate::functions::FunctionPlace;
use crate::observe::functions::Timing;
use crate::observe::functions::fibers::ProcessStacks;
use crate::observe::functions::wanted::{CompiledExpressions, KnownPlace, Wanted, asks_at_end};
use crate::observe::functions::watching::{KnownArguments, Watching};
#[cfg(test)]
use crate::observe::functions::{ObservedFunction, ObservedFunctions, WantedFunction};
use crate::observe::point::{Island, PATCH_LEN, PatchBytes};
use crate::observe::role::{Role, StackKind};
#[cfg(test)]
use crate::patch_plan::code::Code;
use crate::patch_plan::jump::{Jump, PREFIX_LEN, SHORT_LEN};
use crate::patch_plan::site::PatchSite;
use crate::patch_plan::{EntryPlanner, ExitPlan, PatchPlanner};

/// A way to patch a place in a function.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) site: PatchSite,
    /// How many bytes it overwrites at its address.
    pub(super) len: usize,
    /// The bytes there; of a punned jump also those that are its last bytes and stay as they are.
    pub(super) code: PatchBytes,
    pub(super) island: Option<Island>,
}

impl Candidate {
    /// Returns it with its jump after the first byte; see [`PatchSite::prefixed`].
    pub(super) fn prefixed(&self) -> Option<Candidate> {
        let site = self.site.prefixed()?;
        let code = PatchBytes::of(&site.displaced()[PREFIX_LEN as usize..]);
        Some(Candidate {
            site,
            len: PATCH_LEN,
            code,
            island: None,
        })
    }

    pub(super) fn is_prefixed(&self) -> bool {
        self.site.jump() == Jump::Prefixed
    }

    /// The code that it overwrites, displaces, or relies on, in an object with this load bias.
    pub(super) fn expected(&self, bias: LoadBias) -> impl Iterator<Item = (LiveAddr, &[u8])> {
        let island = self.island.as_ref();
        let island = island.map(|island| (island.at, &island.before[..]));
        // Padding after the displaced instructions may be overwritten, too.
        [
            (self.site.address(), self.site.displaced()),
            (self.site.jump_address(), &self.code[..]),
        ]
        .map(|(at, code)| (bias.live(at), code))
        .into_iter()
        .chain(island)
    }

    /// Whether its jump ends with the bytes of what follows it.
    pub(super) fn is_punned(&self) -> bool {
        matches!(self.site.jump(), Jump::Punned { .. })
    }
}

/// The patches of a function that is timed.
#[derive(Clone, Debug)]
pub(super) struct TimedPatches {
    pub(super) entry: Candidate,
    /// The patches of the exits that the patch of the entry does not displace.
    pub(super) exits: Vec<Candidate>,
    /// See [`ExitPlan::overwrites_next`](crate::ExitPlan::overwrites_next).
    pub(super) overwrites_next: bool,
}

/// Other patches of a function, which are tried if the best ones turn out not to be possible.
#[derive(Clone, Debug)]
pub(super) struct OtherPatches {
    pub(super) entry: Candidate,
    /// The patches of the exits that the patch of the entry does not displace; `None`: no exits are patched.
    pub(super) exits: Option<Vec<Candidate>>,
}

/// The patches of a function whose exits are patched.
struct PatchesWithExits {
    entry: Candidate,
    exits: Vec<Candidate>,
    /// The best one last.
    others: Vec<OtherPatches>,
}

/// The patches of a function.
pub(super) struct FunctionPatches {
    /// The patch of its entry.
    pub(super) best: Candidate,
    /// Whether they are at another instruction that is executed as often: the arguments of the place may not be there.
    pub(super) at_equivalent_instruction: bool,
    /// What is tried if `best` turns out not to be possible, the best one last.
    pub(super) others: Vec<OtherPatches>,
    pub(super) timing: Option<Timing>,
    /// How its calls are recorded, if they are.
    pub(super) watching: Option<Watching>,
    /// Why its results are not recorded, although they were asked for.
    pub(super) without_results: Option<Refusal>,
    /// If its results or exits are recorded or asked for, those of its returns, or of all exits.
    pub(super) ends: Vec<Candidate>,
}

impl OtherPatches {
    fn without_exits(entry: Candidate) -> OtherPatches {
        OtherPatches { entry, exits: None }
    }

    /// Whether the patch of the entry overwrites, displaces, or relies on the byte at this address.
    pub(super) fn uses_at_entry(&self, address: LiveAddr, bias: LoadBias) -> bool {
        let mut expected = self.entry.expected(bias);
        expected.any(|(at, code)| (at..at.plus(code.len() as u64)).contains(&address))
    }
}

impl FunctionPatches {
    fn of(best: Candidate) -> FunctionPatches {
        FunctionPatches {
            best,
            at_equivalent_instruction: false,
            others: Vec::new(),
            timing: None,
            watching: None,
            without_results: None,
            ends: Vec::new(),
        }
    }

    /// Returns all patches of the entry, the best one last.
    fn all(mut self) -> Vec<OtherPatches> {
        self.others.push(OtherPatches::without_exits(self.best));
        self.others
    }
}

/// What is needed to plan the patches of a function.
pub(super) struct Patching<'p> {
    planner: &'p EntryPlanner<'p>,
    /// If the exits of any function of the object are patched.
    exit_planner: Option<&'p PatchPlanner>,
    pub(super) bias: LoadBias,
    stacks: ProcessStacks,
    /// Whether it may be code of OCaml 4, which raises `Stack_overflow` for a fault at the end of the stack only if the
    /// fault is in OCaml code: then instructions that write to the stack are not displaced.
    keeps_faults: bool,
}

impl<'p> Patching<'p> {
    /// What is needed for this place of an object.
    pub(super) fn of(
        known: &KnownPlace<'_>,
        planner: &'p EntryPlanner<'p>,
        exit_planner: Option<&'p PatchPlanner>,
        bias: LoadBias,
        stacks: ProcessStacks,
    ) -> Patching<'p> {
        Patching {
            planner,
            exit_planner,
            bias,
            stacks,
            keeps_faults: known.may_be_ocaml && stacks == ProcessStacks::OfThreads,
        }
    }

    /// Plans the patches of a place. `asked` is what is asked of its hits, `None` if that is an argument that it does
    /// not have; `paired` is what is recorded there if it is an end of pairs.
    pub(super) fn of_place(
        &self,
        known: &KnownPlace<'_>,
        asked: Option<&CompiledExpressions>,
        paired: Option<&Role>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        if known.place.function.object.is_kernels() {
            return Err(Refusal::KernelCode);
        }
        let asked = asked.ok_or(Refusal::NoArgument)?;
        match known.wanted {
            Wanted::NotObserved => Err(Refusal::SwitchesEvents),
            Wanted::Timed(_, words) => {
                let reported = words.map(|words| known.watching(words));
                let stack = known.stack(self.stacks)?;
                self.plan_timed(known.place, stack, known.is_ocaml(), reported)
            }
            _ if known.evaluates_at_exits() => self.asked_at_exits(known),
            _ => self.counted_or_watched(known, asked, paired),
        }
    }

    fn asked_at_exits(
        &self,
        known: &KnownPlace<'_>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let planned = self.with_exits(known.place, |_| {})?;
        let mut watching = known.watched().map(|words| known.watching(words));
        if let Some(returns) = &mut watching {
            returns.function.has_only_results = true;
            returns.function.has_results = true;
        }
        Ok(FunctionPatches {
            watching,
            ends: planned.exits,
            others: planned.others,
            ..FunctionPatches::of(planned.entry)
        })
    }

    fn counted_or_watched(
        &self,
        known: &KnownPlace<'_>,
        (filter, integer, keys): &CompiledExpressions,
        paired: Option<&Role>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let mut watching = known.watched().map(|words| known.watching(words));
        // At another instruction, its arguments may not be there.
        let any = |_| true;
        let asks_arguments = watching.as_ref().is_some_and(Watching::has_arguments)
            || (filter.as_ref()).is_some_and(|it| it.filter.test.has_argument(&any))
            || (integer.as_ref()).is_some_and(|it| it.integer.number.has_argument(&any))
            || (keys.iter().flat_map(|it| &it.parts)).any(|part| part.has_argument(&any));
        let is_exact =
            asks_arguments && known.place.selected_by.is_usdt() || paired.is_some_and(asks_at_end);
        let entry = self.counted(known.place, is_exact);
        let with_ends = known.watched_to_end();
        let with_ends = with_ends.map(|words| (words, self.with_ends(known, words)));
        let patches = match with_ends {
            None => entry?,
            Some((words, Ok((planned, exits_on)))) => {
                if let Some(watching) = &mut watching {
                    watching.function.has_results = words.has_results();
                    watching.function.exits_on = exits_on;
                }
                // The last choice is without the results.
                let mut others = entry.map_or_else(|_| Vec::new(), FunctionPatches::all);
                others.extend(planned.others);
                FunctionPatches {
                    ends: planned.exits,
                    others,
                    ..FunctionPatches::of(planned.entry)
                }
            }
            Some((_, Err(why))) => FunctionPatches {
                without_results: Some(why),
                ..entry?
            },
        };
        Ok(FunctionPatches {
            watching,
            ..patches
        })
    }

    /// Plans the patches of a function whose returns or exits are recorded; if exits are, also returns their stack.
    fn with_ends(
        &self,
        known: &KnownPlace<'_>,
        words: &KnownArguments,
    ) -> std::result::Result<(PatchesWithExits, Option<StackKind>), Refusal> {
        if !words.has_exits() {
            let planned = self.with_exits(known.place, PatchSite::keep_returns)?;
            return Ok((planned, None));
        }
        let stack = known.stack(self.stacks)?;
        Ok((self.with_exits(known.place, |_| {})?, Some(stack)))
    }

    /// Plans the patch of a place that is counted. Unless it `is_exact`, another instruction that is executed as often
    /// may be patched.
    fn counted(
        &self,
        place: &FunctionPlace<'_>,
        is_exact: bool,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let range = place.function.function.range();
        let at = FileAddr(range.start.0 + place.offset);
        let planned = self.counted_at(range, at, place.offset, place.selected_by.is_usdt());
        if planned.is_ok() || is_exact || place.selected_by.name().is_none() {
            return planned;
        }
        let mut others = self.planner.executed_with(range, at).into_iter();
        let other = others.find_map(|at| self.counted_at(range, at, place.offset, false).ok());
        other.map_or(planned, |other| {
            Ok(FunctionPatches {
                at_equivalent_instruction: true,
                ..other
            })
        })
    }

    fn counted_at(
        &self,
        range: CodeRange,
        at: FileAddr,
        offset: u64,
        is_usdt: bool,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let sites = if is_usdt {
            refuse_live_flags(self.planner.usdt_site(range, at)?, offset)?
        } else if at == range.start {
            self.planner.entry(range)?
        } else {
            refuse_live_flags(self.planner.instruction(range, at)?, offset)?
        };
        let mut why = Refusal::PageBorder;
        let mut candidates: Vec<Candidate> = Vec::new();
        for site in sites.into_iter().rev() {
            match self.check(&site) {
                Ok(()) => candidates.extend(candidate(self.planner, site, self.bias)),
                Err(refusal) => why = refusal,
            }
        }
        let best = candidates.pop().ok_or(why)?;
        Ok(FunctionPatches {
            others: candidates
                .into_iter()
                .map(OtherPatches::without_exits)
                .collect(),
            ..FunctionPatches::of(best)
        })
    }

    /// Plans the patches of a function that is timed.
    fn plan_timed(
        &self,
        place: &FunctionPlace<'_>,
        stack: StackKind,
        is_ocaml: bool,
        reported: Option<Watching>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let PatchesWithExits {
            entry,
            exits,
            others,
        } = match self.with_exits(place, |_| {}) {
            Ok(planned) => planned,
            Err(why) => {
                let alone = self.leaning(place).filter(|it| !it.overwrites_next);
                let TimedPatches { entry, exits, .. } = alone.ok_or(why)?;
                let others = Vec::new();
                PatchesWithExits {
                    entry,
                    exits,
                    others,
                }
            }
        };
        let is_punned = exits.last().is_some_and(Candidate::is_punned);
        let timing = Timing {
            stack,
            is_ocaml,
            reported,
            exits,
            leans: false,
            other: is_punned
                .then(|| self.leaning(place))
                .flatten()
                .map(Box::new),
        };
        Ok(FunctionPatches {
            timing: Some(timing),
            others,
            ..FunctionPatches::of(entry)
        })
    }

    /// Plans the patches of a function that is timed together with the one right after it; see
    /// [`PatchPlanner::leaning`].
    fn leaning(&self, place: &FunctionPlace<'_>) -> Option<TimedPatches> {
        if place.offset > 0 {
            return None;
        }
        let range = place.function.function.range();
        let plan = self.exit_planner?.leaning(range)?;
        let checked = |site| {
            self.check(&site).ok()?;
            candidate(self.planner, site, self.bias)
        };
        Some(TimedPatches {
            entry: checked(plan.entry)?,
            exits: plan.sites.into_iter().map(checked).collect::<Option<_>>()?,
            overwrites_next: plan.overwrites_next,
        })
    }

    /// Plans the patches of the entry of a function, and of those exits that `keep` keeps.
    fn with_exits(
        &self,
        place: &FunctionPlace<'_>,
        keep: impl Fn(&mut PatchSite),
    ) -> std::result::Result<PatchesWithExits, Refusal> {
        if place.offset > 0 {
            return Err(Refusal::NotEntry);
        }
        let range = place.function.function.range();
        let planner = self.exit_planner.ok_or(Refusal::NotCode)?;
        let plans = planner.exits(range, |site| self.check(site))?.into_iter();
        let checked = plans.map(|plan| self.checked(plan, range, &keep));
        let mut possible = Vec::new();
        let mut why = None;
        for plan in checked {
            match plan {
                Ok(plan) => possible.push(plan),
                // The reason is that of the best patches.
                Err(refusal) => why = why.or(Some(refusal)),
            }
        }
        possible.reverse();
        let (entry, exits) = possible.pop().ok_or(why.unwrap_or(Refusal::NotCode))?;
        let others = possible.into_iter().map(|(entry, exits)| OtherPatches {
            entry,
            exits: Some(exits),
        });
        Ok(PatchesWithExits {
            entry,
            exits,
            others: others.collect(),
        })
    }

    /// Returns the patches of a plan for a function: that of its entry, and those of the exits that `keep` keeps.
    fn checked(
        &self,
        mut plan: ExitPlan,
        function: CodeRange,
        keep: impl Fn(&mut PatchSite),
    ) -> std::result::Result<(Candidate, Vec<Candidate>), Refusal> {
        keep(&mut plan.entry);
        plan.sites.iter_mut().for_each(keep);
        plan.sites.retain(|site| !site.exits().is_empty());
        for site in [&plan.entry].into_iter().chain(&plan.sites) {
            self.check(site)?;
        }
        plan.refuse_live_flags(function)?;
        let candidate = |site| candidate(self.planner, site, self.bias).ok_or(Refusal::PageBorder);
        let exits = plan.sites.into_iter().map(candidate);
        let exits = exits.collect::<std::result::Result<_, _>>()?;
        Ok((candidate(plan.entry)?, exits))
    }

    fn check(&self, site: &PatchSite) -> std::result::Result<(), Refusal> {
        if self.keeps_faults && writes_stack(site.displaced()) {
            return Err(Refusal::StackWrite);
        }
        Ok(())
    }
}

/// Removes the sites where flags are live, because a trampoline changes the flags; fails if no site is left.
fn refuse_live_flags(
    mut sites: Vec<PatchSite>,
    offset: u64,
) -> std::result::Result<Vec<PatchSite>, Refusal> {
    sites.retain(PatchSite::flags_are_dead);
    if sites.is_empty() {
        return Err(Refusal::LiveFlags { offset });
    }
    Ok(sites)
}

/// Returns a patch site with the bytes that it overwrites; `None` if these are on more than one page, or the file does
/// not have all of them.
fn candidate(planner: &EntryPlanner<'_>, site: PatchSite, bias: LoadBias) -> Option<Candidate> {
    if !site.is_on_one_page() {
        return None;
    }
    let (len, island) = match site.jump() {
        Jump::Near { .. } | Jump::Prefixed => (PATCH_LEN, None),
        Jump::Punned { chosen, .. } => (1 + usize::from(chosen), None),
        Jump::Short { island } => (SHORT_LEN as usize, Some(island)),
    };
    let island = match island {
        None => None,
        Some(island) => {
            let before = planner.code(island, PATCH_LEN).try_into().ok()?;
            let at = bias.live(island);
            Some(Island { at, before })
        }
    };
    let read = if island.is_some() { len } else { PATCH_LEN };
    let code = planner.code(site.jump_address(), read);
    let is_whole = code.len() == read;
    let code = PatchBytes::of(code);
    is_whole.then_some(Candidate {
        site,
        len,
        code,
        island,
    })
}

/// Returns whether one of these instructions may be the first to access a page of the stack. Only a write may be:
/// what is read was written before.
fn writes_stack(code: &[u8]) -> bool {
    let mut factory = InstructionInfoFactory::new();
    Decoder::new(64, code, DecoderOptions::NONE)
        .iter()
        .any(|instruction| {
            let memory = factory.info(&instruction).used_memory();
            let mut of_stack = memory.iter().filter(|it| it.base() == Register::RSP);
            of_stack.any(|it| {
                !matches!(
                    it.access(),
                    OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
                )
            })
        })
}

#[cfg(test)]
impl ObservedFunctions {
    /// Returns functions whose calls are counted, of an object without a file: their code is at these addresses of the
    /// object, which is loaded with this bias.
    pub(crate) fn of_code(functions: &[(FileAddr, &[u8])], bias: LoadBias) -> ObservedFunctions {
        let mut code = Code::default();
        let mut ranges = Vec::new();
        for (start, bytes) in functions {
            code.add(*start, bytes.to_vec(), true);
            ranges.push(CodeRange {
                start: *start,
                len: bytes.len() as u64,
            });
        }
        let planner = PatchPlanner::new(code, &ranges, &[], []);
        let planner = EntryPlanner::of(&planner);
        let function = |range: &CodeRange| {
            let sites = planner.entry(*range).unwrap().into_iter();
            let mut sites: Vec<Candidate> = sites
                .rev()
                .filter_map(|site| candidate(&planner, site, bias))
                .collect();
            ObservedFunction {
                wanted: WantedFunction {
                    name: format!("function_{:x}", range.start.0),
                    object: Path::new("/srv/server.exe").into(),
                    address: bias.live(range.start),
                    is_usdt: false,
                    is_internal: false,
                    named_by: None,
                },
                is_ocaml: false,
                is_named_ocaml: false,
                bias,
                changed_word: None,
                is_in_executable: true,
                best: sites.pop().unwrap(),
                others: sites.into_iter().map(OtherPatches::without_exits).collect(),
                timing: None,
                watching: None,
                filter: None,
                integer: None,
                keys: None,
                evaluates_at_exits: false,
                ends: Vec::new(),
                paired: None,
                freed_stack: None,
            }
        };
        ObservedFunctions {
            functions: ranges.iter().map(function).collect(),
            ..ObservedFunctions::default()
        }
    }
}
