//! What the operating system says about memory, the machine's and this process's.

use std::mem::MaybeUninit;

#[cfg(target_os = "macos")]
pub use macos::peak_resident;
#[cfg(target_os = "macos")]
pub(super) use macos::{available, physical};
#[cfg(not(target_os = "macos"))]
pub use proc::peak_resident;
#[cfg(not(target_os = "macos"))]
pub(super) use proc::{available, physical};

/// Largest resident set of this process, in the system's unit: KiB on Linux, bytes on macOS.
fn maxrss() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is valid for writes of one `rusage`, for which all zeros is a value, so it is one either way.
    let peak = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init().ru_maxrss
    };
    u64::try_from(peak).unwrap_or(0)
}

#[cfg(not(target_os = "macos"))]
mod proc {
    use std::fs;

    /// Bytes of the machine.
    pub fn physical() -> Option<u64> {
        kib_of(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal")
    }

    /// Bytes that can be had without swapping.
    pub fn available() -> Option<u64> {
        kib_of(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
    }

    /// Peak resident memory of this process so far, in bytes (`VmHWM`, else `ru_maxrss`); 0 where it cannot be told.
    pub fn peak_resident() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        // `ru_maxrss` counts the program that was replaced by this one, too.
        kib_of(&status, "VmHWM").filter(|bytes| *bytes > 0).unwrap_or_else(|| super::maxrss() * 1024)
    }

    /// The line `name:   123 kB`, in bytes.
    fn kib_of(text: &str, name: &str) -> Option<u64> {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        value.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn both_ways_to_tell_the_peak_agree() {
            let (status, usage) = (peak_resident(), super::super::maxrss() * 1024);
            assert!(status / 2 < usage && usage < 16 * status, "{status} {usage}");
        }

        #[test]
        fn figures_are_found_by_their_whole_name() {
            let text =
                "MemTotal:       49368188 kB\nMemAvailableX: 1 kB\nMemAvailable:   46012345 kB\nHugePages_Total: 0\n";
            assert_eq!(kib_of(text, "MemTotal"), Some(49_368_188 * 1024));
            assert_eq!(kib_of(text, "MemAvailable"), Some(46_012_345 * 1024));
            assert_eq!(kib_of(text, "HugePages_Total"), None);
            assert_eq!(kib_of("MemTotal: 99999999999999999999 kB", "MemTotal"), None);
            assert_eq!(kib_of("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
        }
    }
}

#[cfg(target_os = "macos")]
mod macos {
    use std::ffi::CStr;

    /// Bytes of the machine.
    pub fn physical() -> Option<u64> {
        sysctl(c"hw.memsize")
    }

    /// Bytes that can be had without swapping: free pages and those of files and purgeable memory.
    pub fn available() -> Option<u64> {
        let names = [c"vm.page_speculative_count", c"vm.page_purgeable_count", c"vm.page_pageable_external_count"];
        let given_up: u64 = names.into_iter().filter_map(sysctl).sum();
        (sysctl(c"vm.page_free_count")? + given_up).checked_mul(sysctl(c"hw.pagesize")?)
    }

    /// Peak resident memory of this process so far, in bytes (`ru_maxrss`); 0 where it cannot be told.
    pub fn peak_resident() -> u64 {
        super::maxrss()
    }

    /// An integer of 4 or 8 bytes by its name; both fill a zeroed little-endian `u64` from its start.
    fn sysctl(name: &CStr) -> Option<u64> {
        let mut value = 0u64;
        let mut len = size_of::<u64>();
        // SAFETY: `name` ends in NUL, `value` is valid for writes of `len` bytes, and nothing is set.
        let failed = unsafe {
            libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &raw mut len, std::ptr::null_mut(), 0)
        };
        (failed == 0 && len <= size_of::<u64>()).then_some(value)
    }
}
