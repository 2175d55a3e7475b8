//! Stacks of which only a part was copied.

use test_support::{Talker, fixture, program};

use super::*;

/// `pop offset(%r14)`, with which `caml_c_call` of OCaml 4 begins, and its length.
const POP: ([u8; 3], u64) = ([0x41, 0x8f, 0x86], 7);

fn entry_of(files: &ThreadFiles) -> KernelEntry {
    let slices = files.slices().unwrap().unwrap();
    let moment = files.moment_since(slices).unwrap().unwrap();
    moment.entry().unwrap()
}

/// Returns the stack pointer of a thread, once it is blocked, and the words of its stack.
fn words_of_blocked(stacks: &mut Stacks) -> (u64, Vec<u64>) {
    let pid = stacks.pid();
    let files = ThreadFiles::open(&stacks.process, pid).unwrap().unwrap();
    test_support::eventually("the program waits for a command", || {
        let slices = files.slices().unwrap().unwrap();
        let look = stacks.look(&files, slices, true).unwrap();
        let Look::Blocked(blocked) = look else {
            return None;
        };
        (blocked.stack.end == StackEnd::Outermost).then_some(())
    });
    let start = entry_of(&files);
    let start = start.stack_pointer;
    let words = (start..).step_by(8);
    let words = words.map_while(|at| stacks.memory.read_word(LiveAddr(at)).ok());
    (start, words.take(1 << 16).collect())
}

fn address_of(stacks: &Stacks, name: &str) -> LiveAddr {
    let executable = stacks.functions.executable().unwrap();
    let mut functions = executable.table().functions();
    let found = functions.find(|it| it.name().is_some_and(|found| found.text == name));
    executable
        .load_bias()
        .unwrap()
        .live(found.unwrap().address())
}

#[test]
fn popped_return_address_is_marked_as_guessed() {
    let target = Talker::start(&program("calls"));
    let mut stacks = Stacks::of_process(target.pid()).unwrap();
    let c_call = address_of(&stacks, "caml_c_call");
    let mut code = [0; 3];
    stacks.memory.read(c_call, &mut code).unwrap();
    assert_eq!(code, POP.0);
    let after_pop = LiveAddr(c_call.0 + POP.1);

    let (start, words) = words_of_blocked(&mut stacks);
    let innermost = RawFrame {
        address: after_pop,
        within: after_pop,
    };
    let mut pages = CachedPages::new(&stacks.memory);
    let mut is_call = |word: u64| {
        let address = LiveAddr(word);
        let caller = RawFrame {
            address,
            within: address,
        };
        stacks.unwinder.is_call_of(innermost, caller, &mut pages)
    };
    let index = words.iter().position(|&word| is_call(word)).unwrap();
    let copied = |after: usize| {
        let bytes: Vec<u8> = words[after..]
            .iter()
            .flat_map(|it| it.to_le_bytes())
            .collect();
        let registers = FrameRegisters::new(after_pop.0, start + 8 * after as u64);
        CopiedStack::of_thread(registers, &bytes)
    };
    let found = stacks.of_copied(&copied(index + 1));
    assert_eq!((found.end, found.is_guessed), (StackEnd::Outermost, true));
    assert_eq!(found.frames[1].address.0, words[index]);
    // A word that is no return address, or one of another call, is not taken for it.
    let other = stacks.of_copied(&copied(index + 2));
    assert_eq!((other.end, other.frames.len()), (StackEnd::NotCopied, 1));
}

