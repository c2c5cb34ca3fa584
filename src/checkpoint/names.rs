//! Tensor names: which belong to routed experts, which to the trunk, which are left alone; with and without prefix.

use std::fmt;

/// Put before every name of the text model in the released K3; Kimi-Linear has none.
const PREFIX: &str = "language_model.";

/// Tensors of the vision half, left alone on purpose.
const IGNORED: [&str; 2] = ["vision_tower.", "mm_projector."];

/// Suffixes of an expert's tensors, numbered: first the MXFP4 parts, then the plain ones, each in the order in which
/// an expert is read.
pub(super) const PART_SUFFIXES: [&str; 9] = [
    "w1.weight_packed",
    "w1.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w1.weight",
    "w3.weight",
    "w2.weight",
];

/// Number of the first plain part in [`PART_SUFFIXES`].
pub(super) const FIRST_PLAIN_PART: u8 = 6;

/// One tensor of one routed expert, in eight bytes: half a million of them must fit in little memory. Sorts by layer,
/// then expert, then part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ExpertPart(u64);

impl ExpertPart {
    pub(super) fn new(layer: u16, expert: u16, part: u8) -> Self {
        Self(u64::from(layer) << 32 | u64::from(expert) << 16 | u64::from(part))
    }

    pub(super) fn layer(self) -> u16 {
        (self.0 >> 32) as u16
    }

    pub(super) fn expert(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Index into [`PART_SUFFIXES`].
    pub(super) fn part(self) -> u8 {
        self.0 as u8
    }
}

/// The tensor's name, without prefix.
impl fmt::Display for ExpertPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = PART_SUFFIXES[usize::from(self.part())];
        write!(f, "model.layers.{}.block_sparse_moe.experts.{}.{suffix}", self.layer(), self.expert())
    }
}

/// What a tensor name says about its tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name<'a> {
    /// A routed expert's.
    Expert(ExpertPart),
    /// The vision half's.
    Ignored,
    /// Any other; the name without prefix.
    Other(&'a str),
}

/// One name with and one without prefix, to tell when a checkpoint mixes them.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    with: Option<String>,
    without: Option<String>,
}

impl Prefixes {
    /// Sorts `full` into its kind and remembers whether it had the prefix.
    pub(super) fn classify<'a>(&mut self, full: &'a str) -> Name<'a> {
        if is_ignored(full) {
            return Name::Ignored;
        }
        let (seen, bare) = match full.strip_prefix(PREFIX) {
            Some(bare) => (&mut self.with, bare),
            None => (&mut self.without, full),
        };
        if seen.is_none() {
            *seen = Some(full.to_owned());
        }
        expert_part(bare).map_or(Name::Other(bare), Name::Expert)
    }

    /// A line about the mixture, if there is one.
    pub(super) fn mixture(&self) -> Option<String> {
        let (with, without) = (self.with.as_ref()?, self.without.as_ref()?);
        Some(format!(
            "tensor names with and without the prefix {PREFIX:?} are mixed: {} and {}",
            shown(with),
            shown(without)
        ))
    }
}

/// Whether `full` is left alone on purpose.
pub(super) fn is_ignored(full: &str) -> bool {
    IGNORED.iter().any(|prefix| full.starts_with(prefix))
}

/// `full` without the prefix.
pub(super) fn bare(full: &str) -> &str {
    full.strip_prefix(PREFIX).unwrap_or(full)
}

/// The layer in `model.layers.N.…`, with or without prefix.
pub(super) fn layer(name: &str) -> Option<u16> {
    number(bare(name).strip_prefix("model.layers.")?).map(|(layer, _)| layer)
}

/// A name as a message shows it: escaped where odd, cut where long.
pub(super) fn shown(name: &str) -> String {
    const SHOWN: usize = 160;
    let cut: String = name.chars().take(SHOWN).flat_map(char::escape_default).collect();
    if name.chars().nth(SHOWN).is_some() { format!("{cut}…") } else { cut }
}

fn expert_part(bare: &str) -> Option<ExpertPart> {
    let (layer, rest) = number(bare.strip_prefix("model.layers.")?)?;
    let (expert, suffix) = number(rest.strip_prefix("block_sparse_moe.experts.")?)?;
    let part = PART_SUFFIXES.iter().position(|known| *known == suffix)?;
    Some(ExpertPart::new(layer, expert, part as u8))
}

/// The number before the first dot and what follows it. Only as Python prints it: `01` or `+1` would let two names
/// stand for one tensor.
fn number(text: &str) -> Option<(u16, &str)> {
    let (digits, rest) = text.split_once('.')?;
    let canonical = digits.bytes().all(|b| b.is_ascii_digit()) && (digits.len() == 1 || !digits.starts_with('0'));
    if canonical { Some((digits.parse().ok()?, rest)) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_names_survive_the_round_trip() {
        for part in 0..PART_SUFFIXES.len() as u8 {
            let whole = ExpertPart::new(92, 895, part);
            let mut prefixes = Prefixes::default();
            assert_eq!(prefixes.classify(&whole.to_string()), Name::Expert(whole));
            assert_eq!(prefixes.classify(&format!("language_model.{whole}")), Name::Expert(whole));
            assert!(prefixes.mixture().is_some());
        }
    }

    #[test]
    fn only_canonical_numbers_name_an_expert() {
        for odd in ["01", "+1", "", "1_0", "65536", "-1", "1 "] {
            let name = format!("model.layers.1.block_sparse_moe.experts.{odd}.w1.weight");
            assert_eq!(Prefixes::default().classify(&name), Name::Other(&name));
        }
    }

    #[test]
    fn vision_is_left_alone_whatever_the_prefix_of_the_rest() {
        let mut prefixes = Prefixes::default();
        assert_eq!(prefixes.classify("vision_tower.a"), Name::Ignored);
        assert_eq!(prefixes.classify("mm_projector.proj.0.weight"), Name::Ignored);
        assert_eq!(prefixes.classify("language_model.lm_head.weight"), Name::Other("lm_head.weight"));
        assert_eq!(prefixes.mixture(), None);
    }

    #[test]
    fn odd_names_are_shown_escaped_and_cut() {
        assert_eq!(shown("a\n\u{1b}"), "a\\n\\u{1b}");
        assert!(shown(&"x".repeat(1 << 20)).len() < 200);
    }
}
