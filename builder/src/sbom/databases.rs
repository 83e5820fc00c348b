//! The package databases in a root filesystem.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Inventory, Manager, Package};
use crate::contents::{ContentsError, RootFs};

/// The largest database read whole.
const MAX_DATABASE: u64 = 256 << 20;
/// The largest description of one package.
const MAX_DESCRIPTION: u64 = 4 << 20;
/// More directories than any image has.
const MAX_DIRECTORIES: usize = 4 << 20;

pub(super) fn read(root: &RootFs) -> Result<Inventory, ContentsError> {
    let mut inventory = Inventory::default();
    for path in ["etc/os-release", "usr/lib/os-release"] {
        if let Some(text) = text(root, path, MAX_DESCRIPTION)? {
            let values = os_release(&text);
            inventory.distribution = values.get("ID").cloned();
            inventory.release = values.get("VERSION_ID").cloned();
            break;
        }
    }
    let mut packages = BTreeSet::new();
    let status = "var/lib/dpkg/status";
    if let Some(text) = text(root, status, MAX_DATABASE)? {
        packages.extend(dpkg(&text, status));
    }
    // Images without a package manager keep one file per package there.
    let pieces = "var/lib/dpkg/status.d";
    for name in root.names(pieces.as_bytes())? {
        let path = format!("{pieces}/{}", String::from_utf8_lossy(&name));
        if !path.ends_with(".md5sums")
            && let Some(text) = text(root, &path, MAX_DESCRIPTION)?
        {
            packages.extend(dpkg(&text, &path));
        }
    }
    for path in ["lib/apk/db/installed", "usr/lib/apk/db/installed"] {
        if let Some(text) = text(root, path, MAX_DATABASE)? {
            packages.extend(apk(&text, path));
            break;
        }
    }
    for directory in ["var/lib/rpm", "usr/lib/sysimage/rpm"] {
        let names = root.names(directory.as_bytes())?;
        let is_database = |name: &Vec<u8>| {
            matches!(name.as_slice(), b"Packages" | b"Packages.db" | b"rpmdb.sqlite")
        };
        if let Some(name) = names.iter().find(|name| is_database(name)) {
            let name = String::from_utf8_lossy(name);
            inventory.unread.push(format!("{directory}/{name}: rpm databases are not read"));
        }
    }
    walk(root, &mut packages, &mut inventory.unread)?;
    inventory.packages = packages;
    Ok(inventory)
}

/// Looks for packages of Python and npm, which may be anywhere.
fn walk(
    root: &RootFs,
    packages: &mut BTreeSet<Package>,
    unread: &mut Vec<String>,
) -> Result<(), ContentsError> {
    let mut left: Vec<Vec<u8>> = vec![Vec::new()];
    let mut seen = 0;
    while let Some(directory) = left.pop() {
        seen += 1;
        if seen > MAX_DIRECTORIES {
            unread
                .push(format!("more than {MAX_DIRECTORIES} directories: not all were looked into"));
            break;
        }
        let path = String::from_utf8_lossy(&directory).into_owned();
        let name = path.rsplit('/').next().unwrap_or_default();
        let file = |inside: &str| format!("{path}/{inside}");
        if name.ends_with(".dist-info") || name.ends_with(".egg-info") {
            let described = if name.ends_with(".dist-info") { "METADATA" } else { "PKG-INFO" };
            let described = file(described);
            if let Some(text) = text(root, &described, MAX_DESCRIPTION)? {
                match python(&text, &described) {
                    Some(package) => drop(packages.insert(package)),
                    None => unread.push(format!("{described}: no name or version")),
                }
            }
            continue;
        }
        if is_npm_package(&path)
            && let Some(text) = text(root, &file("package.json"), MAX_DESCRIPTION)?
        {
            match npm(&text, &file("package.json")) {
                Some(package) => drop(packages.insert(package)),
                None => unread.push(format!("{}: no name or version", file("package.json"))),
            }
        }
        left.extend(root.directories(&directory)?);
    }
    Ok(())
}

/// `…/node_modules/NAME` or `…/node_modules/@SCOPE/NAME`.
fn is_npm_package(path: &str) -> bool {
    let parts: Vec<&str> = path.rsplitn(4, '/').collect();
    match parts.as_slice() {
        [name, "node_modules", ..] => !name.starts_with(['@', '.']),
        [_, scope, "node_modules", ..] => scope.starts_with('@'),
        _ => false,
    }
}

fn text(root: &RootFs, path: &str, limit: u64) -> Result<Option<String>, ContentsError> {
    let bytes = root.read(path.as_bytes(), limit)?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

/// os-release(5).
fn os_release(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| line.trim().split_once('='))
        .filter(|(name, _)| !name.starts_with('#'))
        .map(|(name, value)| (name.to_owned(), value.trim_matches(['"', '\'']).to_owned()))
        .filter(|(_, value)| !value.is_empty())
        .collect()
}

/// The fields of one paragraph (deb822(5)) or one header (RFC 5322), the first of each name; lines
/// that go on from the one before are left out.
fn fields(paragraph: &str) -> BTreeMap<String, &str> {
    let mut fields = BTreeMap::new();
    for line in paragraph.lines().filter(|line| !line.starts_with([' ', '\t'])) {
        if let Some((name, value)) = line.split_once(':') {
            fields.entry(name.to_ascii_lowercase()).or_insert(value.trim());
        }
    }
    fields
}

