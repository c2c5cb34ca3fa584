//! Opens the parts and joins them: configuration, checkpoint, plan, trunk, store, kernels, model.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::checkpoint::Manifest;
use crate::config::ModelConfig;
use crate::demo;
use crate::error::{Error, Result};
use crate::generate::{LOGIT_ROWS, Session};
use crate::interrupt::Interrupt;
use crate::kernels::{Compute, Isa};
use crate::learned::{Kept, Learned};
use crate::model::{Machine, Model, Routes, Scratch, Sequence};
use crate::plan::{self, Needs, Plan, SmallerTrunk};
use crate::store::histogram::Histogram;
use crate::store::packed::PackedRoot;
use crate::store::{ALIGN, ExpertStore, StoreOptions, StoreStats};
use crate::trunk::{LoadProgress, Trunk, TrunkFile, TrunkFormat};

/// The common flags, resolved.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Model directory.
    pub model: PathBuf,
    /// `--memory`, bytes.
    pub memory: Option<u64>,
    /// `--expert-memory`, bytes.
    pub expert_memory: Option<u64>,
    /// `--threads`; see [`EngineOptions::thread_count`].
    pub threads: Option<usize>,
    /// `--isa`.
    pub isa: Option<Isa>,
    /// `--step`: most rows of one step; `None`: chosen by the plan.
    pub step: Option<usize>,
    /// Tokens of the longest prompt, where that is known: no step has more rows.
    pub prompt: Option<usize>,
    /// Tokens of context to make room for (prompt and answer).
    pub context: usize,
    /// Read past the page cache.
    pub direct: bool,
    /// `--experts`: roots of packed experts to read from besides the model's own shards.
    pub experts: Vec<PathBuf>,
    /// Keep a histogram of which experts were used, and start from it.
    pub learn: bool,
    /// Guess the next layer's experts and read ahead.
    pub lookahead: bool,
    /// Compare every expert read from a packed root with its checksum.
    pub verify_reads: bool,
    /// `--trunk`: how the trunk's matrices are held; `None`: as released, from the shards. Where one of `experts` has a
    /// trunk file of the format that is asked for, it is read.
    pub trunk: Option<TrunkFormat>,
}

impl EngineOptions {
    /// Everything at its default for the model in `model` with room for `context` tokens; nothing is learnt.
    pub fn new(model: impl Into<PathBuf>, context: usize) -> Self {
        Self {
            model: model.into(),
            memory: None,
            expert_memory: None,
            threads: None,
            isa: None,
            step: None,
            prompt: None,
            context,
            direct: true,
            experts: Vec::new(),
            learn: false,
            lookahead: true,
            verify_reads: false,
            trunk: None,
        }
    }
}

impl EngineOptions {
    /// How the trunk's matrices are held.
    pub fn trunk_format(&self) -> TrunkFormat {
        self.trunk.unwrap_or_default()
    }

    /// Threads that compute: as asked, or one a processor that this process may use.
    pub fn thread_count(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
    }
}

/// What opening and prefilling report to whoever shows progress. All methods may be called from the calling thread only.
pub trait Progress {
    /// `done` of `total` trunk bytes are in memory.
    fn loading(&self, done: u64, total: u64);
    /// `done` of `total` prompt tokens are through; the step in work is at `layer` of `layers`; `bytes` of experts read.
    fn prefill(&self, done: usize, total: usize, layer: usize, layers: usize, bytes: u64);
    /// Something the user should know once (a drive reads buffered).
    fn notice(&self, text: &str);
    /// Something the user must know although fewer words were asked for: what keeps the run waiting without end, or what
    /// of the input was left out.
    fn warning(&self, text: &str) {
        self.notice(text);
    }
}

/// A [`Progress`] that shows nothing.
impl Progress for () {
    fn loading(&self, _done: u64, _total: u64) {}
    fn prefill(&self, _done: usize, _total: usize, _layer: usize, _layers: usize, _bytes: u64) {}
    fn notice(&self, _text: &str) {}
}

