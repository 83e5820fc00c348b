//! Asking a registry whether it knows who we are.

use ureq::http::Method;

use crate::registry::{Access, RegistryError, RegistryOptions, Repository};

impl Repository {
    /// Shows `host` the credentials of `options` and nothing else, as a login does before it keeps
    /// them. The API's root needs no rights in any repository (OCI distribution specification,
    /// determining support).
    ///
    /// # Errors
    /// [`RegistryError::Unauthorized`] when it does not want them; otherwise when it cannot be
    /// reached or is no registry.
    pub fn sign_in(options: &RegistryOptions, host: &str) -> Result<(), RegistryError> {
        let repository = Self::open(options, host, "parbake/sign-in", Access::Pull)?;
        let response = repository.request(&Method::GET, "/v2/", &[], None, None)?;
        match response.status().as_u16() {
            401 | 403 => Err(RegistryError::Unauthorized {
                host: host.to_owned(),
                repository: "this user".to_owned(),
            }),
            _ => repository.expect(response, &[200], "the API's root").map(drop),
        }
    }
}
