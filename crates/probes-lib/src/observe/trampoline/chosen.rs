//! Counts the hits that a filter chooses, adds their values to a histogram, or counts them by keys.

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, CodeLabel};

use super::at_point::{PointContext, RegisterPlace};
use super::count::{self, SlowPath};
use super::emit::locked_increment;
use super::saved::{LockedRegisters, RegisterSaver, SaveArea};
use super::{Pointers, SAVED_IF_COUNTED, SAVED_IF_TIMED, SavedRegister, saved_for};
use super::{filter, keys, values};
use crate::address::LiveAddr;
use crate::observe::role::Role;

/// Emits the code that, if the filter is true, adds a value to the histogram of the point, or counts the hit by its
/// key, or in the first counter of the point if there are no keys, or no room for this one. An untyped hit is counted
/// in the second counter. The code goes on at `over`, or after itself. The registers `saved` are in their copies; in
/// the end, all of them but those of [`SAVED_IF_COUNTED`] hold these again. `pushed` bytes of the trampoline are on the
/// stack.
pub(super) fn filter_and_count(
    a: &mut CodeAssembler,
    role: &Role,
    pointers: &Pointers,
    saved: &'static [SavedRegister],
    pushed: u64,
    over: CodeLabel,
) -> Result<Vec<SlowPath>, IcedError> {
    let (mut is_false, mut untyped) = (a.create_label(), a.create_label());
    let context = PointContext {
        saved,
        saved_at: RegisterPlace::Copies,
        pushed,
        shared: pointers.shared,
        layout: pointers.layout,
    };
    let restore = |a: &mut CodeAssembler| -> Result<(), IcedError> {
        let others = saved.iter().filter(|it| !SAVED_IF_COUNTED.contains(it));
        for (register, copy) in others {
            a.movq(*register, *copy)?;
        }
        // A label needs an instruction.
        a.nop()
    };
    let mut slow_paths = Vec::new();
    if let Some(filter) = &role.filter {
        filter::filter(a, filter, context, is_false, untyped)?;
    }
    if let Some(histogram) = &role.histogram {
        values::record(a, histogram, role.keys.as_deref(), context, untyped)?;
        a.jmp(is_false)?;
    } else {
        if let Some(keys) = &role.keys {
            let mut other = a.create_label();
            keys::count(a, keys, context, untyped, other)?;
            a.jmp(is_false)?;
            a.set_label(&mut other)?;
        }
        restore(a)?;
        slow_paths.push(count::count_hit(a, pointers.count, pointers.point)?);
        a.jmp(over)?;
    }
    a.set_label(&mut untyped)?;
    restore(a)?;
    slow_paths.push(count::count_hit(a, pointers.count, pointers.untyped)?);
    a.jmp(over)?;
    a.set_label(&mut is_false)?;
    restore(a)?;
    Ok(slow_paths)
}

/// Emits the code that does the same as [`filter_and_count`], and saves and restores registers itself, at a place
/// that may be under the lock `locked`. Both counters of the point are incremented by locked instructions: the first
/// one, at `counter`, and the second one, which also counts the hits for which the lock is not free.
pub(super) fn count_saved(
    a: &mut CodeAssembler,
    role: &Role,
    pointers: &Pointers,
    place: SaveArea,
    (locked, counter): (LockedRegisters, LiveAddr),
) -> Result<(), IcedError> {
    let (mut is_false, mut untyped) = (a.create_label(), a.create_label());
    // `RegisterSaver` saves the first ones of SAVED_IF_TIMED: rax as well.
    let saved = match saved_for(role) {
        saved if saved.len() == SAVED_IF_COUNTED.len() => &SAVED_IF_TIMED[..3],
        saved => saved,
    };
    let mut saver = RegisterSaver::new(a, place, saved.len(), locked);
    saver.save(a)?;
    let context = saver.context(pointers.shared, pointers.layout);
    if let Some(filter) = &role.filter {
        filter::filter(a, filter, context, is_false, untyped)?;
    }
    match (&role.histogram, &role.keys) {
        (Some(histogram), keys) => {
            values::record(a, histogram, keys.as_deref(), context, untyped)?;
        }
        (None, Some(keys)) => {
            let mut other = a.create_label();
            keys::count(a, keys, context, untyped, other)?;
            a.jmp(is_false)?;
            a.set_label(&mut other)?;
            a.add_instruction(locked_increment(counter)?)?;
        }
        (None, None) => a.add_instruction(locked_increment(counter)?)?,
    }
    a.jmp(is_false)?;
    a.set_label(&mut untyped)?;
    a.add_instruction(locked_increment(locked.unsaved)?)?;
    a.set_label(&mut is_false)?;
    a.nop()?;
    saver.restore(a)
}
