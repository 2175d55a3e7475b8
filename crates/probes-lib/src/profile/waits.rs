//! Records of switches → waits, each with what its thread was seen to do. Pure.
//!
//! ```text
//! out ├─────────── look ───────┤ in      the wait has the stack that was read while it lasted
//! out ├──┤ in                            over before it was looked at: unseen; it has the stack of a similar one
//! out ─ ─ look ├───────┤ look ─ ─ in     records were lost: the part that looks show to be one wait
//! ```

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::time::Duration;

use super::looks::{Looks, LooksByLength};
use super::records::{PerfRecord, RecordKind};

/// The waits of the threads of a process; `L` is what a look at a thread tells.
#[derive(Debug)]
pub(super) struct Waits<L> {
    pid: i32,
    /// What was recorded before this time is ignored.
    begun: Duration,
    threads: HashMap<i32, Thread<L>>,
    /// How many threads there were.
    pub(super) thread_count: usize,
    /// How many records were lost.
    pub(super) lost: u64,
    /// Until this time, more records may have been lost at any moment.
    doubtful_until: Duration,
    /// When the clock of the process was last read.
    clock_read: Duration,
    /// How long the process has run since then, by these records.
    ran_since: Duration,
    /// How long threads were off their processors, by these records, and how often they got one again.
    off: Duration,
    arrivals: u64,
}

/// A period in which a thread was off the processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThreadWait<L> {
    pub(super) tid: i32,
    pub(super) since: Duration,
    pub(super) until: Duration,
    /// Whether `since` and `until` are its true begin and end. Otherwise it is a part of a wait that began before recording, has not
    /// ended, or during which records were lost: the length of that wait is not known.
    pub(super) is_whole: bool,
    pub(super) cause: Cause,
    /// What the thread was seen to do meanwhile.
    pub(super) seen: Option<L>,
    /// If it was not seen, what it was last seen to do in a wait of about this length.
    pub(super) similar: Option<L>,
}

impl<L> ThreadWait<L> {
    pub(super) fn time(&self) -> Duration {
        self.until.saturating_sub(self.since)
    }

    /// Returns how long it lasted before the first look and after the last one; `looks` is the time between these two.
    pub(super) fn outside(&self, looks: Range<Duration>) -> (Duration, Duration) {
        let before = self.until.min(looks.start).saturating_sub(self.since);
        let after = self.until.saturating_sub(self.since.max(looks.end));
        (before, after)
    }
}

/// Why a thread was off the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// It waited.
    Wait,
    /// It ran, and we stopped it: it did not wait.
    Stop,
    /// The period began during a stop in which the thread had got a processor: either the stop interrupted a
    /// wait, or the thread had waited for a processor and was stopped as soon as it had one.
    PerhapsStop,
}

impl Cause {
    /// The cause of a period that begins at `at`; the thread had last got a processor at `on_since`, if that is recorded.
    fn of(at: Duration, on_since: Option<Duration>, stops: &[Range<Duration>]) -> Cause {
        match stops.iter().find(|stop| stop.contains(&at)) {
            None => Cause::Wait,
            Some(stop) if on_since.is_none_or(|since| since < stop.start) => Cause::Stop,
            Some(_) => Cause::PerhapsStop,
        }
    }
}

/// Whether a thread is on a processor, and if not, whether it waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    OnProcessor,
    /// It waits for a processor.
    Runnable,
    /// It waits for something else; and then, once that has happened, for a processor.
    Off,
}

#[derive(Debug)]
struct Thread<L> {
    state: SwitchState,
    looks: Looks<L>,
    by_length: LooksByLength<L>,
    on_since: Option<Duration>,
    /// Why it is off the processor, if it is.
    cause: Cause,
    /// How often it has begun to wait.
    waits_begun: u64,
    /// Whether records were lost since its last one.
    is_doubtful: bool,
    /// Whether it waits, and a part of the wait was returned already.
    is_cut: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SwitchState {
    /// Switches have been recorded since this time, and there was none.
    Unknown(Duration),
    On,
    /// It has waited for a processor since this time.
    Runnable(Duration),
    /// It has waited for something else since this time.
    Off(Duration),
}

impl<L: Clone> Waits<L> {
    pub(super) fn of_process(pid: i32, begun: Duration) -> Waits<L> {
        Waits {
            pid,
            begun,
            threads: HashMap::new(),
            thread_count: 0,
            lost: 0,
            doubtful_until: Duration::ZERO,
            clock_read: begun,
            ran_since: Duration::ZERO,
            off: Duration::ZERO,
            arrivals: 0,
        }
    }

