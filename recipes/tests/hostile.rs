//! Whatever the bytes, reading ends with a plan or with an error that names the file.

use parbake_recipes::dockerfile::{Lexer, LowerOptions, Unresolved, lower};
use parbake_recipes::glob::{Glob, PatternSet};
use parbake_recipes::recipe;
use proptest::prelude::*;

/// Text that looks enough like a Dockerfile to get past the first line.
fn dockerfile() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        "[a-z$/{}:.*\\[\\]\"'\\\\<=#%,-]{0,12}",
        Just("${A:-${B#*/}}".to_owned()),
        Just("--mount=type=cache,target=/x".to_owned()),
        Just("--from=a".to_owned()),
        Just("<<EOF".to_owned()),
        Just("[\"a\", \"b\"]".to_owned()),
        Just("\\".to_owned()),
    ];
    let keyword = prop::sample::select(vec![
        "FROM",
        "RUN",
        "COPY",
        "ADD",
        "ENV",
        "ARG",
        "LABEL",
        "WORKDIR",
        "USER",
        "CMD",
        "EXPOSE",
        "HEALTHCHECK",
        "SHELL",
        "VOLUME",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "EOF",
        "#",
        "",
    ]);
    let line = (keyword, prop::collection::vec(word, 0..5))
        .prop_map(|(keyword, words)| format!("{keyword} {}", words.join(" ")));
    prop::collection::vec(line, 0..12)
        .prop_map(|lines| format!("FROM x AS a\n{}\n", lines.join("\n")))
}

proptest! {
    #[test]
    fn dockerfiles(text in dockerfile()) {
        if let Err(error) = lower(&text, &LowerOptions::default(), &mut Unresolved) {
            prop_assert!(error.to_string().starts_with("Dockerfile"), "{error}");
        }
    }

    #[test]
    fn any_text(text in any::<String>()) {
        let _ = lower(&text, &LowerOptions::default(), &mut Unresolved);
        let _ = recipe::read("parbake.yaml", &text);
    }

    #[test]
    fn words(text in "[a$A{}:+#%/?*'\"\\\\ -]{0,40}") {
        let lookup = |name: &str| (name == "A").then(|| "a/b.c a".to_owned());
        let _ = Lexer::new('\\').word(&text, &lookup);
    }

    #[test]
    fn patterns(pattern in "[ab*?/!^\\[\\]\\\\-]{0,16}", path in "[ab/]{0,16}") {
        if let Ok(glob) = Glob::new(&pattern) {
            let _ = glob.matches(&path);
        }
        if let Ok(set) = PatternSet::new(&[&pattern]) {
            let _ = set.matches(&path);
        }
    }

    /// A pattern without special characters matches itself and nothing else.
    #[test]
    fn plain_patterns_are_names(name in "[a-z]{1,8}", other in "[a-z]{1,8}") {
        prop_assert_eq!(Glob::new(&name).unwrap().matches(&other), name == other);
    }

    #[test]
    fn recipes(key in "[a-z]{1,8}", value in "[a-z0-9{}\\[\\]:,&*!|>\"' -]{0,20}") {
        let text = format!("apiVersion: parbake.dev/v1\nbase: {{image: x}}\n{key}: {value}\n");
        if let Err(error) = recipe::read("parbake.yaml", &text) {
            prop_assert!(error.to_string().starts_with("parbake.yaml"), "{error}");
        }
    }
}
