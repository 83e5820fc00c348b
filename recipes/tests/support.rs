//! The support matrix: every row is tried here, and `SUPPORT.md` is written from the rows.

use parbake_recipes::dockerfile::{LowerOptions, Unresolved, lower};

/// Area, construct, a Dockerfile that uses it, and what is said when it is refused.
type Row = (&'static str, &'static str, &'static str, Option<&'static str>);

const ROWS: &[Row] = &[
    ("FROM", "image, tag, digest", "FROM a:1@sha256:00\n", None),
    ("FROM", "`AS name`, several stages, `FROM stage`", "FROM a AS b\nFROM b\n", None),
    ("FROM", "`ARG` before `FROM`, `$VAR` in the image", "ARG V=1\nFROM a:$V\n", None),
    ("FROM", "`--platform=$BUILDPLATFORM`", "FROM --platform=$BUILDPLATFORM a\n", None),
    ("FROM", "`scratch`", "FROM scratch\n", None),
    ("FROM", "a variable without value", "FROM a:$V\n", Some("has no value")),
    (
        "FROM",
        "a platform that is not Linux",
        "FROM --platform=windows/amd64 a\n",
        Some("not Linux"),
    ),
    ("ARG, ENV", "scopes, defaults, `--build-arg`", "FROM a\nARG A=1 B\nENV C=$A D=${B}\n", None),
    ("ARG, ENV", "`${v:-x}` `${v:+x}` `${v:?x}`", "FROM a\nENV A=${B:-x}${B:+y}${PATH:?z}\n", None),
    (
        "ARG, ENV",
        "`${v#p}` `${v##p}` `${v%p}` `${v%%p}`",
        "FROM a\nENV A=${PATH#*/}${PATH%%:*}\n",
        None,
    ),
    ("ARG, ENV", "`${v/p/x}` `${v//p/x}`", "FROM a\nENV A=${PATH/bin/x}${PATH//:/;}\n", None),
    ("ARG, ENV", "`ENV name value` (old form)", "FROM a\nENV A b c\n", None),
    (
        "ARG, ENV",
        "TARGETARCH and the other automatic arguments",
        "FROM a\nARG TARGETARCH\nRUN x\n",
        None,
    ),
    ("ARG, ENV", "other substitutions", "FROM a\nENV A=${B:=x}\n", Some("unsupported modifier")),
    (
        "RUN",
        "shell and exec form, `SHELL`",
        "FROM a\nSHELL [\"/bin/bash\",\"-c\"]\nRUN x\nRUN [\"y\"]\n",
        None,
    ),
    (
        "RUN",
        "here-documents, several, with `#!`",
        "FROM a\nRUN <<E\n#!/bin/sh\nE\nRUN cat <<A <<-'B'\nA\n\tB\n",
        None,
    ),
    (
        "RUN",
        "`--mount=type=cache`",
        "FROM a\nRUN --mount=type=cache,target=/c,sharing=locked x\n",
        None,
    ),
    (
        "RUN",
        "`--mount=type=bind`",
        "FROM a AS b\nFROM a\nRUN --mount=from=b,target=/c,rw x\n",
        None,
    ),
    ("RUN", "`--mount=type=tmpfs`", "FROM a\nRUN --mount=type=tmpfs,target=/c,size=1m x\n", None),
    (
        "RUN",
        "`--mount=type=secret` as file and `env=`",
        "FROM a\nRUN --mount=type=secret,id=a,env=A x\n",
        None,
    ),
    ("RUN", "`--mount=type=ssh`", "FROM a\nRUN --mount=type=ssh x\n", None),
    ("RUN", "`--network=none|host|default`", "FROM a\nRUN --network=none x\n", None),
    ("RUN", "`--security=insecure`", "FROM a\nRUN --security=insecure x\n", Some("not supported")),
    ("RUN", "`--device`", "FROM a\nRUN --device=x y\n", Some("not supported")),
    (
        "COPY, ADD",
        "several sources, globs, dotfiles, JSON form",
        "FROM a\nCOPY a b* [c]d /x/\nCOPY [\"a b\",\"/x\"]\n",
        None,
    ),
    (
        "COPY, ADD",
        "`--from` stage, number or image",
        "FROM a AS b\nFROM a\nCOPY --from=b x y\nCOPY --from=0 x y\nCOPY --from=i:1 x y\n",
        None,
    ),
    (
        "COPY, ADD",
        "`--chown`, `--chmod` octal and symbolic",
        "FROM a\nCOPY --chown=u:g --chmod=u=rwX,go=rX a b\n",
        None,
    ),
    (
        "COPY, ADD",
        "`--link`, `--parents`, `--exclude`",
        "FROM a\nCOPY --link --parents --exclude=*.md a/./b c/\n",
        None,
    ),
    ("COPY, ADD", "here-documents as files", "FROM a\nCOPY <<a <<b /x/\na\nb\n", None),
    (
        "COPY, ADD",
        "local archives unpack with ADD, `--unpack`",
        "FROM a\nADD --unpack=false a.tar /x\n",
        None,
    ),
    (
        "COPY, ADD",
        "`ADD https://…` with `--checksum`",
        "FROM a\nADD --checksum=sha256:0000000000000000000000000000000000000000000000000000000000000000 https://h/f /x\n",
        None,
    ),
    (
        "COPY, ADD",
        "`ADD` of a git repository",
        "FROM a\nADD https://h/r.git /x\n",
        Some("git sources"),
    ),
    (
        "COPY, ADD",
        "a source above the build context (BuildKit quietly looks inside it)",
        "FROM a\nCOPY ../x /x\n",
        Some("leaves the build context"),
    ),
    (
        "COPY, ADD",
        "a variable in `--from`",
        "FROM a\nCOPY --from=$X a b\n",
        Some("holds a variable"),
    ),
    ("Configuration", "WORKDIR, USER", "FROM a\nWORKDIR a/b\nUSER u:g\n", None),
    (
        "Configuration",
        "CMD, ENTRYPOINT in both forms",
        "FROM a\nENTRYPOINT [\"x\"]\nCMD y z\n",
        None,
    ),
    ("Configuration", "EXPOSE ports, ranges, protocols", "FROM a\nEXPOSE 80 90-92/udp\n", None),
    (
        "Configuration",
        "VOLUME, LABEL, STOPSIGNAL, MAINTAINER",
        "FROM a\nVOLUME /x\nLABEL a=b\nSTOPSIGNAL 9\nMAINTAINER m\n",
        None,
    ),
    (
        "Configuration",
        "HEALTHCHECK, all options, NONE (becomes the ready check)",
        "FROM a\nHEALTHCHECK --interval=1s --timeout=1s --start-period=1s --start-interval=1s --retries=1 CMD x\n",
        None,
    ),
    ("Configuration", "ONBUILD", "FROM a\nONBUILD RUN x\n", Some("ONBUILD is not supported")),
    (
        "File",
        "`# escape=`, `# syntax=` of the stock front end",
        "# syntax=docker/dockerfile:1\n# escape=`\nFROM a\nRUN x `\n y\n",
        None,
    ),
    (
        "File",
        "`# syntax=` of another front end",
        "# syntax=x/y\nFROM a\n",
        Some("not the Dockerfile's own"),
    ),
    ("File", "unknown instructions and flags", "FROM a\nFOO x\n", Some("unknown instruction")),
];

#[test]
fn every_row_is_true_and_the_document_is_fresh() {
    let mut document = String::from(
        "# What a Dockerfile may contain\n\nWritten by `recipes/tests/support.rs`, which tries \
         every row. What is refused is refused before anything runs, with the line and what to \
         write instead.\n\n| | construct | |\n| --- | --- | --- |\n",
    );
    for (area, construct, text, refusal) in ROWS {
        let result = lower(text, &LowerOptions::default(), &mut Unresolved);
        let verdict = match (result, refusal) {
            (Ok(_), None) => "yes".to_owned(),
            (Err(error), Some(expected)) => {
                let error = error.to_string();
                assert!(error.contains(expected), "{construct}: {error}");
                let (_, hint) = error.split_once("; ").expect("a remedy");
                format!("refused: {hint}")
            }
            (Ok(_), Some(_)) => panic!("{construct} is not refused any more"),
            (Err(error), None) => panic!("{construct}: {error}"),
        };
        document.push_str(&format!("| {area} | {construct} | {verdict} |\n"));
    }
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("SUPPORT.md");
    if std::env::var_os("PARBAKE_UPDATE").is_some() {
        std::fs::write(&path, &document).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(committed, document, "run with PARBAKE_UPDATE=1 and commit");
}
