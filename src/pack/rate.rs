//! How fast a root reads: a short measurement on a file that is written for it and removed again.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::files;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::{Files, Names, Region, System, Tally, Volumes};

const PIECE_BYTES: usize = 4 << 20;
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Reads in flight.
const READERS: u64 = 4;
const READ_FOR: Duration = Duration::from_millis(400);

/// Measures `dir` with a file of at most a sixteenth of `packed_bytes`; gives GB/s to two digits, so that the same drive
/// mostly has the same rate. `None` where there is too little to measure with.
///
/// # Errors
/// Kind `Io`, `Memory`, `Interrupted`.
pub(super) fn measure(dir: &Path, packed_bytes: u64, free: u64, interrupt: &Interrupt) -> Result<Option<f64>> {
    let pieces = (packed_bytes / 16).min(free / 4).min(FILE_BYTES_MAX) / PIECE_BYTES as u64;
    if pieces < READERS {
        return Ok(None);
    }
    let path = dir.join(".rate");
    let measured = files::create(&path, |file, temporary| {
        let piece: Vec<u8> = (0..PIECE_BYTES as u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        for _ in 0..pieces {
            use std::io::Write;
            interrupt.check()?;
            file.write_all(&piece).map_err(|e| files::unwritten(temporary, &e))?;
        }
        file.sync_all().map_err(|e| files::unwritten(temporary, &e))
    })
    .and_then(|()| read(&path, pieces, interrupt));
    let removed = fs::remove_file(&path);
    let rate = measured?;
    removed.map_err(|e| Error::io(format!("cannot remove {}: {e}", path.display())))?;
    Ok(Some(two_digits(rate)))
}

fn read(path: &Path, pieces: u64, interrupt: &Interrupt) -> Result<f64> {
    let bytes = pieces * PIECE_BYTES as u64;
    let files = Files::new(Arc::new(System), Names::of_files(vec![path.to_owned()], vec![bytes]), READERS as usize);
    let volumes = Volumes::open(&Arc::new(files), &[0], true)?;
    let next = AtomicU64::new(0);
    let start = Instant::now();
    let reader = || -> Result<()> {
        let mut memory = Region::allocate(PIECE_BYTES, "a measurement")?;
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            // At least once over the file, then until the time is up.
            if interrupt.is_raised() || (number >= pieces && start.elapsed() >= READ_FOR) {
                return interrupt.check();
            }
            let offset = number % pieces * PIECE_BYTES as u64;
            volumes.list[0]
                .read(0, &mut memory[..PIECE_BYTES], offset, PIECE_BYTES, &mut Tally::default())
                .map_err(|e| e.into_error(Kind::Io, "a file written to measure with"))?;
        }
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(reader)).collect();
        readers.into_iter().try_for_each(|reader| {
            reader.join().unwrap_or_else(|_| Err(Error::other("a thread that measured a drive has ended early")))
        })
    })?;
    // Each reader's last number was not read.
    let read = next.load(Ordering::Relaxed).saturating_sub(READERS) * PIECE_BYTES as u64;
    Ok(read as f64 / start.elapsed().as_secs_f64() / 1e9)
}

fn two_digits(rate: f64) -> f64 {
    if !rate.is_finite() || rate <= 0.0 {
        return 0.001;
    }
    let unit = 10_f64.powf(rate.log10().floor() - 1.0);
    (rate / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_keep_two_digits() {
        for (rate, kept) in [(13.64, 14.0), (7.149, 7.1), (0.1234, 0.12), (1.0, 1.0), (0.0, 0.001), (f64::NAN, 0.001)] {
            assert!((two_digits(rate) - kept).abs() < 1e-9, "{rate}: {}", two_digits(rate));
        }
    }

    #[test]
    fn a_measurement_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::new();
        assert_eq!(measure(dir.path(), 1 << 20, u64::MAX, &interrupt).unwrap(), None);
        let rate = measure(dir.path(), 16 * (16 << 20), u64::MAX, &interrupt).unwrap();
        assert!(rate.is_some_and(|rate| rate > 0.0));
        interrupt.raise(2);
        assert!(measure(dir.path(), 16 * (16 << 20), u64::MAX, &interrupt).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
