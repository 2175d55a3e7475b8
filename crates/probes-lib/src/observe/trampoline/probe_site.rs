//! Trampolines of the sites of probes of OCaml, which return, or go on to the handler.

use std::collections::HashMap;
use std::num::NonZeroU64;

use iced_x86::code_asm::{AsmRegister64, CodeAssembler, CodeLabel, rax, rdx};
use iced_x86::{BlockEncoderOptions, IcedError};

use super::at_point::{PointContext, RegisterPlace};
use super::count::{self, SlowPath};
use super::emit::{find_shared_and_time, jump_to, locked_increment};
use super::fields::FieldCopies;
use super::pair::{self, Ends};
use super::{DoesNotFit, FAR_POINTERS, Pointers, SavedRegister, saved_for};
use super::{chosen, filter, keys, record, sampling, values};
use crate::address::LiveAddr;
use crate::observe::layout::arena::{LINE, TAIL_LEN};
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::{FilterRole, Role, WatchRole};
use crate::site::{JUMP_LEN, NOP, RET};

/// How many bytes the trampoline of a site has on the stack: its return address.
pub(super) const PUSHED: u64 = 8;

/// Returns the length of the longest trampoline of sites with these roles, in bytes.
pub(super) fn longest<'r>(
    roles: impl Iterator<Item = &'r Role>,
    layout: SharedLayout,
) -> Result<u64, DoesNotFit> {
    // Most roles differ only in the number of their point.
    let mut lens: HashMap<Role, u64> = HashMap::new();
    let mut longest = LINE;
    for role in roles {
        let mut shape = role.clone();
        for recorded in shape.watched.iter_mut().chain(&mut shape.reported) {
            recorded.point = 0;
        }
        let len = match lens.get(&shape) {
            Some(len) => *len,
            None => {
                let len = len(role, layout)?;
                lens.insert(shape, len);
                len
            }
        };
        longest = longest.max(len);
    }
    Ok(longest)
}

/// Returns the length of a trampoline, in bytes.
pub(super) fn len(role: &Role, layout: SharedLayout) -> Result<u64, DoesNotFit> {
    let (at, count) = FAR_POINTERS;
    let pointers = Pointers {
        count,
        point: 0,
        untyped: 0,
        untyped_locked: at,
        sampled: at,
        shared: at,
        layout,
    };
    let code = recording(at, role, &pointers, count.routine)?;
    Ok((code.len() as u64 + TAIL_LEN).next_multiple_of(LINE))
}

/// Returns the trampoline at `at`, `len` bytes long, of a point that is disabled. `recording` returns the code before
/// its tail, and is given the address of the tail.
pub(super) fn code(
    at: LiveAddr,
    len: u64,
    wrapper: LiveAddr,
    recording: impl FnOnce(LiveAddr) -> Result<Vec<u8>, IcedError>,
) -> Result<Vec<u8>, DoesNotFit> {
    let tail = len.saturating_sub(TAIL_LEN) as usize;
    let tail_at = at.plus(tail as u64);
    let mut code = recording(tail_at)?;
    // A trampoline that was cut off would crash the thread that executes it.
    if code.len() > tail {
        return Err(DoesNotFit);
    }
    code.resize(tail, NOP);
    // The two instructions that a tail can be, `jmp wrapper` and `ret`, differ in the first byte
    // only.
    code.extend(jump_to(wrapper, tail_at.0)?);
    code[tail] = RET;
    code.resize(len as usize, NOP);
    Ok(code)
}

/// Returns the code of a trampoline without its tail, to which it jumps.
pub(super) fn recording(
    at: LiveAddr,
    role: &Role,
    pointers: &Pointers,
    tail: LiveAddr,
) -> Result<Vec<u8>, IcedError> {
    let mut hit = HitAssembler::new(role, pointers)?;
    hit.save_and_check()?;
    hit.count_and_time()?;
    let fields = hit.record_if_watched()?;
    hit.restore_registers()?;
    hit.assemble(at, tail, fields)
}

/// Assembles the code that records a hit, part by part.
struct HitAssembler<'r> {
    a: CodeAssembler,
    role: &'r Role,
    pointers: &'r Pointers,
    saved: &'static [SavedRegister],
    first_check: FirstCheck<'r>,
    /// The saved registers that the first check uses, and the others.
    first: Vec<SavedRegister>,
    others: Vec<SavedRegister>,
    /// Where a hit continues that is not recorded, or for which the filter is untyped.
    skipped: CodeLabel,
    untyped: CodeLabel,
    slow_paths: Vec<SlowPath>,
}

