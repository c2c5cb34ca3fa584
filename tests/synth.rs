//! Synthetic checkpoints: accepted as released ones are, the same for the same recipe, whole or no checkpoint at all.

use std::fs;
use std::path::Path;

use deltafin::checkpoint::{ExpertFormat, Manifest};
use deltafin::config::{AttentionKind, FeedForwardKind, ModelConfig};
use deltafin::error::{Kind, Result};
use deltafin::interrupt::Interrupt;
use deltafin::synth::{self, Content, Made, Preset, Recipe, Shape};
use serde_json::Value;
use tempfile::TempDir;

const INDEX: &str = "model.safetensors.index.json";

fn tiny() -> Recipe {
    Recipe::new(Preset::Tiny.shape(), 1, false, Content::Seeded)
}

fn write(dir: &Path, recipe: &Recipe) -> Result<Made> {
    synth::write(dir, recipe, 2, &mut |_, _| (), &Interrupt::new())
}

fn made(recipe: &Recipe) -> (TempDir, Made) {
    let dir = tempfile::tempdir().unwrap();
    let made = write(dir.path(), recipe).unwrap();
    (dir, made)
}

fn open(dir: &Path) -> Result<Manifest> {
    Manifest::open(dir, &ModelConfig::load(dir)?)
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> =
        entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect();
    files.sort();
    files
}

fn shards(dir: &Path) -> Vec<String> {
    files(dir).into_iter().map(|(name, _)| name).filter(|name| name.ends_with(".safetensors")).collect()
}

#[test]
fn tiny_is_a_checkpoint_of_a_few_megabytes() {
    let (dir, made) = made(&tiny());
    let config = ModelConfig::load(dir.path()).unwrap();
    let manifest = Manifest::open(dir.path(), &config).unwrap();
    assert!(made.bytes < 10_000_000, "{}", made.bytes);
    assert_eq!(manifest.tensor_count() as u64, made.tensors);
    assert_eq!(manifest.trunk_bytes() + manifest.all_experts_bytes(), made.total_size);
    let index: Value = serde_json::from_slice(&fs::read(dir.path().join(INDEX)).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], made.total_size);
    assert_eq!(manifest.experts.as_ref().unwrap().format, ExpertFormat::Mxfp4);
    let attention: Vec<AttentionKind> = config.layers.iter().map(|layer| layer.attention).collect();
    assert_eq!(attention[2..], [AttentionKind::Kda, AttentionKind::Mla]);
    assert_eq!(config.layers[0].feed_forward, FeedForwardKind::Dense);
    assert_eq!(shards(dir.path())[0], "model-00001-of-000005.safetensors");
}

#[test]
fn an_expert_is_one_range_and_experts_follow_each_other() {
    let (dir, _) = made(&tiny());
    let manifest = open(dir.path()).unwrap();
    let table = manifest.experts.as_ref().unwrap();
    for &layer in &table.moe_layers {
        let mut next = None;
        for expert in 0..table.num_experts as u16 {
            let places = table.places(layer, expert).unwrap();
            let mut parts: Vec<(u16, u64, u64)> =
                places.iter().zip(&table.part_bytes).map(|((shard, at), len)| (*shard, *at, *len)).collect();
            parts.sort_unstable();
            for (shard, at, len) in parts {
                assert!(next.is_none_or(|next| next == (shard, at)), "L{layer}/E{expert}: {next:?}, {at}");
                next = Some((shard, at + len));
            }
        }
    }
    let trunk_shard = |layer: u16| {
        let prefix = format!("model.layers.{layer}.");
        let of_layer = manifest.trunk.iter().filter(|tensor| tensor.name.starts_with(&prefix));
        let mut shards: Vec<u16> = of_layer.map(|tensor| tensor.span.shard).collect();
        shards.dedup();
        shards
    };
    for &layer in &table.moe_layers {
        assert_eq!(trunk_shard(layer), [table.places(layer, 0).unwrap()[0].0], "layer {layer} spans shards");
    }
}

#[test]
fn the_same_recipe_gives_the_same_bytes_for_any_number_of_threads() {
    let recipe = tiny();
    let (dir, _) = made(&recipe);
    let other = tempfile::tempdir().unwrap();
    synth::write(other.path(), &recipe, 7, &mut |_, _| (), &Interrupt::new()).unwrap();
    assert!(files(dir.path()) == files(other.path()));
    let (seeded, _) = made(&Recipe::new(Preset::Tiny.shape(), 2, false, Content::Seeded));
    let shard = &shards(dir.path())[1];
    assert!(fs::read(dir.path().join(shard)).unwrap() != fs::read(seeded.path().join(shard)).unwrap());
}

