//! Where an image comes from, as a user writes it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A source of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// A directory in the OCI image layout: `oci:PATH[:REF]`.
    OciLayout {
        /// The directory.
        path: PathBuf,
        /// Which of its images: a name in the index, or `@` and a digest.
        reference: Option<String>,
    },
    /// The same as a tar file: `oci-archive:PATH[:REF]`.
    OciArchive {
        /// The tar file.
        path: PathBuf,
        /// Which of its images.
        reference: Option<String>,
    },
    /// What `docker save` writes: `docker-archive:PATH[:IMAGE:TAG]`, or `:@N` for the Nth.
    DockerArchive {
        /// The tar file.
        path: PathBuf,
        /// Which of its images.
        reference: Option<String>,
    },
    /// A registry: `docker://HOST/REPOSITORY[:TAG|@DIGEST]`.
    Registry {
        /// Everything behind `docker://`.
        reference: String,
    },
    /// A root filesystem as one tar file, possibly compressed: `tar:PATH`.
    Tar {
        /// The tar file.
        path: PathBuf,
    },
    /// A root filesystem as a directory: `dir:PATH`.
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// A root filesystem as an ext4 image: `ext4:PATH`.
    Ext4 {
        /// The image.
        path: PathBuf,
    },
    /// A template of the store: `template:NAME`.
    Template {
        /// Its name or digest.
        name: String,
    },
}

/// A string that names no image source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not an image source: {problem} (expected oci:PATH[:REF], oci-archive:PATH[:REF], docker-archive:PATH[:IMAGE:TAG], docker://HOST/REPOSITORY[:TAG], template:NAME, tar:PATH, dir:PATH or ext4:PATH)"
)]
pub struct BadSource {
    text: String,
    problem: &'static str,
}

impl FromStr for ImageSource {
    type Err = BadSource;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = |problem| BadSource { text: text.to_owned(), problem };
        let (scheme, rest) = text.split_once(':').ok_or_else(|| bad("it has no kind"))?;
        if scheme == "docker" {
            let reference = rest.strip_prefix("//").ok_or_else(|| bad("docker: wants //"))?;
            if reference.is_empty() {
                return Err(bad("the reference is empty"));
            }
            return Ok(Self::Registry { reference: reference.to_owned() });
        }
        if scheme == "template" {
            if rest.is_empty() {
                return Err(bad("the template's name is empty"));
            }
            return Ok(Self::Template { name: rest.to_owned() });
        }
        // Paths with a colon cannot be told from a reference; other tools split the same way.
        let (path, reference) = match rest.split_once(':') {
            Some((path, reference))
                if matches!(scheme, "oci" | "oci-archive" | "docker-archive") =>
            {
                (path, (!reference.is_empty()).then(|| reference.to_owned()))
            }
            _ => (rest, None),
        };
        if path.is_empty() {
            return Err(bad("the path is empty"));
        }
        let path = PathBuf::from(path);
        Ok(match scheme {
            "oci" => Self::OciLayout { path, reference },
            "oci-archive" => Self::OciArchive { path, reference },
            "docker-archive" => Self::DockerArchive { path, reference },
            "tar" => Self::Tar { path },
            "dir" => Self::Directory { path },
            "ext4" => Self::Ext4 { path },
            _ => return Err(bad("its kind is unknown")),
        })
    }
}

impl ImageSource {
    /// The source for a template's manifest: as the user wrote it, but of a path only the last
    /// component, so that it says nothing about the machine it was on.
    #[must_use]
    pub fn portable(&self) -> String {
        let base = |path: &PathBuf| {
            path.file_name()
                .map_or_else(|| ".".to_owned(), |name| name.to_string_lossy().into_owned())
        };
        let with = |kind: &str, path, reference: &Option<String>| match reference {
            Some(reference) => format!("{kind}:{}:{reference}", base(path)),
            None => format!("{kind}:{}", base(path)),
        };
        match self {
            Self::OciLayout { path, reference } => with("oci", path, reference),
            Self::OciArchive { path, reference } => with("oci-archive", path, reference),
            Self::DockerArchive { path, reference } => with("docker-archive", path, reference),
            Self::Registry { reference } => format!("docker://{reference}"),
            Self::Tar { path } => with("tar", path, &None),
            Self::Directory { path } => with("dir", path, &None),
            Self::Ext4 { path } => with("ext4", path, &None),
            Self::Template { name } => format!("template:{name}"),
        }
    }
}

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, path, reference) = match self {
            Self::OciLayout { path, reference } => ("oci", path, reference.as_ref()),
            Self::OciArchive { path, reference } => ("oci-archive", path, reference.as_ref()),
            Self::DockerArchive { path, reference } => ("docker-archive", path, reference.as_ref()),
            Self::Registry { reference } => return write!(f, "docker://{reference}"),
            Self::Tar { path } => ("tar", path, None),
            Self::Directory { path } => ("dir", path, None),
            Self::Ext4 { path } => ("ext4", path, None),
            Self::Template { name } => return write!(f, "template:{name}"),
        };
        write!(f, "{kind}:{}", path.display())?;
        match reference {
            Some(reference) => write!(f, ":{reference}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_round_trip() {
        for text in [
            "oci:./layout",
            "oci:/a/b:latest",
            "oci-archive:x.tar:v1",
            "docker-archive:save.tar:library/debian:12",
            "docker-archive:save.tar:@1",
            "docker://localhost:5000/a/b:c",
            "tar:root.tar.gz",
            "dir:/",
            "ext4:root.ext4",
            "template:team/base:1",
        ] {
            assert_eq!(text.parse::<ImageSource>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "debian",
            "docker:debian",
            "docker://",
            "oci:",
            "oci::x",
            "ext4:",
            "template:",
            "ftp:x",
        ] {
            assert!(bad.parse::<ImageSource>().is_err(), "{bad}");
        }
        let source: ImageSource = "oci:/home/me/layout:v1".parse().unwrap();
        assert_eq!(source.portable(), "oci:layout:v1");
    }
}
