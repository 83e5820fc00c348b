//! Images from registries: a real one, filled by skopeo, and one made of a few lines here that
//! does what registries do on bad days.

mod layers;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use layers::{Form, Layout, Stored, Tar, flatten_with, sha256};
use parbake_builder::flatten::FlattenOptions;
use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::image::{self, Image, ImageOptions, ImageSource, RegistryOptions};

fn noise(length: u32) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

fn stack() -> Vec<Vec<u8>> {
    vec![
        Tar::new().directory("d").file("d/noise", noise(3 << 20)).file("d/gone", "x").finish(),
        Tar::new().mark("d/.wh.gone").hardlink("link", "d/noise").finish(),
    ]
}

fn open(source: &str, registry: RegistryOptions) -> Result<Image, String> {
    let options = ImageOptions { registry, ..ImageOptions::default() };
    let source: ImageSource = source.parse().expect("a source");
    image::open(&source, &options, &mut |_| {}).map_err(|error| error.to_string())
}

/// An empty credentials file, so that those of whoever runs the tests are not used.
fn nobody() -> (tempfile::NamedTempFile, RegistryOptions) {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), "{}").expect("write");
    let options =
        RegistryOptions { authfile: Some(file.path().to_owned()), ..RegistryOptions::default() };
    (file, options)
}

fn build(image: &Image, directory: &Path) -> String {
    let out = directory.join("image");
    build_ext4(image, &out, &BuildOptions::default(), &mut |_| {}).expect("build");
    sha256(&std::fs::read(out).expect("image"))
}

