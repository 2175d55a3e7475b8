//! [`PatchSite`]: a place in code, and the jump that can be put there.

use std::ops::{Range, RangeInclusive};

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::error::Refusal;
use crate::patch_plan::code::decode;
use crate::patch_plan::displaced::{DisplacedCopy, DisplacedExit, ExitKind};
use crate::patch_plan::jump::{JUMP_LEN, Jump, PREFIX_LEN, SHORT_JMP, SHORT_LEN};
use crate::site::JMP;

/// A place in code that can be patched: a jump replaces the displaced instructions, which are executed at the end of
/// the trampoline.
///
/// [`PatchPlanner`](crate::PatchPlanner) finds them.
///
/// ```
/// use probes_lib::{Code, CodeRange, FileAddr, LiveAddr, LoadBias, PatchPlanner};
///
/// // mov $1,%eax; ret
/// let mut code = Code::default();
/// code.add(FileAddr(0x1000), b"\xb8\x01\0\0\0\xc3".to_vec(), true);
/// let function = CodeRange { start: FileAddr(0x1000), len: 6 };
/// let planner = PatchPlanner::new(code, &[function], &[], []);
/// let site = &planner.function(function).entry?[0];
/// assert_eq!(site.displaced(), b"\xb8\x01\0\0\0");
///
/// // The object is loaded 0x40_0000 higher, and a trampoline is at 0x50_0000.
/// let (bias, trampoline) = (LoadBias(0x40_0000), LiveAddr(0x50_0000));
/// assert!(site.trampolines(bias).contains(&trampoline));
/// let writes = site.writes(bias, trampoline).unwrap();
/// assert_eq!(writes, [(LiveAddr(0x40_1000), b"\xe9\xfb\xef\x0f\0".to_vec())]);
/// let copy = site.copy_at(bias, trampoline)?;
/// assert!(copy.code().starts_with(site.displaced()));
/// assert_eq!(copy.moved(LiveAddr(0x40_1000)), Some(trampoline));
/// # Ok::<(), probes_lib::Refusal>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchSite {
    pub(super) address: FileAddr,
    pub(super) displaced: Vec<u8>,
    pub(super) jump: Jump,
    pub(super) moves_call: bool,
    pub(super) flags_are_dead: bool,
    pub(super) exits: Vec<DisplacedExit>,
    pub(super) mmx_is_free: bool,
}

impl PatchSite {
    /// The address of the first displaced instruction. It is that of the first byte that is overwritten, unless the
    /// jump is [prefixed](Jump::Prefixed).
    pub fn address(&self) -> FileAddr {
        self.address
    }

    /// The bytes of the instructions that are displaced: at least one.
    pub fn displaced(&self) -> &[u8] {
        &self.displaced
    }

    /// Returns the first displaced byte at which no instruction begins, so that no debugger sets a breakpoint there.
    pub(crate) fn harmless_byte(&self) -> Option<(FileAddr, u8)> {
        let mut instructions = decode(&self.displaced, self.address.0);
        let at = instructions.find(|it| it.len() > 1)?.ip() + 1;
        let byte = self.displaced.get((at - self.address.0) as usize)?;
        Some((FileAddr(at), *byte))
    }

    /// Returns the address of the first byte that is overwritten.
    pub(crate) fn jump_address(&self) -> FileAddr {
        match self.jump {
            Jump::Prefixed => FileAddr(self.address.0.wrapping_add(PREFIX_LEN)),
            _ => self.address,
        }
    }

    /// Returns the same site with its jump after the first byte, if that is a REX prefix and there is room: then the
    /// patch of what is before it may overwrite that byte. `None` if it cannot be patched so.
    pub fn prefixed(&self) -> Option<PatchSite> {
        const REX: RangeInclusive<u8> = 0x40..=0x4f;
        let has_prefix = REX.contains(self.displaced.first()?);
        let has_room = self.displaced.len() as u64 >= PREFIX_LEN + JUMP_LEN;
        let is_near = self.jump == Jump::Near { padding: 0 };
        (is_near && has_prefix && has_room).then(|| PatchSite {
            jump: Jump::Prefixed,
            ..self.clone()
        })
    }

    /// How the site jumps to its trampoline.
    pub fn jump(&self) -> Jump {
        self.jump
    }

    /// Whether a call is displaced. Its return costs about 8 ns more, because the processor mispredicts it.
    pub fn moves_call(&self) -> bool {
        self.moves_call
    }

    /// Whether the trampoline may change the status flags before it executes the displaced instructions.
    pub fn flags_are_dead(&self) -> bool {
        self.flags_are_dead
    }

    /// The exits of the function among the displaced instructions, in order, if the site was planned to observe them.
    pub fn exits(&self) -> &[DisplacedExit] {
        &self.exits
    }

    /// Leaves out the exits that are not returns.
    pub(crate) fn keep_returns(&mut self) {
        self.exits.retain(|exit| exit.kind == ExitKind::Return);
    }

