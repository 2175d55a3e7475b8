//! Trampolines of the sites of probes of OCaml, which return, or go on to the handler.

use std::collections::HashMap;
use std::num::NonZeroU64;

use iced_x86::code_asm::{AsmRegister64, CodeAssembler, CodeLabel, rax, rdx};
use iced_x86::{BlockEncoderOptions, IcedError};

use super::at_point::{PointContext, SavedAt};
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
    let mut a = CodeAssembler::new(64)?;
    let saved = saved_for(role);
    let first_check = FirstCheck::of(role);
    let registers = first_check.registers();
    let (first, others): (Vec<SavedRegister>, Vec<SavedRegister>) =
        saved.iter().partition(|(it, _)| registers.contains(it));
    let (mut skipped, mut untyped) = (a.create_label(), a.create_label());
    let context = |saved| PointContext {
        saved,
        saved_at: SavedAt::Copies,
        pushed: PUSHED,
        shared: pointers.shared,
        layout: pointers.layout,
    };
    save(&mut a, &first)?;
    match first_check {
        FirstCheck::Filter(filter) => {
            let context = context(filter::saved(filter));
            filter::filter(&mut a, filter, context, skipped, untyped)?;
        }
        FirstCheck::Sample(every) => {
            sampling::unless_chosen(&mut a, every, pointers.sampled, skipped)?;
        }
        FirstCheck::None => {}
    }
    save(&mut a, &others)?;
    let mut slow_paths = Vec::new();
    if role.chooses_records() {
        // `RecordedHit` counts the chosen hits, last.
    } else if role.may_be_untyped() {
        let mut over = a.create_label();
        slow_paths.extend(chosen::filter_and_count(
            &mut a, role, pointers, saved, PUSHED, over,
        )?);
        a.set_label(&mut over)?;
        a.nop()?;
    } else if role.is_counted {
        slow_paths.push(count::count_hit(&mut a, pointers.count, pointers.point)?);
    }
    if !role.ends.is_empty() {
        pair::ends(&mut a, Ends::of(role), pointers, context(saved))?;
    } else if role.reads_time() {
        find_shared_and_time(&mut a, pointers)?;
    }
    let fields = match &role.watched {
        Some(watched) => {
            let now = RecordedHit {
                role,
                watched,
                saved,
                filter: (role.filter.as_deref())
                    .filter(|_| !matches!(first_check, FirstCheck::Filter(_))),
                sample: (watched.sample).filter(|_| !matches!(first_check, FirstCheck::Sample(_))),
            };
            now.emit(&mut a, pointers, context(saved), untyped, &mut slow_paths)?
        }
        None => FieldCopies::default(),
    };
    restore(&mut a, &others)?;
    if matches!(first_check, FirstCheck::Filter(_)) {
        a.jmp(skipped)?;
        a.set_label(&mut untyped)?;
        a.add_instruction(locked_increment(pointers.untyped_locked)?)?;
    }
    if !first.is_empty() {
        a.set_label(&mut skipped)?;
    }
    restore(&mut a, &first)?;
    a.emms()?;
    let mut jump = a.create_label();
    a.set_label(&mut jump)?;
    a.db(&[NOP; JUMP_LEN])?;
    for slow_path in slow_paths {
        count::emit_slow_path(&mut a, pointers.count, slow_path)?;
    }
    fields.emit(&mut a, pointers.layout, pointers.shared)?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let assembled = a.assemble_options(at.0, options)?;
    let jump_at = assembled.label_ip(&jump)?;
    let mut code = assembled.inner.code_buffer;
    code[(jump_at - at.0) as usize..][..JUMP_LEN].copy_from_slice(&jump_to(tail, jump_at)?);
    Ok(code)
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
