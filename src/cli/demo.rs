//! `deltafin demo`: the ordinary `run`, with the embedded model and prompts that it was trained for.

use std::ffi::OsString;
use std::path::Path;

use clap::Parser;

use super::args::{EngineArgs, Shown};
use super::{output, run};
use crate::demo;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::trunk::TrunkFormat;

/// Flags of `demo`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  deltafin demo
  deltafin demo -p 'There once was a' --temperature 0.8 --seed 7
  deltafin demo --chat -p 'Write a story about a dinosaur.'
  deltafin demo --list

The model has 12 million parameters and the structure of Kimi K3. It is unpacked once to \
$XDG_CACHE_HOME/deltafin (~/.cache/deltafin, on macOS ~/Library/Caches/deltafin). The story \
goes to standard output, its beginning and everything else to standard error. \
`deltafin run -m demo` takes all flags of `run` with the same model.")]
pub struct DemoArgs {
    /// Beginning of the story, or with --chat what to ask
    ///
    /// [default: the first one that --list prints]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Print prompts to try, and end
    #[arg(long)]
    list: bool,
    /// Ask instead of letting it go on
    #[arg(long)]
    chat: bool,
    /// Most tokens of the answer; 0 only computes the prompt
    #[arg(short = 'n', long = "max-tokens", value_name = "N", allow_negative_numbers = true, default_value = "256")]
    max_tokens: usize,
    /// 0 takes the likeliest token, more takes more chances
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<String>,
    /// Same seed, same text
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<String>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// `run`'s flags as a command of their own.
#[derive(Debug, Parser)]
#[command(name = "deltafin demo", disable_help_flag = true)]
struct Ordinary {
    #[command(flatten)]
    run: run::RunArgs,
}

pub(super) fn run(args: &DemoArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    if args.list {
        return list();
    }
    let note = |text: &str| {
        if !shown.quiet {
            output::stderr(format_args!("note: {text}"));
        }
    };
    let model = demo::unpack_noting(note)?;
    let prompt = args.prompt();
    let mut ordinary = Ordinary::try_parse_from(args.as_run(&model, prompt)).map_err(usage)?;
    ordinary.run.leaves_stdin = true;
    let (dim, plain) = if shown.colour() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    ordinary.run.echo = (!shown.quiet).then(|| format!("{dim}{prompt}{plain}"));
    run::run(&ordinary.run, shown, interrupt)
}

fn list() -> Result<()> {
    let mut text = String::from("To go on with:\n");
    let mut add = |prompt: &str| text.push_str(&format!("  {prompt}\n"));
    demo::STORIES.into_iter().for_each(&mut add);
    text.push_str("To ask, with --chat:\n");
    let mut add = |prompt: &str| text.push_str(&format!("  {prompt}\n"));
    demo::QUESTIONS.into_iter().for_each(&mut add);
    output::stdout(text.as_bytes()).map(|_| ())
}

/// What `run`'s own parser refuses, in one line.
fn usage(error: clap::Error) -> Error {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    Error::usage(line.strip_prefix("error: ").unwrap_or(line)).hint("see `deltafin demo --help`")
}

impl DemoArgs {
    fn prompt(&self) -> &str {
        let default = if self.chat { demo::QUESTIONS[0] } else { demo::STORIES[0] };
        self.prompt.as_deref().unwrap_or(default)
    }

    /// The command line of `run` that means the same. The model goes by its path: `demo` could be a directory here.
    fn as_run(&self, model: &Path, prompt: &str) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec!["deltafin demo".into(), "--model".into(), model.into()];
        line.push(format!("--prompt={prompt}").into());
        line.push(format!("--max-tokens={}", self.max_tokens).into());
        if self.chat {
            // The model was trained on answers alone.
            line.extend(["--chat".into(), "--no-thinking".into()]);
        }
        let mut add = |flag: &str, value: Option<String>| {
            line.extend(value.map(|value| OsString::from(format!("--{flag}={value}"))));
        };
        add("temperature", self.temperature.clone());
        add("seed", self.seed.clone());
        let engine = &self.engine;
        add("memory", engine.memory.map(|bytes| bytes.to_string()));
        add("expert-memory", engine.expert_memory.map(|bytes| bytes.to_string()));
        add("threads", engine.threads.map(|count| count.to_string()));
        add("isa", engine.isa.map(|isa| isa.to_string()));
        add("step", engine.step.map(|rows| rows.to_string()));
        add("context", engine.context.map(|tokens| tokens.to_string()));
        add("trunk", engine.trunk.map(|form| TrunkFormat::from(form).name().to_owned()));
        line.extend(engine.experts.iter().flat_map(|root| ["--experts".into(), root.into()]));
        if engine.no_direct {
            line.push("--no-direct".into());
        }
        if engine.no_learn {
            line.push("--no-learn".into());
        }
        if engine.no_lookahead {
            line.push("--no-lookahead".into());
        }
        if engine.verify_reads {
            line.push("--verify-reads".into());
        }
        line
    }
}
