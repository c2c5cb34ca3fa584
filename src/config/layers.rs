//! `kda_layers` and `full_attn_layers`, counted from 1 in the file, to one kind a layer, counted from 0.

use super::AttentionKind;
use super::json::Json;
use super::section::Section;

/// Reads both lists of `linear`, which together must name each of the layers 1 to `layers` once.
pub(super) fn attention_kinds(linear: &Section<'_>, layers: usize) -> Result<Vec<AttentionKind>, String> {
    let mut kinds: Vec<Option<AttentionKind>> = vec![None; layers];
    for (key, kind) in [("kda_layers", AttentionKind::Kda), ("full_attn_layers", AttentionKind::Mla)] {
        for item in linear.list(key, "a list of layers, counted from 1")? {
            let layer = layer_number(linear, key, item, layers)?;
            match kinds[layer - 1].replace(kind) {
                None => {}
                Some(first) if first == kind => {
                    return Err(format!("{}: layer {layer} occurs twice", linear.path(key)));
                }
                Some(_) => {
                    let (kda, mla) = (linear.path("kda_layers"), linear.path("full_attn_layers"));
                    return Err(format!("layer {layer} is in both {kda} and {mla}"));
                }
            }
        }
    }
    kinds.iter().enumerate().map(|(index, kind)| kind.ok_or_else(|| hole(linear, &kinds, index))).collect()
}

fn layer_number(linear: &Section<'_>, key: &str, item: &Json, layers: usize) -> Result<usize, String> {
    linear
        .as_int(key, item, 1..=layers as u64)
        .map_err(|message| format!("{message}; layers are counted from 1 and num_hidden_layers is {layers}"))
}

fn hole(linear: &Section<'_>, kinds: &[Option<AttentionKind>], first: usize) -> String {
    let (kda, mla) = (linear.path("kda_layers"), linear.path("full_attn_layers"));
    let count = kinds.iter().filter(|kind| kind.is_none()).count();
    let others = if count > 1 { format!(" (nor are {} others)", count - 1) } else { String::new() };
    format!("layer {} is in neither {kda} nor {mla}{others}", first + 1)
}
