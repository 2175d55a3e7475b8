//! [`Linear`]: a range of values in steps of one width.

use std::fmt;
use std::str::FromStr;

/// A range of values in steps of one width, each of which is a bucket of a histogram
/// ([`Observation::linear`](crate::Observation::linear)). The last step is narrower if the width does not divide the
/// range.
///
/// ```
/// use probes_lib::Linear;
///
/// let percent: Linear = "0,100,10".parse()?;
/// assert_eq!((percent.start(), percent.end(), percent.steps()), (0, 100, 10));
/// assert!("100,0,10".parse::<Linear>().is_err());
/// # Ok::<(), probes_lib::BadLinear>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Linear {
    start: i64,
    end: i64,
    width: u64,
}

/// Why a text is not a range of values.
///
/// ```
/// use probes_lib::{BadLinear, Linear};
///
/// assert_eq!("0,100".parse::<Linear>(), Err(BadLinear::NotThree));
/// let error = "100,0,10".parse::<Linear>().unwrap_err();
/// assert_eq!(error, BadLinear::Empty { start: 100, end: 0 });
/// assert_eq!(error.to_string(), "LO has to be less than HI: 100 is not less than 0");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadLinear {
    /// It is not three numbers.
    #[error("needs three numbers, LO,HI,STEP, such as 0,1000,50")]
    NotThree,
    /// A part is not a number, or too large.
    #[error("`{0}` is not a whole number of 64 bits with a sign")]
    NoNumber(String),
    /// Nothing is in the range.
    #[error("LO has to be less than HI: {start} is not less than {end}")]
    Empty {
        /// Where it begins.
        start: i64,
        /// Where it ends.
        end: i64,
    },
    /// The width is not positive.
    #[error("STEP has to be 1 or more")]
    NoWidth,
    /// There are too many steps.
    #[error("has {given} steps; at most {most} are possible")]
    TooManySteps {
        /// How many there are.
        given: u128,
        /// How many are possible.
        most: u32,
    },
}

impl Linear {
    /// The most steps.
    pub(crate) const MAX_STEPS: u32 = 10_000;

    /// Returns the least value of the range.
    pub fn start(self) -> i64 {
        self.start
    }

    /// Returns the least value above the range.
    pub fn end(self) -> i64 {
        self.end
    }

    /// Returns the width of a step.
    pub fn width(self) -> u64 {
        self.width
    }

    /// Returns how many steps there are.
    pub fn steps(self) -> u32 {
        let steps = self.len().div_ceil(u128::from(self.width));
        // `from_str` has checked it.
        u32::try_from(steps).unwrap_or(Linear::MAX_STEPS)
    }

    /// Returns whether only one value is in the last step.
    pub(crate) fn last_is_one_value(self) -> bool {
        self.width == 1 || self.len() % u128::from(self.width) == 1
    }

    /// Returns how many values are in the range.
    fn len(self) -> u128 {
        (i128::from(self.end) - i128::from(self.start)) as u128
    }

    /// Returns the bucket of a value: 0 is below the range, then each step, then what is above.
    pub(crate) fn bucket(self, value: i128) -> u64 {
        if value < i128::from(self.start) {
            0
        } else if value >= i128::from(self.end) {
            u64::from(self.steps()) + 1
        } else {
            (value - i128::from(self.start)) as u64 / self.width + 1
        }
    }

    /// Returns the least and the greatest value of a bucket, where it has one.
    pub(crate) fn values_of(self, bucket: u64) -> (Option<i128>, Option<i128>) {
        let (start, end) = (i128::from(self.start), i128::from(self.end));
        let Some(step) = bucket.checked_sub(1) else {
            return (None, Some(start - 1));
        };
        if step >= u64::from(self.steps()) {
            return (Some(end), None);
        }
        let least = start + i128::from(step) * i128::from(self.width);
        let most = (least + i128::from(self.width)).min(end) - 1;
        (Some(least), Some(most))
    }
}

impl FromStr for Linear {
    type Err = BadLinear;

    fn from_str(text: &str) -> Result<Linear, BadLinear> {
        let numbers: Vec<&str> = text.split(',').map(str::trim).collect();
        let &[start, end, width] = &numbers[..] else {
            return Err(BadLinear::NotThree);
        };
        let number = |text: &str| {
            let number = text.parse::<i64>();
            number.map_err(|_| BadLinear::NoNumber(text.to_owned()))
        };
        let (start, end, width) = (number(start)?, number(end)?, number(width)?);
        if start >= end {
            return Err(BadLinear::Empty { start, end });
        }
        let width = match u64::try_from(width) {
            Ok(width @ 1..) => width,
            _ => return Err(BadLinear::NoWidth),
        };
        let linear = Linear { start, end, width };
        let steps = linear.len().div_ceil(u128::from(width));
        if steps > u128::from(Linear::MAX_STEPS) {
            return Err(BadLinear::TooManySteps {
                given: steps,
                most: Linear::MAX_STEPS,
            });
        }
        Ok(linear)
    }
}

/// The format that [`FromStr`] reads.
impl fmt::Display for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.start, self.end, self.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_three_numbers_that_make_sense() {
        for (text, message) in [
            ("1,2", "needs three numbers, LO,HI,STEP, such as 0,1000,50"),
            ("", "needs three numbers, LO,HI,STEP, such as 0,1000,50"),
            (
                "1,2,3,4",
                "needs three numbers, LO,HI,STEP, such as 0,1000,50",
            ),
            ("0,x,1", "`x` is not a whole number of 64 bits with a sign"),
            (
                "0,9223372036854775808,1",
                "`9223372036854775808` is not a whole number of 64 bits with a sign",
            ),
            ("5,5,1", "LO has to be less than HI: 5 is not less than 5"),
            ("0,5,0", "STEP has to be 1 or more"),
            ("0,5,-1", "STEP has to be 1 or more"),
            ("0,10001,1", "has 10001 steps; at most 10000 are possible"),
        ] {
            let error = text.parse::<Linear>().unwrap_err();
            assert_eq!(error.to_string(), message, "{text}");
        }
        let whole = "-9223372036854775808,9223372036854775807,9223372036854775807";
        let whole: Linear = whole.parse().unwrap();
        assert_eq!(whole.steps(), 3);
        // The last step has one value.
        let max = i128::from(i64::MAX);
        assert_eq!(whole.values_of(3), (Some(max - 1), Some(max - 1)));
        assert_eq!(whole.to_string().parse(), Ok(whole));
    }
}
