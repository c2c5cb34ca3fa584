//! The short causal convolution in front of KDA.

use super::Compute;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::sigmoid;
use super::slices::{load, store};

impl Compute {
    /// Causal depthwise convolution with SiLU. `window` `[taps − 1 + T, channels]`: history, then the step's rows;
    /// `weight` `[taps, channels]`, the last tap meets the current row; out `[T, channels]`.
    ///
    /// A sum runs over the taps, oldest first, by fused multiply-add from +0.0.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn short_conv(&self, window: &[f32], weight: &[f32], channels: usize, out: &mut [f32]) {
        assert!(channels > 0, "channels must not be 0");
        let whole = |name, len: usize| {
            assert!(len.is_multiple_of(channels), "{name} has {len} values, not whole rows of {channels} channels");
            len / channels
        };
        let (taps, rows) = (whole("weight", weight.len()), whole("out", out.len()));
        assert!(taps > 0, "weight must hold at least one tap");
        assert_eq!(
            whole("window", window.len()),
            taps - 1 + rows,
            "rows of the window must be those of out, {rows}, and {} before them",
            taps - 1
        );
        let out = DisjointMut::new(out);
        // Channels are split within a row too: decoding has one row of many channels.
        let blocks = channels.div_ceil(BLOCK);
        self.ranges(rows * blocks, (2 * taps + 20) * BLOCK.min(channels).div_ceil(LANES), &|items| {
            for item in items {
                let (row, first) = (item / blocks, item % blocks * BLOCK);
                let channel = first..channels.min(first + BLOCK);
                let start = row * channels;
                // SAFETY: an item is one row's block of channels; the blocks are disjoint, and each is in one task.
                let out = unsafe { out.range(start + channel.start..start + channel.end) };
                self.isa.run(ShortConv {
                    window: &window[start + first..],
                    weight: &weight[first..],
                    channels,
                    taps,
                    out,
                });
            }
        });
    }
}

/// Channels that are never split over threads.
const BLOCK: usize = 1024;

/// One row of a block of channels: tap j of channel c meets `window[j · channels + c]`.
struct ShortConv<'a> {
    window: &'a [f32],
    weight: &'a [f32],
    channels: usize,
    taps: usize,
    out: &'a mut [f32],
}

impl Kernel for ShortConv<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.out.len();
        let last = (self.taps - 1) * self.channels + n;
        assert!(last <= self.window.len() && last <= self.weight.len());
        let (window, weight, out) = (self.window.as_ptr(), self.weight.as_ptr(), self.out.as_mut_ptr());
        let mut i = 0;
        while i < n {
            // SAFETY: n − i elements are left at i in out and, by the assertion, at every tap of window and weight;
            // the CPU has the instructions (caller).
            unsafe {
                let mut sum = L::splat(0.0);
                let mut at = i;
                for _ in 0..self.taps {
                    sum = load::<L>(window.add(at), n - i).fma(load(weight.add(at), n - i), sum);
                    at += self.channels;
                }
                store(sum.mul(sigmoid(sum)), out.add(i), n - i);
            }
            i += LANES;
        }
    }
}
