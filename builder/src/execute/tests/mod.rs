//! Builds through the sandbox executor, as root on this machine. Skipped with a reason where
//! there is no root, no OCI runtime or no overlayfs.

mod differential;
mod support;

use std::fs;
use std::io::Read as _;
use std::path::Path;

use super::ExecuteError;
use crate::image::{BlobsElsewhere, ImageOptions, open_partial_layout};
use support::{Case, events_text, skip_reason};

macro_rules! needs_sandbox {
    () => {
        if let Some(reason) = skip_reason() {
            eprintln!("skipped: {reason}");
            return;
        }
    };
}

#[test]
fn a_cached_rebuild_does_no_work_and_says_why_it_does_some() {
    needs_sandbox!();
    let mut case = Case::new();
    let mut text = String::from("FROM scratch\nADD rootfs.tar /\nCOPY a /a\nCOPY b /b\n");
    for number in 0..17 {
        text.push_str(&format!("RUN echo {number} >/n{number}\n"));
    }
    case.file("a", "1").file("b", "1").dockerfile(&text);
    let first = case.build().unwrap();
    assert_eq!((first.executed, first.cached), (20, 0));
    let started = std::time::Instant::now();
    let second = case.build().unwrap();
    let took = started.elapsed();
    assert_eq!((second.executed, second.cached), (0, 20));
    assert_eq!(second.manifest, first.manifest);
    eprintln!("fully cached rebuild of 20 steps: {took:?}");
    // Content decides, not time.
    case.file("b", "1");
    assert_eq!(case.build().unwrap().executed, 0);
    case.file("b", "2");
    let third = case.build().unwrap();
    assert_eq!(third.cached, 2, "ADD and COPY a stay");
    assert!(events_text(&case).contains("reason: file b changed"), "{}", events_text(&case));
    case.dockerfile(&text.replace("echo 16", "echo changed"));
    let fourth = case.build().unwrap();
    assert_eq!((fourth.executed, fourth.cached), (1, 19));
    assert!(events_text(&case).contains("reason: the instruction changed"));
}

#[test]
fn a_copied_file_of_another_stage_decides_and_not_that_stage() {
    needs_sandbox!();
    let mut case = Case::new();
    let text = |noise: &str| {
        format!(
            "FROM scratch AS a\nADD rootfs.tar /\nRUN echo same >/x; touch -d @0 /x; echo {noise} >/y\n\
             FROM scratch\nCOPY --from=a /x /x\n"
        )
    };
    case.dockerfile(&text("1"));
    case.build().unwrap();
    case.dockerfile(&text("2"));
    let again = case.build().unwrap();
    assert_eq!((again.executed, again.cached), (1, 2), "{}", events_text(&case));
}

