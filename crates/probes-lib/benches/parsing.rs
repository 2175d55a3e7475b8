//! Measures how long it takes to read probe notes, the probe table of a program, and runtime events of OCaml 5.

#![allow(clippy::expect_used, reason = "a benchmark without its files is none")]

use std::fs;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use probes_lib::{ProbeTable, RingEntry, RuntimeEvents, notes};

include!("../../../fuzz/fuzz_targets/runtime_events_input.rs");

/// A `.note.stapsdt` section with `count` notes as OCaml emits them, ten to a name.
fn section(count: usize) -> Vec<u8> {
    let arguments = ["8@%rdi", "8@%rsi 8@%rdx", "", "8@%rdx 8@8(%rsp)"];
    let mut section = Vec::new();
    for index in 0..count {
        let mut description = Vec::new();
        for address in [
            0x1000 + 160 * index,
            0x0010_0000,
            0x0020_0000 + index / 10 * 4,
        ] {
            description.extend_from_slice(&(address as u64).to_le_bytes());
        }
        let strings = format!("ocaml_2\0probe_{}\0{}\0", index / 10, arguments[index % 4]);
        description.extend_from_slice(strings.as_bytes());
        for word in [8, description.len() as u32, 3] {
            section.extend_from_slice(&word.to_le_bytes());
        }
        section.extend_from_slice(b"stapsdt\0");
        section.extend_from_slice(&description);
        section.resize(section.len().next_multiple_of(4), 0);
    }
    section
}

fn parse_notes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("notes");
    for count in [10, 100, 1_000, 10_000, 100_000] {
        let section = section(count);
        assert_eq!(notes(&section).filter(Result::is_ok).count(), count);
        group.throughput(Throughput::Elements(count as u64));
        group.bench_with_input(
            BenchmarkId::from_parameter(count),
            &section,
            |b, section| {
                b.iter(|| {
                    for note in notes(black_box(section)) {
                        black_box(note.is_ok());
                    }
                });
            },
        );
    }
}

fn read_tables(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("table");
    for sites in [10, 1_000, 10_000] {
        let file = test_support::fixture(&format!("spin_{sites}.pie"));
        group.throughput(Throughput::Elements(sites));
        group.bench_with_input(BenchmarkId::from_parameter(sites), &file, |b, file| {
            b.iter(|| ProbeTable::read(black_box(file)).map(|table| table.probes().len()));
        });
    }
}

/// The rings of a file of runtime events, and their words.
const RINGS: u64 = 4;
const RING_WORDS: u64 = 1 << 16;

/// A file of runtime events with full rings, and how many events it has: begins and ends of phases, and counters.
fn full_rings() -> (Vec<u8>, u64) {
    const HEADER: u64 = 64;
    const RING_HEADER: u64 = 80;
    let item = |words: u64, kind: u64, id: u64| words << 54 | kind << 49 | id << 36;
    let group = |time: u64| {
        let (minor, allocated) = (11, 5);
        [
            item(2, 2, minor),
            time,
            item(3, 4, allocated),
            time,
            time,
            item(2, 3, minor),
            time,
        ]
    };
    let groups = RING_WORDS / 7;
    let data_at = HEADER + RINGS * RING_HEADER;
    let mut words = vec![
        1,
        RINGS,
        RING_HEADER,
        RING_WORDS * 8,
        RING_WORDS,
        HEADER,
        data_at,
        0,
    ];
    for _ in 0..RINGS {
        let (head, tail) = (0, groups * 7);
        words.extend([head, tail, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    for _ in 0..RINGS {
        words.extend((0..groups).flat_map(group));
        words.extend(vec![0; (RING_WORDS - groups * 7) as usize]);
    }
    let bytes = words.iter().flat_map(|word: &u64| word.to_le_bytes());
    (bytes.collect(), RINGS * groups * 3)
}

fn read_runtime_events(criterion: &mut Criterion) {
    let scratch = test_support::Scratch::new();
    let (file, program) = (scratch.file("events"), scratch.file("program"));
    let (bytes, count) = full_rings();
    fs::write(&file, bytes).expect("a file of events");
    fs::write(&program, program_of_ocaml_5_4()).expect("a program");
    let mut events = RuntimeEvents::of_file(&file, &program).ok();
    let mut group = criterion.benchmark_group("runtime-events");
    group.throughput(Throughput::Elements(count));
    group.bench_function(BenchmarkId::from_parameter(count), |b| {
        b.iter(|| {
            let mut from_start = events.take().expect("it was opened").from_start();
            let (mut read, mut sum) = (0, 0_u64);
            let result = from_start.read(|entry| {
                if let RingEntry::Event { time, kind, .. } = entry {
                    read += 1;
                    sum = sum.wrapping_add(time);
                    black_box(kind);
                }
            });
            assert!(result.is_ok() && read == count);
            events = Some(from_start);
            sum
        });
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    parse_notes(&mut criterion);
    read_tables(&mut criterion);
    read_runtime_events(&mut criterion);
    criterion.final_summary();
}
