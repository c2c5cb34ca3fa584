//! Loading, on small files of odd layout.

use std::cell::RefCell;
use std::path::PathBuf;

use super::*;
use crate::checkpoint::{Dtype, Span, TrunkTensor};
use crate::error::Kind;
use crate::kernels::Weights;

struct Silent;

impl LoadProgress for Silent {
    fn loaded(&self, _: u64, _: u64) {}
}

#[derive(Default)]
struct Recorded(RefCell<Vec<(u64, u64)>>);

impl LoadProgress for Recorded {
    fn loaded(&self, done: u64, total: u64) {
        self.0.borrow_mut().push((done, total));
    }
}

/// Type, shape, shard and offset.
type Stored = (Dtype, &'static [usize], u16, u64);

/// Tensors of the given type, shape, shard and offset, with bytes that depend on all of these.
fn model(tensors: &[Stored]) -> (tempfile::TempDir, Manifest) {
    let dir = tempfile::tempdir().unwrap();
    let mut files: Vec<Vec<u8>> = vec![Vec::new(); 2];
    let mut trunk = Vec::new();
    for (number, (dtype, shape, shard, offset)) in tensors.iter().enumerate() {
        let len = shape.iter().product::<usize>() * dtype.size();
        let file = &mut files[usize::from(*shard)];
        let end = *offset as usize + len;
        file.resize(file.len().max(end), 0xaa);
        file[*offset as usize..end].copy_from_slice(&stored(number, len));
        trunk.push(TrunkTensor {
            name: format!("tensor.{number}"),
            dtype: *dtype,
            shape: shape.to_vec(),
            span: Span { shard: *shard, offset: *offset, len: len as u64 },
        });
    }
    let shards: Vec<PathBuf> = ["one", "two"].iter().map(|name| dir.path().join(name)).collect();
    for (path, bytes) in shards.iter().zip(&files) {
        std::fs::write(path, bytes).unwrap();
    }
    let manifest = Manifest {
        dir: dir.path().to_path_buf(),
        shards,
        shard_bytes: files.iter().map(|bytes| bytes.len() as u64).collect(),
        trunk,
        experts: None,
        ignored: Vec::new(),
    };
    (dir, manifest)
}

fn stored(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 37 + number * 11 + at / 253) as u8 & 0x7b).collect()
}

fn load(manifest: &Manifest, direct: bool) -> Trunk {
    Trunk::load(manifest, TrunkFormat::Bf16, None, direct, &Silent, &Interrupt::new()).unwrap()
}

const LAYOUTS: &[&[Stored]] = &[
    &[],
    &[(Dtype::F32, &[0], 0, 10)],
    &[(Dtype::Bf16, &[3, 5], 0, 7)],
    &[(Dtype::F32, &[1, 33], 1, 4093), (Dtype::Bf16, &[], 0, 1)],
    // Adjacent, out of order, with gaps small and large, over several chunks.
    &[
        (Dtype::Bf16, &[1500, 1501], 0, 1_000_001),
        (Dtype::F32, &[96, 1, 4], 0, 100),
        (Dtype::F32, &[128], 0, 100 + 1536),
        (Dtype::F16, &[1001, 1003], 0, 9_000_003),
        (Dtype::F16, &[3], 0, 9_000_003 + 2 * 1001 * 1003),
        (Dtype::Bf16, &[2048, 1024], 1, 4096),
        (Dtype::F16, &[4 << 20], 1, 4_198_401),
        (Dtype::F32, &[1], 1, 4_198_401 + (8 << 20)),
    ],
];

#[test]
fn every_tensor_is_resident_byte_for_byte() {
    for tensors in LAYOUTS {
        let (_dir, manifest) = model(tensors);
        for direct in [true, false] {
            let trunk = load(&manifest, direct);
            assert_eq!(trunk.resident_bytes(), Trunk::planned_bytes(&manifest, TrunkFormat::Bf16, None));
            assert_eq!(trunk.names().count(), tensors.len());
            for (number, (dtype, shape, ..)) in tensors.iter().enumerate() {
                let tensor = trunk.get(&format!("tensor.{number}")).unwrap();
                assert_eq!(tensor.shape, *shape);
                let expected = stored(number, shape.iter().product::<usize>() * dtype.size());
                if *dtype == Dtype::F16 {
                    assert_eq!(tensor.dtype, Dtype::F32);
                    let halves = expected.as_chunks::<2>().0;
                    let floats: Vec<f32> =
                        halves.iter().map(|half| tensor::widen_f16(u16::from_le_bytes(*half))).collect();
                    assert!(tensor.to_f32() == floats, "tensor {number}");
                } else {
                    assert_eq!(tensor.dtype, *dtype);
                    assert!(tensor.bytes() == expected, "tensor {number}");
                }
                assert_eq!(tensor.bytes().as_ptr() as usize % 64, 0);
            }
            assert!(trunk.get("tensor").is_none());
            // A file system may refuse direct reads, and is then named once.
            assert!(trunk.notices().len() <= usize::from(direct), "{:?}", trunk.notices());
        }
    }
}