#[test]
fn a_failing_step_shows_line_output_and_code_and_leaves_nothing() {
    needs_sandbox!();
    let mut case = Case::new();
    case.dockerfile(
        "FROM scratch\nADD rootfs.tar /\nRUN echo ok\nRUN echo before >/x; echo oh no >&2; exit 42\n",
    );
    for _ in 0..2 {
        let error = case.build().unwrap_err();
        let ExecuteError::StepFailed { at, code, last_output, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((at.line, *code, last_output.as_str()), (4, 42, "oh no\n"));
        assert!(error.to_string().starts_with("Dockerfile:4: RUN echo before"), "{error}");
    }
    // The steps before it were kept; the failed one was not.
    assert!(events_text(&case).contains("cached"));
    case.dockerfile("FROM scratch\nADD rootfs.tar /\nRUN echo ok\nRUN test ! -e /x\n");
    case.build().unwrap();
    let leftovers = fs::read_dir(case.path("build/tmp")).unwrap().count();
    assert_eq!(leftovers, 0, "work in progress is gone");
}

#[test]
fn secrets_are_there_for_the_step_only() {
    needs_sandbox!();
    let mut case = Case::new();
    case.secret("tok", "sup3rs3cret");
    case.dockerfile(
        "FROM scratch\nADD rootfs.tar /\n\
         RUN --mount=type=secret,id=tok,env=TOK,target=/s,mode=0440,gid=7 \
         test ${#TOK} = 11 && test \"$(cat /s)\" = \"$TOK\" && test $(stat -c %a:%g /s) = 440:7\n\
         RUN --mount=type=secret,id=tok test -f /run/secrets/tok\n\
         RUN test ! -e /s && test ! -e /run/secrets && test -z \"$TOK\"\n\
         RUN --mount=type=secret,id=other test ! -e /run/secrets/other\n",
    );
    case.build().unwrap();
    for (form, command) in
        [("plain", "cat /run/secrets/tok >/leak"), ("base64", "base64 /run/secrets/tok >/leak")]
    {
        case.dockerfile(&format!(
            "FROM scratch\nADD rootfs.tar /\nRUN --mount=type=secret,id=tok {command}\nRUN rm /leak\n"
        ));
        let error = case.build().unwrap_err().to_string();
        assert!(error.contains("secret tok is in the result, in /leak"), "{error}");
        assert!(error.contains(form), "{error}");
        assert!(!error.contains("sup3rs3cret"), "{error}");
    }
    case.dockerfile(
        "FROM scratch\nADD rootfs.tar /\nRUN --mount=type=secret,id=nope,required true\n",
    );
    let error = case.build().unwrap_err().to_string();
    assert!(error.starts_with("Dockerfile:3: secret nope was not given"), "{error}");
}

#[test]
fn nothing_that_is_remembered_depends_on_a_secret() {
    fn files(directory: &Path, out: &mut Vec<(std::path::PathBuf, Vec<u8>)>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            if kind.is_dir() {
                files(&path, out);
            } else if kind.is_file() {
                let bytes = fs::read(&path).unwrap();
                out.push((path, bytes));
            }
        }
    }
    needs_sandbox!();
    let mut case = Case::new();
    case.dockerfile("FROM scratch\nADD rootfs.tar /\nRUN --mount=type=secret,id=tok touch /x\n");
    let mut remembered = Vec::new();
    for (value, executed) in [("sup3rs3cret", 2), ("sup3rs3cret", 0), ("an0thers3cret", 0)] {
        case.secret("tok", value);
        assert_eq!(case.build().unwrap().executed, executed);
        let mut found = Vec::new();
        files(&case.path("build"), &mut found);
        found.sort();
        remembered.push(found);
    }
    assert!(remembered[0].len() > 3);
    // Neither whether it was searched for before nor what it is.
    assert!(remembered.iter().all(|found| *found == remembered[0]));
}

#[test]
fn mounts_show_what_they_should_and_leave_nothing() {
    needs_sandbox!();
    let mut case = Case::new();
    case.file("ctx/a", "A").file("ctx/skip", "S").file(".dockerignore", "ctx/skip\n");
    case.dockerfile(
        "FROM scratch AS other\nADD rootfs.tar /\nRUN mkdir /d && echo B >/d/b\n\
         FROM scratch\nADD rootfs.tar /\n\
         RUN --mount=source=ctx,target=/c test $(cat /c/a) = A && test ! -e /c/skip && test $(stat -c %u /c/a) = 0 && ! touch /c/x\n\
         RUN --mount=source=ctx,target=/c,rw touch /c/new && test -e /c/new\n\
         RUN --mount=from=other,source=/d,target=/o test $(cat /o/b) = B\n\
         RUN --mount=type=cache,target=/cache,mode=0700,uid=5 test $(stat -c %a:%u /cache) = 700:5 && echo 1 >/cache/f\n\
         RUN --mount=type=cache,target=/cache test $(cat /cache/f) = 1\n\
         RUN --mount=type=tmpfs,target=/t,size=1m echo x >/t/f && df /t | grep -q tmpfs\n\
         RUN test ! -e /c && test ! -e /o && test ! -e /cache && test ! -e /t\n\
         RUN --network=none test $(ls /sys/class/net | wc -l) = 1\n",
    );
    case.build().unwrap();
    assert!(!case.context("ctx/new").exists());
}

