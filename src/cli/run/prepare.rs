//! From flags to what the engine is fed: everything that can be refused before a weight is read.

use std::path::{Path, PathBuf};

use super::flags::{OutputForm, RunArgs};
use crate::cli::args;
use crate::cli::prompt::{self, check_vocabulary};
use crate::config::ModelConfig;
use crate::engine::Progress;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::text::chat::{self, Message};
use crate::text::{Specials, StopIds, StopStrings, Tokenizer, stop_ids};

/// New tokens where `-n` does not say.
const MAX_TOKENS: usize = 512;
/// The files that a tokenizer is read from.
const TOKENIZER_FILES: [&str; 2] = ["tiktoken.model", "tokenizer.json"];

/// What the user gave.
pub(super) enum Input {
    Text(String),
    Ids(Vec<u32>),
}

impl Input {
    /// Reads it.
    ///
    /// # Errors
    /// Kind `Usage` for an empty prompt or one that is no text; `Io`; `Interrupted`.
    pub(super) fn read(args: &RunArgs, progress: &dyn Progress, interrupt: &Interrupt) -> Result<Self> {
        if args.chat.thinking.is_some() && args.output != OutputForm::Text {
            return Err(Error::usage(
                "--thinking has no effect without --output text: JSON holds the reasoning, ids all ids",
            ));
        }
        if let Some(file) = args.engine.experts.iter().find(|root| root.is_file()) {
            return Err(Error::usage(format!("--experts {}: a file, expected a directory", file.display()))
                .hint("all words after --experts are roots: give files of the prompt first, or after `--`"));
        }
        StopStrings::new(&args.stop).map_err(|error| error.context("--stop"))?;
        if let Some(ids) = args.ids.read(progress, interrupt)? {
            return Ok(Self::Ids(ids));
        }
        let takes_stdin = !args.leaves_stdin && prompt::stdin_is_given();
        prompt::read(args.prompt.as_deref(), &args.files, takes_stdin, progress, interrupt).map(Self::Text)
    }
}

/// What the engine is fed, and where it ends.
pub(super) struct Prepared {
    pub model: PathBuf,
    pub tokenizer: Option<Tokenizer>,
    pub prompt: Vec<u32>,
    /// `None` with `--ignore-eos`.
    pub stops: Option<StopIds>,
    /// Most new tokens.
    pub limit: usize,
    /// Tokens to make room for.
    pub context: usize,
}

impl Prepared {
    /// # Errors
    /// Kind `Usage` for what does not fit the model, `Model` for a directory that cannot be run.
    pub(super) fn new(args: &RunArgs, input: Input) -> Result<Self> {
        let model = args::model_dir(&args.model)?;
        let config = ModelConfig::load(&model)?;
        let tokenizer = tokenizer(args, &input, &model, &config)?;
        let prompt = match (input, &tokenizer) {
            (Input::Ids(ids), _) => ids,
            (Input::Text(text), Some(tokenizer)) => encode(args, text, tokenizer)?,
            (Input::Text(_), None) => return Err(Error::other("a text prompt was read without a tokenizer")),
        };
        check_vocabulary(&prompt, config.vocab_size)?;
        let room = Room { prompt: prompt.len(), context: args.engine.context, most: config.max_position_embeddings };
        let (limit, context) = room.share(args.max_tokens)?;
        let stops = match args.ignore_eos {
            true => None,
            false => Some(stop_ids(&model, &config, tokenizer.as_ref())?),
        };
        Ok(Self { model, tokenizer, prompt, stops, limit, context })
    }
}