/// Runs a tool; `false` with the reason printed if it is not installed.
fn runs(name: &str, arguments: &[&str]) -> bool {
    match Command::new(name).args(arguments).output() {
        Ok(output) => {
            assert!(
                output.status.success(),
                "{name} {arguments:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            true
        }
        Err(error) => {
            println!("skipped: {name}: {error}");
            false
        }
    }
}

struct Registry {
    child: Child,
    host: String,
    _directory: tempfile::TempDir,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a real registry; `None` with the reason printed if none is installed.
fn registry() -> Option<Registry> {
    let port = TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("port").port();
    let directory = tempfile::tempdir().expect("temporary directory");
    let host = format!("127.0.0.1:{port}");
    let configuration = format!(
        "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\nhttp: {{addr: \"{host}\"}}\n",
        directory.path().join("data").display()
    );
    let file = directory.path().join("config.yml");
    std::fs::write(&file, configuration).expect("write");
    let child = Command::new("docker-registry")
        .arg("serve")
        .arg(&file)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let child = match child {
        Ok(child) => child,
        Err(error) => {
            println!("skipped: docker-registry: {error}");
            return None;
        }
    };
    let registry = Registry { child, host, _directory: directory };
    for _ in 0..200 {
        if TcpStream::connect(&registry.host).is_ok() {
            return Some(registry);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("the registry does not answer");
}

#[test]
fn every_way_to_an_image_gives_the_same_bytes() {
    let Some(registry) = registry() else { return };
    let (_file, anonymous) = nobody();
    let work = tempfile::tempdir().expect("temporary directory");
    let layout = Layout::of(stack());
    // skopeo wants a name in the index.
    let index = std::fs::read_to_string(layout.path().join("index.json")).expect("index");
    let mut index: serde_json::Value = serde_json::from_str(&index).expect("JSON");
    index["manifests"][0]["annotations"] =
        serde_json::json!({"org.opencontainers.image.ref.name": "v1"});
    std::fs::write(layout.path().join("index.json"), index.to_string()).expect("index");
    let wanted = build(&layout.open().expect("image"), work.path());

    let from = format!("oci:{}:v1", layout.path().display());
    let host = &registry.host;
    let archive = work.path().join("archive.tar").display().to_string();
    let save = work.path().join("save.tar").display().to_string();
    let copies = [
        (
            vec!["--dest-tls-verify=false"],
            format!("docker://{host}/a/b:v1"),
            format!("docker://{host}/a/b:v1"),
        ),
        (
            vec!["--dest-tls-verify=false", "--format=v2s2"],
            format!("docker://{host}/a/b:v2"),
            format!("docker://{host}/a/b:v2"),
        ),
        (
            vec![
                "--dest-tls-verify=false",
                "--dest-compress",
                "--dest-compress-format=zstd",
                "--dest-force-compress-format",
            ],
            format!("docker://{host}/zstd:latest"),
            format!("docker://{host}/zstd"),
        ),
        (vec![], format!("oci-archive:{archive}:v1"), format!("oci-archive:{archive}:v1")),
        (vec![], format!("docker-archive:{save}:some/image:v1"), format!("docker-archive:{save}")),
    ];
    for (options, to, source) in &copies {
        let mut arguments = vec!["copy", "--quiet", "--insecure-policy"];
        arguments.extend(options);
        arguments.extend([from.as_str(), to.as_str()]);
        let output = Command::new("skopeo").args(&arguments).output();
        let Ok(output) = output else {
            println!("skipped: skopeo is not installed");
            return;
        };
        let errors = String::from_utf8_lossy(&output.stderr);
        if errors.contains("unknown flag") {
            println!("skipped: this skopeo has no {options:?}");
            continue;
        }
        assert!(output.status.success(), "skopeo {arguments:?}: {errors}");
        let image =
            open(source, anonymous.clone()).unwrap_or_else(|error| panic!("{source}: {error}"));
        assert_eq!(build(&image, work.path()), wanted, "{source}");
        assert_eq!(image.config().env, ["A=1"], "{source}");
    }
    // By digest; and names that are not there.
    let manifest = layout.open().expect("image").manifest_digest().expect("digest");
    let image = open(&format!("docker://{host}/a/b@{manifest}"), anonymous.clone()).expect("image");
    assert_eq!(image.manifest_digest(), Some(manifest));
    assert_eq!(build(&image, work.path()), wanted);
    for name in ["a/b:none", "none:latest"] {
        let source = format!("docker://{host}/{name}");
        let error = open(&source, anonymous.clone()).err().expect("refused");
        assert!(error.contains(name), "{error}");
    }
    for (name, found) in [
        ("some/image:v1", true),
        ("image:v1", true),
        ("image:v2", false),
        ("@0", true),
        ("@1", false),
    ] {
        let source = format!("docker-archive:{save}:{name}");
        assert_eq!(open(&source, anonymous.clone()).is_ok(), found, "{name}");
    }
    let error = open(&format!("docker-archive:{save}:none"), anonymous).err().expect("refused");
    assert!(error.contains("some/image:v1"), "{error}");
}

#[test]
fn docker_archives_of_the_old_form() {
    let layers = stack();
    let config = layers::config(layers.iter().map(|tar| sha256(tar))).to_string();
    let config_name = format!("{}.json", &sha256(config.as_bytes())[7..]);
    let manifest = serde_json::json!([
        {"Config": config_name, "RepoTags": ["one:latest"], "Layers": ["a/layer.tar", "b/layer.tar"]},
        {"Config": config_name, "RepoTags": null, "Layers": ["a/layer.tar", "c/layer.tar"]},
    ]);
    // Layers stand in any order, and what is there twice is a link.
    let tar = Tar::new()
        .file("b/layer.tar", &layers[1])
        .symlink("c/layer.tar", "../b/layer.tar")
        .file(&config_name, &config)
        .file("manifest.json", manifest.to_string())
        .file("a/layer.tar", &layers[0])
        .finish();
    let work = tempfile::tempdir().expect("temporary directory");
    let wanted = build(&Layout::of(stack()).open().expect("image"), work.path());
    for (name, bytes) in [
        ("plain.tar", tar.clone()),
        ("gzip.tar", layers::gzip(&tar)),
        ("zstd.tar", layers::zstd(&tar)),
    ] {
        let path = work.path().join(name);
        std::fs::write(&path, bytes).expect("write");
        for reference in ["one", "one:latest", "@1"] {
            let source = format!("docker-archive:{}:{reference}", path.display());
            let image = open(&source, RegistryOptions::default()).expect("image");
            assert_eq!(build(&image, work.path()), wanted, "{source}");
        }
        let error = open(&format!("docker-archive:{}", path.display()), RegistryOptions::default());
        assert!(error.err().expect("refused").contains("several images"));
    }
    // A configuration that is not what its name says.
    let path = work.path().join("bad.tar");
    let bad = Tar::new()
        .file("manifest.json", manifest.to_string())
        .file(&config_name, config.replace("A=1", "A=2"))
        .file("a/layer.tar", &layers[0])
        .file("b/layer.tar", &layers[1])
        .finish();
    std::fs::write(&path, bad).expect("write");
    let source = format!("docker-archive:{}:one", path.display());
    assert!(open(&source, RegistryOptions::default()).err().expect("refused").contains("digest"));
    for cut in [tar.len() - 3000, 700] {
        std::fs::write(&path, &tar[..cut]).expect("write");
        let source = format!("docker-archive:{}:one", path.display());
        let error = open(&source, RegistryOptions::default()).err().expect("refused");
        assert!(error.contains("bad.tar"), "{error}");
    }
}

/// What the small registry answers.
#[derive(Clone, Default)]
struct Answers {
    /// Path to type and body.
    bodies: BTreeMap<String, (String, Vec<u8>)>,
    /// Blobs are cut after this many bytes, the first times.
    cut: Option<usize>,
    cuts: usize,
    ranges: bool,
    /// `user:password` in base64, asked for by a token service.
    basic: Option<String>,
    /// Where blobs are sent on to.
    redirect: Option<String>,
    /// Requests that came, with their `Authorization`.
    seen: Vec<(String, Option<String>)>,
}

struct Small {
    host: String,
    answers: Arc<Mutex<Answers>>,
}

impl Small {
    fn start(answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("port");
        let host = listener.local_addr().expect("port").to_string();
        let answers = Arc::new(Mutex::new(answers));
        let small = Self { host: host.clone(), answers: answers.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answers, host) = (answers.clone(), host.clone());
                std::thread::spawn(move || serve(&stream, &host, &answers));
            }
        });
        small
    }

    fn seen(&self) -> Vec<(String, Option<String>)> {
        self.answers.lock().expect("answers").seen.clone()
    }
}

fn serve(stream: &TcpStream, host: &str, answers: &Mutex<Answers>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let path = line.split(' ').nth(1)?.to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim().split_once(": ") else { break };
            headers.insert(name.to_lowercase(), value.to_owned());
        }
        let mut answers = answers.lock().expect("answers");
        let authorization = headers.get("authorization").cloned();
        answers.seen.push((path.clone(), authorization.clone()));
        let mut out = stream;
        let mut send = |status: &str, extra: &str, body: &[u8], cut: usize| {
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{extra}\r\n", body.len());
            out.write_all(head.as_bytes())
                .and_then(|()| out.write_all(&body[..cut.min(body.len())]))
                .ok()
        };
        if path.starts_with("/token") {
            let right = answers.basic.as_ref().map(|basic| format!("Basic {basic}"));
            if authorization == right {
                send("200 OK", "", br#"{"token":"the-token"}"#, usize::MAX)?;
            } else {
                send("401 Unauthorized", "", b"{}", usize::MAX)?;
            }
            continue;
        }
        if answers.basic.is_some() && authorization.as_deref() != Some("Bearer the-token") {
            let challenge = format!(
                "WWW-Authenticate: Bearer realm=\"http://{host}/token\",service=\"small\"\r\n"
            );
            send("401 Unauthorized", &challenge, b"{}", usize::MAX)?;
            continue;
        }
        if path == "/v2/" {
            send("200 OK", "", b"{}", usize::MAX)?;
            continue;
        }
        let is_blob = path.contains("/blobs/");
        if is_blob && let Some(other) = &answers.redirect {
            let location = format!("Location: http://{other}{path}\r\n");
            send("307 Temporary Redirect", &location, b"", usize::MAX)?;
            continue;
        }
        let Some((media_type, body)) = answers.bodies.get(&path).cloned() else {
            send("404 Not Found", "", br#"{"errors":[{"code":"MANIFEST_UNKNOWN"}]}"#, usize::MAX)?;
            continue;
        };
        let content_type = format!("Content-Type: {media_type}\r\n");
        let mut cut = usize::MAX;
        if let Some(limit) =
            answers.cut.filter(|_| is_blob && answers.cuts > 0 && body.len() > 100_000)
        {
            answers.cuts -= 1;
            cut = limit;
        }
        let start: Option<usize> = headers
            .get("range")
            .filter(|_| answers.ranges)
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let sent = match start {
            Some(start) => {
                let range = format!(
                    "{content_type}Content-Range: bytes {start}-{}/{}\r\n",
                    body.len() - 1,
                    body.len()
                );
                send("206 Partial Content", &range, &body[start..], cut)
            }
            None => send("200 OK", &content_type, &body, cut),
        };
        drop(answers);
        if cut != usize::MAX {
            // Gone in the middle of the body.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return None;
        }
        sent?;
    }
}

/// A layout's blobs as a registry's repository `r`, its first manifest tagged `t`.
fn as_answers(layout: &Layout) -> Answers {
    let mut answers = Answers::default();
    let index = std::fs::read_to_string(layout.path().join("index.json")).expect("index");
    let index: serde_json::Value = serde_json::from_str(&index).expect("JSON");
    let descriptor = &index["manifests"][0];
    let digest = descriptor["digest"].as_str().expect("digest");
    let media_type = descriptor["mediaType"].as_str().expect("type").to_owned();
    let bytes = std::fs::read(layout.blob_path(digest)).expect("manifest");
    answers.bodies.insert("/v2/r/manifests/t".to_owned(), (media_type, bytes));
    for entry in layout.path().join("blobs/sha256").read_dir().expect("blobs") {
        let entry = entry.expect("blob");
        let name = entry.file_name().into_string().expect("name");
        let bytes = std::fs::read(entry.path()).expect("blob");
        let kind = "application/vnd.oci.image.manifest.v1+json".to_owned();
        answers.bodies.insert(format!("/v2/r/manifests/sha256:{name}"), (kind, bytes.clone()));
        let kind = "application/octet-stream".to_owned();
        answers.bodies.insert(format!("/v2/r/blobs/sha256:{name}"), (kind, bytes));
    }
    answers
}

#[test]
fn broken_connections_are_taken_up_again() {
    let layout = Layout::stored(stack().into_iter().map(|tar| Stored::new(tar, Form::Plain)));
    let wanted = flatten_with(&layout.open().expect("image"), &FlattenOptions::default());
    let wanted = wanted.expect("flatten").text();
    let (_file, anonymous) = nobody();
    for ranges in [true, false] {
        let answers = Answers { cut: Some(1_000_000), cuts: 3, ranges, ..as_answers(&layout) };
        let small = Small::start(answers);
        let image =
            open(&format!("docker://{}/r:t", small.host), anonymous.clone()).expect("image");
        let flat = flatten_with(&image, &FlattenOptions::default());
        assert_eq!(flat.expect("flatten").text(), wanted, "ranges: {ranges}");
        assert_eq!(small.answers.lock().expect("answers").cuts, 0);
    }
    // Not for ever.
    let answers = Answers { cut: Some(0), cuts: usize::MAX, ranges: true, ..as_answers(&layout) };
    let small = Small::start(answers);
    let image = open(&format!("docker://{}/r:t", small.host), anonymous).expect("image");
    let error = flatten_with(&image, &FlattenOptions::default()).err().expect("refused");
    assert!(error.contains("layer 1") && error.contains("cannot read"), "{error}");
}

#[test]
fn a_registry_that_lies_is_found_out() {
    let (_file, anonymous) = nobody();
    let layout = Layout::of(stack());
    let stored = Stored::new(stack().remove(0), Form::Gzip);
    let path = format!("/v2/r/blobs/{}", sha256(&stored.blob));
    let mut answers = as_answers(&layout);
    for (change, word) in [(0, "digest"), (1, "bytes")] {
        let (_, body) = answers.bodies.get_mut(&path).expect("blob");
        *body = stored.blob.clone();
        match change {
            0 => body[4] ^= 1,
            _ => body.extend([0; 5]),
        }
        let small = Small::start(answers.clone());
        let image =
            open(&format!("docker://{}/r:t", small.host), anonymous.clone()).expect("image");
        let error = flatten_with(&image, &FlattenOptions::default()).err().expect("refused");
        assert!(error.contains("layer 1") && error.to_lowercase().contains(word), "{error}");
    }
    // Another manifest than the digest says.
    let wrong = sha256(b"wrong");
    let manifest = answers.bodies["/v2/r/manifests/t"].clone();
    answers.bodies.insert(format!("/v2/r/manifests/{wrong}"), manifest);
    let small = Small::start(answers);
    let error = open(&format!("docker://{}/r@{wrong}", small.host), anonymous);
    assert!(error.err().expect("refused").to_lowercase().contains("digest"));
}

#[test]
fn credentials_go_to_the_token_service_and_nowhere_else() {
    let layout = Layout::of(stack());
    let elsewhere = Small::start(as_answers(&layout));
    let answers = Answers {
        basic: Some("dXNlcjpzZWNyZXQ=".to_owned()),
        redirect: Some(elsewhere.host.clone()),
        ..as_answers(&layout)
    };
    let small = Small::start(answers);
    let source = format!("docker://{}/r:t", small.host);
    let (file, options) = nobody();
    let error = open(&source, options.clone()).err().expect("refused");
    assert!(error.contains("credentials"), "{error}");
    let auth = |text: &str| {
        std::fs::write(
            file.path(),
            format!(r#"{{"auths":{{"{}":{{"auth":"{text}"}}}}}}"#, small.host),
        )
        .expect("write");
    };
    auth("dXNlcjp3cm9uZw==");
    let error = open(&source, options.clone()).err().expect("refused");
    assert!(error.contains("refused") && !error.contains("wrong"), "{error}");
    auth("dXNlcjpzZWNyZXQ=");
    let image = open(&source, options).expect("image");
    flatten_with(&image, &FlattenOptions::default()).expect("flatten");
    for (path, authorization) in elsewhere.seen() {
        assert_eq!(authorization, None, "{path}");
    }
    assert!(elsewhere.seen().iter().any(|(path, _)| path.contains("/blobs/")));
    for (path, authorization) in small.seen() {
        let basic = authorization.is_some_and(|value| value.starts_with("Basic"));
        assert!(!basic || path.starts_with("/token"), "{path} got the password");
    }
}

#[test]
fn platforms_attestations_and_nested_indexes() {
    let layout = Layout::empty();
    let own = image::Platform::default().architecture;
    let make = |architecture: &str, text: &str| {
        let stored = Stored::new(Tar::new().file("which", text).finish(), Form::Gzip);
        let mut config = layers::config([sha256(&stored.tar)]);
        config["architecture"] = architecture.into();
        layout.manifest(&config, &[stored])
    };
    let with = |mut descriptor: serde_json::Value, os: &str, architecture: &str| {
        descriptor["platform"] = serde_json::json!({"os": os, "architecture": architecture});
        descriptor
    };
    let attestation = with(make("unknown", "attestation"), "unknown", "unknown");
    let mut provenance = make(&own, "provenance");
    provenance["annotations"] =
        serde_json::json!({"vnd.docker.reference.type": "attestation-manifest"});
    let other =
        serde_json::json!({"mediaType": "application/x.unknown", "digest": "sha256:x", "size": 1});
    let right = with(make(&own, "right"), "linux", &own);
    let foreign = with(make("s390x", "foreign"), "linux", "s390x");
    let windows = with(make(&own, "windows"), "windows", &own);
    let second = with(make(&own, "second"), "linux", &own);
    let manifests = [attestation, provenance, other, foreign.clone(), windows, right, second];
    let nested = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
    let nested =
        layout.blob("application/vnd.oci.image.index.v1+json", nested.to_string().as_bytes());
    let text = |layout: &Layout| {
        let image = layout.open()?;
        flatten_with(&image, &FlattenOptions::default()).map(|flat| flat.text())
    };
    for index in [manifests.to_vec(), vec![nested.clone()]] {
        layout.index(&index);
        assert_eq!(text(&layout).expect("image"), "which=right\n");
    }
    layout.index(&[foreign]);
    let error = text(&layout).expect_err("refused");
    assert!(error.contains("no image for linux/") && error.contains("linux/s390x"), "{error}");
    // The same through a registry: index by tag, manifest by digest.
    layout.index(&[nested]);
    let small = Small::start(as_answers(&layout));
    let (_file, anonymous) = nobody();
    let image = open(&format!("docker://{}/r:t", small.host), anonymous).expect("image");
    let flat = flatten_with(&image, &FlattenOptions::default()).expect("flatten");
    assert_eq!(flat.text(), "which=right\n");
    // Names in a layout.
    let named = |mut descriptor: serde_json::Value, name: &str| {
        descriptor["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": name});
        descriptor
    };
    layout.index(&[named(make(&own, "one"), "one"), named(make(&own, "two"), "two")]);
    let source = |name: &str| format!("oci:{}{name}", layout.path().display());
    let choose = |name: &str| {
        let image = open(&source(name), RegistryOptions::default())?;
        flatten_with(&image, &FlattenOptions::default()).map(|flat| flat.text())
    };
    assert_eq!(choose(":two").expect("image"), "which=two\n");
    let error = choose("").expect_err("refused");
    assert!(error.contains("one, two"), "{error}");
    let error = choose(":three").expect_err("refused");
    assert!(error.contains("\"three\"") && error.contains("one, two"), "{error}");
    let digest = make(&own, "two")["digest"].as_str().expect("digest").to_owned();
    assert_eq!(choose(&format!(":@{digest}")).expect("image"), "which=two\n");
}

#[test]
fn configurations_inline_data_and_repeated_layers() {
    let layout = Layout::empty();
    let stored = Stored::new(Tar::new().file("f", "1").mark(".wh.g").finish(), Form::Gzip);
    let lower = Stored::new(Tar::new().file("g", "2").finish(), Form::Zstd);
    let all = [lower.clone(), stored.clone(), lower];
    let config = layers::config(all.iter().map(|layer| sha256(&layer.tar)));
    let descriptor = layout.manifest(&config, &all);
    let digest = descriptor["digest"].as_str().expect("digest").to_owned();
    layout.index(&[descriptor]);
    let image = layout.open().expect("image");
    assert_eq!(image.manifest_digest().expect("digest").to_string(), digest);
    assert_eq!(image.layers().len(), 3);
    let flat = flatten_with(&image, &FlattenOptions::default()).expect("flatten");
    assert_eq!(flat.text(), "f=1\ng=2\n");
    assert_eq!(flat.flattened.layers[1].diff_id, sha256(&stored.tar));
    assert_eq!(flat.flattened.layers[1].created_by.as_deref(), Some("x"));
    // A manifest's own copy of a layer is used, and checked.
    std::fs::remove_file(layout.blob_path(&sha256(&stored.blob))).expect("remove");
    let bytes = std::fs::read(layout.blob_path(&digest)).expect("manifest");
    let mut manifest: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    manifest["layers"][1]["data"] = base64(&stored.blob).into();
    let descriptor =
        layout.blob("application/vnd.oci.image.manifest.v1+json", manifest.to_string().as_bytes());
    layout.index(&[descriptor]);
    let flat = flatten_with(&layout.open().expect("image"), &FlattenOptions::default());
    assert_eq!(flat.expect("flatten").text(), "f=1\ng=2\n");
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte))
            << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * at) & 63) as usize];
            out.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[test]