#[test]
fn shapes_at_the_bounds_are_checkpoints_too() {
    let tiny = Preset::Tiny.shape();
    let shapes = [
        ("one layer", Shape { layers: 1, ..tiny.clone() }),
        ("one dense KDA layer before MLA", Shape { layers: 2, dense_layers: 2, ..tiny.clone() }),
        ("no dense layer", Shape { dense_layers: 0, ..tiny.clone() }),
        ("only MLA", Shape { mla_every: 1, ..tiny.clone() }),
        ("one expert", Shape { experts: 1, top_k: 1, ..tiny.clone() }),
        ("all experts", Shape { experts: 8, top_k: 8, ..tiny.clone() }),
        ("no query rank", Shape { q_lora: 0, ..tiny.clone() }),
        ("no shared experts", Shape { shared: 0, ..tiny.clone() }),
        ("plain residuals", Shape { attn_res_block: 0, ..tiny.clone() }),
        ("odd widths", Shape { hidden: 99, heads: 3, head_dim: 7, v_head: 5, vocab: 101, rope: 3, ..tiny.clone() }),
        ("smallest", Shape { hidden: 32, heads: 1, head_dim: 2, latent: 32, inner: 32, vocab: 16, ..tiny.clone() }),
        ("more heads than padding", Shape { heads: 130, head_dim: 2, nope: 1, rope: 1, v_head: 1, ..tiny }),
    ];
    for (what, shape) in shapes {
        for content in [Content::Seeded, Content::Sparse] {
            let (dir, made) = made(&Recipe::new(shape.clone(), 3, false, content));
            let manifest = open(dir.path()).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(manifest.tensor_count() as u64, made.tensors, "{what}");
        }
    }
}

