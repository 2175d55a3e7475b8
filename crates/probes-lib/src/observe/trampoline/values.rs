//! The code that adds a value to a histogram: to the greatest and the least value, to the sum, and to its bucket, in
//! this order, so that each value that is counted is between the least and the greatest.
//!
//! Threads are distinguished by their stacks, not by `fs`, which may not be set yet: a copy of the histogram that two
//! threads use is only slower.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmMemoryOperand, CodeAssembler, CodeLabel, eax, edx, qword_ptr, r8, rax, rbx, rcx, rdx, rsi,
    rsp,
};

use super::at_point::PointContext;
use super::emit::{load, offset, spread_of, sub};
use super::filter;
use super::{SAVED_IF_TIMED, SavedRegister, histogram, keys};
use crate::observe::buckets::Linear;
use crate::observe::layout::rows::STACK_PART_BITS;
use crate::observe::layout::values::header;
use crate::observe::role::{FilterRole, HistogramRole, KeyRole};

/// How many of the registers the code uses, from the first, unless the expression needs more.
const USED: usize = 5;

/// Returns the registers that the code uses, with those of a filter before it.
pub(super) fn saved(filter: Option<&FilterRole>, role: &HistogramRole) -> &'static [SavedRegister] {
    let of_filter = filter.map_or(0, |filter| filter::saved(filter).len());
    if of_filter.max(filter::saved_of_integer(&role.integer).len()) > USED {
        &SAVED_IF_TIMED
    } else {
        &SAVED_IF_TIMED[..USED]
    }
}

/// Emits the code that adds the value of a hit to its histogram, or that of its key; goes to `untyped` if it has none.
/// Changes the [`saved`] registers, and with keys, those of [`SAVED_IF_TIMED`].
pub(super) fn record(
    a: &mut CodeAssembler,
    role: &HistogramRole,
    keys: Option<&KeyRole>,
    context: PointContext,
    untyped: CodeLabel,
) -> Result<(), IcedError> {
    match keys {
        None => filter::integer(a, &role.integer, false, context, untyped)?,
        Some(keys) => {
            keys::histogram(a, keys, role.is_signed(), context, untyped)?;
            filter::integer(a, &role.integer, true, context, untyped)?;
        }
    }
    let place = HistogramSlot {
        number: role.number,
        by_key: keys.is_some(),
        is_signed: role.is_signed(),
        linear: role.linear,
    };
    place.add(a, context)
}

/// Emits the code that adds the time in rcx to the histogram with the number in r8. Uses rax, rcx, rdx, rbx and rsi.
pub(super) fn add_time(a: &mut CodeAssembler, context: PointContext) -> Result<(), IcedError> {
    let of_key = HistogramSlot {
        number: 0,
        by_key: true,
        is_signed: false,
        linear: None,
    };
    of_key.add(a, context)
}

/// Which histogram a value is added to, and how.
#[derive(Clone, Copy)]
struct HistogramSlot {
    number: u32,
    /// Whether r8 has the number of the histogram, counted from `number`.
    by_key: bool,
    is_signed: bool,
    linear: Option<Linear>,
}

impl HistogramSlot {
    /// Emits the code that adds the value in rcx to the histogram. Uses rax, rcx, rdx, rbx and rsi.
    fn add(self, a: &mut CodeAssembler, context: PointContext) -> Result<(), IcedError> {
        a.mov(rsi, rcx)?;
        self.locate(a, context)?;
        if self.is_signed {
            a.btc(rcx, 63)?;
        }
        self.update_extremes(a, context)?;
        match self.linear {
            Some(linear) => self.add_to_step(a, linear, context),
            None => self.add_to_bucket(a, context),
        }
    }

    /// Emits the code that puts in rbx how far the header is from where the first header of the number is.
    fn locate(self, a: &mut CodeAssembler, context: PointContext) -> Result<(), IcedError> {
        let group_bits = context.layout.values.group_bits();
        load(a, rbx, context.shared)?;
        if group_bits > 0 {
            a.mov(rax, rsp)?;
            a.shr(rax, STACK_PART_BITS)?;
            spread_of(a, eax, eax, group_bits)?;
            a.shl(rax, header::LEN.ilog2())?;
            a.add(rbx, rax)?;
        }
        if self.by_key {
            a.mov(rax, r8)?;
            a.shl(rax, header::LEN.ilog2() + group_bits)?;
            a.add(rbx, rax)?;
        }
        Ok(())
    }

