//! Files and trees in and out. Paths are bytes: percent-encoded, they need not be UTF-8.

use std::collections::HashMap;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::{Json, http::HeaderMap};
use percent_encoding::percent_decode_str;

use super::body;
use super::{Shared, blocking};
use crate::listen::Actor;
use crate::manager::Transfer;
use crate::model::Stored;
use crate::problem::{Kind, Problem, Refusal};

/// The permission bits of a fetched file, in octal.
pub const MODE_HEADER: &str = "parbake-mode";

/// A query's values, as bytes; a name twice is refused.
fn parameters(query: Option<&str>, known: &[&str]) -> Result<HashMap<String, Vec<u8>>, Problem> {
    let mut found = HashMap::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if !known.contains(&name) {
            let known = known.join(", ");
            let message = format!("{name:?} is none of the parameters {known}");
            return Err(Problem::new(Kind::BadRequest, message));
        }
        let value: Vec<u8> = percent_decode_str(&value.replace('+', " ")).collect();
        if found.insert(name.to_owned(), value).is_some() {
            return Err(Problem::new(Kind::BadRequest, format!("{name} is there twice")));
        }
    }
    Ok(found)
}

fn transfer(query: Option<&str>, known: &[&str]) -> Result<Transfer, Problem> {
    let bad = |message: &str| Problem::new(Kind::BadRequest, message);
    let mut found = parameters(query, known)?;
    let path = found.remove("path").ok_or_else(|| bad("the parameter path is missing"))?;
    if !path.starts_with(b"/") || path.contains(&0) {
        return Err(bad("path is an absolute path in the guest"));
    }
    let text = |value: Option<Vec<u8>>| {
        value.map(String::from_utf8).transpose().map_err(|_| bad("a parameter is not UTF-8"))
    };
    let mode = match text(found.remove("mode"))? {
        None => 0o644,
        Some(octal) => u32::from_str_radix(&octal, 8)
            .ok()
            .filter(|mode| *mode <= 0o7777)
            .ok_or_else(|| bad("mode is an octal number up to 7777"))?,
    };
    let parents = match text(found.remove("parents"))?.as_deref() {
        None | Some("false") => false,
        Some("true" | "") => true,
        Some(_) => return Err(bad("parents is true or false")),
    };
    let owner = text(found.remove("owner"))?.unwrap_or_default();
    Ok(Transfer { path, mode, owner, parents })
}

/// Fetch a file
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path), ("path" = String, Query, description = "Absolute")),
    responses(
        (status = 200, content_type = "application/octet-stream", body = Vec<u8>,
            headers(("parbake-mode" = String, description = "Its permission bits, in octal"))),
        (status = "default", body = Refusal)))]
pub async fn get_file(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let from = transfer(query.as_deref(), &["path"])?;
    let (writer, body) = body::writer(());
    // The head is sent when the guest has opened the file; before that, refusals are still such.
    let (tell, told) = tokio::sync::oneshot::channel();
    tokio::task::spawn_blocking(move || {
        let mut tell = Some(tell);
        let mut writer = writer;
        let opened = |info: &parbake_protocol::agent::FileInfo| {
            if let Some(tell) = tell.take() {
                let _ = tell.send(Ok(info.mode));
            }
        };
        let done = manager.get_file(&actor, &id, &from.path, opened, &mut writer);
        if let Err(problem) = done {
            match tell.take() {
                Some(tell) => drop(tell.send(Err(problem))),
                None => writer.fail(std::io::Error::other(problem.message)),
            }
        }
    });
    let died = |_| Problem::new(Kind::Internal, "the request's thread died");
    let mode = told.await.map_err(died)??;
    let headers = [
        (CONTENT_TYPE.as_str(), "application/octet-stream".to_owned()),
        (MODE_HEADER, format!("{:o}", mode & 0o7777)),
    ];
    Ok((headers, body).into_response())
}

