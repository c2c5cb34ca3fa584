//! What the model is given: text from `-p`, files and stdin joined in one documented order, or token ids.

mod ids;
mod source;

use std::path::PathBuf;

use crate::engine::Progress;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::text::normalize_input;

pub(super) use ids::{IdArgs, check_vocabulary, parse_list};
pub(super) use source::{Source, stdin_is_given};

/// What stands between two parts of a prompt: a blank line.
const SEPARATOR: &str = "\n\n";

/// The prompt: `text`, then `files` in their order (`-` is stdin), then stdin when `takes_stdin` and it was not named.
/// Parts that are empty do not count; the others are joined by a blank line, and nothing is trimmed. A stdin that was
/// not named, is silent, and is not all the prompt there is, is not waited for.
///
/// # Errors
/// Kind `Usage` for no prompt at all, a file that cannot be opened, and bytes that are not UTF-8; `Io`; `Interrupted`.
pub(super) fn read(
    text: Option<&str>,
    files: &[PathBuf],
    takes_stdin: bool,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<String> {
    let sources: Vec<Source> = files.iter().map(|file| Source::named(file)).collect();
    if sources.iter().filter(|source| **source == Source::Stdin).count() > 1 {
        return Err(Error::usage("`-` (standard input) is named twice: it can be read only once"));
    }
    let mut parts = Vec::new();
    if let Some(text) = text {
        parts.push(normalize_input(text.as_bytes().to_vec(), "--prompt")?);
    }
    for source in &sources {
        parts.push(source.text(progress, interrupt).map_err(|error| match source {
            Source::File(path) if !path.exists() => {
                error.hint("words without a flag name files: give a prompt with -p")
            }
            _ => error,
        })?);
    }
    if takes_stdin && !sources.contains(&Source::Stdin) {
        parts.push(match parts.iter().all(String::is_empty) {
            true => Source::Stdin.text(progress, interrupt)?,
            false => Source::Stdin.text_if_it_comes(progress, interrupt)?,
        });
    }
    let prompt = join(&parts);
    if prompt.is_empty() {
        return Err(Error::usage("the prompt is empty").hint("give it with -p TEXT, as files, or on standard input"));
    }
    Ok(prompt)
}

fn join(parts: &[String]) -> String {
    let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    parts.join(SEPARATOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_by_a_blank_line_and_empty_ones_do_not_count() {
        let joined = |parts: &[&str]| join(&parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>());
        assert_eq!(joined(&["Summarise:", "", "a\r\n"]), "Summarise:\n\na\r\n");
        assert_eq!(joined(&["", " "]), " ");
        assert_eq!(joined(&["", ""]), "");
    }

    #[test]
    fn stdin_named_twice_is_refused() {
        let files = [PathBuf::from("-"), PathBuf::from("-")];
        let error = read(None, &files, false, &(), &Interrupt::new()).expect_err("refused");
        assert!(error.message().contains("twice"), "{error}");
    }
}