    /// Returns how long threads were off their processors, waiting for one or for something else, and how often they got one
    /// again. A wait that lasts is included once [`Waits::lasting`] has returned it.
    pub(super) fn off_and_arrivals(&self) -> (Duration, u64) {
        (self.off, self.arrivals)
    }

    /// Counts waits from this time on. No record may have been added before.
    pub(super) fn begin_at(&mut self, at: Duration) {
        (self.begun, self.clock_read) = (at, at);
        for thread in self.threads.values_mut() {
            thread.state = SwitchState::Unknown(at);
        }
    }

    /// Adds a thread that existed before its switches were recorded.
    pub(super) fn add_existing(&mut self, tid: i32) {
        let at = self.begun;
        if let Entry::Vacant(entry) = self.threads.entry(tid) {
            entry.insert(Thread::in_state(SwitchState::Unknown(at)));
            self.thread_count += 1;
        }
    }

    /// Notes that the clock of the process was read at this time.
    pub(super) fn read_clock(&mut self, at: Duration) {
        (self.clock_read, self.ran_since) = (at, Duration::ZERO);
    }

    /// Returns how long the process has run since then. The time of a thread is added when it leaves its processor.
    pub(super) fn ran_since(&self) -> Duration {
        self.ran_since
    }

    /// Keeps what a thread was seen to do at this time, when it waited.
    pub(super) fn looked(&mut self, tid: i32, at: Duration, look: L) {
        let thread = self.threads.entry(tid).or_insert_with(|| {
            // It is new, and its first records come later.
            self.thread_count += 1;
            Thread {
                on_since: Some(at),
                ..Thread::in_state(SwitchState::On)
            }
        });
        thread.looks.add(at, look);
    }

    /// Notes that a thread has not run since it was last seen to wait, up to this time.
    pub(super) fn extend_look(&mut self, tid: i32, at: Duration) {
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.looks.extend_to(at);
        }
    }

    /// Returns whether a thread waits, and was not looked at since it began to, as far as is known.
    pub(super) fn is_unseen(&self, tid: i32) -> bool {
        self.threads.get(&tid).is_some_and(|thread| {
            let SwitchState::Off(since) = thread.state else {
                return false;
            };
            !thread.looks.reach(since)
        })
    }

    /// Returns how many threads are known.
    pub(super) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Forgets the threads that do not exist any more.
    pub(super) fn retain(&mut self, is_there: impl Fn(i32) -> bool) {
        self.threads.retain(|&tid, _| is_there(tid));
    }

    /// Returns whether a record is of a thread of the process, and of the time that is recorded.
    pub(super) fn is_counted(&self, record: &PerfRecord) -> bool {
        // Before Linux 5.13, those of child processes are recorded, too.
        record.pid == self.pid && record.at >= self.begun
    }

    /// Adds the next record; they are given in the order of their times. Returns the wait that it ends. `stops` are the times
    /// when the process was stopped, at least those that were not over when the record before this one was written.
    pub(super) fn add(
        &mut self,
        record: PerfRecord,
        stops: &[Range<Duration>],
    ) -> Option<ThreadWait<L>> {
        if self.notes_loss(&record.kind) {
            return None;
        }
        let is_exit = record.kind == RecordKind::Exited;
        let is_end = is_exit && record.pid == self.pid;
        if !(is_end || self.is_counted(&record)) {
            return None;
        }
        self.add_to_running(&record);
        let (tid, at) = (record.tid, record.at);
        if is_exit {
            self.threads.remove(&tid);
            return None;
        }
        // A new thread was created by a thread whose switches are recorded.
        let thread = self.threads.entry(tid).or_insert_with(|| {
            self.thread_count += 1;
            Thread::in_state(SwitchState::On)
        });
        let before = thread.state;
        let is_in = record.kind == RecordKind::In;
        let is_over = is_in || thread.is_doubtful;
        let wait = thread.waited(at).filter(|_| is_over);
        let wait = wait.map(|(since, until)| thread.wait(tid, since, until));
        if is_in {
            let waited = wait.as_ref().map_or(Duration::ZERO, ThreadWait::time);
            let preempted = match before {
                SwitchState::Runnable(since) if !thread.is_doubtful => at.saturating_sub(since),
                _ => Duration::ZERO,
            };
            self.off = self.off.saturating_add(waited.max(preempted));
            // A thread may have two events, so that this is recorded twice.
            let is_on = matches!(before, SwitchState::On | SwitchState::Unknown(_));
            self.arrivals += u64::from(!is_on);
        }
        thread.switch(&record, stops);
        thread.is_doubtful = at < self.doubtful_until;
        wait
    }

