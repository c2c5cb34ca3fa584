//! One expert file read whole, past the page cache where that can be had: what was written is compared with what the drive
//! gives back.

use std::io;
use std::path::Path;

use super::super::reader::{Cause, Disk, ReadError, Stop, System, Tally, continue_read, is_refusal};
use crate::memory::ALIGN;

/// Fills `bytes` (whole pages of aligned memory) with the file at `path`, which must have exactly so many; past the page
/// cache unless that is refused or not asked for.
///
/// # Errors
/// The file is shorter or longer, or the system reported a failure.
pub(crate) fn read_whole(path: &Path, bytes: &mut [u8], direct: bool) -> Result<(), ReadError> {
    let wanted = bytes.len();
    let failed = |got, cause| ReadError { path: path.to_owned(), offset: 0, wanted, got, cause };
    let system = |cause| failed(0, Cause::System(cause));
    let len = std::fs::metadata(path).map_err(system)?.len();
    if len > wanted as u64 {
        return Err(system(io::Error::new(io::ErrorKind::InvalidData, format!("the file has {len} bytes"))));
    }
    if direct && len == wanted as u64 && wanted.is_multiple_of(ALIGN) {
        let mut got = 0;
        let stop = match System.open(path, true) {
            Ok(file) => continue_read(&*file, bytes, 0, wanted, ALIGN, &mut got, &mut Tally::default()),
            Err(cause) => Stop::Failed(cause),
        };
        match stop {
            Stop::Done => return Ok(()),
            Stop::Failed(cause) if !is_refusal(&cause) => return Err(failed(got, Cause::System(cause))),
            Stop::Failed(_) | Stop::Unaligned | Stop::EndOfFile => {}
        }
    }
    let file = System.open(path, false).map_err(system)?;
    // Clean pages are dropped, so that the bytes come from the drive all the same.
    file.forget(0, wanted);
    let mut got = 0;
    let stop = continue_read(&*file, bytes, 0, wanted, 1, &mut got, &mut Tally::default());
    file.forget(0, wanted);
    match stop {
        Stop::Done => Ok(()),
        Stop::EndOfFile | Stop::Unaligned => Err(failed(got, Cause::EndOfFile)),
        Stop::Failed(cause) => Err(failed(got, Cause::System(cause))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;

    #[test]
    fn only_a_file_of_the_exact_length_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for direct in [true, false] {
            let mut region = Region::allocate(4 * ALIGN, "a test").unwrap();
            assert!(read_whole(&path, &mut region, direct).is_err(), "missing");
            for (len, whole) in [(4 * ALIGN, true), (4 * ALIGN - 1, false), (4 * ALIGN + 1, false), (0, false)] {
                let content: Vec<u8> = (0..len).map(|i| (i / 7) as u8).collect();
                std::fs::write(&path, &content).unwrap();
                let read = read_whole(&path, &mut region, direct);
                assert_eq!(read.is_ok(), whole, "{len}");
                assert!(!whole || region[..] == content[..]);
            }
        }
    }
}