#[test]
fn what_cannot_be_done_names_line_and_remedy() {
    needs_sandbox!();
    let mut case = Case::new();
    case.file("a", "").file("b", "").file("ignored", "").file(".dockerignore", "ignored\n");
    case.file("dir/x", "");
    for (line, expected) in [
        ("COPY nope /x", "Dockerfile:3: nope does not exist; "),
        ("COPY ignored /x", "is left out by .dockerignore; add !ignored"),
        ("COPY a b /x", "2 files would all become /x; write /x/"),
        ("COPY --chown=ghost a /x", "there is no user ghost"),
        ("USER ghost\nRUN true", "Dockerfile:4: there is no user ghost"),
        ("COPY dir /etc/passwd", "is a file"),
        ("COPY a /etc/passwd/x", "goes through a file"),
        ("COPY --from=scratch a /x", "a does not exist"),
        ("ADD http://127.0.0.1:1/x /x", "Dockerfile:3: cannot download http://127.0.0.1:1/x: "),
        ("RUN --mount=source=nope,target=/x true", "nope does not exist"),
    ] {
        case.dockerfile(&format!("FROM scratch\nADD rootfs.tar /\n{line}\n"));
        let error = case.build().expect_err(line).to_string();
        assert!(error.contains(expected), "{line}: {error}");
    }
    case.options.require_isolation = true;
    case.dockerfile("FROM scratch\nADD rootfs.tar /\n");
    let error = case.build().unwrap_err().to_string();
    assert!(error.contains("shares this machine's kernel"), "{error}");
}

#[test]
fn the_same_input_gives_the_same_bytes_in_two_places() {
    needs_sandbox!();
    let build = || {
        let mut case = Case::new();
        case.options.source_date_epoch = Some(1_700_000_000);
        case.file("a/b/c", "1");
        case.dockerfile(
            "FROM scratch\nADD rootfs.tar /\nCOPY a /a\nWORKDIR /w/x\nRUN mkdir d && echo 1 >d/f && ln d/f d/g\n",
        );
        let built = case.build().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1100));
        built.manifest
    };
    assert_eq!(build(), build());
}

#[test]
fn a_layout_can_be_a_base() {
    needs_sandbox!();
    let mut case = Case::new();
    case.dockerfile(
        "FROM scratch\nADD rootfs.tar /\nENV BASE=1\nRUN echo x >/gone; mkdir /d; echo y >/d/old\n",
    );
    case.build().unwrap();
    let base = case.keep_output("base");
    case.dockerfile(&format!(
        "FROM oci:{}\nRUN test $BASE = 1 && rm /gone && rm -r /d && mkdir /d && echo z >/d/new\n\
         RUN test ! -e /gone && test ! -e /d/old && test -e /d/new\n",
        base.display()
    ));
    let built = case.build().unwrap();
    assert!(built.config.env.contains(&"BASE=1".to_owned()));
    // Whiteouts survive being a base again.
    let second = case.keep_output("second");
    case.dockerfile(&format!(
        "FROM oci:{}\nRUN test ! -e /gone && test ! -e /d/old && test -e /d/new\n",
        second.display()
    ));
    case.build().unwrap();
}

#[test]
fn a_partial_result_names_the_base_s_layers_and_does_not_read_them() {
    needs_sandbox!();
    let mut case = Case::new();
    case.dockerfile("FROM scratch\nADD rootfs.tar /\n");
    case.build().unwrap();
    let base = case.keep_output("base");
    let from = format!("FROM oci:{}\nRUN echo x >/x\n", base.display());
    case.dockerfile(&from);
    let whole = case.build().unwrap();
    case.options.partial = true;
    let partial = case.build().unwrap();
    assert_eq!((partial.executed, partial.cached), (0, 1));
    assert_eq!(partial.manifest, whole.manifest);
    let named: Vec<&String> = partial.elsewhere.0.keys().collect();
    assert_eq!(named.len(), 1);
    let blob = |layout: &Path| layout.join("blobs").join(named[0].replacen(':', "/", 1));
    assert!(!blob(&partial.oci_layout).exists());
    let options = ImageOptions::default();
    let image = open_partial_layout(&partial.oci_layout, partial.elsewhere.clone(), &options);
    let (image, mut bytes) = (image.unwrap(), Vec::new());
    image.layers()[0].open().unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(&parbake_cache::Digest::of(&bytes).to_string(), named[0]);
    // Without saying where they are, the layout is not whole.
    let lacking = open_partial_layout(&partial.oci_layout, BlobsElsewhere::default(), &options);
    assert!(lacking.is_err());
    // A layer that says something else by now is noticed by who reads it, and only then.
    fs::write(blob(&base), vec![0; bytes.len()]).unwrap();
    assert_eq!(case.build().unwrap().manifest, whole.manifest);
    case.options.partial = false;
    let error = case.build().unwrap_err();
    assert!(format!("{error:?}").contains(named[0]), "{error:?}");
}