fn tools_are_asked_for_by_name() {
    // The helper protocol, with a helper of our own in the path.
    let directory = tempfile::tempdir().expect("temporary directory");
    let helper = directory.path().join("docker-credential-test");
    std::fs::write(&helper, "#!/bin/sh\nread host\necho \"{\\\"Username\\\":\\\"user\\\",\\\"Secret\\\":\\\"secret\\\"}\"\n")
        .expect("write");
    assert!(runs("chmod", &["755", helper.to_str().expect("path")]));
    let layout = Layout::of(stack());
    let small =
        Small::start(Answers { basic: Some("dXNlcjpzZWNyZXQ=".to_owned()), ..as_answers(&layout) });
    let (file, _) = nobody();
    std::fs::write(file.path(), format!(r#"{{"credHelpers":{{"{}":"test"}}}}"#, small.host))
        .expect("write");
    // The path is the process's own, so a child runs this very test with another one.
    if std::env::var_os("PARBAKE_TEST_REGISTRY").is_none() {
        let path =
            format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap_or_default());
        let output = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "tools_are_asked_for_by_name", "--nocapture"])
            .env("PATH", path)
            .env("PARBAKE_TEST_REGISTRY", &small.host)
            .env("REGISTRY_AUTH_FILE", file.path())
            .output()
            .expect("run");
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(output.status.success(), "{text}");
        return;
    }
    let host = std::env::var("PARBAKE_TEST_REGISTRY").expect("host");
    open(&format!("docker://{host}/r:t"), RegistryOptions::default()).expect("image");
}

