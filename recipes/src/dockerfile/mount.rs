//! `RUN --mount=…` → [`Mount`].

use crate::RecipeError;
use crate::error::{Location, nearest};
use crate::glob::clean;
use crate::plan::{CopyFrom, Mount, MountSource, Sharing};

use super::flags::{bytes, mount_fields};

const KEYS: [&str; 17] = [
    "type",
    "from",
    "source",
    "src",
    "target",
    "dst",
    "destination",
    "readonly",
    "ro",
    "readwrite",
    "rw",
    "id",
    "sharing",
    "required",
    "mode",
    "uid",
    "gid",
];

/// What a mount needs to know of its stage.
pub struct MountScope<'a> {
    /// Line of the `RUN`.
    pub at: &'a Location,
    /// `WORKDIR` there.
    pub working_dir: &'a str,
    /// Expands a value.
    pub expand: &'a mut dyn FnMut(&str) -> Result<String, RecipeError>,
    /// Finds what `from=` names.
    pub from: &'a mut dyn FnMut(&str) -> Result<CopyFrom, RecipeError>,
}

/// The `from=` of a mount before anything is expanded, for the graph of stages.
pub fn mount_from(at: &Location, text: &str) -> Result<Option<String>, RecipeError> {
    let mut from = None;
    let mut uses_from = true;
    for (name, value) in mount_fields(at, text)? {
        match (name.as_str(), value) {
            ("from", Some(value)) if value.contains('$') => {
                return Err(at.error(
                    format!("--mount from={value} holds a variable"),
                    "give the image a stage name with FROM … AS name and use that name",
                ));
            }
            ("from", Some(value)) => from = Some(value),
            ("type", Some(value)) => {
                // A variable may stand for either.
                let kind = value.to_lowercase();
                uses_from = kind.contains('$') || kind == "bind" || kind == "cache";
            }
            _ => {}
        }
    }
    Ok(from.filter(|from| uses_from && !from.is_empty()))
}

#[derive(Default)]
struct Fields {
    kind: String,
    from: String,
    source: String,
    target: String,
    id: String,
    env: Option<String>,
    sharing: Option<Sharing>,
    required: bool,
    read_only: Option<bool>,
    mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    size: Option<u64>,
}

/// Reads one mount. `ssh_number` counts SSH mounts of the step for their default target.
pub fn mount(
    text: &str,
    scope: &mut MountScope<'_>,
    ssh_number: usize,
) -> Result<Mount, RecipeError> {
    let at = scope.at;
    let fields = fields(text, scope)?;
    let bad = |message: &str, hint: &str| at.error(format!("--mount={text}: {message}"), hint);
    let file_like = matches!(fields.kind.as_str(), "secret" | "ssh" | "cache");
    if !file_like && (fields.mode.is_some() || fields.uid.is_some() || fields.gid.is_some()) {
        return Err(bad(
            &format!("mode, uid and gid do not apply to a {} mount", fields.kind),
            "remove them",
        ));
    }
    if fields.sharing.is_some() && fields.kind != "cache" {
        return Err(bad("sharing applies to cache mounts only", "remove it or use type=cache"));
    }
    if fields.env.is_some() && fields.kind != "secret" {
        return Err(bad("env applies to secret mounts only", "remove it or use type=secret"));
    }
    let mut target = fields.target.clone();
    let mut read_only = fields.read_only;
    let uid = fields.uid.unwrap_or(0);
    let gid = fields.gid.unwrap_or(0);
    let source = match fields.kind.as_str() {
        "bind" => {
            read_only = read_only.or(Some(true));
            let from = match fields.from.as_str() {
                "" => CopyFrom::Context,
                from => (scope.from)(from)?,
            };
            MountSource::Bind { from, path: clean(&format!("/{}", fields.source)) }
        }
        "cache" => {
            let from = match fields.from.as_str() {
                "" => None,
                from => Some((scope.from)(from)?),
            };
            let id = if fields.id.is_empty() { clean(&target) } else { fields.id.clone() };
            MountSource::Cache {
                id,
                sharing: fields.sharing.unwrap_or(Sharing::Shared),
                from,
                path: clean(&format!("/{}", fields.source)),
                mode: fields.mode.unwrap_or(0o755),
                uid,
                gid,
            }
        }
        "tmpfs" => MountSource::Tmpfs { size: fields.size },
        "secret" => {
            if !fields.from.is_empty() {
                return Err(bad("a secret has no from", "remove it"));
            }
            if !fields.source.is_empty() && !fields.id.is_empty() {
                return Err(bad("source and id say the same", "keep id"));
            }
            let mut id = if fields.id.is_empty() { fields.source } else { fields.id };
            if id.is_empty() {
                id = target.rsplit('/').next().unwrap_or_default().to_owned();
            }
            if id.is_empty() {
                return Err(bad("the secret is not named", "write id=NAME"));
            }
            if target.is_empty() && fields.env.is_none() {
                target = format!("/run/secrets/{}", id.rsplit('/').next().unwrap_or(&id));
            }
            read_only = read_only.or(Some(true));
            MountSource::Secret {
                id,
                env: fields.env,
                required: fields.required,
                mode: fields.mode.unwrap_or(0o400),
                uid,
                gid,
            }
        }
        _ => {
            if target.is_empty() {
                target = format!("/run/buildkit/ssh_agent.{ssh_number}");
            }
            let id = if fields.id.is_empty() { fields.source } else { fields.id };
            MountSource::Ssh {
                id: if id.is_empty() { "default".to_owned() } else { id },
                required: fields.required,
                mode: fields.mode.unwrap_or(0o600),
                uid,
                gid,
            }
        }
    };
    let is_env_secret = matches!(source, MountSource::Secret { .. }) && target.is_empty();
    if target.is_empty() && !is_env_secret {
        return Err(bad("there is no target", "write target=/path"));
    }
    if !is_env_secret {
        target = clean(&if target.starts_with('/') {
            target
        } else {
            format!("{}/{target}", scope.working_dir)
        });
        if target == "/" {
            return Err(bad("the target is the root directory", "name a directory below /"));
        }
    }
    Ok(Mount { target, source, read_only: read_only.unwrap_or(false) })
}

