//! The plan as a table and in words.

use std::fmt;

use super::Plan;

/// `bytes` for people: `1.50 GiB`, `12.0 MiB`, `812 bytes`.
pub fn gib(bytes: u64) -> String {
    match bytes {
        0..10_240 => format!("{bytes} bytes"),
        10_240..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
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
        write!(f, "  {:<22} {:>12}  ({})", "limit", gib(self.limit), self.limit_source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
