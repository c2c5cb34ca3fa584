//! Pictures of measurements: lines over an axis, as SVG.

use std::fmt::Write;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 220.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Marks of an axis, at most.
const TICKS: usize = 6;
/// Colours that are told apart in all common kinds of colour vision (Okabe and Ito).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

/// A line with its name.
#[derive(Debug, Clone)]
pub struct Series {
    /// For the legend.
    pub name: String,
    /// x and y; what is not finite is left out.
    pub points: Vec<(f64, f64)>,
}

/// Lines over a common axis.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Above it.
    pub title: &'static str,
    /// What x is, with its unit.
    pub x: &'static str,
    /// What y is, with its unit.
    pub y: &'static str,
    /// The lines.
    pub series: Vec<Series>,
}

/// An SVG document of `charts`, one below the other; equal for equal charts.
pub fn svg(charts: &[Chart]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        charts.len().max(1) as f64 * HEIGHT
    );
    for (number, Chart { title, x, y, series }) in charts.iter().enumerate() {
        chart(&mut out, number as f64 * HEIGHT, title, x, y, series);
    }
    out.push_str("</svg>\n");
    out
}

/// One chart below `top`. Axes begin at 0.
fn chart(out: &mut String, top: f64, title: &str, x_name: &str, y_name: &str, all: &[Series]) {
    let most = |of: fn(&(f64, f64)) -> f64| {
        all.iter().flat_map(|series| &series.points).map(of).filter(|value| value.is_finite()).fold(0.0, f64::max)
    };
    let (x_step, y_step) = (step(most(|point| point.0)), step(most(|point| point.1)));
    let (x_max, y_max) = (end(most(|point| point.0), x_step), end(most(|point| point.1), y_step));
    let x = |value: f64| LEFT + value / x_max * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| top + HEIGHT - BOTTOM - value / y_max * (HEIGHT - TOP - BOTTOM);
    let mut line = |text: std::fmt::Arguments<'_>| {
        let _ = writeln!(out, "{text}");
    };
    line(format_args!("<text x=\"{LEFT}\" y=\"{:.1}\" font-size=\"15\">{}</text>", top + 24.0, escaped(title)));
    for tick in ticks(y_max, y_step) {
        let at = y(tick);
        line(format_args!("<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/>", x(x_max)));
        let text = number(tick, y_step);
        line(format_args!("<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>", LEFT - 6.0, at + 4.0));
    }
    for tick in ticks(x_max, x_step) {
        let (at, text) = (x(tick), number(tick, x_step));
        line(format_args!("<path d=\"M{at:.1} {:.1}v5\" stroke=\"#333\"/>", y(0.0)));
        line(format_args!("<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>", y(0.0) + 18.0));
    }
    line(format_args!("<path d=\"M{LEFT} {:.1}H{:.1}\" stroke=\"#333\"/>", y(0.0), x(x_max)));
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    line(format_args!(
        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        top + HEIGHT - 12.0,
        escaped(x_name)
    ));
    let middle = top + (TOP + HEIGHT - BOTTOM) / 2.0;
    line(format_args!(
        "<text transform=\"translate(16 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        escaped(y_name)
    ));
    for (number, series) in all.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let points: Vec<_> = series.points.iter().filter(|point| point.0.is_finite() && point.1.is_finite()).collect();
        let path: Vec<String> = points.iter().map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1))).collect();
        line(format_args!("<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", path.join(" ")));
        // A line of few points shows where they are; one point alone would not be seen at all.
        for point in points.iter().filter(|_| points.len() <= 40) {
            line(format_args!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>", x(point.0), y(point.1)));
        }
        let (left, at) = (WIDTH - RIGHT + 16.0, top + TOP + 18.0 * number as f64);
        line(format_args!("<rect x=\"{left}\" y=\"{at:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"));
        let name = escaped(&series.name);
        line(format_args!("<text x=\"{:.1}\" y=\"{:.1}\">{name}</text>", left + 18.0, at + 10.0));
    }
}

/// A round distance between marks, such that a few reach `most`.
fn step(most: f64) -> f64 {
    let rough = if most > 0.0 { most / TICKS as f64 } else { 1.0 / TICKS as f64 };
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough).unwrap_or(rough)
}

/// Where an axis ends: at a mark.
fn end(most: f64, step: f64) -> f64 {
    (most / step).ceil().max(1.0) * step
}

fn ticks(max: f64, step: f64) -> impl Iterator<Item = f64> {
    (0..=(max / step).round() as usize).map(move |tick| tick as f64 * step)
}

/// With as many digits as marks of this distance need.
fn number(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{value:.digits$}")
}

fn escaped(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_a_few_round_marks() {
        for (most, wanted) in [(0.0, 0.2), (1.0, 0.2), (7.0, 2.0), (32_768.0, 10_000.0), (0.003, 0.0005), (60.0, 10.0)]
        {
            let step = step(most);
            assert!((step / wanted - 1.0).abs() < 1e-9, "{most}: {step}");
            let ticks: Vec<f64> = ticks(end(most, step), step).collect();
            assert!(ticks.len() >= 2 && ticks.len() <= TICKS + 2 && ticks[ticks.len() - 1] >= most, "{ticks:?}");
        }
        assert_eq!((number(0.4, 0.2), number(20_000.0, 10_000.0)), ("0.4".into(), "20000".into()));
    }

    #[test]
    fn a_picture_of_nothing_and_of_odd_numbers_is_one() {
        let points = vec![(0.0, f64::NAN), (1.0, f64::INFINITY), (2.0, 1.0)];
        let odd = Series { name: "a <b> & \"c\"\n".into(), points };
        let chart = |series| Chart { title: "t", x: "x", y: "y", series };
        for charts in [vec![], vec![chart(vec![])], vec![chart(vec![odd.clone()])]] {
            let picture = svg(&charts);
            assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
            assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
        }
        assert!(svg(&[chart(vec![odd])]).contains("a &lt;b&gt; &amp; &quot;c&quot; "));
    }
}
