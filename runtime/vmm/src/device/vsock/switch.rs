//! The host's side of the socket device: who may connect where, and whose turn it is.
//!
//! Everything here is keyed twice: by a token, which is what the poll set knows and which is never
//! used again, and by the pair of ports, which is what the guest knows. A connection loses its
//! ports when the guest is done with it and its token when the host is, too.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect,
    socket_with,
};

use super::connection::{Connection, Outcome, State, Violation};
use super::packet::{HOST_CID, Header, Ports, TYPE_STREAM, op};
use crate::device::DeviceError;
use crate::device::poll::Poll;
use crate::device::ring::Buffers;

/// The most connections and waiting clients together. Past it clients wait in the listener's
/// backlog and connections of the guest are refused.
pub(super) const MAX_CONNECTIONS: usize = 512;

/// The most refusals waiting for room in the guest's queue; past it packets that deserve one get
/// none. (Waiting for room instead could block both sides for good.)
const MAX_REFUSALS: usize = 1024;

/// The longest first line of a client: `CONNECT 4294967295\n`.
const MAX_LINE: usize = 19;

const LISTENER: u64 = 0;
const EDGES: EventFlags =
    EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP).union(EventFlags::ET);

/// Host ports of connections the host asks for lie in a range of their own.
const PORT_BASE: u32 = 1 << 30;

/// See the module.
pub(super) struct Switch {
    pub(super) poll: Poll,
    socket: PathBuf,
    listener: UnixListener,
    listening: bool,
    /// Accepting failed for want of descriptors, and none was closed since.
    starved: bool,
    /// Clients that have not said yet where they want to go.
    clients: HashMap<u64, UnixStream>,
    connections: HashMap<u64, Connection>,
    by_ports: HashMap<Ports, u64>,
    /// Connections with something for the guest, in turn.
    ready: VecDeque<u64>,
    refusals: VecDeque<Header>,
    next_token: u64,
    next_port: u32,
}

impl Switch {
    /// Listens on `socket`, which must not exist.
    pub(super) fn open(socket: &Path) -> Result<Self, DeviceError> {
        let listening = |error| {
            DeviceError::io(
                format!("listening on {} (is another monitor using it?)", socket.display()),
                error,
            )
        };
        let listener = UnixListener::bind(socket).map_err(listening)?;
        listener.set_nonblocking(true).map_err(listening)?;
        // Two restores of one snapshot, or a restore and its past, must not use the same ports:
        // the guest may still remember the past's.
        let mut random = [0u8; 4];
        getrandom::fill(&mut random).map_err(|error| {
            DeviceError::io("choosing a first port", std::io::Error::other(error.to_string()))
        })?;
        let mut switch = Self {
            poll: Poll::new()?,
            socket: socket.to_owned(),
            listener,
            listening: false,
            starved: false,
            clients: HashMap::new(),
            connections: HashMap::new(),
            by_ports: HashMap::new(),
            ready: VecDeque::new(),
            refusals: VecDeque::new(),
            next_token: LISTENER + 1,
            next_port: u32::from_ne_bytes(random),
        };
        switch.listen()?;
        Ok(switch)
    }

    /// How many connections there are, asked for or established.
    pub(super) fn count(&self) -> usize {
        self.connections.len()
    }

    fn is_full(&self) -> bool {
        self.clients.len() + self.connections.len() >= MAX_CONNECTIONS
    }

    /// Watches the listener while there is room for clients.
    fn listen(&mut self) -> Result<(), DeviceError> {
        // Where nothing is open, nothing will be closed either.
        let starved = self.starved && self.clients.len() + self.connections.len() > 0;
        let wanted = !self.is_full() && !starved;
        if wanted && !self.listening {
            self.poll.watch(&self.listener, LISTENER, EventFlags::IN)?;
        } else if !wanted && self.listening {
            self.poll.forget(&self.listener)?;
        }
        self.listening = wanted;
        Ok(())
    }

    /// Takes in what happened on the host's side.
    pub(super) fn host_event(&mut self) -> Result<(), DeviceError> {
        for (token, flags) in self.poll.events()? {
            let ends = EventFlags::HUP | EventFlags::ERR;
            let hung_up = flags.intersects(ends);
            let readable = hung_up || flags.intersects(EventFlags::IN | EventFlags::RDHUP);
            if token == LISTENER {
                self.accept();
            } else if self.clients.contains_key(&token) {
                self.greet(token);
            } else if let Some(connection) = self.connections.get_mut(&token) {
                connection.note_host(readable, hung_up);
                connection.flush();
                if connection.is_abandoned() {
                    self.forget(token);
                } else {
                    self.settle(token);
                }
            }
        }
        self.listen()
    }

    fn accept(&mut self) {
        while !self.is_full() {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let stream = match accept_with(&self.listener, flags) {
                Ok(stream) => UnixStream::from(stream),
                // Nobody there, or a client that left: the poll set calls again.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => break,
                // No descriptor to be had: do not be called in circles until one is free again.
                Err(_) => {
                    self.starved = true;
                    break;
                }
            };
            let token = self.token();
            if self.poll.watch(&stream, token, EDGES).is_ok() {
                self.clients.insert(token, stream);
                self.greet(token);
            }
        }
    }

