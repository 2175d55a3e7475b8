//! Stacks, by the unwind tables that every OCaml and C program has (`.eh_frame`): no frame pointers are needed, and no
//! debugging information.
//!
//! ```text
//! tables       file → the row for an address: where its frame's caller is found             pure
//! step         row + registers + memory → the registers of the caller                       pure
//! fibers       OCaml 5: the parent of a fiber while C code has called back into OCaml        pure
//! trampolines  code of an observer → where in the program a thread in it goes on             pure
//! guess        a frame that is addressed by a register which nothing on the stack has saved  pure
//! clone        the caller of a system call that makes a thread, and where that thread begins   pure
//! calls        whether a frame may have called the next inner one, by the code of both       pure
//! ```
//!
//! The tables of OCaml 5 need what most unwinders do not do: expressions that read memory (`caml_c_call`,
//! `caml_start_program`, `caml_runstack`, each signal frame), a stack pointer that goes down where C code was called on
//! another stack, and all registers that a callee saves, each known or not (DWARF 5, section 6.4).

mod calls;
mod clone;
mod fibers;
mod guess;
pub(crate) mod memory;
mod ocaml;
pub(crate) mod registers;
mod step;
mod tables;
#[cfg(test)]
mod tests;
pub(crate) mod trampolines;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use calls::JumpsOut;
use memory::StackMemory;
use ocaml::CodeAround;
use registers::{FrameRegisters, RAX, RBP, RSP};
use tables::{Cfa, UnwindRow, UnwindTables};
use trampolines::{AfterTrampoline, MappedTrampolines, Place, Writes};

/// The most frames of a stack that are looked at.
const MAX_FRAMES: usize = 1 << 16;

/// How many rows are kept.
const MAX_KEPT_ROWS: usize = 1 << 15;

/// One frame of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RawFrame {
    /// The instruction that is executed next: of the innermost frame, or of a caller when the call returns.
    pub(crate) address: LiveAddr,
    /// An address within the instruction that is executing: for a caller, that of its call.
    pub(crate) within: LiveAddr,
}

/// Why no more frames follow.
///
/// [`HitStack`](crate::HitStack) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum StackEnd {
    /// The last frame is that of the code that a thread begins with: the stack is complete.
    #[error("complete")]
    Outermost,
    /// No file that is mapped has code there: it was generated, or its file cannot be read.
    #[error("no file is known that has the code at {0}")]
    UnknownCode(LiveAddr),
    /// The file has no unwind table, or the table says nothing, or nothing usable, of this code.
    #[error("no unwind table describes the code at {0}")]
    NoUnwindInfo(LiveAddr),
    /// The frame is addressed by a register whose value is not known.
    #[error("the frame of the code at {0} is addressed by a register that is not known")]
    UnknownRegister(LiveAddr),
    /// What the stack holds is not readable.
    #[error("the memory at {0} cannot be read")]
    Unreadable(LiveAddr),
    /// Of a hit: only the innermost part of the stack was copied, or frames on another stack (of a fiber, or of C)
    /// were not.
    #[error("no more of the stack was copied")]
    NotCopied,
    /// A frame is its own caller.
    #[error("the frame of the code at {0} is its own caller")]
    Loop(LiveAddr),
    /// It has more than 65,536 frames.
    #[error("it has more than {MAX_FRAMES} frames")]
    TooDeep,
}

impl StackEnd {
    /// Whether the code that is missing may have been loaded since the files of the process were read.
    pub(crate) fn may_be_loaded_since(&self) -> bool {
        matches!(self, StackEnd::UnknownCode(at) if at.0 != 0)
    }
}

/// The frames of one stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RawStack {
    /// The innermost first.
    pub(crate) frames: Vec<RawFrame>,
    pub(crate) end: StackEnd,
    /// Whether a frame was found by searching the stack, because a register was not known.
    pub(crate) is_guessed: bool,
}

/// What is needed of the files of a process to find the frames of its stacks.
pub(crate) struct Unwinder {
    /// In the order of their addresses.
    objects: Vec<UnwindObject>,
    trampolines: Vec<MappedTrampolines>,
    rows: HashMap<u64, Option<Arc<UnwindRow>>>,
    /// By the starts of functions.
    jumps_out: HashMap<u64, JumpsOut>,
}

struct UnwindObject {
    start: u64,
    end: u64,
    bias: LoadBias,
    tables: Arc<UnwindTables>,
}

