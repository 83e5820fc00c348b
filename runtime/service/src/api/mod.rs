//! HTTP ↔ model: routes, their documentation, and how refusals look.
//!
//! Handlers only translate. The manager blocks, so each request's work runs in a thread; a caller
//! that goes away meanwhile is noticed where it matters (a sandbox nobody would know of, a command
//! nobody listens to).

mod body;
mod exec;
mod files;
mod node;
mod sandboxes;

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::de::DeserializeOwned;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::manager::Manager;
use crate::model::MAX_BODY;
use crate::problem::{Kind, Problem, Refusal};

/// What every handler works with.
pub type Shared = Arc<Manager>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "parbaked",
        description = "Sandboxes on one node. On its unix socket whoever may open it may do \
                       everything; over TCP every request carries `Authorization: Bearer KEY`. \
                       Whatever is not a success has a `Refusal` as its body.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "sandboxes", description = "Making, copying, resting, removing"),
        (name = "commands", description = "Running commands"),
        (name = "files", description = "Files in and out"),
        (name = "node", description = "The service itself")
    )
)]
struct Document;

/// Routes and their document.
fn documented() -> (Router<Shared>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(sandboxes::list, sandboxes::create))
        .routes(routes!(sandboxes::get, sandboxes::remove))
        .routes(routes!(sandboxes::fork))
        .routes(routes!(sandboxes::pause))
        .routes(routes!(sandboxes::resume))
        .routes(routes!(sandboxes::stats))
        .routes(routes!(sandboxes::logs))
        .routes(routes!(exec::exec))
        .routes(routes!(files::get_file, files::put_file))
        .routes(routes!(files::get_archive, files::put_archive))
        .routes(routes!(node::events))
        .routes(routes!(node::status))
        .routes(routes!(node::metrics))
        .routes(routes!(node::health))
        .split_for_parts()
}

/// The document, as it is served and committed.
#[must_use]
pub fn openapi() -> String {
    let mut text = documented().1.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The whole API.
pub fn app(manager: Shared) -> Router {
    let (router, document) = documented();
    router
        .route("/v1/openapi.json", get(move || async move { Json(document) }))
        .fallback(|| async { Problem::new(Kind::UnknownPath, "there is no such path") })
        .method_not_allowed_fallback(|| async {
            Problem::new(Kind::WrongMethod, "the path does not do this")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(manager)
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(Refusal { error: self })).into_response()
    }
}

/// A JSON body; what is not one is refused as everything else is. No body is an empty object.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bytes = bytes::Bytes::from_request(request, state).await.map_err(|error| {
            let too_large = error.status() == StatusCode::PAYLOAD_TOO_LARGE;
            let kind = if too_large { Kind::TooLarge } else { Kind::BadRequest };
            let message = if too_large {
                format!("the body has more than {MAX_BODY} bytes")
            } else {
                "the body did not arrive".to_owned()
            };
            Problem::new(kind, message)
        })?;
        let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        Json::<T>::from_bytes(bytes).map(|Json(value)| Self(value)).map_err(|error| {
            let message = match &error {
                JsonRejection::JsonSyntaxError(_) => "the body is not JSON",
                _ => "the body is not what is wanted here",
            };
            let mut problem = Problem::because(Kind::BadRequest, &error);
            message.clone_into(&mut problem.message);
            problem
        })
    }
}

/// Does what blocks, in a thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        eprintln!("parbaked: a request died: {error}");
        Err(Problem::new(Kind::Internal, "the request's thread died; the service's log says more"))
    })
}

#[cfg(test)]
mod tests {
    /// The committed document is the one the code makes: `UPDATE=1 cargo test` writes it.
    #[test]
    fn the_committed_document_is_fresh() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        let made = super::openapi();
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, &made).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(made == committed, "openapi.json is stale; UPDATE=1 writes it anew");
    }
}
