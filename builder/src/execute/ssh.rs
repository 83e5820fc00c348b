//! SSH agents of this machine, offered to steps.
//!
//! Steps never get the agent's own socket: an agent serves only its user, and the socket of the step
//! is the mount's, with the mount's owner and bits. Whoever connects to that one is connected to the
//! agent by this program. Where the step runs on this machine's kernel, the socket is made here
//! ([`Door`]); in a machine of its own it is made there, and what is said comes along with the step
//! ([`Connections`]). Both end with the step.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Scope};

use parbake_protocol::agent::{DATA_CHUNK, MOST_CONNECTIONS, SocketEvent, SocketFrame};
use rustix::fs::{Mode, OFlags};

use super::rootpath::chown;

/// Portions for the agent that may wait; nobody who talks to one sends that much before an answer.
const MOST_WAITING: usize = 16;

/// The other ends of connections, to end them from another thread.
#[derive(Debug, Default)]
struct Open {
    streams: Vec<(u64, [UnixStream; 2])>,
    next: u64,
    /// No more are wanted.
    over: bool,
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket on this machine that leads to an agent. Gone, with all connections, when dropped.
#[derive(Debug)]
pub(super) struct Door {
    path: PathBuf,
    listener: UnixListener,
    open: Arc<Mutex<Open>>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Listens in `directory` for the agent at `agent`.
    pub fn open(
        directory: &Path,
        name: &str,
        agent: &Path,
        mode: u32,
        owner: (u32, u32),
    ) -> io::Result<Self> {
        // A socket's address is short, and a build directory's path need not be.
        let place = found(directory)?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd())).join(name);
        let listener = UnixListener::bind(short)?;
        let path = directory.join(name);
        chown(&path, owner.0, owner.1)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        let open = Arc::new(Mutex::new(Open::default()));
        let (served, accepts, agent) = (Arc::clone(&open), listener.try_clone()?, agent.to_owned());
        let thread = std::thread::Builder::new()
            .name("ssh-agent".to_owned())
            .spawn(move || serve(&accepts, &agent, &served))?;
        Ok(Self { path, listener, open, thread: Some(thread) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        {
            let mut open = lock(&self.open);
            open.over = true;
            for stream in open.streams.iter().flat_map(|(_, both)| both) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        // Wakes who waits for the next one.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.path);
    }
}

/// Connects whoever comes, until the listener is shut.
fn serve(listener: &UnixListener, agent: &Path, open: &Arc<Mutex<Open>>) {
    std::thread::scope(|scope| {
        while let Ok((client, _)) = listener.accept() {
            if lock(open).over {
                break;
            }
            scope.spawn(move || {
                let _ = connect(&client, agent, open);
            });
        }
    });
}

/// Connects one client to the agent until either ends.
fn connect(client: &UnixStream, agent: &Path, open: &Mutex<Open>) -> io::Result<()> {
    let agent = connect_agent(agent)?;
    let number = {
        let mut open = lock(open);
        if open.over || open.streams.len() >= MOST_CONNECTIONS {
            return Ok(());
        }
        open.next += 1;
        let number = open.next;
        open.streams.push((number, [client.try_clone()?, agent.try_clone()?]));
        number
    };
    let pass = |mut from: &UnixStream, mut to: &UnixStream| {
        let _ = io::copy(&mut from, &mut to);
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| pass(&agent, client));
        pass(client, &agent);
    });
    lock(open).streams.retain(|(known, _)| *known != number);
    Ok(())
}

/// Connects to an agent, however long its path is.
pub(super) fn connect_agent(path: &Path) -> io::Result<UnixStream> {
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            // A name through which the kernel finds it is always short enough.
            let place = found(path)?;
            UnixStream::connect(format!("/proc/self/fd/{}", place.as_raw_fd()))
        }
        result => result,
    }
}

