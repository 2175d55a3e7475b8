//! [`CustomKind`]: the kinds of custom blocks. Those of OCaml itself are decoded: boxed integers and Bigarrays. Pure.

use std::sync::Arc;

use super::{Value, word};

/// The kind of a custom block, by the identifier of its operations (runtime/ints.c, runtime/bigarray.c).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CustomKind {
    Int32,
    Int64,
    Nativeint,
    Bigarray,
    Other(Arc<str>),
    Unknown,
}

impl CustomKind {
    /// Returns the kind of this identifier; `None` if it cannot be one: it is empty, or not printable.
    pub(crate) fn of(identifier: &[u8]) -> Option<CustomKind> {
        Some(match identifier {
            b"_i" => CustomKind::Int32,
            b"_j" => CustomKind::Int64,
            b"_n" => CustomKind::Nativeint,
            b"_bigarr02" => CustomKind::Bigarray,
            [] => return None,
            other => {
                let text = std::str::from_utf8(other).ok()?;
                let is_printable = text.chars().all(|it| it.is_ascii_graphic());
                return is_printable.then(|| CustomKind::Other(text.into()));
            }
        })
    }
}

/// Kinds of elements of a Bigarray, by number (caml/bigarray.h).
const ELEMENTS: [&str; 14] = [
    "float32",
    "float64",
    "int8_signed",
    "int8_unsigned",
    "int16_signed",
    "int16_unsigned",
    "int32",
    "int64",
    "int",
    "nativeint",
    "complex32",
    "complex64",
    "char",
    "float16",
];

/// Decodes a custom block of `size` words from its first words. `custom` returns the kind of the operations at an
/// address.
pub(super) fn of_custom(
    words: &[u8],
    size: u64,
    custom: &mut dyn FnMut(u64) -> CustomKind,
) -> Option<Value> {
    Some(match custom(word(words, 0)?) {
        CustomKind::Int32 => Value::Int32(word(words, 1)? as i32),
        CustomKind::Int64 => Value::Int64(word(words, 1)? as i64),
        CustomKind::Nativeint => Value::Nativeint(word(words, 1)? as i64),
        CustomKind::Bigarray => {
            return bigarray(words, size).or_else(|| {
                Some(Value::Custom {
                    identifier: "_bigarr02".into(),
                })
            });
        }
        CustomKind::Other(identifier) => Value::Custom { identifier },
        CustomKind::Unknown => return None,
    })
}

/// Decodes a Bigarray (`struct caml_ba_array`): after its operations are the address of its data, the number of
/// dimensions, the kind and the layout, a pointer, and the dimensions.
fn bigarray(words: &[u8], size: u64) -> Option<Value> {
    const RANK: u64 = 2;
    const FLAGS: u64 = 3;
    const DIMENSIONS: u64 = 5;
    const KIND: u64 = 0xff;
    const FORTRAN: u64 = 0x100;
    let (rank, flags) = (word(words, RANK)?, word(words, FLAGS)?);
    if rank > size.checked_sub(DIMENSIONS)? {
        return None;
    }
    let dimensions = (DIMENSIONS..DIMENSIONS + rank).map_while(|index| word(words, index));
    Some(Value::Bigarray {
        kind: ELEMENTS.get((flags & KIND) as usize)?,
        is_fortran: flags & FORTRAN != 0,
        dimensions: dimensions.collect(),
        rank,
    })
}

#[cfg(test)]
mod tests {
    use crate::observe::read::value::Value;
    use crate::observe::read::value::tests::{AT, block, bytes};

    #[test]
    fn bigarrays_have_kind_layout_and_dimensions() {
        let bigarray = |size, rank, flags, dimensions: &[u64]| {
            let words = [&[4, AT, rank, flags, 0], dimensions].concat();
            block(255, size, &bytes(&words[..words.len().min(9)]))
        };
        let of = |kind, is_fortran, dimensions: &[u64], rank| Value::Bigarray {
            kind,
            is_fortran,
            dimensions: dimensions.to_vec(),
            rank,
        };
        assert_eq!(bigarray(7, 2, 1, &[3, 4]), of("float64", false, &[3, 4], 2));
        assert_eq!(bigarray(6, 1, 0x10c, &[9]), of("char", true, &[9], 1));
        assert_eq!(bigarray(5, 0, 0, &[]), of("float32", false, &[], 0));
        let five = bigarray(10, 5, 13, &[1, 2, 3, 4, 5]);
        assert_eq!(five, of("float16", false, &[1, 2, 3, 4], 5));
        // More dimensions than the block has room for; an unknown kind of elements; words that are missing.
        let identifier = "_bigarr02".into();
        let unknown = Value::Custom { identifier };
        assert_eq!(bigarray(7, 3, 1, &[3, 4]), unknown);
        assert_eq!(bigarray(7, u64::MAX, 1, &[3, 4]), unknown);
        assert_eq!(bigarray(7, 2, 14, &[3, 4]), unknown);
        assert_eq!(block(255, 7, &bytes(&[4])), unknown);
    }
}