fn fields(text: &str, scope: &mut MountScope<'_>) -> Result<Fields, RecipeError> {
    let at = scope.at;
    let bad = |message: String, hint: &str| at.error(format!("--mount={text}: {message}"), hint);
    let raw = mount_fields(at, text)?;
    let mut fields = Fields { kind: "bind".to_owned(), ..Fields::default() };
    for (name, value) in &raw {
        if let ("type", Some(value)) = (name.as_str(), value) {
            let kind = (scope.expand)(value)?.to_lowercase();
            if !["bind", "cache", "tmpfs", "secret", "ssh"].contains(&kind.as_str()) {
                return Err(bad(
                    format!("unsupported mount type {kind:?}"),
                    "the types are bind, cache, tmpfs, secret and ssh",
                ));
            }
            fields.kind = kind;
        }
    }
    for (name, value) in raw {
        let value = match value {
            Some(value) => Some((scope.expand)(&value)?),
            None => None,
        };
        let flag = |value: &Option<String>| match value.as_deref().map(str::to_lowercase).as_deref()
        {
            None | Some("true" | "1" | "t") => Ok(true),
            Some("false" | "0" | "f") => Ok(false),
            Some(other) => Err(bad(format!("{name} is {other:?}"), "write true or false")),
        };
        let number = |value: &str, radix| {
            u32::from_str_radix(value, radix)
                .map_err(|_| bad(format!("{name} is {value:?}"), "write a number (mode is octal)"))
        };
        match (name.as_str(), &value) {
            ("readonly" | "ro", value) => fields.read_only = Some(flag(value)?),
            ("readwrite" | "rw", value) => fields.read_only = Some(!flag(value)?),
            ("required", value) if fields.kind == "secret" || fields.kind == "ssh" => {
                fields.required = flag(value)?;
            }
            ("required", _) => {
                return Err(bad(
                    format!("required does not apply to a {} mount", fields.kind),
                    "remove it",
                ));
            }
            (_, None) => {
                return Err(bad(format!("field {name:?} has no value"), "write name=value"));
            }
            ("type", Some(_)) => {}
            ("from", Some(value)) => fields.from.clone_from(value),
            ("source" | "src", Some(value)) => fields.source.clone_from(value),
            ("target" | "dst" | "destination", Some(value)) => fields.target.clone_from(value),
            ("id", Some(value)) => fields.id.clone_from(value),
            ("env", Some(value)) => fields.env = Some(value.clone()).filter(|v| !v.is_empty()),
            ("sharing", Some(value)) => {
                fields.sharing = Some(match value.to_lowercase().as_str() {
                    "shared" => Sharing::Shared,
                    "private" => Sharing::Private,
                    "locked" => Sharing::Locked,
                    _ => {
                        return Err(bad(
                            format!("unsupported sharing {value:?}"),
                            "write shared, private or locked",
                        ));
                    }
                });
            }
            ("mode", Some(value)) => fields.mode = Some(number(value, 8)? & 0o7777),
            ("uid", Some(value)) => fields.uid = Some(number(value, 10)?),
            ("gid", Some(value)) => fields.gid = Some(number(value, 10)?),
            ("size", Some(value)) if fields.kind == "tmpfs" => {
                fields.size = Some(bytes(value).ok_or_else(|| {
                    bad(format!("size is {value:?}"), "write bytes or a unit, as in 64m")
                })?);
            }
            (name, _) => {
                let hint = match nearest(name, KEYS) {
                    Some(known) => format!("did you mean {known}?"),
                    None => format!("the fields are {}, env, size", KEYS.join(", ")),
                };
                return Err(bad(format!("unexpected field {name:?}"), &hint));
            }
        }
    }
    Ok(fields)
}
