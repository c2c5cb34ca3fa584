//! Benchmarks of the kernels.

fn main() {}