#[test]
fn a_matrix_is_the_first_dimension_against_the_others() {
    let shapes: [(&'static [usize], usize, usize); 6] =
        [(&[6, 4], 6, 4), (&[1, 24], 1, 24), (&[6, 1, 4], 6, 4), (&[1, 1, 24, 1], 1, 24), (&[24], 1, 24), (&[], 1, 1)];
    for (shape, rows, cols) in shapes {
        let (_dir, manifest) = model(&[(Dtype::Bf16, shape, 0, 3)]);
        let tensor = load(&manifest, true).get("tensor.0").unwrap();
        let matrix = tensor.matrix();
        assert_eq!((matrix.rows, matrix.cols), (rows, cols));
        assert!(matches!(matrix.weights, Weights::Bf16(bytes) if bytes.len() == 2 * rows * cols));
    }
}

#[test]
fn values_widen_exactly() {
    let (_dir, manifest) = model(&[(Dtype::Bf16, &[2], 0, 0), (Dtype::F32, &[1], 0, 4)]);
    std::fs::write(&manifest.shards[0], [0x80, 0x3f, 0x01, 0x80, 0xdb, 0x0f, 0x49, 0x40]).unwrap();
    let trunk = load(&manifest, false);
    let bf16 = trunk.get("tensor.0").unwrap().to_f32();
    assert_eq!(bf16.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), [0x3f80_0000, 0x8001_0000]);
    assert_eq!(trunk.get("tensor.1").unwrap().to_f32(), [std::f32::consts::PI]);
}

#[test]
fn progress_starts_at_nothing_grows_and_ends_at_all() {
    let (_dir, manifest) = model(LAYOUTS[4]);
    let recorded = Recorded::default();
    Trunk::load(&manifest, TrunkFormat::Bf16, None, true, &recorded, &Interrupt::new()).unwrap();
    let calls = recorded.0.into_inner();
    let total = manifest.trunk.iter().map(|tensor| tensor.span.len).sum();
    assert_eq!(calls.first(), Some(&(0, total)));
    assert_eq!(calls.last(), Some(&(total, total)));
    assert!(calls.windows(2).all(|pair| pair[0].0 <= pair[1].0));
}

#[test]
fn an_interrupt_ends_the_load() {
    struct Raise(Interrupt);
    impl LoadProgress for Raise {
        fn loaded(&self, _: u64, _: u64) {
            self.0.raise(15);
        }
    }
    let (_dir, manifest) = model(LAYOUTS[4]);
    let interrupt = Interrupt::new();
    let error =
        Trunk::load(&manifest, TrunkFormat::Bf16, None, true, &Raise(interrupt.clone()), &interrupt).unwrap_err();
    assert_eq!(error.kind(), Kind::Interrupted(15));
}

#[test]
fn a_file_that_was_cut_is_named() {
    let (_dir, manifest) = model(LAYOUTS[4]);
    let file = std::fs::File::options().write(true).open(&manifest.shards[1]).unwrap();
    file.set_len(5_000_000).unwrap();
    let error = Trunk::load(&manifest, TrunkFormat::Bf16, None, true, &Silent, &Interrupt::new()).unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    for part in ["two", "offset", "wanted", "got", "end of file"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    std::fs::remove_file(&manifest.shards[1]).unwrap();
    let error = Trunk::load(&manifest, TrunkFormat::Bf16, None, true, &Silent, &Interrupt::new()).unwrap_err();
    assert!(error.kind() == Kind::Model && error.message().contains("two"), "{error}");
}

#[test]
fn what_a_checked_manifest_rules_out_is_refused_by_name() {
    let bad: [fn(&mut TrunkTensor); 5] = [
        |tensor| tensor.dtype = Dtype::U8,
        |tensor| tensor.shape = vec![usize::MAX, usize::MAX],
        |tensor| tensor.span.offset = u64::MAX - 1,
        |tensor| tensor.span.shard = 9,
        |tensor| tensor.span.len += 2,
    ];
    for (number, spoil) in bad.iter().enumerate() {
        let (_dir, mut manifest) = model(&[(Dtype::Bf16, &[3, 5], 0, 7)]);
        spoil(&mut manifest.trunk[0]);
        let error = Trunk::load(&manifest, TrunkFormat::Bf16, None, true, &Silent, &Interrupt::new()).unwrap_err();
        assert!(error.kind() == Kind::Model && error.message().starts_with("tensor.0: "), "{number}: {error}");
    }
}
