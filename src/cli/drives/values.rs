//! Values of `drives`' flags. Decimal numbers are digits with at most one point: no sign, no exponent, no `nan`.

use std::time::Duration;

use crate::cli::args;
use crate::store::ALIGN;
use crate::store::DRIVES_MAX;

/// Beyond what any drive does, in GB/s.
const RATE_MAX: f64 = 1e6;
const SECONDS_MIN: f64 = 0.05;
const SECONDS_MAX: f64 = 86_400.0;
const READ_BYTES_MAX: u64 = 1 << 30;
const MILLISECONDS_MAX: f64 = 1e7;
const MICROSECONDS_MAX: f64 = 1e7;
const TOKENS_MAX: usize = 100_000;

/// GB/s of one drive after the other; one at least.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rates(pub Vec<f64>);

/// Part of the reads that hang, and for how long.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Stall {
    pub share: f64,
    pub seconds: f64,
}

/// A list of rates.
///
/// # Errors
/// Names the item and what is legal.
pub(super) fn rates(text: &str) -> Result<Rates, String> {
    let items: Vec<&str> = text.split(',').map(str::trim).collect();
    if items.len() > DRIVES_MAX {
        return Err(format!("{} drives, expected {DRIVES_MAX} at most", items.len()));
    }
    let rate = |(number, item): (usize, &&str)| match decimal(item) {
        Some(rate) if rate > 0.0 && rate <= RATE_MAX => Ok(rate),
        _ if item.is_empty() => Err(format!("item {} is empty: expected GB/s such as 7.1", number + 1)),
        _ => {
            let shown: String = item.chars().take(40).flat_map(char::escape_debug).collect();
            Err(format!("item {} is `{shown}`: expected GB/s above 0 such as 7.1", number + 1))
        }
    };
    items.iter().enumerate().map(rate).collect::<Result<_, _>>().map(Rates)
}

/// Seconds of a measurement.
///
/// # Errors
/// Says what is legal.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    within(text, SECONDS_MIN, SECONDS_MAX)
        .ok_or_else(|| format!("expected seconds from {SECONDS_MIN} to {SECONDS_MAX}"))
}

/// Bytes of a read: a size, rounded up to whole pages.
///
/// # Errors
/// Says what is legal.
pub(super) fn read_bytes(text: &str) -> Result<usize, String> {
    let bytes = args::size(text)?;
    if bytes > READ_BYTES_MAX {
        return Err(format!("too large: expected {READ_BYTES_MAX} bytes at most"));
    }
    Ok((bytes as usize).next_multiple_of(ALIGN))
}

/// Tokens to simulate: those made up are kept, and a hundred thousand of K3 are 0.3 GB.
///
/// # Errors
/// Says what is legal.
pub(super) fn tokens(text: &str) -> Result<usize, String> {
    let tokens = args::positive(text)?;
    if tokens <= TOKENS_MAX { Ok(tokens) } else { Err(format!("too large: expected {TOKENS_MAX} at most")) }
}

/// A number from 0 to 1.
///
/// # Errors
/// Says what is legal.
pub(super) fn part(text: &str) -> Result<f64, String> {
    within(text, 0.0, 1.0).ok_or_else(|| "expected a number from 0 to 1 such as 0.04".to_owned())
}

/// Milliseconds from 0 up.
///
/// # Errors
/// Says what is legal.
pub(super) fn milliseconds(text: &str) -> Result<Duration, String> {
    within(text, 0.0, MILLISECONDS_MAX)
        .map(|ms| Duration::from_secs_f64(ms / 1e3))
        .ok_or_else(|| format!("expected milliseconds from 0 to {MILLISECONDS_MAX}"))
}

/// Microseconds from 0 up.
///
/// # Errors
/// Says what is legal.
pub(super) fn microseconds(text: &str) -> Result<f64, String> {
    within(text, 0.0, MICROSECONDS_MAX).ok_or_else(|| format!("expected microseconds from 0 to {MICROSECONDS_MAX}"))
}

