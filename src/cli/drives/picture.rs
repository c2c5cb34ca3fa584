//! The ladder and the drives over time, as a picture.

use crate::drives::{Estimate, Report};
use crate::report::plot::{Chart, Series, XAxis, svg};

/// What was measured. Parts that were not reached are left out.
pub(super) fn of_report(report: &Report) -> String {
    let mut charts = Vec::new();
    if !report.ladder.is_empty() {
        let together = Series::bars("together", report.ladder.iter().map(|rung| rung.gb_per_s));
        let alone = (0..).zip(&report.ladder).map(|(at, rung)| (f64::from(at), rung.sum_gb_per_s)).collect();
        charts.push(Chart {
            title: "Drives together".into(),
            x: XAxis::Labels(report.ladder.iter().map(|rung| drives(rung.roots)).collect()),
            y_name: "GB/s".into(),
            series: vec![together, Series::line("sum of each alone", alone)],
        });
    }
    if let Some(together) = &report.together {
        charts.push(Chart {
            title: "All drives over time".into(),
            x: XAxis::Numbers("seconds".into()),
            y_name: "GB/s".into(),
            series: together.drives.iter().map(|drive| Series::line(&drive.root, drive.timeline.clone())).collect(),
        });
    }
    let measured = report.drives.iter().filter(|drive| drive.same_device_as.is_none());
    let depths: Vec<Series> = measured
        .map(|drive| {
            let random = drive.rates.iter().filter(|rate| rate.pattern == "random");
            Series::line(&drive.root, random.map(|rate| (rate.depth as f64, rate.gb_per_s)).collect())
        })
        .collect();
    charts.push(Chart {
        title: "Random reads of each drive alone".into(),
        x: XAxis::Numbers("reads in flight".into()),
        y_name: "GB/s".into(),
        series: depths,
    });
    svg(&charts)
}

/// What was simulated.
pub(super) fn of_estimate(estimate: &Estimate) -> String {
    let labels = || XAxis::Labels(estimate.ladder.iter().map(|rung| drives(rung.drives)).collect());
    let sums = estimate.drives.iter().scan(0.0, |sum, drive| {
        *sum += drive.gb_per_s;
        Some(*sum)
    });
    let chart = |title: &str, y_name: &str, series| Chart {
        title: format!("{title} of {}, simulated", estimate.model.name),
        x: labels(),
        y_name: y_name.into(),
        series,
    };
    svg(&[
        chart(
            "Speed",
            "tokens/s",
            vec![Series::bars("tokens/s", estimate.ladder.iter().map(|rung| rung.tokens_per_s))],
        ),
        chart(
            "Reads",
            "GB/s",
            vec![
                Series::bars("read", estimate.ladder.iter().map(|rung| rung.gb_per_s)),
                Series::line("sum of the drives", (0..).map(f64::from).zip(sums).collect()),
            ],
        ),
    ])
}

fn drives(count: usize) -> String {
    if count == 1 { "1 drive".into() } else { format!("{count} drives") }
}
