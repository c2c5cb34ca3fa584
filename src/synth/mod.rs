//! Synthetic checkpoints in the released format, of any shape, and synthetic traces of expert use: to measure a machine
//! with before the weights are there, and to test with what could not be kept on the machine.

mod config;
mod dir;
pub mod figures;
mod outline;
mod recipe;
pub mod rng;
mod routing;
pub mod shape;
mod shard;
pub mod space;
mod tensors;
pub mod trace;
mod usage;
mod values;
mod writer;

pub use outline::outline;
pub use recipe::{Content, Recipe};
pub use shape::{Preset, Shape};
pub use writer::{Made, write};
