//! `deltafin logits`: what the model thinks of every position of given text or ids.

mod file;
mod likelihood;

use std::path::PathBuf;

use super::args::{self, EngineArgs, Shown};
use super::prompt::{IdArgs, Source, check_vocabulary};
use super::{output, show_plan};
use crate::config::ModelConfig;
use crate::engine::{Engine, Progress};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::report::progress::Reporter;
use crate::text::{Specials, Tokenizer, normalize_input};

use file::LogitsFile;
use likelihood::Likelihood;

const EXAMPLES: &str = "\
The file is safetensors: `ids` I64 [T] and `logits` F32 [T, vocab], where row t holds the logits after token t. It \
appears under its name only when it is complete.

--nll prints two lines: `nll`, the mean negative log-likelihood in nats of tokens 2 to T given those before each, and \
`perplexity`, its exponential.

Examples:
  deltafin logits -m K3 --ids 1,2,3 -o logits.safetensors
  deltafin logits -m demo -f story.txt --nll";

/// Flags of `logits`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("input").required(true).args(["ids", "ids_file", "prompt", "file"]))]
#[command(group = clap::ArgGroup::new("result").required(true).multiple(true).args(["output", "nll"]))]
pub struct LogitsArgs {
    /// Model directory, or `demo` for the embedded small model
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    ids: IdArgs,
    /// Text
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Prompt")]
    prompt: Option<String>,
    /// File of text; `-` is standard input
    #[arg(short, long, value_name = "FILE", help_heading = "Prompt")]
    file: Option<PathBuf>,
    /// Let spellings of control tokens in the text become control tokens
    #[arg(long, help_heading = "Prompt", conflicts_with_all = ["ids", "ids_file"])]
    special: bool,
    /// Write the logits of every position to this safetensors file
    #[arg(short, long, value_name = "FILE", help_heading = "Result")]
    output: Option<PathBuf>,
    /// Print mean negative log-likelihood and perplexity
    #[arg(long, help_heading = "Result")]
    nll: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: &LogitsArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let reporter = Reporter::new(shown);
    let text = read_text(args, &reporter, interrupt)?;
    let given = args.ids.read(&reporter, interrupt)?;
    let model = args::model_dir(&args.model)?;
    let config = ModelConfig::load(&model)?;
    let ids = match (given, text) {
        (Some(ids), _) => ids,
        (None, Some(text)) => {
            let specials = if args.special { Specials::Control } else { Specials::Ordinary };
            Tokenizer::from_dir(&model, Some(config.vocab_size))?.encode(&text, specials)
        }
        (None, None) => return Err(Error::usage("nothing to compute: give --ids, --ids-file, -p or -f")),
    };
    check_vocabulary(&ids, config.vocab_size)?;
    let context = context(args, ids.len(), config.max_position_embeddings)?;
    if args.nll && ids.len() < 2 {
        return Err(Error::usage("--nll needs at least 2 tokens, found 1: the first is given, not predicted"));
    }
    // Opened before the model, so that a path which cannot be written costs no loading.
    let mut file = match &args.output {
        Some(path) => Some(LogitsFile::create(path, &ids, config.vocab_size)?),
        None => None,
    };
    let options = args.engine.options(model, context, Some(ids.len()))?;
    show_plan(&options, shown)?;
    let engine = Engine::open(&options, &reporter, interrupt)?;
    let mut likelihood = Likelihood::default();
    engine.session()?.feed_all(&ids, &reporter, &mut |position, logits| {
        interrupt.check()?;
        if let Some(file) = &mut file {
            file.row(logits)?;
        }
        if let Some(&next) = ids.get(position + 1).filter(|_| args.nll) {
            likelihood.add(logits, next);
        }
        Ok(())
    })?;
    reporter.finish();
    if let Some(file) = file {
        file.finish()?;
    }
    if args.nll {
        // A reader that is gone wants no figures; the file stands.
        let _ = output::stdout(likelihood.lines().as_bytes())?;
    }
    Ok(())
}

fn read_text(args: &LogitsArgs, progress: &dyn Progress, interrupt: &Interrupt) -> Result<Option<String>> {
    let (text, source) = match (&args.prompt, &args.file) {
        (Some(text), _) => (normalize_input(text.as_bytes().to_vec(), "--prompt")?, "--prompt".to_owned()),
        (None, Some(file)) => {
            let source = Source::named(file);
            (source.text(progress, interrupt)?, source.name())
        }
        (None, None) => return Ok(None),
    };
    if text.is_empty() {
        return Err(Error::usage(format!("{source}: the text is empty")));
    }
    Ok(Some(text))
}

/// Tokens to make room for: `--context`, or just what there are.
fn context(args: &LogitsArgs, tokens: usize, most: usize) -> Result<usize> {
    let room = args.engine.context.unwrap_or(most);
    if room > most {
        return Err(Error::usage(format!("--context {room}: the model is made for at most {most} tokens")));
    }
    if tokens > room {
        return Err(Error::usage(format!("{tokens} tokens do not fit a context of {room}"))
            .hint("shorten the text: nothing is cut off without being asked for"));
    }
    Ok(args.engine.context.unwrap_or(tokens))
}
