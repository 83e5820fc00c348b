//! `--env` and `--env-file`, as every container tool reads them.

use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::failure::{CliError, CliResult, Kind};

/// `NAME=value` entries: first those of the files, then those named; of a name without a value,
/// this process's own.
///
/// # Errors
/// [`Kind::User`], naming the place.
pub fn read(files: &[PathBuf], entries: &[String]) -> CliResult<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    for path in files {
        read_file(path, &mut found)?;
    }
    for entry in entries {
        if entry.is_empty() || entry.starts_with('=') {
            return Err(CliError::new(Kind::User, format!("--env {entry:?} has no name")));
        }
        if entry.contains('=') {
            found.push(entry.clone().into_bytes());
        } else if let Some(value) = std::env::var_os(entry) {
            found.push([entry.as_bytes(), b"=", &value.into_vec()].concat());
        }
    }
    Ok(found)
}

fn read_file(path: &Path, found: &mut Vec<Vec<u8>>) -> CliResult {
    let text = std::fs::read(path).map_err(|error| {
        CliError::new(Kind::User, format!("cannot read {}: {error}", path.display()))
    })?;
    for (number, line) in text.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        if !line.contains(&b'=') {
            let place = format!("{}:{}", path.display(), number + 1);
            return Err(CliError::new(Kind::User, format!("{place}: not NAME=VALUE")));
        }
        found.push(line.to_vec());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_first_and_bad_lines_are_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# ours\n\nA=1\n B= two words \n").unwrap();
        let files = [file.path().to_owned()];
        let read_back = read(&files, &["C=3".to_owned(), "NOT_SET_ANYWHERE".to_owned()]).unwrap();
        assert_eq!(read_back, [&b"A=1"[..], b"B= two words", b"C=3"]);
        std::fs::write(file.path(), "A=1\nnonsense\n").unwrap();
        assert!(read(&files, &[]).unwrap_err().to_string().ends_with(":2: not NAME=VALUE"));
        assert!(read(&[], &["=x".to_owned()]).is_err());
    }
}