/// Store a file; it appears complete or not at all
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path),
        ("path" = String, Query, description = "Absolute"),
        ("mode" = Option<String>, Query, description = "Octal; 644 when absent"),
        ("owner" = Option<String>, Query, description = "user, uid, user:group or uid:gid; root"),
        ("parents" = Option<bool>, Query, description = "Make missing directories")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = Stored), (status = "default", body = Refusal)))]
pub async fn put_file(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Stored>, Problem> {
    let to = transfer(query.as_deref(), &["path", "mode", "owner", "parents"])?;
    fits(&headers, manager.config().transfer_limit)?;
    let data = body::reader(body);
    blocking(move || manager.put_file(&actor, &id, &to, data)).await.map(Json)
}

/// Fetch a directory as a tar archive
#[utoipa::path(get, path = "/v1/sandboxes/{id}/archive", tag = "files",
    params(("id" = String, Path), ("path" = String, Query, description = "Absolute")),
    responses((status = 200, content_type = "application/x-tar", body = Vec<u8>),
        (status = "default", body = Refusal)))]
pub async fn get_archive(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let from = transfer(query.as_deref(), &["path"])?;
    let (writer, body) = body::writer(());
    let (tell, told) = tokio::sync::oneshot::channel();
    tokio::task::spawn_blocking(move || {
        let mut first = First { writer, tell: Some(tell) };
        let done = manager.get_archive(&actor, &id, &from.path, &mut first);
        match (done, first.tell.take()) {
            (Ok(_), None) => {}
            (Ok(_), Some(tell)) => drop(tell.send(Ok(()))),
            (Err(problem), Some(tell)) => drop(tell.send(Err(problem))),
            (Err(problem), None) => first.writer.fail(std::io::Error::other(problem.message)),
        }
    });
    let died = |_| Problem::new(Kind::Internal, "the request's thread died");
    told.await.map_err(died)??;
    Ok(([(CONTENT_TYPE, "application/x-tar")], body).into_response())
}

/// Tells when the first byte comes: from then on there is nothing left to refuse.
struct First {
    writer: body::Writer,
    tell: Option<tokio::sync::oneshot::Sender<Result<(), Problem>>>,
}

impl std::io::Write for First {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Some(tell) = self.tell.take() {
            let _ = tell.send(Ok(()));
        }
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Unpack a tar archive into a directory
#[utoipa::path(put, path = "/v1/sandboxes/{id}/archive", tag = "files",
    params(("id" = String, Path),
        ("path" = String, Query, description = "Absolute; a directory"),
        ("parents" = Option<bool>, Query, description = "Make it and missing ones above it")),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 200, body = Stored), (status = "default", body = Refusal)))]
pub async fn put_archive(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Stored>, Problem> {
    let to = transfer(query.as_deref(), &["path", "parents"])?;
    fits(&headers, manager.config().transfer_limit)?;
    let data = body::reader(body);
    blocking(move || manager.put_archive(&actor, &id, &to, data)).await.map(Json)
}

/// Refuses at once what says itself that it is too large.
fn fits(headers: &HeaderMap, limit: u64) -> Result<(), Problem> {
    let length = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit) {
        return Err(Problem::new(Kind::TooLarge, format!("it has more than {limit} bytes")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_bytes_and_everything_else_is_strict() {
        let known = ["path", "mode", "owner", "parents"];
        let good = transfer(Some("path=/a%20b%ff&mode=755&parents&owner=1:2"), &known).unwrap();
        assert_eq!(good.path, b"/a b\xff");
        assert_eq!((good.mode, good.parents, good.owner.as_str()), (0o755, true, "1:2"));
        for bad in [
            "",
            "path=",
            "path=relative",
            "path=/a%00b",
            "path=/a&path=/b",
            "path=/a&mode=888",
            "path=/a&mode=77777",
            "path=/a&owner=%ff",
            "path=/a&parents=maybe",
            "path=/a&other=1",
        ] {
            assert_eq!(transfer(Some(bad), &known).unwrap_err().kind, Kind::BadRequest, "{bad}");
        }
        assert!(transfer(None, &known).is_err());
    }
}