/// Answers every request with the same bytes; counts them.
fn server(
    body: &'static str,
) -> (std::net::SocketAddr, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
    use std::io::{Read as _, Write as _};
    use std::sync::atomic::{AtomicUsize, Ordering};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let count = std::sync::Arc::new(AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            counter.fetch_add(1, Ordering::Relaxed);
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let length = body.len();
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\
                 Last-Modified: Tue, 14 Nov 2023 22:13:20 GMT\r\n\r\n"
            );
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.write_all(body.as_bytes());
        }
    });
    (address, count)
}

#[test]
fn downloads_are_checked_and_looked_up_by_content() {
    use std::sync::atomic::Ordering;
    needs_sandbox!();
    if std::process::Command::new("curl").arg("--version").output().is_err() {
        eprintln!("skipped: there is no curl");
        return;
    }
    let (address, count) = server("served");
    let sum = parbake_cache::Digest::of(b"served");
    let mut case = Case::new();
    let text = |flags: &str| {
        format!(
            "FROM scratch\nADD rootfs.tar /\nADD {flags} http://{address}/p/file?q=1 /d/\n\
             RUN test $(cat /d/file) = served && test $(stat -c %a:%Y /d/file) = 600:1700000000\n"
        )
    };
    case.dockerfile(&text(&format!("--checksum={sum}")));
    assert_eq!(case.build().unwrap().executed, 3);
    assert_eq!(case.build().unwrap().executed, 0);
    assert_eq!(count.load(Ordering::Relaxed), 1, "what a checksum names is fetched once");
    let wrong = parbake_cache::Digest::of(b"other");
    case.dockerfile(&text(&format!("--checksum={wrong}")));
    let error = case.build().unwrap_err().to_string();
    assert!(error.contains(&format!("is {sum} and should be {wrong}")), "{error}");
    case.dockerfile(&text(""));
    case.build().unwrap();
    let before = count.load(Ordering::Relaxed);
    assert_eq!(case.build().unwrap().executed, 0, "the same bytes are the same input");
    assert_eq!(count.load(Ordering::Relaxed), before + 1);
    case.options.network = super::NetworkAccess::None;
    let error = case.build().unwrap_err().to_string();
    assert!(error.contains("this build has no network"), "{error}");
}

#[test]
fn an_installed_engine_gives_the_same_image() {
    use super::{ExternalOptions, Tool, build_external};
    needs_sandbox!();
    if std::process::Command::new("buildah").arg("--version").output().is_err() {
        eprintln!("skipped: there is no buildah");
        return;
    }
    let mut case = Case::new();
    case.file("a", "1");
    case.secret("tok", "sup3rs3cret");
    case.dockerfile(
        "FROM scratch AS one\nADD rootfs.tar /\nARG V\nENV E=$V\nCOPY a /a\nSHELL [\"/bin/ash\", \"-c\"]\n\
         RUN --mount=type=secret,id=tok test -f /run/secrets/tok && echo $V >/v\nFROM one\nRUN false\n",
    );
    case.lower.build_args.insert("V".to_owned(), "7".to_owned());
    case.lower.target = Some("one".to_owned());
    let ours = case.build().unwrap();
    let options = ExternalOptions {
        tool: Tool::Buildah,
        dockerfile: case.path("Dockerfile"),
        context: case.options.context.clone(),
        output: case.path("external"),
        build_args: case.lower.build_args.clone(),
        labels: std::collections::BTreeMap::new(),
        target: Some("one".to_owned()),
        platform: case.lower.platform.clone(),
        secrets: case.options.secrets.clone(),
        no_cache: true,
        extra: vec!["--isolation=chroot".to_owned()],
    };
    let theirs = build_external(&options, &mut |_| {}).unwrap();
    assert_eq!(theirs.config.shell, ours.config.shell);
    assert_eq!(theirs.config.env, ours.config.env);
    // What it made is a base like any other.
    case.lower.target = None;
    case.dockerfile(&format!(
        "FROM oci:{}\nRUN test $(cat /v) = 7 && test $(cat /a) = 1 && test $E = 7\n",
        theirs.oci_layout.display()
    ));
    case.build().unwrap();
    let mut failing = options;
    failing.target = None;
    let error = build_external(&failing, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("buildah failed"), "{error}");
}
