//! One safetensors header: read within bounds, every claim checked against the file's length, no weights touched.
//!
//! Format: u64 little-endian header length, that many bytes of JSON, then the data; offsets count from the data's
//! start. Source: the `safetensors` format description.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use rustc_hash::FxHashMap;
use safetensors::Dtype;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use super::names::{ExpertPart, Name, Prefixes, shown};
use crate::config::{check_is_file, lfs_pointer};

/// As the format has it; a longer header is damage, and must not be allocated.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A tensor as its header describes it.
pub(super) struct Entry<'a> {
    /// As in the header.
    pub(super) full_name: &'a str,
    pub(super) name: Name<'a>,
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [u64],
    /// From the start of the file.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// Reads the header of `path` and hands each tensor to `each`; gives the file's length.
///
/// An error says what is wrong with the file, without naming it; `each` may have been called before.
pub(super) fn read(path: &Path, prefixes: &mut Prefixes, each: &mut dyn FnMut(&Entry<'_>)) -> Result<u64, String> {
    let len = check_is_file(path)?;
    let (file, data_start) = open(path, len)?;
    let mut reader = Reader { data_start, prefixes, each, seen: Seen::default(), shape: Vec::new() };
    // Parsed as it is read: a header that is damage all through costs no memory of its size.
    let json = BufReader::with_capacity(1 << 18, file.take(data_start - 8));
    let mut deserializer = serde_json::Deserializer::from_reader(json);
    (&mut reader)
        .deserialize(&mut deserializer)
        .and_then(|()| deserializer.end())
        .map_err(|e| format!("its header is damaged: {e}"))?;
    let data_bytes = reader.seen.check()?;
    let needs = data_start.checked_add(data_bytes).ok_or("its header claims more bytes than any file has")?;
    match len.cmp(&needs) {
        std::cmp::Ordering::Equal => Ok(len),
        std::cmp::Ordering::Less => Err(format!("has {len} bytes, needs {needs}")),
        std::cmp::Ordering::Greater => Err(format!("has {len} bytes, but its header accounts for {needs}")),
    }
}

/// The file, at the start of its header's JSON, and where the data starts: both known to lie in the file.
fn open(path: &Path, len: u64) -> Result<(File, u64), String> {
    let failed = |e: std::io::Error| format!("cannot be read: {e}");
    let mut file = File::open(path).map_err(failed)?;
    // A pointer has about 130 bytes.
    let mut head = Vec::with_capacity(512);
    file.by_ref().take(512).read_to_end(&mut head).map_err(failed)?;
    if let Some(size) = lfs_pointer(&head) {
        let needs = size.map_or(String::new(), |size| format!(", needs {size}"));
        return Err(format!("is a Git-LFS pointer, not the file itself: has {len} bytes{needs}"));
    }
    let Some(header_len) = head.first_chunk().map(|b| u64::from_le_bytes(*b)) else {
        return Err(format!("has {len} bytes, needs at least 8 for the length of its header"));
    };
    if header_len > HEADER_BYTES_MAX {
        return Err(format!(
            "is damaged or no safetensors file: it claims a header of {header_len} bytes, where at most \
             {HEADER_BYTES_MAX} are allowed"
        ));
    }
    let data_start = 8 + header_len;
    if len < data_start {
        return Err(format!("has {len} bytes, needs at least {data_start} for its header alone"));
    }
    if header_len == 0 || head.get(8) != Some(&b'{') {
        return Err("is damaged or no safetensors file: its header does not begin with {".into());
    }
    file.seek(SeekFrom::Start(8)).map_err(failed)?;
    Ok((file, data_start))
}

/// What the tensors of one header must satisfy together. Offsets here count from the data's start.
#[derive(Default)]
struct Seen {
    experts: Vec<(ExpertPart, u64)>,
    others: FxHashMap<String, u64>,
    /// Begin and end of each tensor.
    spans: Vec<(u64, u64)>,
    repeated: Option<String>,
}

impl Seen {
    fn add(&mut self, entry: &Entry<'_>, begin: u64) {
        self.spans.push((begin, begin + entry.len));
        match entry.name {
            Name::Expert(part) => self.experts.push((part, begin)),
            _ => {
                if let Some(first) = self.others.insert(entry.full_name.to_owned(), begin) {
                    self.repeated.get_or_insert_with(|| twice(entry.full_name, first, begin));
                }
            }
        }
    }

    /// Refuses repeated names, overlaps and holes; gives the bytes of data that the tensors fill.
    fn check(&mut self) -> Result<u64, String> {
        self.experts.sort_unstable();
        if let Some(pair) = self.experts.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(twice(&pair[0].0.to_string(), pair[0].1, pair[1].1));
        }
        if let Some(message) = self.repeated.take() {
            return Err(message);
        }
        self.spans.sort_unstable();
        let (mut end, mut before) = (0, None);
        for &(begin, next_end) in &self.spans {
            if begin > end {
                return Err(format!(
                    "its header is damaged: data bytes {end} to {begin}, before {}, belong to no tensor",
                    self.name_at(begin)
                ));
            }
            if begin < end {
                return Err(format!(
                    "its header is damaged: {} and {} overlap at data byte {begin}",
                    before.map_or_else(String::new, |b| self.name_at(b)),
                    self.name_at(begin)
                ));
            }
            // An empty tensor lies before the one that begins where it does.
            (end, before) = (next_end, Some(begin));
        }
        Ok(end)
    }

    fn name_at(&self, begin: u64) -> String {
        let expert = self.experts.iter().find(|(_, at)| *at == begin).map(|(part, _)| part.to_string());
        expert
            .or_else(|| self.others.iter().find(|(_, at)| **at == begin).map(|(name, _)| shown(name)))
            .unwrap_or_else(|| format!("the tensor at {begin}"))
    }
}

