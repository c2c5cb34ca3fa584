//! The objects that `--output json` prints.
