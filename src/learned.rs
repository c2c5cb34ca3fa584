//! What earlier runs of a model learned about the use of its experts: read when the engine opens, added to as it runs,
//! written when it closes, be it by an interrupt. It makes a run start with the experts in memory that pay most, and changes
//! no token.
//!
//! One small file a model, in the user's cache directory and not beside the model, which may be read-only, shared or on
//! another computer's disk. Its name is the model's fingerprint, so that models do not get in each other's way.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::checkpoint::{Manifest, TrunkTensor};
use crate::error::{Error, Result};
use crate::model::Routes;
use crate::store::ExpertStore;
use crate::store::histogram::Histogram;
use crate::user_cache;

/// Bytes of each router's weight that tell models of one shape apart, beside all of its bias.
const GATE_BYTES: u64 = 256;

/// What is known of a model, and where it is kept.
#[derive(Debug)]
pub struct Kept {
    /// The file; it need not exist.
    pub path: PathBuf,
    /// The uses.
    pub histogram: Histogram,
    /// Why a file that is there is of no use.
    pub notice: Option<String>,
}

impl Kept {
    /// What earlier runs of the model of `manifest` left.
    ///
    /// # Errors
    /// Kind `Other` for a model without routed experts or a user without a cache directory, `Io` when the routers cannot be
    /// read.
    pub fn load(manifest: &Manifest) -> Result<Self> {
        let experts = manifest.experts.as_ref().ok_or_else(|| Error::other("the model has no routed experts"))?;
        let folder = user_cache::directory().ok_or_else(|| {
            Error::other("there is no cache directory: neither XDG_CACHE_HOME nor HOME is an absolute path")
        })?;
        let fingerprint = fingerprint(manifest)?;
        let path = folder.join(format!("uses-{fingerprint:016x}"));
        let (histogram, notice) = Histogram::load(&path, fingerprint, experts.moe_layers.len(), experts.num_experts);
        Ok(Self { path, histogram, notice })
    }

    /// Tokens that were learned from, roughly, in a model that asks `top_k` experts of a layer for each.
    pub fn tokens(&self, top_k: usize) -> u64 {
        self.histogram.layer_uses() / top_k.max(1) as u64
    }

    /// What is known and where it is kept, in a line.
    pub fn line(&self, top_k: usize) -> String {
        let path = self.path.display();
        match (&self.notice, self.tokens(top_k)) {
            (Some(_), _) => format!("none: what is in {path} is of no use"),
            (None, 0) => format!("none yet, to be kept in {path}"),
            (None, tokens) => format!("of about {tokens} tokens, in {path}"),
        }
    }

    /// Makes the folder of the file.
    ///
    /// # Errors
    /// Kind `Io` when that is not possible; the file can then not be written.
    pub fn make_folder(&self) -> Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder).map_err(|cause| Error::io(format!("cannot make {}: {cause}", folder.display())))
    }
}

/// The uses of a model's experts while it runs. Saved when dropped; where that is not possible, this run is forgotten.
pub(crate) struct Learned {
    moe_layers: Vec<u16>,
    path: PathBuf,
    histogram: Mutex<Histogram>,
    warming: Option<Warming>,
}

/// A thread that reads experts into empty slots.
struct Warming {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Learned {
    /// Lets `store` go by what `kept` holds, and begins to read the experts used most.
    pub(crate) fn start(kept: Kept, manifest: &Manifest, top_k: usize, store: &Arc<ExpertStore>) -> Self {
        let moe_layers = manifest.experts.as_ref().map_or(Vec::new(), |experts| experts.moe_layers.clone());
        store.learn(top_k, &kept.histogram);
        let warming = Warming::start(store, kept.histogram.hottest());
        Self { moe_layers, path: kept.path, histogram: Mutex::new(kept.histogram), warming }
    }

    /// Counts the choices of the rows of a step.
    pub(crate) fn record(&self, layer: usize, routes: &Routes) {
        let Ok(layer) = self.moe_layers.binary_search(&(layer as u16)) else { return };
        let mut histogram = self.histogram.lock().unwrap_or_else(PoisonError::into_inner);
        for row in routes.ids.chunks(routes.top_k.max(1)) {
            histogram.record(layer as u16, row);
        }
    }
}

impl Warming {
    /// `None` when there is nothing to read, or the system refuses the thread: then the experts come when they are used.
    fn start(store: &Arc<ExpertStore>, hottest: Vec<u32>) -> Option<Self> {
        const STACK_BYTES: usize = 256 << 10;
        if hottest.is_empty() {
            return None;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (store, stopped) = (Arc::clone(store), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("warm-start".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || store.warm(&hottest, &stopped)).ok()?;
        Some(Self { stop, thread })
    }
}

impl Drop for Learned {
    fn drop(&mut self) {
        if let Some(Warming { stop, thread }) = self.warming.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join(); // a panic there has been reported, and costs nothing but the warm start
        }
        let histogram = self.histogram.get_mut().unwrap_or_else(PoisonError::into_inner);
        if histogram.has_news() {
            let folder = self.path.parent().unwrap_or(Path::new("/"));
            // What cannot be written is told by `-v` before the run; a run that went well does not end with it.
            let _ =
                fs::create_dir_all(folder).map_err(|_| ()).and_then(|()| histogram.save(&self.path).map_err(|_| ()));
        }
    }
}

/// Tells models apart: shape, router biases and some of each router's weights. The same wherever the files are.
fn fingerprint(manifest: &Manifest) -> Result<u64> {
    let mut bytes = Vec::new();
    if let Some(experts) = &manifest.experts {
        let shape = (experts.format, &experts.part_bytes, experts.num_experts, &experts.moe_layers);
        bytes.extend_from_slice(format!("{shape:?}").as_bytes());
    }
    let mut open: Option<(u16, File)> = None;
    for tensor in manifest.trunk.iter().filter(|tensor| tensor.name.contains(".block_sparse_moe.gate.")) {
        let path = &manifest.shards[usize::from(tensor.span.shard)];
        let failed = |cause| Error::io(format!("cannot read {} of {}: {cause}", tensor.name, path.display()));
        let file = match open.take() {
            Some((shard, file)) if shard == tensor.span.shard => file,
            _ => File::open(path).map_err(failed)?,
        };
        let start = bytes.len();
        bytes.resize(start + bytes_that_count(tensor) as usize, 0);
        file.read_exact_at(&mut bytes[start..], tensor.span.offset).map_err(failed)?;
        open = Some((tensor.span.shard, file));
    }
    Ok(crate::store::checksum(&bytes))
}

fn bytes_that_count(tensor: &TrunkTensor) -> u64 {
    if tensor.shape.len() > 1 { tensor.span.len.min(GATE_BYTES) } else { tensor.span.len }
}
