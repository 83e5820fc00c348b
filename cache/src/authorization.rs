//! Showing a registry who we are, and nobody else.
//!
//! Credentials go to the registry and to the token service it names: over TLS, or to a place that
//! may be spoken to without.

use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ureq::http::{Method, Request, Response, Uri, header};
use ureq::{Body, SendBody};

use crate::challenge::{Challenge, parse_challenges};
use crate::credentials::Credential;
use crate::registry::{Access, MAX_ANSWER_BYTES, RegistryError, Repository, is_loopback};

impl Repository {
    /// Answers a call for credentials.
    pub(crate) fn authorize(
        &self,
        response: &Response<Body>,
        scope: &str,
    ) -> Result<(), RegistryError> {
        let unauthorized = || RegistryError::Unauthorized {
            host: self.host.clone(),
            repository: self.repository.clone(),
        };
        let challenges: Vec<Challenge> = response
            .headers()
            .get_all(header::WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(parse_challenges)
            .collect();
        let bearer = challenges.iter().find(|challenge| challenge.scheme == "bearer");
        let value = match bearer {
            Some(challenge) => format!("Bearer {}", self.token(challenge, scope)?),
            None if challenges.iter().any(|challenge| challenge.scheme == "basic") => {
                let Some(Credential::Basic { user, password }) = &self.credential else {
                    return Err(unauthorized());
                };
                self.check_line(&self.uri(&self.base)?)?;
                format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
            }
            None => return Err(unauthorized()),
        };
        self.authorization
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .insert(scope.to_owned(), value);
        Ok(())
    }

    /// Gets a token from the service that a challenge names.
    pub(crate) fn token(
        &self,
        challenge: &Challenge,
        scope: &str,
    ) -> Result<String, RegistryError> {
        let protocol = |what: String| RegistryError::Protocol { host: self.host.clone(), what };
        let realm = challenge
            .get("realm")
            .and_then(|realm| realm.parse::<Uri>().ok())
            .filter(|realm| realm.authority().is_some())
            .ok_or_else(|| protocol("it asks for a token without saying where from".to_owned()))?;
        if self.credential.is_some() {
            self.check_line(&realm)?;
        }
        let mut query: Vec<_> = scope.split(' ').map(|scope| ("scope", scope)).collect();
        if let Some(service) = challenge.get("service") {
            query.push(("service", service));
        }
        // A token service on the same loopback is as near as the registry.
        let base = Request::builder();
        let response = match &self.credential {
            Some(Credential::Identity(token)) => {
                query.extend([
                    ("grant_type", "refresh_token"),
                    ("refresh_token", token),
                    ("client_id", "parbake"),
                ]);
                let form = encode(&query);
                let body = move || {
                    let bytes = form.clone().into_bytes();
                    let len = bytes.len() as u64;
                    Ok((SendBody::from_owned_reader(io::Cursor::new(bytes)), len))
                };
                let request = base
                    .method(Method::POST)
                    .uri(realm)
                    .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
                self.send(request, Some(&body))?
            }
            other => {
                let separator = if realm.query().is_some() { '&' } else { '?' };
                let mut request =
                    base.method(Method::GET).uri(format!("{realm}{separator}{}", encode(&query)));
                if let Some(Credential::Basic { user, password }) = other {
                    let pair = STANDARD.encode(format!("{user}:{password}"));
                    request = request.header(header::AUTHORIZATION, format!("Basic {pair}"));
                }
                // Not followed anywhere: the credential is in it.
                self.send(request, None)?
            }
        };
        let mut response = match response.status().as_u16() {
            401 | 403 => {
                return Err(RegistryError::Unauthorized {
                    host: self.host.clone(),
                    repository: self.repository.clone(),
                });
            }
            _ => self.expect(response, &[200], "asking for a token")?,
        };
        let bytes = self.read_bounded(response.body_mut(), MAX_ANSWER_BYTES, "a token")?;
        let answer: serde_json::Value = serde_json::from_slice(&bytes)
            .map_err(|_| protocol("its token is not JSON".to_owned()))?;
        let token = ["token", "access_token"]
            .iter()
            .find_map(|field| answer[*field].as_str().filter(|token| !token.is_empty()));
        token
            .map(str::to_owned)
            .ok_or_else(|| protocol("its token service answered without a token".to_owned()))
    }

    pub(crate) fn scope(&self, more: Option<&str>) -> String {
        let actions = match self.access {
            Access::Pull => "pull",
            Access::Push => "pull,push",
        };
        let own = format!("repository:{}:{actions}", self.repository);
        more.map_or(own.clone(), |more| format!("{own} {more}"))
    }

    pub(crate) fn known_authorization(&self, scope: &str) -> Option<String> {
        self.authorization
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .get(scope)
            .cloned()
    }

    /// Refuses to leave TLS, unless for a place that may be spoken to without.
    pub(crate) fn check_line(&self, uri: &Uri) -> Result<(), RegistryError> {
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let open = uri.scheme_str() != Some("https");
        let allowed = is_loopback(authority)
            || self.options.plain_http.iter().any(|plain| plain == authority)
            || self.plain && authority == self.host;
        if open && !allowed {
            return Err(RegistryError::Plain { host: authority.to_owned() });
        }
        Ok(())
    }
}

/// `application/x-www-form-urlencoded`.
fn encode(pairs: &[(&str, &str)]) -> String {
    let escape = |text: &str| {
        let mut escaped = String::new();
        for byte in text.bytes() {
            if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
                escaped.push(char::from(byte));
            } else {
                escaped.push_str(&format!("%{byte:02X}"));
            }
        }
        escaped
    };
    let pair = |(name, value): &(&str, &str)| format!("{}={}", escape(name), escape(value));
    pairs.iter().map(pair).collect::<Vec<_>>().join("&")
}
