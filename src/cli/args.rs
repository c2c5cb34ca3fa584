//! Flags that several commands share, and the values that need more than clap's own parsers.

use std::env;
use std::ffi::OsStr;
use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, ValueEnum};

use crate::demo;
use crate::engine::EngineOptions;
use crate::error::Result;
use crate::kernels::Isa;
use crate::store::packed::listed_roots;
use crate::trunk::TrunkFormat;

/// How much is said on stderr, and how.
#[derive(Debug, Clone, Args)]
pub struct Shown {
    /// Only errors on stderr, and what keeps the run waiting
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// More on stderr: the memory plan, the mode of each drive, statistics
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Colour on stderr
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

impl Shown {
    /// Whether stderr is written in colour.
    pub fn colour(&self) -> bool {
        match self.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                let no_color = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                stderr().is_terminal() && !no_color && env::var_os("TERM").as_deref() != Some(OsStr::new("dumb"))
            }
        }
    }
}

/// `--color`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set or TERM is dumb
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Where the model is and what it may use.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Memory this run may use, e.g. 96GiB [default: what is free, less a reserve]
    ///
    /// More than the machine or its control group has is refused; more than is free now is used if the plan needs it,
    /// with a note.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Memory for the expert cache, e.g. 40GiB [default: what the rest leaves]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub expert_memory: Option<u64>,
    /// Threads that compute [default: one a processor this process may use]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Instruction set [default: the fastest this processor has]
    #[arg(long, value_name = "NAME")]
    pub isa: Option<Isa>,
    /// Most rows (tokens) of one step [default: the whole prompt, up to 4096]
    ///
    /// Fewer by default where the buffers of a step would take more than a quarter of what trunk and states leave.
    #[arg(long, value_name = "ROWS", value_parser = positive)]
    pub step: Option<usize>,
    /// Tokens to make room for, prompt and answer together [default: what the prompt and -n need]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub context: Option<usize>,
    /// Read through the page cache
    #[arg(long)]
    pub no_direct: bool,
    /// Directories on other drives that `deltafin pack` wrote experts to [default: those in DIR/experts.toml]
    ///
    /// The file, beside the model's config.json, has one line: roots = ["/mnt/a/k3", "/mnt/b/k3"].
    #[arg(long, value_name = "ROOT", num_args = 1..)]
    pub experts: Vec<PathBuf>,
    /// Neither use nor keep the record of which experts this model uses most
    ///
    /// The record is one small file a model, `uses-…` in $XDG_CACHE_HOME/deltafin (~/.cache/deltafin, on macOS
    /// ~/Library/Caches/deltafin). It holds counts and nothing of any text, and never leaves this computer. Removing it
    /// does no harm.
    #[arg(long)]
    pub no_learn: bool,
    /// Do not read experts before the router has asked for them
    #[arg(long)]
    pub no_lookahead: bool,
    /// Compare every expert read from a --experts root with its checksum
    #[arg(long)]
    pub verify_reads: bool,
    /// How the trunk is held in memory [default: bf16]
    ///
    /// Converted while it is loaded, or read from the file of that form that `deltafin pack --trunk` wrote to one of the
    /// --experts roots.
    #[arg(long, value_name = "FORM")]
    pub trunk: Option<TrunkArg>,
}

/// `--trunk`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TrunkArg {
    /// As released
    Bf16,
    /// Lossless, three quarters of the bytes
    Bf12,
    /// Quantized, about half of the bytes
    Int8,
}

impl From<TrunkArg> for TrunkFormat {
    fn from(format: TrunkArg) -> Self {
        match format {
            TrunkArg::Bf16 => TrunkFormat::Bf16,
            TrunkArg::Bf12 => TrunkFormat::Bf12,
            TrunkArg::Int8 => TrunkFormat::Int8,
        }
    }
}

impl EngineArgs {
    /// The engine's options for the model in `model`, with room for `context` tokens; `prompt`: tokens of the prompt, where
    /// known.
    ///
    /// # Errors
    /// As [`roots`].
    pub fn options(&self, model: PathBuf, context: usize, prompt: Option<usize>) -> Result<EngineOptions> {
        Ok(EngineOptions {
            experts: roots(&self.experts, &model)?,
            model,
            memory: self.memory,
            expert_memory: self.expert_memory,
            threads: self.threads,
            isa: self.isa,
            step: self.step,
            prompt,
            context,
            direct: !self.no_direct,
            learn: !self.no_learn,
            lookahead: !self.no_lookahead,
            verify_reads: self.verify_reads,
            trunk: self.trunk.map(TrunkFormat::from),
        })
    }
}

/// The drive roots to read from: those `given` with `--experts`, or those that the directory of `model` lists.
///
/// # Errors
/// Kind `Model` for a list that is no good.
pub fn roots(given: &[PathBuf], model: &Path) -> Result<Vec<PathBuf>> {
    if given.is_empty() { listed_roots(model) } else { Ok(given.to_vec()) }
}

/// A size in bytes: a whole or decimal number with an optional unit (B, K, M, G, T: powers of 1000 with a B or none;
/// KiB, MiB, GiB, TiB: powers of 1024), any case. Fractions of a byte are dropped.
///
/// # Errors
/// Says what is legal; nothing is clamped.
pub fn size(text: &str) -> Result<u64, String> {
    const LEGAL: &str = "expected a size such as 96GiB, 1.5T or 512MiB";
    let text = text.trim();
    let unit_start = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..unit_start], text[unit_start..].trim_start());
    let unit_bytes = unit_bytes(unit).ok_or(LEGAL)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return Err(LEGAL.into());
    }
    let too_large = || format!("too large: {LEGAL}");
    // Digits beyond the twelfth are below a byte in every unit.
    let fraction = &fraction[..fraction.len().min(12)];
    let scale = 10u128.pow(fraction.len() as u32);
    let fraction: u128 = fraction.parse().map_err(|_| LEGAL)?;
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let bytes = (u128::from(whole) * scale + fraction) * u128::from(unit_bytes) / scale;
    match u64::try_from(bytes) {
        Ok(0) => Err(format!("must be more than 0: {LEGAL}")),
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(too_large()),
    }
}