/// Rows of a step when `--step` does not say. A step reads every expert that any of its rows needs, which soon are all, so
/// the whole prompt in one step is best; beyond some thousand rows reading takes less time than computing.
const STEP_ROWS: usize = 4096;
/// The step is halved until its buffers take no more than this part of what the experts' slots could have.
const STEP_SHARE: u64 = 4;
/// Bytes that are not counted part by part: code, tables, output buffers, what the allocator keeps of the parsing.
const FIXED_BYTES: u64 = 16 << 20;
/// Stack and allocator of a thread that computes.
const THREAD_BYTES: u64 = 256 << 10;
/// A tokenizer's tables, for an id, by the file that it is made from: merges cost more than ranks.
const TOKENIZER_BYTES_PER_ID: [(&str, u64); 2] = [("tiktoken.model", 80), ("tokenizer.json", 420)];
/// Headers' and catalog's cost for a routed expert.
const CATALOG_BYTES_PER_EXPERT: u64 = 400;
/// Reads in flight and bytes of each: deep enough to keep an NVMe drive busy, small enough to share an expert among
/// threads.
pub(crate) const QUEUE_DEPTH: usize = 8;
pub(crate) const PIECE_BYTES: usize = 2 << 20;

/// A model ready to compute.
pub struct Engine {
    plan: Plan,
    trunk_format: TrunkFormat,
    model: Model,
    /// Before the store: it ends first, and its reads with it.
    learned: Option<Learned>,
    store: Option<Arc<ExpertStore>>,
    compute: Compute,
    scratch: Mutex<Scratch>,
    context: usize,
    lookahead: bool,
    interrupt: Interrupt,
}

/// What a directory was found to hold, and what running it takes.
pub struct Survey {
    /// Its configuration.
    pub config: ModelConfig,
    /// Its tensors.
    pub manifest: Manifest,
    /// Drive roots that hold its experts.
    pub roots: Vec<PackedRoot>,
    /// The file that its trunk is read from, where that is not the shards.
    pub trunk: Option<TrunkFile>,
    /// Most rows of a step.
    pub step_rows: usize,
    /// The memory plan.
    pub plan: Plan,
}

