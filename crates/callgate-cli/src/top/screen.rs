//! Draws the model.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Clear, Paragraph, Row, Table as Grid};

use super::columns::{Cell, Column, Look, Table, fit};
use super::model::{HISTORY, Order, Top, Watched};
use super::report::{heading, left};
use crate::table::{grouped, shown};

/// So many lines are for the stores, whatever their number.
const MOST_STORES: usize = 4;

/// Of the room that is left over, names get so much before drawings do.
const MOST_FOR_NAMES: usize = 24;

const HELP: &str = "\
Tab  Shift-Tab   limits, processes, buckets
j k  arrows      a row down, up; PgDn PgUp, Home End
s or >  <        sort by the next column, the one before
r                sort the other way round
/                filter by name, process or key; Esc ends it
p                pause the view (the store goes on)
q  Ctrl-C        quit

A tenant's bucket: callgate top PATH --tenant NAME
Looking changes nothing in the store.";

pub(crate) fn draw(frame: &mut Frame<'_>, top: &mut Top) {
    let stores = top.stores.len();
    let lines = stores.min(MOST_STORES) + usize::from(stores > MOST_STORES);
    let heights = [1, u16::try_from(lines).unwrap_or(1), 1];
    let [title, header, tabs, rows, foot] = Layout::vertical([
        Constraint::Length(heights[0]),
        Constraint::Length(heights[1]),
        Constraint::Length(heights[2]),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_title(frame, title, top);
    draw_stores(frame, header, top);
    draw_tabs(frame, tabs, top);
    draw_rows(frame, rows, top);
    draw_foot(frame, foot, top);
    if top.is_help {
        draw_help(frame);
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, top: &Top) {
    let mut line = Line::from(vec![
        "callgate top".bold(),
        format!("  every {:?}", top.interval).dim(),
    ]);
    if top.is_paused {
        line.push_span("  view paused".bold().yellow());
    }
    let fields = top.wanted.fields();
    let fields: Vec<_> = fields
        .map(|(field, value)| format!("{field}={value}"))
        .collect();
    if !fields.is_empty() {
        line.push_span(Span::raw(format!("  {}", shown(&fields.join(" ")))).cyan());
    }
    frame.render_widget(line, area);
}

fn draw_stores(frame: &mut Frame<'_>, area: Rect, top: &Top) {
    let width = usize::from(area.width);
    let stores = top.stores.iter().take(MOST_STORES);
    let mut lines: Vec<_> = stores.map(|store| about(store, top, width)).collect();
    let more = top.stores.len().saturating_sub(MOST_STORES);
    if more > 0 {
        lines.push(format!("and {more} more").dim().into());
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// What a store is at the moment, or why it cannot be seen.
fn about<'a>(watched: &Watched, top: &Top, width: usize) -> Line<'a> {
    match &watched.found {
        Err(error) => fit(&shown(&format!("{}: {error}", watched.name)), width)
            .red()
            .into(),
        Ok(store) => {
            let mut line = heading(store);
            if let Some(time) = watched.replaced(top.now) {
                line = format!("another file since {}; {line}", left(time));
            }
            fit(&line, width).into()
        }
    }
}

fn draw_tabs(frame: &mut Frame<'_>, area: Rect, top: &Top) {
    let mut line = Line::default();
    for table in Table::ALL {
        let title = format!(" {} ", table.title());
        line.push_span(if table == top.table {
            title.bold().reversed()
        } else {
            title.into()
        });
    }
    let Order {
        column,
        is_reversed,
    } = top.order();
    let reversed = if is_reversed { ", reversed" } else { "" };
    let rows = grouped(top.rows.len() as u64);
    line.push_span(format!("  {rows} by {}{reversed}", column.name()).dim());
    if !top.filter.is_empty() {
        line.push_span(format!("  only those with '{}'", shown(&top.filter)).yellow());
    }
    frame.render_widget(line, area);
}

fn draw_rows(frame: &mut Frame<'_>, area: Rect, top: &mut Top) {
    let page = usize::from(area.height.saturating_sub(1));
    top.page = page.max(1);
    let columns = columns(top, usize::from(area.width));
    let order = top.order();
    let header = columns.iter().map(|(column, look, width)| {
        let title = fit(look.title, *width);
        let style = if *column == order.column {
            Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED)
        } else {
            Style::new().add_modifier(Modifier::BOLD)
        };
        aligned(title, look).style(style)
    });
    let first = first(top, page);
    let shown = top.rows.iter().enumerate().skip(first).take(page);
    let rows = shown.map(|(place, &row)| {
        let cells = columns.iter().map(|(column, look, width)| {
            let cell = top.cell(row, *column);
            aligned(cell.text(*width), look).style(style(*column, &cell))
        });
        let style = if place == top.selected {
            Style::new().add_modifier(Modifier::REVERSED)
        } else {
            Style::new()
        };
        Row::new(cells).style(style)
    });
    let widths = columns
        .iter()
        .map(|(_, _, width)| u16::try_from(*width).unwrap_or(u16::MAX));
    let grid = Grid::new(rows, widths.map(Constraint::Length))
        .header(Row::new(header))
        .column_spacing(1);
    frame.render_widget(grid, area);
    if top.rows.is_empty() {
        let below = Rect {
            y: area.y.saturating_add(2),
            height: area.height.saturating_sub(2),
            ..area
        };
        frame.render_widget(Paragraph::new(nothing(top)), below);
    }
}

/// The first row on the screen, so that the selected one is there too.
fn first(top: &mut Top, page: usize) -> usize {
    let lowest = (top.selected + 1).saturating_sub(page);
    let highest = top.selected.min(top.rows.len().saturating_sub(page));
    top.first = top.first.clamp(lowest.min(highest), highest);
    top.first
}

/// The columns for which there is room, with their widths.
fn columns(top: &Top, width: usize) -> Vec<(Column, Look, usize)> {
    let mut columns: Vec<_> = top
        .columns()
        .map(|column| (column, column.look()))
        .collect();
    let needed = |columns: &[(Column, Look)]| -> usize {
        let widths: usize = columns.iter().map(|(_, look)| look.width).sum();
        widths + columns.len().saturating_sub(1)
    };
    while needed(&columns) > width {
        let ranks = columns.iter().map(|(_, look)| look.rank);
        match ranks.max() {
            Some(rank) if rank > 0 => columns.retain(|(_, look)| look.rank < rank),
            _ => break,
        }
    }
    let rest = width.saturating_sub(needed(&columns));
    let name = rest.min(MOST_FOR_NAMES);
    let drawings = columns.iter().filter(|(column, _)| column.is_drawing());
    let drawing = (rest - name).checked_div(drawings.count()).unwrap_or(0);
    let wide = |(column, look): (Column, Look)| {
        let more = match column {
            Column::Limit => name,
            _ if column.is_drawing() => drawing.min(HISTORY - look.width),
            _ => 0,
        };
        let width = look.width + more;
        (column, look, width)
    };
    columns.into_iter().map(wide).collect()
}

fn aligned<'a>(text: String, look: &Look) -> Text<'a> {
    Text::from(text).alignment(if look.is_number {
        Alignment::Right
    } else {
        Alignment::Left
    })
}

fn style(column: Column, cell: &Cell<'_>) -> Style {
    let style = Style::new();
    match (column, cell) {
        (_, Cell::Left(_)) => style.fg(Color::Yellow),
        (Column::RejectedRate, Cell::Tenths(1..)) | (Column::RejectedTrend, _) => {
            style.fg(Color::Red)
        }
        (_, Cell::Level(0, _) | Cell::Gauge(0, _)) => style.fg(Color::Red),
        (Column::AdmittedTrend, _) | (_, Cell::Gauge(..)) => style.fg(Color::Green),
        (_, Cell::Count(0) | Cell::Tenths(0) | Cell::Split(_)) => style.add_modifier(Modifier::DIM),
        _ => style,
    }
}

/// Why there is no row.
fn nothing(top: &Top) -> Vec<Line<'static>> {
    let found = || {
        top.stores
            .iter()
            .filter_map(|store| store.found.as_ref().ok())
    };
    let unclear: Vec<_> = found().flat_map(|store| store.unclear.clone()).collect();
    if found().next().is_none() {
        vec!["waiting for a store that can be looked into".into()]
    } else if !top.filter.is_empty() {
        vec!["none has this in its name; Esc ends the filter".into()]
    } else if top.table != Table::Buckets {
        vec!["none yet: they come with the first process".into()]
    } else if !top.wanted.is_anything() {
        vec!["all buckets of limits that are split are full".into()]
    } else if unclear.is_empty() {
        vec!["no limit is split by this field".into()]
    } else {
        unclear.into_iter().map(Line::from).collect()
    }
}

fn draw_foot(frame: &mut Frame<'_>, area: Rect, top: &Top) {
    let line = if top.is_typing {
        Line::from(format!("/{}_", shown(&top.filter))).yellow()
    } else {
        let keys = [
            ("q", "quit"),
            ("Tab", "next table"),
            ("< >", "sort"),
            ("r", "reverse"),
            ("/", "filter"),
            ("p", "pause"),
            ("?", "help"),
        ];
        let spans = keys.map(|(key, what)| [key.bold(), format!(" {what}   ").dim()]);
        spans.into_iter().flatten().collect()
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame<'_>) {
    let lines: Vec<_> = HELP.lines().map(Line::from).collect();
    let size = |length: usize| u16::try_from(length).unwrap_or(u16::MAX);
    let widest = HELP.lines().map(|line| line.chars().count()).max();
    let area = frame.area().centered(
        Constraint::Max(size(widest.unwrap_or(0) + 4)),
        Constraint::Max(size(lines.len() + 2)),
    );
    let block = Block::bordered()
        .title(" Keys ")
        .padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}