/// A part and seconds, with a comma between.
///
/// # Errors
/// Says what is legal.
pub(super) fn stall(text: &str) -> Result<Stall, String> {
    let legal = || format!("expected a part and seconds up to {SECONDS_MAX}, such as 0.00001,10");
    let (share, seconds) = text.split_once(',').ok_or_else(legal)?;
    let share = within(share.trim(), 0.0, 1.0).ok_or_else(legal)?;
    let seconds = within(seconds.trim(), 0.0, SECONDS_MAX).ok_or_else(legal)?;
    Ok(Stall { share, seconds })
}

fn within(text: &str, least: f64, most: f64) -> Option<f64> {
    decimal(text).filter(|number| (least..=most).contains(number))
}

fn decimal(text: &str) -> Option<f64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(whole) && is_number(fraction))
        .then(|| text.parse().ok())
        .flatten()
        .filter(|number: &f64| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_numbers_above_0_between_commas() {
        assert_eq!(rates("13.6,7.1, 7.1,5.7"), Ok(Rates(vec![13.6, 7.1, 7.1, 5.7])));
        assert_eq!(rates("7"), Ok(Rates(vec![7.0])));
    }

    #[test]
    fn a_rate_that_is_none_is_named() {
        for (text, start) in [
            ("", "item 1 is empty"),
            ("1,,2", "item 2 is empty"),
            ("1,2,", "item 3 is empty"),
            (",1", "item 1 is empty"),
            ("0", "item 1 is `0`"),
            ("1,0.0", "item 2 is `0.0`"),
            ("1,-2", "item 2 is `-2`"),
            ("+1", "item 1 is `+1`"),
            ("nan", "item 1 is `nan`"),
            ("1,inf", "item 2 is `inf`"),
            ("1e3", "item 1 is `1e3`"),
            ("7.", "item 1 is `7.`"),
            (".7", "item 1 is `.7`"),
            ("7;1", "item 1 is `7;1`"),
            ("1 2", "item 1 is `1 2`"),
            ("٧", "item 1 is `٧`"),
            ("9999999", "item 1 is `9999999`"),
            ("7.1GB/s", "item 1 is `7.1GB/s`"),
        ] {
            let error = rates(text).expect_err(text);
            assert!(error.starts_with(start), "{text}: {error}");
        }
        assert!(rates(&vec!["1"; DRIVES_MAX + 1].join(",")).unwrap_err().contains("at most"));
        assert!(rates(&"9".repeat(1000)).unwrap_err().len() < 200);
    }

    #[test]
    fn other_numbers_have_their_bounds() {
        assert_eq!((seconds("0.5"), part("0.04"), part("1"), part("0")), (Ok(0.5), Ok(0.04), Ok(1.0), Ok(0.0)));
        assert_eq!(milliseconds("380"), Ok(Duration::from_millis(380)));
        assert_eq!((microseconds("0"), read_bytes("1")), (Ok(0.0), Ok(ALIGN)));
        assert_eq!(read_bytes("17547264"), Ok(crate::drives::K3_EXPERT_BYTES));
        assert_eq!(stall("0.00001, 10"), Ok(Stall { share: 0.00001, seconds: 10.0 }));
        for text in ["0.1", "0.1,", ",1", "1.1,1", "0.1,-1", "0.1,1,1", "0.1,1e3", "0.1,nan"] {
            assert!(stall(text).unwrap_err().contains("0.00001,10"), "{text}");
        }
        for text in ["", "-1", "nan", "inf", "1e3", "0x1", "1,5", "99999999999"] {
            for refused in [
                seconds(text).is_err(),
                part(text).is_err(),
                milliseconds(text).is_err(),
                microseconds(text).is_err(),
                read_bytes(text).is_err(),
            ] {
                assert!(refused, "{text}");
            }
        }
        assert!(seconds("0").is_err() && part("1.01").is_err() && read_bytes("2GiB").is_err());
    }
}
