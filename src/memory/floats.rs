//! [`Floats`]: a long, fixed run of f32 in large pages.

use std::ops::{Deref, DerefMut};

use super::Region;
use crate::error::Result;

/// As a `Box<[f32]>`, on whole pages, large ones where it is long: what is walked through from end to end, a latent cache
/// or the rows of a step, then misses few address translations and is committed in few faults.
pub(crate) struct Floats {
    region: Region,
    len: usize,
}

impl Floats {
    /// `len` zeros; the system commits the pages when they are first touched.
    ///
    /// # Errors
    /// Kind `Memory`, naming `purpose` and the size.
    pub(crate) fn zeroed(len: usize, purpose: &str) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<f32>());
        Ok(Self { region: Region::allocate(bytes, purpose)?, len })
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.region.floats()[..self.len]
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.region.floats_mut()[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn they_are_zeros_as_many_as_asked_for_and_keep_what_is_written() {
        for len in [0, 1, 1023, 1024, 1025, 3 << 19] {
            let mut floats = Floats::zeroed(len, "a test").unwrap();
            assert_eq!(floats.len(), len);
            assert!(floats.iter().all(|x| x.to_bits() == 0));
            floats.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
            assert!(floats.iter().enumerate().all(|(i, x)| *x == i as f32));
        }
    }

    #[test]
    fn an_impossible_length_is_refused() {
        for len in [usize::MAX, usize::MAX / 4] {
            let error = Floats::zeroed(len, "the latent cache").err().expect("refused");
            assert_eq!(error.kind(), Kind::Memory);
            assert!(error.message().contains("the latent cache"), "{error}");
        }
    }
}
