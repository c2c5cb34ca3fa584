//! `deltafin bench`: how fast a model is here, what it reads, and what the machine could do.

mod lines;
mod table;
mod watch;

use std::path::{Path, PathBuf};

use clap::ValueEnum;

use super::args::{self, Shown};
use super::prompt::Source;
use super::show_plan;
use crate::bench::{self, Bench, Options, State, Test};
use crate::config::ModelConfig;
use crate::engine::{EngineOptions, Progress};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::kernels::Isa;
use crate::report::progress::Reporter;
use crate::report::whole_file::WholeFile;
use crate::text::{Specials, Tokenizer};
use crate::trunk::TrunkFormat;

use table::Printer;
use watch::Screen;

const HELP: &str = "\
Tests, at each depth of -d:
  ppN    a prompt of N tokens (-p): N by the time until the logits after its
         last token
  tgN    N tokens generated (-n): those after the first by the time from the
         first to the last; null for fewer than two
  pgP+N  a prompt and an answer to it: P+N tokens by the whole time
Tokens are random (--seed) or those of --text, and others in each repetition. What is fed does \
not depend on what the model answers. Not measured: loading, filling the context, emptying the \
cache.

State: warm, the default, runs each test once before it counts (64 generated tokens at most), \
so that the expert cache holds what it would hold after a while. --cold empties the expert \
cache and drops the model's files from the page cache before every repetition.

Columns of --output json, jsonl and csv; what has no value is null, and never NaN:
  tokens_per_s          mean, sd, min, max of the repetitions; sd is null for
                        one
  first_token_s         until the first token is chosen, mean
  bytes_read            asked of the drives for experts in a repetition, mean;
                        with what whole pages need beside the experts
  expert_bytes_needed   of the experts that each step needs, each once in a
                        step, mean
  amplification         bytes of the experts that were read, by
                        expert_bytes_needed: 1.00 is each once; more, read again
                        or in vain; less, found in memory
  bytes_per_token       bytes_read by tokens
  hit_rate              of the experts asked for, the share in memory or on its
                        way
  wait_share            of the time, the share that the model waited for reads
  disk_gb_per_s         bytes_read by the whole time, in 10^9 bytes
  disk_busy_share       of the time, the share with a read in flight
  seconds               of a repetition: mean, sd, min, max
  peak_memory_bytes     largest resident set since loading began
  planned_memory_bytes  sum of the memory plan
  commit                the program's; commit_modified: whether its source had
                        other changes
  kernel_read_bytes,    what the kernel counted meanwhile for this process
  kernel_rchar          (/proc/self/io)
With --limits, measured in the same run, else null:
  disk_limit_gb_per_s   random reads of whole experts, at the best of five queue
                        depths; disk_share is disk_gb_per_s by it
  memory_limit_gb_per_s reading memory with all threads; memory_share is what a
                        generated token takes from memory (trunk, experts,
                        states) by its time and by this
  fma_limit_gflops      multiply-adds from registers with all threads, two
                        operations each; fma_share is what a prompt takes by its
                        time and by this

Interrupted, it prints the tests that are done. The record of which experts are used most is \
neither used nor kept.

Examples:
  deltafin bench -m demo
  deltafin bench -m K3 -p 512 -n 64 -r 3 --cold --limits
  deltafin bench -m K3 -p 0 -n 32 -d 0,4096,32768 --plot context.svg
  deltafin bench -m K3 -p 512 -n 0 --threads 8,16 --step 64,512 --output csv";

