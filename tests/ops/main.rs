//! Vector operations through [`Compute`]: against the golden cases, against float64, and bit for bit between
//! instruction sets, thread counts and ways to cut the rows.

mod bits;
mod golden;
mod long;

use std::sync::LazyLock;

use deltafin::interrupt::Interrupt;
use deltafin::kernels::{Compute, Isa};
use safetensors::{Dtype, SafeTensors};

/// The instruction sets this CPU has; those it lacks are named.
static ISAS: LazyLock<Vec<Isa>> = LazyLock::new(|| {
    let (present, absent): (Vec<_>, Vec<_>) = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Neon]
        .into_iter()
        .partition(|isa| Compute::new(Some(*isa), 1, Interrupt::new()).is_ok());
    println!("tested: {present:?}; not on this machine: {absent:?}");
    present
});

fn compute(isa: Isa, threads: usize) -> Compute {
    Compute::new(Some(isa), threads, Interrupt::new()).unwrap()
}

/// Calls `f` with every instruction set.
fn each_isa(f: impl Fn(&Compute)) {
    ISAS.iter().for_each(|isa| f(&compute(*isa, 2)));
}

static GOLDEN: LazyLock<SafeTensors<'static>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/ops.safetensors");
    SafeTensors::deserialize(std::fs::read(path).unwrap().leak()).unwrap()
});

/// Values of a golden tensor.
fn floats(name: &str) -> Vec<f32> {
    let tensor = GOLDEN.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
    tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn ints(name: &str) -> Vec<usize> {
    let tensor = GOLDEN.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(tensor.dtype(), Dtype::I32, "{name}");
    tensor.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()) as usize).collect()
}

fn shape(name: &str) -> Vec<usize> {
    GOLDEN.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).shape().to_vec()
}

/// Within 1e-5 + 1e-5 · |wanted| everywhere.
#[track_caller]
fn assert_close(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let limit = 1e-5 + 1e-5 * wanted.abs();
        assert!((got - wanted).abs() <= limit, "{what}[{i}]: got {got}, wanted {wanted}");
    }
}

/// `[n, v, k]` → `[n, k, v]`.
fn transpose(x: &[f32], n: usize, v: usize, k: usize) -> Vec<f32> {
    assert_eq!(x.len(), n * v * k);
    let mut out = Vec::with_capacity(x.len());
    for i in 0..n {
        for key in 0..k {
            out.extend((0..v).map(|value| x[(i * v + value) * k + key]));
        }
    }
    out
}

/// A small generator of its own, so that the pinned hash never depends on a dependency.
struct Random(u64);

impl Random {
    /// Uniform in [−1, 1).
    fn signed(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.signed() * scale).collect()
    }

    /// Uniform in [low, high).
    fn between(&mut self, n: usize, low: f32, high: f32) -> Vec<f32> {
        (0..n).map(|_| low + (high - low) * (self.signed() * 0.5 + 0.5)).collect()
    }
}