fn twice(name: &str, first: u64, second: u64) -> String {
    format!("its header is damaged: {} occurs twice, at data bytes {first} and {second}", shown(name))
}

struct Reader<'r> {
    data_start: u64,
    prefixes: &'r mut Prefixes,
    each: &'r mut dyn FnMut(&Entry<'_>),
    seen: Seen,
    shape: Vec<u64>,
}

impl Reader<'_> {
    /// Checks one tensor's own claims and passes it on.
    fn tensor(&mut self, full_name: &str, dtype: Dtype, begin: u64, end: u64) -> Result<(), String> {
        let len = end.checked_sub(begin).ok_or_else(|| format!("data_offsets [{begin}, {end}] are reversed"))?;
        let bits = self.shape.iter().try_fold(dtype.bitsize() as u64, |bits, dim| bits.checked_mul(*dim));
        if bits.is_none_or(|bits| !bits.is_multiple_of(8) || bits / 8 != len) {
            let needs = bits.map_or("more than any file".into(), |bits| (bits / 8).to_string());
            let shape = &self.shape;
            return Err(format!("{shape:?} of {dtype} has {needs} bytes, but data_offsets span {len}"));
        }
        let offset = self.data_start.checked_add(end).map(|end| end - len).ok_or("data_offsets beyond any file")?;
        let name = self.prefixes.classify(full_name);
        let entry = Entry { full_name, name, dtype, shape: &self.shape, offset, len };
        (self.each)(&entry);
        self.seen.add(&entry, begin);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Reader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Reader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with one entry a tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut name = String::new();
        let mut has_metadata = false;
        while map.next_key_seed(TextInto(&mut name))?.is_some() {
            if name == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(de::Error::custom("__metadata__ occurs twice"));
                }
                map.next_value_seed(Metadata)?;
                continue;
            }
            let in_tensor = |e: &dyn fmt::Display| de::Error::custom(format!("{}: {e}", shown(&name)));
            let (dtype, begin, end) = map.next_value_seed(Description(&mut self.shape)).map_err(|e| in_tensor(&e))?;
            self.tensor(&name, dtype, begin, end).map_err(|e| in_tensor(&e))?;
        }
        Ok(())
    }
}

/// `__metadata__`: texts by name. Nothing here needs them, but a name that occurs twice is damage here too.
struct Metadata;

impl<'de> DeserializeSeed<'de> for Metadata {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("texts by name in __metadata__")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<IgnoredAny>()?;
            if let Some(key) = keys.replace(key) {
                return Err(de::Error::custom(format!("{} occurs twice in __metadata__", shown(&key))));
            }
        }
        Ok(())
    }
}

/// Reads a text into the buffer, so that half a million names cost no allocation each.
struct TextInto<'s>(&'s mut String);

impl<'de> DeserializeSeed<'de> for TextInto<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for TextInto<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.0.clear();
        self.0.push_str(text);
        Ok(())
    }
}

/// `{"dtype": …, "shape": […], "data_offsets": [begin, end]}`, each exactly once; the shape goes into the buffer.
struct Description<'s>(&'s mut Vec<u64>);

impl<'de> DeserializeSeed<'de> for Description<'_> {
    type Value = (Dtype, u64, u64);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Description<'_> {
    type Value = (Dtype, u64, u64);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let mut key = String::new();
        while map.next_key_seed(TextInto(&mut key))?.is_some() {
            let repeated = match key.as_str() {
                "dtype" => {
                    let mut text = String::new();
                    map.next_value_seed(TextInto(&mut text))?;
                    dtype.replace(parse_dtype(&text).map_err(de::Error::custom)?).is_some()
                }
                "shape" => shape.replace(map.next_value_seed(NumbersInto(self.0))?).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<(u64, u64)>()?).is_some(),
                other => return Err(de::Error::custom(format!("unknown key {:?}", shown(other)))),
            };
            if repeated {
                return Err(de::Error::custom(format!("{key} occurs twice")));
            }
        }
        let dtype = dtype.ok_or_else(|| de::Error::missing_field("dtype"))?;
        let () = shape.ok_or_else(|| de::Error::missing_field("shape"))?;
        let (begin, end) = offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?;
        Ok((dtype, begin, end))
    }
}

fn parse_dtype(text: &str) -> Result<Dtype, String> {
    let deserializer: de::value::StrDeserializer<'_, de::value::Error> = text.into_deserializer();
    serde::Deserialize::deserialize(deserializer).map_err(|_| format!("unknown dtype {:?}", shown(text)))
}

/// Reads a list of whole numbers into the buffer.
struct NumbersInto<'s>(&'s mut Vec<u64>);

impl<'de> DeserializeSeed<'de> for NumbersInto<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for NumbersInto<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        self.0.clear();
        while let Some(n) = seq.next_element()? {
            self.0.push(n);
        }
        Ok(())
    }
}
