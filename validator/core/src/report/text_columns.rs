//! Columns of text in a terminal.

/// What separates two columns.
pub(super) const GAP: &str = "  ";

#[derive(Clone, Copy)]
pub(super) enum Side {
    Left,
    Right,
}

/// A column of text, its cells aligned to one side.
pub(super) struct Column {
    pub(super) name: String,
    /// Empty where nothing was read.
    pub(super) cells: Vec<String>,
    /// Of the widest cell, or of the name.
    width: usize,
    side: Side,
}

impl Column {
    pub(super) fn new(name: &str, cells: Vec<String>, side: Side) -> Self {
        let widths = cells.iter().map(|it| it.chars().count());
        let width = widths.chain([name.chars().count()]).max();
        Self {
            name: name.to_owned(),
            width: width.unwrap_or_default(),
            cells,
            side,
        }
    }

    pub(super) fn has_values(&self) -> bool {
        self.cells.iter().any(|it| !it.is_empty())
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn head(&self) -> String {
        self.aligned(&self.name)
    }

    pub(super) fn cell(&self, row: usize) -> String {
        match self.cells.get(row).map(String::as_str) {
            None | Some("") => self.aligned("-"),
            Some(cell) => self.aligned(cell),
        }
    }

    fn aligned(&self, text: &str) -> String {
        let width = self.width();
        match self.side {
            Side::Left => format!("{text:<width$}"),
            Side::Right => format!("{text:>width$}"),
        }
    }
}

/// The head and the rows of a table of the columns that have values and fit `width`; the more
/// important columns are first.
pub(super) fn lines(columns: Vec<Column>, width: usize) -> Vec<String> {
    let rows = columns.iter().map(|it| it.cells.len()).max();
    let mut used = 0;
    let fits = |column: &Column| {
        let wanted = used + column.width() + if used == 0 { 0 } else { GAP.len() };
        let fits = column.has_values() && wanted <= width;
        if fits {
            used = wanted;
        }
        fits
    };
    let columns: Vec<Column> = columns.into_iter().filter(fits).collect();
    let line = |cell: &dyn Fn(&Column) -> String| {
        let cells: Vec<String> = columns.iter().map(cell).collect();
        cells.join(GAP).trim_end().to_owned()
    };
    let head = line(&Column::head);
    let rows = (0..rows.unwrap_or_default()).map(|row| line(&|it: &Column| it.cell(row)));
    [head].into_iter().chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::{Column, Side, lines};

    #[test]
    fn columns_that_do_not_fit_or_have_no_values_are_left_out() {
        let column = |name: &str, cells: [&str; 2]| {
            Column::new(name, cells.map(str::to_owned).to_vec(), Side::Right)
        };
        let columns = || {
            vec![
                column("GPU", ["0", "1"]),
                column("empty", ["", ""]),
                column("too wide for it", ["1", "2"]),
                column("W", ["700", ""]),
            ]
        };
        assert_eq!(lines(columns(), 9), ["GPU    W", "  0  700", "  1    -"]);
        assert_eq!(lines(columns(), 80)[0], "GPU  too wide for it    W");
    }
}
