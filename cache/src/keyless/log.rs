//! What a transparency log has taken in, and when: entries of Rekor, version 1.
//!
//! Two things are asked of an entry. The log's promise (the signed entry timestamp) vouches for the
//! time, which is what a certificate of minutes is measured by. The proof of inclusion, up to a tree
//! head that the log has signed, shows that the entry is in the log that everybody sees.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use sigstore_types::{DsseEnvelope, InclusionProof, KindVersion, TransparencyLogEntry};

use super::KeylessError;
use super::root::{Log, TrustedRoot};

/// The body of an entry of kind `dsse` 0.0.1, as far as it is used.
#[derive(Deserialize)]
struct Body {
    kind: String,
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    payload_hash: Hash,
    signatures: Vec<Signed>,
}

#[derive(Deserialize)]
struct Hash {
    algorithm: String,
    value: String,
}

#[derive(Deserialize)]
struct Signed {
    signature: String,
    verifier: String,
}

/// What the promise is signed over, in the order and form of RFC 8785.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Promised<'a> {
    body: &'a str,
    integrated_time: i64,
    #[serde(rename = "logID")]
    log_id: &'a str,
    log_index: u64,
}

/// Checks that a log of `root` has taken in this very envelope, by this certificate. Returns when,
/// in seconds since 1970.
pub(super) fn verify(
    entry: &TransparencyLogEntry,
    root: &TrustedRoot,
    envelope: &DsseEnvelope,
    certificate: &[u8],
) -> Result<i64, KeylessError> {
    if entry.kind_version != KindVersion::DsseV001 {
        let (kind, version) = (entry.kind_version.kind(), entry.kind_version.version());
        return Err(KeylessError::OtherEntry(format!("it is of kind {kind} {version}")));
    }
    let time = entry.integrated_time.ok_or(KeylessError::Missing("time"))?.as_second();
    let log = log_of(entry, root, time)?;
    let key = log.key.as_ref().ok_or(KeylessError::UnknownLog)?;
    let promise = entry.inclusion_promise.as_ref().ok_or(KeylessError::Missing("promise"))?;
    let promised = Promised {
        body: &entry.canonicalized_body.to_base64(),
        integrated_time: time,
        log_id: &hex(&log.id),
        log_index: entry.log_index.get(),
    };
    let promised = crate::artifact::to_json(&promised);
    if !key.verify(&promised, promise.signed_entry_timestamp.as_bytes()) {
        return Err(KeylessError::Entry("its promise is not of the log's key".to_owned()));
    }
    let proof =
        entry.inclusion_proof.as_ref().ok_or(KeylessError::Missing("proof of inclusion"))?;
    verify_inclusion(entry.canonicalized_body.as_bytes(), proof)?;
    verify_head(proof, log)?;
    verify_body(entry.canonicalized_body.as_bytes(), envelope, certificate)?;
    Ok(time)
}

fn log_of<'a>(
    entry: &TransparencyLogEntry,
    root: &'a TrustedRoot,
    time: i64,
) -> Result<&'a Log, KeylessError> {
    let named = |log: &&Log| log.id == entry.log_id.key_id.as_bytes();
    let mut logs = root.logs.iter().filter(named).peekable();
    logs.peek().ok_or(KeylessError::UnknownLog)?;
    logs.find(|log| log.valid.contains(time))
        .ok_or_else(|| KeylessError::Time("the log's key did not count then".to_owned()))
}

/// RFC 9162, 2.1.3.2, with the hashes of RFC 6962, 2.1.
fn verify_inclusion(body: &[u8], proof: &InclusionProof) -> Result<(), KeylessError> {
    let wrong = || KeylessError::Entry("its proof of inclusion does not hold".to_owned());
    let (index, size) = (proof.log_index.get(), proof.tree_size);
    if index >= size {
        return Err(wrong());
    }
    let mut hash: [u8; 32] = Sha256::new().chain_update([0]).chain_update(body).finalize().into();
    let (mut node, mut last) = (index, size - 1);
    for sibling in &proof.hashes {
        if last == 0 {
            return Err(wrong());
        }
        let (left, right) = match node & 1 == 1 || node == last {
            true => (sibling.as_bytes(), &hash),
            false => (&hash, sibling.as_bytes()),
        };
        let parent =
            Sha256::new().chain_update([1]).chain_update(left).chain_update(right).finalize();
        if node & 1 == 0 && node == last {
            while node & 1 == 0 && node != 0 {
                node >>= 1;
                last >>= 1;
            }
        }
        hash = parent.into();
        node >>= 1;
        last >>= 1;
    }
    if last == 0 && hash == *proof.root_hash.as_bytes() { Ok(()) } else { Err(wrong()) }
}

