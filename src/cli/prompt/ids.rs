//! Token ids given instead of text.

use std::path::{Path, PathBuf};

use super::source::Source;
use crate::cli::args;
use crate::engine::Progress;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// `--ids` and `--ids-file`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(in crate::cli) struct IdArgs {
    /// Token ids instead of text, e.g. 1,2,3
    #[arg(long, value_name = "LIST", conflicts_with = "ids_file", help_heading = "Prompt")]
    pub ids: Option<String>,
    /// File of token ids, separated by commas, spaces or line ends; `-` is standard input
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub ids_file: Option<PathBuf>,
}

impl IdArgs {
    /// The ids, when either flag is given.
    ///
    /// # Errors
    /// Kind `Usage` for what is no id, or none at all; else as reading the file reports.
    pub(in crate::cli) fn read(&self, progress: &dyn Progress, interrupt: &Interrupt) -> Result<Option<Vec<u32>>> {
        let (text, source) = match (&self.ids, &self.ids_file) {
            (Some(list), _) => (list.clone(), "--ids".to_owned()),
            (None, Some(file)) => (read_text(file, progress, interrupt)?, format!("--ids-file {}", file.display())),
            (None, None) => return Ok(None),
        };
        let ids = parse_list(&text, &source)?;
        if ids.is_empty() {
            return Err(Error::usage(format!("{source}: no token id: the prompt is empty")));
        }
        Ok(Some(ids))
    }
}

fn read_text(file: &Path, progress: &dyn Progress, interrupt: &Interrupt) -> Result<String> {
    Source::named(file).text(progress, interrupt)
}

/// Ids separated by commas, spaces or line ends, or a JSON array of them; `source` names them in messages.
///
/// # Errors
/// Kind `Usage`, naming the entry that is no id.
pub(in crate::cli) fn parse_list(text: &str, source: &str) -> Result<Vec<u32>> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if text.starts_with('[') {
        return serde_json::from_str(text)
            .map_err(|error| Error::usage(format!("{source}: expected a JSON array of token ids: {error}")));
    }
    args::ids(text).map_err(|message| Error::usage(format!("{source}: {message}")))
}

/// Refuses ids that the model does not have.
///
/// # Errors
/// Kind `Usage`, naming the first such id and its place.
pub(in crate::cli) fn check_vocabulary(ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().zip(1..).find(|(id, _)| **id as usize >= vocab_size) {
        None => Ok(()),
        Some((id, number)) => Err(Error::usage(format!(
            "token id {id} (number {number}) is outside the vocabulary: expected 0 to {}",
            vocab_size.saturating_sub(1)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_json_array_is_a_list_too_and_nothing_in_it_is_rounded() {
        assert_eq!(parse_list(" [1, 2,3]\n", "x").unwrap(), [1, 2, 3]);
        assert_eq!(parse_list("[]", "x").unwrap(), Vec::<u32>::new());
        assert_eq!(parse_list(" \n", "x").unwrap(), Vec::<u32>::new());
        for bad in ["[1.0]", "[-1]", "[4294967296]", "[\"1\"]", "[1", "[1] 2", "[null]"] {
            assert!(parse_list(bad, "x").is_err(), "{bad}");
        }
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_named_with_its_place() {
        assert!(check_vocabulary(&[0, 9], 10).is_ok());
        let error = check_vocabulary(&[0, 10], 10).unwrap_err();
        assert!(error.message().contains("token id 10 (number 2)"), "{error}");
    }
}
