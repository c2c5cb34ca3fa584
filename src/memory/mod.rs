//! Memory straight from the system: committed as it is touched, in large pages where it is long.

mod floats;
mod region;

pub(crate) use floats::Floats;
pub(crate) use region::{ALIGN, Region};