    /// If the record says that records were lost, or may have been, marks all threads; returns whether it did.
    fn notes_loss(&mut self, kind: &RecordKind) -> bool {
        match *kind {
            RecordKind::Lost(count) => self.lost = self.lost.saturating_add(count),
            RecordKind::Full(until) => self.doubtful_until = self.doubtful_until.max(until),
            _ => return false,
        }
        for thread in self.threads.values_mut() {
            thread.is_doubtful = true;
        }
        true
    }

    /// Adds how long a thread has run, up to a record of it, to [`Waits::ran_since`].
    fn add_to_running(&mut self, record: &PerfRecord) {
        if record.at <= self.clock_read || record.kind == RecordKind::In {
            return;
        }
        let thread = self.threads.get(&record.tid);
        let since = thread.and_then(|thread| thread.ran_from(self.begun));
        let ran = since.map(|since| record.at.saturating_sub(since.max(self.clock_read)));
        self.ran_since = self.ran_since.saturating_add(ran.unwrap_or_default());
    }

    /// Returns where a thread is, as far as is known, and how many waits it has begun.
    pub(super) fn presence(&self, tid: i32) -> (Presence, u64) {
        let Some(thread) = self.threads.get(&tid) else {
            return (Presence::OnProcessor, 0);
        };
        let presence = match thread.state {
            SwitchState::Unknown(_) | SwitchState::On => Presence::OnProcessor,
            SwitchState::Runnable(_) => Presence::Runnable,
            SwitchState::Off(_) => Presence::Off,
        };
        (presence, thread.waits_begun)
    }

    /// Returns the waits that last, up to now. The rest of each is returned later, as a wait that is not whole.
    pub(super) fn lasting(&mut self, now: Duration) -> Vec<ThreadWait<L>> {
        let mut waits = Vec::new();
        for (&tid, thread) in &mut self.threads {
            let Some((since, until)) = thread.waited(now) else {
                continue;
            };
            // It is a part of a wait, and the rest follows.
            thread.is_cut = true;
            waits.push(thread.wait(tid, since, until));
            self.off = self.off.saturating_add(until.saturating_sub(since));
            thread.state = SwitchState::Off(now);
        }
        waits
    }
}

impl<L: Clone> Thread<L> {
    fn in_state(state: SwitchState) -> Thread<L> {
        Thread {
            state,
            looks: Looks::default(),
            by_length: LooksByLength::default(),
            on_since: None,
            cause: Cause::Wait,
            waits_begun: 0,
            is_doubtful: false,
            is_cut: false,
        }
    }

    /// Changes its state, as the next record of it says.
    fn switch(&mut self, record: &PerfRecord, stops: &[Range<Duration>]) {
        let at = record.at;
        // A thread may have two events, its own and one inherited from its creator: a switch is recorded twice then.
        let state = match (&record.kind, self.state) {
            (RecordKind::In, _) => SwitchState::On,
            (_, off @ SwitchState::Off(_)) if !self.is_doubtful => off,
            (RecordKind::Out, _) => SwitchState::Off(at),
            (_, runnable @ SwitchState::Runnable(_)) => runnable,
            (_, _) => SwitchState::Runnable(at),
        };
        if matches!(state, SwitchState::Off(_)) && state != self.state {
            self.waits_begun += 1;
            self.is_cut = false;
            self.cause = Cause::of(at, self.on_since, stops);
        }
        self.looks.forget_before(at);
        self.state = state;
        if record.kind == RecordKind::In {
            self.on_since = Some(at);
        }
    }

