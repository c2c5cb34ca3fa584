//! From released shards to expert files on drive roots.
pub mod placement;
