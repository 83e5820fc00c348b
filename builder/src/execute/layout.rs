//! The result: an OCI image layout directory that any tool reads.

use std::fs;
use std::io::{self, Read, Write as _};
use std::path::Path;

use parbake_cache::Digest;
use parbake_recipes::plan::{ImageConfig, Platform};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::error::{Doing as _, ExecuteError};

/// A layer of the result.
#[derive(Debug, Clone)]
pub(crate) struct LayerBlob {
    pub media_type: String,
    /// `sha256:…` of the blob.
    pub digest: String,
    pub size: u64,
    /// `sha256:…` of the uncompressed tar.
    pub diff_id: String,
}

/// What a config document holds.
pub(crate) struct Document<'a> {
    pub platform: &'a Platform,
    pub config: &'a ImageConfig,
    pub author: Option<&'a str>,
    pub history: &'a [Value],
    pub layers: &'a [LayerBlob],
    pub epoch: Option<i64>,
}

/// Makes an empty layout.
pub(crate) fn create(directory: &Path) -> Result<(), ExecuteError> {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).doing(|| format!("making {}", blobs.display()))?;
    fs::write(directory.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#)
        .doing(|| format!("writing {}", directory.display()))
}

fn blob_path(directory: &Path, digest: &str) -> std::path::PathBuf {
    directory.join("blobs").join(digest.replacen(':', "/", 1))
}

/// Adds a file as a blob, without copying where the file system can share it.
pub(crate) fn add_file(directory: &Path, digest: &str, file: &Path) -> Result<(), ExecuteError> {
    let path = blob_path(directory, digest);
    if path.exists() {
        return Ok(());
    }
    if fs::hard_link(file, &path).is_ok() {
        return Ok(());
    }
    fs::copy(file, &path).map(drop).doing(|| format!("writing {}", path.display()))
}

/// Adds a stream as a blob and checks its digest.
pub(crate) fn add_stream(
    directory: &Path,
    digest: &str,
    mut input: impl Read,
) -> Result<(), ExecuteError> {
    let path = blob_path(directory, digest);
    if path.exists() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(directory);
    let mut copy = || -> io::Result<()> {
        fs::create_dir_all(parent)?;
        let mut file = tempfile::NamedTempFile::new_in(parent)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 17];
        loop {
            let read = input.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            file.write_all(&buffer[..read])?;
        }
        let found = Digest::from_bytes(hash.finalize().into()).to_string();
        if digest.starts_with("sha256:") && found != digest {
            return Err(io::Error::other(format!("it is {found} and should be {digest}")));
        }
        file.persist(&path).map_err(|error| error.error).map(drop)
    };
    copy().doing(|| format!("writing blob {digest}"))
}

fn put(directory: &Path, bytes: &[u8]) -> Result<Digest, ExecuteError> {
    let digest = Digest::of(bytes);
    let path = blob_path(directory, &digest.to_string());
    fs::write(&path, bytes).doing(|| format!("writing {}", path.display()))?;
    Ok(digest)
}

/// The configuration document's text.
pub(crate) fn config_text(document: &Document<'_>) -> Vec<u8> {
    let mut config = json!({
        "architecture": document.platform.architecture,
        "os": document.platform.os,
        "config": document.config,
        "rootfs": {
            "type": "layers",
            "diff_ids": document.layers.iter().map(|layer| &layer.diff_id).collect::<Vec<_>>(),
        },
        "history": document.history,
    });
    if let Some(variant) = &document.platform.variant {
        config["variant"] = json!(variant);
    }
    if let Some(author) = document.author {
        config["author"] = json!(author);
    }
    if let Some(epoch) = document.epoch {
        config["created"] = json!(rfc3339(epoch));
    }
    serde_json::to_vec(&config).unwrap_or_default()
}

/// Writes configuration, manifest and index; the layers are there already.
pub(crate) fn finish(
    directory: &Path,
    document: &Document<'_>,
    tag: Option<&str>,
) -> Result<Digest, ExecuteError> {
    let config = config_text(document);
    let config_digest = put(directory, &config)?;
    let layers: Vec<Value> = document
        .layers
        .iter()
        .map(|layer| {
            json!({"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size})
        })
        .collect();
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config_digest,
            "size": config.len(),
        },
        "layers": layers,
    }))
    .unwrap_or_default();
    let digest = put(directory, &manifest)?;
    let mut descriptor = json!({
        "mediaType": media_type,
        "digest": digest,
        "size": manifest.len(),
        "platform": {
            "architecture": document.platform.architecture,
            "os": document.platform.os,
        },
    });
    if let Some(variant) = &document.platform.variant {
        descriptor["platform"]["variant"] = json!(variant);
    }
    if let Some(tag) = tag {
        descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [descriptor],
    });
    let path = directory.join("index.json");
    fs::write(&path, serde_json::to_vec(&index).unwrap_or_default())
        .doing(|| format!("writing {}", path.display()))?;
    Ok(digest)
}

/// Seconds since 1970 as `YYYY-MM-DDThh:mm:ssZ`.
pub(crate) fn rfc3339(seconds: i64) -> String {
    let days = seconds.div_euclid(86_400);
    let rest = seconds.rem_euclid(86_400);
    // Civil date from a day count, with years that begin in March.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
