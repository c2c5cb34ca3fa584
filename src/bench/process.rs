//! What this process and its processor are, as the operating system and the build tell.

use std::fs;

/// The commit this program was built from; `unknown` where there was none.
pub const COMMIT: &str = env!("DELTAFIN_COMMIT");
/// Whether the source had changes that the commit does not have.
pub const COMMIT_MODIFIED: bool = !env!("DELTAFIN_COMMIT_MODIFIED").is_empty();

/// What the kernel counted for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelIo {
    /// Bytes fetched from drives.
    pub read_bytes: u64,
    /// Bytes that reads returned, wherever from.
    pub rchar: u64,
}

impl KernelIo {
    /// Counts so far; `None` where the system keeps none.
    pub fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/io").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().parse().ok()
        };
        Some(Self { read_bytes: value("read_bytes")?, rchar: value("rchar")? })
    }
}

/// Lets the peak of resident memory start again from what is resident now, where the system can.
pub(super) fn reset_peak_memory() {
    // Linux 4.0 and later; elsewhere the peak is that of the whole run.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// The processor's name, or its architecture where the system does not tell.
pub(super) fn cpu() -> String {
    cpu_of(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn cpu_of(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let name = line.split_once(':')?.1.split_whitespace().collect::<Vec<_>>().join(" ");
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_found_by_their_whole_names() {
        let text = "rchar: 100\nwchar: 5\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 0\n";
        assert_eq!(KernelIo::parse(text), Some(KernelIo { read_bytes: 4096, rchar: 100 }));
        for odd in ["", "rchar: 100\n", "rchar: x\nread_bytes: 1\n", "cancelled_read_bytes: 1\nrchar: 1\n"] {
            assert_eq!(KernelIo::parse(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn a_processor_has_one_name_without_odd_spaces() {
        let text = "processor\t: 0\nmodel name\t: Some  CPU @ 3:00 GHz \nmodel name\t: other\n";
        assert_eq!(cpu_of(text).as_deref(), Some("Some CPU @ 3:00 GHz"));
        assert_eq!(cpu_of("model name\t:  \n"), None);
        assert_eq!(cpu_of(""), None);
    }
}