/// The tokenizer, where the run needs one or the directory has one: the end tokens of the chat format are known by it
/// alone, and an answer must not end elsewhere because nobody looks at its text.
fn tokenizer(args: &RunArgs, input: &Input, model: &Path, config: &ModelConfig) -> Result<Option<Tokenizer>> {
    let there = || TOKENIZER_FILES.iter().any(|file| model.join(file).symlink_metadata().is_ok());
    let shows_text = args.output == OutputForm::Text;
    let needed = matches!(input, Input::Text(_)) || shows_text || !args.stop.is_empty();
    let wanted = needed || ((args.output.needs_text() || !args.ignore_eos) && there());
    if !wanted {
        return Ok(None);
    }
    Tokenizer::from_dir(model, Some(config.vocab_size)).map(Some).map_err(|error| match input {
        _ if there() => error,
        Input::Text(_) => {
            error.hint("download tiktoken.model from the model's repository, or give --ids with --output ids")
        }
        Input::Ids(_) if !args.stop.is_empty() => {
            error.hint("--stop looks at text: leave it out, and give --output ids")
        }
        Input::Ids(_) => {
            error.hint("a tokenizer is needed for text alone: give --output ids (or json), as the prompt is ids")
        }
    })
}

fn encode(args: &RunArgs, text: String, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    if args.chat.chat {
        let mut messages: Vec<Message> = args.chat.system.iter().map(Message::system).collect();
        messages.push(Message::user(text));
        return chat::encode(&chat::render(&messages, &args.chat.options())?, tokenizer);
    }
    let specials = if args.special { Specials::Control } else { Specials::Ordinary };
    Ok(tokenizer.encode(&text, specials))
}

/// What prompt and answer share.
struct Room {
    prompt: usize,
    /// `--context`.
    context: Option<usize>,
    /// What the model is made for.
    most: usize,
}

impl Room {
    /// Most new tokens and the context to plan for.
    fn share(&self, max_tokens: Option<usize>) -> Result<(usize, usize)> {
        let Self { prompt, most, .. } = *self;
        if let Some(context) = self.context.filter(|context| *context > most) {
            return Err(Error::usage(format!("--context {context}: the model is made for at most {most} tokens")));
        }
        let room = self.context.unwrap_or(most);
        let limit = max_tokens.unwrap_or_else(|| MAX_TOKENS.min(room.saturating_sub(prompt)).max(1));
        let wanted = prompt.saturating_add(limit);
        if wanted > room {
            let hint = match self.context {
                Some(_) if room < most => format!("shorten the prompt, lower -n, or raise --context (at most {most})"),
                _ => "shorten the prompt or lower -n: nothing is cut off without being asked for".to_owned(),
            };
            return Err(Error::usage(format!(
                "a prompt of {prompt} tokens and an answer of {limit} do not fit a context of {room}"
            ))
            .hint(hint));
        }
        Ok((limit, self.context.unwrap_or(wanted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(prompt: usize, context: Option<usize>, n: Option<usize>) -> Result<(usize, usize)> {
        Room { prompt, context, most: 1000 }.share(n)
    }

    #[test]
    fn the_default_answer_shrinks_to_what_the_context_leaves() {
        assert_eq!(share(3, None, None).unwrap(), (512, 515));
        assert_eq!(share(900, None, None).unwrap(), (100, 1000));
        assert_eq!(share(3, Some(10), None).unwrap(), (7, 10));
        assert_eq!(share(999, None, None).unwrap(), (1, 1000));
        assert_eq!(share(1000, None, Some(0)).unwrap(), (0, 1000));
        assert_eq!(share(3, Some(100), Some(4)).unwrap(), (4, 100));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_three_numbers() {
        for (prompt, context, n, numbers) in [
            (1000, None, None, [1000, 1, 1000]),
            (2000, None, Some(5), [2000, 5, 1000]),
            (8, Some(10), Some(3), [8, 3, 10]),
            (8, None, Some(usize::MAX), [8, usize::MAX, 1000]),
        ] {
            let error = share(prompt, context, n).unwrap_err();
            for number in numbers {
                assert!(error.message().contains(&number.to_string()), "{error}");
            }
        }
        assert!(share(1, Some(1001), None).unwrap_err().message().contains("at most 1000"));
    }
}