fn found(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Connections that come from a machine.
pub(super) struct Connections<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    /// Agents by the number of their mount.
    agents: HashMap<u32, PathBuf>,
    /// Tells the machine; may wait.
    tell: Arc<dyn Fn(SocketFrame) -> io::Result<()> + Send + Sync + 'scope>,
    open: HashMap<u32, Connection>,
}

/// Towards an agent.
struct Connection {
    bytes: SyncSender<Vec<u8>>,
    stream: Arc<Mutex<Reach>>,
}

/// How far a connection to an agent has come.
enum Reach {
    Coming,
    There(UnixStream),
    Gone,
}

impl Reach {
    fn end(reach: &Mutex<Self>) {
        let mut reach = reach.lock().unwrap_or_else(PoisonError::into_inner);
        if let Self::There(stream) = &*reach {
            let _ = stream.shutdown(Shutdown::Both);
        }
        *reach = Self::Gone;
    }
}

impl<'scope, 'env> Connections<'scope, 'env> {
    /// None yet, to these agents.
    pub fn new(
        scope: &'scope Scope<'scope, 'env>,
        agents: HashMap<u32, PathBuf>,
        tell: Arc<dyn Fn(SocketFrame) -> io::Result<()> + Send + Sync + 'scope>,
    ) -> Self {
        Self { scope, agents, tell, open: HashMap::new() }
    }

    /// What the machine says of a connection. Never waits.
    ///
    /// # Errors
    /// What of it makes no sense.
    pub fn take(&mut self, frame: SocketFrame) -> Result<(), &'static str> {
        let SocketFrame { connection, event } = frame;
        match event {
            SocketEvent::Opened { mount } => {
                let agent =
                    self.agents.get(&mount).ok_or("a connection to what it was not given")?;
                if self.open.len() >= MOST_CONNECTIONS || self.open.contains_key(&connection) {
                    return Err("more connections than it may have");
                }
                let (sender, receiver) = sync_channel(MOST_WAITING);
                let stream = Arc::new(Mutex::new(Reach::Coming));
                let opened = Connection { bytes: sender, stream: Arc::clone(&stream) };
                self.open.insert(connection, opened);
                let (agent, tell) = (agent.clone(), Arc::clone(&self.tell));
                self.scope.spawn(move || {
                    let tell = |event| tell(SocketFrame { connection, event });
                    if talk(&agent, &stream, receiver, &tell).is_err() {
                        let _ = tell(SocketEvent::End);
                    }
                });
            }
            SocketEvent::Data(bytes) if bytes.len() > DATA_CHUNK => {
                return Err("more at once than it may");
            }
            SocketEvent::Data(bytes) => {
                if let Some(known) = self.open.get(&connection)
                    && known.bytes.try_send(bytes).is_err()
                {
                    Reach::end(&known.stream);
                }
            }
            SocketEvent::End => {
                if let Some(known) = self.open.remove(&connection) {
                    Reach::end(&known.stream);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Connections<'_, '_> {
    fn drop(&mut self) {
        for connection in self.open.values() {
            Reach::end(&connection.stream);
        }
    }
}

/// One connection, from its begin to its end.
fn talk(
    agent: &Path,
    reach: &Mutex<Reach>,
    bytes: Receiver<Vec<u8>>,
    tell: &(dyn Fn(SocketEvent) -> io::Result<()> + Sync),
) -> io::Result<()> {
    let stream = connect_agent(agent)?;
    {
        let mut reach = reach.lock().unwrap_or_else(PoisonError::into_inner);
        if let Reach::Gone = *reach {
            return Ok(());
        }
        *reach = Reach::There(stream.try_clone()?);
    }
    let (mut reader, mut writer) = (stream.try_clone()?, stream);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Ends when the step lets go of it, and with the agent's end of the stream.
            while let Ok(portion) = bytes.recv() {
                if writer.write_all(&portion).is_err() {
                    break;
                }
            }
            let _ = writer.shutdown(Shutdown::Both);
        });
        let mut buffer = vec![0; DATA_CHUNK];
        loop {
            match reader.read(&mut buffer) {
                Ok(length @ 1..) => {
                    if tell(SocketEvent::Data(buffer[..length].to_vec())).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        // The machine answers with its own end, which is what the other thread waits for.
        tell(SocketEvent::End)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Says back what it is told.
    fn echo(path: &Path) {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let _ = io::copy(&mut &client, &mut &client);
                });
            }
        });
    }

