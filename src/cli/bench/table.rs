//! Rows on stdout, each as soon as it is there; the array of `json` is closed at the end, so that it is whole however the
//! run ends.

use std::fmt::Write;

use super::{Form, lines};
use crate::bench::{COMMIT_MODIFIED, Row, State};
use crate::cli::output::{self, Written};
use crate::error::{Error, Result};

/// Prints rows.
pub(super) struct Printer {
    form: Form,
    limits: bool,
    rows: usize,
}

/// A column: its name, its width, and what is in it.
type Column = (&'static str, usize, fn(&Row) -> String);

const COLUMNS: [Column; 12] = [
    ("test", 12, |row| row.test.clone()),
    ("depth", 6, |row| row.depth.to_string()),
    ("threads", 7, |row| row.threads.to_string()),
    ("step", 5, |row| row.step.to_string()),
    ("tokens/s", 16, rate),
    ("first token", 11, |row| format!("{:.3} s", row.first_token_s)),
    ("read/token", 11, |row| format!("{:.1} MB", row.bytes_per_token / 1e6)),
    ("amplification", 13, |row| decimal(row.amplification)),
    ("hits", 7, |row| percent(row.hit_rate)),
    ("waiting", 7, |row| percent(Some(row.wait_share))),
    ("drives", 11, |row| format!("{:.3} GB/s", row.disk_gb_per_s)),
    ("peak", 9, |row| format!("{:.2} GB", row.peak_memory_bytes as f64 / 1e9)),
];

/// Shares of what the machine can do.
const LIMITS: [Column; 3] = [
    ("of drives", 9, |row| percent(row.disk_share)),
    ("of memory", 9, |row| percent(row.memory_share)),
    ("of FMA", 7, |row| percent(row.fma_share)),
];

impl Printer {
    pub(super) fn new(form: Form, limits: bool) -> Self {
        Self { form, limits, rows: 0 }
    }

    /// Prints a row, behind whatever comes before the first one.
    ///
    /// # Errors
    /// Kind `Io` when stdout cannot be written.
    pub(super) fn row(&mut self, row: &Row) -> Result<Written> {
        let mut text = String::new();
        if self.rows == 0 {
            text = match self.form {
                Form::Table => self.head(row),
                Form::Csv => lines::header(row),
                Form::Json | Form::Jsonl => String::new(),
            };
        }
        match self.form {
            Form::Table => text += &line(self.columns().map(|(_, width, cell)| (width, cell(row)))),
            Form::Csv => text += &lines::line(row),
            Form::Jsonl => text += &(json(row)? + "\n"),
            Form::Json => text += &format!("{}{}", if self.rows == 0 { "[\n" } else { ",\n" }, json(row)?),
        }
        self.rows += 1;
        output::stdout(text.as_bytes())
    }

    /// What comes after the last row.
    ///
    /// # Errors
    /// Kind `Io` when stdout cannot be written.
    pub(super) fn finish(self) -> Result<()> {
        match (self.form, self.rows) {
            (Form::Json, 0) => output::stdout(b"[]\n").map(drop),
            (Form::Json, _) => output::stdout(b"\n]\n").map(drop),
            _ => Ok(()),
        }
    }

    fn columns(&self) -> impl Iterator<Item = Column> {
        COLUMNS.into_iter().chain(LIMITS.into_iter().filter(|_| self.limits))
    }

    /// What holds for all rows, then the names of the columns.
    fn head(&self, row: &Row) -> String {
        let state = match row.state {
            State::Warm => "warm",
            State::Cold => "cold",
        };
        let modified = if COMMIT_MODIFIED { " with changes" } else { "" };
        let mut text = format!(
            "{}, {}, {} backend, {} trunk, {} reads, {state}, {} repetitions, commit {}{modified}\n",
            row.cpu,
            row.isa,
            row.backend,
            row.trunk,
            row.io_mode,
            row.repetitions,
            row.commit.get(..12).unwrap_or(row.commit)
        );
        if self.limits {
            let _ = writeln!(
                text,
                "limits: drives {} GB/s, memory {} GB/s, multiply-adds {} GFLOP/s",
                decimal(row.disk_limit_gb_per_s),
                decimal(row.memory_limit_gb_per_s),
                decimal(row.fma_limit_gflops)
            );
        }
        text.push('\n');
        text += &line(self.columns().map(|(name, width, _)| (width, name.to_owned())));
        let rule = |(number, (_, width, _)): (usize, Column)| match number {
            0 => (width, "-".repeat(width)),
            _ => (width, "-".repeat(width - 1) + ":"),
        };
        text + &line(self.columns().enumerate().map(rule))
    }
}

/// Cells between bars: the first to the left, the others to the right.
fn line(cells: impl Iterator<Item = (usize, String)>) -> String {
    let mut text = String::from("|");
    for (number, (width, cell)) in cells.enumerate() {
        let _ = match number {
            0 => write!(text, " {cell:<width$} |"),
            _ => write!(text, " {cell:>width$} |"),
        };
    }
    text + "\n"
}

fn json(row: &Row) -> Result<String> {
    serde_json::to_string(row).map_err(|error| Error::other(format!("cannot write a row as JSON: {error}")))
}

fn rate(row: &Row) -> String {
    match (row.tokens_per_s.mean, row.tokens_per_s.sd) {
        (Some(mean), Some(sd)) => format!("{mean:.2} ± {sd:.2}"),
        (Some(mean), None) => format!("{mean:.2}"),
        (None, _) => "–".to_owned(),
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("–".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}

fn decimal(value: Option<f64>) -> String {
    value.map_or("–".to_owned(), |value| format!("{value:.2}"))
}
