//! Reading `WWW-Authenticate`: what a registry wants to see (RFC 9110, section 11.6.1).

/// One challenge: a scheme in lower case and its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Challenge {
    pub(crate) scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    /// The first parameter of that name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Reads the challenges of one header; what cannot be read is left out.
pub(crate) fn parse_challenges(header: &str) -> Vec<Challenge> {
    let mut challenges: Vec<Challenge> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        if end == 0 {
            return challenges;
        }
        let (word, after) = rest.split_at(end);
        let after_space = after.trim_start_matches([' ', '\t']);
        let Some(value) = after_space.strip_prefix('=') else {
            // A word without a value opens the next challenge.
            challenges.push(Challenge { scheme: word.to_ascii_lowercase(), parameters: vec![] });
            rest = after;
            continue;
        };
        let value = value.trim_start_matches([' ', '\t']);
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = value.find([' ', '\t', ',']).unwrap_or(value.len());
                (value[..end].to_owned(), &value[end..])
            }
        };
        if let Some(challenge) = challenges.last_mut() {
            challenge.parameters.push((word.to_ascii_lowercase(), value));
        }
        rest = after;
    }
}

/// Reads a quoted string whose opening quote is gone.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        let read = parse_challenges(
            r#"Bearer realm="https://auth.example/token?a=b,c",service="reg.example",scope="repository:x:pull,push""#,
        );
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].scheme, "bearer");
        assert_eq!(read[0].get("realm"), Some("https://auth.example/token?a=b,c"));
        assert_eq!(read[0].get("scope"), Some("repository:x:pull,push"));
        let read = parse_challenges(r#"Negotiate, BASIC realm="a \"b\"", charset=UTF-8"#);
        assert_eq!(read.iter().map(|c| &*c.scheme).collect::<Vec<_>>(), ["negotiate", "basic"]);
        assert_eq!(read[1].get("realm"), Some("a \"b\""));
        assert_eq!(read[1].get("charset"), Some("UTF-8"));
        for odd in ["", ",,,", "=", "\"", "a=\"", "Bearer realm=\"\\", "é=\"é", "Basic \u{0}"] {
            let _ = parse_challenges(odd);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_header_is_read_without_panic(header in ".{0,80}") {
            let _ = parse_challenges(&header);
        }
    }
}