    fn token(&mut self) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        token
    }

    /// Reads a client's first line. Nothing behind it: that is for the guest.
    fn greet(&mut self, token: u64) {
        let Some(stream) = self.clients.get(&token) else { return };
        let mut line = [0u8; MAX_LINE];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let seen = match rustix::net::recv(stream, &mut line[..], flags) {
            Ok((seen, _)) => seen,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => 0,
        };
        let Some(end) = line[..seen].iter().position(|byte| *byte == b'\n') else {
            // The end before the line's, or a line that is too long.
            if seen == 0 || seen == MAX_LINE {
                self.clients.remove(&token);
                self.starved = false;
            }
            return;
        };
        let mut taken = [0u8; MAX_LINE];
        let took = rustix::net::recv(stream, &mut taken[..=end], RecvFlags::DONTWAIT);
        let port = std::str::from_utf8(&line[..end])
            .ok()
            .and_then(|line| line.strip_prefix("CONNECT "))
            .and_then(|port| port.parse().ok());
        let Some(stream) = self.clients.remove(&token) else { return };
        let (Some(guest), Ok(_)) = (port, took) else {
            self.starved = false;
            return;
        };
        let ports = Ports { host: self.free_port(guest), guest };
        self.connections.insert(token, Connection::new(stream, ports, State::Asked));
        self.by_ports.insert(ports, token);
        self.settle(token);
    }

    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = PORT_BASE | self.next_port & (PORT_BASE - 1);
            self.next_port = self.next_port.wrapping_add(1);
            // Ends: there are far fewer connections than ports.
            if !self.by_ports.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    /// Queues a connection that has something to say, drops one that is finished.
    fn settle(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if connection.is_finished() {
            self.forget(token);
        } else if connection.has_packet() && !connection.queued {
            connection.queued = true;
            self.ready.push_back(token);
        }
    }

    fn forget(&mut self, token: u64) {
        if let Some(connection) = self.connections.remove(&token) {
            self.starved = false;
            self.release(connection.ports, token);
        }
    }

    /// Frees the ports, if they still belong to `token`.
    fn release(&mut self, ports: Ports, token: u64) {
        if self.by_ports.get(&ports) == Some(&token) {
            self.by_ports.remove(&ports);
        }
    }

    /// The driver is gone, and with it every connection it knew.
    pub(super) fn drop_known(&mut self) {
        let known = |connection: &Connection| connection.state != State::Asked;
        let tokens: Vec<u64> = (self.connections.iter())
            .filter(|(_, connection)| known(connection))
            .map(|(token, _)| *token)
            .collect();
        for token in tokens {
            self.forget(token);
        }
        self.refusals.clear();
    }

    /// A packet from the guest with its payload.
    pub(super) fn packet(&mut self, header: &Header, data: Buffers<'_>) {
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            self.refuse(header);
            return;
        }
        let ports = header.ports_from_guest();
        let Some(&token) = self.by_ports.get(&ports) else {
            if header.op == op::REQUEST {
                self.guest_connects(header, ports);
            } else {
                self.refuse(header);
            }
            return;
        };
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.note_credit(header);
        let outcome = match header.op {
            op::RESPONSE => connection.established().map(|()| Outcome::Keep),
            op::RW => connection.receive(data).map(|()| Outcome::Keep),
            op::SHUTDOWN => connection.shut_down(header.flags),
            op::RST => Ok(connection.reset_by_guest()),
            op::CREDIT_UPDATE => Ok(Outcome::Keep),
            op::CREDIT_REQUEST => {
                connection.answer_credit();
                Ok(Outcome::Keep)
            }
            _ => Err(Violation),
        };
        match outcome {
            Ok(Outcome::Keep) => {}
            Ok(Outcome::Release) => self.release(ports, token),
            Err(Violation) => connection.abort(),
        }
        self.settle(token);
    }

    /// Answers a packet that leads nowhere with `RST`; never a `RST`.
    pub(super) fn refuse(&mut self, header: &Header) {
        if header.op != op::RST && self.refusals.len() < MAX_REFUSALS {
            self.refusals.push_back(header.reset_for());
        }
    }

    /// The guest wants to reach a host port: there must be a listener for it.
    fn guest_connects(&mut self, header: &Header, ports: Ports) {
        if self.is_full() {
            self.refuse(header);
            return;
        }
        let Some(stream) = self.dial(ports.host) else {
            self.refuse(header);
            return;
        };
        let token = self.token();
        if self.poll.watch(&stream, token, EDGES).is_err() {
            self.refuse(header);
            return;
        }
        let mut connection = Connection::new(stream, ports, State::Accepted);
        connection.note_credit(header);
        self.connections.insert(token, connection);
        self.by_ports.insert(ports, token);
        self.settle(token);
    }

    fn dial(&self, port: u32) -> Option<UnixStream> {
        let mut path = OsString::from(&self.socket);
        path.push(format!("_{port}"));
        let address = SocketAddrUnix::new(&*path).ok()?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        // Does not wait: a listener whose backlog is full refuses.
        connect(&socket, &address).ok()?;
        Some(UnixStream::from(socket))
    }

    /// Whether the guest may have something to receive.
    pub(super) fn has_packets(&self) -> bool {
        !self.refusals.is_empty() || !self.ready.is_empty()
    }

    /// The next packet for the guest; its payload is in `room` then. May find there is none.
    pub(super) fn next_packet(&mut self, guest_cid: u64, room: &Buffers<'_>) -> Option<Header> {
        if let Some(refusal) = self.refusals.pop_front() {
            return Some(refusal);
        }
        // Each one's turn comes once.
        for _ in 0..self.ready.len() {
            let Some(token) = self.ready.pop_front() else { break };
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            connection.queued = false;
            let ports = connection.ports;
            let packet = connection.produce(guest_cid, room);
            if connection.state == State::Draining {
                self.release(ports, token);
            }
            self.settle(token);
            if packet.is_some() {
                return packet;
            }
        }
        None
    }
}
