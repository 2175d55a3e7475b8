//! Finds out how code can be patched with a jump to a trampoline: at the entry of a function, at its exits, at any
//! instruction. Pure: bytes of a file → [`PatchSite`]s, or a [`Refusal`] with the reason.
//!
//! ```text
//! sweep       all functions → every address that something may jump to       targets.rs, tables.rs
//!             (for the entries of few functions, only what can matter        targets/sweep_filter.rs)
//! place       an instruction → the jumps that can replace it                  place.rs, padding.rs
//! exits       a function → its returns and tail jumps, without overlap        exits.rs, parts.rs
//! displaced   the instructions that a jump replaces, at another address      displaced.rs
//! flags, mmx  whether a trampoline may change them                            flags.rs, mmx.rs
//! ```
//!
//! The jump has to replace whole instructions, of which none but the first may be a branch target: a thread that
//! jumped there would execute the middle of the jump.
//!
//! Sources: Chamith and others, *Instruction Punning*, PLDI 2017; Duck and others, *Binary Rewriting without
//! Control Flow Recovery* (E9Patch), PLDI 2020.

mod address_set;
pub(crate) mod code;
pub(crate) mod displaced;
mod exits;
mod flags;
mod instruction;
pub(crate) mod jump;
mod mmx;
mod object;
mod padding;
mod parts;
mod place;
pub(crate) mod site;
mod tables;
mod targets;

use std::borrow::Cow;

use iced_x86::{Instruction, Mnemonic};

use crate::address::{CodeRange, FileAddr};
use crate::error::Refusal;
use code::{Body, Code};
use exits::Exits;
use instruction::is_straight;
use jump::Jump;
use place::Swept;
use site::PatchSite;

/// Plans patches of the code of one object. It writes nothing, and needs no process.
///
/// ```no_run
/// let functions = probes_lib::Functions::of_file("server.exe")?;
/// let object = &functions.objects()[0];
/// let planner = object.patch_planner()?;
/// for function in object.table().functions() {
///     if let Err(refusal) = planner.function(function.range()).can_count() {
///         println!("the function at {} {refusal}", function.address());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PatchPlanner {
    swept: Swept,
}

/// How a function can be patched: whether its calls can be counted and timed.
///
/// [`PatchPlanner::new`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionPlan {
    /// The candidates for the patch of its entry, the best one first; at least one.
    #[doc(hidden)]
    pub entry: Result<Vec<PatchSite>, Refusal>,
    /// The patches of all its exits, and of the entry together with them.
    #[doc(hidden)]
    pub exits: Result<ExitPlan, Refusal>,
}

impl FunctionPlan {
    /// Returns whether its calls can be counted: whether its entry can be patched.
    ///
    /// # Errors
    ///
    /// If not: why.
    pub fn can_count(&self) -> Result<(), &Refusal> {
        self.entry.as_ref().map(|_| ())
    }

    /// Returns whether its calls can be timed: whether its entry and all its exits can be patched.
    ///
    /// # Errors
    ///
    /// If not: why.
    pub fn can_time(&self) -> Result<(), &Refusal> {
        self.can_count()?;
        self.exits.as_ref().map(|_| ())
    }
}

/// The patches with which a function is timed. They do not overlap each other.
///
/// [`PatchPlanner::new`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExitPlan {
    /// The patch of the entry. It also displaces exits that follow closely, beyond what its jump overwrites.
    pub entry: PatchSite,
    /// The patches of the exits that the entry does not displace.
    pub sites: Vec<PatchSite>,
    /// Whether the last patch overwrites the first byte of the next function; see [`PatchPlanner::leaning`].
    pub overwrites_next: bool,
}

impl ExitPlan {
    /// Refuses a plan with an exit at which the status flags are live: a trampoline must not change them there.
    pub(crate) fn refuse_live_flags(&self, function: CodeRange) -> Result<(), Refusal> {
        for site in [&self.entry].into_iter().chain(&self.sites) {
            let mut exits = site.exits().iter();
            if let Some(exit) = exits.find(|exit| !exit.flags_are_dead) {
                // A part of the function may be below it.
                let start = site.address().0.wrapping_sub(function.start.0);
                let offset = start.wrapping_add(exit.offset as u64);
                return Err(Refusal::LiveFlags { offset });
            }
        }
        Ok(())
    }
}