fn paragraphs(text: &str) -> impl Iterator<Item = &str> {
    text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty())
}

/// dpkg's status file: what is installed of it.
fn dpkg(text: &str, location: &str) -> Vec<Package> {
    let read = |paragraph| {
        let fields = fields(paragraph);
        // Pieces of distroless images have no status; whole databases also know what is gone.
        let installed = fields
            .get("status")
            .is_none_or(|status| status.split(' ').next_back() == Some("installed"));
        let source = fields.get("source").and_then(|source| source.split(' ').next());
        let name = (*fields.get("package")?).to_owned();
        installed.then(|| {
            Some(Package {
                manager: Manager::Dpkg,
                version: (*fields.get("version")?).to_owned(),
                architecture: fields.get("architecture").map(|&value| value.to_owned()),
                source: source.filter(|source| *source != name).map(str::to_owned),
                license: None,
                location: location.to_owned(),
                name,
            })
        })?
    };
    paragraphs(text).filter_map(read).collect()
}

/// apk's installed database: a letter, a colon, a value.
fn apk(text: &str, location: &str) -> Vec<Package> {
    let read = |paragraph: &str| {
        let value = |letter: char| {
            let line = paragraph
                .lines()
                .find(|line| line.starts_with(letter) && line.as_bytes().get(1) == Some(&b':'))?;
            Some(line[2..].trim().to_owned()).filter(|value| !value.is_empty())
        };
        let name = value('P')?;
        Some(Package {
            manager: Manager::Apk,
            version: value('V')?,
            architecture: value('A'),
            source: value('o').filter(|source| *source != name),
            license: value('L'),
            location: location.to_owned(),
            name,
        })
    };
    paragraphs(text).filter_map(read).collect()
}

/// Core metadata of a Python package.
fn python(text: &str, location: &str) -> Option<Package> {
    // The description follows after an empty line.
    let fields = fields(paragraphs(text).next()?);
    let license = ["license-expression", "license"]
        .iter()
        .find_map(|name| fields.get(*name).copied())
        .filter(|license| !license.is_empty() && *license != "UNKNOWN");
    Some(Package {
        manager: Manager::Python,
        name: (*fields.get("name")?).to_owned(),
        version: (*fields.get("version")?).to_owned(),
        architecture: None,
        source: None,
        license: license.map(str::to_owned),
        location: location.to_owned(),
    })
}

/// package.json.
fn npm(text: &str, location: &str) -> Option<Package> {
    let document: Value = serde_json::from_str(text).ok()?;
    let field = |name: &str| document[name].as_str().filter(|text| !text.is_empty());
    let license = field("license").or_else(|| document["license"]["type"].as_str());
    Some(Package {
        manager: Manager::Npm,
        name: field("name")?.to_owned(),
        version: field("version")?.to_owned(),
        architecture: None,
        source: None,
        license: license.map(str::to_owned),
        location: location.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn databases_are_read_as_their_managers_write_them() {
        let status = "Package: a\nStatus: install ok installed\nVersion: 1:2-3\nArchitecture: amd64\n\
             Source: aa (1)\nDescription: x\n more: y\n\nPackage: gone\nStatus: deinstall ok config-files\n\
             Version: 1\n\nPackage: half\nStatus: install ok half-installed\nVersion: 1\n\n\
             Package: b\nVersion: 2\n\nVersion: 3\n";
        let found = dpkg(status, "status");
        let names: Vec<_> =
            found.iter().map(|package| (&*package.name, &*package.version)).collect();
        assert_eq!(names, [("a", "1:2-3"), ("b", "2")]);
        assert_eq!(found[0].source.as_deref(), Some("aa"));

        let installed = "C:Q1x=\nP:musl\nV:1.2-r1\nA:x86_64\nL:MIT\no:musl\nF:lib\nR:P:x\n\nP:zlib\nV:1\no:z\n\nV:1\n";
        let found = apk(installed, "installed");
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].license.as_deref(), found[0].source.as_deref()), (Some("MIT"), None));
        assert_eq!(found[1].source.as_deref(), Some("z"));

        let metadata =
            "Metadata-Version: 2.1\nName: Foo\nVersion: 1.0\nLicense: UNKNOWN\n\nName: not this\n";
        let found = python(metadata, "METADATA").unwrap();
        assert_eq!((&*found.name, found.license), ("Foo", None));
        assert!(python("Name: x\n", "METADATA").is_none());

        let found = npm(r#"{"name":"@a/b","version":"1","license":{"type":"ISC"}}"#, "p").unwrap();
        assert_eq!(found.license.as_deref(), Some("ISC"));
        assert!(npm("{", "p").is_none() && npm("[]", "p").is_none());

        for (path, is) in [
            ("usr/lib/node_modules/npm", true),
            ("node_modules/x", true),
            ("app/node_modules/@a/b", true),
            ("app/node_modules/@a", false),
            ("app/node_modules/.bin", false),
            ("app/node_modules/x/lib", false),
            ("app", false),
        ] {
            assert_eq!(is_npm_package(path), is, "{path}");
        }
        let values = os_release("# x\nID=debian\nVERSION_ID=\"12\"\nEMPTY=\n");
        assert_eq!((&*values["ID"], &*values["VERSION_ID"]), ("debian", "12"));
    }
}