#[test]
fn the_config_is_all_there() {
    let layout = Layout::empty();
    let mut config = layers::config([]);
    config["config"] = serde_json::json!({
        "User": "web:www", "Env": ["PATH=/bin", "A=1", "PATH=/sbin"], "WorkingDir": "/srv",
        "Entrypoint": ["/e"], "Cmd": ["c"], "StopSignal": "SIGINT", "Labels": {"k": "v"},
        "ExposedPorts": {"80/tcp": {}}, "Volumes": {"/data": {}},
        "Healthcheck": {"Test": ["CMD", "true"], "Interval": 30_000_000_000u64},
    });
    let manifest = layout.manifest(&config, &[]);
    layout.index(&[manifest]);
    let image = layout.open().expect("image");
    let process = image.config().process();
    assert_eq!(process.env, ["PATH=/sbin", "A=1"]);
    assert_eq!((process.user.as_str(), process.working_dir.as_str()), ("web:www", "/srv"));
    assert_eq!((process.entrypoint, process.cmd), (vec!["/e".to_owned()], vec!["c".to_owned()]));
    assert_eq!(process.stop_signal.as_deref(), Some("SIGINT"));
    assert_eq!(image.config().volumes, ["/data"]);
    assert_eq!(image.config().labels["k"], "v");
    assert_eq!(image.config().healthcheck.as_ref().expect("check").interval, 30_000_000_000);
    let flat = flatten_with(&image, &FlattenOptions::default()).expect("flatten");
    assert_eq!(flat.text(), "");
}
