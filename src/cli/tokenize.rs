//! `deltafin tokenize`: text to token ids and back.

mod jsonl;

use std::path::PathBuf;

use super::args::{self, Shown};
use super::output;
use super::prompt::{Source, check_vocabulary, parse_list};
use crate::config::ModelConfig;
use crate::engine::Progress;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::report::progress::Reporter;
use crate::text::{Specials, Tokenizer, normalize_input};

const CONFIG: &str = "config.json";

const EXAMPLES: &str = "\
The input is TEXT, else the file, else standard input; all of it counts, a line end at its end included. --decode takes \
ids separated by spaces, commas or line ends, or a JSON array of them, and writes exactly their bytes.

--jsonl answers `{\"text\": …}` with `{\"ids\": […]}` and `{\"ids\": […]}` with `{\"text\": …}`, line by line, where bytes \
that are no UTF-8 appear as U+FFFD. Other keys are passed over, and so are blank lines. A line that cannot be answered \
ends the run; the answers before it stand.

Examples:
  deltafin tokenize -m K3 \"Hello, world\"
  deltafin tokenize --tokenizer tiktoken.model -f story.txt --json
  deltafin tokenize -m K3 --decode 1,2,3
  deltafin tokenize -m K3 --jsonl < lines.jsonl";

/// Flags of `tokenize`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["model", "tokenizer"]))]
pub struct TokenizeArgs {
    /// Model directory, or `demo` for the embedded small model
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Tokenizer file: tiktoken.model or tokenizer.json
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// What to encode or decode
    #[arg(value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// Read it from this file; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Let spellings of control tokens become control tokens
    #[arg(long, conflicts_with = "decode")]
    special: bool,
    /// Print the ids as a JSON array
    #[arg(long, conflicts_with_all = ["decode", "jsonl"])]
    json: bool,
    /// Turn ids into bytes
    #[arg(long, conflicts_with = "jsonl")]
    decode: bool,
    /// Answer JSON lines
    #[arg(long, conflicts_with = "text")]
    jsonl: bool,
}

pub(super) fn run(args: &TokenizeArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let reporter = Reporter::new(shown);
    let tokenizer = tokenizer(args)?;
    let specials = if args.special { Specials::Control } else { Specials::Ordinary };
    if args.jsonl {
        return jsonl::answer(&source(args), &tokenizer, specials, &reporter, interrupt);
    }
    let (text, name) = input(args, &reporter, interrupt)?;
    let bytes = if args.decode {
        let ids = parse_list(&text, &name)?;
        check_vocabulary(&ids, tokenizer.vocab_size())?;
        tokenizer.decode_bytes(&ids, false)?
    } else {
        let ids = tokenizer.encode(&text, specials);
        let line = if args.json { json_array(&ids) } else { joined(&ids, " ") };
        (line + "\n").into_bytes()
    };
    // A reader that is gone wants nothing more.
    let _ = output::stdout(&bytes)?;
    Ok(())
}

fn tokenizer(args: &TokenizeArgs) -> Result<Tokenizer> {
    match (&args.tokenizer, &args.model) {
        (Some(file), _) => Tokenizer::from_file(file),
        (None, Some(model)) => {
            let model = args::model_dir(model)?;
            // A directory that holds nothing but a tokenizer is enough here.
            let has_config = !model.is_dir() || model.join(CONFIG).symlink_metadata().is_ok();
            let vocab_size = if has_config { Some(ModelConfig::load(&model)?.vocab_size) } else { None };
            Tokenizer::from_dir(&model, vocab_size)
        }
        (None, None) => Err(Error::usage("no tokenizer: give -m or --tokenizer")),
    }
}

fn source(args: &TokenizeArgs) -> Source {
    args.file.as_deref().map_or(Source::Stdin, Source::named)
}

/// The input and what messages call it.
fn input(args: &TokenizeArgs, progress: &dyn Progress, interrupt: &Interrupt) -> Result<(String, String)> {
    if let Some(text) = &args.text {
        return Ok((normalize_input(text.as_bytes().to_vec(), "TEXT")?, "TEXT".to_owned()));
    }
    let source = source(args);
    Ok((source.text(progress, interrupt)?, source.name()))
}

fn joined(ids: &[u32], separator: &str) -> String {
    let mut text = String::with_capacity(ids.len() * 7);
    for id in ids {
        if !text.is_empty() {
            text += separator;
        }
        text += &id.to_string();
    }
    text
}

fn json_array(ids: &[u32]) -> String {
    format!("[{}]", joined(ids, ","))
}
