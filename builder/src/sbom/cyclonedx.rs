//! CycloneDX 1.6 in JSON (ECMA-424, and its JSON schema).

use serde_json::{Value, json};

use super::{Inventory, kernel_url, name, timestamp, uuid};
use crate::template::Template;

pub(super) fn write(template: &Template, inventory: &Inventory, created: u64) -> Value {
    let kernel = &template.kernel;
    let mut components = vec![json!({
        "type": "operating-system",
        "bom-ref": "kernel",
        "name": kernel.package,
        "version": kernel.version,
        "purl": kernel_url(template),
        "hashes": [{"alg": "SHA-256", "content": kernel.source.hex()}],
    })];
    for (number, package) in inventory.packages.iter().enumerate() {
        let url = package.url(inventory);
        let mut component = json!({
            "type": "library",
            // The same package may be there twice, and references must be unique.
            "bom-ref": format!("{}-{url}", number + 1),
            "name": package.name,
            "version": package.version,
            "purl": url,
            "properties": [{"name": "dev.parbake.location", "value": package.location}],
        });
        if let Some(license) = &package.license {
            component["licenses"] = json!([{"license": {"name": license}}]);
        }
        components.push(component);
    }
    let mut document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": format!("urn:uuid:{}", uuid(&template.digest)),
        "version": 1,
        "metadata": {
            "timestamp": timestamp(created),
            "tools": {"components": [{
                "type": "application",
                "name": "parbake",
                "version": env!("CARGO_PKG_VERSION"),
            }]},
            "component": {
                "type": "operating-system",
                "bom-ref": "template",
                "name": name(template),
                "version": template.digest,
                "hashes": [{"alg": "SHA-256", "content": template.digest.hex()}],
            },
        },
        "components": components,
    });
    if !inventory.unread.is_empty() {
        let unread = inventory.unread.iter();
        document["metadata"]["properties"] = unread
            .map(|what| json!({"name": "dev.parbake.unread", "value": what}))
            .collect::<Vec<_>>()
            .into();
    }
    document
}
