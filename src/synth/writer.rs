//! A whole synthetic model: shards, configuration, index, in this order, so that what is cut short is no checkpoint and
//! goes on where it was.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::dir::{self, INDEX_FILE};
use super::recipe::{Content, Recipe};
use super::routing::Routing;
use super::tensors::{self, Tensor};
use super::{config, shard};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// As the `safetensors` format has it.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// No index is longer; the released one has 60 MB.
const INDEX_BYTES_MAX: u64 = 256_000_000;

/// What was made.
#[derive(Debug, Clone)]
pub struct Made {
    /// Weights of the model.
    pub parameters: u64,
    /// Tensors.
    pub tensors: u64,
    /// Bytes of all tensors: the index's `total_size`.
    pub total_size: u64,
    /// Bytes of all files, as listed.
    pub bytes: u64,
    /// Bytes that the files take on disk, as the file system says.
    pub disk_bytes: u64,
    /// Shards.
    pub shards: usize,
    /// Shards that were there already, whole.
    pub kept: usize,
    /// Whether everything was there and nothing was written.
    pub complete_before: bool,
    /// Time it took.
    pub elapsed: Duration,
}

/// What a model will consist of.
struct Plan {
    routing: Routing,
    shards: Vec<ShardPlan>,
    parameters: u64,
    tensors: u64,
    index_bytes: u64,
}

struct ShardPlan {
    name: String,
    header: u64,
    data: u64,
}

impl ShardPlan {
    fn len(&self) -> u64 {
        self.header + self.data
    }

    /// Bytes that have to be written.
    fn written(&self, content: Content) -> u64 {
        match content {
            Content::Seeded => self.len(),
            Content::Sparse => self.header,
        }
    }
}

/// Makes the model of `recipe` in `dir` with `threads` threads, or what is missing of it; `progress` is told the bytes
/// written and to write.
///
/// # Errors
/// Kind `Usage`: a shape that cannot be, a directory with something else in it. Kind `Io`: no room, or a write that
/// failed; what is there then is no checkpoint, and the next call goes on. Kind `Interrupted`.
pub fn write(
    dir: &Path,
    recipe: &Recipe,
    threads: usize,
    progress: &mut dyn FnMut(u64, u64),
    interrupt: &Interrupt,
) -> Result<Made> {
    let start = Instant::now();
    recipe.shape.check()?;
    dir::check(dir, recipe)?;
    let plan = plan(recipe)?;
    let whole: Vec<bool> = plan.shards.iter().map(|shard| is_whole(dir, shard)).collect();
    let missing = || plan.shards.iter().zip(&whole).filter(|(_, whole)| !**whole).map(|(shard, _)| shard);
    let [config, generation_config] = [config::config(&recipe.shape), config::generation_config(&recipe.shape)];
    let small = [("config.json", &config), ("generation_config.json", &generation_config)];
    let complete = missing().next().is_none()
        && small.iter().all(|(name, value)| fs::read(dir.join(name)).is_ok_and(|found| found == text(value)))
        && fs::metadata(dir.join(INDEX_FILE)).is_ok_and(|meta| meta.len() == plan.index_bytes);
    let to_write: u64 = missing().map(|shard| shard.written(recipe.content)).sum();
    if !complete {
        dir::check_space(dir, to_write + plan.index_bytes + (1 << 20))?;
        let claimed = dir::claim(dir, recipe)?;
        claimed.remove_index()?;
        let mut written = 0;
        let mut wrote = |bytes: u64| {
            written += bytes;
            progress(written, to_write);
        };
        for (number, (shard, _)) in plan.shards.iter().zip(&whole).enumerate().filter(|(_, (_, whole))| !**whole) {
            interrupt.check()?;
            let tensors = tensors(recipe, &plan.routing, number);
            let (path, temporary) = (dir.join(&shard.name), claimed.temporary(&shard.name));
            shard::write(&path, &temporary, &tensors, recipe, threads, &mut wrote, interrupt)?;
        }
        for (name, value) in small {
            claimed.write(name, |out| out.write_all(&text(value)))?;
        }
        claimed.sync()?;
        interrupt.check()?;
        claimed.write(INDEX_FILE, |out| write_index(recipe, &plan, out))?;
        claimed.sync()?;
    }
    let (bytes, disk_bytes) = sizes(dir)?;
    Ok(Made {
        parameters: plan.parameters,
        tensors: plan.tensors,
        total_size: plan.shards.iter().map(|shard| shard.data).sum(),
        bytes,
        disk_bytes,
        shards: plan.shards.len(),
        kept: whole.iter().filter(|whole| **whole).count(),
        complete_before: complete,
        elapsed: start.elapsed(),
    })
}

