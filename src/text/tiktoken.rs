//! `tiktoken.model`: one line a token, its bytes in base64 and its rank, which is its id. Control slots follow the
//! ranks.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::bpe::RankIndex;
use super::files::{read, read_json_if_there};
use super::tokenizer::Added;
use super::tokenizer_config::{NamedSlot, TokenizerConfig};
use super::tokens::TokenTable;
use crate::error::{Error, Result};

/// Ranks in the released file.
const K3_RANKS: u32 = 163_584;
/// Slots after the ranks in the official tokenizer (`num_reserved_special_tokens`).
const SLOTS_MAX: u32 = 256;

/// The slots that K3's `tokenizer_config.json` names, and whether decoding may leave them out.
const K3_SLOTS: [(u32, &str, bool); 16] = [
    (163_584, "[BOS]", true),
    (163_585, "[EOS]", true),
    (163_586, "<|end_of_msg|>", true),
    (163_587, "<|open|>", false),
    (163_588, "<|close|>", false),
    (163_589, "<|sep|>", false),
    (163_590, "[start_header_id]", true),
    (163_591, "[end_header_id]", true),
    (163_593, "[EOT]", true),
    (163_602, "<|media_begin|>", true),
    (163_603, "<|media_content|>", true),
    (163_604, "<|media_end|>", true),
    (163_605, "<|media_pad|>", true),
    (163_649, "<osagent_mode>", true),
    (163_838, "[UNK]", true),
    (163_839, "[PAD]", true),
];

/// A rank file with its control slots.
pub struct Ranks {
    /// Bytes of the ranks; slots are not in it.
    pub tokens: TokenTable,
    /// Ranks by bytes.
    pub index: RankIndex,
    /// Every control slot, named or reserved.
    pub slots: Vec<Added>,
}

/// Reads `file` and names its slots after the `tokenizer_config.json` beside it.
///
/// Without that file the released vocabulary gets K3's names, unless a `config.json` beside it says that the model is
/// not K3 (K2 and Kimi-Linear share the ranks, but not the names); any other vocabulary gets reserved spellings only.
/// With no `vocab_size`, slots that are neither named nor K3's do not exist.
///
/// # Errors
/// Kind `Model`, naming file and line, for a damaged file, and for ranks, slots and `vocab_size` that cannot belong
/// together.
pub fn load(file: &Path, vocab_size: Option<usize>) -> Result<Ranks> {
    let bytes = read(file)?;
    let (tokens, index) = parse(&bytes).map_err(|error| error.context(file.display()))?;
    let ranks = tokens.len() as u32;
    let dir = file.parent().unwrap_or(Path::new(""));
    let config = TokenizerConfig::load(dir)?;
    let names = match &config {
        Some(config) => config.slots.clone(),
        None if ranks == K3_RANKS && may_be_k3(dir)? => k3_names(),
        None => Vec::new(),
    };
    let slots = slots(&tokens, vocab_size, &names).map_err(|error| match &config {
        Some(config) => error.context(format!("{} with {}", file.display(), config.file.display())),
        None => error.context(file.display()),
    })?;
    Ok(Ranks { tokens, index, slots })
}

fn k3_names() -> Vec<NamedSlot> {
    let named = |(id, content, special): (u32, &str, bool)| NamedSlot { id, content: content.to_owned(), special };
    K3_SLOTS.into_iter().map(named).collect()
}

fn may_be_k3(dir: &Path) -> Result<bool> {
    let config = read_json_if_there(&dir.join("config.json"))?;
    Ok(config.is_none_or(|config| config.get("model_type").is_none_or(|kind| kind == "kimi_k3")))
}

fn parse(bytes: &[u8]) -> Result<(TokenTable, RankIndex)> {
    let lines = || bytes.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let numbered = || (1usize..).zip(lines()).filter(|(_, line)| !line.is_empty());
    let count = numbered().count() as u32;
    let mut tokens = TokenTable::with_capacity(count as usize, bytes.len() / 2);
    let mut token = Vec::new();
    for (number, line) in numbered() {
        let rank = parse_line(line, &mut token).map_err(|error| error.context(format!("line {number}")))?;
        if rank >= count {
            return Err(Error::model(format!(
                "line {number}: rank {rank}, but {count} lines can only hold ranks 0 to {}",
                count - 1
            ))
            .hint("lines are missing: download the file again"));
        }
        if !tokens.insert(rank, &token) {
            return Err(Error::model(format!("line {number}: rank {rank} a second time"))
                .hint("the file is damaged: download it again"));
        }
    }
    if count == 0 {
        return Err(Error::model("no line holds a token"));
    }
    let index = RankIndex::new(&tokens, count)
        .map_err(|(first, second)| Error::model(format!("ranks {first} and {second} have the same bytes")))?;
    if let Some(byte) = (0..=255u8).find(|byte| index.rank(&tokens, &[*byte]).is_none()) {
        return Err(Error::model(format!("no rank for the single byte {byte:#04x}: expected all 256"))
            .hint("the file is cut short or not a byte-level vocabulary: download it again"));
    }
    Ok((tokens, index))
}

