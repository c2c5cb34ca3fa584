//! The prompt: `-p`, files and stdin joined in one documented order.