impl PatchPlanner {
    /// Sweeps the code of an object. `functions` are all of its functions, `parts` the parts of functions that the
    /// compiler has moved away (`.cold`); `extra` are further addresses that something may jump to: what relocations
    /// point to, and symbols.
    ///
    /// Takes time in proportion to the code, whatever the ranges are.
    ///
    /// ```
    /// use probes_lib::{Code, CodeRange, FileAddr, Jump, PatchPlanner};
    ///
    /// // sub $8,%rsp; mov $1,%eax; add $8,%rsp; ret
    /// let bytes = b"\x48\x83\xec\x08\xb8\x01\0\0\0\x48\x83\xc4\x08\xc3";
    /// let mut code = Code::default();
    /// code.add(FileAddr(0x1000), bytes.to_vec(), true);
    /// let function = CodeRange { start: FileAddr(0x1000), len: bytes.len() as u64 };
    /// let planner = PatchPlanner::new(code, &[function], &[], []);
    ///
    /// let plan = planner.function(function);
    /// assert_eq!(plan.entry?[0].jump(), Jump::Near { padding: 0 });
    /// let exits = plan.exits?;
    /// // The `add` and the `ret` are five bytes.
    /// assert_eq!(exits.sites[0].address(), FileAddr(0x1009));
    /// assert_eq!(exits.sites[0].exits()[0].offset, 4);
    /// # Ok::<(), probes_lib::Refusal>(())
    /// ```
    #[doc(hidden)]
    pub fn new(
        code: Code,
        functions: &[CodeRange],
        parts: &[CodeRange],
        extra: impl IntoIterator<Item = FileAddr>,
    ) -> PatchPlanner {
        PatchPlanner {
            swept: Swept::new(code, functions, parts, extra, None),
        }
    }

    /// Returns the candidates for the patch of the entry of a function, the best one first; at least one.
    ///
    /// # Errors
    ///
    /// If no patch of the entry is possible, or `function` is a part of a function: what holds at an entry does not
    /// hold where a part begins.
    #[doc(hidden)]
    pub fn entry(&self, function: CodeRange) -> Result<Vec<PatchSite>, Refusal> {
        if self.swept.is_part(function) {
            return Err(Refusal::NoFunction);
        }
        self.candidates(&self.body(function)?)
    }

    /// Returns the candidates for the patch of the entry. Refuses a function that reads flags of its caller, as
    /// handwritten code may.
    fn candidates(&self, body: &Body) -> Result<Vec<PatchSite>, Refusal> {
        let index = entry_index(body);
        if flags::are_read_first(&body.instructions, index) {
            return Err(Refusal::LiveFlags { offset: 0 });
        }
        self.swept.candidates(body, index)
    }

    /// Returns the code from `address` on, `len` bytes at most; fewer at the end of a segment.
    pub(crate) fn code(&self, address: FileAddr, len: usize) -> &[u8] {
        self.swept.code.bytes(address.0, len as u64)
    }

    /// Plans the patches of a function, also of the parts that it jumps to.
    pub fn function(&self, function: CodeRange) -> FunctionPlan {
        let body = match self.body(function) {
            Ok(body) => body,
            Err(refusal) => {
                return FunctionPlan {
                    entry: Err(refusal.clone()),
                    exits: Err(refusal),
                };
            }
        };
        let entry = self.candidates(&body);
        let exits = match &entry {
            Ok(candidates) => {
                let plans = self.plan_exits(&body, candidates, |_| Ok(()));
                first_possible(plans.map(|plan| {
                    let plan = plan?;
                    plan.refuse_live_flags(function).map(|()| plan)
                }))
            }
            Err(refusal) => Err(refusal.clone()),
        };
        FunctionPlan { entry, exits }
    }

    /// Plans patches to time one of OCaml 5's wrappers of C functions, so that the next function can be patched, too.
    /// The return becomes a short jump to an island among the instructions that the entry displaces, the call included.
    /// If the plan [overwrites](ExitPlan::overwrites_next) the first byte of the next function, that function has to be
    /// patched with a [prefixed](Jump::Prefixed) jump. `None` for functions of another shape.
    #[doc(hidden)]
    pub fn leaning(&self, function: CodeRange) -> Option<ExitPlan> {
        let body = self.body(function).ok()?;
        let has_parts = !self.swept.parts_of(&body).ok()?.is_empty();
        let candidates = self.candidates(&body).ok()?;
        let mut plans = candidates
            .iter()
            .filter_map(|entry| exits::leaning(&self.swept, &body, entry));
        let plan = plans.next().filter(|_| !has_parts)?;
        plan.refuse_live_flags(function).ok()?;
        Some(plan)
    }

