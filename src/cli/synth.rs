//! `deltafin synth`: a synthetic checkpoint of chosen shape, to measure a machine with before the 1.5 TB are there.

use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use super::args::Shown;
use super::output;
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::synth::{self, Content, Made, Preset, Recipe, Shape};

/// Flags of `synth`.
#[derive(Debug, clap::Args)]
pub struct SynthArgs {
    /// Directory to make; must be empty, absent, or of the same synthetic model
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Shape to begin with
    #[arg(long, value_name = "NAME", default_value = "tiny")]
    pub preset: PresetArg,
    /// Decides every value
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// All experts are used alike, instead of the skew of real routing
    #[arg(long)]
    pub uniform: bool,
    /// Headers only, values are zeros that take no space [default for k3]
    #[arg(long, conflicts_with = "filled")]
    pub sparse: bool,
    /// Random values [default for all but k3]
    #[arg(long)]
    pub filled: bool,
    /// Threads that make values [default: one a processor this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Sizes that differ from the preset's
    #[command(flatten)]
    pub sizes: Sizes,
}

/// One flag a size.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Sizes, instead of the preset's")]
pub struct Sizes {
    /// Layers
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// First layers with a dense MLP instead of experts
    #[arg(long, value_name = "N")]
    pub dense_layers: Option<usize>,
    /// Every N-th layer, and the last, is MLA; the others are KDA
    #[arg(long, value_name = "N")]
    pub mla_every: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    pub hidden: Option<usize>,
    /// Attention heads
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,
    /// Width of a KDA head
    #[arg(long, value_name = "N")]
    pub head_dim: Option<usize>,
    /// Low rank of MLA's queries; 0: none
    #[arg(long, value_name = "N")]
    pub q_lora: Option<usize>,
    /// Width of MLA's cached latent
    #[arg(long, value_name = "N")]
    pub kv_lora: Option<usize>,
    /// Width of a head's own keys in MLA
    #[arg(long, value_name = "N")]
    pub nope: Option<usize>,
    /// Width of the keys that MLA's heads share
    #[arg(long, value_name = "N")]
    pub rope: Option<usize>,
    /// Width of a head's values in MLA
    #[arg(long, value_name = "N")]
    pub v_head: Option<usize>,
    /// Inner width of the dense MLP
    #[arg(long, value_name = "N")]
    pub dense_inner: Option<usize>,
    /// Experts a layer
    #[arg(long, value_name = "N")]
    pub experts: Option<usize>,
    /// Experts a token
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Width that experts read and write; a multiple of 32
    #[arg(long, value_name = "N")]
    pub latent: Option<usize>,
    /// Inner width of an expert; a multiple of 32
    #[arg(long, value_name = "N")]
    pub inner: Option<usize>,
    /// Shared experts; 0: none
    #[arg(long, value_name = "N")]
    pub shared: Option<usize>,
    /// Layers of an AttnRes block; 0: plain residuals
    #[arg(long, value_name = "N")]
    pub attn_res_block: Option<usize>,
    /// Rows of the embedding and of the head
    #[arg(long, value_name = "N")]
    pub vocab: Option<usize>,
    /// Context the model is declared for
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
}

/// `--preset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PresetArg {
    /// A few MB, for tests
    Tiny,
    /// K3's widths, 3 layers of 64 experts: 7 GB
    Slice,
    /// All of K3 as sparse files: 1.56 TB listed, some 150 MB on disk
    K3,
    /// 8 layers of 128 small experts: 2.4 GB
    Mini,
    /// 4 layers of 448 experts of K3's size over a small trunk: 32 GB
    Stream,
}

impl PresetArg {
    fn preset(self) -> Preset {
        match self {
            PresetArg::Tiny => Preset::Tiny,
            PresetArg::Slice => Preset::Slice,
            PresetArg::K3 => Preset::K3,
            PresetArg::Mini => Preset::Mini,
            PresetArg::Stream => Preset::Stream,
        }
    }
}

