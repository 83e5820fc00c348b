//! The second half: becomes the step's program, in its root and as its user.

use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

use parbake_protocol::agent::{Frame, StepMount, StepRequest};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::mount::OpenTreeFlags;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::{PLACE, only_frame, os, root, source, trouble};
use crate::environment::{DEFAULT_PATH, Environment, candidates};
use crate::{kernel, users};

/// The step's host name.
const HOSTNAME: &str = "parbake-build";

/// What a step may do as root: Docker's default.
const CAPABILITIES: CapabilitySet = CapabilitySet::AUDIT_WRITE
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SYS_CHROOT);

/// The highest number a capability of any kernel has.
const MOST_CAPABILITIES: u32 = 63;

/// Becomes the program that standard input describes, as process 1 of its namespace.
pub fn run() -> ExitCode {
    let Ok(mut trouble) = trouble() else { return ExitCode::from(125) };
    let error = match prepare() {
        Ok(request) => return become_program(&request, &mut trouble),
        Err(error) => error,
    };
    let _ = write!(trouble, "{error}");
    ExitCode::from(125)
}

/// Everything but the program itself.
fn prepare() -> io::Result<StepRequest> {
    let request = match only_frame(io::stdin())? {
        Some(Frame::Step(request)) => *request,
        _ => return Err(io::Error::other("no step came")),
    };
    rustix::system::sethostname(HOSTNAME.as_bytes())?;
    kernel::unshare(libc::CLONE_NEWNS)?;
    root::stay_private()?;
    let trees = request
        .mounts
        .iter()
        .enumerate()
        .map(|(number, mount)| detached(number, mount))
        .collect::<io::Result<Vec<_>>>()?;
    root::change(&Path::new(PLACE).join("root"))?;
    root::system()?;
    for (mount, tree) in request.mounts.iter().zip(&trees) {
        root::attach(mount, tree.as_ref())?;
    }
    root::hide()?;
    let cwd = Path::new(os(&request.cwd));
    let named = |e: io::Error| {
        io::Error::new(e.kind(), format!("cannot enter the directory {}: {e}", cwd.display()))
    };
    fs::create_dir_all(cwd).map_err(named)?;
    std::env::set_current_dir(cwd).map_err(named)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    become_user(&request)?;
    Ok(request)
}

/// A mount's files as a mount that is nowhere yet: the root it will be attached to hides them.
fn detached(number: usize, mount: &StepMount) -> io::Result<Option<OwnedFd>> {
    if let StepMount::Memory { .. } = mount {
        return Ok(None);
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let source = source(number, mount);
    let tree = rustix::mount::open_tree(rustix::fs::CWD, &source, flags)
        .map_err(|e| io::Error::other(format!("cannot take {} along: {e}", source.display())))?;
    Ok(Some(tree))
}

/// Gives up what a step may not do, then becomes its user. This thread is the only one.
fn become_user(request: &StepRequest) -> io::Result<()> {
    use rustix::thread::{
        clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
        set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    };
    for number in 0..=MOST_CAPABILITIES {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if !CAPABILITIES.contains(capability) {
            match remove_capability_from_bounding_set(capability) {
                // Not a capability of this kernel.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    clear_ambient_capability_set()?;
    let groups: Vec<Gid> = request.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    set_thread_groups(&groups)?;
    let (uid, gid) = (Uid::from_raw(request.uid), Gid::from_raw(request.gid));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    let held = if uid.is_root() { CAPABILITIES } else { CapabilitySet::empty() };
    let none = CapabilitySet::empty();
    Ok(set_capabilities(
        None,
        CapabilitySets { effective: held, permitted: held, inheritable: none },
    )?)
}

/// Returns only where there is no such program, with the code that shells give that.
fn become_program(request: &StepRequest, trouble: &mut fs::File) -> ExitCode {
    let mut env = Environment::default();
    env.merge(&request.env);
    // As container runtimes do.
    env.set_default(b"HOME", &home(request.uid));
    let path = env.get(b"PATH").unwrap_or(DEFAULT_PATH);
    let Some(name) = request.argv.first() else {
        let _ = trouble.write_all(b"the step names no program");
        return ExitCode::from(125);
    };
    let strings = |list: &[Vec<u8>]| -> Result<Vec<CString>, std::ffi::NulError> {
        list.iter().map(|text| CString::new(text.as_slice())).collect()
    };
    let paths = candidates(name, path);
    let (Ok(argv), Ok(entries), Ok(paths)) =
        (strings(&request.argv), strings(env.entries()), strings(&paths))
    else {
        let _ = trouble.write_all(b"an argument or a variable contains a NUL byte");
        return ExitCode::from(125);
    };
    let mut reason = io::Error::from(io::ErrorKind::NotFound);
    for path in &paths {
        let error = kernel::execute(path, &argv, &entries);
        if error.kind() != io::ErrorKind::NotFound {
            reason = error;
        }
    }
    let _ = writeln!(io::stderr(), "exec: {}: {reason}", String::from_utf8_lossy(name));
    ExitCode::from(if reason.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

fn home(uid: u32) -> Vec<u8> {
    if !Path::new("/etc/passwd").exists() {
        return b"/".to_vec();
    }
    users::resolve(&uid.to_string(), "/".as_ref()).map_or_else(|_| b"/".to_vec(), |user| user.home)
}
