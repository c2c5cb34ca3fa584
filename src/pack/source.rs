//! Experts as they are read for packing: from the shards, or from a root that has them, laid out as in an expert file.

use std::path::Path;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::{ExpertFormat, ExpertTable, MOVED, Manifest};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::packed::{Layout, expert_path, read_whole};
use crate::store::{ALIGN, ExpertId, Files, Names, Region, System, Tally, Volumes, reserved_scale};

/// Bytes of one read from a shard.
const PIECE_BYTES: usize = 4 << 20;

/// The shards, open for reading.
pub(super) struct Shards<'m> {
    manifest: &'m Manifest,
    table: &'m ExpertTable,
    pub(super) layout: Layout,
    volumes: Volumes,
}

/// Memory that one thread reads into.
pub(super) struct Buffers {
    expert: Region,
    piece: Region,
    again: Region,
    bytes: usize,
}

impl Buffers {
    /// For expert files laid out as in `layout`.
    ///
    /// # Errors
    /// Kind `Memory`.
    pub(super) fn new(layout: &Layout) -> Result<Self> {
        let bytes = usize::try_from(layout.file_bytes).unwrap_or(usize::MAX);
        let region = |bytes| Region::allocate(bytes, "the buffers of a pack");
        Ok(Self { expert: region(bytes)?, piece: region(PIECE_BYTES)?, again: region(bytes)?, bytes })
    }

    /// The expert that was read last.
    pub(super) fn expert(&self) -> &[u8] {
        &self.expert[..self.bytes]
    }

    /// Reads the expert file at `path` beside the expert, and gives both.
    ///
    /// # Errors
    /// Kind `Io`: it is not whole, or cannot be read.
    pub(super) fn read_file(&mut self, path: &Path, id: ExpertId) -> Result<(&[u8], &[u8])> {
        read_whole(path, &mut self.again[..self.bytes], true)
            .map_err(|e| e.into_error(Kind::Io, format_args!("expert {id}")))?;
        Ok((&self.expert[..self.bytes], &self.again[..self.bytes]))
    }

    /// Reads the expert from the file at `path`, whatever is in it.
    ///
    /// # Errors
    /// Kind `Io`: it is not whole, or cannot be read.
    pub(super) fn read_alone(&mut self, path: &Path, id: ExpertId) -> Result<()> {
        read_whole(path, &mut self.expert[..self.bytes], true)
            .map_err(|e| e.into_error(Kind::Io, format_args!("expert {id}")))
    }

    /// Reads the expert from its file under `root`, which must have `checksum`.
    ///
    /// # Errors
    /// Kind `Io` when it cannot be read, `Model` when it is damaged.
    pub(super) fn read_from_root(&mut self, root: &Path, id: ExpertId, checksum: u64, parts: usize) -> Result<()> {
        let path = expert_path(root, id, parts);
        self.read_alone(&path, id)?;
        if xxh3_64(self.expert()) == checksum { Ok(()) } else { Err(damaged(&path, id)) }
    }
}

/// The error of a file whose bytes are not those that were written.
pub(super) fn damaged(path: &Path, id: ExpertId) -> Error {
    Error::model(format!("{}: expert {id} is damaged: its checksum does not match", path.display()))
        .hint("remove that file and pack again: it is written anew from another copy")
}

impl<'m> Shards<'m> {
    /// Opens the shards that hold any of `experts`. They stay open, and keep their space, until this is dropped.
    ///
    /// # Errors
    /// Kind `Model` for a shard that cannot be opened; `Io` for one that cannot be read.
    pub(super) fn open(
        manifest: &'m Manifest,
        table: &'m ExpertTable,
        experts: impl Iterator<Item = ExpertId>,
    ) -> Result<Self> {
        let mut used = vec![false; manifest.shards.len()];
        for place in experts.flat_map(|id| table.places(id.layer, id.expert).unwrap_or_default()) {
            if place.0 != MOVED {
                used[usize::from(place.0)] = true;
            }
        }
        let used: Vec<usize> = (0..used.len()).filter(|shard| used[*shard]).collect();
        let files = Files::new(Arc::new(System), Names::of_shards(manifest), 16);
        let volumes = Volumes::open(&Arc::new(files), &used, true)?;
        Ok(Self { manifest, table, layout: Layout::of(table), volumes })
    }

    /// Parts of an expert.
    pub(super) fn parts(&self) -> usize {
        self.table.format.parts()
    }

    /// Reads an expert that [`ExpertTable::is_in_shards`] into `buffers` and checks its scales.
    ///
    /// # Errors
    /// Kind `Io` for a failed read, `Model` for a reserved scale, naming shard and offset; `Interrupted`.
    pub(super) fn read(&self, id: ExpertId, buffers: &mut Buffers, interrupt: &Interrupt) -> Result<()> {
        let places = self.table.places(id.layer, id.expert).unwrap_or_default();
        buffers.expert.fill(0);
        for (part, (&(shard, offset), &len)) in places.iter().zip(&self.table.part_bytes).enumerate() {
            let start = self.layout.part_offsets[part] as usize;
            let bytes = &mut buffers.expert[start..start + len as usize];
            self.read_span(usize::from(shard), offset, bytes, &mut buffers.piece, id, interrupt)?;
            let is_scales = self.table.format == ExpertFormat::Mxfp4 && part % 2 == 1;
            if is_scales && let Some(at) = reserved_scale(bytes) {
                let shard = self.manifest.shards[usize::from(shard)].display();
                return Err(Error::model(format!(
                    "{shard}: expert {id}: the scale at offset {} is the reserved value 255",
                    offset + at as u64
                ))
                .hint("the shard is damaged: download it again"));
            }
        }
        Ok(())
    }

    fn read_span(
        &self,
        shard: usize,
        offset: u64,
        bytes: &mut [u8],
        piece: &mut Region,
        id: ExpertId,
        interrupt: &Interrupt,
    ) -> Result<()> {
        let volume = &self.volumes.list[usize::from(self.volumes.of_file[shard])];
        let mut done = 0;
        while done < bytes.len() {
            interrupt.check()?;
            let from = offset + done as u64;
            let skipped = (from % ALIGN as u64) as usize;
            let count = (piece.len() - skipped).min(bytes.len() - done);
            let needed = skipped + count;
            let page = from - skipped as u64;
            volume
                .read(shard, &mut piece[..needed.next_multiple_of(ALIGN)], page, needed, &mut Tally::default())
                .map_err(|e| e.into_error(Kind::Io, format_args!("expert {id}")))?;
            bytes[done..done + count].copy_from_slice(&piece[skipped..needed]);
            done += count;
        }
        Ok(())
    }
}
