//! `--flags` of instructions and the fields of `RUN --mount=…`.

use crate::RecipeError;
use crate::error::{Location, nearest};

/// The flags of one instruction, checked against what it knows.
#[derive(Debug)]
pub struct Flags<'a> {
    at: &'a Location,
    keyword: &'static str,
    values: Vec<(&'static str, String)>,
}

impl<'a> Flags<'a> {
    /// Sorts flags out. Names in `known` end in `=` when they need a value and in `*=` when they
    /// may be given more than once; others are switches.
    ///
    /// # Errors
    /// For an unknown or repeated flag, and for one without its value.
    pub fn read(
        at: &'a Location,
        keyword: &'static str,
        flags: &[String],
        known: &[&'static str],
    ) -> Result<Self, RecipeError> {
        let mut values: Vec<(&'static str, String)> = Vec::new();
        for flag in flags {
            let flag = flag.strip_prefix("--").unwrap_or(flag);
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (flag, None),
            };
            let plain = |known: &'static str| known.trim_end_matches('=').trim_end_matches('*');
            let Some(spec) = known.iter().copied().find(|known| plain(known) == name) else {
                let names: Vec<String> =
                    known.iter().map(|known| format!("--{}", plain(known))).collect();
                let hint = match nearest(name, known.iter().map(|known| plain(known))) {
                    Some(known) => format!("did you mean --{known}?"),
                    None if names.is_empty() => format!("{keyword} takes no flags"),
                    None => format!("{keyword} knows {}", names.join(", ")),
                };
                return Err(at.error(format!("unsupported flag --{name} of {keyword}"), hint));
            };
            let value = match value {
                Some(value) => value.to_owned(),
                None if spec.ends_with('=') => {
                    return Err(at.error(
                        format!("flag --{name} of {keyword} has no value"),
                        format!("write --{name}=VALUE"),
                    ));
                }
                None => "true".to_owned(),
            };
            let spec_name = plain(spec);
            if !spec.ends_with("*=") && values.iter().any(|(known, _)| *known == spec_name) {
                return Err(at.error(
                    format!("flag --{name} of {keyword} is given twice"),
                    "keep one of them",
                ));
            }
            values.push((spec_name, value));
        }
        Ok(Self { at, keyword, values })
    }

    /// The value, where given and not empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value.as_str())
            .filter(|value| !value.is_empty())
    }

    /// All values of a flag that may be repeated.
    pub fn all<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'s str> {
        self.values.iter().filter(move |(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// A switch: `--name`, `--name=true`, `--name=false`; absent is `None`.
    ///
    /// # Errors
    /// For any other value.
    pub fn switch(&self, name: &str) -> Result<Option<bool>, RecipeError> {
        match self.get(name).map(str::to_lowercase).as_deref() {
            None => Ok(None),
            Some("true" | "1") => Ok(Some(true)),
            Some("false" | "0") => Ok(Some(false)),
            Some(other) => Err(self.at.error(
                format!("flag --{name} of {} is {other:?}", self.keyword),
                format!("write --{name} or --{name}=false"),
            )),
        }
    }
}

/// The fields of `--mount=…`, values still unexpanded. A bare word has no value.
///
/// # Errors
/// When a quoted field is not closed.
pub fn mount_fields(
    at: &Location,
    text: &str,
) -> Result<Vec<(String, Option<String>)>, RecipeError> {
    let mut fields = Vec::new();
    let mut field = String::new();
    let mut quoted = false;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' if quoted || field.is_empty() => quoted = !quoted,
            ',' if !quoted => fields.push(std::mem::take(&mut field)),
            c => field.push(c),
        }
    }
    if quoted {
        return Err(at.error(format!("--mount={text}: a quote is not closed"), "close it"));
    }
    fields.push(field);
    Ok(fields
        .into_iter()
        .map(|field| match field.split_once('=') {
            Some((name, value)) => (name.to_lowercase(), Some(value.to_owned())),
            None => (field.to_lowercase(), None),
        })
        .collect())
}

/// A duration in Go's spelling (`1m30s`, `1.5h`, `200ms`), in nanoseconds.
#[must_use]
pub fn duration(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let mut rest = text;
    let mut total = 0_f64;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let value: f64 = rest[..number].parse().ok()?;
        rest = &rest[number..];
        let unit = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        total += value
            * match &rest[..unit] {
                "ns" => 1.0,
                "us" | "µs" => 1e3,
                "ms" => 1e6,
                "s" => 1e9,
                "m" => 60e9,
                "h" => 3600e9,
                _ => return None,
            };
        rest = &rest[unit..];
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded below")]
    (!text.is_empty() && total < 9e18).then_some(total.round() as u64)
}

/// A size with an optional binary unit (`64m`, `1GiB`), in bytes.
#[must_use]
pub fn bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let shift =
        match text[digits..].trim().to_lowercase().trim_end_matches("ib").trim_end_matches('b') {
            "" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            _ => return None,
        };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes() {
        assert_eq!(duration("1m30s"), Some(90_000_000_000));
        assert_eq!(duration("1.5h"), Some(5_400_000_000_000));
        assert_eq!(duration("200ms"), Some(200_000_000));
        for bad in ["", "5", "s", "1x", "1s2", "-1s"] {
            assert_eq!(duration(bad), None, "{bad}");
        }
        assert_eq!(bytes("64m"), Some(64 << 20));
        assert_eq!(bytes("1GiB"), Some(1 << 30));
        assert_eq!(bytes("512"), Some(512));
        assert_eq!(bytes("99999999t"), None);
        assert_eq!(bytes("x"), None);
    }

    #[test]
    fn mount_fields_are_comma_separated_with_quotes() {
        let at = Location::line("D", 1);
        let fields = mount_fields(&at, "type=bind,\"target=/a,b\",RO").unwrap();
        assert_eq!(fields[1], ("target".into(), Some("/a,b".into())));
        assert_eq!(fields[2], ("ro".into(), None));
        assert!(mount_fields(&at, "\"x").is_err());
    }
}
