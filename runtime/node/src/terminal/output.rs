//! Results on stdout: aligned tables for people, JSON for programs.

use std::io::Write;

use serde::Serialize;

use super::failure::{Classify, CliResult, Kind};

/// Prints a document, pretty.
pub fn json(value: &impl Serialize) -> CliResult {
    let text = serde_json::to_string_pretty(value).kind(Kind::Internal)?;
    line(&text)
}

/// Prints one line. A reader that went away is not an error.
pub fn line(text: &str) -> CliResult {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error).kind(Kind::User),
        _ => Ok(()),
    }
}

/// Prints rows under headings, columns aligned, the last one ragged.
pub fn table(headings: &[&str], rows: &[Vec<String>]) -> CliResult {
    let mut widths: Vec<usize> = headings.iter().map(|heading| heading.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let render = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (index, cell) in cells.enumerate() {
            if index + 1 == widths.len() {
                text.push_str(cell);
            } else {
                text.push_str(cell);
                let pad = widths[index].saturating_sub(cell.chars().count()) + 2;
                text.extend(std::iter::repeat_n(' ', pad));
            }
        }
        text.trim_end().to_owned()
    };
    line(&render(&mut headings.iter().copied()))?;
    for row in rows {
        line(&render(&mut row.iter().map(String::as_str)))?;
    }
    Ok(())
}
