//! Whether an expert's bytes are legal MXFP4: scale 255 is NaN in the OCP MX specification.

/// The reserved E8M0 scale.
const RESERVED_SCALE: u8 = 255;

/// Position of the first reserved scale among `scales`.
///
/// Looks at blocks without a branch in them, which compilers turn into SIMD: this runs over every byte of scales that
/// comes from a drive.
pub(crate) fn reserved_scale(scales: &[u8]) -> Option<usize> {
    let mut blocks = scales.chunks_exact(256);
    let legal = blocks.all(|block| !block.iter().fold(false, |found, scale| found | (*scale == RESERVED_SCALE)));
    if legal && !blocks.remainder().contains(&RESERVED_SCALE) {
        return None;
    }
    scales.iter().position(|scale| *scale == RESERVED_SCALE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reserved_scale_is_refused_wherever_it_is() {
        let legal: Vec<u8> = (0..2000).map(|i| (i % 255) as u8).collect();
        assert_eq!(reserved_scale(&legal), None);
        assert_eq!(reserved_scale(&[]), None);
        for len in [1, 255, 256, 257, 512, 1000] {
            for at in [0, 1, 254, 255, 256, 511, 999] {
                if at < len {
                    let mut scales = legal[..len].to_vec();
                    scales[at] = 255;
                    assert_eq!(reserved_scale(&scales), Some(at), "{len} scales");
                }
            }
        }
    }
}