impl<'r> HitAssembler<'r> {
    fn new(role: &'r Role, pointers: &'r Pointers) -> Result<HitAssembler<'r>, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        let saved = saved_for(role);
        let first_check = FirstCheck::of(role);
        let registers = first_check.registers();
        let (first, others) = saved.iter().partition(|(it, _)| registers.contains(it));
        let (skipped, untyped) = (a.create_label(), a.create_label());
        Ok(HitAssembler {
            a,
            role,
            pointers,
            saved,
            first_check,
            first,
            others,
            skipped,
            untyped,
            slow_paths: Vec::new(),
        })
    }

    fn context(&self, saved: &'static [SavedRegister]) -> PointContext {
        PointContext {
            saved,
            saved_at: RegisterPlace::Copies,
            pushed: PUSHED,
            shared: self.pointers.shared,
            layout: self.pointers.layout,
        }
    }

    /// Saves registers, and skips hits that are not recorded.
    fn save_and_check(&mut self) -> Result<(), IcedError> {
        save(&mut self.a, &self.first)?;
        match self.first_check {
            FirstCheck::Filter(filter) => {
                let context = self.context(filter::saved(filter));
                filter::filter(&mut self.a, filter, context, self.skipped, self.untyped)?;
            }
            FirstCheck::Sample(every) => {
                let sampled = self.pointers.sampled;
                sampling::unless_chosen(&mut self.a, every, sampled, self.skipped)?;
            }
            FirstCheck::None => {}
        }
        save(&mut self.a, &self.others)
    }

    /// Counts the hit, and begins or ends the events of pairs.
    fn count_and_time(&mut self) -> Result<(), IcedError> {
        let (role, pointers, saved) = (self.role, self.pointers, self.saved);
        if role.chooses_records() {
            // `RecordedHit` counts the chosen hits, last.
        } else if role.may_be_untyped() {
            let mut over = self.a.create_label();
            self.slow_paths.extend(chosen::filter_and_count(
                &mut self.a,
                role,
                pointers,
                saved,
                PUSHED,
                over,
            )?);
            self.a.set_label(&mut over)?;
            self.a.nop()?;
        } else if role.is_counted {
            let slow_path = count::count_hit(&mut self.a, pointers.count, pointers.point)?;
            self.slow_paths.push(slow_path);
        }
        if !role.ends.is_empty() {
            let context = self.context(saved);
            pair::ends(&mut self.a, Ends::of(role), pointers, context)?;
        } else if role.reads_time() {
            find_shared_and_time(&mut self.a, pointers)?;
        }
        Ok(())
    }

    /// Records the hit one by one, if the point is watched.
    fn record_if_watched(&mut self) -> Result<FieldCopies, IcedError> {
        let Some(watched) = &self.role.watched else {
            return Ok(FieldCopies::default());
        };
        let filters_first = matches!(self.first_check, FirstCheck::Filter(_));
        let samples_first = matches!(self.first_check, FirstCheck::Sample(_));
        let now = RecordedHit {
            role: self.role,
            watched,
            saved: self.saved,
            filter: self.role.filter.as_deref().filter(|_| !filters_first),
            sample: watched.sample.filter(|_| !samples_first),
        };
        let context = self.context(self.saved);
        let slow_paths = &mut self.slow_paths;
        now.emit(
            &mut self.a,
            self.pointers,
            context,
            self.untyped,
            slow_paths,
        )
    }

    /// Restores registers, also of hits that were skipped, and counts those for which the first filter is untyped.
    fn restore_registers(&mut self) -> Result<(), IcedError> {
        restore(&mut self.a, &self.others)?;
        if matches!(self.first_check, FirstCheck::Filter(_)) {
            self.a.jmp(self.skipped)?;
            self.a.set_label(&mut self.untyped)?;
            let counted = locked_increment(self.pointers.untyped_locked)?;
            self.a.add_instruction(counted)?;
        }
        if !self.first.is_empty() {
            self.a.set_label(&mut self.skipped)?;
        }
        restore(&mut self.a, &self.first)?;
        self.a.emms()
    }

    /// Adds the jump to `tail`, and what is out of the way: slow paths and the copies of `fields`. Returns the code at `at`.
    fn assemble(
        mut self,
        at: LiveAddr,
        tail: LiveAddr,
        fields: FieldCopies,
    ) -> Result<Vec<u8>, IcedError> {
        let a = &mut self.a;
        let mut jump = a.create_label();
        a.set_label(&mut jump)?;
        a.db(&[NOP; JUMP_LEN])?;
        for slow_path in self.slow_paths {
            count::emit_slow_path(a, self.pointers.count, slow_path)?;
        }
        fields.emit(a, self.pointers.layout, self.pointers.shared)?;
        let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let assembled = a.assemble_options(at.0, options)?;
        let jump_at = assembled.label_ip(&jump)?;
        let mut code = assembled.inner.code_buffer;
        code[(jump_at - at.0) as usize..][..JUMP_LEN].copy_from_slice(&jump_to(tail, jump_at)?);
        Ok(code)
    }
}