/// Flags of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = HELP)]
pub struct BenchArgs {
    /// Model directory, or `demo` for the embedded small model
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    /// Prompts, in tokens; 0: none
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = count, default_value = "512")]
    prompt: Vec<usize>,
    /// Answers, in tokens; 0: none
    #[arg(short = 'n', long, value_name = "LIST", value_delimiter = ',', value_parser = count, default_value = "128")]
    generate: Vec<usize>,
    /// Tokens of context before each test
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = count, default_value = "0")]
    depth: Vec<usize>,
    /// Times that each test is measured
    #[arg(short, long, value_name = "N", value_parser = args::positive, default_value = "3")]
    repetitions: usize,
    /// Kinds of tests
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "pp,tg,pg")]
    tests: Vec<TestKind>,
    /// Take the tokens from this text, over and over
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Decides the random tokens
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "text")]
    seed: u64,
    /// Begin every repetition with an empty expert cache and page cache
    #[arg(long)]
    cold: bool,
    /// Measure what memory, processor and drives can do, and the share that was reached
    #[arg(long)]
    limits: bool,
    /// Form of the rows
    #[arg(long, value_name = "FORM", default_value = "table", help_heading = "Result")]
    output: Form,
    /// Draw speed over depth, and the drives over time
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    plot: Option<PathBuf>,
    /// Thread counts [default: one a processor this process may use]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = args::positive, help_heading = "Engine")]
    threads: Vec<usize>,
    /// Most rows (tokens) of one step [default: the whole prompt, up to 4096]
    ///
    /// Fewer by default where the buffers of a step would take more than a quarter of what trunk and states leave.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = args::positive, help_heading = "Engine")]
    step: Vec<usize>,
    /// Memory this run may use, e.g. 96GiB [default: what is free, less a reserve]
    #[arg(long, value_name = "SIZE", value_parser = args::size, help_heading = "Engine")]
    memory: Option<u64>,
    /// Memory for the expert cache, e.g. 40GiB [default: what the rest leaves]
    #[arg(long, value_name = "SIZE", value_parser = args::size, help_heading = "Engine")]
    expert_memory: Option<u64>,
    /// Instruction set [default: the fastest this processor has]
    #[arg(long, value_name = "NAME", help_heading = "Engine")]
    isa: Option<Isa>,
    /// Read through the page cache
    #[arg(long, help_heading = "Engine")]
    no_direct: bool,
    /// Directories on other drives that `deltafin pack` wrote experts to [default: those in DIR/experts.toml]
    #[arg(long, value_name = "ROOT", num_args = 1.., help_heading = "Engine")]
    experts: Vec<PathBuf>,
    /// Do not read experts before the router has asked for them
    #[arg(long, help_heading = "Engine")]
    no_lookahead: bool,
    /// Compare every expert read from a --experts root with its checksum
    #[arg(long, help_heading = "Engine")]
    verify_reads: bool,
    /// How the trunk is held in memory [default: bf16]
    #[arg(long, value_name = "FORM", help_heading = "Engine")]
    trunk: Option<args::TrunkArg>,
}

/// `--tests`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TestKind {
    /// A prompt
    Pp,
    /// An answer
    Tg,
    /// Both
    Pg,
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// A table for people, in Markdown
    Table,
    /// One array of objects
    Json,
    /// An object a line
    Jsonl,
    /// Comma-separated values with a header
    Csv,
}

pub(super) fn run(args: &BenchArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let tests = tests(args)?;
    let plot = args.plot.as_deref().map(WholeFile::new).transpose()?;
    let reporter = Reporter::new(shown);
    let model = args::model_dir(&args.model)?;
    let options = Options {
        text: args.text.as_deref().map(|text| ids(text, &model, &reporter, interrupt)).transpose()?,
        engine: engine_options(args, model)?,
        threads: args.threads.clone(),
        steps: args.step.clone(),
        depths: args.depth.clone(),
        tests,
        repetitions: args.repetitions,
        state: if args.cold { State::Cold } else { State::Warm },
        limits: args.limits,
        seed: args.seed,
        timeline: plot.is_some(),
    };
    let mut bench = Bench::new(options)?;
    show_plan(&bench.engine_options()?, shown)?;
    let mut screen = Screen::new(shown, &reporter, Printer::new(args.output, args.limits));
    let measured = bench.run(&mut screen, interrupt);
    let (printer, rows) = screen.finish();
    // Rows that are done are worth printing, whatever ended the run.
    let interrupted = matches!(&measured, Err(error) if matches!(error.kind(), Kind::Interrupted(_)));
    let printed = if measured.is_ok() || interrupted || !rows.is_empty() { printer.finish() } else { Ok(()) };
    if let Some(plot) = &plot {
        plot.write(bench::svg(&rows, &bench.drives()).as_bytes())?;
    }
    rows.iter().filter(|row| row.is_noisy()).for_each(|row| {
        reporter.notice(&format!(
            "{} at depth {}: the repetitions differ by more than a tenth; is the machine busy?",
            row.test, row.depth
        ));
    });
    measured.and(printed)
}

/// A whole number from 0 up.
fn count(text: &str) -> Result<usize, String> {
    const LEGAL: &str = "expected a whole number from 0 up";
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(LEGAL.into());
    }
    text.parse().map_err(|_| format!("too large: {LEGAL}"))
}

