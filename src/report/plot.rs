//! Charts as an SVG document: lines and bars over axes that begin at 0, with a legend. The same charts give the same bytes.

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
/// A line of at most so many points shows where they are.
const POINTS_SHOWN_MAX: usize = 40;
/// Part of a label's width that its bars take together.
const BARS_PART: f64 = 0.7;
/// Characters of a name that fit beside the chart, and beneath it for all labels together.
const NAME_CHARS: usize = 30;
const LABEL_CHARS: usize = 90;

/// One chart.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// To the right.
    pub x: XAxis,
    /// Name of the upward axis, with its unit.
    pub y_name: String,
    /// What it shows.
    pub series: Vec<Series>,
}

/// What the axis to the right is of.
#[derive(Debug, Clone)]
pub enum XAxis {
    /// Numbers, under a name with their unit.
    Numbers(String),
    /// Things side by side: a series' points count them from 0.
    Labels(Vec<String>),
}

/// Values under one name.
#[derive(Debug, Clone)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// To the right, and upward. What is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// How they are drawn.
    pub mark: Mark,
}

/// How a series is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Joined by lines.
    Line,
    /// As bars: of one width, side by side where there are several series of them.
    Bars,
}

impl Series {
    /// A line.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, mark: Mark::Line }
    }

    /// Bars over the labels of a chart, in their order.
    pub fn bars(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        let points = values.into_iter().enumerate().map(|(label, value)| (label as f64, value)).collect();
        Self { name: name.into(), points, mark: Mark::Bars }
    }
}

/// An SVG document of `charts`, one below the other.
pub fn svg(charts: &[Chart]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        charts.len().max(1) as f64 * HEIGHT
    );
    for (number, chart) in charts.iter().enumerate() {
        Canvas::new(&mut out, number as f64 * HEIGHT, chart).draw(chart);
    }
    out.push_str("</svg>\n");
    out
}

/// Where a chart is drawn, and to what scale.
struct Canvas<'a> {
    out: &'a mut String,
    top: f64,
    x_step: f64,
    x_max: f64,
    y_step: f64,
    y_max: f64,
}

