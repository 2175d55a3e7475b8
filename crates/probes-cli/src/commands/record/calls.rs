//! [`CallStacks`]: the calls that are open, on each stack. A call is known by its place on the stack; calls at lower
//! places were unwound when a call at a higher place begins or ends.

use foldhash::HashMap;
use probes_lib::{CallFrame, Event, EventKind, LiveAddr};

use super::track_writer::{ENDED, TrackWriter};
use crate::output::{Annotation, RecordCounts, TrackEventKind, TrackId, hit_annotations};

/// How many calls may be open at once, on all stacks: calls beyond that are not recorded.
const MAX_OPEN: usize = 500_000;

/// How many stacks are known at once.
const MAX_STACKS: usize = 16_384;

const UNWOUND: &str = "unwound: seen here at the latest";
const UNWOUND_OR_LOST: &str = "unwound, or its exit was lost: seen here at the latest";
const TAIL: &str = "by a call in tail position";

/// The stack that a call is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum StackId {
    OfThread(i32),
    OfFiber(u64),
}

/// The lane of a fiber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FiberLane {
    /// The thread that it is below.
    pub(super) thread: i32,
    pub(super) index: usize,
    pub(super) track: TrackId,
}

/// The calls that are open, on all stacks.
#[derive(Default)]
pub(super) struct CallStacks {
    indices: HashMap<StackId, usize>,
    stacks: Vec<OpenCalls>,
    /// The indices of `stacks` that are not used.
    unused: Vec<usize>,
    /// The stack that had the last event: most stacks have many in a row.
    last: Option<(StackId, usize)>,
    /// How many calls are open.
    open: usize,
    /// How long the longest call lasted that has ended, in nanoseconds, and its function; `None` if none has.
    longest: Option<(u64, String)>,
}

/// The calls of one stack.
struct OpenCalls {
    id: StackId,
    track: TrackId,
    /// `None` for the stack of a thread.
    lane: Option<FiberLane>,
    calls: Vec<OpenCall>,
    left_out: LeftOut,
    /// When it had the last event.
    used: u64,
}

impl OpenCalls {
    /// Whether no call is open, recorded or left out.
    fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.left_out.0.is_none()
    }

    /// Pops the innermost call if `is` holds for it.
    fn pop_if(&mut self, is: impl Fn(&OpenCall) -> bool) -> Option<OpenCall> {
        let last = self.calls.last().copied().filter(|call| is(call))?;
        self.calls.pop();
        Some(last)
    }
}

#[derive(Clone, Copy)]
struct OpenCall {
    place: i64,
    address: LiveAddr,
    began: u64,
    /// How many hits were lost before it.
    lost: u64,
}

/// The place of the outermost call of a stack that was left out, and has not ended.
#[derive(Default)]
struct LeftOut(Option<i64>);

impl LeftOut {
    /// A call at this place is left out.
    fn add(&mut self, place: i64) {
        self.0 = self.0.max(Some(place));
    }

    /// A call at this place ends, and those at lower ones were unwound; returns whether it may be one that was left
    /// out.
    fn leave(&mut self, place: i64) -> bool {
        let is_left_out = self.0 >= Some(place);
        self.0 = self.0.filter(|outermost| *outermost > place);
        is_left_out
    }
}

impl CallStacks {
    /// Returns the index of a stack that is known.
    pub(super) fn find(&mut self, id: StackId) -> Option<usize> {
        match self.last {
            Some((last, index)) if last == id => Some(index),
            _ => {
                let index = *self.indices.get(&id)?;
                self.last = Some((id, index));
                Some(index)
            }
        }
    }

    /// Adds a stack, and returns its index.
    pub(super) fn add(
        &mut self,
        id: StackId,
        (track, lane): (TrackId, Option<FiberLane>),
        now: u64,
    ) -> usize {
        let stack = OpenCalls {
            id,
            track,
            lane,
            calls: Vec::new(),
            left_out: LeftOut::default(),
            used: now,
        };
        let index = match self.unused.pop() {
            Some(index) => {
                self.stacks[index] = stack;
                index
            }
            None => {
                self.stacks.push(stack);
                self.stacks.len() - 1
            }
        };
        self.indices.insert(id, index);
        index
    }

    /// Forgets a stack; returns the lane that is not used any more.
    fn remove(&mut self, index: usize) -> Option<FiberLane> {
        let stack = &mut self.stacks[index];
        stack.calls = Vec::new();
        let (id, lane) = (stack.id, stack.lane.take());
        self.indices.remove(&id);
        self.unused.push(index);
        self.last = self.last.filter(|(last, _)| *last != id);
        lane
    }

    /// A function is called.
    pub(super) fn enter(
        &mut self,
        index: usize,
        (event, frame): (&Event, CallFrame),
        writer: &mut TrackWriter,
        counts: &mut RecordCounts,
    ) {
        let time = event.monotonic;
        self.leave_inner(index, frame.place.saturating_add(1), time, writer, counts);
        let stack = &mut self.stacks[index];
        stack.left_out.leave(frame.place);
        if self.open >= MAX_OPEN {
            counts.too_deep += 1;
            stack.left_out.add(frame.place);
            return;
        }
        stack.used = time;
        stack.calls.push(OpenCall {
            place: frame.place,
            address: event.address(),
            began: time,
            lost: counts.lost_hits,
        });
        self.open += 1;
        counts.slices += 1;
        let kind = TrackEventKind::Begin(writer.function_name(event));
        writer.emit(stack.track, time, kind, hit_annotations(event));
    }

