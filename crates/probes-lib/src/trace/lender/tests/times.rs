//! Limits of time: silent tools and followers, slow stops, and how long a process was stopped.

use super::*;

// promise: Following: If a tool sends nothing while a followed process is stopped on its behalf, its lease is lost: the process is
//    resumed, and later requests of that tool fail
#[test]
fn silent_tool_loses_the_process() {
    let mut talker = Talker::start_with(&fixture("idle_threads.pie"), ["4"]);
    let pid = talker.pid();
    let follower = Follower::of(pid);
    let process = Process::open(pid).unwrap();
    let (code, byte) = some_code(&process);
    let lease = std::rc::Rc::new(Lease::connect(follower.tid, &process, true, LIMIT).unwrap());
    let tids = lease.stop(LIMIT).unwrap().unwrap();
    let stopped = Stopped::leased(&process, tids, lease.clone());
    let memory = ProcessMemory::open(&process, OFlag::O_RDWR).unwrap();
    // No thread has this address on its stack.
    let nowhere = 0x5a5a_7b7b_5a5a..0x5a5a_7b7b_5a5b;
    assert!(!stopped.leads_into(&memory, std::slice::from_ref(&nowhere)));
    // The process answers although the tool has not resumed it.
    talker.hits();
    let other = [!byte];
    assert!(lease.write(code, &other).is_err());
    assert!(lease.is_lost() && !lease.has_stopped());
    assert!(stopped.leads_into(&memory, std::slice::from_ref(&nowhere)));
    assert_eq!(
        lease.answer(&Request::Registers(pid), Some),
        Err(FOLLOWER_LOST)
    );
    let mut writer = stopped.memory(&memory).unwrap();
    let error = writer.write_code(code, &other).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(FOLLOWER_LOST as i32));
    let counters = writer.write_counters(&[(code, 0)]).unwrap_err();
    assert_eq!(
        (counters.done, counters.source.raw_os_error()),
        (0, Some(FOLLOWER_LOST as i32))
    );
    assert!(lease.stop(LIMIT).is_err());
    assert_eq!(some_code(&process), (code, byte));
    drop(stopped);
    talker.hits();
    follower.end();
}

#[test]
fn silent_tools_do_not_block_a_lease() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let process = Process::open(talker.pid()).unwrap();
    let follower = Follower::patient(process.pid());
    let connect = || PacketSocket::connect(&lease::address(follower.tid)).unwrap();
    let _silent: Vec<PacketSocket> = (1..MAX_CLIENTS).map(|_| connect()).collect();
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    lease.stop(LIMIT).unwrap().unwrap();
    lease.resume_all();
    talker.hits();
    follower.end();
}

#[test]
fn tool_that_reads_no_answers_loses_the_process() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let socket = PacketSocket::connect(&lease::address(follower.tid)).unwrap();
    let memory = memory_file(pid);
    answer(&socket, &hello(pid, true), Some(&memory)).unwrap();
    let stop = Request::Stop(LIMIT.as_millis() as u64).to_bytes();
    answer(&socket, &stop, None).unwrap();
    assert!(is_stopped(pid));
    let request = Request::Registers(pid).to_bytes();
    eventually("its connection is closed", || {
        socket.send(&request, None).ok();
        socket.is_closed().then_some(())
    });
    talker.hits();
    follower.end();
}

#[test]
fn connecting_to_a_silent_follower_times_out() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    with_lender(&[process], |_, lender| {
        assert!(lender.error().is_none());
        let limit = Duration::from_millis(10);
        let refused = Lease::connect(gettid().as_raw(), process, true, limit);
        assert_eq!(refused.err(), Some(NoLease::Silent));
    });
    let (started, is_started) = channel();
    let (tried, is_tried) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            with_lender(&[process], move |_, _| {
                started.send(()).unwrap();
                is_tried.recv().unwrap();
            });
        });
        is_started.recv().unwrap();
        let stopped = with_tracer(&[process], |tracer| {
            tracer.stop(process, Duration::ZERO).map(Stopped::release)
        });
        tried.send(()).unwrap();
        let error = stopped.unwrap_err();
        let kind = error.kind();
        assert!(
            matches!(kind, ErrorKind::Process(ProcessError::FollowerSilent)),
            "{error}"
        );
    });
    talker.hits();
}

#[test]
fn slow_stops_do_not_use_up_the_limit() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    let memory = &ProcessMemory::open(process, OFlag::O_RDONLY).unwrap();
    let code = 0x1000..0x1010;
    let limit = Duration::from_millis(5);
    let (started, is_started) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| serve_with_thread_at(code.start, 4, 2 * limit, process, started));
        is_started.recv().unwrap();
        let ran = with_tracer(&[process], |tracer| {
            let stopped = tracer.stop(process, limit)?;
            let before = redirectable(stopped.calls(), process.pid(), memory).unwrap();
            let to = RedirectTarget {
                entry: LiveAddr(code.start),
                lingers_at: None,
                range: code.clone(),
                is_done: None,
            };
            let thread = (process.pid(), before);
            let (stopped, left) = tracer.run_at(process, stopped, thread, &to, limit)?;
            stopped.release();
            Ok(left)
        });
        assert_eq!(ran.unwrap(), Left::AtEnd);
    });
}

