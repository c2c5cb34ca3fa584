//! Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing with `-q`.

use crate::cli::args::Shown;
use crate::engine::Progress;

/// Shows loading, prefill and notices.
pub struct Reporter {
    _private: (),
}

impl Reporter {
    /// As the flags say.
    pub fn new(shown: &Shown) -> Self {
        let _ = shown;
        todo!()
    }

    /// Clears what is shown, before the answer begins.
    pub fn finish(&self) {
        todo!()
    }
}

impl Progress for Reporter {
    fn loading(&self, _done: u64, _total: u64) {
        todo!()
    }

    fn prefill(&self, _done: usize, _total: usize, _layer: usize, _layers: usize, _bytes: u64) {
        todo!()
    }

    fn notice(&self, _text: &str) {
        todo!()
    }
}