    /// A call ends, by a return or a jump. Returns the lane that is not used any more.
    pub(super) fn leave(
        &mut self,
        index: usize,
        (event, frame): (&Event, CallFrame),
        writer: &mut TrackWriter,
        counts: &mut RecordCounts,
    ) -> Option<FiberLane> {
        let time = event.monotonic;
        self.leave_inner(index, frame.place, time, writer, counts);
        let stack = &mut self.stacks[index];
        stack.used = time;
        let is_left_out = stack.left_out.leave(frame.place);
        match stack.pop_if(|call| call.place == frame.place) {
            Some(call) if call.address == event.address() => {
                let mut arguments = hit_annotations(event);
                if event.kind == EventKind::Jump {
                    arguments.push(Annotation::text(ENDED, TAIL));
                }
                if let (Some(lane), Some(thread)) = (stack.lane, event.thread) {
                    if lane.thread != thread {
                        arguments.push(Annotation::int("thread", thread));
                    }
                }
                self.open -= 1;
                if call.lost == counts.lost_hits {
                    let lasted = time.saturating_sub(call.began);
                    if self.longest.as_ref().is_none_or(|(most, _)| lasted > *most) {
                        self.longest = Some((lasted, event.name().to_owned()));
                    }
                } else {
                    let doubt = "hits were lost meanwhile: this may be more than one call";
                    arguments.push(Annotation::text("doubt", doubt));
                }
                writer.emit(stack.track, time, TrackEventKind::End, arguments);
            }
            Some(call) => {
                self.open -= 1;
                unwind(stack.track, call, time, writer, counts);
                counts.unmatched_exits += 1;
            }
            None if is_left_out => {}
            None => counts.unmatched_exits += 1,
        }
        // The stack of a thread is used again.
        let is_over = stack.lane.is_some() && stack.is_empty();
        is_over.then(|| self.remove(index)).flatten()
    }

    /// Ends the calls of a stack at places below this one: they were unwound.
    fn leave_inner(
        &mut self,
        index: usize,
        place: i64,
        time: u64,
        writer: &mut TrackWriter,
        counts: &mut RecordCounts,
    ) {
        let stack = &mut self.stacks[index];
        while let Some(call) = stack.pop_if(|call| call.place < place) {
            self.open -= 1;
            unwind(stack.track, call, time, writer, counts);
        }
    }

    /// Makes room for another stack: those without calls are forgotten, and if more than half of the room is still
    /// taken, the [`MAX_STACKS`] / 4 that have had no event for longest. Returns the lanes that are not used any more.
    pub(super) fn make_room(
        &mut self,
        writer: &mut TrackWriter,
        counts: &mut RecordCounts,
    ) -> Vec<FiberLane> {
        if self.indices.len() < MAX_STACKS {
            return Vec::new();
        }
        let known = self.indices.values().copied();
        let (empty, mut others): (Vec<usize>, Vec<usize>) =
            known.partition(|index| self.stacks[*index].is_empty());
        if others.len() < MAX_STACKS / 2 {
            others.clear();
        }
        others.sort_unstable_by_key(|index| self.stacks[*index].used);
        others.truncate(MAX_STACKS / 4);
        for index in &others {
            let used = self.stacks[*index].used;
            self.leave_inner(*index, i64::MAX, used, writer, counts);
        }
        let forgotten = empty.into_iter().chain(others);
        forgotten.filter_map(|index| self.remove(index)).collect()
    }

    /// Takes all open calls. Returns the track of each.
    pub(super) fn take_all(&mut self) -> Vec<TrackId> {
        let stacks = self.indices.values().map(|index| &self.stacks[*index]);
        let open = stacks.flat_map(|stack| stack.calls.iter().map(|_| stack.track));
        let open = open.collect();
        let longest = self.longest.take();
        *self = CallStacks {
            longest,
            ..CallStacks::default()
        };
        open
    }

    /// The tracks of all stacks.
    pub(super) fn tracks(&self) -> impl Iterator<Item = TrackId> {
        self.indices.values().map(|index| self.stacks[*index].track)
    }

    /// How long the longest call lasted that has ended, in nanoseconds, and its function; `None` if none has.
    pub(super) fn longest(&self) -> Option<(u64, &String)> {
        self.longest.as_ref().map(|(lasted, name)| (*lasted, name))
    }
}

fn unwind(
    track: TrackId,
    call: OpenCall,
    time: u64,
    writer: &mut TrackWriter,
    counts: &mut RecordCounts,
) {
    counts.unwound += 1;
    let how = if call.lost == counts.lost_hits {
        UNWOUND
    } else {
        UNWOUND_OR_LOST
    };
    writer.end_slices(track, 1, time, how);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_of_left_out_calls_are_known() {
        let mut left_out = LeftOut::default();
        assert!(!left_out.leave(5));
        for place in [9, 8, 7] {
            left_out.add(place);
        }
        assert!(left_out.leave(7) && left_out.leave(8) && left_out.leave(9));
        assert!(!left_out.leave(9));
        // An exception ends all of them.
        left_out.add(9);
        assert!(!left_out.leave(10) && !left_out.leave(9));
    }
}