#[test]
fn every_value_is_finite_and_no_scale_is_reserved() {
    let (dir, _) = made(&tiny());
    for name in shards(dir.path()) {
        let bytes = fs::read(dir.path().join(&name)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (tensor, view) in tensors.tensors() {
            let data = view.data();
            let finite = match view.dtype() {
                safetensors::Dtype::BF16 => data.chunks_exact(2).all(|b| b[1] & 0x7f != 0x7f || b[0] & 0x80 == 0),
                safetensors::Dtype::F32 => {
                    data.chunks_exact(4).all(|b| f32::from_le_bytes(b.try_into().unwrap()).is_finite())
                }
                _ if tensor.ends_with("scale") => data.iter().all(|scale| (100..=130).contains(scale)),
                _ => true,
            };
            assert!(finite, "{tensor}");
            assert!(data.iter().any(|byte| *byte != data[0]), "{tensor} has one value only");
        }
    }
}

#[test]
fn k3_is_made_as_released_without_its_terabytes() {
    let (dir, made) = made(&Recipe::new(Preset::K3.shape(), 0, false, Content::Sparse));
    assert_eq!((made.tensors, made.total_size, made.shards), (497_052, 1_559_965_606_912, 94));
    assert!(made.disk_bytes < 300_000_000, "{} on disk", made.disk_bytes);
    let manifest = open(dir.path()).unwrap();
    assert_eq!(manifest.expert_bytes(), 17_547_264);
    assert_eq!(manifest.all_experts_bytes(), 1_446_456_066_048);
    assert_eq!(manifest.trunk_bytes() + manifest.all_experts_bytes(), made.total_size);
}

#[test]
fn what_is_there_already_is_left_alone() {
    let (dir, _) = made(&tiny());
    let before = files(dir.path());
    let again = write(dir.path(), &tiny()).unwrap();
    assert!(again.complete_before);
    assert!(files(dir.path()) == before);
}

#[test]
fn another_recipe_or_foreign_files_are_refused_and_left_alone() {
    let (dir, _) = made(&tiny());
    let before = files(dir.path());
    for other in [
        Recipe::new(Preset::Tiny.shape(), 2, false, Content::Seeded),
        Recipe::new(Preset::Tiny.shape(), 1, true, Content::Seeded),
        Recipe::new(Preset::Tiny.shape(), 1, false, Content::Sparse),
        Recipe::new(Shape { vocab: 1024, ..Preset::Tiny.shape() }, 1, false, Content::Seeded),
    ] {
        let error = write(dir.path(), &other).expect_err("another recipe was accepted");
        assert_eq!(error.kind(), Kind::Usage, "{error}");
        assert!(error.hint_text().is_some());
    }
    assert!(files(dir.path()) == before);

    for name in ["notes.txt", INDEX, ".hidden"] {
        let foreign = tempfile::tempdir().unwrap();
        fs::write(foreign.path().join(name), "mine").unwrap();
        let error = write(foreign.path(), &tiny()).expect_err(name);
        assert_eq!(error.kind(), Kind::Usage, "{error}");
        assert_eq!(files(foreign.path()), [(name.to_owned(), b"mine".to_vec())]);
    }
    let pipe = tempfile::tempdir().unwrap();
    let made = std::process::Command::new("mkfifo").arg(pipe.path().join("synth.json")).status();
    assert!(made.unwrap().success());
    assert_eq!(write(pipe.path(), &tiny()).expect_err("a pipe").kind(), Kind::Usage);
    let file = dir.path().join("config.json");
    assert_eq!(write(&file, &tiny()).expect_err("a file").kind(), Kind::Usage);
}

#[test]
fn what_was_cut_short_is_no_checkpoint_and_goes_on_to_the_same_bytes() {
    let (whole, _) = made(&tiny());
    let (dir, _) = made(&tiny());
    let names = shards(dir.path());
    // As a killed process leaves it: no index, a shard missing, another half written, one cut by somebody else.
    fs::remove_file(dir.path().join(INDEX)).unwrap();
    fs::remove_file(dir.path().join(&names[1])).unwrap();
    fs::write(dir.path().join(format!(".{}.synth-tmp", names[1])), "half").unwrap();
    fs::File::options().write(true).open(dir.path().join(&names[2])).unwrap().set_len(100).unwrap();
    assert!(open(dir.path()).is_err());
    let made = write(dir.path(), &tiny()).unwrap();
    assert!(!made.complete_before);
    assert_eq!(made.kept, names.len() - 2);
    assert!(files(whole.path()) == files(dir.path()));
}

#[test]
fn an_interrupt_leaves_no_checkpoint_and_no_half_shard() {
    let dir = tempfile::tempdir().unwrap();
    let interrupt = Interrupt::new();
    let raise = interrupt.clone();
    let mut seen = 0;
    let mut progress = |_: u64, _: u64| {
        seen += 1;
        if seen == 4 {
            raise.raise(2);
        }
    };
    let error = synth::write(dir.path(), &tiny(), 2, &mut progress, &interrupt).expect_err("interrupted");
    assert_eq!(error.kind(), Kind::Interrupted(2));
    assert!(open(dir.path()).is_err());
    assert!(files(dir.path()).iter().all(|(name, _)| !name.ends_with("synth-tmp")));
    write(dir.path(), &tiny()).unwrap();
    open(dir.path()).unwrap();
}

#[test]
fn more_than_the_drive_holds_is_refused_before_anything_is_made() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("deep/model");
    let recipe = Recipe::new(Preset::K3.shape(), 0, false, Content::Seeded);
    let error = write(&dir, &recipe).expect_err("no room for 1.56 TB");
    assert_eq!(error.kind(), Kind::Io);
    assert!(error.message().contains("GiB") && error.hint_text().is_some(), "{error}");
    assert!(!parent.path().join("deep").exists());
}

#[test]
fn a_directory_that_another_process_writes_to_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, _) = made(&tiny());
    fs::copy(whole.path().join("synth.json"), dir.path().join("synth.json")).unwrap();
    let held = fs::File::options().append(true).open(dir.path().join("synth.json")).unwrap();
    held.lock().unwrap();
    let error = write(dir.path(), &tiny()).expect_err("locked");
    assert_eq!(error.kind(), Kind::Io);
    assert!(error.message().contains("another process"), "{error}");
    drop(held);
    write(dir.path(), &tiny()).unwrap();
}

#[test]
fn an_impossible_number_of_experts_or_layers_is_refused_by_its_flag() {
    let tiny = Preset::Tiny.shape();
    for (flag, shape) in [
        ("--top-k", Shape { top_k: 65, ..tiny.clone() }),
        ("--latent", Shape { latent: 33, ..tiny.clone() }),
        ("--layers", Shape { layers: 4096, experts: 896, ..tiny }),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let error = write(dir.path(), &Recipe::new(shape, 0, false, Content::Sparse)).expect_err(flag);
        assert_eq!(error.kind(), Kind::Usage);
        assert!(error.message().starts_with(flag), "{error}");
        assert!(files(dir.path()).is_empty());
    }
}
