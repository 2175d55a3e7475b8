//! Measures how long it takes to read probe notes, and to read the probe table of a program.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use probes_lib::{ProbeTable, notes};

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

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    parse_notes(&mut criterion);
    read_tables(&mut criterion);
    criterion.final_summary();
}