    /// Since when it has been on a processor, if it is; since `begun`, when recording began, if that is not recorded.
    fn ran_from(&self, begun: Duration) -> Option<Duration> {
        match self.state {
            SwitchState::On | SwitchState::Unknown(_) => Some(self.on_since.unwrap_or(begun)),
            SwitchState::Runnable(_) | SwitchState::Off(_) => None,
        }
    }

    /// The period in which it is known to have waited, if nothing was recorded since; `None` if it was on a processor, or that is not
    /// known.
    fn waited(&self, now: Duration) -> Option<(Duration, Duration)> {
        let (since, is_unknown) = match self.state {
            SwitchState::Off(since) => (since, false),
            SwitchState::Unknown(since) => (since, true),
            SwitchState::On | SwitchState::Runnable(_) => return None,
        };
        let seen = self.looks.within(since, now);
        if self.is_doubtful {
            // It may have run before it was seen, and after that.
            return seen.map(|look| (look.at.max(since), look.until.min(now)));
        }
        // A thread without records has waited if it was seen to wait; otherwise it may have waited for a processor.
        (seen.is_some() || !is_unknown).then_some((since, now))
    }

    fn wait(&mut self, tid: i32, since: Duration, until: Duration) -> ThreadWait<L> {
        let seen = self.looks.within(since, until);
        let seen = seen.map(|it| it.look.clone());
        let is_whole =
            matches!(self.state, SwitchState::Off(_)) && !self.is_doubtful && !self.is_cut;
        let length = until.saturating_sub(since);
        let similar = match &seen {
            Some(look) if is_whole => {
                self.by_length.add(length, look.clone());
                None
            }
            Some(_) => None,
            None => self.by_length.similar(length).cloned(),
        };
        ThreadWait {
            tid,
            since,
            until,
            is_whole,
            cause: self.cause,
            seen,
            similar,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RecordKind::{Exited, Full, In, Lost, Out, Preempted};

    const PID: i32 = 1;

    fn at(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    fn record(time: u64, kind: RecordKind) -> PerfRecord {
        PerfRecord {
            at: at(time),
            pid: PID,
            tid: PID,
            event: 0,
            kind,
        }
    }

    /// Returns the lengths of the waits, and what was seen of them.
    fn add(
        waits: &mut Waits<&'static str>,
        records: &[(u64, RecordKind)],
    ) -> Vec<(u64, Option<&'static str>)> {
        let found = records
            .iter()
            .filter_map(|(time, kind)| waits.add(record(*time, kind.clone()), &[]));
        let found = found.map(|wait| (wait.time().as_micros() as u64, wait.seen));
        found.collect()
    }

    #[test]
    fn waits_have_what_was_seen_meanwhile() {
        let mut waits = Waits::of_process(PID, at(0));
        waits.add_existing(PID);
        assert_eq!(add(&mut waits, &[(10, Out)]), []);
        assert!(waits.is_unseen(PID));
        waits.looked(PID, at(15), "read");
        assert!(!waits.is_unseen(PID));
        assert_eq!(add(&mut waits, &[(20, In)]), [(10, Some("read"))]);
        // The next two waits are not seen; the first of them is about as long.
        add(&mut waits, &[(30, Out)]);
        let unseen = waits.add(record(38, In), &[]).unwrap();
        assert_eq!((unseen.seen, unseen.similar), (None, Some("read")));
        add(&mut waits, &[(38, Out)]);
        let unseen = waits.add(record(39, In), &[]).unwrap();
        assert_eq!((unseen.seen, unseen.similar), (None, None));
        add(&mut waits, &[(40, Out)]);
        waits.looked(PID, at(44), "poll");
        let lasting = waits.lasting(at(45));
        assert_eq!((lasting[0].time(), lasting[0].seen), (at(5), Some("poll")));
        assert_eq!(add(&mut waits, &[(50, In)])[0].0, 5);
    }

    #[test]
    fn threads_that_wait_from_the_beginning_are_known() {
        let mut waits = Waits::of_process(PID, at(100));
        waits.add_existing(PID);
        waits.looked(PID, at(101), "read");
        // What was recorded before the switches of all threads were is ignored.
        assert_eq!(
            add(&mut waits, &[(99, In), (150, In)]),
            [(50, Some("read"))]
        );
        // One that waits all the time, one that runs all the time, and one that ran at first.
        let mut waits: Waits<&str> = Waits::of_process(PID, at(100));
        for tid in 1..=3 {
            waits.add_existing(tid);
        }
        waits.looked(1, at(101), "read");
        waits.looked(3, at(140), "read");
        let out = PerfRecord {
            tid: 3,
            ..record(130, Out)
        };
        assert_eq!(waits.add(out, &[]), None);
        let mut lasting = waits.lasting(at(160));
        lasting.sort_by_key(|wait| wait.tid);
        let times = lasting.iter().map(|wait| (wait.tid, wait.time()));
        assert_eq!(times.collect::<Vec<_>>(), [(1, at(60)), (3, at(30))]);
    }

    #[test]
    fn parts_of_waits_are_not_whole() {
        let mut waits = Waits::of_process(PID, at(100));
        let whole = |waits: &mut Waits<&str>, time: u64, kind| {
            let wait = waits.add(record(time, kind), &[]);
            wait.map(|wait| (wait.time(), wait.is_whole))
        };
        waits.add_existing(PID);
        waits.looked(PID, at(101), "read");
        // It had begun before.
        assert_eq!(whole(&mut waits, 150, In), Some((at(50), false)));
        assert_eq!(whole(&mut waits, 160, Out), None);
        assert_eq!(whole(&mut waits, 170, In), Some((at(10), true)));
        // It lasts, and then ends.
        whole(&mut waits, 180, Out);
        let lasting = waits.lasting(at(190));
        assert_eq!((lasting[0].time(), lasting[0].is_whole), (at(10), false));
        assert_eq!(whole(&mut waits, 200, In), Some((at(10), false)));
        whole(&mut waits, 210, Out);
        assert_eq!(whole(&mut waits, 220, In), Some((at(10), true)));
        // Records were lost meanwhile.
        whole(&mut waits, 230, Out);
        waits.looked(PID, at(231), "read");
        whole(&mut waits, 232, Lost(1));
        waits.extend_look(PID, at(238));
        assert_eq!(whole(&mut waits, 240, In), Some((at(7), false)));
    }

    #[test]
    fn time_after_the_clock_was_read_is_recorded() {
        let mut waits: Waits<&str> = Waits::of_process(PID, at(100));
        waits.add_existing(PID);
        // It ran from the beginning, and the clock was read meanwhile.
        waits.read_clock(at(110));
        add(
            &mut waits,
            &[(105, Preempted), (107, In), (130, Out), (131, Out)],
        );
        assert_eq!(waits.ran_since(), at(20));
        add(&mut waits, &[(140, In), (145, Exited)]);
        assert_eq!(waits.ran_since(), at(25));
        waits.read_clock(at(150));
        assert_eq!(waits.ran_since(), at(0));
        let mut waits: Waits<&str> = Waits::of_process(PID, at(100));
        waits.add_existing(PID);
        waits.read_clock(at(110));
        add(&mut waits, &[(112, Out)]);
        assert_eq!(waits.ran_since(), at(2), "it ran at first");
    }

    #[test]
    fn waits_outside_of_looks_are_reported() {
        let wait = |since, until| ThreadWait::<()> {
            tid: PID,
            since: at(since),
            until: at(until),
            is_whole: true,
            cause: Cause::Wait,
            seen: None,
            similar: None,
        };
        let outside = |since, until| {
            let (before, after) = wait(since, until).outside(at(100)..at(200));
            (before.as_micros(), after.as_micros())
        };
        assert_eq!(outside(10, 30), (20, 0));
        assert_eq!(outside(90, 130), (10, 0));
        assert_eq!(outside(110, 190), (0, 0));
        assert_eq!(outside(150, 230), (0, 30));
        assert_eq!(outside(210, 230), (0, 20));
        assert_eq!(outside(90, 230), (10, 30));
    }

    #[test]
    fn waiting_for_a_processor_is_not_a_wait() {
        let mut waits = Waits::of_process(PID, at(0));
        waits.add_existing(PID);
        let records = [(10, Preempted), (20, In), (30, Out), (40, In)];
        assert_eq!(add(&mut waits, &records), [(10, None)]);
    }

    #[test]
    fn time_off_processors_is_that_of_all_causes() {
        let mut waits: Waits<&str> = Waits::of_process(PID, at(0));
        waits.add_existing(PID);
        let preempted = [(10, Preempted), (12, Preempted), (20, In), (20, In)];
        add(&mut waits, &preempted);
        assert_eq!(waits.off_and_arrivals(), (at(10), 1));
        add(&mut waits, &[(30, Out), (50, In), (51, In), (60, Out)]);
        assert_eq!(waits.off_and_arrivals(), (at(30), 2));
        waits.lasting(at(65));
        add(&mut waits, &[(70, In)]);
        assert_eq!(waits.off_and_arrivals(), (at(40), 3));
    }

    #[test]
    fn stops_of_running_threads_are_not_waits() {
        let mut waits: Waits<()> = Waits::of_process(PID, at(0));
        let stops = [at(100)..at(200)];
        // When it runs again, the stops may be forgotten.
        let mut cause = |records: &[(u64, RecordKind)]| {
            let ended = records.iter().map(|(time, kind)| {
                let known = if *time <= 200 { &stops[..] } else { &[] };
                waits.add(record(*time, kind.clone()), known)
            });
            ended.flatten().last().unwrap().cause
        };
        // It ran when it was stopped; waited for a processor, and was stopped once it had one; waited later.
        assert_eq!(cause(&[(10, In), (110, Out), (210, In)]), Cause::Stop);
        let records = [(90, Preempted), (120, In), (121, Out), (230, In)];
        assert_eq!(cause(&records), Cause::PerhapsStop);
        assert_eq!(cause(&[(240, Out), (260, In)]), Cause::Wait);
        // It has not run again.
        let mut waits: Waits<()> = Waits::of_process(PID, at(0));
        for (time, kind) in [(10, In), (110, Out)] {
            waits.add(record(time, kind), &stops);
        }
        assert_eq!(waits.lasting(at(300))[0].cause, Cause::Stop);
    }

    #[test]
    fn records_that_come_twice_count_once() {
        let mut waits = Waits::of_process(PID, at(0));
        let records = [(10, In), (10, In), (20, Out), (21, Out), (30, In), (31, In)];
        assert_eq!(add(&mut waits, &records), [(10, None)]);
        let records = [(40, Out), (40, Out), (60, In), (60, In)];
        assert_eq!(add(&mut waits, &records), [(20, None)]);
    }

    #[test]
    fn lost_records_are_counted_and_join_no_waits() {
        let mut waits = Waits::of_process(PID, at(0));
        let records = [(10, Out), (15, Lost(3)), (20, Out), (30, In)];
        assert_eq!(add(&mut waits, &records), [(10, None)]);
        assert_eq!(waits.lost, 3);
    }

    #[test]
    fn waits_with_lost_records_are_what_was_seen() {
        let lost = |records: &[(u64, RecordKind)]| {
            let mut waits = Waits::of_process(PID, at(0));
            assert_eq!(add(&mut waits, &[(10, Out), (15, Lost(2))]), []);
            add(&mut waits, records)
        };
        // It may have run meanwhile.
        assert_eq!(lost(&[(30, In)]), []);
        assert_eq!(lost(&[(30, In), (40, Out), (50, In)]), [(10, None)]);
        let mut waits = Waits::of_process(PID, at(0));
        add(&mut waits, &[(10, Out)]);
        waits.looked(PID, at(12), "read");
        waits.extend_look(PID, at(27));
        add(&mut waits, &[(15, Lost(2))]);
        assert_eq!(add(&mut waits, &[(30, In)]), [(15, Some("read"))]);
        // It waits again, and what is known of the wait before is not lost.
        add(&mut waits, &[(40, Out)]);
        waits.looked(PID, at(42), "poll");
        waits.extend_look(PID, at(44));
        let records = [(45, Lost(1)), (50, Out), (60, In)];
        assert_eq!(add(&mut waits, &records), [(2, Some("poll")), (10, None)]);
        // It lasts.
        add(&mut waits, &[(70, Out)]);
        waits.looked(PID, at(71), "read");
        add(&mut waits, &[(75, Lost(1))]);
        waits.extend_look(PID, at(78));
        assert_eq!(waits.lasting(at(80))[0].time(), at(7));
        waits.extend_look(PID, at(90));
        assert_eq!(waits.lasting(at(95))[0].time(), at(10));
    }

    #[test]
    fn waits_are_not_joined_across_a_full_ring() {
        let mut waits = Waits::of_process(PID, at(0));
        // It ran meanwhile on another processor, whose ring was full; that records were lost is recorded later.
        let records = [(10, Out), (15, Full(at(70))), (60, In)];
        assert_eq!(add(&mut waits, &records), []);
        // Still full.
        assert_eq!(add(&mut waits, &[(62, Out), (68, In)]), []);
        assert_eq!(add(&mut waits, &[(71, Out), (80, In)]), [(9, None)]);
        assert_eq!(waits.lost, 0);
        assert_eq!(add(&mut waits, &[(90, Lost(4))]), []);
        assert_eq!(waits.lost, 4);
        // What was seen is known.
        add(&mut waits, &[(100, Out)]);
        waits.looked(PID, at(105), "read");
        waits.extend_look(PID, at(125));
        let records = [(110, Full(at(140))), (130, In)];
        assert_eq!(add(&mut waits, &records), [(20, Some("read"))]);
    }

    #[test]
    fn threads_may_await_a_processor_at_first() {
        let mut waits: Waits<&str> = Waits::of_process(PID, at(100));
        waits.add_existing(PID);
        assert_eq!(add(&mut waits, &[(150, In)]), []);
        assert_eq!(add(&mut waits, &[(160, Out), (170, In)]), [(10, None)]);
        // The look is of a later wait.
        let mut waits: Waits<&str> = Waits::of_process(PID, at(100));
        waits.add_existing(PID);
        waits.looked(PID, at(165), "read");
        let records = [(150, In), (160, Out), (170, In)];
        assert_eq!(add(&mut waits, &records), [(10, Some("read"))]);
    }

    #[test]
    fn looks_come_before_the_records_of_earlier_waits() {
        // The wait began before the recording. When its end is read, the thread waits again, and was looked at.
        let mut waits = Waits::of_process(PID, at(100));
        waits.add_existing(PID);
        waits.looked(PID, at(101), "poll");
        waits.extend_look(PID, at(140));
        waits.looked(PID, at(165), "sleep");
        assert_eq!(add(&mut waits, &[(150, In)]), [(50, Some("poll"))]);
        assert_eq!(add(&mut waits, &[(160, Out)]), []);
        assert!(!waits.is_unseen(PID));
        assert_eq!(add(&mut waits, &[(170, In)]), [(10, Some("sleep"))]);
        // A wait between two looks is like the one before it.
        waits.looked(PID, at(195), "poll");
        add(&mut waits, &[(180, Out)]);
        let unseen = waits.add(record(185, In), &[]).unwrap();
        assert_eq!((unseen.seen, unseen.similar), (None, Some("sleep")));
        assert_eq!(add(&mut waits, &[(190, Out), (200, In)])[0].1, Some("poll"));
    }

    #[test]
    fn looks_may_come_before_records() {
        let mut waits = Waits::of_process(PID, at(0));
        waits.looked(PID, at(20), "read");
        waits.extend_look(PID, at(25));
        let records = [(10, In), (15, Out), (30, In)];
        assert_eq!(add(&mut waits, &records), [(15, Some("read"))]);
        assert_eq!((waits.thread_count, waits.ran_since()), (1, at(5)));
    }

    #[test]
    fn threads_that_exit_and_other_processes_are_forgotten() {
        let mut waits = Waits::of_process(PID, at(0));
        let records = [(10, Out), (20, In), (30, Exited), (40, In), (50, Exited)];
        assert_eq!(add(&mut waits, &records), [(10, None)]);
        assert!(waits.threads.is_empty());
        assert_eq!(waits.thread_count, 2, "another thread has its tid");
        let other = PerfRecord {
            pid: 2,
            ..record(60, Out)
        };
        assert_eq!(waits.add(other, &[]), None);
        assert!(waits.threads.is_empty());
    }
}
