//! The emulated machine: its file servers and its emulator, and how they are started.

use std::ffi::OsString;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::image::{CMDLINE, Image};
use super::record::StateDir;
use super::{LabConfig, LabError};
use crate::tools::{self, Tool};

/// The server's port inside the machine.
pub(super) const GUEST_PORT: u16 = 1024;

/// How long a file server may take to open its socket.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);

/// A processor with SVM, of a kind that real hosts have. Features that the emulator lacks are left
/// out by it, with a warning in its log.
///
/// Without XSAVE: the emulator lets a nested guest set XCR0 without its monitor's knowledge, so a
/// guest that sees XSAVE finds sizes that contradict each other, warns at length, and loses what
/// it set at the next exit. Without it guests use FXSAVE, which works.
///
/// Without CMPXCHG16B: the emulator (7.2) computes its flags from whatever operation it last wrote
/// down, so that now and then an address ends up in them, and the next interrupt's return faults
/// (seen in the slab allocator of a 6.12 kernel). Without it kernels use something else.
const CPU: &str = "EPYC,+svm,-xsave,-cx16";

/// The two programs called virtiofsd: the one in C that came with QEMU up to 7.2, and its
/// successor in Rust. They do the same and take different options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileServer {
    C,
    Rust,
}

/// What is shared, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Share {
    /// The machine's `/`: read by the lab only. A second's delay in seeing a change is fine.
    Root,
    /// The store, written from both sides.
    Store,
}

impl FileServer {
    fn of(program: &Path) -> Self {
        // Only the older one explains `-o`.
        let help = Command::new(program).arg("--help").stdin(Stdio::null()).output();
        let text = help.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        if text.contains("-o source=") { Self::C } else { Self::Rust }
    }

    /// Both serve from inside a plain chroot: a namespace of its own cannot be rooted at `/`.
    fn arguments(self, share: Share, folder: &Path, socket: &Path) -> Vec<OsString> {
        let join = |prefix: &str, path: &Path| {
            let mut text = OsString::from(prefix);
            text.push(path);
            text
        };
        let mut arguments = vec![join("--socket-path=", socket)];
        let mut option = |text: OsString| arguments.push(text);
        match self {
            Self::C => {
                option("-o".into());
                option(join("source=", &escape(folder)));
                option("-o".into());
                option(
                    match share {
                        Share::Root => "sandbox=chroot,cache=auto,no_flock",
                        // Contents stay cached over a close: the store's objects never change, and
                        // memory images are mapped again and again. Names and attributes are asked
                        // for each time, so that what the machine renames into place is seen at
                        // once and contents whose time or size changed are dropped. Locks reach
                        // across: both sides collect garbage.
                        Share::Store => "sandbox=chroot,cache=always,timeout=0,flock",
                    }
                    .into(),
                );
                // Requests are answered by the thread that receives them: least delay.
                option("--thread-pool-size=0".into());
            }
            Self::Rust => {
                option(join("--shared-dir=", folder));
                option("--sandbox=chroot".into());
                // It has no timeout to set: a change may take a second to be seen.
                option("--cache=auto".into());
            }
        }
        arguments
    }
}

/// Commas separate options there, and backslashes keep them from doing so.
fn escape(path: &Path) -> PathBuf {
    let mut escaped = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        if matches!(byte, b',' | b'\\') {
            escaped.push(b'\\');
        }
        escaped.push(*byte);
    }
    PathBuf::from(OsString::from_vec(escaped))
}

/// Finds a program or says how to install it.
fn need(tool: &'static Tool) -> Result<PathBuf, LabError> {
    tool.find().ok_or(LabError::MissingTool { name: tool.name, install: tool.install })
}

/// The lab's running children, watched until it is up.
pub(super) struct Machine {
    pub emulator: Child,
    servers: Vec<Child>,
}

/// Starts `command` apart from the terminal, so that Ctrl-C there does not reach the lab.
fn spawn(command: &mut Command, log: &File) -> Result<Child, LabError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let error = |source| LabError::Spawn { program, source };
    let (out, err) = match (log.try_clone(), log.try_clone()) {
        (Ok(out), Ok(err)) => (out, err),
        (Err(source), _) | (_, Err(source)) => return Err(error(source)),
    };
    command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0).current_dir("/");
    command.spawn().map_err(error)
}

