//! Deltafin: Kimi K3, whole and unaltered, on one machine. The dense trunk stays in memory; routed experts stream from
//! SSDs. Uses point one way: cli → {bench, drives} → engine → generate → model → {store, trunk, kernels} → checkpoint → config.

pub mod bench;
pub mod bug;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod demo;
mod device;
pub mod drives;
pub mod engine;
pub mod error;
pub mod generate;
pub mod interrupt;
pub mod kernels;
pub mod learned;
mod memory;
pub mod model;
pub mod pack;
pub mod plan;
pub mod report;
pub mod signals;
pub mod store;
pub mod synth;
pub mod text;
pub mod trunk;
mod user_cache;