    /// A field of the header, once it is located.
    fn field(self, of: u64, context: PointContext) -> AsmMemoryOperand {
        let header_at = context.layout.values() + context.layout.values.header(self.number, 0);
        qword_ptr(rbx + offset(header_at + of))
    }

    /// Emits the code that compares the value in rcx with the greatest and the least one so far.
    fn update_extremes(
        self,
        a: &mut CodeAssembler,
        context: PointContext,
    ) -> Result<(), IcedError> {
        for extreme in [header::GREATEST, header::LEAST] {
            let mut again = a.create_label();
            let mut over = a.create_label();
            a.mov(rax, self.field(extreme, context))?;
            a.set_label(&mut again)?;
            a.cmp(rcx, rax)?;
            a.jbe(over)?;
            a.lock().cmpxchg(self.field(extreme, context), rcx)?;
            a.jne(again)?;
            a.set_label(&mut over)?;
            a.not(rcx)?;
        }
        Ok(())
    }

    /// Emits the code that counts the value in rsi in a histogram of equal steps.
    fn add_to_step(
        self,
        a: &mut CodeAssembler,
        linear: Linear,
        context: PointContext,
    ) -> Result<(), IcedError> {
        let (mut counted, mut outside) = (a.create_label(), a.create_label());
        step(a, linear, self.is_signed, outside)?;
        // A value that is alone in its bucket is not added to the sum: the reader knows it.
        if linear.width() == 1 {
            a.jmp(counted)?;
        } else if linear.last_is_one_value() {
            a.cmp(edx, linear.steps())?;
            a.je(counted)?;
        }
        a.set_label(&mut outside)?;
        a.lock().add(self.field(header::SUM, context), rsi)?;
        a.set_label(&mut counted)?;
        a.nop()?;
        self.increment(a, 0, context)
    }

    /// Emits the code that counts the value in rsi in a histogram whose buckets double.
    fn add_to_bucket(self, a: &mut CodeAssembler, context: PointContext) -> Result<(), IcedError> {
        let all = context.layout.values;
        // The buckets of negative numbers mirror the others: that of -1 precedes that of 0.
        let mirror = |a: &mut CodeAssembler| -> Result<(), IcedError> {
            if self.is_signed {
                a.mov(rax, rsi)?;
                a.sar(rax, 63)?;
                a.xor(rdx, rax)?;
            }
            Ok(())
        };
        let mut counted = a.create_label();
        a.mov(rdx, rsi)?;
        mirror(a)?;
        histogram::bucket_of(a, all.precision())?;
        // The buckets below have one value each, which is not added to the sum.
        a.cmp(edx, 2 << all.precision())?;
        a.jb(counted)?;
        a.lock().add(self.field(header::SUM, context), rsi)?;
        a.set_label(&mut counted)?;
        a.nop()?;
        mirror(a)?;
        self.increment(a, all.negative(), context)
    }

    /// Emits the code that increments the bucket in rdx, counted from bucket `zero`.
    fn increment(
        self,
        a: &mut CodeAssembler,
        zero: u64,
        context: PointContext,
    ) -> Result<(), IcedError> {
        let all = context.layout.values;
        if self.by_key || all.group_bits() > 0 {
            // From the header to the buckets: these are as many times as long as it.
            a.mov(rax, rbx)?;
            sub(a, rax, context.shared)?;
            a.imul_3(rax, rax, (all.buckets_len() / header::LEN) as i32 - 1)?;
            a.add(rbx, rax)?;
        }
        let first = context.layout.values() + all.first_bucket(self.number, 0) + 8 * zero;
        a.lock().inc(qword_ptr(rbx + rdx * 8 + offset(first)))
    }
}

