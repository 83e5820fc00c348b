//! The service itself: what happens, how it is, what it has measured.

use axum::Json;
use axum::extract::{Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use utoipa::IntoParams;

use super::{Shared, blocking};
use crate::model::{Event, NodeStatus};
use crate::problem::{Kind, Problem, Refusal};

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    /// Go on with those to come.
    #[serde(default)]
    #[param(required = false)]
    follow: bool,
    /// Only those with a higher sequence number.
    #[serde(default)]
    #[param(required = false)]
    since: u64,
}

/// What happened, one JSON document a line; the last 1024 are remembered
///
/// A listener who is too slow is cut off rather than told less than all.
#[utoipa::path(get, path = "/v1/events", tag = "node", params(EventQuery),
    responses((status = 200, content_type = "application/x-ndjson", body = Event),
        (status = "default", body = Refusal)))]
pub async fn events(
    State(manager): State<Shared>,
    query: Result<Query<EventQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(|error| Problem::because(Kind::BadRequest, &error))?;
    let (past, future) = manager.feed().listen(query.since);
    let line = |event: &Event| {
        let mut line = serde_json::to_vec(event).unwrap_or_default();
        line.push(b'\n');
        bytes::Bytes::from(line)
    };
    let past: Vec<_> = past.iter().map(|event| Ok::<_, std::io::Error>(line(event))).collect();
    let future = query.follow.then_some(future);
    let future = futures_util::stream::unfold(future, move |future| async move {
        let mut future = future?;
        match future.events.recv().await {
            Ok(event) => Some((Ok(line(&event)), Some(future))),
            Err(RecvError::Closed) => None,
            Err(RecvError::Lagged(_)) => Some((Err(std::io::Error::other("too slow")), None)),
        }
    });
    let all = futures_util::StreamExt::chain(futures_util::stream::iter(past), future);
    let body = axum::body::Body::from_stream(all);
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// The service's state
#[utoipa::path(get, path = "/v1/node", tag = "node",
    responses((status = 200, body = NodeStatus), (status = "default", body = Refusal)))]
pub async fn status(State(manager): State<Shared>) -> Json<NodeStatus> {
    Json(manager.status())
}

/// What Prometheus scrapes
#[utoipa::path(get, path = "/metrics", tag = "node",
    responses((status = 200, content_type = "application/openmetrics-text", body = String),
        (status = "default", body = Refusal)))]
pub async fn metrics(State(manager): State<Shared>) -> Result<Response, Problem> {
    let text = blocking(move || Ok(manager.scrape())).await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(CONTENT_TYPE, kind)], text).into_response())
}

/// Whether the service takes sandboxes
#[utoipa::path(get, path = "/healthz", tag = "node",
    responses((status = 200, content_type = "text/plain", body = String),
        (status = "default", body = Refusal)))]
pub async fn health(State(manager): State<Shared>) -> Result<&'static str, Problem> {
    if manager.draining() {
        return Err(Problem::new(Kind::Draining, "this parbaked is about to end"));
    }
    Ok("ok\n")
}
