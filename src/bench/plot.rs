//! A picture of a bench: speed over the depth of the context, and what the drives did meanwhile.

use std::fmt::Write;

use super::{Drive, Row};
use crate::report::plot::{self, Chart, Series};

/// An SVG document of `rows`, and of `drives` where they were recorded.
pub fn svg(rows: &[Row], drives: &[Drive]) -> String {
    let speed = Chart { title: "Speed over context", x: "tokens of context", y: "tokens/s", series: over_depth(rows) };
    let drives: Vec<Series> = drives
        .iter()
        .filter(|drive| !drive.points.is_empty())
        .map(|drive| Series { name: drive.path.clone(), points: drive.points.clone() })
        .collect();
    let drives = Chart { title: "Drives", x: "seconds", y: "GB/s", series: drives };
    let charts = [speed, drives];
    plot::svg(if charts[1].series.is_empty() { &charts[..1] } else { &charts })
}

/// A series for each test and setting, in the order in which they first appear.
fn over_depth(rows: &[Row]) -> Vec<Series> {
    let differ = |of: fn(&Row) -> usize| rows.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]));
    let (threads, steps) = (differ(|row| row.threads), differ(|row| row.step));
    let mut all: Vec<Series> = Vec::new();
    for row in rows {
        let Some(rate) = row.tokens_per_s.mean else { continue };
        let mut name = row.test.clone();
        if threads {
            let _ = write!(name, ", {} threads", row.threads);
        }
        if steps {
            let _ = write!(name, ", steps of {}", row.step);
        }
        let point = (row.depth as f64, rate);
        match all.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => all.push(Series { name, points: vec![point] }),
        }
    }
    all.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    all
}
