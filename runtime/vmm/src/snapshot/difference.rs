//! Which pages of a machine's memory differ from the image it was restored from: all that a copy
//! on the same host needs besides that image.
//!
//! The pages are in a sparse file of the image's size, each at its own offset; a hole is zeros. The
//! state file lists them, because a file system need not tell a hole from data. A copy of a copy
//! lists what either has changed, against the same image: restoring it takes no longer.

use serde::{Deserialize, Serialize};

use super::StateError;

/// Pages that follow one another in the memory image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The first one's number.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// The runs of marked pages. `base` is the number of the map's first page.
pub fn runs(map: &[bool], base: u64, into: &mut Vec<Run>) {
    for (page, _) in (base..).zip(map).filter(|(_, marked)| **marked) {
        match into.last_mut() {
            Some(run) if run.first + run.count == page => run.count += 1,
            _ => into.push(Run { first: page, count: 1 }),
        }
    }
}

/// Bounds what a state file lists: in order, apart, and inside of `pages` pages.
///
/// # Errors
/// [`StateError::Invalid`].
pub fn check(runs: &[Run], pages: u64) -> Result<(), StateError> {
    let mut end = 0;
    for run in runs {
        let next = run.first.checked_add(run.count).filter(|&next| next <= pages);
        match next {
            Some(next) if run.first >= end && run.count > 0 => end = next,
            _ => {
                return Err(StateError::Invalid {
                    what: "list of changed pages".into(),
                    why: format!("{} pages from {} of {pages}", run.count, run.first),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn run(first: u64, count: u64) -> Run {
        Run { first, count }
    }

    #[test]
    fn runs_join_where_pages_follow_one_another() {
        let mut found = Vec::new();
        runs(&[true, true, false, true], 10, &mut found);
        // The next region's pages follow in the image.
        runs(&[true, false], 14, &mut found);
        assert_eq!(found, [run(10, 2), run(13, 2)]);
        check(&found, 15).expect("in order");
    }

    #[test]
    fn impossible_lists_are_refused() {
        for list in [
            vec![run(0, 0)],
            vec![run(4, 2), run(5, 1)],
            vec![run(4, 1), run(0, 1)],
            vec![run(9, 2)],
            vec![run(u64::MAX, 2)],
        ] {
            assert!(check(&list, 10).is_err(), "{list:?}");
        }
        check(&[], 10).expect("nothing changed");
        check(&[run(0, 5), run(5, 5)], 10).expect("touching is fine");
    }
}