impl Sizes {
    fn applied_to(&self, shape: Shape) -> Shape {
        Shape {
            layers: self.layers.unwrap_or(shape.layers),
            dense_layers: self.dense_layers.unwrap_or(shape.dense_layers),
            mla_every: self.mla_every.unwrap_or(shape.mla_every),
            hidden: self.hidden.unwrap_or(shape.hidden),
            heads: self.heads.unwrap_or(shape.heads),
            head_dim: self.head_dim.unwrap_or(shape.head_dim),
            q_lora: self.q_lora.unwrap_or(shape.q_lora),
            kv_lora: self.kv_lora.unwrap_or(shape.kv_lora),
            nope: self.nope.unwrap_or(shape.nope),
            rope: self.rope.unwrap_or(shape.rope),
            v_head: self.v_head.unwrap_or(shape.v_head),
            dense_inner: self.dense_inner.unwrap_or(shape.dense_inner),
            experts: self.experts.unwrap_or(shape.experts),
            top_k: self.top_k.unwrap_or(shape.top_k),
            latent: self.latent.unwrap_or(shape.latent),
            inner: self.inner.unwrap_or(shape.inner),
            shared: self.shared.unwrap_or(shape.shared),
            attn_res_block: self.attn_res_block.unwrap_or(shape.attn_res_block),
            vocab: self.vocab.unwrap_or(shape.vocab),
            context: self.context.unwrap_or(shape.context),
        }
    }
}

