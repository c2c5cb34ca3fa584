//! What a person sees meanwhile and afterwards: progress, statistics, JSON, pictures.

pub mod json;
pub mod plot;
pub mod progress;
mod progress_line;