fn tensors(recipe: &Recipe, routing: &Routing, number: usize) -> Vec<Tensor> {
    shard::arrange(tensors::shard(&recipe.shape, routing, number))
}

fn plan(recipe: &Recipe) -> Result<Plan> {
    let shape = &recipe.shape;
    let routing = Routing::new(shape, recipe.seed, recipe.uniform);
    let count = tensors::shards(shape);
    let mut plan = Plan { routing, shards: Vec::new(), parameters: 0, tensors: 0, index_bytes: 0 };
    for number in 0..count {
        let tensors = tensors(recipe, &plan.routing, number);
        let name = format!("model-{:05}-of-{count:06}.safetensors", number + 1);
        let header = shard::header(&tensors).len() as u64;
        if header > HEADER_BYTES_MAX {
            return Err(Error::usage(format!(
                "--experts: {} experts of a layer need a header of {header} bytes, where at most {HEADER_BYTES_MAX} are \
                 allowed",
                shape.experts
            )));
        }
        plan.parameters += tensors.iter().map(Tensor::parameters).sum::<u64>();
        plan.tensors += tensors.len() as u64;
        plan.index_bytes += tensors.iter().map(|tensor| (tensor.name.len() + name.len() + 12) as u64).sum::<u64>();
        let data = tensors.iter().map(Tensor::len).sum();
        plan.shards.push(ShardPlan { name, header, data });
        if plan.index_bytes > INDEX_BYTES_MAX {
            return Err(Error::usage(format!(
                "--layers: {} layers of {} experts need an index of more than {INDEX_BYTES_MAX} bytes",
                shape.layers, shape.experts
            )));
        }
    }
    let mut counted = Counted(0);
    // Counting cannot fail.
    let _ = write_index(recipe, &plan, &mut counted);
    plan.index_bytes = counted.0;
    Ok(plan)
}

/// A writer that only counts.
struct Counted(u64);

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_index(recipe: &Recipe, plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let total: u64 = plan.shards.iter().map(|shard| shard.data).sum();
    write!(out, "{{\n  \"metadata\": {{\n    \"total_size\": {total}\n  }},\n  \"weight_map\": {{")?;
    let mut comma = "";
    for (number, shard) in plan.shards.iter().enumerate() {
        for tensor in tensors(recipe, &plan.routing, number) {
            write!(out, "{comma}\n    \"{}\": \"{}\"", tensor.name, shard.name)?;
            comma = ",";
        }
    }
    out.write_all(b"\n  }\n}\n")
}

fn text(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Shards get their names when they are whole; a length that is not right is somebody else's doing.
fn is_whole(dir: &Path, shard: &ShardPlan) -> bool {
    fs::metadata(dir.join(&shard.name)).is_ok_and(|meta| meta.is_file() && meta.len() == shard.len())
}

/// Bytes of the files in `dir`, as listed and on disk.
fn sizes(dir: &Path) -> Result<(u64, u64)> {
    let unreadable = |e: io::Error| Error::io(format!("cannot read {}: {e}", dir.display()));
    let mut sizes = (0, 0);
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let meta = entry.and_then(|entry| entry.metadata()).map_err(unreadable)?;
        // The system counts blocks of 512 bytes, whatever the file system's are.
        sizes = (sizes.0 + meta.len(), sizes.1 + meta.blocks() * 512);
    }
    Ok(sizes)
}
