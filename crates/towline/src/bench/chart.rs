//! The figures as a picture: for each case a bar of its GB/s, and a mark where its limit is.
//!
//! Plain SVG without scripts, fonts of the reader's system, readable in light and dark.

use std::fmt::Write;

use super::row::Row;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 300.0;
const RIGHT: f64 = 120.0;
const TOP: f64 = 54.0;
const STEP: f64 = 26.0;
const BAR: f64 = 16.0;
/// Lines of the scale.
const TICKS: u32 = 5;

/// Draws the rows, in order.
pub(crate) fn draw(rows: &[Row]) -> String {
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
    let bottom = TOP + STEP * f64::from(count);
    let scale = scale(rows);
    let mut svg = String::new();
    // Writing to a text can't fail.
    _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <style>text {{ fill: #222 }} .bar {{ fill: #2a78b5 }} .limit {{ stroke: #c4511f; stroke-width: 2.5 }} \
         .grid {{ stroke: #8884 }} .paper {{ fill: #fff }} \
         @media (prefers-color-scheme: dark) {{ text {{ fill: #ddd }} .paper {{ fill: #1b1b1b }} }}</style>\n\
         <rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n\
         <text x=\"12\" y=\"20\" font-size=\"15\">towline bench kv: GB/s (bar) and the machine's limit (mark)</text>",
        height = bottom + 16.0
    );
    for tick in 0..=TICKS {
        let value = scale * f64::from(tick) / f64::from(TICKS);
        let x = place(value, scale);
        _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            TOP - 8.0,
            short(value)
        );
    }
    for (index, row) in (0..count).zip(rows) {
        bar(&mut svg, row, (TOP + STEP * f64::from(index) + (STEP - BAR) / 2.0, scale));
    }
    svg.push_str("</svg>\n");
    svg
}

fn bar(svg: &mut String, row: &Row, (y, scale): (f64, f64)) {
    let end = place(row.gb_per_s, scale);
    let (text, mark) = match row.limit_gb_per_s {
        Some(limit) => {
            let x = place(limit, scale);
            let mark = format!(
                "<line class=\"limit\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
                y - 3.0,
                y + BAR + 3.0
            );
            (format!("{} of {}", short(row.gb_per_s), short(limit)), mark)
        }
        None => (format!("{}, no limit", short(row.gb_per_s)), String::new()),
    };
    let (base, title) = (y + BAR - 3.5, escape(&row.title()));
    _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{base:.1}\" text-anchor=\"end\">{title}</text>\
         <rect class=\"bar\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\"/>{mark}\
         <text x=\"{:.1}\" y=\"{base:.1}\">{text}</text>",
        LEFT - 8.0,
        end - LEFT,
        WIDTH - RIGHT + 8.0
    );
}

/// The end of the scale: the highest value, rounded up to 1, 2 or 5 times a power of ten.
fn scale(rows: &[Row]) -> f64 {
    let values = rows.iter().flat_map(|row| [Some(row.gb_per_s), row.limit_gb_per_s]).flatten();
    let highest = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    if highest <= 0.0 {
        return 1.0;
    }
    let unit = 10_f64.powf(highest.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * unit);
    steps.into_iter().find(|step| *step >= highest).unwrap_or(highest)
}

fn place(value: f64, scale: f64) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * (value / scale).clamp(0.0, 1.0)
}

fn short(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::tests::sample;

    #[test]
    fn every_row_has_a_bar_and_its_limit_a_mark() {
        let svg = draw(&[sample(4.0, Some(8.0)), sample(2.0, None)]);
        assert_eq!(svg.matches("class=\"bar\"").count(), 2);
        assert_eq!(svg.matches("class=\"limit\"").count(), 1);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("shm read 1MiB in 4KiB random") && svg.contains("4.00 of 8.00"));
    }

    #[test]
    fn the_scale_ends_at_a_round_value() {
        for (highest, end) in [(0.3, 0.5), (4.2, 5.0), (9.0, 10.0), (11.0, 20.0), (0.0, 1.0)] {
            let rows: Vec<Row> = (highest > 0.0).then(|| sample(highest, None)).into_iter().collect();
            assert!((scale(&rows) - end).abs() < 1e-9, "{highest}");
        }
    }
}