/// Every prompt, every answer, and every pair.
fn tests(args: &BenchArgs) -> Result<Vec<Test>> {
    let some = |list: &[usize]| list.iter().copied().filter(|tokens| *tokens > 0).collect::<Vec<_>>();
    let (prompts, answers) = (some(&args.prompt), some(&args.generate));
    let wanted = |kind| args.tests.contains(&kind);
    let mut tests = Vec::new();
    if wanted(TestKind::Pp) {
        tests.extend(prompts.iter().copied().map(Test::Prompt));
    }
    if wanted(TestKind::Tg) {
        tests.extend(answers.iter().copied().map(Test::Generate));
    }
    if wanted(TestKind::Pg) {
        tests.extend(prompts.iter().flat_map(|&prompt| answers.iter().map(move |&answer| Test::Both(prompt, answer))));
    }
    if tests.is_empty() {
        return Err(Error::usage("nothing to measure: -p and -n leave no test of --tests any tokens")
            .hint("give -p a prompt's length, -n an answer's, e.g. -p 512 -n 128"));
    }
    Ok(tests)
}

fn engine_options(args: &BenchArgs, model: PathBuf) -> Result<EngineOptions> {
    Ok(EngineOptions {
        memory: args.memory,
        expert_memory: args.expert_memory,
        isa: args.isa,
        direct: !args.no_direct,
        experts: args::roots(&args.experts, &model)?,
        lookahead: !args.no_lookahead,
        verify_reads: args.verify_reads,
        trunk: args.trunk.map(TrunkFormat::from),
        ..EngineOptions::new(model, 1)
    })
}

/// The tokens of the text in `file`.
fn ids(file: &Path, model: &Path, progress: &dyn Progress, interrupt: &Interrupt) -> Result<Vec<u32>> {
    let name = file.display();
    let text = Source::File(file.to_owned()).text(progress, interrupt)?;
    let vocab_size = ModelConfig::load(model)?.vocab_size;
    let ids = Tokenizer::from_dir(model, Some(vocab_size))?.encode(&text, Specials::Ordinary);
    if ids.is_empty() {
        return Err(Error::usage(format!("--text {name}: the text is empty")));
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::*;

    fn parsed(words: &[&str]) -> Result<BenchArgs, clap::Error> {
        let words = ["bench", "-m", "x"].iter().chain(words);
        let matches = BenchArgs::augment_args(Command::new("bench")).try_get_matches_from(words)?;
        BenchArgs::from_arg_matches(&matches)
    }

    fn names(words: &[&str]) -> Vec<String> {
        tests(&parsed(words).unwrap()).unwrap().iter().map(Test::to_string).collect()
    }

    #[test]
    fn prompts_and_answers_make_tests_alone_and_together() {
        assert_eq!(names(&[]), ["pp512", "tg128", "pg512+128"]);
        assert_eq!(names(&["-p", "8,16", "-n", "4"]), ["pp8", "pp16", "tg4", "pg8+4", "pg16+4"]);
        assert_eq!(names(&["-p", "0", "-n", "4"]), ["tg4"]);
        assert_eq!(names(&["-p", "0,8", "-n", "0"]), ["pp8"]);
        assert_eq!(names(&["--tests", "pg,pp"]), ["pp512", "pg512+128"]);
    }

    #[test]
    fn nothing_to_measure_is_refused() {
        for words in [&["-p", "0", "-n", "0"][..], &["-p", "0", "--tests", "pp"], &["-n", "0", "--tests", "tg,pg"]] {
            let error = tests(&parsed(words).unwrap()).unwrap_err();
            assert_eq!(error.kind(), Kind::Usage, "{words:?}");
        }
    }

    #[test]
    fn what_is_no_list_of_numbers_is_refused() {
        for words in [
            ["-p", ""],
            ["-p", "1,,2"],
            ["-p", "512,"],
            ["-n", "-1"],
            ["-n", "1e3"],
            ["-d", "4k"],
            ["-d", "99999999999999999999999"],
            ["-r", "0"],
            ["--threads", "0"],
            ["--step", "64,0"],
            ["--tests", "pp,xx"],
            ["--output", "xml"],
        ] {
            assert!(parsed(&words).is_err(), "{words:?}");
        }
    }
}