/// The tree that the proof leads to is one that the log has signed.
fn verify_head(proof: &InclusionProof, log: &Log) -> Result<(), KeylessError> {
    let checkpoint = proof.checkpoint.checkpoint().ok_or(KeylessError::Missing("checkpoint"))?;
    if checkpoint.tree_size() != proof.tree_size || *checkpoint.root_hash() != proof.root_hash {
        return Err(KeylessError::Entry("its checkpoint is of another tree".to_owned()));
    }
    let hint = log.id.get(..4).unwrap_or_default();
    let signed = |key: &crate::keys::PublicKey| {
        let mut signatures = checkpoint.signatures().iter();
        signatures.any(|one| {
            one.key_id.as_slice() == hint
                && key.verify(checkpoint.signed_data(), one.signature.as_bytes())
        })
    };
    if log.key.as_ref().is_some_and(signed) {
        return Ok(());
    }
    Err(KeylessError::Entry("its checkpoint is not signed by the log".to_owned()))
}

/// The entry is about this envelope and this certificate.
pub(super) fn verify_body(
    body: &[u8],
    envelope: &DsseEnvelope,
    certificate: &[u8],
) -> Result<(), KeylessError> {
    let other = |what: &str| KeylessError::OtherEntry(what.to_owned());
    let body: Body = serde_json::from_slice(body).map_err(|_| other("it cannot be read"))?;
    if body.kind != "dsse" {
        return Err(other("its body is of another kind"));
    }
    let payload = crate::Digest::of(envelope.payload.as_bytes());
    if body.spec.payload_hash.algorithm != "sha256" || body.spec.payload_hash.value != payload.hex()
    {
        return Err(other("another payload"));
    }
    let [signed] = body.spec.signatures.as_slice() else {
        return Err(other("not one signature"));
    };
    if signed.signature != envelope.signature.sig.to_base64() {
        return Err(other("another signature"));
    }
    let verifier = super::certificate::of_base64_pem(&signed.verifier);
    if verifier.as_deref() != Some(certificate) {
        return Err(other("another certificate"));
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sigstore_types::{CheckpointData, LogIndex, Sha256Hash};

    fn node(left: &[u8; 32], right: &[u8; 32]) -> [u8; 32] {
        Sha256::new().chain_update([1]).chain_update(left).chain_update(right).finalize().into()
    }

    /// The root and the path of one leaf, by the recursive definition (RFC 6962, 2.1 and 2.1.1).
    fn tree(leaves: &[[u8; 32]], index: usize) -> ([u8; 32], Vec<[u8; 32]>) {
        if leaves.len() == 1 {
            return (leaves[0], Vec::new());
        }
        let split = leaves.len().next_power_of_two() / 2;
        let (left, right) = leaves.split_at(split);
        let inside = index < split;
        let (a, path_a) = tree(left, if inside { index } else { 0 });
        let (b, path_b) = tree(right, if inside { 0 } else { index - split });
        let mut path = if inside { path_a } else { path_b };
        path.push(if inside { b } else { a });
        (node(&a, &b), path)
    }

    #[test]
    fn proofs_hold_for_their_leaf_only() {
        for size in 1..=20_usize {
            let bodies: Vec<Vec<u8>> =
                (0..size).map(|n| format!("body {n}").into_bytes()).collect();
            let leaves: Vec<[u8; 32]> = bodies
                .iter()
                .map(|body| Sha256::new().chain_update([0]).chain_update(body).finalize().into())
                .collect();
            for (index, body) in bodies.iter().enumerate() {
                let (root, path) = tree(&leaves, index);
                let hashes: Vec<Sha256Hash> =
                    path.iter().map(|hash| Sha256Hash::try_from(&hash[..]).unwrap()).collect();
                let proof = |index: usize, size: usize, hashes: Vec<Sha256Hash>| {
                    InclusionProof::new(
                        LogIndex::new(index as u64).unwrap(),
                        Sha256Hash::try_from(&root[..]).unwrap(),
                        size as u64,
                        hashes,
                        CheckpointData::default(),
                    )
                };
                let holds =
                    |proof: &InclusionProof, body: &[u8]| verify_inclusion(body, proof).is_ok();
                assert!(holds(&proof(index, size, hashes.clone()), body), "{index}/{size}");
                assert!(!holds(&proof(index, size, hashes.clone()), b"other"));
                assert!(!holds(&proof(size, size, hashes.clone()), body));
                let mut longer = hashes.clone();
                longer.push(Sha256Hash::try_from(&root[..]).unwrap());
                assert!(!holds(&proof(index, size, longer), body));
                if let Some((_, shorter)) = hashes.split_last() {
                    assert!(!holds(&proof(index, size, shorter.to_vec()), body));
                    let other = (index + 1) % size;
                    assert!(!holds(&proof(other, size, hashes.clone()), body));
                }
            }
        }
    }
}
