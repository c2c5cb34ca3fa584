//! Activations, gates and sums, element by element.

use super::Compute;

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// x = x · sigmoid(gate), element by element. MLA's output gate.
    pub fn sigmoid_gate(&self, x: &mut [f32], gate: &[f32]) {
        todo!()
    }

    /// x = sigmoid(x).
    pub fn sigmoid(&self, x: &mut [f32]) {
        todo!()
    }

    /// gate = silu(gate) · up.
    pub fn silu_and_mul(&self, gate: &mut [f32], up: &[f32]) {
        todo!()
    }

    /// gate = β tanh(gate/β) σ(gate) · β_l tanh(up/β_l).
    pub fn situ_and_mul(&self, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
        todo!()
    }

    /// y += x.
    pub fn add(&self, y: &mut [f32], x: &[f32]) {
        todo!()
    }

    /// y = fma(a, x, y).
    pub fn add_scaled(&self, y: &mut [f32], a: f32, x: &[f32]) {
        todo!()
    }

    /// x = e^x.
    pub fn exp(&self, x: &mut [f32]) {
        todo!()
    }
}

/// e^x, with the bits that the kernels give.
pub fn exp(x: f32) -> f32 {
    let _ = x;
    todo!()
}
