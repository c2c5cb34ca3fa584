//! Flags of `run`.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::cli::args::EngineArgs;
use crate::cli::prompt::IdArgs;
use crate::error::{Error, Result};
use crate::generate::{Sampler, Sampling};
use crate::text::chat::{ChatOptions, Effort};

const EXAMPLES: &str = "\
The prompt is -p, then the files in the order given (`-` is standard input), then standard input when it is a pipe or \
a file. Empty parts do not count, the others are joined by a blank line, and nothing is trimmed. Input is UTF-8; a byte \
order mark at its start is dropped, line ends stay as they are.

Standard input is waited for without end when it is named as `-` or is all the prompt there is. Otherwise a pipe that \
stays open and gives nothing for 5 seconds is left out, which is said on standard error.

Without --chat the model continues the prompt. It stops at an end token, which is not shown, at a --stop string, or \
after -n tokens. Control tokens are never shown; bytes that are no UTF-8 appear as U+FFFD. A line end is added to the \
answer on a terminal only.

Examples:
  deltafin run -m demo -p \"Once upon a time\"
  cat report.txt | deltafin run -m K3 --chat -p \"Summarise:\"
  deltafin run -m K3 --chat --system \"Be brief.\" question.md
  deltafin run -m K3 -p \"The\" --temperature 0.8 --top-p 0.95 --seed 7
  deltafin run -m K3 --ids 1,2,3 -n 48 --ignore-eos --output ids

Exit codes: 0 done, 1 other failure, 2 usage, 3 model refused, 4 I/O failed, 5 does not fit in memory, 6 numerical \
failure, 130 interrupted, 143 terminated.";

/// Flags of `run`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct RunArgs {
    /// Model directory, or `demo` for the embedded small model
    #[arg(short, long, value_name = "DIR")]
    pub(in crate::cli) model: PathBuf,
    /// Files of the prompt; `-` is standard input
    #[arg(value_name = "FILES", conflicts_with_all = ["ids", "ids_file"])]
    pub(in crate::cli) files: Vec<PathBuf>,
    /// Text of the prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Prompt",
          conflicts_with_all = ["ids", "ids_file"])]
    pub(in crate::cli) prompt: Option<String>,
    #[command(flatten)]
    pub(in crate::cli) ids: IdArgs,
    /// Let spellings of control tokens in the prompt become control tokens
    #[arg(long, help_heading = "Prompt", conflicts_with_all = ["chat", "ids", "ids_file"])]
    pub(in crate::cli) special: bool,
    #[command(flatten)]
    pub(in crate::cli) chat: ChatArgs,
    /// Most new tokens; 0 only computes the prompt [default: 512, or what the context leaves]
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, help_heading = "Answer")]
    pub(in crate::cli) max_tokens: Option<usize>,
    /// End the answer before this text; may be given more than once
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Answer")]
    pub(in crate::cli) stop: Vec<String>,
    /// Do not stop at end tokens
    #[arg(long, help_heading = "Answer")]
    pub(in crate::cli) ignore_eos: bool,
    /// What stdout gets
    #[arg(long, value_name = "FORM", default_value = "text", help_heading = "Answer")]
    pub(in crate::cli) output: OutputForm,
    #[command(flatten)]
    pub(in crate::cli) sampling: SamplingArgs,
    #[command(flatten)]
    pub(in crate::cli) engine: EngineArgs,
    /// Stdin is no part of the prompt, unless named; for commands that are `run` with a prompt of their own.
    #[arg(skip)]
    pub(in crate::cli) leaves_stdin: bool,
    /// Text to show on stderr before the answer; for the same commands.
    #[arg(skip)]
    pub(in crate::cli) echo: Option<String>,
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum OutputForm {
    /// The answer, as it is generated
    Text,
    /// One object at the end: answer, ids, reason, timings, reads, memory
    Json,
    /// The new token ids, as they are generated, separated by spaces
    Ids,
}

impl OutputForm {
    /// Whether the form shows text.
    pub(in crate::cli) fn needs_text(self) -> bool {
        self != Self::Ids
    }
}