    #[test]
    fn a_door_leads_to_the_agent_and_is_gone_afterwards() {
        let place = tempfile::tempdir().unwrap();
        let agent = place.path().join("agent");
        echo(&agent);
        // Longer than a socket's address may be.
        let directory = place.path().join("d".repeat(200));
        fs::create_dir(&directory).unwrap();
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let door = Door::open(&directory, "door", &agent, 0o640, owner).unwrap();
        let mode = fs::metadata(door.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let talk = |text: &[u8]| {
            let mut client = connect_agent(door.path()).unwrap();
            client.write_all(text).unwrap();
            let mut answer = vec![0; text.len()];
            client.read_exact(&mut answer).unwrap();
            assert_eq!(answer, text);
            client
        };
        let mut open: Vec<UnixStream> = (0..MOST_CONNECTIONS).map(|_| talk(b"hello")).collect();
        let mut refused = connect_agent(door.path()).unwrap();
        assert_eq!(refused.read(&mut [0]).unwrap(), 0, "one too many");
        open.truncate(1);
        let path = door.path().to_owned();
        drop(door);
        assert_eq!(open[0].read(&mut [0]).unwrap(), 0, "connections end with it");
        assert!(!path.exists());
    }

    #[test]
    fn what_a_machine_says_of_connections_is_bounded() {
        let place = tempfile::tempdir().unwrap();
        let agent = place.path().join("agent");
        echo(&agent);
        let heard: Mutex<Vec<SocketFrame>> = Mutex::default();
        let wait = |what: SocketFrame| {
            let limit = Instant::now() + Duration::from_secs(20);
            while !heard.lock().unwrap().contains(&what) {
                assert!(Instant::now() < limit, "{:?}", heard.lock().unwrap());
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        std::thread::scope(|scope| {
            let tell = |frame| {
                heard.lock().unwrap().push(frame);
                Ok(())
            };
            let agents = HashMap::from([(2, agent.clone()), (3, place.path().join("nobody"))]);
            let mut all = Connections::new(scope, agents, Arc::new(tell));
            let frame = |connection, event| SocketFrame { connection, event };
            let opened = |connection, mount| frame(connection, SocketEvent::Opened { mount });
            assert!(all.take(opened(0, 1)).is_err(), "no socket of its");
            all.take(opened(7, 2)).unwrap();
            assert!(all.take(opened(7, 2)).is_err(), "twice");
            all.take(frame(7, SocketEvent::Data(b"ping".to_vec()))).unwrap();
            wait(frame(7, SocketEvent::Data(b"ping".to_vec())));
            assert!(all.take(frame(7, SocketEvent::Data(vec![0; DATA_CHUNK + 1]))).is_err());
            // Nobody listens: it ends.
            all.take(opened(8, 3)).unwrap();
            wait(frame(8, SocketEvent::End));
            // What is said of none that is open is passed over.
            all.take(frame(99, SocketEvent::Data(b"x".to_vec()))).unwrap();
            all.take(frame(99, SocketEvent::End)).unwrap();
            for connection in 10..10 + MOST_CONNECTIONS - 2 {
                all.take(opened(u32::try_from(connection).unwrap(), 2)).unwrap();
            }
            assert!(all.take(opened(1000, 2)).is_err(), "too many");
            all.take(frame(7, SocketEvent::End)).unwrap();
            wait(frame(7, SocketEvent::End));
            all.take(opened(1000, 2)).unwrap();
        });
    }
}
