//! The plan as a table and in words.

use std::fmt;

use super::Plan;

/// `bytes` for people: `1.50 GiB`, `12.0 MiB`, `812 bytes`.
pub fn gib(bytes: u64) -> String {
    shown(bytes, f64::round)
}

/// At least `bytes`, as [`gib`] shows them: what is needed, so that as much as is shown is enough.
pub(crate) fn at_least(bytes: u64) -> String {
    shown(bytes, f64::ceil)
}

/// At most `bytes`, as [`gib`] shows them: what there is.
pub(crate) fn at_most(bytes: u64) -> String {
    shown(bytes, f64::floor)
}

/// At least `bytes`, as `--memory` takes them: `12.3MiB`.
pub(super) fn flag_value(bytes: u64) -> String {
    at_least(bytes).replace(" bytes", "").replace(' ', "")
}

fn shown(bytes: u64, whole: fn(f64) -> f64) -> String {
    // Powers of two keep every bit, so that only `whole` rounds.
    let (unit, name, digits) = match bytes {
        0..10_240 => return format!("{bytes} bytes"),
        10_240..0x10_0000 => (1024.0, "KiB", 1),
        0x10_0000..0x4000_0000 => (1_048_576.0, "MiB", 1),
        _ => (1_073_741_824.0, "GiB", 2),
    };
    let parts = 10f64.powi(digits);
    let number = whole(bytes as f64 / unit * parts) / parts;
    format!("{number:.*} {name}", digits as usize)
}

impl Plan {
    /// The parts with their names, in the order in which they are shown.
    fn parts(&self) -> [(String, u64); 6] {
        [
            ("trunk".into(), self.trunk),
            ("states".into(), self.states),
            ("latent cache".into(), self.latent_cache),
            ("step buffers".into(), self.activations),
            (format!("{} expert slots", self.slots), self.experts),
            ("everything else".into(), self.fixed),
        ]
    }

    pub(super) fn parts_in_words(&self) -> String {
        let parts: Vec<_> = self.parts().into_iter().map(|(name, bytes)| format!("{name} {}", gib(bytes))).collect();
        parts.join(", ")
    }
}

/// A table, without a line end at its end.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in self.parts() {
            writeln!(f, "  {name:<22} {:>12}", gib(bytes))?;
        }
        writeln!(f, "  {:<22} {:>12}", "total", gib(self.total))?;
        write!(f, "  {:<22} {:>12}  ({})", "limit", gib(self.limit), self.limit_source)?;
        self.caution.iter().try_for_each(|caution| write!(f, "\n  {caution}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::size;

    #[test]
    fn sizes_have_the_unit_that_suits_them() {
        for (bytes, shown) in [
            (0, "0 bytes"),
            (10_239, "10239 bytes"),
            (10_240, "10.0 KiB"),
            (1 << 20, "1.0 MiB"),
            (3 << 29, "1.50 GiB"),
            (u64::MAX, "17179869184.00 GiB"),
        ] {
            assert_eq!(gib(bytes), shown);
        }
    }

    #[test]
    fn as_much_as_is_shown_is_enough() {
        for shift in 0..62 {
            for near in [-1001, -1, 0, 1, 54_321] {
                let Some(bytes) = (1u64 << shift).checked_add_signed(near) else { continue };
                let (enough, less) = (at_least(bytes), at_most(bytes));
                // Beyond 8 PiB a double has no room for every byte.
                if bytes > 0 && bytes < 1 << 53 {
                    assert!(size(&enough).expect("a size") >= bytes, "{bytes}: {enough}");
                    assert!(size(&less).expect("a size") <= bytes, "{bytes}: {less}");
                    assert_eq!(size(&enough), size(&flag_value(bytes)), "{bytes}");
                }
            }
        }
        assert_eq!((flag_value(123), flag_value((5 << 20) + 1)), ("123".into(), "5.1MiB".into()));
    }
}