impl Engine {
    /// Reads the configuration and the headers and makes the plan; loads nothing.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn survey(options: &EngineOptions) -> Result<Survey> {
        let config = ModelConfig::load(&options.model)?;
        let manifest = Manifest::open(&options.model, &config)?;
        let roots = PackedRoot::open_all(&options.experts, &manifest)?;
        let slot = ExpertStore::slot_bytes(&manifest, &roots)?;
        let trunk = match options.trunk {
            Some(format) => TrunkFile::find(&options.experts, format, &manifest)?,
            None => None,
        };
        let trunk_bytes = Trunk::planned_bytes(&manifest, options.trunk_format(), trunk.as_ref());
        let (step_rows, plan) = make_plan(&config, &manifest, slot, trunk_bytes, options)?;
        Ok(Survey { config, manifest, roots, trunk, step_rows, plan })
    }

    /// The memory plan of a model on a machine that is not this one, which has `memory` bytes for it.
    ///
    /// # Errors
    /// `Memory` below the floor, `Usage` for a context that the model does not have.
    pub fn plan_elsewhere(config: &ModelConfig, manifest: &Manifest, context: usize, memory: u64) -> Result<Plan> {
        let options = EngineOptions { memory: Some(memory), ..EngineOptions::new(&manifest.dir, context) };
        // An expert that begins and ends within pages.
        let slot = if manifest.experts.is_some() { manifest.expert_bytes() + 2 * ALIGN as u64 } else { 0 };
        let fit = |needs: &Needs| plan::plan_elsewhere(needs, memory);
        let trunk = Trunk::planned_bytes(manifest, options.trunk_format(), None);
        make_plan_with(config, manifest, slot, trunk, &options, &fit).map(|(_, plan)| plan)
    }

    /// Opens, checks, plans and loads.
    ///
    /// # Errors
    /// `Model` for a directory that cannot be run, `Memory` when the plan does not fit, `Io`, `Usage`, `Interrupted`.
    pub fn open(options: &EngineOptions, progress: &dyn Progress, interrupt: &Interrupt) -> Result<Self> {
        let compute = Compute::new(options.isa, options.thread_count(), interrupt.clone())?;
        let Survey { config, manifest, roots, trunk, mut step_rows, mut plan } = Self::survey(options)?;
        plan.caution.iter().for_each(|caution| progress.notice(caution));
        interrupt.check()?;
        let loading = Loading(progress);
        let trunk_format = options.trunk_format();
        if trunk_format == TrunkFormat::Int8 {
            progress.notice("the trunk is quantized to int8, as asked: answers are not those of the released weights");
        }
        let trunk = Trunk::load(&manifest, trunk_format, trunk.as_ref(), options.direct, &loading, interrupt)?;
        if trunk.resident_bytes() > plan.trunk {
            // Weights more irregular than was expected.
            let slot = ExpertStore::slot_bytes(&manifest, &roots)?;
            (step_rows, plan) = make_plan(&config, &manifest, slot, trunk.resident_bytes(), options)?;
        }
        let store = match &manifest.experts {
            Some(_) => {
                let options = StoreOptions {
                    slots: plan.slots as usize,
                    direct: options.direct,
                    queue_depth: QUEUE_DEPTH,
                    piece_bytes: PIECE_BYTES,
                    verify: options.verify_reads,
                };
                Some(ExpertStore::open(&manifest, &roots, &options, interrupt.clone())?)
            }
            None => None,
        };
        let learned = store.as_ref().and_then(|store| learn(options, &config, &manifest, store, progress));
        let scratch = Mutex::new(Scratch::new(&config, step_rows)?);
        let model = Model::new(config, &manifest, &trunk, &compute)?;
        let EngineOptions { context, lookahead, .. } = *options;
        let interrupt = interrupt.clone();
        let engine =
            Self { plan, trunk_format, model, learned, store, compute, scratch, context, lookahead, interrupt };
        engine.pass_notices_on(progress);
        Ok(engine)
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// The plan in force.
    pub fn memory_plan(&self) -> &Plan {
        &self.plan
    }

    /// Largest number of rows in a step.
    pub fn step_rows(&self) -> usize {
        self.scratch().rows_max()
    }

    /// How the trunk's matrices are held.
    pub fn trunk_format(&self) -> TrunkFormat {
        self.trunk_format
    }

    /// Instruction set in use.
    pub fn isa_name(&self) -> &'static str {
        self.compute.isa_name()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.compute.threads()
    }

    /// Expert reads so far.
    pub fn store_stats(&self) -> StoreStats {
        self.store.as_ref().map(|store| store.stats()).unwrap_or_default()
    }

    /// Computes on `threads` threads from now on.
    ///
    /// # Errors
    /// As [`Compute::new`].
    pub fn set_threads(&mut self, threads: usize) -> Result<()> {
        if threads != self.threads() {
            let isa = self.isa_name().parse()?;
            self.compute = Compute::new(Some(isa), threads, self.interrupt.clone())?;
        }
        Ok(())
    }

    /// Takes steps of at most `rows` rows from now on. More than were planned for may not fit in memory.
    ///
    /// # Errors
    /// Kind `Memory` when the buffers cannot be allocated, which leaves an engine that takes no step.
    pub fn set_step_rows(&mut self, rows: usize) -> Result<()> {
        let scratch = self.scratch.get_mut().unwrap_or_else(PoisonError::into_inner);
        if rows != scratch.rows_max() {
            *scratch = Scratch::new(self.model.config(), 0)?; // lets go of the old buffers first
            *scratch = Scratch::new(self.model.config(), rows)?;
        }
        Ok(())
    }

    /// Forgets the experts in memory.
    pub fn clear_experts(&self) {
        if let Some(store) = &self.store {
            store.clear();
        }
    }

    /// A new, empty sequence with room for the planned context.
    ///
    /// # Errors
    /// `Memory` when its states cannot be allocated.
    pub fn session(&self) -> Result<Session<'_>> {
        Ok(Session::new(self, Sequence::new(self.config(), self.context)?))
    }

    /// The weights and what they compute.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What a step runs on.
    pub fn machine(&self) -> Machine<'_> {
        Machine {
            compute: &self.compute,
            store: self.store.as_deref(),
            lookahead: self.lookahead,
            interrupt: &self.interrupt,
        }
    }

    /// The step buffers; held for the length of a step.
    pub(crate) fn scratch(&self) -> MutexGuard<'_, Scratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of experts read so far.
    pub(crate) fn expert_bytes_read(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.expert_bytes())
    }

    /// Counts the routes of a step of `layer`.
    pub(crate) fn record_routes(&self, layer: usize, routes: &Routes) {
        if let Some(learned) = &self.learned {
            learned.record(layer, routes);
        }
    }

    /// Hands the store's notices to the user.
    pub(crate) fn pass_notices_on(&self, progress: &dyn Progress) {
        if let Some(store) = &self.store {
            store.take_notices().iter().for_each(|notice| progress.notice(notice));
        }
    }
}