/// Makes the model and prints what it is and how long that took.
///
/// # Errors
/// As [`synth::write`] and printing report.
pub fn run(args: &SynthArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let recipe = recipe(args);
    let threads = args.threads.or_else(|| thread::available_parallelism().ok()).map_or(1, usize::from);
    let bar = if shown.quiet { ProgressBar::hidden() } else { ProgressBar::no_length() };
    bar.set_style(
        ProgressStyle::with_template("writing {bytes} of {total_bytes} at {bytes_per_sec}, {eta} left")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar.enable_steady_tick(Duration::from_secs(1));
    let mut progress = |done: u64, total: u64| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let made = synth::write(&args.dir, &recipe, threads, &mut progress, interrupt);
    bar.finish_and_clear();
    // A reader that has gone away has seen what it wanted.
    output::stdout(report(args, &recipe, &made?).as_bytes()).map(drop)
}

fn recipe(args: &SynthArgs) -> Recipe {
    let preset = args.preset.preset();
    let sparse = args.sparse || (preset == Preset::K3 && !args.filled);
    let content = if sparse { Content::Sparse } else { Content::Seeded };
    Recipe::new(args.sizes.applied_to(preset.shape()), args.seed, args.uniform, content)
}

fn report(args: &SynthArgs, recipe: &Recipe, made: &Made) -> String {
    let shape = &recipe.shape;
    let mla = (0..shape.layers).filter(|&layer| shape.is_mla(layer)).count();
    let values = match recipe.content {
        Content::Seeded => format!("random, seed {}", recipe.seed),
        Content::Sparse => "none: sparse files of zeros".into(),
    };
    let routing = if recipe.uniform { "uniform" } else { "skewed as in real use" };
    let done = match (made.complete_before, made.kept) {
        (true, _) => "is there already, whole".into(),
        (false, 0) => format!("made in {:.1} s", made.elapsed.as_secs_f64()),
        (false, kept) => format!("{kept} shards were there; the rest made in {:.1} s", made.elapsed.as_secs_f64()),
    };
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12}{value}");
    };
    line("model", args.dir.display().to_string());
    line("layers", format!("{} ({} KDA, {mla} MLA; {} dense)", shape.layers, shape.layers - mla, shape.dense_layers));
    line(
        "widths",
        format!(
            "hidden {}, {} heads × {}, latent {}, expert inner {}, dense inner {}, vocabulary {}",
            shape.hidden, shape.heads, shape.head_dim, shape.latent, shape.inner, shape.dense_inner, shape.vocab
        ),
    );
    line(
        "experts",
        format!(
            "{} × {} of {} bytes, {} a token, {} shared",
            shape.moe_layers(),
            shape.experts,
            shape.expert_bytes(),
            shape.top_k,
            shape.shared
        ),
    );
    line("routing", routing.into());
    line("values", values);
    line("parameters", format!("{} ({:.2} B)", made.parameters, made.parameters as f64 / 1e9));
    line("tensors", format!("{} in {} shards", made.tensors, made.shards));
    line("total_size", format!("{} bytes of tensors", made.total_size));
    line("files", format!("{} bytes, {} on disk", made.bytes, made.disk_bytes));
    line("time", done);
    text
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::*;

    fn parsed(words: &[&str]) -> Result<SynthArgs, clap::Error> {
        let matches = SynthArgs::augment_args(Command::new("synth")).try_get_matches_from(words)?;
        SynthArgs::from_arg_matches(&matches)
    }

    #[test]
    fn every_size_flag_changes_its_own_size() {
        const FLAGS: [&str; 20] = [
            "layers",
            "dense-layers",
            "mla-every",
            "hidden",
            "heads",
            "head-dim",
            "q-lora",
            "kv-lora",
            "nope",
            "rope",
            "v-head",
            "dense-inner",
            "experts",
            "top-k",
            "latent",
            "inner",
            "shared",
            "attn-res-block",
            "vocab",
            "context",
        ];
        let shape = Preset::Tiny.shape();
        let before = serde_json::to_value(&shape).unwrap();
        assert_eq!(before.as_object().unwrap().len(), FLAGS.len());
        for flag in FLAGS {
            let args = parsed(&["synth", "x", &format!("--{flag}"), "77"]).unwrap_or_else(|e| panic!("{flag}: {e}"));
            let after = serde_json::to_value(recipe(&args).shape).unwrap();
            for (key, value) in after.as_object().unwrap() {
                let wanted = if *key == flag.replace('-', "_") { &serde_json::json!(77) } else { &before[key] };
                assert_eq!(value, wanted, "--{flag}: {key}");
            }
        }
    }

    #[test]
    fn only_k3_is_sparse_unless_asked() {
        let content = |words: &[&str]| recipe(&parsed(words).unwrap()).content;
        assert_eq!(content(&["synth", "x", "--preset", "k3"]), Content::Sparse);
        assert_eq!(content(&["synth", "x", "--preset", "k3", "--filled"]), Content::Seeded);
        assert_eq!(content(&["synth", "x", "--preset", "mini"]), Content::Seeded);
        assert_eq!(content(&["synth", "x", "--sparse"]), Content::Sparse);
        assert!(parsed(&["synth", "x", "--sparse", "--filled"]).is_err());
    }

    #[test]
    fn the_report_says_what_was_made_and_how_long_it_took() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        let args = parsed(&["synth", path.to_str().unwrap(), "--seed", "9"]).unwrap();
        let made = || synth::write(&args.dir, &recipe(&args), 1, &mut |_, _| (), &Interrupt::new()).unwrap();
        let first = report(&args, &recipe(&args), &made());
        for part in [
            "4 (3 KDA, 1 MLA; 1 dense)",
            "3 × 64 of",
            "skewed",
            "seed 9",
            "parameters",
            "5 shards",
            "on disk",
            "made in",
        ] {
            assert!(first.contains(part), "{part}: {first}");
        }
        let again = report(&args, &recipe(&args), &made());
        assert!(again.contains("is there already"), "{again}");
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for words in [
            ["synth", "x", "--layers", "-1"],
            ["synth", "x", "--experts", "abc"],
            ["synth", "x", "--hidden", "1e3"],
            ["synth", "x", "--preset", "k2"],
            ["synth", "x", "--seed", "-5"],
            ["synth", "x", "--threads", "0"],
        ] {
            assert!(parsed(&words).is_err(), "{words:?}");
        }
    }
}