#[test]
fn stacks_of_two_moments_are_noticed() {
    let target = Talker::start(&program("calls"));
    let mut stacks = Stacks::of_process(target.pid()).unwrap();
    let (start, words) = words_of_blocked(&mut stacks);
    let files = ThreadFiles::open(&stacks.process, target.pid());
    let place = entry_of(&files.unwrap().unwrap());
    let mut pages = CachedPages::new(&stacks.memory);
    let whole = stacks.unwinder.unwind(place.registers(), &mut pages);
    assert!(stacks.unwinder.are_called(&whole.frames, &mut pages));
    // Without one frame, as if its caller had called another function since. Not noticed if a call is by a register,
    // which may lead anywhere.
    let noticed = (1..whole.frames.len() - 1).filter(|missing| {
        let mut frames = whole.frames.clone();
        frames.remove(*missing);
        !stacks.unwinder.are_called(&frames, &mut pages)
    });
    assert!(noticed.count() > 0, "{:x?}", whole.frames);
    drop(pages);
    // The innermost frames were copied, and the rest is read now.
    let copied = |words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
        CopiedStack::of_thread(place.registers(), &bytes)
    };
    let length = words.len().min(16);
    let found = stacks.completed(&copied(&words[..length])).unwrap();
    assert!(
        found.is_guessed && found.end == StackEnd::Outermost,
        "{start:x}"
    );
    assert_eq!(found.frames, whole.frames);
    // The copy has a return address that is not on the stack now.
    let return_address = whole.frames[1].address.0;
    let at = words.iter().position(|it| *it == return_address).unwrap();
    let mut other = words[..=at].to_vec();
    other[at] = whole.frames[2].address.0;
    assert_eq!(stacks.completed(&copied(&other)), None);
}

#[test]
fn threads_without_time_are_read_in_another_stop() {
    let mut target = Talker::start(&fixture("blocked.pie"));
    target.ask("block", "blocked");
    let mut stacks = Stacks::of_process(target.pid()).unwrap();
    let lacking = |readings: &[ThreadReading]| {
        let lacking = readings.iter().filter(|it| it.lacks_registers());
        lacking.map(|it| it.tid).collect::<HashSet<i32>>()
    };
    // One of them runs, and others have frames that their registers lead to.
    let mut readings = test_support::eventually("several lack registers", || {
        let readings = stacks.read_threads().unwrap();
        (lacking(&readings).len() > 1).then_some(readings)
    });
    let many = lacking(&readings);
    let first = stacks.read_stopped(&many, false, Duration::ZERO).unwrap();
    assert_eq!((first.stacks.len(), first.left.len()), (1, many.len() - 1));
    let mut stopped = None;
    let read = stacks.read_lacking(
        &mut readings,
        &mut HashMap::new(),
        Duration::ZERO,
        &mut stopped,
    );
    assert!(read.is_ok() && stopped.is_some(), "{read:?}");
    let found = readings.iter().filter(|it| many.contains(&it.tid));
    let ends = found.map(|it| it.stack.as_ref().map(|stack| stack.end));
    let ends: Vec<_> = ends.collect();
    assert_eq!(ends, vec![Some(StackEnd::Outermost); many.len()]);
}

#[test]
fn pages_used_last_are_read_together() {
    let first = 0x7000;
    assert_eq!(stack_pages(first + 8, &[]), [first, first + PAGE]);
    let used = [0x2000, first + PAGE, 0x3000];
    let pages = [first, 0x2000, first + PAGE, 0x3000];
    assert_eq!(stack_pages(first, &used), pages);
    let last = u64::MAX - PAGE + 1;
    assert_eq!(stack_pages(u64::MAX, &[]), [last]);

    let mut target = Talker::start(&fixture("blocked.pie"));
    target.ask("block", "blocked");
    let mut stacks = Stacks::of_process(target.pid()).unwrap();
    let tids = HashSet::from([target.pid()]);
    let mut read = || {
        let read = stacks.read_stopped(&tids, false, LONGEST_STOP).unwrap();
        let used = stacks.used_pages[&target.pid()].clone();
        (read.stacks[&target.pid()].clone(), used)
    };
    let (one, used) = read();
    assert!(
        one.end == StackEnd::Outermost && used.len() > 1,
        "{used:x?}"
    );
    // Code is not read again.
    let (again, used_again) = read();
    assert_eq!(again, one);
    assert!(
        used_again.iter().all(|page| used.contains(page)),
        "{used_again:x?}"
    );
    // Pages that cannot be read are left out, and those after them.
    let process = Process::open(target.pid()).unwrap();
    assert_eq!(read_pages(&process, &[used[0], 0, used[0]]).len(), 1);
    assert_eq!(read_pages(&process, &used).len(), used.len());
}
