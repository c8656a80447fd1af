//! Tables, and the names and numbers in them.

use comfy_table::{CellAlignment, ColumnConstraint, Table, presets};

/// A list of names takes a new line after so many characters, so that a table of usual names fits 80.
const LIST_WIDTH: usize = 34;

/// A table without lines, with numbers to the right. It is as wide as its names: a broken name cannot be
/// searched for.
pub(crate) fn table<const N: usize>(header: [&str; N], numbers: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if numbers.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Names with commas, on as many lines as a cell needs for them.
pub(crate) fn listed(names: &[impl AsRef<str>]) -> String {
    let mut text = String::new();
    let mut width = 0;
    for name in names {
        let name = shown(name.as_ref());
        let length = name.chars().count() + 2;
        if width > 0 && width + length > LIST_WIDTH {
            text.push_str(",\n");
            width = 0;
        } else if width > 0 {
            text.push_str(", ");
        }
        text.push_str(&name);
        width += length;
    }
    text
}

/// A name with no character that a terminal would obey.
pub(crate) fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}

/// A number with its digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Hides a column that has nothing.
pub(crate) fn hide_if_empty(table: &mut Table, column: usize) {
    let mut cells = table.column_cells_iter(column).flatten();
    if cells.all(|cell| cell.content().is_empty())
        && let Some(column) = table.column_mut(column)
    {
        column.set_constraint(ColumnConstraint::Hidden);
    }
}
