//! [`Point`]: a place in the code of a process whose executions, called hits, can be observed. Only computes: no access
//! to processes or files.
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

use crate::address::{LiveAddr, PAGE};
use crate::patch_plan::jump::{SHORT_JMP, SHORT_LEN};
use crate::site::{CALL, CMP, INT3, JMP, OPCODE_OFFSET, SITE_LEN, SiteCode, near_branch};

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
        /// Whether it is a site of a USDT probe.
        is_usdt: bool,
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
    /// Some bytes of its patch and some original ones: the process has discarded a page of the patch, a tool was killed
    /// while it wrote, or another tool has removed its own breakpoint and restored the byte of the file, as the kernel
    /// does with uprobes.
    PartlyPatched,
    /// Its patch with breakpoints of another tool in it. That tool will write the original bytes over them.
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
        let near = |opcode, at: LiveAddr| near_branch(opcode, at, trampoline);
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

    /// Returns whether its patch may be written in steps, the opcode `cmp` first: only that of a
    /// site may.
    pub(crate) fn may_be_written_in_steps(&self) -> bool {
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

    /// Whether it is a site of a USDT probe.
    pub(crate) fn is_usdt(&self) -> bool {
        matches!(self.kind, PointKind::Instruction { is_usdt: true, .. })
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
    pub(crate) fn classify(&self, place: &PatchPlace, found: [u8; PATCH_LEN]) -> PlaceState {
        let PointKind::Site { .. } = self.kind else {
            // It is written at once, so that it is half patched only if another tool wrote there.
            return match PatchBytes::of(&found[..place.after.len()]) {
                found if found == place.after => PlaceState::Patched,
                found if found == place.before => PlaceState::Unpatched,
                found if is_under_breakpoint(place, &found) => PlaceState::UnderBreakpoint,
                found if is_partly_restored(place, &found) => PlaceState::PartlyPatched,
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

/// Returns whether `found` is a patch of an instruction of which some bytes are the original ones again.
fn is_partly_restored(place: &PatchPlace, found: &[u8]) -> bool {
    let mut both = found
        .iter()
        .zip(place.before.iter().zip(place.after.iter()));
    both.all(|(byte, (own, patched))| byte == own || byte == patched)
}

/// Returns whether each byte of a displacement is either the original one or that of the patch.
fn is_mixed(place: &PatchPlace, found: &[u8; PATCH_LEN]) -> bool {
    let both = place.before.iter().zip(place.after.iter());
    let mut bytes = found.iter().zip(both).skip(1);
    bytes.all(|(byte, (own, patched))| byte == own || byte == patched)
}

/// Returns whether a patch at an address crosses a boundary between blocks of this size.
pub(crate) fn crosses(patch_at: LiveAddr, block: u64) -> bool {
    patch_at.0 / block != patch_at.plus(PATCH_LEN as u64 - 1).0 / block
}

#[cfg(test)]
mod tests {
    use super::*;

    const POINT: Point = Point {
        address: LiveAddr(0x1000),
        kind: PointKind::Site {
            operand: [0xfa, 0x0f, 0, 0],
        },
    };
    const TRAMPOLINE: LiveAddr = LiveAddr(0x806);

    /// Returns the state that `found` means at the only place of a site.
    fn classified(address: u64, found: [u8; PATCH_LEN]) -> PlaceState {
        let point = Point {
            address: LiveAddr(address),
            ..POINT
        };
        // As if the trampoline were as far away as that of POINT.
        let mut place = only(POINT.places(TRAMPOLINE));
        place.at = point.address.plus(1);
        point.classify(&place, found)
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
                is_usdt: false,
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
        assert_eq!(punned.classify(&place, after), PlaceState::Patched);
        assert_eq!(
            punned.classify(&place, [1, 2, 3, 4, 9]),
            PlaceState::Unpatched
        );
        // A breakpoint at its first byte, or at the last one, was taken away.
        for partly in [[1, 1, 0xf8, 0xff, 9], [JMP, 1, 0xf8, 4, 9]] {
            let classified = punned.classify(&place, partly);
            assert_eq!(classified, PlaceState::PartlyPatched);
        }
        assert_eq!(
            punned.classify(&place, [JMP, 2, 3, 5, 9]),
            PlaceState::Other
        );
        for under in [[INT3, 1, 0xf8, 0xff, 9], [JMP, 1, 0xf8, INT3, 9]] {
            assert_eq!(punned.classify(&place, under), PlaceState::UnderBreakpoint);
        }
        for other in [[INT3, 2, 3, 4, 9], [INT3; PATCH_LEN]] {
            assert_eq!(punned.classify(&place, other), PlaceState::Other);
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
            classified(0x1000, [CALL, 0, 0xf8, 0xff, 0xff]),
            PlaceState::Patched
        );
        for found in [[CMP, 0, 0xf8, 0xff, 0xff], [CMP, 0, 0x0f, 0, 0]] {
            assert_eq!(classified(0x1000, found), PlaceState::PartlyPatched);
        }
        assert_eq!(
            classified(0x1000, [CALL, 0, 0x0f, 0, 0]),
            PlaceState::Unpatched
        );
        assert_eq!(classified(0x1000, [CMP, 1, 0x0f, 0, 0]), PlaceState::Other);
        // Still all original bytes: half written only if the patch crosses a page boundary.
        let own = [CMP, 0xfa, 0x0f, 0, 0];
        assert_eq!(classified(0x1000, own), PlaceState::Unpatched);
        for (address, crosses) in [(0xffa, false), (0xffb, true), (0xffe, true), (0xfff, false)] {
            let expected = if crosses {
                PlaceState::PartlyPatched
            } else {
                PlaceState::Unpatched
            };
            assert_eq!(classified(address, own), expected, "{address}");
        }
    }

    #[test]
    fn discarded_second_page_leaves_a_half_patch() {
        let half = [CALL, 0, 0xf8, 0, 0];
        assert_eq!(classified(0xffc, half), PlaceState::PartlyPatched);
        assert_eq!(classified(0xffa, half), PlaceState::Unpatched);
        assert_eq!(
            classified(0xffc, [CALL, 0xfa, 0x0f, 0, 0]),
            PlaceState::Unpatched
        );
        assert_eq!(classified(0xffc, [0xcc, 0, 0xf8, 0, 0]), PlaceState::Other);
    }

    #[test]
    fn breakpoints_and_other_code_are_not_ours() {
        assert_eq!(
            classified(0x1000, [0xcc, 0, 0xf8, 0xff, 0xff]),
            PlaceState::Other
        );
        assert_eq!(classified(0x1000, [CALL, 1, 2, 3, 4]), PlaceState::Other);
    }

    #[test]
    fn sites_entries_and_exits_are_distinguished() {
        let instruction = |is_exit| Point {
            address: LiveAddr(0x1000),
            kind: PointKind::Instruction {
                before: PatchBytes::of(&[1, 2, 3, 4, 5]),
                island: None,
                is_exit,
                is_usdt: false,
            },
        };
        let what = |point: Point| {
            (
                point.is_site(),
                point.may_be_written_in_steps(),
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
                is_usdt: false,
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
}