impl UnwindObject {
    /// Returns where code of the file is in the process.
    fn live(&self, code: &Range<u64>) -> Range<u64> {
        let live = |address| self.bias.live(FileAddr(address)).0;
        live(code.start)..live(code.end)
    }

    fn row(&self, within: LiveAddr) -> Option<UnwindRow> {
        self.tables.row(self.bias.file(within))
    }

    /// Returns the row of the code that a stub of OCaml returns to, if its `own` row lacks trap frames.
    fn row_after_stub(&self, own: &UnwindRow, code: &CodeAround) -> Option<UnwindRow> {
        let jump = code.jump_back(&self.live(&own.function))?;
        let target = self.row(LiveAddr(jump.target))?;
        // Otherwise the call does not return, and the jump is other code.
        let is_one = ocaml::trap_frames_between(own, &self.row(LiveAddr(jump.at))?) == Some(0);
        let lacking = ocaml::trap_frames_between(own, &target)?;
        (is_one && lacking != 0).then_some(target)
    }
}

/// What unwinding from one frame leads to.
enum Next {
    Caller,
    End(StackEnd),
    Guessed(RawStack),
}

/// Returns an address within the current instruction of a frame. Unless its address `is_exact`, it is that of the
/// instruction after a call.
fn within(address: u64, is_exact: bool) -> LiveAddr {
    LiveAddr(address.wrapping_sub(u64::from(!is_exact)))
}

