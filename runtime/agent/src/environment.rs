//! The environment a program gets, and where its command is looked for.

use parbake_protocol::agent::Bytes;

/// What `docker run` gives a program when the image says nothing.
pub const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `NAME=value` entries in order of first appearance; a later entry of the same name replaces the
/// value.
#[derive(Debug, Default, Clone)]
pub struct Environment(Vec<Bytes>);

impl Environment {
    /// Adds entries on top of those there are. Entries without `=` or name are left out: no shell
    /// could have set them.
    pub fn merge(&mut self, entries: &[Bytes]) {
        for entry in entries {
            let Some(length) = name_length(entry) else { continue };
            let name = &entry[..=length];
            match self.0.iter_mut().find(|e| e.starts_with(name)) {
                Some(old) => old.clone_from(entry),
                None => self.0.push(entry.clone()),
            }
        }
    }

    /// Sets a value unless there is one.
    pub fn set_default(&mut self, name: &[u8], value: &[u8]) {
        if self.get(name).is_none() {
            self.0.push([name, b"=", value].concat());
        }
    }

    /// The value of a name.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.0.iter().find_map(|e| e.strip_prefix(name)?.strip_prefix(b"="))
    }

    /// All entries.
    pub fn entries(&self) -> &[Bytes] {
        &self.0
    }
}

fn name_length(entry: &[u8]) -> Option<usize> {
    entry.iter().position(|b| *b == b'=').filter(|n| *n > 0)
}

/// The paths to try for a command, in order: itself if it has a slash, else one for each directory
/// of `path`. An empty directory is the current one, as POSIX has it.
pub fn candidates(command: &[u8], path: &[u8]) -> Vec<Bytes> {
    if command.contains(&b'/') {
        return vec![command.to_vec()];
    }
    path.split(|b| *b == b':')
        .map(|d| if d.is_empty() { b"." as &[u8] } else { d })
        .map(|d| [d, b"/", command].concat())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_entries_win_in_place() {
        let mut env = Environment::default();
        env.merge(&[b"A=1".to_vec(), b"AB=2".to_vec(), b"=x".to_vec(), b"none".to_vec()]);
        env.merge(&[b"A=".to_vec(), b"C=\xff=".to_vec()]);
        env.set_default(b"A", b"no");
        env.set_default(b"D", b"4");
        assert_eq!(env.entries(), [&b"A="[..], b"AB=2", b"C=\xff=", b"D=4"]);
        assert_eq!(env.get(b"AB"), Some(&b"2"[..]));
        assert_eq!(env.get(b"B"), None);
    }

    #[test]
    fn commands_are_looked_up_like_execvp() {
        assert_eq!(candidates(b"./x", b"/bin"), [b"./x"]);
        assert_eq!(candidates(b"x", b"/bin::/b"), [&b"/bin/x"[..], b"./x", b"/b/x"]);
    }
}
