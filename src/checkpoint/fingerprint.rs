//! What tells one checkpoint from another by content, without reading all of it: what is derived from a checkpoint
//! remembers this, and is refused for any other.
//!
//! A shard's digest is the XXH3-128 of its length, its header and 32 samples of 16 KiB spread evenly over its data, or of
//! all of a shard of at most 16 MiB. Two models of one shape differ in every sample. The fingerprint is the XXH3-128 of
//! the digests of all shards of the text model. config.json is left out: what is derived depends on the tensors alone,
//! whose shapes are in the headers.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::{Manifest, moved};
use crate::error::{Error, Result};

/// A shard of at most so many bytes is hashed whole.
const WHOLE_BYTES_MAX: u64 = 16 << 20;
const SAMPLES: u64 = 32;
const SAMPLE_BYTES: u64 = 16 << 10;
/// Bytes hashed at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Identity of a checkpoint's tensors; displays as 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub(crate) u128);

impl Fingerprint {
    /// Little-endian.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Manifest {
    /// The checkpoint's fingerprint. It stays the same when `pack --move` takes experts out of the shards.
    ///
    /// # Errors
    /// Kind `Model` for a shard that cannot be read.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        let record = moved::read(&self.dir)?;
        let mut hash = Xxh3::new();
        for (path, used) in self.shards.iter().zip(self.shards_in_use()) {
            let was = record.as_ref().and_then(|record| record.shard(path));
            // A shard with nothing but vision in it may come and go.
            if was.is_none() && !used {
                continue;
            }
            let digest = shard_digest(path)?;
            let digest = match was {
                Some(was) if was.rest == digest => was.source,
                _ => digest,
            };
            hash.update(&digest.to_le_bytes());
        }
        Ok(Fingerprint(hash.digest128()))
    }

    /// `[shards]`: whether it holds a tensor of the text model.
    fn shards_in_use(&self) -> Vec<bool> {
        let mut used = vec![false; self.shards.len()];
        let places = self.experts.iter().flat_map(|table| &table.places).map(|place| place.0);
        for shard in places.chain(self.trunk.iter().map(|tensor| tensor.span.shard)) {
            if let Some(used) = used.get_mut(usize::from(shard)) {
                *used = true;
            }
        }
        used
    }
}

/// Digest of the shard at `path`.
///
/// # Errors
/// Kind `Model` when it cannot be read.
pub(crate) fn shard_digest(path: &Path) -> Result<u128> {
    digest(path).map_err(|e| {
        Error::model(format!("cannot read {}: {e}", path.display())).hint("check that the file exists and may be read")
    })
}

fn digest(path: &Path) -> io::Result<u128> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut hash = Xxh3::new();
    hash.update(&len.to_le_bytes());
    if len <= WHOLE_BYTES_MAX {
        update(&mut hash, &file, 0, len)?;
        return Ok(hash.digest128());
    }
    let mut header = [0; 8];
    file.read_exact_at(&mut header, 0)?;
    let data = u64::from_le_bytes(header).saturating_add(8).min(len);
    update(&mut hash, &file, 0, data)?;
    let last = (len - data).saturating_sub(SAMPLE_BYTES);
    for sample in 0..SAMPLES {
        // From the first bytes of the data to the last, in 128 bits so that no length overflows.
        let at = data + (u128::from(last) * u128::from(sample) / u128::from(SAMPLES - 1)) as u64;
        update(&mut hash, &file, at, SAMPLE_BYTES.min(len - at))?;
    }
    Ok(hash.digest128())
}

fn update(hash: &mut Xxh3, file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES.min(len as usize)];
    let mut done = 0;
    while done < len {
        let count = (len - done).min(buffer.len() as u64) as usize;
        file.read_exact_at(&mut buffer[..count], offset + done)?;
        hash.update(&buffer[..count]);
        done += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_shard_is_hashed_whole_and_a_large_one_by_samples() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let large = vec![0_u8; (WHOLE_BYTES_MAX + 100_000) as usize];
        for (len, changed, told) in [
            (1000, 999, true),
            (WHOLE_BYTES_MAX as usize, 9_999_999, true),
            (large.len(), 3, true),
            (large.len(), 8 + 5, true),
            (large.len(), large.len() - 1, true),
            // Between two samples.
            (large.len(), 8 + 20_000, false),
        ] {
            let mut bytes = large[..len].to_vec();
            std::fs::write(&path, &bytes).unwrap();
            let before = shard_digest(&path).unwrap();
            bytes[changed] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(shard_digest(&path).unwrap() != before, told, "byte {changed} of {len}");
            bytes.push(0);
            std::fs::write(&path, &bytes).unwrap();
            assert_ne!(shard_digest(&path).unwrap(), before, "a byte more than {len}");
        }
    }

    #[test]
    fn a_shard_that_is_gone_is_named() {
        let error = shard_digest(Path::new("/nowhere/shard")).unwrap_err();
        assert!(error.message().contains("/nowhere/shard"), "{error}");
    }
}