    /// Plans the patches with which a function is timed, the best ones first. If the jump at the entry reaches few
    /// addresses, none of which may be free, or an island that another function may take, other plans follow. Only candidates for the entry that `accept` accepts
    /// are tried.
    ///
    /// # Errors
    ///
    /// If its entry or one of its exits cannot be patched.
    pub(crate) fn exits(
        &self,
        function: CodeRange,
        accept: impl Fn(&PatchSite) -> Result<(), Refusal>,
    ) -> Result<Vec<ExitPlan>, Refusal> {
        let body = self.body(function)?;
        let candidates = self.candidates(&body)?;
        let mut planned = self.plan_exits(&body, &candidates, accept);
        let mut plans = vec![first_possible(&mut planned)?];
        let leads_to_few =
            |plan: &ExitPlan| matches!(plan.entry.jump, Jump::Punned { .. } | Jump::Short { .. });
        while plans.last().is_some_and(leads_to_few) {
            match first_possible(&mut planned) {
                Ok(next) => plans.push(next),
                Err(_) => break,
            }
        }
        Ok(plans)
    }

    /// Plans the patches of a function for each candidate for that of its entry.
    fn plan_exits<'p>(
        &'p self,
        body: &'p Body,
        candidates: &'p [PatchSite],
        accept: impl Fn(&PatchSite) -> Result<(), Refusal> + 'p,
    ) -> impl Iterator<Item = Result<ExitPlan, Refusal>> + 'p {
        candidates.iter().map(move |entry| {
            if entry.is_on_one_page() {
                accept(entry).and_then(|()| self.exits_with(body, entry))
            } else {
                Err(Refusal::PageBorder)
            }
        })
    }

    /// Plans the patches of the exits, given the patch of the entry.
    fn exits_with(&self, body: &Body, entry: &PatchSite) -> Result<ExitPlan, Refusal> {
        let parts = &self.swept.parts_of(body)?;
        let mut all = vec![body.range];
        all.extend(parts);
        let start = body.range.start;
        let mut exits = Exits::new(&self.swept, entry);
        exits.add(body, start, &all)?;
        for part in parts {
            exits.add(&self.body(*part)?, start, &all)?;
        }
        Ok(ExitPlan {
            entry: exits.entry,
            sites: exits.sites,
            overwrites_next: false,
        })
    }

    /// Returns the candidates for a patch of the instruction at `address`, the best one first; at least one.
    ///
    /// # Errors
    ///
    /// If there is no such instruction, or no patch of it is possible.
    #[doc(hidden)]
    pub fn instruction(
        &self,
        function: CodeRange,
        address: FileAddr,
    ) -> Result<Vec<PatchSite>, Refusal> {
        let (body, index) = self.body_at(function, address)?;
        self.swept.candidates(&body, index)
    }

    /// Same as [`PatchPlanner::instruction`], for the site of a USDT probe: a `nop` that no other patch displaces,
    /// because other tools may set a breakpoint there. Where possible, the patch is after the `nop`: with a breakpoint
    /// inside a jump, the program would continue in the middle of the jump.
    pub(crate) fn usdt_site(
        &self,
        function: CodeRange,
        address: FileAddr,
    ) -> Result<Vec<PatchSite>, Refusal> {
        let (body, index) = self.body_at(function, address)?;
        let over = self.swept.candidates_at_site(&body, index);
        let Some(next) = self.swept.after_nop(&body, index) else {
            return over;
        };
        let mut sites = self.swept.candidates(&body, next).unwrap_or_default();
        match over {
            Ok(over) => sites.extend(over),
            Err(refusal) if sites.is_empty() => return Err(refusal),
            Err(_) => {}
        }
        Ok(sites)
    }

    /// Returns a function, or a part of one, and the index of its instruction at `address`.
    fn body_at(&self, function: CodeRange, address: FileAddr) -> Result<(Body, usize), Refusal> {
        let mut body = self.body(function)?;
        if self.swept.is_part(function) {
            let owner = self.swept.owner_of(function).ok_or(Refusal::NoFunction)?;
            // Refuses an owner with a jump whose targets are unknown: it may lead into this part.
            body.set_owner(&self.body(owner)?);
        }
        let offset = address.0.wrapping_sub(function.start.0);
        let index = body.index_at(address.0);
        let index = index.ok_or(Refusal::NoInstruction { offset })?;
        Ok((body, index))
    }

    /// Returns the addresses of some instructions of a function that are executed whenever the one at `address` is:
    /// those near it in the same basic block, first those after it.
    pub(crate) fn executed_with(&self, function: CodeRange, address: FileAddr) -> Vec<FileAddr> {
        const MAX_EACH_WAY: usize = 8;
        let Ok(body) = self.body(function) else {
            return Vec::new();
        };
        let Some(index) = body.index_at(address.0) else {
            return Vec::new();
        };
        let instructions = &body.instructions;
        let goes_on = |index: &usize| {
            let next = instructions.get(index + 1);
            let is_target = |next: &Instruction| self.swept.targets.contains(next.ip());
            is_straight(&instructions[*index]) && next.is_some_and(|next| !is_target(next))
        };
        let after = (index..).take_while(goes_on).map(|index| index + 1);
        let before = (0..index).rev().take_while(goes_on);
        let both = after.take(MAX_EACH_WAY).chain(before.take(MAX_EACH_WAY));
        both.map(|index| FileAddr(instructions[index].ip()))
            .collect()
    }

    fn body(&self, range: CodeRange) -> Result<Body, Refusal> {
        let body = self.swept.body(range)?;
        match exits::unknown_jump(&self.swept, &body) {
            Some(offset) => Err(Refusal::UnknownTargets { offset }),
            None => Ok(body),
        }
    }
}