/// [`LoadProgress`] in the engine's terms.
struct Loading<'a>(&'a dyn Progress);

impl LoadProgress for Loading<'_> {
    fn loaded(&self, done: u64, total: u64) {
        self.0.loading(done, total);
    }
}

/// Tells the store what a token takes, and what earlier runs learned where that is wanted and to be had.
fn learn(
    options: &EngineOptions,
    config: &ModelConfig,
    manifest: &Manifest,
    store: &Arc<ExpertStore>,
    progress: &dyn Progress,
) -> Option<Learned> {
    let top_k = config.moe.as_ref()?.num_experts_per_token;
    let Some(mut kept) = options.learn.then(|| Kept::load(manifest).ok()).flatten() else {
        store.learn(top_k, &Histogram::new(0, 0, 0));
        return None;
    };
    if let Some(notice) = kept.notice.take() {
        progress.notice(&notice);
    }
    Some(Learned::start(kept, manifest, top_k, store))
}

/// The step's rows and the plan that goes with them; `slot`: bytes of an expert's slot, `trunk`: of the trunk.
fn make_plan(
    config: &ModelConfig,
    manifest: &Manifest,
    slot: u64,
    trunk: u64,
    options: &EngineOptions,
) -> Result<(usize, Plan)> {
    let fit = |needs: &Needs| plan::plan(needs, options.memory, options.expert_memory);
    make_plan_with(config, manifest, slot, trunk, options, &fit)
}

/// As [`make_plan`]; `fit` makes a plan of what is needed.
fn make_plan_with(
    config: &ModelConfig,
    manifest: &Manifest,
    slot: u64,
    trunk: u64,
    options: &EngineOptions,
    fit: &dyn Fn(&Needs) -> Result<Plan>,
) -> Result<(usize, Plan)> {
    if options.step == Some(0) {
        return Err(Error::usage("--step 0: a step has at least one row"));
    }
    if options.context == 0 {
        return Err(Error::usage("--context 0: there must be room for at least one token"));
    }
    if options.context > config.max_position_embeddings {
        return Err(Error::usage(format!(
            "--context {}: the model is made for at most {} tokens",
            options.context, config.max_position_embeddings
        )));
    }
    let most = options.prompt.map_or(options.context, |prompt| prompt.clamp(1, options.context));
    let mut rows = options.step.unwrap_or(STEP_ROWS).min(most);
    let try_rows = |rows: usize| {
        let needs = needs(config, manifest, slot, trunk, options, rows);
        fit(&needs).map(|plan| (needs, plan))
    };
    loop {
        let planned = try_rows(rows);
        let halve = match &planned {
            Ok((needs, plan)) => needs.activations > plan.slots_and_activations_max() / STEP_SHARE,
            Err(_) => true,
        };
        if options.step.is_none() && halve && rows > 1 {
            rows = rows.div_ceil(2);
            continue;
        }
        return planned.map(|(_, plan)| (rows, plan));
    }
}

