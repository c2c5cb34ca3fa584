//! The model's ids to the text that is shown: whole characters, no control tokens, cut at stop strings.

use crate::error::Result;
use crate::text::chat::{Answer, ChatEvent, ChatParser};
use crate::text::{StopStrings, Tokenizer, Utf8Stream};

/// Text that a token settled.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    /// What the model thinks.
    pub reasoning: String,
    /// What it answers.
    pub text: String,
    /// A stop string ended the answer before anything that follows.
    pub stopped: bool,
    /// The message is closed.
    pub closed: bool,
}

/// Reads one answer.
pub(super) struct Reader<'t> {
    tokenizer: &'t Tokenizer,
    chat: Option<ChatParser<'t>>,
    /// Over the answer alone: reasoning may say anything.
    stops: StopStrings,
    utf8: Utf8Stream,
}

impl<'t> Reader<'t> {
    /// For plain text, or with `thinking` for a chat whose prompt ends inside the reasoning (true) or the answer.
    ///
    /// # Errors
    /// Kind `Usage` for an empty stop string, `Model` for a tokenizer without the chat format's tokens.
    pub(super) fn new(tokenizer: &'t Tokenizer, thinking: Option<bool>, stops: &[String]) -> Result<Self> {
        let chat = thinking.map(|thinking| ChatParser::new(tokenizer, thinking)).transpose()?;
        Ok(Self { tokenizer, chat, stops: StopStrings::new(stops)?, utf8: Utf8Stream::new() })
    }

    /// Takes the next id.
    ///
    /// # Errors
    /// Kind `Usage` for an id outside the vocabulary.
    pub(super) fn push(&mut self, id: u32) -> Result<Piece> {
        let mut piece = Piece::default();
        match &mut self.chat {
            Some(chat) => {
                let events = chat.push(id)?;
                self.events(events, &mut piece);
            }
            None if self.tokenizer.is_control(id) => {}
            None => {
                let bytes = self.tokenizer.bytes(id)?;
                self.text(bytes, &mut piece);
            }
        }
        Ok(piece)
    }

    /// Ends the answer: what was held back, and what a chat's answer is made of.
    pub(super) fn finish(mut self) -> (Piece, Option<Answer>) {
        let mut piece = Piece::default();
        let answer = self.chat.take().map(|chat| {
            let (events, answer) = chat.finish();
            self.events(events, &mut piece);
            answer
        });
        let tail = self.stops.finish();
        piece.text += &self.utf8.push(&tail.bytes);
        piece.text += &self.utf8.finish();
        piece.stopped |= tail.stopped.is_some();
        (piece, answer)
    }

    fn events(&mut self, events: Vec<ChatEvent>, piece: &mut Piece) {
        for event in events {
            match event {
                ChatEvent::Reasoning(text) => piece.reasoning += &text,
                ChatEvent::Content(text) => self.text(text.as_bytes(), piece),
                ChatEvent::ToolCall(_) => {}
                ChatEvent::End => piece.closed = true,
            }
        }
    }

    fn text(&mut self, bytes: &[u8], piece: &mut Piece) {
        let step = self.stops.push(bytes);
        piece.text += &self.utf8.push(&step.bytes);
        piece.stopped |= step.stopped.is_some();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::Specials;

    fn demo() -> Tokenizer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        Tokenizer::from_dir(&dir, None).expect("the demo model's tokenizer")
    }

    fn read(tokenizer: &Tokenizer, thinking: Option<bool>, stops: &[&str], ids: &[u32]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut reader = Reader::new(tokenizer, thinking, &stops).unwrap();
        let mut text = String::new();
        for &id in ids {
            let piece = reader.push(id).unwrap();
            text += &piece.text;
            if piece.stopped {
                return (text, true);
            }
        }
        let (tail, _) = reader.finish();
        (text + &tail.text, tail.stopped)
    }

    #[test]
    fn a_stop_string_over_several_tokens_ends_the_text_and_a_part_of_one_does_not() {
        let tokenizer = demo();
        let ids = tokenizer.encode("The cat sat down. The dog ran 🦊 away.", Specials::Ordinary);
        assert_eq!(read(&tokenizer, None, &["down. The d"], &ids), ("The cat sat ".to_owned(), true));
        assert_eq!(read(&tokenizer, None, &["ran 🦊"], &ids), ("The cat sat down. The dog ".to_owned(), true));
        let (text, stopped) = read(&tokenizer, None, &["away. More"], &ids);
        assert_eq!((text.as_str(), stopped), ("The cat sat down. The dog ran 🦊 away.", false));
    }

    #[test]
    fn a_character_cut_off_by_the_end_becomes_one_replacement_character() {
        let tokenizer = demo();
        let ids = tokenizer.encode("a 🦊", Specials::Ordinary);
        let (text, _) = read(&tokenizer, None, &[], &ids[..ids.len() - 1]);
        assert_eq!(text, tokenizer.decode(&ids[..ids.len() - 1], false).unwrap());
        assert!(text.ends_with('\u{fffd}'), "{text}");
    }

    #[test]
    fn control_tokens_are_never_shown() {
        let tokenizer = demo();
        let ids = tokenizer.encode("a<|open|>b<|end_of_msg|>c", Specials::Control);
        assert_eq!(read(&tokenizer, None, &[], &ids).0, "abc");
    }

    #[test]
    fn reasoning_and_answer_are_kept_apart_and_stop_strings_look_at_the_answer() {
        let tokenizer = demo();
        let written =
            "I stop here<|close|>think<|sep|><|open|>response<|sep|>Go. Then stop here<|close|>response<|sep|>";
        let ids = tokenizer.encode(written, Specials::Control);
        assert_eq!(read(&tokenizer, Some(true), &["stop here"], &ids), ("Go. Then ".to_owned(), true));
    }
}