/// Fills `token` and returns its rank.
fn parse_line(line: &[u8], token: &mut Vec<u8>) -> Result<u32> {
    let shown = || String::from_utf8_lossy(&line[..line.len().min(40)]).into_owned();
    let space = line.iter().position(|byte| *byte == b' ');
    let (base64, rank) = line.split_at(space.ok_or_else(|| {
        Error::model(format!("expected base64, a space and a rank, found `{}`", shown().escape_debug()))
    })?);
    token.clear();
    STANDARD
        .decode_vec(base64, token)
        .map_err(|error| Error::model(format!("bad base64 in `{}`: {error}", shown().escape_debug())))?;
    if token.is_empty() {
        return Err(Error::model("a token without bytes"));
    }
    let digits = &rank[1..];
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let rank = std::str::from_utf8(digits).ok().filter(|_| all_digits).and_then(|digits| digits.parse().ok());
    rank.ok_or_else(|| Error::model(format!("expected a decimal rank, found `{}`", shown().escape_debug())))
}

/// The slots after the ranks: named, or `<|reserved_token_{id}|>`.
fn slots(tokens: &TokenTable, vocab_size: Option<usize>, names: &[NamedSlot]) -> Result<Vec<Added>> {
    let ranks = tokens.len() as u32;
    // Some configurations list ordinary tokens too; they must be the same tokens.
    let (in_ranks, named): (Vec<_>, Vec<_>) = names.iter().partition(|slot| slot.id < ranks);
    if let Some(slot) = in_ranks.iter().find(|slot| tokens.get(slot.id) != Some(slot.content.as_bytes())) {
        return Err(Error::model(format!("id {} is named `{}`, but is one of {ranks} ranks", slot.id, slot.content)));
    }
    let end = match vocab_size {
        Some(vocab_size) => end_of_slots(ranks, vocab_size)?,
        None if ranks == K3_RANKS => ranks + SLOTS_MAX,
        None => named.last().map_or(ranks, |slot| slot.id + 1),
    };
    if let Some(slot) = named.iter().find(|slot| slot.id >= end) {
        let (id, content) = (slot.id, &slot.content);
        return Err(Error::model(format!("`{content}` has id {id}, outside the vocabulary of {end} ids")));
    }
    if end - ranks > SLOTS_MAX {
        return Err(too_many_slots(ranks, end as usize));
    }
    if let Some(first) = named.first().filter(|first| first.id != ranks && end - ranks != SLOTS_MAX) {
        let (id, content) = (first.id, &first.content);
        return Err(Error::model(format!("{ranks} ranks, but the first control token is `{content}` with id {id}"))
            .hint("lines are missing: download tiktoken.model again"));
    }
    let mut named = named.into_iter().peekable();
    let slot = |id| match named.next_if(|slot| slot.id == id) {
        Some(slot) => Added { id, spelling: slot.content.clone(), control: true, skipped: slot.special },
        None => Added { id, spelling: format!("<|reserved_token_{id}|>"), control: true, skipped: false },
    };
    Ok((ranks..end).map(slot).collect())
}

fn end_of_slots(ranks: u32, vocab_size: usize) -> Result<u32> {
    if vocab_size < ranks as usize {
        return Err(Error::model(format!("{ranks} ranks, but config.json has vocab_size {vocab_size}"))
            .hint("the tokenizer belongs to another model"));
    }
    u32::try_from(vocab_size)
        .ok()
        .filter(|end| end - ranks <= SLOTS_MAX)
        .ok_or_else(|| too_many_slots(ranks, vocab_size))
}