fn save(a: &mut CodeAssembler, registers: &[SavedRegister]) -> Result<(), IcedError> {
    let mut registers = registers.iter();
    registers.try_for_each(|(register, copy)| a.movq(*copy, *register))
}

fn restore(a: &mut CodeAssembler, registers: &[SavedRegister]) -> Result<(), IcedError> {
    let mut registers = registers.iter();
    registers.try_for_each(|(register, copy)| a.movq(*register, *copy))
}

/// What decides first whether a hit is recorded: if it is not, only a few registers are saved.
#[derive(Clone, Copy)]
enum FirstCheck<'r> {
    Filter(&'r FilterRole),
    Sample(NonZeroU64),
    None,
}

impl FirstCheck<'_> {
    fn of(role: &Role) -> FirstCheck<'_> {
        let sample = role.watched.as_ref().and_then(|watched| watched.sample);
        match (&role.filter, sample) {
            _ if !role.is_only_watched() => FirstCheck::None,
            (Some(filter), _) => FirstCheck::Filter(filter),
            (None, Some(every)) => FirstCheck::Sample(every),
            (None, None) => FirstCheck::None,
        }
    }

    /// Returns the registers that it uses.
    fn registers(self) -> Vec<AsmRegister64> {
        match self {
            FirstCheck::Filter(filter) => filter::saved(filter).iter().map(|(it, _)| *it).collect(),
            FirstCheck::Sample(_) => vec![rax, rdx],
            FirstCheck::None => Vec::new(),
        }
    }
}

/// A hit that is recorded after all else that is done with it.
struct RecordedHit<'r> {
    role: &'r Role,
    watched: &'r WatchRole,
    saved: &'static [SavedRegister],
    /// Chooses the hits that are recorded, unless that was done first.
    filter: Option<&'r FilterRole>,
    sample: Option<NonZeroU64>,
}

impl RecordedHit<'_> {
    /// Emits the code that records it and, if a filter chooses hits here, also counts the chosen ones.
    fn emit(
        self,
        a: &mut CodeAssembler,
        pointers: &Pointers,
        context: PointContext,
        mut untyped: CodeLabel,
        slow_paths: &mut Vec<SlowPath>,
    ) -> Result<FieldCopies, IcedError> {
        let mut over = a.create_label();
        if let Some(filter) = self.filter {
            filter::filter(a, filter, context, over, untyped)?;
            self.count_chosen(a, pointers, context, slow_paths)?;
            find_shared_and_time(a, pointers)?;
        }
        if let Some(every) = self.sample {
            sampling::unless_chosen(a, every, pointers.sampled, over)?;
        }
        let fields = record::record(a, self.watched, context)?;
        if self.filter.is_some() {
            a.jmp(over)?;
            a.set_label(&mut untyped)?;
            a.add_instruction(locked_increment(pointers.untyped_locked)?)?;
        }
        if self.filter.is_some() || self.sample.is_some() {
            a.set_label(&mut over)?;
            // There may be another label.
            a.nop()?;
        }
        Ok(fields)
    }

    /// Emits the code that adds a chosen hit to its histogram or its key, or counts it.
    fn count_chosen(
        &self,
        a: &mut CodeAssembler,
        pointers: &Pointers,
        context: PointContext,
        slow_paths: &mut Vec<SlowPath>,
    ) -> Result<(), IcedError> {
        let role = self.role;
        let mut count = |a: &mut CodeAssembler, counter| {
            restore(a, self.saved)?;
            slow_paths.push(count::count_hit(a, pointers.count, counter)?);
            Ok::<(), IcedError>(())
        };
        if role.histogram.is_none() && role.keys.is_none() {
            return if role.is_counted {
                count(a, pointers.point)
            } else {
                Ok(())
            };
        }
        let (mut no_value, mut added) = (a.create_label(), a.create_label());
        if let Some(histogram) = &role.histogram {
            values::record(a, histogram, role.keys.as_deref(), context, no_value)?;
        } else if let Some(keys) = &role.keys {
            let mut other = a.create_label();
            keys::count(a, keys, context, no_value, other)?;
            a.jmp(added)?;
            a.set_label(&mut other)?;
            count(a, pointers.point)?;
        }
        a.jmp(added)?;
        a.set_label(&mut no_value)?;
        count(a, pointers.untyped)?;
        // There is another label.
        a.nop()?;
        a.set_label(&mut added)?;
        a.nop()
    }
}
