//! A picture of a measurement: speed over the depth of the context, and what the drives did meanwhile.

use std::fmt::Write;

use super::{Drive, Row};
use crate::report::plot::{self, Chart, Series, XAxis};

/// An SVG document of `rows`, and of `drives` where they were recorded.
pub fn svg(rows: &[Row], drives: &[Drive]) -> String {
    let chart = |title: &str, x_name: &str, y_name: &str, series| Chart {
        title: title.into(),
        x: XAxis::Numbers(x_name.into()),
        y_name: y_name.into(),
        series,
    };
    let mut charts = vec![chart("Speed over context", "tokens of context", "tokens/s", over_depth(rows))];
    let drives = drives.iter().filter(|drive| !drive.points.is_empty());
    let drives: Vec<Series> = drives.map(|drive| Series::line(&drive.path, drive.points.clone())).collect();
    if !drives.is_empty() {
        charts.push(chart("Drives", "seconds", "GB/s", drives));
    }
    plot::svg(&charts)
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
            None => all.push(Series::line(name, vec![point])),
        }
    }
    all.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_of_nothing_and_of_odd_numbers_is_one() {
        let odd =
            Drive { path: "a <b> & \"c\"\n".into(), points: vec![(0.0, f64::NAN), (1.0, f64::INFINITY), (2.0, 1.0)] };
        for drives in [&[][..], std::slice::from_ref(&odd), &[Drive { points: Vec::new(), ..odd.clone() }]] {
            let picture = svg(&[], drives);
            assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
            assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
        }
        assert!(svg(&[], &[odd]).contains("a &lt;b&gt; &amp; &quot;c&quot; "));
    }
}
