//! What a person sees meanwhile and afterwards: progress, statistics, JSON.

pub mod json;
pub mod progress;
mod progress_line;
