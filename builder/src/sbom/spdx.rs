//! SPDX 2.3 in JSON (ISO/IEC 5962, and its JSON schema).

use serde_json::{Value, json};

use super::{Inventory, Package, kernel_url, name, timestamp};
use crate::template::Template;

pub(super) fn write(template: &Template, inventory: &Inventory, created: u64) -> Value {
    let kernel = &template.kernel;
    let mut packages = vec![
        json!({
            "SPDXID": "SPDXRef-Template",
            "name": name(template),
            "versionInfo": template.digest,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": false,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": "NOASSERTION",
            "copyrightText": "NOASSERTION",
            "primaryPackagePurpose": "OPERATING-SYSTEM",
            "checksums": [{"algorithm": "SHA256", "checksumValue": template.digest.hex()}],
        }),
        json!({
            "SPDXID": "SPDXRef-Kernel",
            "name": kernel.package,
            "versionInfo": kernel.version,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": false,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": "NOASSERTION",
            "copyrightText": "NOASSERTION",
            "primaryPackagePurpose": "OPERATING-SYSTEM",
            "checksums": [{"algorithm": "SHA256", "checksumValue": kernel.source.hex()}],
            "externalRefs": [external(&kernel_url(template))],
        }),
    ];
    let mut relationships = vec![
        relationship("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-Template"),
        relationship("SPDXRef-Template", "CONTAINS", "SPDXRef-Kernel"),
    ];
    for (number, package) in inventory.packages.iter().enumerate() {
        let id = format!("SPDXRef-Package-{}-{}", number + 1, identifier(&package.name));
        relationships.push(relationship("SPDXRef-Template", "CONTAINS", &id));
        packages.push(describe(package, inventory, &id));
    }
    let mut document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name(template),
        "documentNamespace": format!("https://parbake.dev/spdx/{}", template.digest.hex()),
        "creationInfo": {
            "created": timestamp(created),
            "creators": [concat!("Tool: parbake-", env!("CARGO_PKG_VERSION"))],
        },
        "packages": packages,
        "relationships": relationships,
    });
    if !inventory.unread.is_empty() {
        document["comment"] = format!("Not read: {}", inventory.unread.join("; ")).into();
    }
    document
}

fn describe(package: &Package, inventory: &Inventory, id: &str) -> Value {
    let mut described = json!({
        "SPDXID": id,
        "name": package.name,
        "versionInfo": package.version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        // What packages say is rarely an expression that SPDX allows here.
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "sourceInfo": format!("found in {}", package.location),
        "externalRefs": [external(&package.url(inventory))],
    });
    if let Some(license) = &package.license {
        described["licenseComments"] = format!("declared as: {license}").into();
    }
    described
}

fn external(url: &str) -> Value {
    json!({
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": url,
    })
}

fn relationship(from: &str, kind: &str, to: &str) -> Value {
    json!({"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
}

/// Letters, digits, dots and dashes only.
fn identifier(text: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    text.chars().map(allowed).collect()
}