fn too_many_slots(ranks: u32, end: usize) -> Error {
    Error::model(format!(
        "{ranks} ranks of a vocabulary of {end}: expected at most {SLOTS_MAX} control slots after them"
    ))
    .hint("lines are missing, or the tokenizer belongs to another model")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn lines() -> Vec<String> {
        (0..=255u8).map(|byte| format!("{} {byte}", STANDARD.encode([byte]))).collect()
    }

    fn tokens() -> TokenTable {
        parse(lines().join("\n").as_bytes()).unwrap().0
    }

    fn named(id: u32, content: &str) -> NamedSlot {
        NamedSlot { id, content: content.to_owned(), special: true }
    }

    #[test]
    fn order_blank_lines_and_line_ends_do_not_matter() {
        let mut lines = lines();
        lines.push("YWI= 256".to_owned());
        lines.reverse();
        for end in ["\n", "\r\n", "\n\n"] {
            let (tokens, index) = parse((lines.join(end) + end).as_bytes()).unwrap();
            assert_eq!(tokens.get(256), Some(&b"ab"[..]));
            assert_eq!(index.rank(&tokens, b"ab"), Some(256));
        }
    }

    #[test]
    fn damage_is_refused_with_the_line() {
        let damaged = |at: usize, line: &str| {
            let mut lines = lines();
            lines[at] = line.to_owned();
            parse(lines.join("\n").as_bytes()).err().expect(line)
        };
        for (error, want) in [
            (damaged(9, "Q"), "line 10: expected base64, a space and a rank"),
            (damaged(9, "CQ= 9"), "line 10: bad base64"),
            (damaged(9, "C*== 9"), "line 10: bad base64"),
            (damaged(9, "CR== 9"), "line 10: bad base64"),
            (damaged(9, " 9"), "line 10: a token without bytes"),
            (damaged(9, "CQ== "), "line 10: expected a decimal rank"),
            (damaged(9, "CQ== -9"), "line 10: expected a decimal rank"),
            (damaged(9, "CQ== +9"), "line 10: expected a decimal rank"),
            (damaged(9, "CQ==  9"), "line 10: expected a decimal rank"),
            (damaged(9, "CQ== 99999999999"), "line 10: expected a decimal rank"),
            (damaged(9, "CQ== 8"), "line 10: rank 8 a second time"),
            (damaged(9, "CQ== 256"), "line 10: rank 256, but 256 lines can only hold ranks 0 to 255"),
            (damaged(9, "CA== 9"), "ranks 8 and 9 have the same bytes"),
            (damaged(9, "YWI= 9"), "no rank for the single byte 0x09"),
            (damaged(9, "\u{fffd} 9"), "line 10: bad base64"),
        ] {
            assert_eq!(error.kind(), Kind::Model);
            assert!(error.message().starts_with(want), "{error}, expected {want}");
        }
        for nothing in ["\n", "\r\n\n"] {
            assert!(parse(nothing.as_bytes()).is_err());
        }
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let whole = lines().join("\n");
        for end in 0..whole.len() - 1 {
            assert!(parse(&whole.as_bytes()[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn gaps_between_named_slots_keep_their_reserved_spelling() {
        let names = [named(256, "[BOS]"), named(258, "<|sep|>")];
        let slots = slots(&tokens(), Some(260), &names).unwrap();
        let got: Vec<_> = slots.iter().map(|slot| (slot.id, slot.spelling.as_str())).collect();
        let reserved = [(257, "<|reserved_token_257|>"), (259, "<|reserved_token_259|>")];
        assert_eq!(got, [(256, "[BOS]"), reserved[0], (258, "<|sep|>"), reserved[1]]);
    }

    #[test]
    fn without_a_vocabulary_size_only_named_slots_exist() {
        assert!(slots(&tokens(), None, &[]).unwrap().is_empty());
        assert_eq!(slots(&tokens(), None, &[named(256, "[BOS]"), named(258, "[PAD]")]).unwrap().len(), 3);
    }

    #[test]
    fn ranks_slots_and_vocabulary_size_must_belong_together() {
        for (vocab_size, names, want) in [
            (Some(255), vec![], "256 ranks, but config.json has vocab_size 255"),
            (Some(513), vec![], "expected at most 256 control slots"),
            (Some(usize::MAX), vec![], "expected at most 256 control slots"),
            (Some(260), vec![named(260, "[PAD]")], "`[PAD]` has id 260, outside the vocabulary of 260 ids"),
            (Some(260), vec![named(65, "[BOS]")], "id 65 is named `[BOS]`, but is one of 256 ranks"),
            (Some(300), vec![named(290, "[BOS]")], "256 ranks, but the first control token is `[BOS]` with id 290"),
            (None, vec![named(u32::MAX - 1, "[PAD]")], "expected at most 256 control slots"),
            (None, vec![named(290, "[PAD]")], "256 ranks, but the first control token"),
        ] {
            let error = slots(&tokens(), vocab_size, &names).expect_err(want);
            assert!(error.message().contains(want), "{error}, expected {want}");
        }
    }
}
