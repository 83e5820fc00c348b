//! Judges of ext4 images that share no code with the writer: e2fsck, the kernel's own reading of a
//! loop mount, and the `ext4-view` crate.
#![allow(dead_code, reason = "each test program uses some of it")]

pub mod mounted;
pub mod plot;
pub mod viewed;

use std::path::Path;
use std::process::{Command, Output};

/// Runs a tool and returns its output, or `None`, with the reason printed, if it is not installed.
pub fn tool(name: &str, arguments: &[&str]) -> Option<Output> {
    match Command::new(name).args(arguments).env("LC_ALL", "C").output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Both outputs of a tool, for messages.
pub fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Asserts that `e2fsck -fn` finds nothing. Returns what it printed.
pub fn fsck(image: &Path) -> String {
    let path = image.to_str().expect("a UTF-8 path");
    let Some(output) = tool("e2fsck", &["-fn", path]) else {
        return String::new();
    };
    let text = text(&output);
    assert!(output.status.success(), "e2fsck -fn {path}:\n{text}");
    text
}
