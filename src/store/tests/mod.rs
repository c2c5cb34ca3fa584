//! The store as a whole, on small models of real files.

mod arrival;
mod disk;
mod failure;
mod faults;
mod interleavings;
mod lookahead;
mod replicas;
mod service;
mod volumes;
mod warm;

use std::path::PathBuf;
use std::sync::Arc;

use self::disk::Faulty;
use super::*;
use crate::checkpoint::{ExpertFormat, ExpertTable};
use crate::error::Kind;

const LAYER: u16 = 3;

/// A model on disk that consists of experts alone.
struct Model {
    _dir: tempfile::TempDir,
    manifest: Manifest,
}

/// How the parts of the experts lie.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// As released: one after the other.
    Adjacent,
    /// With some bytes between any two.
    Apart,
    /// Alternately in two files, last part first.
    Torn,
}

impl Model {
    /// `experts` experts in two layers (3 and 7) with parts of odd sizes, at odd offsets, up to the very end of the file.
    fn new(experts: usize, format: ExpertFormat, order: Order) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::in_dir(dir, experts, format, order)
    }

    fn in_dir(dir: tempfile::TempDir, experts: usize, format: ExpertFormat, order: Order) -> Self {
        let part_bytes = match format {
            ExpertFormat::Mxfp4 => vec![24_016, 1501, 24_016, 1501, 24_016, 1501],
            ExpertFormat::Bf16 => vec![10_002, 10_002, 10_002],
        };
        let mut files = [vec![1_u8; 777], vec![2_u8; 12_345]];
        let mut places = Vec::new();
        for expert in 0..2 * experts {
            let mut of_expert = vec![(0, 0); part_bytes.len()];
            for step in 0..part_bytes.len() {
                let part = if order == Order::Torn { part_bytes.len() - 1 - step } else { step };
                let file = if order == Order::Torn { part % 2 } else { expert % 2 };
                of_expert[part] = (file as u16, files[file].len() as u64);
                files[file].extend((0..part_bytes[part]).map(|at| value(expert, part, at as usize)));
                if order == Order::Apart {
                    files[file].extend([0xee; 13]);
                }
            }
            places.extend(of_expert);
        }
        let shards: Vec<PathBuf> = ["one", "two"].iter().map(|name| dir.path().join(name)).collect();
        for (path, bytes) in shards.iter().zip(&files) {
            std::fs::write(path, bytes).unwrap();
        }
        let manifest = Manifest {
            dir: dir.path().to_path_buf(),
            shards,
            shard_bytes: files.iter().map(|bytes| bytes.len() as u64).collect(),
            trunk: Vec::new(),
            experts: Some(ExpertTable { format, part_bytes, num_experts: experts, moe_layers: vec![LAYER, 7], places }),
            ignored: Vec::new(),
        };
        Self { _dir: dir, manifest }
    }

    fn open(&self, slots: usize) -> Arc<ExpertStore> {
        ExpertStore::open(&self.manifest, &[], &options(slots), Interrupt::new()).unwrap()
    }

    fn open_on(&self, disk: Arc<Faulty>, slots: usize) -> Arc<ExpertStore> {
        ExpertStore::open_on(disk, &self.manifest, &[], &options(slots), Interrupt::new()).unwrap()
    }

    fn check(&self, expert: &Expert<'_>) {
        let table = self.manifest.experts.as_ref().unwrap();
        let layer = table.moe_layers.iter().position(|layer| *layer == expert.id.layer).unwrap();
        let number = layer * table.num_experts + usize::from(expert.id.expert);
        for (part, len) in table.part_bytes.iter().enumerate() {
            let bytes = expert.part(part);
            assert_eq!(bytes.len() as u64, *len, "{} part {part}", expert.id);
            let wrong = bytes.iter().enumerate().position(|(at, byte)| *byte != value(number, part, at));
            assert_eq!(wrong, None, "{} part {part}", expert.id);
        }
    }

    /// Asks for `experts` of layer 3 and looks at every byte.
    fn read(&self, store: &ExpertStore, experts: &[u16]) {
        let mut request = store.request(LAYER, experts);
        let mut got = Vec::new();
        while let Some(expert) = request.next().unwrap() {
            self.check(&expert);
            got.push(expert.id.expert);
        }
        assert_eq!(got, experts);
    }
}

/// Byte `at` of a part: never 255.
fn value(expert: usize, part: usize, at: usize) -> u8 {
    ((at * 31 + part * 7 + expert * 101 + at / 251) % 255) as u8
}

fn options(slots: usize) -> StoreOptions {
    StoreOptions { slots, direct: true, queue_depth: 4, piece_bytes: 16 << 10, verify: false }
}

fn all(experts: usize) -> Vec<u16> {
    (0..experts as u16).collect()
}

/// The first error of a request, which must come.
fn error_of(store: &ExpertStore, experts: &[u16]) -> Error {
    let mut request = store.request(LAYER, experts);
    loop {
        match request.next() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("no error"),
            Err(error) => return error,
        }
    }
}
