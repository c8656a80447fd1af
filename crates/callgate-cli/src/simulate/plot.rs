//! Demand, admissions and the bucket's level over time, as a picture.

use std::error::Error;

use callgate::{Level, Limit};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::DEFAULT;
use crate::check::rate;
use crate::table::{grouped, shown};

/// Above the highest value there is room for the legend.
const HEADROOM: f64 = 1.5;

/// A picture has at least this many columns, and less than twice as many, where there are calls enough.
const COLUMNS: usize = 300;

/// The first columns are a millisecond wide; they are joined in pairs when there are too many.
const NARROWEST: u64 = 1_000_000;

/// How often the levels are looked at in a column.
const LOOKS: u64 = 16;

/// More limits than this fit in no picture.
pub(crate) const MOST_LIMITS: usize = 20;

const WIDTH: u32 = 900;
const TITLE: u32 = 40;
const PANEL: u32 = 260;

const ASKED: RGBColor = RGBColor(176, 190, 197);
const ADMITTED: RGBColor = RGBColor(21, 101, 192);
const LEVEL: RGBColor = RGBColor(230, 81, 0);

/// What is drawn of each limit.
#[derive(Debug)]
pub(crate) struct Plot {
    /// Of a column, in nanoseconds.
    width: u64,
    limits: Vec<Vec<Column>>,
    /// When the levels are looked at again.
    next_look: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Column {
    asked: u64,
    admitted: u64,
    /// The lowest level that was seen.
    level: Option<u64>,
}

impl Column {
    fn joined(pair: &[Self]) -> Self {
        pair.iter().fold(Self::default(), |one, other| Self {
            asked: one.asked + other.asked,
            admitted: one.admitted + other.admitted,
            level: one.level.into_iter().chain(other.level).min(),
        })
    }
}

impl Plot {
    pub(crate) fn new(limits: usize) -> Self {
        Self {
            width: NARROWEST,
            limits: vec![Vec::new(); limits],
            next_look: 0,
        }
    }

    pub(crate) fn asked(&mut self, limit: usize, now: u64, tokens: u64) {
        self.column(limit, now).asked += tokens;
    }

    pub(crate) fn admitted(&mut self, limit: usize, now: u64, tokens: u64) {
        self.column(limit, now).admitted += tokens;
    }

    /// The next time up to this one at which to look at the levels.
    pub(crate) fn next_look(&mut self, now: u64) -> Option<u64> {
        self.widen(now);
        (self.next_look <= now).then_some(self.next_look)
    }

