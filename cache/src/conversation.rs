//! One request and its answer: sending, trying again, following redirects, reading errors.

use std::io::{self, Read as _};
use std::time::Duration;

use ureq::http::{Method, Request, Response, Uri, header};
use ureq::{Body, SendBody};

use crate::registry::{MAX_ANSWER_BYTES, RegistryError, Repository};

const MAX_REDIRECTS: u32 = 5;
/// The longest that `Retry-After` is obeyed.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The body of a request, made afresh for each try.
pub(crate) type MakeBody<'a> = &'a (dyn Fn() -> io::Result<(SendBody<'static>, u64)> + Sync);

impl Repository {
    /// Sends a request, with retries.
    pub(crate) fn request(
        &self,
        method: &Method,
        target: &str,
        headers: &[(&'static str, String)],
        body: Option<MakeBody<'_>>,
        more_scope: Option<&str>,
    ) -> Result<Response<Body>, RegistryError> {
        for tries in 0.. {
            if self.options.is_cancelled() {
                return Err(RegistryError::Interrupted);
            }
            let last = tries >= self.options.retries;
            match self.once(method, target, headers, body, more_scope) {
                Ok(response) if is_transient(response.status().as_u16()) && !last => {
                    self.wait(tries, Some(&response))?;
                }
                Err(RegistryError::Unreachable { .. }) if !last => self.wait(tries, None)?,
                result => return result,
            }
        }
        unreachable!("the last try returns")
    }

    /// Sends a request, following redirects and a call for credentials.
    pub(crate) fn once(
        &self,
        method: &Method,
        target: &str,
        headers: &[(&'static str, String)],
        body: Option<MakeBody<'_>>,
        more_scope: Option<&str>,
    ) -> Result<Response<Body>, RegistryError> {
        let home: Uri = self.uri(&self.base)?;
        let scope = self.scope(more_scope);
        let mut uri = self.uri(target)?;
        let (mut redirects, mut refreshed) = (0, false);
        loop {
            let at_home = same_authority(&uri, &home);
            let mut request = Request::builder().method(method.clone()).uri(uri.clone());
            for (name, value) in headers {
                request = request.header(*name, value);
            }
            if at_home && let Some(value) = self.known_authorization(&scope) {
                request = request.header(header::AUTHORIZATION, value);
            }
            let response = self.send(request, body)?;
            let status = response.status().as_u16();
            match status {
                401 if at_home && !refreshed => {
                    refreshed = true;
                    self.authorize(&response, &scope)?;
                }
                301 | 302 | 303 | 307 | 308 if matches!(*method, Method::GET | Method::HEAD) => {
                    redirects += 1;
                    if redirects > MAX_REDIRECTS {
                        let what = format!("it redirected more than {MAX_REDIRECTS} times");
                        return Err(RegistryError::Protocol { host: self.host.clone(), what });
                    }
                    let next = response
                        .headers()
                        .get(header::LOCATION)
                        .and_then(|value| value.to_str().ok())
                        .and_then(|location| resolve(&uri, location))
                        .ok_or_else(|| RegistryError::Protocol {
                            host: self.host.clone(),
                            what: "it redirected to nowhere".to_owned(),
                        })?;
                    self.check_line(&next)?;
                    uri = next;
                }
                _ => return Ok(response),
            }
        }
    }

    pub(crate) fn send(
        &self,
        request: ureq::http::request::Builder,
        body: Option<MakeBody<'_>>,
    ) -> Result<Response<Body>, RegistryError> {
        let bad = |what: String| RegistryError::Protocol { host: self.host.clone(), what };
        let sent = match body {
            None => {
                let request = request.body(()).map_err(|error| bad(error.to_string()))?;
                self.agent.run(request)
            }
            Some(body) => {
                let (body, len) = body().map_err(|source| RegistryError::Local {
                    what: "what is to be sent".to_owned(),
                    source,
                })?;
                let request = request
                    .header(header::CONTENT_LENGTH, len)
                    .body(body)
                    .map_err(|error| bad(error.to_string()))?;
                self.agent.run(request)
            }
        };
        sent.map_err(|error| RegistryError::Unreachable {
            host: self.host.clone(),
            what: error.to_string(),
        })
    }

    pub(crate) fn uri(&self, target: &str) -> Result<Uri, RegistryError> {
        let text = if target.starts_with('/') {
            format!("{}{target}", self.base)
        } else {
            target.to_owned()
        };
        text.parse().map_err(|error| RegistryError::Protocol {
            host: self.host.clone(),
            what: format!("{text:?} is no address ({error})"),
        })
    }

    /// Where an upload goes on. On another host, it gets no credentials.
    pub(crate) fn location(&self, response: &Response<Body>) -> Option<String> {
        let base = self.uri(&self.base).ok()?;
        let value = response.headers().get(header::LOCATION)?.to_str().ok()?;
        let uri = resolve(&base, value)?;
        self.check_line(&uri).ok()?;
        Some(uri.to_string())
    }

    /// Turns an answer with another status into an error that says what the registry says.
    pub(crate) fn expect(
        &self,
        mut response: Response<Body>,
        good: &[u16],
        what: &str,
    ) -> Result<Response<Body>, RegistryError> {
        let status = response.status().as_u16();
        if good.contains(&status) {
            return Ok(response);
        }
        let (host, what) = (self.host.clone(), what.to_owned());
        let repository = self.repository.clone();
        Err(match status {
            401 => RegistryError::Unauthorized { host, repository },
            404 => RegistryError::NotFound { host, what },
            _ => {
                let detail = detail(response.body_mut());
                if status == 403 {
                    RegistryError::Denied { host, repository, detail }
                } else {
                    RegistryError::Status { host, status, what, detail }
                }
            }
        })
    }

    pub(crate) fn read_bounded(
        &self,
        body: &mut Body,
        limit: u64,
        what: &str,
    ) -> Result<Vec<u8>, RegistryError> {
        let host = || self.host.clone();
        let mut bytes = Vec::new();
        body.as_reader().take(limit + 1).read_to_end(&mut bytes).map_err(|error| {
            RegistryError::Unreachable { host: host(), what: error.to_string() }
        })?;
        if bytes.len() as u64 > limit {
            let what = format!("{what} is larger than {limit} bytes");
            return Err(RegistryError::Protocol { host: host(), what });
        }
        Ok(bytes)
    }

    /// Pauses before the next try.
    pub(crate) fn wait(
        &self,
        tries: u32,
        response: Option<&Response<Body>>,
    ) -> Result<(), RegistryError> {
        /// How soon a caller that wants to stop is noticed.
        const LOOK: Duration = Duration::from_millis(100);
        let asked = response
            .and_then(|response| response.headers().get(header::RETRY_AFTER))
            .and_then(|value| value.to_str().ok()?.trim().parse().ok())
            .map(Duration::from_secs);
        let growing = self.options.pause.saturating_mul(1 << tries.min(10));
        let mut left = asked.unwrap_or(growing).min(MAX_PAUSE);
        while !left.is_zero() {
            if self.options.is_cancelled() {
                return Err(RegistryError::Interrupted);
            }
            let step = left.min(LOOK);
            std::thread::sleep(step);
            left -= step;
        }
        Ok(())
    }
}

pub(crate) fn no_body() -> io::Result<(SendBody<'static>, u64)> {
    Ok((SendBody::from_owned_reader(io::empty()), 0))
}

pub(crate) fn is_transient(status: u16) -> bool {
    matches!(status, 408 | 429 | 500 | 502 | 503 | 504)
}

pub(crate) fn same_authority(a: &Uri, b: &Uri) -> bool {
    let port = |uri: &Uri| {
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        uri.port_u16().unwrap_or(default)
    };
    a.scheme() == b.scheme()
        && port(a) == port(b)
        && a.host().zip(b.host()).is_some_and(|(a, b)| a.eq_ignore_ascii_case(b))
}

/// A `Location` relative to where it was given.
pub(crate) fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return location.parse().ok();
    }
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    if location.starts_with("//") {
        return format!("{scheme}:{location}").parse().ok();
    }
    location.starts_with('/').then(|| format!("{scheme}://{authority}{location}").parse().ok())?
}

/// What an error answer says, after a colon; bounded and printable.
pub(crate) fn detail(body: &mut Body) -> String {
    let mut bytes = Vec::new();
    let _ = body.as_reader().take(MAX_ANSWER_BYTES).read_to_end(&mut bytes);
    let said: Vec<String> = serde_json::from_slice::<serde_json::Value>(&bytes)
        .ok()
        .and_then(|answer| answer["errors"].as_array().cloned())
        .into_iter()
        .flatten()
        .take(3)
        .map(|error| {
            let text = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
            format!("{} {}", text("code"), text("message")).trim().to_owned()
        })
        .filter(|text| !text.is_empty())
        .collect();
    if said.is_empty() {
        return String::new();
    }
    let clean: String = said.join("; ").chars().filter(|c| !c.is_control()).take(300).collect();
    format!(": {clean}")
}
