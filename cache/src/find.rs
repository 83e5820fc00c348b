//! From a name to where it is: mirrors first, and nothing that is not trusted.

use crate::Digest;
use crate::name::TemplateName;
use crate::registry::{Access, Fetched, RegistryError, RegistryOptions, Repository};
use crate::transport::TransportError;

/// What a name stands for, and where it was found.
#[derive(Debug)]
pub struct Found<T> {
    /// The repository that has it.
    pub source: Repository,
    /// What it stands for.
    pub root: T,
    /// Mirrors that did not have it or could not be reached, and how.
    pub passed_over: Vec<String>,
}

/// Asks the places that `registries.conf` leads to, one after the other, until `fetch` succeeds.
///
/// # Errors
/// What the last place said, or that the registry is blocked.
pub fn first<T>(
    options: &RegistryOptions,
    host: &str,
    repository: &str,
    by_digest: bool,
    fetch: impl Fn(&Repository) -> Result<T, RegistryError>,
) -> Result<Found<T>, RegistryError> {
    let places = options.registries.places(host, repository, by_digest).map_err(|file| {
        RegistryError::Blocked { host: host.to_owned(), repository: repository.to_owned(), file }
    })?;
    let mut passed_over = Vec::new();
    let last = places.len() - 1;
    for (at, place) in places.iter().enumerate() {
        // A mirror that is away is not waited for: there is another place.
        let patience = if at == last { options.retries } else { options.retries.min(1) };
        let once = RegistryOptions { retries: patience, ..options.clone() };
        let found = Repository::open_place(&once, place, Access::Pull)
            .and_then(|source| fetch(&source).map(|root| (source, root)));
        match found {
            Ok((mut source, root)) => {
                source.options.retries = options.retries;
                return Ok(Found { source, root, passed_over });
            }
            Err(error @ RegistryError::Interrupted) => return Err(error),
            Err(error) if at == last => return Err(error),
            Err(error) => passed_over.push(format!("{}/{}: {error}", place.host, place.repository)),
        }
    }
    unreachable!("there is always a last place")
}

/// Finds what a template's name stands for, and checks that it may be taken in.
///
/// # Errors
/// When it is nowhere, or not trusted.
pub fn template(
    name: &TemplateName,
    pinned: Option<&Digest>,
    options: &RegistryOptions,
) -> Result<Found<Fetched>, TransportError> {
    let host = name.registry().ok_or_else(|| TransportError::NoRegistry(name.clone()))?;
    let reference = pinned.map_or_else(|| name.tag().to_owned(), ToString::to_string);
    let found = first(options, host, name.repository(), pinned.is_some(), |source| {
        source.manifest(&reference)
    })?;
    options.trust.check(name, pinned.is_some(), &found.root.descriptor, &found.source)?;
    Ok(found)
}