fn unit_bytes(unit: &str) -> Option<u64> {
    Some(match unit.to_ascii_lowercase().as_str() {
        "" | "b" | "bytes" => 1,
        "k" | "kb" => 1_000,
        "m" | "mb" => 1_000_000,
        "g" | "gb" => 1_000_000_000,
        "t" | "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return None,
    })
}

/// A whole number from 1 up.
///
/// # Errors
/// Says what is legal.
pub fn positive(text: &str) -> Result<usize, String> {
    const LEGAL: &str = "expected a whole number from 1 up";
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(LEGAL.into());
    }
    match text.parse() {
        Ok(0) => Err(LEGAL.into()),
        Ok(number) => Ok(number),
        Err(_) => Err(format!("too large: {LEGAL}")),
    }
}

/// Token ids separated by commas, spaces or line ends; none in blank text.
///
/// # Errors
/// Names the entry's number and what it was; nothing is skipped or rounded.
pub fn ids(text: &str) -> Result<Vec<u32>, String> {
    let mut ids = Vec::new();
    if text.trim().is_empty() {
        return Ok(ids);
    }
    for between_commas in text.split(',') {
        let mut words = between_commas.split_whitespace().peekable();
        if words.peek().is_none() {
            return Err(format!("entry {} is empty: expected a token id", ids.len() + 1));
        }
        for word in words {
            ids.push(id(word).map_err(|what| format!("entry {} is {}: {what}", ids.len() + 1, quoted(word)))?);
        }
    }
    Ok(ids)
}

fn id(word: &str) -> Result<u32, &'static str> {
    if !word.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("expected a token id, a whole number from 0 up");
    }
    word.parse().map_err(|_| "too large for a token id")
}

/// `word` for a message: short, and without control characters.
fn quoted(word: &str) -> String {
    const CHARS_MAX: usize = 40;
    let mut shown: String = word.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if word.chars().nth(CHARS_MAX).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}

/// `-m`: the directory, or the unpacked embedded model for `demo` when no such directory is there.
///
/// # Errors
/// As unpacking reports.
pub fn model_dir(model: &Path) -> Result<PathBuf> {
    if model == Path::new("demo") && !model.is_dir() { demo::unpack() } else { Ok(model.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_decimal_and_binary_units() {
        for (text, bytes) in [
            ("123", 123),
            ("123B", 123),
            ("123 bytes", 123),
            ("40G", 40_000_000_000),
            ("40gb", 40_000_000_000),
            ("96GiB", 96 << 30),
            ("96 gib", 96 << 30),
            ("1.5T", 1_500_000_000_000),
            ("0.5KiB", 512),
            ("512MiB", 512 << 20),
            ("1.0000000000000000000000000000001K", 1000),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        for text in [
            "",
            " ",
            "0",
            "0GiB",
            "0.0001B",
            "-1",
            "+1",
            "1e9",
            "1,5G",
            "1.G",
            ".5G",
            "1..5G",
            "GiB",
            "12PiB",
            "12 monkeys",
            "nan",
            "inf",
            "0x10",
            "1G1",
            "١G",
            "18446744073709551616",
            "99999999999T",
            "99999999999999999999999999999999999999999999",
        ] {
            let error = size(text).expect_err(text);
            assert!(error.contains("expected a size such as 96GiB"), "{text}: {error}");
        }
    }

    #[test]
    fn positive_numbers_are_digits_only() {
        assert_eq!(positive("7"), Ok(7));
        for text in ["", "0", "-1", "+1", "1.0", "1e3", " 1", "abc", "99999999999999999999999"] {
            assert!(positive(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ids_are_separated_by_commas_spaces_and_line_ends() {
        assert_eq!(ids("1,2,3"), Ok(vec![1, 2, 3]));
        assert_eq!(ids(" 1, 2\n3\r\n 4\t5 \n"), Ok(vec![1, 2, 3, 4, 5]));
        assert_eq!(ids("4294967295"), Ok(vec![u32::MAX]));
        assert_eq!(ids(" \n"), Ok(vec![]));
    }

    #[test]
    fn a_wrong_id_is_named_by_its_entry() {
        for (text, start) in [
            ("1,abc,3", "entry 2 is `abc`"),
            ("1,,3", "entry 2 is empty"),
            ("1,2,", "entry 3 is empty"),
            (",1", "entry 1 is empty"),
            ("1 2 -3", "entry 3 is `-3`"),
            ("+1", "entry 1 is `+1`"),
            ("1.0", "entry 1 is `1.0`"),
            ("[1", "entry 1 is `[1`"),
            ("7 4294967296", "entry 2 is `4294967296`: too large"),
            ("1;2", "entry 1 is `1;2`"),
        ] {
            let error = ids(text).expect_err(text);
            assert!(error.starts_with(start), "{text}: {error}");
        }
    }

    #[test]
    fn a_long_wrong_entry_is_cut_in_the_message() {
        let error = ids(&"x".repeat(10_000)).expect_err("junk");
        assert!(error.len() < 200, "{}", error.len());
    }
}
