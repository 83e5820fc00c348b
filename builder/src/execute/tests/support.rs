//! A build in a directory of its own: context, build directory, result.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::execute::{
    BuiltImage, Event, ExecuteError, ExecuteOptions, Executor, Sandbox, SourceImages, build,
};
use parbake_recipes::dockerfile::LowerOptions;
use parbake_recipes::{LoadRequest, load};

/// Why builds cannot be run here, if so.
pub fn skip_reason() -> Option<String> {
    if let Err(error) = Sandbox::new(None) {
        return Some(error.to_string());
    }
    if !Path::new("/bin/busybox").exists() && !Path::new("/usr/bin/busybox").exists() {
        return Some("there is no busybox (package busybox-static) for a root filesystem".into());
    }
    None
}

/// A small root filesystem as a tar, made once from the machine's static busybox.
pub fn rootfs() -> &'static Path {
    static TAR: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = TAR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        for name in ["bin", "etc", "tmp", "root", "home/app", "usr/lib"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        let busybox =
            ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|p| Path::new(p).exists());
        fs::copy(busybox.unwrap(), root.join("bin/busybox")).unwrap();
        let list = Command::new(root.join("bin/busybox")).arg("--list").output().unwrap();
        for name in String::from_utf8(list.stdout).unwrap().lines().filter(|n| *n != "busybox") {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        fs::write(
            root.join("etc/passwd"),
            "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001:app:/home/app:/bin/sh\n",
        )
        .unwrap();
        fs::write(root.join("etc/group"), "root:x:0:\napp:x:1001:\nstaff:x:50:app\n").unwrap();
        std::os::unix::fs::symlink("usr/lib", root.join("lib")).unwrap();
        let tar = dir.path().join("rootfs.tar");
        let status = Command::new("tar")
            .args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "-C"])
            .arg(&root)
            .arg("-cf")
            .arg(&tar)
            .args(["--mode=u=rwX,go=rX", "."])
            .status()
            .unwrap();
        assert!(status.success());
        (dir, tar)
    });
    path
}

/// A build to be.
pub struct Case {
    dir: tempfile::TempDir,
    pub options: ExecuteOptions,
    pub lower: LowerOptions,
    pub events: Vec<String>,
}

impl Case {
    /// With `rootfs.tar` in its context.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("context")).unwrap();
        fs::copy(rootfs(), dir.path().join("context/rootfs.tar")).unwrap();
        let options = ExecuteOptions {
            directory: dir.path().join("build"),
            context: dir.path().join("context"),
            output: dir.path().join("out"),
            ..ExecuteOptions::default()
        };
        Self { dir, options, lower: LowerOptions::default(), events: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn context(&self, name: &str) -> PathBuf {
        self.options.context.join(name)
    }

    pub fn file(&mut self, name: &str, text: &str) -> &mut Self {
        let path = self.context(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub fn dockerfile(&mut self, text: &str) -> &mut Self {
        // Beside the context, so that `COPY .` does not bring it.
        fs::write(self.path("Dockerfile"), text).unwrap();
        self
    }

    pub fn secret(&mut self, id: &str, value: &str) {
        self.options.secrets.insert(id.to_owned(), value.as_bytes().to_vec());
    }

    pub fn keep_output(&self, name: &str) -> PathBuf {
        let to = self.path(name);
        fs::rename(&self.options.output, &to).unwrap();
        to
    }

    pub fn build(&mut self) -> Result<BuiltImage, ExecuteError> {
        self.build_with(&mut Sandbox::new(None)?)
    }

    pub fn build_with(&mut self, executor: &mut dyn Executor) -> Result<BuiltImage, ExecuteError> {
        let mut images = SourceImages::default();
        let request = LoadRequest {
            context: self.options.context.clone(),
            file: Some(self.path("Dockerfile")),
            options: self.lower.clone(),
        };
        let mut loaded = load(&request, &mut images).unwrap_or_else(|error| panic!("{error}"));
        // The name in messages, as if the file lay in the context.
        for stage in &mut loaded.plan.stages {
            for step in &mut stage.steps {
                step.at.file = "Dockerfile".to_owned();
            }
        }
        let mut events = Vec::new();
        let result = build(&loaded.plan, &self.options, executor, &mut images, &mut |event| {
            events.push(match event {
                Event::StepReason { reason } => format!("reason: {reason}"),
                Event::StepCached => "cached".to_owned(),
                Event::Output { bytes, .. } => String::from_utf8_lossy(bytes).into_owned(),
                Event::Warning { message, .. } => format!("warning: {message}"),
                other => format!("{other:?}"),
            });
        });
        self.events = events;
        result
    }
}

/// What was said during the last build.
pub fn events_text(case: &Case) -> String {
    case.events.join("\n")
}
