//! The command line as its users see it: the built program, run on real targets.
//!
//! `// promise: Section: sentence (how often)` above a test is a row of docs/promises.md: what the test tries to
//! break, and on how many programs or how many times.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "cli/support.rs"]
mod support; // running the program, golden files, looking into targets

#[path = "cli/serving.rs"]
mod serving; // a running exporter

#[path = "cli/ask.rs"]
mod ask; // the twenty questions of docs/ask.md
#[path = "cli/asked_at_exits.rs"]
mod asked_at_exits; // `retval` and `elapsed` in expressions
#[path = "cli/attach.rs"]
mod attach; // changes of running programs: counters, kinds of actions, -force, all or nothing
#[path = "cli/bad_files.rs"]
mod bad_files; // files without probes, and damaged ones
#[path = "cli/bad_processes.rs"]
mod bad_processes; // exited processes, processes of other users, traced processes, kernel threads
#[path = "cli/book.rs"]
mod book; // the commands of the tutorial and of the pages by task, typed along
#[path = "cli/closures.rs"]
mod closures; // closures that other processes of a program refuse
#[path = "cli/completion.rs"]
mod completion; // completion in bash, zsh and fish
#[path = "cli/compound.rs"]
mod compound; // values that are made of others
#[path = "cli/confined.rs"]
mod confined; // what a container lacks: capabilities, ptrace, namespaces
#[path = "cli/containers.rs"]
mod containers; // programs in their own namespaces, and the tool inside
#[path = "cli/count.rs"]
mod count; // hits of running programs
#[path = "cli/count_by.rs"]
mod count_by; // hits by keys
#[path = "cli/count_functions.rs"]
mod count_functions; // calls of functions, in programs with and without probes
#[path = "cli/count_lines.rs"]
mod count_lines; // executions of source lines
#[path = "cli/count_several.rs"]
mod count_several; // hits of several processes in one answer
#[path = "cli/count_where.rs"]
mod count_where; // hits for which an expression is true
#[path = "cli/discarded.rs"]
mod discarded; // figures that are too low, because patched pages were discarded
#[path = "cli/doctor.rs"]
mod doctor; // what the machine and processes allow
#[path = "cli/documents.rs"]
mod documents; // the documents agree with the tests, and JSON output with its page
#[path = "cli/follow.rs"]
mod follow; // -follow: fork and exec
#[path = "cli/follow_forked.rs"]
mod follow_forked; // -follow of the commands that observe
#[path = "cli/follow_loads.rs"]
mod follow_loads; // -follow: dlopen
#[path = "cli/foreign_breakpoints.rs"]
mod foreign_breakpoints; // functions with breakpoints of other tools
#[path = "cli/forked.rs"]
mod forked; // hits of forked processes that are missing
#[path = "cli/functions.rs"]
mod functions; // functions of files and processes
#[path = "cli/gc.rs"]
mod gc; // errors of `gc`
#[path = "cli/help.rs"]
mod help; // help and version, word for word
#[path = "cli/hist.rs"]
mod hist; // histograms of values of hits
#[path = "cli/hist_by.rs"]
mod hist_by; // of keys
#[path = "cli/hist_several.rs"]
mod hist_several; // of several processes together
#[path = "cli/hit_stacks.rs"]
mod hit_stacks; // what `watch -stack -json` says
#[path = "cli/holds.rs"]
mod holds; // what a killed `attach -for` holds
#[path = "cli/info.rs"]
mod info; // states of running programs, in all formats
#[path = "cli/job_control.rs"]
mod job_control; // trace on a terminal, with and without -wait
#[path = "cli/latency.rs"]
mod latency; // times between probes of running programs
#[path = "cli/latency_by.rs"]
mod latency_by; // times by keys
#[path = "cli/latency_over.rs"]
mod latency_over; // slow ones of them, one by one
#[path = "cli/latency_several.rs"]
mod latency_several; // of several processes together
#[path = "cli/lending.rs"]
mod lending; // processes that are followed, and lent to another tool
#[path = "cli/list.rs"]
mod list; // probes of files, in all formats
#[path = "cli/list_usdt.rs"]
mod list_usdt; // USDT probes of all providers
#[path = "cli/loaded_later.rs"]
mod loaded_later; // functions of libraries that are loaded while it observes
#[path = "cli/manual.rs"]
mod manual; // manual pages
#[path = "cli/memory.rs"]
mod memory; // little memory
#[path = "cli/objects.rs"]
mod objects; // probes of libraries and plugins, and `ps`
#[path = "cli/observed_functions.rs"]
mod observed_functions; // programs compute the same while their functions are observed
#[path = "cli/observers.rs"]
mod observers; // one observer per process: refusal, take-over
#[path = "cli/postgresql.rs"]
mod postgresql; // real PostgreSQL, and its queries
#[path = "cli/profile.rs"]
mod profile; // where the time goes
#[path = "cli/record.rs"]
mod record; // time lines
#[path = "cli/record_last.rs"]
mod record_last; // of the last time before something happens
#[path = "cli/record_pairs.rs"]
mod record_pairs; // of pairs and requests
#[path = "cli/restore.rs"]
mod restore; // `attach -for` and `attach -live`
#[path = "cli/running.rs"]
mod running; // where threads run
#[path = "cli/serve.rs"]
mod serve; // an exporter, and what Prometheus makes of it
#[path = "cli/several_processes.rs"]
mod several_processes; // several processes at once
#[path = "cli/stack.rs"]
mod stack; // stacks of all threads
#[path = "cli/stacks.rs"]
mod stacks; // what `stack -json` says
#[path = "cli/streams.rs"]
mod streams; // stdout and stderr: closed pipes, terminals, colours, -quiet, -verbose
#[path = "cli/system_calls.rs"]
mod system_calls; // which system calls the tool makes, as a golden file
#[path = "cli/time_functions.rs"]
mod time_functions; // how long calls of functions last
#[path = "cli/time_where.rs"]
mod time_where; // how long those last for which an expression is true
#[path = "cli/top.rs"]
mod top; // a live screen
#[path = "cli/trace.rs"]
mod trace; // programs started with their probes set
#[path = "cli/trace_observe.rs"]
mod trace_observe; // trace -count, -latency and -watch
#[path = "cli/usage.rs"]
mod usage; // spellings that mean the same, and usage errors
#[path = "cli/usdt.rs"]
mod usdt; // USDT probes of other providers, and their semaphores
#[path = "cli/wait.rs"]
mod wait; // trace -wait: exit status, signals, what the program inherits
#[path = "cli/waits.rs"]
mod waits; // waits of a profile: recorded, or sampled
#[path = "cli/watch.rs"]
mod watch; // hits of running programs, one by one
#[path = "cli/watch_functions.rs"]
mod watch_functions; // calls of functions, one by one
#[path = "cli/watch_sample.rs"]
mod watch_sample; // every Nth hit
#[path = "cli/watch_several.rs"]
mod watch_several; // hits of several processes
#[path = "cli/watch_stack.rs"]
mod watch_stack; // the stack of each hit
#[path = "cli/watch_usdt.rs"]
mod watch_usdt; // sites of USDT probes of other providers, one by one
#[path = "cli/watch_where.rs"]
mod watch_where; // hits for which an expression is true
