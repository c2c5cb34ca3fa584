//! What drives can do: how fast they read alone and together, in the ways the engine reads them, and what tokens a second
//! that allows. A rate is one of the store's own reads, of files that are there or of a test file.

mod estimate;
mod load;
mod measure;
mod model_files;
mod report;
mod roots;
mod routing;
mod target;
mod test_file;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use estimate::estimate_together;
pub use estimate::{DriveOnPaper, Estimate, JITTER, LATENCY_US, Model, PRECISION, Run, estimate};
pub use measure::measure;
pub use report::{Drive, Rate, Report, Rung, Share, Together};
pub use target::{Source, SourceKind};

pub use crate::store::simulate::SimulatedFigures;

/// Bytes of an expert of the released K3.
pub const K3_EXPERT_BYTES: usize = 17_547_264;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directories, one on each drive.
    pub roots: Vec<PathBuf>,
    /// Seconds of reading for each drive alone.
    pub seconds: f64,
    /// Bytes of a whole random read: whole pages.
    pub read_bytes: usize,
    /// Read past the page cache where the file system allows.
    pub direct: bool,
}

/// Where a measurement is.
#[derive(Debug, Clone)]
pub struct At {
    /// What is done.
    pub activity: String,
    /// Since it began.
    pub elapsed: Duration,
    /// What all of it will take, about.
    pub total: Duration,
    /// Notices that were not passed on before.
    pub notices: Vec<String>,
}
