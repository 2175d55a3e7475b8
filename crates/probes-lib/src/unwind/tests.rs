//! Damaged tables, and stacks that hold anything.

use proptest::prelude::any;
use proptest::sample;

use super::*;
use crate::testing::properties;

/// Memory of which each word is computed from its address, and often leads to code or to other memory.
struct AnyMemory {
    seed: u64,
    code: u64,
}

const STACK: u64 = 0x7fff_0000_0000;

impl StackMemory for AnyMemory {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        for (at, byte) in (at..=u64::MAX).zip(bytes) {
            let word = at / 8;
            let hash = (word ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let value = match hash >> 61 {
                0 => return None,
                1..=4 => self.code + (hash >> 32) % 0x8000,
                5 => STACK + (hash >> 32) % 0x10000 * 8,
                6 => hash >> 32,
                _ => 0,
            };
            *byte = value.to_le_bytes()[(at % 8) as usize];
        }
        Some(())
    }
}

fn damaged(elf: &ElfFile, damages: &[(sample::Index, u8)]) -> Unwinder {
    let mut unwinder = Unwinder::of([(elf, LoadBias::NONE)].into_iter());
    let tables = UnwindTables::damaged(elf, |bytes| {
        for (index, byte) in damages {
            let at = index.index(bytes.len());
            bytes[at] = *byte;
        }
    });
    unwinder.objects[0].tables = Arc::new(tables);
    unwinder
}

proptest::proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn damaged_tables_and_stacks_end(
        seed in any::<u64>(),
        damages in proptest::collection::vec((any::<sample::Index>(), any::<u8>()), 0..40),
        start in any::<u16>(),
    ) {
        let elf = ElfFile::open(&test_support::fixture("gen_ocaml_2.pie")).unwrap();
        let mut unwinder = damaged(&elf, &damages);
        let code = unwinder.objects[0].start;
        let mut memory = AnyMemory { seed, code };
        for step in 0..64 {
            let registers = FrameRegisters::new(code + u64::from(start) % 0x2000 + step, STACK);
            let stack = unwinder.unwind(registers, &mut memory);
            proptest::prop_assert!(!stack.frames.is_empty());
            proptest::prop_assert!(stack.frames.len() <= MAX_FRAMES || stack.is_guessed);
        }
    }
}
