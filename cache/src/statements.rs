//! What is said about a template when it is published: a signature, and documents about it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::Digest;
use crate::bundle::{self, BUNDLE_TYPE, SIGNATURE_PREDICATE, STATEMENT_TYPE};
use crate::keys::SigningKey;
use crate::referrers::Attachment;
use crate::trust::{CONTENT_ANNOTATION, PREDICATE_ANNOTATION};

/// What to say.
#[derive(Debug, Clone, Default)]
pub struct Statements {
    /// Signs the template and every document, if given.
    pub key: Option<Arc<SigningKey>>,
    /// Documents about it.
    pub documents: Vec<Document>,
}

/// A document about a template.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// The predicate's type, where it is part of a statement.
    pub predicate_type: String,
    /// The document's own media type; without one it only makes sense in a statement.
    pub media_type: Option<String>,
    /// What it says.
    pub content: Value,
}

impl Statements {
    /// What is to be attached to the template's index: with a key, bundles; without one, the
    /// documents as they are.
    #[must_use]
    pub fn attachments(&self, subject: &Digest, name: &str) -> Vec<Attachment> {
        let mut attachments = Vec::new();
        let statement = |predicate_type: &str, predicate: Value| {
            bundle::statement(subject, name, predicate_type, predicate)
        };
        let note = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        if let Some(key) = &self.key {
            let plain = (SIGNATURE_PREDICATE, Value::Object(serde_json::Map::new()));
            let documents = self
                .documents
                .iter()
                .map(|document| (document.predicate_type.as_str(), document.content.clone()));
            for (predicate_type, predicate) in std::iter::once(plain).chain(documents) {
                attachments.push(Attachment {
                    artifact_type: BUNDLE_TYPE.to_owned(),
                    bytes: bundle::sign(key, &statement(predicate_type, predicate)),
                    annotations: BTreeMap::from([
                        note(CONTENT_ANNOTATION, "dsse-envelope"),
                        note(PREDICATE_ANNOTATION, predicate_type),
                    ]),
                });
            }
            return attachments;
        }
        for document in &self.documents {
            let (artifact_type, bytes) = match &document.media_type {
                Some(media_type) => {
                    (media_type.as_str(), crate::artifact::to_json(&document.content))
                }
                None => {
                    let said = statement(&document.predicate_type, document.content.clone());
                    (STATEMENT_TYPE, crate::artifact::to_json(&said))
                }
            };
            attachments.push(Attachment {
                artifact_type: artifact_type.to_owned(),
                bytes,
                annotations: BTreeMap::from([note(
                    "in-toto.io/predicate-type",
                    &document.predicate_type,
                )]),
            });
        }
        attachments
    }
}
