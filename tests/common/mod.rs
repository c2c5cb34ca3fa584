//! Checkpoints to break: a golden one is copied into a temporary directory, then its configuration, index, headers or
//! bytes are changed.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod k3;

use std::fs;
use std::path::{Path, PathBuf};

use deltafin::checkpoint::Manifest;
use deltafin::config::ModelConfig;
use deltafin::error::Result;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// The fixtures that are whole checkpoints, below the crate's root.
pub const FIXTURES: [&str; 4] =
    ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear", "assets/demo-model"];

pub const CONFIG: &str = "config.json";
pub const INDEX: &str = "model.safetensors.index.json";

/// `name` below the crate's root.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// One tensor of a shard, with its bytes.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A checkpoint directory of its own.
pub struct Checkpoint {
    dir: TempDir,
}

impl Checkpoint {
    /// A copy of the fixture `name`, golden values left out.
    pub fn copy_of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != "golden.safetensors" {
                fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
            }
        }
        Self { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Opens configuration and manifest, as every command does.
    pub fn open(&self) -> Result<Manifest> {
        Manifest::open(self.path(), &ModelConfig::load(self.path())?)
    }

    /// The message with which opening fails.
    pub fn refusal(&self) -> String {
        let error = self.open().expect_err("the checkpoint was accepted");
        assert_eq!(error.kind(), deltafin::error::Kind::Model, "{error}");
        assert!(error.hint_text().is_some(), "no hint: {error}");
        error.message().to_owned()
    }

    /// Shard names in order.
    pub fn shards(&self) -> Vec<String> {
        let names = fs::read_dir(self.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|n| n.starts_with("model") && n.ends_with(".safetensors")).collect();
        names.sort();
        names
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).unwrap()
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.file(name), bytes).unwrap();
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.file(name)).unwrap();
    }

    pub fn len(&self, name: &str) -> u64 {
        fs::metadata(self.file(name)).unwrap().len()
    }

    pub fn truncate(&self, name: &str, len: u64) {
        fs::File::options().write(true).open(self.file(name)).unwrap().set_len(len).unwrap();
    }

    /// Changes a JSON file in place.
    pub fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.read(name)).unwrap();
        edit(&mut value);
        self.write(name, value.to_string());
    }

    /// Changes the text model's part of the configuration.
    pub fn edit_config(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_json(CONFIG, |value| {
            let nested = value.get("text_config").is_some();
            let object = if nested { &mut value["text_config"] } else { value };
            edit(object.as_object_mut().unwrap());
        });
    }

    /// Changes the index's map from tensors to shards.
    pub fn edit_weight_map(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_json(INDEX, |value| edit(value["weight_map"].as_object_mut().unwrap()));
    }

    /// A shard's header as text, and the data behind it.
    pub fn header(&self, shard: &str) -> (String, Vec<u8>) {
        let bytes = self.read(shard);
        let (len, rest) = bytes.split_at(8);
        let len = u64::from_le_bytes(len.try_into().unwrap()) as usize;
        (String::from_utf8(rest[..len].to_vec()).unwrap(), rest[len..].to_vec())
    }

    /// Writes a shard from a header as text and data, whatever they say.
    pub fn write_shard(&self, shard: &str, header: &str, data: &[u8]) {
        let len = (header.len() as u64).to_le_bytes();
        self.write(shard, [&len, header.as_bytes(), data].concat());
    }

    /// Changes a shard's header and leaves its data.
    pub fn edit_header(&self, shard: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        let (header, data) = self.header(shard);
        let mut header: Value = serde_json::from_str(&header).unwrap();
        edit(header.as_object_mut().unwrap());
        self.write_shard(shard, &header.to_string(), &data);
    }

    /// All tensors of a shard, in the order of its header.
    pub fn tensors(&self, shard: &str) -> Vec<Tensor> {
        let (header, data) = self.header(shard);
        let header: Map<String, Value> = serde_json::from_str(&header).unwrap();
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, entry)| {
            let offset = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            Tensor {
                name,
                dtype: entry["dtype"].as_str().unwrap().to_owned(),
                shape: entry["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect(),
                bytes: data[offset(0)..offset(1)].to_vec(),
            }
        });
        tensors.collect()
    }

    /// Writes a whole shard of these tensors, one after the other.
    pub fn write_tensors(&self, shard: &str, tensors: &[Tensor]) {
        let mut header = Map::new();
        let mut data = Vec::new();
        for tensor in tensors {
            let offsets = [data.len(), data.len() + tensor.bytes.len()];
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets});
            header.insert(tensor.name.clone(), entry);
            data.extend_from_slice(&tensor.bytes);
        }
        self.write_shard(shard, &Value::Object(header).to_string(), &data);
    }

    /// Changes all tensors through `edit` (`None` drops one), and the index with them.
    pub fn edit_tensors(&self, mut edit: impl FnMut(Tensor) -> Option<Tensor>) {
        let mut weight_map = Map::new();
        for shard in self.shards() {
            let tensors: Vec<Tensor> = self.tensors(&shard).into_iter().filter_map(&mut edit).collect();
            weight_map.extend(tensors.iter().map(|t| (t.name.clone(), json!(shard))));
            self.write_tensors(&shard, &tensors);
        }
        if self.file(INDEX).exists() {
            self.edit_weight_map(|map| *map = weight_map);
        }
    }

    /// Adds a tensor to the first shard, and to the index.
    pub fn add_tensor(&self, tensor: Tensor) {
        let shard = self.shards().remove(0);
        let mut tensors = self.tensors(&shard);
        self.edit_weight_map(|map| drop(map.insert(tensor.name.clone(), json!(shard))));
        tensors.push(tensor);
        self.write_tensors(&shard, &tensors);
    }

    /// Puts all shards into one `model.safetensors` and removes the index.
    pub fn make_single_file(&self) {
        let shards = self.shards();
        let tensors: Vec<Tensor> = shards.iter().flat_map(|shard| self.tensors(shard)).collect();
        shards.iter().for_each(|shard| self.remove(shard));
        self.write_tensors("model.safetensors", &tensors);
        self.remove(INDEX);
    }
}

/// `dtype [shape]` of zeros, called `name`.
pub fn zeros(name: &str, dtype: &str, shape: &[u64]) -> Tensor {
    let size = match dtype {
        "U8" | "I8" | "BOOL" | "F8_E4M3" => 1,
        "BF16" | "F16" | "I16" => 2,
        "F32" | "I32" => 4,
        _ => 8,
    };
    let len = shape.iter().product::<u64>() * size;
    Tensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes: vec![0; len as usize] }
}