/// Flags of a chat.
#[derive(Debug, Clone, Default, clap::Args)]
pub(in crate::cli) struct ChatArgs {
    /// The prompt is a message that the model answers
    #[arg(long, help_heading = "Chat", conflicts_with_all = ["ids", "ids_file"])]
    pub(in crate::cli) chat: bool,
    /// What the system says first
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, requires = "chat", help_heading = "Chat")]
    pub(in crate::cli) system: Option<String>,
    /// How much to think [default: max]
    #[arg(long, value_name = "LEVEL", requires = "chat", conflicts_with = "no_thinking", help_heading = "Chat")]
    pub(in crate::cli) effort: Option<EffortLevel>,
    /// Answer without thinking
    #[arg(long, requires = "chat", help_heading = "Chat")]
    pub(in crate::cli) no_thinking: bool,
    /// What becomes of the reasoning in text output: shown on stderr or hidden [default: show, with -q hide]
    #[arg(long, value_name = "WHAT", requires = "chat", conflicts_with = "no_thinking", help_heading = "Chat")]
    pub(in crate::cli) thinking: Option<Thinking>,
}

/// `--thinking`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Thinking {
    /// On stderr
    Show,
    /// Nowhere
    Hide,
}

/// `--effort`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum EffortLevel {
    /// Little
    Low,
    /// Much
    High,
    /// The most
    Max,
    /// Say nothing about it
    None,
}

impl ChatArgs {
    /// How the conversation is rendered.
    pub(in crate::cli) fn options(&self) -> ChatOptions {
        let thinking_effort = match self.effort {
            None | Some(EffortLevel::Max) => Some(Effort::Max),
            Some(EffortLevel::Low) => Some(Effort::Low),
            Some(EffortLevel::High) => Some(Effort::High),
            Some(EffortLevel::None) => None,
        };
        ChatOptions { thinking: !self.no_thinking, thinking_effort, ..ChatOptions::default() }
    }
}

/// How tokens are chosen.
#[derive(Debug, Clone, Default, clap::Args)]
pub(in crate::cli) struct SamplingArgs {
    /// Randomness of the choice; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, help_heading = "Sampling")]
    pub(in crate::cli) temperature: f32,
    /// Choose among the K most likely tokens; 0: all
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    pub(in crate::cli) top_k: Option<usize>,
    /// Choose among the most likely tokens that together have this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub(in crate::cli) top_p: Option<f32>,
    /// Choose among the tokens that have this share of the most likely one's probability
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub(in crate::cli) min_p: Option<f32>,
    /// Same seed, same text [default: 0]
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    pub(in crate::cli) seed: Option<u64>,
}

impl SamplingArgs {
    /// The sampler that the flags ask for.
    ///
    /// # Errors
    /// Kind `Usage` for values outside their ranges, and for flags that would be without effect.
    pub(in crate::cli) fn sampler(&self) -> Result<Sampler> {
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        if self.temperature == 0.0
            && let Some((flag, _)) = given.iter().find(|(_, given)| *given)
        {
            return Err(Error::usage(format!("{flag} has no effect at --temperature 0, the default"))
                .hint("give a temperature above 0, e.g. --temperature 0.8, or leave the flag out"));
        }
        let all = Sampling::default();
        Sampler::new(&Sampling {
            temperature: self.temperature,
            top_k: self.top_k.unwrap_or(all.top_k),
            top_p: self.top_p.unwrap_or(all.top_p),
            min_p: self.min_p.unwrap_or(all.min_p),
            seed: self.seed.unwrap_or(all.seed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampling_flag_without_effect_is_refused_by_name() {
        assert!(SamplingArgs::default().sampler().is_ok());
        let error = SamplingArgs { top_p: Some(0.9), ..SamplingArgs::default() }.sampler().err().expect("refused");
        assert!(error.message().contains("--top-p"), "{error}");
        let error = SamplingArgs { seed: Some(1), ..SamplingArgs::default() }.sampler().err().expect("refused");
        assert!(error.message().contains("--seed"), "{error}");
        let warm = SamplingArgs { temperature: 0.8, top_p: Some(0.9), seed: Some(1), ..SamplingArgs::default() };
        assert!(warm.sampler().is_ok());
    }
}
