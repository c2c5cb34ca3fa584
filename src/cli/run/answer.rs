//! What becomes of the answer: streamed to stdout as text or ids, or kept for one JSON object.

use std::io::{self, IsTerminal, Write};

use super::flags::{OutputForm, RunArgs, Thinking};
use super::reader::{Piece, Reader};
use crate::cli::args::Shown;
use crate::cli::output::{self, Written};
use crate::error::{Error, Result};
use crate::report::json::RunReport;
use crate::text::{Tokenizer, chat};

/// What a token means for the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Go on.
    More,
    /// A stop string is complete.
    StopString,
    /// The chat message is closed.
    Closed,
    /// Nobody reads the answer any more.
    PipeClosed,
}

/// The answer so far.
pub(super) struct Answer<'t> {
    form: OutputForm,
    reader: Option<Reader<'t>>,
    has_text: bool,
    is_chat: bool,
    shows_reasoning: bool,
    ids: Vec<u32>,
    text: String,
    reasoning: String,
    chat: Option<chat::Answer>,
    pipe_closed: bool,
    echo: Option<String>,
    /// What was written last, on stdout and stderr where they are one text, is not a whole line.
    within_line: bool,
    is_one_text: bool,
}

impl<'t> Answer<'t> {
    /// # Errors
    /// As [`Reader::new`].
    pub(super) fn new(args: &RunArgs, shown: &Shown, tokenizer: Option<&'t Tokenizer>) -> Result<Self> {
        let thinking = args.chat.chat.then_some(!args.chat.no_thinking);
        let reads = args.output.needs_text() || args.chat.chat || !args.stop.is_empty();
        let reader = match tokenizer.filter(|_| reads) {
            Some(tokenizer) => Some(Reader::new(tokenizer, thinking, &args.stop)?),
            None => None,
        };
        let shows_reasoning = args.output == OutputForm::Text
            && match args.chat.thinking {
                Some(thinking) => thinking == Thinking::Show,
                None => !shown.quiet,
            };
        Ok(Self {
            form: args.output,
            has_text: reader.is_some(),
            reader,
            is_chat: args.chat.chat,
            shows_reasoning,
            ids: Vec::new(),
            text: String::new(),
            reasoning: String::new(),
            chat: None,
            pipe_closed: false,
            echo: args.echo.clone(),
            within_line: false,
            is_one_text: output::is_one_text(),
        })
    }

    /// Shows the prompt on stderr where that is wanted, just before the answer. What goes on with it stands on its line.
    pub(super) fn begin(&mut self) {
        let Some(prompt) = self.echo.take() else { return };
        self.within_line = self.is_one_text && !self.is_chat;
        let end = if self.within_line { "" } else { "\n" };
        let _ = io::stderr().write_all(format!("{prompt}{end}").as_bytes());
    }

    /// What ends the line that the answer may have left open on stderr, too.
    pub(super) fn line_end(&self) -> &'static str {
        if self.within_line { "\n" } else { "" }
    }

    /// Takes the next id and writes what it settles.
    ///
    /// # Errors
    /// Kind `Io` when stdout cannot be written.
    pub(super) fn token(&mut self, id: u32) -> Result<Next> {
        self.ids.push(id);
        let piece = match &mut self.reader {
            Some(reader) => reader.push(id)?,
            None => Piece::default(),
        };
        let (stopped, closed) = (piece.stopped, piece.closed);
        self.show(piece)?;
        if self.form == OutputForm::Ids {
            let separator = if self.ids.len() > 1 { " " } else { "" };
            self.write(format!("{separator}{id}").as_bytes())?;
        }
        Ok(match () {
            () if self.pipe_closed => Next::PipeClosed,
            () if stopped => Next::StopString,
            () if closed => Next::Closed,
            () => Next::More,
        })
    }

    /// Ends the answer and writes what was held back. True when that ends at a stop string.
    ///
    /// # Errors
    /// Kind `Io` when stdout cannot be written.
    pub(super) fn finish(&mut self) -> Result<bool> {
        let Some(reader) = self.reader.take() else { return Ok(false) };
        let (piece, chat) = reader.finish();
        self.chat = chat;
        let stopped = piece.stopped;
        self.show(piece)?;
        if self.shows_reasoning && self.text.is_empty() && !self.reasoning.is_empty() {
            let _ = io::stderr().write_all(b"\n");
        }
        Ok(stopped)
    }

    /// Writes what comes after the answer: a line end, or the JSON object.
    ///
    /// # Errors
    /// Kind `Io` when stdout cannot be written.
    pub(super) fn close(&mut self, report: &RunReport) -> Result<()> {
        match self.form {
            OutputForm::Text if self.text.ends_with('\n') || self.text.is_empty() => Ok(()),
            OutputForm::Text if !io::stdout().is_terminal() => Ok(()),
            OutputForm::Text | OutputForm::Ids => self.write(b"\n"),
            OutputForm::Json => {
                let json = serde_json::to_string(report)
                    .map_err(|error| Error::other(format!("cannot write the report as JSON: {error}")))?;
                self.write(format!("{json}\n").as_bytes())
            }
        }
    }

    /// The new ids.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The text, where there is a tokenizer.
    pub(super) fn text(&self) -> Option<String> {
        self.has_text.then(|| self.text.clone())
    }

    /// What the model thought, in a chat.
    pub(super) fn reasoning(&self) -> Option<String> {
        self.is_chat.then(|| self.reasoning.clone())
    }

    /// A chat's answer in its parts, once it is finished.
    pub(super) fn chat(&self) -> Option<&chat::Answer> {
        self.chat.as_ref()
    }

    fn show(&mut self, piece: Piece) -> Result<()> {
        if !piece.reasoning.is_empty() && self.shows_reasoning {
            // A stderr that cannot be written is no reason to end the run.
            let _ = io::stderr().write_all(piece.reasoning.as_bytes());
        }
        self.reasoning += &piece.reasoning;
        if piece.text.is_empty() {
            return Ok(());
        }
        if self.text.is_empty() && self.shows_reasoning && !self.reasoning.is_empty() {
            let _ = io::stderr().write_all(b"\n\n");
        }
        self.text += &piece.text;
        match self.form {
            OutputForm::Text => self.write(piece.text.as_bytes()),
            OutputForm::Ids | OutputForm::Json => Ok(()),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.pipe_closed && output::stdout(bytes)? == Written::PipeClosed {
            self.pipe_closed = true;
        }
        self.within_line = self.is_one_text && !bytes.ends_with(b"\n");
        Ok(())
    }
}