    pub(crate) fn look(&mut self, now: u64, levels: &[Level<'_>]) {
        for (limit, level) in levels.iter().enumerate() {
            let column = self.column(limit, now);
            column.level = column.level.into_iter().chain(level.remaining).min();
        }
        self.next_look = now.saturating_add(self.width / LOOKS);
    }

    /// Joins columns until there are few enough.
    fn widen(&mut self, now: u64) {
        while now / self.width >= 2 * COLUMNS as u64 {
            self.width *= 2;
            for columns in &mut self.limits {
                *columns = columns.chunks(2).map(Column::joined).collect();
            }
        }
    }

    fn column(&mut self, limit: usize, now: u64) -> &mut Column {
        self.widen(now);
        // Less than twice the columns.
        let place = usize::try_from(now / self.width).unwrap_or(0);
        let columns = &mut self.limits[limit];
        if columns.len() <= place {
            columns.resize(place + 1, Column::default());
        }
        &mut columns[place]
    }

    /// Draws a panel for each limit, one below the other.
    pub(crate) fn svg(&self, title: &str, limits: &[(String, Limit)]) -> Result<String, String> {
        let mut svg = String::new();
        let panels = u32::try_from(limits.len()).unwrap_or(u32::MAX);
        {
            let size = (WIDTH, TITLE + PANEL * panels);
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            self.draw(&root, title, limits)
                .map_err(|error| format!("the picture cannot be drawn: {error}"))?;
        }
        Ok(svg)
    }

    fn draw(&self, root: &Area<'_>, title: &str, limits: &[(String, Limit)]) -> Drawn {
        root.fill(&WHITE)?;
        let root = root.titled(title, ("sans-serif", 18))?;
        let panels = root.split_evenly((limits.len(), 1));
        for ((panel, (name, limit)), columns) in panels.iter().zip(limits).zip(&self.limits) {
            self.panel(panel, &heading(name, limit), limit, columns)?;
        }
        root.present()?;
        Ok(())
    }

    fn panel(&self, area: &Area<'_>, heading: &str, limit: &Limit, columns: &[Column]) -> Drawn {
        let width = in_seconds(self.width);
        let (scale, unit) = unit_of(width * float(columns.len() as u64));
        let step = width / scale;
        let end = step * float(columns.len().max(1) as u64);
        let rate = |tokens: u64| float(tokens) / width;
        let most = columns
            .iter()
            .map(|column| rate(column.asked.max(column.admitted)));
        let most = most.fold(0.0, f64::max).max(f64::MIN_POSITIVE) * HEADROOM;
        let burst = float(limit.capacity());
        let mut chart = ChartBuilder::on(area);
        let mut chart = chart
            .caption(heading, ("sans-serif", 14))
            .margin(8)
            .x_label_area_size(34)
            .y_label_area_size(64)
            .right_y_label_area_size(64)
            .build_cartesian_2d(0.0..end, 0.0..most)?
            .set_secondary_coord(0.0..end, 0.0..burst * HEADROOM);
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc(format!("{unit} since the first call"))
            .y_desc("tokens a second")
            .x_label_formatter(&number)
            .y_label_formatter(&number)
            .draw()?;
        let steps = |value: fn(&Column) -> u64| -> Vec<(f64, f64)> {
            let columns = columns.iter().enumerate();
            let steps = columns.flat_map(|(place, column)| {
                let start = step * float(place as u64);
                let height = rate(value(column));
                [(start, height), (start + step, height)]
            });
            steps.collect()
        };
        chart
            .draw_series(AreaSeries::new(steps(|column| column.asked), 0.0, ASKED))?
            .label("asked for")
            .legend(|at| mark(at, ASKED));
        chart
            .draw_series(LineSeries::new(steps(|column| column.admitted), ADMITTED))?
            .label("admitted")
            .legend(|at| mark(at, ADMITTED));
        let levels = columns.iter().enumerate().filter_map(|(place, column)| {
            Some((step * (float(place as u64) + 0.5), float(column.level?)))
        });
        let levels: Vec<_> = levels.collect();
        if !levels.is_empty() {
            chart
                .configure_secondary_axes()
                .y_desc("lowest level, tokens")
                .y_label_formatter(&number)
                .draw()?;
            chart
                .draw_secondary_series(LineSeries::new(levels, LEVEL))?
                .label("level of the bucket")
                .legend(|at| mark(at, LEVEL));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(ASKED)
            .draw()?;
        Ok(())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

fn heading(name: &str, limit: &Limit) -> String {
    let burst = grouped(limit.capacity());
    let is_split = name == DEFAULT || !limit.split_by().is_empty();
    let split = if is_split { ", in several buckets" } else { "" };
    format!("{}: {}, burst {burst}{split}", shown(name), rate(limit))
}

fn mark((x, y): (i32, i32), color: RGBColor) -> Rectangle<(i32, i32)> {
    Rectangle::new([(x, y - 4), (x + 16, y + 4)], color.filled())
}

/// What so many seconds are best shown in, as a part of a second, and its name.
fn unit_of(seconds: f64) -> (f64, &'static str) {
    if seconds < 300.0 {
        (1.0, "seconds")
    } else if seconds < 3.0 * 3_600.0 {
        (60.0, "minutes")
    } else if seconds < 3.0 * 86_400.0 {
        (3_600.0, "hours")
    } else {
        (86_400.0, "days")
    }
}

/// As short as it is written.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "as plotters wants it")]
fn number(value: &f64) -> String {
    ((value * 1e6).round() / 1e6).to_string()
}

fn in_seconds(nanos: u64) -> f64 {
    float(nanos) / 1e9
}

#[expect(clippy::cast_precision_loss, reason = "to be drawn")]
fn float(number: u64) -> f64 {
    number as f64
}