/// A fake follower: replies after `pause` that the process is stopped, and then that it was stopped for `stop_time`.
fn stop_slowly(process: &Process, pause: Duration, stop_time: Duration, started: Sender<()>) {
    let served = with_tracer(&[process], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let client = follow_until_connected(&mut tracees, process, &started);
        let mut buffer = vec![0; MAX_LEN];
        let mut reply_with = |reply: &[u8]| {
            client.wait_for_message(LIMIT).unwrap();
            client.receive(&mut buffer).unwrap();
            client.send(reply, None).unwrap();
        };
        reply_with(&Welcome::Accepted.to_bytes());
        std::thread::sleep(pause);
        reply_with(&Reply::Stopped(vec![process.pid()]).to_bytes());
        reply_with(&Reply::Resumed(stop_time).to_bytes());
        Ok(())
    });
    served.unwrap();
}

#[test]
fn stop_time_is_that_which_the_follower_measures() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let open = || Process::open(talker.pid()).unwrap();
    let (followed, process) = (&open(), &open());
    let (pause, measured) = (Duration::from_millis(50), Duration::from_millis(2));
    let (started, is_started) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || stop_slowly(followed, pause, measured, started));
        is_started.recv().unwrap();
        let stopped = with_tracer(&[process], |tracer| {
            tracer.stop(process, LIMIT).map(Stopped::release)
        });
        stopped.unwrap();
    });
    // The time that the tool waited for the follower does not count.
    assert_eq!(process.stop_time().total(), measured);
}

#[test]
fn stop_time_lasts_from_first_stop_to_resume() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = Process::open(talker.pid()).unwrap();
    let follower = Follower::patient(process.pid());
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    let begun = Instant::now();
    lease.stop(LIMIT).unwrap().unwrap();
    let stopped = Instant::now();
    // A second stop, as after one of its threads was resumed.
    lease.stop(LIMIT).unwrap().unwrap();
    let at_least = stopped.elapsed();
    lease.resume_all();
    let stop_time = process.stop_time().total();
    assert!(stop_time >= at_least && stop_time <= begun.elapsed());
    follower.end();
}

#[test]
fn stop_time_includes_stops_of_a_lost_lease() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = Process::open(talker.pid()).unwrap();
    let limits = Limits {
        silence: Duration::from_millis(10),
        ..PATIENT
    };
    let follower = Follower::with(&[process.pid()], limits);
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    lease.stop(LIMIT).unwrap().unwrap();
    eventually("the process is resumed", || {
        (!is_stopped(process.pid())).then_some(())
    });
    lease.resume_all();
    assert!(lease.is_lost());
    assert!(process.stop_time().total() >= limits.silence);
    follower.end();
}

#[test]
fn tools_take_turns() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    with_lender(&[process], |tracees, mut lender| {
        let hello = hello(process.pid(), true);
        let memory = memory_file(process.pid());
        let sockets: Vec<PacketSocket> = (0..3)
            .map(|_| {
                let socket = PacketSocket::connect(&lease::address(gettid().as_raw())).unwrap();
                socket.send(&hello, Some(memory.as_fd())).unwrap();
                for request in [Request::Stop(1000), Request::ResumeAll, Request::Stop(1000)] {
                    socket.send(&request.to_bytes(), None).unwrap();
                }
                socket.send(&Request::ResumeAll.to_bytes(), None).unwrap();
                socket
            })
            .collect();
        let mut buffer = vec![0; MAX_LEN];
        // How many replies each socket has received since the last call: one to the hello, and one to each stop and
        // each resume.
        let mut answered = || -> Vec<usize> {
            let mut count = |socket: &PacketSocket| {
                let answers = std::iter::from_fn(|| socket.receive(&mut buffer).ok());
                answers.count()
            };
            sockets.iter().map(&mut count).collect()
        };
        lender.serve(tracees);
        assert_eq!(answered(), [3, 1, 1]);
        for expected in [[0, 2, 0], [0, 0, 2], [2, 0, 0], [0, 2, 0], [0, 0, 2]] {
            lender.serve(tracees);
            assert_eq!(answered(), expected);
        }
    });
    talker.hits();
}

#[test]
fn process_is_not_stopped_for_ever() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let limits = Limits {
        stopped: Duration::from_millis(100),
        ..PATIENT
    };
    let follower = Follower::with(&[talker.pid()], limits);
    let process = Process::open(talker.pid()).unwrap();
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    // On a slow machine, the limit may be over before all threads are stopped.
    let _ = lease.stop(LIMIT).unwrap();
    eventually("the lease is lost", || {
        let is_answered = lease.answer(&Request::State(process.pid()), Some).is_ok();
        (!is_answered && lease.is_lost()).then_some(())
    });
    talker.hits();
    follower.end();
}

#[test]
fn idle_tool_is_disconnected() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let limits = Limits {
        idle: Duration::from_millis(10),
        ..PATIENT
    };
    let follower = Follower::with(&[talker.pid()], limits);
    let socket = PacketSocket::connect(&lease::address(follower.tid)).unwrap();
    socket.wait_for_message(LIMIT).unwrap();
    let end = socket.receive(&mut [0; 16]).unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    follower.end();
}
