//! Activations, gates and sums, element by element.

use super::Compute;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::{self, sigmoid, tanh};
use super::scalar::Scalar;
use super::slices::{load, store};

/// Elements that are never split over threads.
const BLOCK: usize = 1024;

/// e^x, with the bits that the kernels give.
pub fn exp(x: f32) -> f32 {
    // SAFETY: the scalar lanes need no special instructions.
    unsafe { Exp { x }.run::<Scalar>() }
}

struct Exp {
    x: f32,
}

impl Kernel for Exp {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        // SAFETY: the CPU has the instructions (caller).
        unsafe { math::exp(L::splat(self.x)).max_lane() }
    }
}

impl Compute {
    /// x = x · sigmoid(gate), element by element. MLA's output gate.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn sigmoid_gate(&self, x: &mut [f32], gate: &[f32]) {
        self.update("gate", x, gate, SigmoidGate);
    }

    /// x = sigmoid(x).
    pub fn sigmoid(&self, x: &mut [f32]) {
        let len = x.len();
        let shared = DisjointMut::new(x);
        self.ranges(len.div_ceil(BLOCK), 20 * BLOCK / LANES, &|blocks| {
            // SAFETY: the ranges of blocks are disjoint, and each task writes its own alone.
            let x = unsafe { shared.range(blocks.start * BLOCK..len.min(blocks.end * BLOCK)) };
            self.isa.run(Sigmoid { x });
        });
    }

    /// x = e^x.
    pub fn exp(&self, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = exp(*x));
    }

    /// gate = silu(gate) · up, with silu(g) = g · sigmoid(g).
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn silu_and_mul(&self, gate: &mut [f32], up: &[f32]) {
        self.update("up", gate, up, SiluAndMul);
    }

    /// gate = β tanh(gate/β) σ(gate) · β_l tanh(up/β_l), multiplied from the left, the two halves last.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn situ_and_mul(&self, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
        self.update("up", gate, up, SituAndMul { beta, linear_beta });
    }

    /// y += x.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add(&self, y: &mut [f32], x: &[f32]) {
        self.update("x", y, x, Add);
    }

    /// y = fma(a, x, y).
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_scaled(&self, y: &mut [f32], a: f32, x: &[f32]) {
        self.update("x", y, x, AddScaled { a });
    }

    /// x = op(x, y) over the threads; `name` is y's, for the message.
    fn update<O: Op>(&self, name: &str, x: &mut [f32], y: &[f32], op: O) {
        let len = x.len();
        assert_eq!(y.len(), len, "{name} must be as long as the slice that it updates");
        let shared = DisjointMut::new(x);
        self.ranges(len.div_ceil(BLOCK), O::COST * BLOCK / LANES, &|blocks| {
            let part = blocks.start * BLOCK..len.min(blocks.end * BLOCK);
            // SAFETY: the ranges of blocks are disjoint, and each task writes its own alone.
            let x = unsafe { shared.range(part.clone()) };
            self.isa.run(Update { x, y: &y[part], op });
        });
    }
}

/// What becomes of an element x of the updated slice and its partner y.
trait Op: Copy + Sync {
    /// About how many vector operations it is.
    const COST: usize;

    /// # Safety
    /// The CPU has the instructions of `L`.
    unsafe fn apply<L: Lanes>(self, x: L, y: L) -> L;
}

struct Update<'a, O> {
    x: &'a mut [f32],
    y: &'a [f32],
    op: O,
}

impl<O: Op> Kernel for Update<'_, O> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.x.len().min(self.y.len());
        let (x, y) = (self.x.as_mut_ptr(), self.y.as_ptr());
        let mut i = 0;
        while i < n {
            // SAFETY: n − i elements are left from x + i and y + i; the CPU has the instructions (caller).
            unsafe {
                let value = self.op.apply::<L>(load(x.add(i), n - i), load(y.add(i), n - i));
                store(value, x.add(i), n - i);
            }
            i += LANES;
        }
    }
}

struct Sigmoid<'a> {
    x: &'a mut [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.x.len();
        let x = self.x.as_mut_ptr();
        let mut i = 0;
        while i < n {
            // SAFETY: n − i elements are left from x + i; the CPU has the instructions (caller).
            unsafe { store(sigmoid::<L>(load(x.add(i), n - i)), x.add(i), n - i) };
            i += LANES;
        }
    }
}

#[derive(Clone, Copy)]
struct SigmoidGate;

impl Op for SigmoidGate {
    const COST: usize = 20;

    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L, y: L) -> L {
        // SAFETY: the CPU has the instructions (caller).
        unsafe { x.mul(sigmoid(y)) }
    }
}

#[derive(Clone, Copy)]
struct SiluAndMul;

impl Op for SiluAndMul {
    const COST: usize = 20;

    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L, y: L) -> L {
        // SAFETY: the CPU has the instructions (caller).
        unsafe { x.mul(sigmoid(x)).mul(y) }
    }
}

#[derive(Clone, Copy)]
struct SituAndMul {
    beta: f32,
    linear_beta: f32,
}

impl Op for SituAndMul {
    const COST: usize = 80;

    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L, y: L) -> L {
        // SAFETY: the CPU has the instructions (caller).
        unsafe {
            let (beta, linear_beta) = (L::splat(self.beta), L::splat(self.linear_beta));
            let gate = beta.mul(tanh(x.div(beta))).mul(sigmoid(x));
            gate.mul(linear_beta.mul(tanh(y.div(linear_beta))))
        }
    }
}

#[derive(Clone, Copy)]
struct Add;

impl Op for Add {
    const COST: usize = 2;

    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L, y: L) -> L {
        // SAFETY: the CPU has the instructions (caller).
        unsafe { x.add(y) }
    }
}

#[derive(Clone, Copy)]
struct AddScaled {
    a: f32,
}

impl Op for AddScaled {
    const COST: usize = 2;

    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L, y: L) -> L {
        // SAFETY: the CPU has the instructions (caller).
        unsafe { L::splat(self.a).fma(y, x) }
    }
}