/// A TCP port that is free right now.
pub(super) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The emulator's arguments.
fn emulator_arguments(
    state: &StateDir,
    image: &Image,
    config: &LabConfig,
    port: u16,
) -> Vec<OsString> {
    let memory = format!("{}M", config.memory_mib);
    let path = |prefix: &str, name: &str| {
        let mut text = OsString::from(prefix);
        text.push(state.file(name));
        text
    };
    let mut arguments: Vec<OsString> = Vec::new();
    let mut pair = |name: &str, value: OsString| {
        arguments.push(name.into());
        arguments.push(value);
    };
    pair("-name", "parbake-lab".into());
    pair("-machine", "q35,usb=off,vmport=off".into());
    pair("-accel", "tcg,thread=multi,tb-size=512".into());
    pair("-cpu", CPU.into());
    pair("-smp", config.vcpus.to_string().into());
    pair("-m", memory.clone().into());
    // The file servers read and write the machine's memory directly.
    pair("-object", format!("memory-backend-memfd,id=memory,size={memory},share=on").into());
    pair("-numa", "node,memdev=memory".into());
    pair("-kernel", image.kernel.clone().into());
    pair("-initrd", state.file("initrd").into());
    pair("-append", CMDLINE.into());
    pair("-serial", path("file:", "serial.log"));
    for (tag, socket) in [("root", "root.sock"), ("store", "store.sock")] {
        pair("-chardev", path(&format!("socket,id={tag},path="), socket));
        pair(
            "-device",
            format!("vhost-user-fs-pci,chardev={tag},tag={tag},queue-size=1024").into(),
        );
    }
    pair("-netdev", format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:{GUEST_PORT}").into());
    pair("-device", "virtio-net-pci,netdev=net,romfile=".into());
    pair("-device", "virtio-rng-pci".into());
    pair("-display", "none".into());
    pair(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".into(),
    );
    arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(OsString::from));
    arguments
}

impl Machine {
    /// Checks that every program needed is installed.
    pub fn check_tools() -> Result<(), LabError> {
        need(&tools::QEMU)?;
        need(&tools::VIRTIOFSD)?;
        Ok(())
    }

    /// Starts the file servers, then the emulator.
    pub fn start(
        state: &StateDir,
        image: &Image,
        config: &LabConfig,
        port: u16,
    ) -> Result<Self, LabError> {
        let (qemu, virtiofsd) = (need(&tools::QEMU)?, need(&tools::VIRTIOFSD)?);
        let kind = FileServer::of(&virtiofsd);
        let shares = [
            (Share::Root, "root", Path::new("/")),
            (Share::Store, "store", config.store.as_path()),
        ];
        let mut servers = Vec::new();
        for (share, name, folder) in shares {
            let log = state.log(&format!("{name}.log"))?;
            let socket = state.file(&format!("{name}.sock"));
            let mut command = Command::new(&virtiofsd);
            command.args(kind.arguments(share, folder, &socket));
            servers.push((spawn(&mut command, &log)?, socket, name));
        }
        let deadline = Instant::now() + SOCKET_TIMEOUT;
        for (server, socket, name) in &mut servers {
            while !socket.exists() {
                let ended = server.try_wait().ok().flatten().is_some();
                if ended || Instant::now() > deadline {
                    let log = state.file(&format!("{name}.log"));
                    return Err(LabError::died("virtiofsd", &log));
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        let log = state.log("qemu.log")?;
        state.log("serial.log")?;
        let mut command = Command::new(qemu);
        command.args(emulator_arguments(state, image, config, port));
        let emulator = spawn(&mut command, &log)?;
        let servers = servers.into_iter().map(|(server, ..)| server).collect();
        Ok(Self { emulator, servers })
    }

    /// Lets the lab outlive this process, without zombies while this process lives.
    pub fn detach(self) {
        for mut child in self.servers.into_iter().chain([self.emulator]) {
            std::thread::spawn(move || child.wait());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_file_servers_get_the_path_as_one_argument() {
        let (folder, socket) = (Path::new("/a store, with=all"), Path::new("/s/store.sock"));
        let text = |kind: FileServer| {
            let arguments = kind.arguments(Share::Store, folder, socket);
            let words = arguments.iter().map(|word| word.to_str().unwrap().to_owned());
            words.collect::<Vec<_>>()
        };
        let rust = text(FileServer::Rust);
        assert_eq!(rust[..2], ["--socket-path=/s/store.sock", "--shared-dir=/a store, with=all"]);
        assert!(text(FileServer::C).contains(&"source=/a store\\, with=all".to_owned()));
    }
}