    /// Returns whether the bytes that are written are on one page, so that they can be written at once. Five bytes
    /// count at the site, even if fewer are written.
    pub(crate) fn is_on_one_page(&self) -> bool {
        let page = |at: FileAddr| at.0 / PAGE;
        let is_whole = |at: FileAddr| page(at) == page(FileAddr(at.0.wrapping_add(JUMP_LEN - 1)));
        is_whole(self.address)
            && is_whole(self.jump_address())
            && match self.jump {
                Jump::Short { island } => is_whole(island) && page(island) == page(self.address),
                _ => true,
            }
    }

    /// Whether the trampoline may use the MMX registers if it leaves them empty (`emms`), because the function uses
    /// neither them nor the x87 unit.
    pub fn mmx_is_free(&self) -> bool {
        self.mmx_is_free
    }

    /// The bytes that no other patch may overwrite: those at the site that are displaced, overwritten or, if the jump
    /// is punned, have to stay as they are; and those of its island.
    pub fn reserved(&self) -> impl Iterator<Item = Range<FileAddr>> + use<> {
        let len = match self.jump {
            Jump::Short { .. } => SHORT_LEN,
            _ => JUMP_LEN,
        };
        let start = self.jump_address();
        let before = start.0.wrapping_sub(self.address.0);
        let len = len.max((self.displaced.len() as u64).saturating_sub(before));
        let range = |start: FileAddr, len| start..FileAddr(start.0.saturating_add(len));
        let island = match self.jump {
            Jump::Short { island } => Some(range(island, JUMP_LEN)),
            _ => None,
        };
        [Some(range(start, len)), island].into_iter().flatten()
    }

    /// Returns where the trampoline can begin if the object is loaded with this bias.
    pub fn trampolines(&self, bias: LoadBias) -> Range<LiveAddr> {
        let origin = i128::from(bias.live(self.origin()).0);
        let window = self.displacements();
        let clip = |address: i128| LiveAddr(address.clamp(0, 1 << 47) as u64);
        clip(origin + window.start)..clip(origin + window.end)
    }

    /// Returns the file address to which the displacement of the jump to the trampoline is added: the one after that
    /// jump.
    fn origin(&self) -> FileAddr {
        let jump = match self.jump {
            Jump::Short { island } => island,
            _ => self.jump_address(),
        };
        FileAddr(jump.0.wrapping_add(JUMP_LEN))
    }

    fn displacements(&self) -> Range<i128> {
        match self.jump {
            Jump::Punned {
                chosen,
                displacement,
            } => {
                let start = i128::from(displacement);
                start..start + (1 << (8 * chosen))
            }
            _ => i32::MIN.into()..i128::from(i32::MAX) + 1,
        }
    }

    /// Returns where the trampoline can begin, in the file's address space, without wrapping around.
    pub(super) fn window(&self) -> Range<i128> {
        let origin = i128::from(self.origin().0);
        let Range { start, end } = self.displacements();
        origin + start..origin + end
    }

    /// Returns what has to be written, and where, so that the site jumps to `trampoline`; `None` if it cannot be
    /// reached. An island comes first.
    pub fn writes(&self, bias: LoadBias, trampoline: LiveAddr) -> Option<Vec<(LiveAddr, Vec<u8>)>> {
        let from = i128::from(bias.live(self.origin()).0);
        let displacement = i128::from(trampoline.0) - from;
        if !self.displacements().contains(&displacement) {
            return None;
        }
        let operand = i32::try_from(displacement).ok()?.to_le_bytes();
        let at = bias.live(self.jump_address());
        let near = |operand: &[u8]| [&[JMP], operand].concat();
        Some(match self.jump {
            Jump::Near { .. } | Jump::Prefixed => vec![(at, near(&operand))],
            Jump::Punned { chosen, .. } => vec![(at, near(&operand[..usize::from(chosen)]))],
            Jump::Short { island } => {
                let after = self.address.0.wrapping_add(SHORT_LEN);
                let short = island.0.wrapping_sub(after) as i64;
                let short = i8::try_from(short).ok()?.to_le_bytes();
                vec![
                    (bias.live(island), near(&operand)),
                    (at, vec![SHORT_JMP, short[0]]),
                ]
            }
        })
    }

    /// Returns the displaced instructions as they have to be executed at `to`, if the object is loaded with this bias.
    ///
    /// # Errors
    ///
    /// If `to` is too far from what they refer to.
    pub fn copy_at(&self, bias: LoadBias, to: LiveAddr) -> Result<DisplacedCopy, Refusal> {
        DisplacedCopy::make(&self.displaced, bias.live(self.address), to)
    }

    /// The same with more code at each exit, which is executed when the function is about to be left there: what
    /// `at_exit` returns for its address and kind. It may change the status flags; see
    /// [`DisplacedExit::flags_are_dead`].
    pub(crate) fn copy_with_exits(
        &self,
        bias: LoadBias,
        to: LiveAddr,
        at_exit: &mut dyn FnMut(LiveAddr, ExitKind) -> Result<Vec<u8>, Refusal>,
    ) -> Result<DisplacedCopy, Refusal> {
        let from = bias.live(self.address);
        DisplacedCopy::make_with_exits(&self.displaced, from, to, &self.exits, at_exit)
    }
}
