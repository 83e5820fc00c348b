//! Images in a registry, through the same client as templates. Blobs stream from the connection
//! straight into the decoder; nothing is downloaded first, and a connection that breaks meanwhile is
//! taken up again where it ended.

use std::io::{self, Read};
use std::sync::Arc;

use parbake_cache::TemplateName;
use parbake_cache::credentials::Credentials;
use parbake_cache::find;
use parbake_cache::registries::Registries;
use parbake_cache::registry::{RegistryError, RegistryOptions, Repository};
use parbake_cache::resume::ResumingBlob;

use super::digest::BlobDigest;
use super::error::ImageError;
use super::manifest::DOCUMENT_MAX;
use super::select::{BlobPointer, Blobs, Place, Selector, image};
use super::{Image, ImageOptions, ImageSource};

/// The registry of names without one, and where its images are that have only one word.
const DEFAULT_REGISTRY: &str = "docker.io";
const DEFAULT_DIRECTORY: &str = "library";

/// What stands behind `docker://`.
#[derive(Debug, PartialEq, Eq)]
struct Reference {
    host: String,
    repository: String,
    /// A tag, or a digest that was parsed.
    item: Result<String, BlobDigest>,
}

/// A registry's repository.
struct Remote(Arc<Repository>);

/// Opens an image of a registry.
pub(super) fn open(
    text: &str,
    source: &ImageSource,
    options: &ImageOptions,
) -> Result<Image, ImageError> {
    let failed = |problem: String| ImageError::Registry { reference: text.to_owned(), problem };
    let reference = Reference::parse(text)
        .map_err(|problem| failed(format!("not a reference to an image: {problem}")))?;
    let registries = Registries::from_environment(options.registry.registries_conf.as_deref());
    let registry = RegistryOptions {
        credentials: Credentials::from_environment(options.registry.authfile.as_deref()),
        plain_http: options.registry.insecure.clone(),
        registries: registries.map_err(|error| failed(error.to_string()))?,
        ..RegistryOptions::default()
    };
    let (item, pinned) = match &reference.item {
        Ok(tag) => (tag.clone(), None),
        Err(digest) => (digest.to_string(), Some(digest)),
    };
    let fetch = |source: &Repository| source.document(&item).map(|(_, bytes)| bytes);
    let by_digest = pinned.is_some();
    let (host, repository) = (&reference.host, &reference.repository);
    let found = find::first(&registry, host, repository, by_digest, fetch).map_err(|error| {
        let hint = match (&error, registry.credentials.lookup(host, repository)) {
            (RegistryError::Unauthorized { .. }, Ok(None)) => "; no credentials were found for it",
            (RegistryError::Unauthorized { .. }, _) => {
                "; the credentials found for it were refused"
            }
            _ => "",
        };
        failed(format!("{error}{hint}"))
    })?;
    let document = found.root;
    if let Some(expected) = pinned {
        let actual = BlobDigest::of(expected.algorithm(), &document);
        if actual != *expected {
            let (expected, actual) = (expected.to_string(), actual.to_string());
            return Err(ImageError::DigestMismatch { what: text.to_owned(), expected, actual });
        }
    }
    let blobs: Arc<dyn Blobs> = Arc::new(Remote(Arc::new(found.source)));
    let selector = Selector::new(&*blobs, &options.platform, text.to_owned());
    image(source, &blobs, selector.select_document(&document)?)
}

impl Reference {
    /// Reads `[HOST[:PORT]/]REPOSITORY[:TAG][@DIGEST]`, with the defaults that other tools have.
    fn parse(text: &str) -> Result<Self, String> {
        let (name, digest) = match text.split_once('@') {
            None => (text, None),
            Some((name, digest)) => {
                let digest: BlobDigest =
                    digest.parse().map_err(|error: super::digest::BadDigest| error.to_string())?;
                (name, Some(digest))
            }
        };
        let name: TemplateName = name.parse().map_err(|error| format!("{error}"))?;
        let host = match name.registry() {
            None | Some("index.docker.io") => DEFAULT_REGISTRY,
            Some(host) => host,
        };
        let repository = match name.repository() {
            word if host == DEFAULT_REGISTRY && !word.contains('/') => {
                format!("{DEFAULT_DIRECTORY}/{word}")
            }
            path => path.to_owned(),
        };
        let item = digest.map_or_else(|| Ok(name.tag().to_owned()), Err);
        Ok(Self { host: host.to_owned(), repository, item })
    }
}

impl Blobs for Remote {
    fn open(&self, blob: &BlobPointer) -> io::Result<Box<dyn Read + Send>> {
        let digest = blob.digest.to_string();
        Ok(Box::new(ResumingBlob::new(Arc::clone(&self.0), digest, blob.size)))
    }

    fn document(&self, blob: &BlobPointer, place: Place) -> io::Result<Vec<u8>> {
        match place {
            Place::Manifests => Ok(self.0.document(&blob.digest.to_string())?.1),
            Place::Blobs => {
                let mut bytes = Vec::new();
                self.open(blob)?.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes)?;
                Ok(bytes)
            }
        }
    }

    fn size(&self, _: &BlobPointer) -> Option<io::Result<u64>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_have_the_usual_defaults() {
        let digest = format!("sha256:{}", "0".repeat(64));
        for (text, host, repository, item) in [
            ("debian", "docker.io", "library/debian", "latest"),
            ("debian:12", "docker.io", "library/debian", "12"),
            ("team/app", "docker.io", "team/app", "latest"),
            ("index.docker.io/debian", "docker.io", "library/debian", "latest"),
            ("localhost/app:1", "localhost", "app", "1"),
            ("reg.example:5000/a/b:c", "reg.example:5000", "a/b", "c"),
            (&format!("reg.example/a@{digest}"), "reg.example", "a", &digest),
            (&format!("reg.example/a:1@{digest}"), "reg.example", "a", &digest),
        ] {
            let reference = Reference::parse(text).unwrap();
            assert_eq!((&*reference.host, &*reference.repository), (host, repository), "{text}");
            let found = match reference.item {
                Ok(tag) => tag,
                Err(digest) => digest.to_string(),
            };
            assert_eq!(found, item, "{text}");
        }
        for bad in ["", "UPPER", "a@sha256:0", "a:b:c", "https://x/y", "a@"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }
}