impl<'a> Canvas<'a> {
    fn new(out: &'a mut String, top: f64, chart: &Chart) -> Self {
        let points = || chart.series.iter().flat_map(|series| &series.points);
        let most = |of: fn(&(f64, f64)) -> f64| points().map(of).filter(|value| value.is_finite()).fold(0.0, f64::max);
        let (x_step, x_max) = match &chart.x {
            XAxis::Numbers(_) => {
                let x = most(|point| point.0);
                (step(x), end(x, step(x)))
            }
            XAxis::Labels(labels) => (1.0, labels.len().max(1) as f64),
        };
        let y = most(|point| point.1);
        Self { out, top, x_step, x_max, y_step: step(y), y_max: end(y, step(y)) }
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.out, "{text}");
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        self.top + HEIGHT - BOTTOM - value / self.y_max * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&mut self, chart: &Chart) {
        let title = escaped(&chart.title);
        self.line(format_args!("<text x=\"{LEFT}\" y=\"{:.1}\" font-size=\"15\">{title}</text>", self.top + 24.0));
        self.y_axis(&chart.y_name);
        match &chart.x {
            XAxis::Numbers(name) => self.numbers(name),
            XAxis::Labels(labels) => self.labels(labels),
        }
        let (left, right, bottom) = (LEFT, self.x(self.x_max), self.y(0.0));
        let all_bars = chart.series.iter().filter(|series| series.mark == Mark::Bars).count();
        let mut bars = 0;
        // Lines over bars, whatever their order in the legend.
        for mark in [Mark::Bars, Mark::Line] {
            for (number, series) in chart.series.iter().enumerate().filter(|(_, series)| series.mark == mark) {
                let colour = COLOURS[number % COLOURS.len()];
                // Things side by side have their middle half a step to the right of their border.
                let middle = if matches!(chart.x, XAxis::Labels(_)) { 0.5 } else { 0.0 };
                let points: Vec<(f64, f64)> = series
                    .points
                    .iter()
                    .filter(|point| point.0.is_finite() && point.1.is_finite())
                    .map(|point| (point.0 + middle, point.1))
                    .collect();
                match mark {
                    Mark::Bars => {
                        self.bars(&points, colour, bars, all_bars);
                        bars += 1;
                    }
                    Mark::Line => self.polyline(&points, colour),
                }
            }
        }
        self.line(format_args!("<path d=\"M{left} {bottom:.1}H{right:.1}\" stroke=\"#333\"/>"));
        for (number, series) in chart.series.iter().enumerate() {
            self.legend(number, &series.name);
        }
    }

    fn y_axis(&mut self, name: &str) {
        let right = self.x(self.x_max);
        for tick in ticks(self.y_max, self.y_step) {
            let (at, text) = (self.y(tick), number(tick, self.y_step));
            self.line(format_args!("<path d=\"M{LEFT} {at:.1}H{right:.1}\" stroke=\"#ddd\"/>"));
            self.line(format_args!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                at + 4.0
            ));
        }
        let middle = self.top + (TOP + HEIGHT - BOTTOM) / 2.0;
        self.line(format_args!(
            "<text transform=\"translate(16 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escaped(name)
        ));
    }

    fn numbers(&mut self, name: &str) {
        let bottom = self.y(0.0);
        for tick in ticks(self.x_max, self.x_step) {
            let (at, text) = (self.x(tick), number(tick, self.x_step));
            self.line(format_args!("<path d=\"M{at:.1} {bottom:.1}v5\" stroke=\"#333\"/>"));
            self.under(at, 18.0, &text);
        }
        self.under((LEFT + WIDTH - RIGHT) / 2.0, BOTTOM - 12.0, name);
    }

    fn labels(&mut self, labels: &[String]) {
        let chars = LABEL_CHARS / labels.len().max(1);
        for (number, label) in labels.iter().enumerate() {
            self.under(self.x(number as f64 + 0.5), 18.0, &shortened(label, chars));
        }
    }

    fn under(&mut self, x: f64, distance: f64, text: &str) {
        let (y, text) = (self.y(0.0) + distance, escaped(text));
        self.line(format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{text}</text>"));
    }

    fn bars(&mut self, points: &[(f64, f64)], colour: &str, number: usize, of: usize) {
        let width = BARS_PART * self.x_step / of as f64;
        for (middle, value) in points {
            let left = self.x(middle - BARS_PART * self.x_step / 2.0 + width * number as f64);
            let (width, top) = (self.x(width) - LEFT, self.y(*value));
            let height = self.y(0.0) - top;
            self.line(format_args!(
                "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
            ));
        }
    }

    fn polyline(&mut self, points: &[(f64, f64)], colour: &str) {
        let path: Vec<String> =
            points.iter().map(|point| format!("{:.1},{:.1}", self.x(point.0), self.y(point.1))).collect();
        self.line(format_args!("<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", path.join(" ")));
        // One point alone would not be seen at all.
        if points.len() <= POINTS_SHOWN_MAX {
            for point in points {
                let (x, y) = (self.x(point.0), self.y(point.1));
                self.line(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
            }
        }
    }

    fn legend(&mut self, number: usize, name: &str) {
        let (left, at) = (WIDTH - RIGHT + 16.0, self.top + TOP + 18.0 * number as f64);
        let colour = COLOURS[number % COLOURS.len()];
        self.line(format_args!("<rect x=\"{left}\" y=\"{at:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"));
        let name = escaped(&shortened(name, NAME_CHARS));
        self.line(format_args!("<text x=\"{:.1}\" y=\"{:.1}\">{name}</text>", left + 18.0, at + 10.0));
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

/// The end of a name that is too long: there paths differ.
fn shortened(name: &str, chars: usize) -> String {
    let count = name.chars().count();
    if count <= chars.max(2) {
        return name.to_owned();
    }
    std::iter::once('…').chain(name.chars().skip(count - chars.max(2) + 1)).collect()
}

/// As text and in attributes; what XML has no way to say is a blank.
fn escaped(text: &str) -> String {
    let legal = |c: char| if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') { ' ' } else { c };
    let text: String = text.chars().map(legal).collect();
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

    fn chart(x: XAxis, series: Vec<Series>) -> Chart {
        Chart { title: "a <b> & \"c\"\n\u{ffff}".into(), x, y_name: "GB/s".into(), series }
    }

    #[test]
    fn a_picture_of_nothing_and_of_odd_numbers_is_one() {
        let odd = vec![(0.0, f64::NAN), (1.0, f64::INFINITY), (2.0, 1.0)];
        for series in [vec![], vec![Series::line("x", vec![])], vec![Series::line("x", odd.clone())]] {
            for x in [XAxis::Numbers("s".into()), XAxis::Labels(vec![])] {
                let picture = svg(&[chart(x, series.clone())]);
                assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
                assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
            }
        }
        assert!(svg(&[]).ends_with("</svg>\n"));
    }

    #[test]
    fn text_is_escaped_and_long_names_keep_their_end() {
        let picture = svg(&[chart(XAxis::Numbers("s".into()), vec![Series::line("/x".repeat(40) + "/end", vec![])])]);
        assert!(picture.contains("a &lt;b&gt; &amp; &quot;c&quot;  <"), "{picture}");
        assert!(picture.contains("/x/end<") && picture.contains(">…"), "{picture}");
        assert_eq!(
            (shortened("abc", 3), shortened("abcd", 3), shortened("абвг", 0)),
            ("abc".into(), "…cd".into(), "…г".into())
        );
    }

    #[test]
    fn bars_of_two_series_stand_side_by_side_under_the_lines() {
        let labels = XAxis::Labels(vec!["1 drive".into(), "2 drives".into()]);
        let series = vec![
            Series::line("sum", vec![(0.0, 2.0), (1.0, 4.0)]),
            Series::bars("a", [1.0, 2.0]),
            Series::bars("b", [1.0]),
        ];
        let picture = svg(&[chart(labels, series)]);
        assert_eq!(picture.matches("height=\"").count(), 1 + 3 + 3, "background, legend, bars");
        assert!(picture.find("<polyline").unwrap() > picture.rfind("height=\"5").unwrap_or(0));
        assert!(picture.contains(">1 drive<") && picture.contains(">2 drives<"));
    }
}