/// Emits the code that puts in rdx the bucket of the value in rsi: 0 below the range, then each step, then what is
/// above; goes to `outside` with those that are not in the range. Uses rax and rcx.
fn step(
    a: &mut CodeAssembler,
    linear: Linear,
    is_signed: bool,
    outside: CodeLabel,
) -> Result<(), IcedError> {
    let (start, end) = (linear.start(), linear.end());
    a.xor(edx, edx)?;
    a.mov(rcx, start)?;
    if is_signed {
        a.cmp(rsi, rcx)?;
        a.jl(outside)?;
    } else if start > 0 {
        a.cmp(rsi, rcx)?;
        a.jb(outside)?;
    }
    a.mov(edx, linear.steps() + 1)?;
    if !is_signed && end <= 0 {
        // Nothing without a sign is below that.
        return a.jmp(outside);
    }
    a.mov(rax, end)?;
    a.cmp(rsi, rax)?;
    if is_signed {
        a.jge(outside)?;
    } else {
        a.jae(outside)?;
    }
    a.mov(rdx, rsi)?;
    a.sub(rdx, rcx)?;
    match division(linear) {
        Division::Shift(bits) => a.shr(rdx, bits)?,
        Division::Multiply(factor) => {
            a.mov(rax, factor)?;
            a.mul(rdx)?;
        }
        Division::Divide => {
            a.mov(rax, rdx)?;
            a.xor(edx, edx)?;
            a.mov(rcx, linear.width())?;
            a.div(rcx)?;
            a.mov(rdx, rax)?;
        }
    }
    a.inc(edx)
}

/// How a distance in a range is divided by the width of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Division {
    Shift(u32),
    /// By the upper half of the product: much faster than a division.
    Multiply(u64),
    Divide,
}

fn division(linear: Linear) -> Division {
    let width = linear.width();
    if width.is_power_of_two() {
        return Division::Shift(width.ilog2());
    }
    // The factor is less than 1 above 2⁶⁴ / width: the quotient is exact as long as the distance times the width is
    // below 2⁶⁴.
    let farthest = (i128::from(linear.end()) - i128::from(linear.start())) as u128;
    if farthest * u128::from(width) < 1 << 64 {
        Division::Multiply(u64::MAX / width + 1)
    } else {
        Division::Divide
    }
}

#[cfg(test)]
mod tests {
    use iced_x86::Mnemonic;

    use super::*;

    #[test]
    fn ranges_are_divided_without_div_where_exact() {
        let of = |range: &str| division(range.parse().unwrap());
        assert_eq!(of("0,100,1"), Division::Shift(0));
        assert_eq!(of("-5,100,8"), Division::Shift(3));
        assert_eq!(
            of("0,1000,10"),
            Division::Multiply(1_844_674_407_370_955_162)
        );
        assert_eq!(
            of("0,9000000000000000000,9000000000000001"),
            Division::Divide
        );
    }

    #[test]
    fn ranges_from_zero_have_one_comparison() {
        let comparisons = |range: &str, is_signed: bool| {
            let mut a = CodeAssembler::new(64).unwrap();
            let outside = a.create_label();
            step(&mut a, range.parse().unwrap(), is_signed, outside).unwrap();
            let code = a.instructions().iter();
            code.filter(|it| it.mnemonic() == Mnemonic::Cmp).count()
        };
        assert_eq!(
            ["0,9,1", "1,9,1", "-5,9,1"].map(|it| comparisons(it, false)),
            [1, 2, 1]
        );
        assert_eq!(comparisons("0,9,1", true), 2);
    }

    #[test]
    fn products_are_quotients() {
        for range in [
            "0,999999,100",
            "0,1000,3",
            "-7,30000,7",
            "0,4294967295,4294967",
        ] {
            let linear: Linear = range.parse().unwrap();
            let Division::Multiply(factor) = division(linear) else {
                panic!("{range} is divided");
            };
            let farthest = (linear.end() - linear.start()) as u64;
            let width = linear.width();
            let borders = (0..=farthest / width).map(|step| step * width);
            for distance in borders.flat_map(|it| [it, it.saturating_sub(1), it + width - 1]) {
                let product = u128::from(distance.min(farthest)) * u128::from(factor);
                assert_eq!((product >> 64) as u64, distance.min(farthest) / width);
            }
        }
    }
}
