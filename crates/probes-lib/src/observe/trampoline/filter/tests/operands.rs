//! Arguments that are operands in memory.

use super::*;

/// Returns whether an operand in memory is this number; `None` if it may not be read.
fn is_operand(
    puppet: &Puppet,
    memory: MemorySource,
    number: u64,
    hit: &RecordedHit,
) -> Option<bool> {
    let kind = match memory.size {
        8 => ParameterKind::Word,
        size => ParameterKind::Number {
            bits: 8 * size,
            signed: false,
        },
    };
    let parameter = Parameter { name: None, kind };
    let scope = Scope::of("USDT probe p", "p", vec![parameter]);
    let expression: Expression = format!("arg0 == {number}").parse().unwrap();
    let role = FilterRole {
        filter: expression.filter(&scope).unwrap(),
        arguments: vec![ArgumentSource::Memory(memory)],
    };
    let code = finished(
        saved(&role),
        &role,
        ValuePages::TableOfObserver,
        |a, context, is_false, untyped| super::filter(a, &role, context, is_false, untyped),
    );
    match puppet.execute(&code, &role, hit).rax {
        1 => Some(true),
        2 => Some(false),
        _ => None,
    }
}

#[test]
fn operands_in_memory_are_read_where_they_are() {
    const WORD: u64 = 0x0078_6756_4534_2312;
    let puppet = Puppet::new();
    // The stack pointer of the point is 8 bytes higher.
    let word_at = STACK + 8 + 0x20;
    let hit = |in_rbx: u64, at: u64, readable: u8| RecordedHit {
        arguments: [0, 0, 3, 0, 0, 0, in_rbx],
        words: BTreeMap::from([(at, WORD)]),
        readable,
        is_valid: true,
        may_ask: true,
    };
    let [by_rsp, by_rbx] = [Register::RSP, Register::RBX].map(Some);
    for (base, index, displacement, in_rbx) in [
        (by_rsp, None, 0x20, 0),
        (by_rbx, None, -8, word_at + 8),
        (by_rbx, Some((Register::R12, 4)), 8, word_at - 8 - 12),
        (None, Some((Register::RBX, 1)), 16, word_at - 16),
        (None, None, word_at as i64, 0),
    ] {
        for size in [1, 2, 4, 8] {
            let memory = MemorySource {
                base,
                index,
                displacement,
                size,
            };
            let number = WORD & (u64::MAX >> (64 - 8 * u32::from(size)));
            let with = |readable| hit(in_rbx, word_at, readable);
            let is = |number, readable| is_operand(&puppet, memory, number, &with(readable));
            assert_eq!(is(number, 0b111), Some(true), "{memory:?}");
            assert_eq!(is(number + 1, 0b111), Some(false), "{memory:?}");
            // Data of the object are mapped as long as the point is; of its frame the kernel knows it.
            let expected = (memory.is_static() || memory.is_near_stack()).then_some(true);
            assert_eq!(is(number, 0b101), expected, "{memory:?}");
        }
    }
    // Outside the frame of the point, up to the end of a page that the table has.
    let border = MEMORY + 2 * PAGE;
    let end = MEMORY + PAGES * PAGE;
    let lowest = STACK - RED_ZONE as u64;
    for (at, size, is_near, is_anywhere) in [
        (border - 4, 4, true, true),
        (border - 4, 8, true, false),
        (border - 3, 4, true, false),
        (border - 1, 1, true, true),
        (border, 1, true, false),
        (end - 4, 4, true, false),
        (end - 4, 8, false, false),
        (lowest, 8, true, true),
        (lowest - 8, 8, true, true),
    ] {
        // Of the frame pointer, which is 0 here, the address may be far away, too.
        let by_rbp = Some(Register::RBP);
        for (base, index, displacement, is_read) in [
            (by_rsp, None, at.wrapping_sub(STACK + 8) as i64, is_near),
            (by_rbx, None, 0, is_anywhere),
            (by_rbp, Some((Register::RBX, 1)), 0, is_near),
        ] {
            let memory = MemorySource {
                base,
                index,
                displacement,
                size,
            };
            let hit = hit(at, at / 8 * 8, 0b011);
            let answer = is_operand(&puppet, memory, 1 << 30, &hit);
            assert_eq!(answer, is_read.then_some(false), "{memory:?} {at:x}");
        }
    }
    // What is anywhere is read only if the kernel may be asked, and says that it can be read; of the frame of the point,
    // the table is enough.
    for (at, size, readable, is_valid, may_ask, is_near, is_anywhere) in [
        (end - 8, 8, 0b1111, true, true, true, true),
        (end - 8, 8, 0b1111, true, false, true, false),
        (end - 8, 8, 0b0011, true, false, false, false),
        (end - 8, 8, 0b1111, false, true, false, false),
        (end - 4, 4, 0b1111, true, true, true, true),
        (end - 4, 8, 0b0111, true, true, false, false),
        (end, 1, 0b0111, true, true, false, false),
    ] {
        for (base, displacement, is_read) in [
            (by_rsp, at.wrapping_sub(STACK + 8) as i64, is_near),
            (by_rbx, 0, is_anywhere),
        ] {
            let memory = MemorySource {
                base,
                index: None,
                displacement,
                size,
            };
            let hit = RecordedHit {
                is_valid,
                may_ask,
                ..hit(at, MEMORY, readable)
            };
            let answer = is_operand(&puppet, memory, 1 << 30, &hit);
            assert_eq!(answer, is_read.then_some(false), "{memory:?} {hit:x?}");
        }
    }
}
