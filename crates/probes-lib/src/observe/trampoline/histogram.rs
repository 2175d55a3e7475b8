//! The code that counts a time in a histogram.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, cl, dword_ptr, eax, ecx, edx, qword_ptr, rax, rbx, rcx, rdx,
};

use super::emit::{offset, spread};
use crate::observe::layout::histogram::LONGEST_BITS;

/// The histograms of a pair or a function: one for each group of threads.
#[derive(Clone, Copy)]
pub(super) struct Histograms {
    /// The offset of the first one in the shared data.
    pub(super) at: u64,
    /// The length of each in bytes.
    pub(super) len: u64,
    /// Binary logarithm of how many groups there are.
    pub(super) group_bits: u32,
    /// Whether the group of a thread is computed from the base of `fs`, and not from the word there, which is the same
    /// address but cannot be read before the thread has a control block.
    pub(super) by_fs_base: bool,
    /// The offset of a word that has a bit for each group that has counted a time, if there is one.
    pub(super) groups: Option<u64>,
}

/// Emits the code that replaces the time in rdx by its bucket, computed like `layout::histogram::bucket`, but with
/// `precision` mantissa bits. The code uses rax and rcx.
pub(super) fn bucket(a: &mut CodeAssembler, precision: u32) -> Result<(), IcedError> {
    let mut fits = a.create_label();
    a.mov(rax, rdx)?;
    a.shr(rax, LONGEST_BITS)?;
    a.je(fits)?;
    a.mov(rdx, (1_u64 << LONGEST_BITS) - 1)?;
    a.set_label(&mut fits)?;
    bucket_of(a, precision)
}

/// Emits the code that replaces the number of 64 bits in rdx by its bucket, computed like
/// `layout::histogram::bucket_of`. The code uses rax and rcx.
pub(super) fn bucket_of(a: &mut CodeAssembler, precision: u32) -> Result<(), IcedError> {
    a.mov(rax, rdx)?;
    a.or(rax, 1 << precision)?;
    a.bsr(rcx, rax)?;
    a.sub(ecx, precision as i32)?;
    a.shr(rdx, cl)?;
    a.shl(ecx, precision)?;
    a.add(edx, ecx)
}

/// Emits the code that adds one to the bucket in rdx of the histogram of the thread's group. Expects the address of the
/// shared data in rbx; leaves in rax that address plus the distance of the group's data from those of the first group.
/// The code uses rcx.
pub(super) fn add(a: &mut CodeAssembler, histograms: Histograms) -> Result<(), IcedError> {
    if histograms.group_bits == 0 {
        a.mov(rax, rbx)?;
    } else {
        if histograms.by_fs_base {
            a.rdfsbase(eax)?;
        } else {
            a.mov(eax, dword_ptr(0).fs())?;
        }
        spread(a, eax, histograms.group_bits)?;
        if let Some(groups) = histograms.groups {
            let mut is_known = a.create_label();
            let groups = qword_ptr(rbx + offset(groups));
            a.mov(rcx, groups)?;
            a.bt(rcx, rax)?;
            a.jc(is_known)?;
            a.lock().bts(groups, rax)?;
            a.set_label(&mut is_known)?;
        }
        a.imul_3(rax, rax, histograms.len as i32)?;
        a.add(rax, rbx)?;
    }
    a.lock()
        .inc(qword_ptr(rax + rdx * 8 + offset(histograms.at)))
}
