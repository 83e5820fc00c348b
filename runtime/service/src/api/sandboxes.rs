//! Sandboxes: making, copying, resting, looking at, removing.

use std::io::{Read, Seek, SeekFrom};
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use utoipa::IntoParams;

use super::body;
use super::{Body, Shared, blocking};
use crate::listen::Actor;
use crate::model::{
    CreateRequest, ForkRequest, PauseRequest, Paused, ResumeRequest, Sandbox, SandboxList, Stats,
};
use crate::problem::{Kind, Problem, Refusal};

/// The header that makes a request safe to repeat.
const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// How often a log that is followed is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// All sandboxes, oldest first, the paused ones among them
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", responses(
    (status = 200, body = SandboxList), (status = "default", body = Refusal)))]
pub async fn list(State(manager): State<Shared>) -> Result<Json<SandboxList>, Problem> {
    blocking(move || manager.list()).await.map(Json)
}

/// Make a sandbox from a baked template
///
/// With an `Idempotency-Key`, the same request again finds the sandbox that was made. Without one,
/// a caller who goes away before the answer leaves no sandbox behind.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = CreateRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 bytes")),
    responses(
        (status = 201, description = "Made", body = Sandbox),
        (status = 200, description = "Made by the same request earlier", body = Sandbox),
        (status = "default", body = Refusal)))]
pub async fn create(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    headers: HeaderMap,
    Body(request): Body<CreateRequest>,
) -> Result<(StatusCode, Json<Sandbox>), Problem> {
    let key = match headers.get(IDEMPOTENCY_KEY).map(|key| key.to_str()) {
        None => None,
        Some(Ok(key)) => Some(key.to_owned()),
        Some(Err(_)) => {
            return Err(Problem::new(Kind::BadRequest, "the idempotency key is not text"));
        }
    };
    let (tell, told) = tokio::sync::oneshot::channel();
    tokio::task::spawn_blocking(move || {
        let made = manager.create(&actor, &request, key.as_deref());
        // A caller with a key may come back for it; one without has gone for good.
        if let Err(Ok((sandbox, _))) = tell.send(made)
            && key.is_none()
        {
            let _ = manager.remove(&actor, &sandbox.id);
        }
    });
    let died = |_| Problem::new(Kind::Internal, "the request's thread died");
    let (sandbox, known) = told.await.map_err(died)??;
    let status = if known { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(sandbox)))
}

/// One sandbox
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 200, body = Sandbox), (status = "default", body = Refusal)))]
pub async fn get(
    State(manager): State<Shared>,
    Path(id): Path<String>,
) -> Result<Json<Sandbox>, Problem> {
    blocking(move || manager.get(&id)).await.map(Json)
}

/// Remove a sandbox, running or paused
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path)),
    responses((status = 204, description = "Gone"), (status = "default", body = Refusal)))]
pub async fn remove(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
) -> Result<StatusCode, Problem> {
    blocking(move || manager.remove(&actor, &id)).await.map(|()| StatusCode::NO_CONTENT)
}

/// Make copies of a running sandbox
///
/// It stands still for as long as it takes to write its memory out. Copies share memory and disk
/// with each other until they write. Each gets fresh entropy and identity; processes that ran in
/// the parent run in the copies.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "sandboxes",
    params(("id" = String, Path)), request_body = ForkRequest,
    responses((status = 201, body = SandboxList), (status = "default", body = Refusal)))]
pub async fn fork(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    Body(request): Body<ForkRequest>,
) -> Result<(StatusCode, Json<SandboxList>), Problem> {
    let made = blocking(move || manager.fork(&actor, &id, &request)).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

/// Write a sandbox into the store and end it
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes",
    params(("id" = String, Path)), request_body = PauseRequest,
    responses((status = 200, body = Paused), (status = "default", body = Refusal)))]
pub async fn pause(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    Body(request): Body<PauseRequest>,
) -> Result<Json<Paused>, Problem> {
    blocking(move || manager.pause(&actor, &id, &request)).await.map(Json)
}

/// Let a paused sandbox go on
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes",
    params(("id" = String, Path,
        description = "Its id, or the name of a template that a paused sandbox was pulled as")),
    request_body = ResumeRequest,
    responses((status = 200, body = Sandbox), (status = "default", body = Refusal)))]
pub async fn resume(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    Body(request): Body<ResumeRequest>,
) -> Result<Json<Sandbox>, Problem> {
    blocking(move || manager.resume(&actor, &id, &request)).await.map(Json)
}

/// What a sandbox uses
#[utoipa::path(get, path = "/v1/sandboxes/{id}/stats", tag = "sandboxes",
    params(("id" = String, Path)),
    responses((status = 200, body = Stats), (status = "default", body = Refusal)))]
pub async fn stats(
    State(manager): State<Shared>,
    Path(id): Path<String>,
) -> Result<Json<Stats>, Problem> {
    blocking(move || manager.stats(&id)).await.map(Json)
}

/// How much of a log is wanted.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct LogQuery {
    /// Go on as it grows, until the sandbox is gone.
    #[serde(default)]
    #[param(required = false)]
    follow: bool,
    /// What the monitor said, in place of the guest's console.
    #[serde(default)]
    #[param(required = false)]
    monitor: bool,
}

/// The guest's console
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes",
    params(("id" = String, Path), LogQuery),
    responses((status = 200, content_type = "text/plain", body = String),
        (status = "default", body = Refusal)))]
pub async fn logs(
    State(manager): State<Shared>,
    Path(id): Path<String>,
    query: Result<Query<LogQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(|error| Problem::because(Kind::BadRequest, &error))?;
    let (console, monitor) = manager.logs(&id)?;
    let path = if query.monitor { monitor } else { console };
    let opened = blocking(move || {
        std::fs::File::open(path).map_err(|error| Problem::because(Kind::GuestGone, &error))
    });
    let mut file = opened.await?;
    let (mut writer, body) = body::writer(());
    tokio::task::spawn_blocking(move || {
        let mut at = 0;
        loop {
            // Asked before reading, so that what came last is not missed.
            let over = !query.follow || !manager.is_here(&id);
            let copied = file
                .seek(SeekFrom::Start(at))
                .and_then(|_| std::io::copy(&mut (&mut file).take(u64::MAX), &mut writer));
            match copied {
                Ok(count) => at += count,
                Err(_) => return,
            }
            if over || writer.is_closed() {
                return;
            }
            std::thread::sleep(LOOK);
        }
    });
    let kind = [("content-type", "text/plain; charset=utf-8")];
    Ok((kind, body).into_response())
}
