//! How a template came about, as SLSA provenance v1.
//!
//! `buildType` is `https://parbake.dev/build/v1`. Its external parameters are what whoever built the
//! template chose: the source, the machine, the process, the labels, and what a bake does. Its
//! resolved dependencies are what went in, by digest: the image's manifest and layers, the kernel's
//! package, the agent, and, for Dockerfiles and recipes, the file and the lock file. Everything is
//! read from the template itself, so the same template always has the same provenance; who ran the
//! build, and when, is not in it.

use parbake_cache::Digest;
use parbake_cache::statements::Document;
use serde_json::{Map, Value, json};

use crate::template::Template;

/// The predicate's type.
pub const PREDICATE: &str = "https://slsa.dev/provenance/v1";
const BUILD_TYPE: &str = "https://parbake.dev/build/v1";
const BUILDER: &str = "https://parbake.dev/parbake";
/// A template's label with the digest of the Dockerfile or recipe it was built from.
pub const RECIPE_LABEL: &str = "dev.parbake.recipe.digest";
/// A template's label with the digest of the lock file it was built with.
pub const LOCK_LABEL: &str = "dev.parbake.lock.digest";

/// The provenance of a template, to be attached.
#[must_use]
pub fn document(template: &Template, snapshots: &[Digest]) -> Document {
    Document {
        predicate_type: PREDICATE.to_owned(),
        media_type: None,
        content: predicate(template, snapshots),
    }
}

fn predicate(template: &Template, snapshots: &[Digest]) -> Value {
    let (manifest, kernel) = (&template.manifest, &template.kernel);
    let sha256 = |digest: &Digest| json!({"sha256": digest.hex()});
    let mut dependencies = Vec::new();
    let mut source =
        Map::from_iter([("name".to_owned(), manifest.source.reference.clone().into())]);
    if manifest.source.reference.starts_with("docker://") {
        source.insert("uri".to_owned(), manifest.source.reference.clone().into());
    }
    if let Some(digest) = &manifest.source.manifest {
        source.insert("digest".to_owned(), sha256(digest));
    }
    dependencies.push(Value::Object(source));
    for (number, layer) in manifest.source.layers.iter().enumerate() {
        // As images write them: an algorithm, a colon, digits.
        if let Some((algorithm, digits)) = layer.diff_id.split_once(':') {
            let name = format!("layer {}", number + 1);
            dependencies.push(json!({"name": name, "digest": {algorithm: digits}}));
        }
    }
    for (name, label) in [("recipe", RECIPE_LABEL), ("lock", LOCK_LABEL)] {
        let digest = manifest.labels.get(label).and_then(|text| text.parse::<Digest>().ok());
        if let Some(digest) = digest {
            dependencies.push(json!({"name": name, "digest": sha256(&digest)}));
        }
    }
    let package = format!("{} {}", kernel.package, kernel.version);
    dependencies.push(json!({"name": package, "digest": sha256(&kernel.source)}));
    dependencies.push(json!({"name": "agent", "digest": sha256(&kernel.agent)}));
    let mut products = vec![json!({"name": "template", "digest": sha256(&template.digest)})];
    let mut snapshots = snapshots.to_vec();
    snapshots.sort_unstable();
    products.extend(
        snapshots.iter().map(|digest| json!({"name": "snapshot", "digest": sha256(digest)})),
    );
    json!({
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "source": manifest.source.reference,
                "machine": manifest.machine,
                "process": manifest.process,
                "labels": manifest.labels,
                "bake": manifest.bake,
            },
            "internalParameters": {
                "architecture": manifest.architecture,
                "kernelCommandLine": kernel.cmdline,
                "kernelModules": kernel.modules,
            },
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {"id": BUILDER, "version": {"parbake": env!("CARGO_PKG_VERSION")}},
            "byproducts": products,
        },
    })
}
