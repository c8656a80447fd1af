//! Tables in Markdown.

use crate::measure::{Cost, Figure};

/// What each row of a table came to in one column.
pub(crate) type Column = Vec<(&'static str, Cost)>;

/// Prints a table with the rows of the first column.
pub(crate) fn costs(heads: &[String], columns: &[Column]) {
    head(heads);
    for (name, _) in &columns[0] {
        row(
            name,
            columns.iter().map(|column| find(column, name).map(cost)),
        );
    }
}

/// Prints the first rows of a table.
pub(crate) fn head(heads: &[String]) {
    println!("| | {} |", heads.join(" | "));
    println!("|---{}|", "|---".repeat(heads.len()));
}

/// Prints a row; some of its cells may be empty.
pub(crate) fn row(name: &str, cells: impl Iterator<Item = Option<String>>) {
    print!("| {name} |");
    for cell in cells {
        match cell {
            Some(cell) => print!(" {cell} |"),
            None => print!(" |"),
        }
    }
    println!();
}

/// Prints whether a target was kept to.
pub(crate) fn target(what: &str, most: f64, measured: Figure) {
    let value = measured.value;
    let verdict = match measured.is_at_most(most) {
        Some(true) => "ok",
        Some(false) => "MISSED",
        None => "too noisy to tell",
    };
    println!("| {what} | {most} | {value:.3} | {verdict} |");
}

/// The row of a column that has this name.
pub(crate) fn find(column: &Column, name: &str) -> Option<Cost> {
    let mut rows = column.iter();
    rows.find(|row| row.0 == name).map(|row| row.1)
}

pub(crate) fn ratio(column: &Column, name: &str) -> Figure {
    find(column, name).expect("a row of the table").ratio
}

/// The highest of a row, or the highest quotient of a row and another one.
pub(crate) fn worst(columns: &[Column], name: &str, over: Option<&str>) -> Figure {
    let figures = columns.iter().map(|column| {
        let figure = ratio(column, name);
        over.map_or(figure, |over| figure.over(ratio(column, over)))
    });
    highest(figures)
}

pub(crate) fn highest(figures: impl Iterator<Item = Figure>) -> Figure {
    let highest = figures.max_by(|one, other| one.value.total_cmp(&other.value));
    highest.expect("a column")
}

fn cost(cost: Cost) -> String {
    let Cost { nanos, ratio } = cost;
    if ratio.value.is_nan() {
        return "too noisy".to_owned();
    }
    let noisy = if ratio.is_noisy() { "too noisy: " } else { "" };
    format!("{noisy}{:.2} ({nanos:.1})", ratio.value)
}
