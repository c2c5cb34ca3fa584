//! Free space of a file system. The one system call that the standard library does not have.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes that this process may still write to the file system of `path`, which must exist.
///
/// # Errors
/// As the system reports.
pub fn available(path: &Path) -> io::Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` ends in a nul and outlives the call; `stat` is writable and of the type the call fills.
    if unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it has filled the whole structure.
    let stat = unsafe { stat.assume_init() };
    #[allow(clippy::unnecessary_cast, reason = "both fields are 32 bits wide on macOS")]
    Ok((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_space_and_a_missing_path_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(available(dir.path()).unwrap() > 0);
        assert!(available(&dir.path().join("missing")).is_err());
    }
}
