//! What `docker save` and `podman save` write: a tar file with `manifest.json`, old form
//! (`<id>/layer.tar`) or new (blobs of an OCI layout).

use std::io::{self, Read};
use std::sync::Arc;

use serde::Deserialize;

use super::archive::Archive;
use super::digest::BlobDigest;
use super::error::ImageError;
use super::manifest::DOCUMENT_MAX;
use super::select::{OWN_ALGORITHM, diff_ids, parse_config};
use super::{Image, ImageOptions, ImageSource, Layer};

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

/// Opens the image `reference` of an archive.
pub(super) fn open(
    archive: Archive,
    source: &ImageSource,
    reference: Option<&str>,
    options: &ImageOptions,
) -> Result<Image, ImageError> {
    let shown = archive.shown().to_owned();
    let bad = |problem: String| ImageError::Archive { path: shown.clone(), problem };
    let manifest = read(&archive, "manifest.json").map_err(|error| match error {
        ImageError::MissingBlob { .. } => bad(
            "it has no manifest.json, so docker save did not write it (an OCI layout is oci-archive:, a root filesystem tar:)".to_owned(),
        ),
        other => other,
    })?;
    let images: Vec<SavedImage> = serde_json::from_slice(&manifest)
        .map_err(|error| bad(format!("manifest.json: {error}")))?;
    let saved = choose(&shown, images, reference)?;
    let config_bytes = read(&archive, &saved.config)?;
    // The configuration's name is its digest: 64 digits, or blobs/sha256/ and 64 digits.
    if let Some(expected) = digest_of_name(saved.config.trim_end_matches(".json")) {
        check(&saved.config, &expected, &config_bytes)?;
    }
    let config = parse_config(&config_bytes, format!("configuration {}", saved.config))?;
    if !options.platform.accepts(&config.os, &config.architecture, config.variant.as_deref()) {
        return Err(ImageError::NoPlatform {
            image: shown,
            wanted: options.platform.to_string(),
            available: format!("{}/{}", config.os, config.architecture),
        });
    }
    let names = saved.layers.unwrap_or_default();
    let diff_ids = diff_ids(&config, names.len())?;
    let created_by = config.created_by();
    let archive = Arc::new(archive);
    let mut layers = Vec::new();
    for (index, (name, diff_id)) in names.into_iter().zip(diff_ids).enumerate() {
        let what = format!("layer {} ({name})", index + 1);
        let member = archive.member(name.as_bytes()).map_err(|error| missing(&what, error))?;
        let digest = name.strip_prefix("blobs/").and_then(|_| digest_of_name(&name));
        layers.push(Layer {
            digest,
            size: Some(member.size()),
            diff_algorithm: diff_id.algorithm(),
            diff_id: Some(diff_id),
            declared: None,
            created_by: created_by.get(index).cloned().flatten(),
            whiteouts: true,
            open: {
                let archive = Arc::clone(&archive);
                Arc::new(move || {
                    let member = archive.member(name.as_bytes())?;
                    Ok(Box::new(member) as Box<dyn Read + Send>)
                })
            },
        });
    }
    let config = config.into_config();
    Ok(Image { source: source.clone(), config, manifest_digest: None, layers })
}

fn choose(
    shown: &str,
    images: Vec<SavedImage>,
    reference: Option<&str>,
) -> Result<SavedImage, ImageError> {
    let available = images
        .iter()
        .enumerate()
        .map(|(index, image)| match image.repo_tags.as_deref() {
            Some(tags) if !tags.is_empty() => tags.join(" = "),
            _ => format!("@{index}"),
        })
        .collect::<Vec<_>>()
        .join(", ");
    let image = shown.to_owned();
    let chosen = match reference {
        None if images.len() > 1 => return Err(ImageError::Ambiguous { image, available }),
        None => images.into_iter().next(),
        Some(wanted) => match wanted.strip_prefix('@') {
            Some(index) => {
                index.parse().ok().and_then(|index: usize| images.into_iter().nth(index))
            }
            None => images
                .into_iter()
                .find(|image| image.repo_tags.iter().flatten().any(|tag| same_name(tag, wanted))),
        },
    };
    chosen.ok_or_else(|| ImageError::NoSuchReference {
        image,
        wanted: reference.unwrap_or("").to_owned(),
        available: if available.is_empty() { "none".to_owned() } else { available },
    })
}

/// Whether an archive's tag is the image asked for: `:latest` may be left out, and so may leading
/// components (the registry's host, `library/`), which tools write or not.
fn same_name(tag: &str, wanted: &str) -> bool {
    let last = wanted.rsplit('/').next().unwrap_or(wanted);
    let wanted = if last.contains(':') { wanted.to_owned() } else { format!("{wanted}:latest") };
    tag == wanted || tag.strip_suffix(&wanted).is_some_and(|prefix| prefix.ends_with('/'))
}

fn digest_of_name(name: &str) -> Option<BlobDigest> {
    if let Some(rest) = name.strip_prefix("blobs/") {
        return rest.replacen('/', ":", 1).parse().ok();
    }
    format!("sha256:{name}").parse().ok()
}

fn check(what: &str, expected: &BlobDigest, bytes: &[u8]) -> Result<(), ImageError> {
    let actual = BlobDigest::of(expected.algorithm(), bytes);
    if actual == *expected {
        return Ok(());
    }
    Err(ImageError::DigestMismatch {
        what: what.to_owned(),
        expected: expected.to_string(),
        actual: actual.to_string(),
    })
}

fn read(archive: &Archive, name: &str) -> Result<Vec<u8>, ImageError> {
    let member = archive.member(name.as_bytes()).map_err(|error| missing(name, error))?;
    let mut bytes = Vec::new();
    member
        .take(DOCUMENT_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| ImageError::read(name, error))?;
    if bytes.len() as u64 > DOCUMENT_MAX {
        return Err(ImageError::TooLarge { what: name.to_owned(), limit: DOCUMENT_MAX });
    }
    Ok(bytes)
}

fn missing(what: &str, error: io::Error) -> ImageError {
    if error.kind() == io::ErrorKind::NotFound {
        let hint = "the archive is incomplete; save the image again".to_owned();
        return ImageError::MissingBlob { what: what.to_owned(), hint };
    }
    ImageError::read(what, error)
}

/// A root filesystem as one tar file: an image of one layer and no configuration.
pub(super) fn open_tar(path: &std::path::Path, source: &ImageSource) -> Result<Image, ImageError> {
    let shown = path.display().to_string();
    let file = std::fs::File::open(path).map_err(|error| ImageError::read(shown.clone(), error))?;
    let metadata = file.metadata().map_err(|error| ImageError::read(shown.clone(), error))?;
    if metadata.is_dir() {
        let problem = "a directory, not a tar file (for a directory use dir:)".to_owned();
        return Err(ImageError::Archive { path: shown, problem });
    }
    let path = path.to_owned();
    let open = move || Ok(Box::new(std::fs::File::open(&path)?) as Box<dyn Read + Send>);
    Ok(Image::of_one_layer(source, Arc::new(open), OWN_ALGORITHM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_with_and_without_host() {
        for (tag, wanted, same) in [
            ("debian:12", "debian:12", true),
            ("localhost:5000/library/debian:12", "debian:12", true),
            ("localhost:5000/library/debian:12", "library/debian:12", true),
            ("debian:latest", "debian", true),
            ("notdebian:12", "debian:12", false),
            ("debian:12", "debian:1", false),
            ("localhost:5000/a:latest", "localhost:5000/a", true),
        ] {
            assert_eq!(same_name(tag, wanted), same, "{tag} {wanted}");
        }
    }
}