impl Unwinder {
    /// Reads the unwind tables of the files that are loaded at these places. A file without one is known, and its code
    /// cannot be unwound.
    pub(crate) fn of<'e>(files: impl Iterator<Item = (&'e ElfFile, LoadBias)>) -> Unwinder {
        let mut known: HashMap<*const ElfFile, Arc<UnwindTables>> = HashMap::new();
        let mut objects = Vec::new();
        for (elf, bias) in files {
            let tables = known
                .entry(std::ptr::from_ref(elf))
                .or_insert_with(|| Arc::new(UnwindTables::of(elf)));
            for segment in elf.loaded().filter(|segment| segment.executable) {
                let start = bias.live(segment.start).0;
                objects.push(UnwindObject {
                    start,
                    end: start.saturating_add(segment.len),
                    bias,
                    tables: tables.clone(),
                });
            }
        }
        objects.sort_by_key(|object| object.start);
        Unwinder {
            objects,
            trampolines: Vec::new(),
            rows: HashMap::new(),
            jumps_out: HashMap::new(),
        }
    }

    /// Returns where files and observers are known to have code.
    pub(crate) fn code(&self) -> impl Iterator<Item = Range<u64>> {
        let of_files = self.objects.iter().map(|object| object.start..object.end);
        of_files.chain(self.trampolines.iter().map(|it| it.code.clone()))
    }

    /// Returns the trampolines that it knows.
    pub(crate) fn trampolines(&self) -> &[MappedTrampolines] {
        &self.trampolines
    }

    /// Replaces the trampolines that it knows by those that are mapped now.
    pub(crate) fn set_trampolines(&mut self, mapped: Vec<MappedTrampolines>) {
        if mapped != self.trampolines {
            self.trampolines = mapped;
            // Both are of the code as it was, patched or not.
            self.rows.clear();
            self.jumps_out.clear();
        }
    }

    /// Returns the trampolines that have code there.
    fn trampolines_at(&self, address: u64) -> Option<&MappedTrampolines> {
        let mut mapped = self.trampolines.iter();
        mapped.find(|it| it.code.contains(&address))
    }

    /// Returns whether a file is known that has code there.
    pub(crate) fn has_code(&self, address: LiveAddr) -> bool {
        self.object(address.0).is_some()
    }

    fn object(&self, address: u64) -> Option<&UnwindObject> {
        let after = self.objects.partition_point(|it| it.start <= address);
        let object = self.objects.get(after.checked_sub(1)?)?;
        (address < object.end).then_some(object)
    }

    /// Returns the row for an address; an error if there is none.
    fn row(
        &mut self,
        within: LiveAddr,
        memory: &mut impl StackMemory,
    ) -> Result<Arc<UnwindRow>, StackEnd> {
        if let Some(row) = self.rows.get(&within.0) {
            return row.clone().ok_or(StackEnd::NoUnwindInfo(within));
        }
        let object = self.object(within.0);
        let object = object.ok_or(StackEnd::UnknownCode(within))?;
        let mut row = object.row(within);
        if let Some(own) = row.take_if(|row| row.is_as_in_ocaml()) {
            let Some(code) = CodeAround::read(within.0, memory) else {
                // It is not kept, as the code may be readable another time.
                return Ok(Arc::new(own));
            };
            row = object.row_after_stub(&own, &code).or(Some(own));
        }
        let row = row.map(Arc::new);
        if self.rows.len() >= MAX_KEPT_ROWS {
            self.rows.clear();
        }
        self.rows.insert(within.0, row.clone());
        row.ok_or(StackEnd::NoUnwindInfo(within))
    }

    /// Returns the function that has code at an address.
    fn function_at(&mut self, address: u64, memory: &mut impl StackMemory) -> Option<Range<u64>> {
        let row = self.row(LiveAddr(address), memory).ok()?;
        Some(self.object(address)?.live(&row.function))
    }

    /// Returns whether a frame has called the function of another by a direct call.
    pub(crate) fn is_call_of(
        &mut self,
        callee: RawFrame,
        caller: RawFrame,
        memory: &mut impl StackMemory,
    ) -> bool {
        let function = self.function_at(callee.within.0, memory);
        function.is_some_and(|it| guess::follows_call(caller.address.0, Some(&it), memory))
    }

    /// Returns whether two addresses are in the code of one function.
    fn is_one_function(
        &mut self,
        one: LiveAddr,
        other: LiveAddr,
        memory: &mut impl StackMemory,
    ) -> bool {
        let function = self.function_at(one.0, memory);
        function.is_some_and(|it| it.contains(&other.0))
    }

    /// Returns the frames of the stack of a thread that has these registers.
    pub(crate) fn unwind(
        &mut self,
        registers: FrameRegisters,
        memory: &mut impl StackMemory,
    ) -> RawStack {
        self.unwind_from(registers, true, true, memory)
    }

    /// Same as [`Unwinder::unwind`], from any frame. Unless the address of the frame `is_exact`, it is that of the
    /// instruction after a call. Searches the stack for a caller only if it `may_guess`.
    fn unwind_from(
        &mut self,
        mut registers: FrameRegisters,
        mut is_exact: bool,
        may_guess: bool,
        memory: &mut impl StackMemory,
    ) -> RawStack {
        let mut stack = RawStack {
            frames: Vec::new(),
            end: StackEnd::TooDeep,
            is_guessed: false,
        };
        let top = registers.get(RSP).unwrap_or(0);
        let mut switches = fibers::StackSwitches::beginning_at(top);
        while stack.frames.len() < MAX_FRAMES {
            let (described, writes) = match self.after_trampoline(registers, is_exact, memory) {
                Some(after) => {
                    stack.frames.push(RawFrame {
                        address: after.point,
                        within: after.point,
                    });
                    registers = after.registers;
                    is_exact = after.place == Place::Instruction;
                    if after.place == Place::Caller {
                        continue;
                    }
                    (within(registers.ip, is_exact), after.writes)
                }
                None => {
                    let within = within(registers.ip, is_exact);
                    let address = LiveAddr(registers.ip);
                    stack.frames.push(RawFrame { address, within });
                    let mut described = within;
                    if is_exact && stack.frames.len() == 1 {
                        let handler = ocaml::handler_of_raised(&registers, memory);
                        if let Some(handler) = handler.filter(|it| self.has_code(LiveAddr(it.ip))) {
                            registers = handler;
                            described = LiveAddr(handler.ip);
                            if !self.is_one_function(within, described, memory) {
                                continue;
                            }
                        }
                    }
                    (described, Writes::default())
                }
            };
            let next = self.next(
                &mut registers,
                described,
                &mut is_exact,
                may_guess,
                &mut switches,
                &mut writes.over(memory),
            );
            match next {
                Next::Caller => {}
                Next::End(end) => {
                    stack.end = end;
                    break;
                }
                Next::Guessed(rest) => {
                    stack.frames.extend(rest.frames);
                    stack.end = rest.end;
                    stack.is_guessed = true;
                    break;
                }
            }
        }
        stack
    }

    /// Returns where a thread goes on if it is in a trampoline; `None` if it is in none, or that is not known. Only a thread
    /// whose address `is_exact` can be in one: nothing that a trampoline calls returns to it.
    fn after_trampoline(
        &self,
        registers: FrameRegisters,
        is_exact: bool,
        memory: &mut impl StackMemory,
    ) -> Option<AfterTrampoline> {
        if !is_exact {
            return None;
        }
        let mapped = self.trampolines_at(registers.ip)?;
        mapped.after(registers, memory)
    }

    /// Returns the registers of the caller if the frame is a word longer than its row says.
    fn above_pushed(
        &self,
        row: &UnwindRow,
        frame: FrameRegisters,
        within: LiveAddr,
        memory: &mut impl StackMemory,
    ) -> Option<FrameRegisters> {
        let Cfa::Register(RSP, offset) = row.cfa else {
            return None;
        };
        let cfa = frame.get(RSP)?.checked_add_signed(offset)?.checked_add(8)?;
        let mut caller = frame;
        step::step(row, &mut caller, within, memory, Some(cfa)).ok()?;
        let is_caller = guess::follows_call(caller.ip, None, memory);
        (is_caller && self.has_code(LiveAddr(caller.ip))).then_some(caller)
    }

    /// Replaces the registers of a frame that no table describes by those of its caller, if it makes a thread.
    fn next_of_clone(
        &mut self,
        registers: &mut FrameRegisters,
        memory: &mut impl StackMemory,
    ) -> Next {
        let not_described = Next::End(StackEnd::NoUnwindInfo(LiveAddr(registers.ip)));
        let Some(place) = clone::place(registers.ip, memory) else {
            return not_described;
        };
        let new_thread = self.row(LiveAddr(place.new_thread), memory);
        if !new_thread.is_ok_and(|row| row.return_address.is_none()) {
            return not_described;
        }
        let result = registers.get(RAX).filter(|_| place.is_after_call);
        if result != Some(0) {
            let caller = registers.returned(memory);
            let is_caller = |it: &FrameRegisters| guess::follows_call(it.ip, None, memory);
            if let Some(caller) = caller.filter(is_caller) {
                *registers = caller;
                return Next::Caller;
            }
        }
        let may_be_new = place.is_after_call && result.is_none_or(|it| it == 0);
        if may_be_new {
            Next::End(StackEnd::Outermost)
        } else {
            not_described
        }
    }

    /// Replaces the registers of a frame by those of its caller.
    fn next(
        &mut self,
        registers: &mut FrameRegisters,
        within: LiveAddr,
        is_exact: &mut bool,
        may_guess: bool,
        switches: &mut fibers::StackSwitches,
        memory: &mut impl StackMemory,
    ) -> Next {
        let row = match self.row(within, memory) {
            Ok(row) => row,
            Err(StackEnd::NoUnwindInfo(_)) if *is_exact => {
                *is_exact = false;
                return self.next_of_clone(registers, memory);
            }
            Err(end) => return Next::End(end),
        };
        let stack_pointer = registers.get(RSP).unwrap_or(0);
        let before = *registers;
        let mut stepped = step::step(&row, registers, within, memory, None);
        if registers.ip < ocaml::LOWEST_CODE && stepped.is_ok() {
            // Code of OCaml 5 has pushed a size, which the table does not know, to call `caml_call_realloc_stack`.
            if let Some(caller) = self.above_pushed(&row, before, within, memory) {
                *registers = caller;
            }
        }
        if stepped == Err(StackEnd::Unreadable(LiveAddr(0))) {
            if let Some(cfa) = switches.cleared_parent(memory) {
                stepped = step::step(&row, registers, within, memory, Some(cfa));
            }
        }
        if matches!(row.cfa, Cfa::Expression(_)) {
            switches.add(stack_pointer, registers.get(RSP).unwrap_or(0));
        }
        match stepped {
            Ok(()) => {
                // OCaml 5 says of the functions that switch stacks that they are signal frames. Their callers have made
                // ordinary calls; a real signal frame has its return address elsewhere.
                *is_exact = row.is_signal_frame && !row.has_return_address_below_cfa();
                Next::Caller
            }
            Err(StackEnd::UnknownRegister(_))
                if may_guess && row.has_cfa_from(RBP) && registers.get(RBP).is_none() =>
            {
                match guess::caller(self, &row, *registers, *is_exact, memory) {
                    Some(rest) => Next::Guessed(rest),
                    None => Next::End(StackEnd::UnknownRegister(within)),
                }
            }
            Err(end) => Next::End(end),
        }
    }
}