/// What running `config`'s model takes, part by part.
fn needs(
    config: &ModelConfig,
    manifest: &Manifest,
    slot: u64,
    trunk: u64,
    options: &EngineOptions,
    rows: usize,
) -> Needs {
    let experts = manifest.experts.as_ref();
    let all = experts.map_or(0, |experts| (experts.moe_layers.len() * experts.num_experts) as u64);
    let top_k = config.moe.as_ref().map_or(0, |moe| moe.num_experts_per_token as u64);
    let logits = (LOGIT_ROWS.min(rows) * config.vocab_size * size_of::<f32>()) as u64;
    let needs = Needs {
        trunk,
        states: Sequence::state_bytes(config),
        latent_cache: Sequence::latent_cache_bytes(config, options.context),
        activations: Scratch::planned_bytes(config, rows) + logits + Compute::packed_bytes(rows, widest(config)),
        slot,
        slots_min: top_k,
        slots_max: all,
        fixed: FIXED_BYTES
            + Model::copied_bytes(manifest)
            + options.thread_count() as u64 * THREAD_BYTES
            + tokenizer_bytes(config, manifest)
            + demo::looked_at_bytes()
            + all * CATALOG_BYTES_PER_EXPERT,
        smaller_trunks: smaller_trunks(manifest, options.trunk_format()),
    };
    // The buffers of loading are gone when what follows the trunk is first written.
    let later = needs.states + needs.latent_cache + needs.activations + needs.slots_min.saturating_mul(needs.slot);
    Needs { fixed: needs.fixed + Trunk::LOAD_BYTES_MAX.min(needs.trunk).saturating_sub(later), ..needs }
}

/// Forms of the trunk that take less than `format`.
fn smaller_trunks(manifest: &Manifest, format: TrunkFormat) -> Vec<SmallerTrunk> {
    let forms = [(TrunkFormat::Bf12, "bf12 (lossless)"), (TrunkFormat::Int8, "int8 (approximated)")];
    let bytes = |format| Trunk::planned_bytes(manifest, format, None);
    let all = forms.map(|(format, form)| SmallerTrunk { form, bytes: bytes(format) });
    let asked = bytes(format);
    all.into_iter().filter(|smaller| smaller.bytes < asked).collect()
}

/// Most columns that a product takes at once: of a matrix, or of all heads where each has activations of its own.
fn widest(config: &ModelConfig) -> usize {
    let (mla, kda) = (&config.mla, &config.kda);
    let inner = config.moe.as_ref().map_or(0, |moe| moe.num_shared_experts.max(1) * moe.moe_intermediate_size);
    let attended = mla.num_heads * mla.kv_lora_rank.max(mla.v_head_dim);
    [config.hidden_size, config.intermediate_size, inner, attended, kda.num_heads * kda.head_dim]
        .into_iter()
        .fold(0, usize::max)
}

/// Tables of the tokenizer that the directory has, whether this run needs it or not.
fn tokenizer_bytes(config: &ModelConfig, manifest: &Manifest) -> u64 {
    let made_from = TOKENIZER_BYTES_PER_ID.iter().find(|(file, _)| manifest.dir.join(file).exists());
    made_from.map_or(0, |(_, per_id)| config.vocab_size as u64 * per_id)
}