/// Returns the first plan that is possible, or why the best one is refused.
fn first_possible(
    plans: impl IntoIterator<Item = Result<ExitPlan, Refusal>>,
) -> Result<ExitPlan, Refusal> {
    let mut why = None;
    for planned in plans {
        match planned {
            Ok(plan) => return Ok(plan),
            Err(refusal) => why = why.or(Some(refusal)),
        }
    }
    Err(why.unwrap_or(Refusal::NotCode))
}

/// Plans patches of entries and instructions of some functions of an object, as a [`PatchPlanner`] does. If they are
/// few, it takes less time: most code is not decoded.
pub(crate) struct EntryPlanner<'p> {
    planner: Cow<'p, PatchPlanner>,
}

impl<'p> EntryPlanner<'p> {
    /// Plans with a planner for the whole object.
    pub(crate) fn of(planner: &'p PatchPlanner) -> EntryPlanner<'p> {
        EntryPlanner {
            planner: Cow::Borrowed(planner),
        }
    }

    /// Returns the candidates for the patch of the entry of one of the functions; see [`PatchPlanner::entry`].
    pub(crate) fn entry(&self, function: CodeRange) -> Result<Vec<PatchSite>, Refusal> {
        self.planner.entry(function)
    }

    /// Returns the candidates for a patch of an instruction of one of the functions; see [`PatchPlanner::instruction`].
    pub(crate) fn instruction(
        &self,
        function: CodeRange,
        address: FileAddr,
    ) -> Result<Vec<PatchSite>, Refusal> {
        self.planner.instruction(function, address)
    }

    /// See [`PatchPlanner::usdt_site`].
    pub(crate) fn usdt_site(
        &self,
        function: CodeRange,
        address: FileAddr,
    ) -> Result<Vec<PatchSite>, Refusal> {
        self.planner.usdt_site(function, address)
    }

    /// See [`PatchPlanner::executed_with`].
    pub(crate) fn executed_with(&self, function: CodeRange, address: FileAddr) -> Vec<FileAddr> {
        self.planner.executed_with(function, address)
    }

    /// See [`PatchPlanner::code`].
    pub(crate) fn code(&self, address: FileAddr, len: usize) -> &[u8] {
        self.planner.code(address, len)
    }
}

/// Returns the index of the instruction that is patched to observe an entry: an `endbr64` stays the first one, as
/// indirect branch tracking requires.
fn entry_index(body: &Body) -> usize {
    let first = body.instructions.first().map(|it| it.mnemonic());
    usize::from(first == Some(Mnemonic::Endbr64) && body.instructions.len() > 1)
}

#[cfg(test)]
mod tests;
