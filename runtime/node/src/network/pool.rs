//! Namespaces prepared in advance, so that a create pays for none of their making.
//!
//! ```text
//!  (none) ──prepare──► Ready ──take──► Leased ──drop──► (gone: the kernel takes it apart)
//!            ▲                │
//!            └── one more ────┘   at most `ready` prepared and `most` in all
//! ```
//! A slot is a network namespace with a tap and one end of a pair of interfaces, the packet filter
//! of [`super::rules`], and the sockets that need to be inside. It serves one sandbox and is never
//! used again, so nothing of one sandbox (connections, addresses, counters) meets another.
//!
//! Nothing of it has a name in the file system: a namespace lives as long as a descriptor of it,
//! its tap and its pair as long as the namespace. The death of the processes that hold a slot (ours
//! and the monitor, which has the tap), by whatever way, takes it apart. A monitor that outlives us
//! keeps its rules and connections; only names are not answered until somebody [adopts](Pool::adopt)
//! it. What may be left is elements of the host's `named` set, keyed by
//! interface numbers that the kernel does not use again; [`Pool::new`] sweeps them.
//!
//! ```text
//!   guest 192.0.2.2 ─ tap0 192.0.2.1 ‖ namespace ‖ up0 198.18.x.(2n+1) ─ pbk-NNNN 198.18.x.2n ‖ host
//! ```
//! The inside is the same in every sandbox (hardware addresses too), so a frozen guest finds what
//! it was frozen with. The addresses are of networks that are for documentation and for benchmarks
//! (RFC 5737, RFC 2544): no destination hides behind them.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::egress::Egress;
use super::guard::Guard;
use super::netlink::Links;
use super::nft::{Batch, Netfilter, entrance_key};
use super::wall::{Face, Wall};
use super::{kernel, rules};
use crate::event::EventSender;

/// The tap's name in its namespace.
pub(crate) const TAP: &str = "tap0";
/// The other interface's name there.
const UPLINK: &str = "up0";
/// Names of the host's ends; `*` stands for a slot's number.
pub(crate) const WIRES: &str = "pbk-*";

/// The guest's address.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// The guest's router and name server.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// How many leading bits of both are the network.
pub const PREFIX: u8 = 30;
/// The guest's hardware address.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x70, 0x62, 0, 0, 2];
const GATEWAY_MAC: [u8; 6] = [0x02, 0x70, 0x62, 0, 0, 1];

/// Where the wires between namespaces and the host have their addresses, two each.
pub(crate) const WIRE_ADDRESSES: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 18, 0, 0), 15);
const WIRES_MOST: u32 = 1 << 16;

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The kernel or the rights for it are missing.
    #[error("cannot {what}: {source}{}", hint(.source))]
    Kernel {
        /// The step.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// All slots are in use.
    #[error("{0} sandboxes with a network run already, which is the most this pool gives")]
    Exhausted(usize),
    /// Nobody answers for names.
    #[error("no name server: the policy has names, and the host's /etc/resolv.conf names none")]
    NoResolver,
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; sandboxes with a network need root",
        io::ErrorKind::NotFound | io::ErrorKind::Unsupported => {
            "; load the modules tun, veth and nf_tables (with ct, nat, masq, log, limit, reject and \
             connlimit)"
        }
        _ => "",
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> NetworkError {
    move |source| NetworkError::Kernel { what, source }
}

/// What a pool holds ready.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Slots prepared in advance; 0: each is made when it is asked for.
    pub ready: usize,
    /// Most slots, prepared and in use.
    pub most: usize,
    /// Connections one sandbox may have open.
    pub connections: u32,
    /// Who answers for names; empty: whom the host's `/etc/resolv.conf` names.
    pub resolvers: Vec<SocketAddr>,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { ready: 0, most: 1024, connections: 512, resolvers: Vec::new() }
    }
}

/// How full a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStatus {
    /// Slots prepared.
    pub ready: usize,
    /// Slots sandboxes have.
    pub in_use: usize,
}

/// Slots for sandboxes with a network. One for each process that runs sandboxes is enough.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    wall: Wall,
    filler: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    options: PoolOptions,
    host: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<Slot>,
    in_use: usize,
    closing: bool,
    /// Why the last slot could not be prepared.
    trouble: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// Sets the host's filter up, in the network namespace of the calling thread, and begins to
    /// prepare slots.
    ///
    /// # Errors
    /// [`NetworkError::Kernel`]: rights or kernel modules are missing.
    pub fn new(options: PoolOptions) -> Result<Self, NetworkError> {
        let host = own_namespace().map_err(failed("open this network namespace"))?;
        prepare_host()?;
        sweep().map_err(failed("sweep the host's packet filter"))?;
        let fill = options.ready > 0;
        let shared =
            Arc::new(Shared { options, host, state: Mutex::default(), changed: Condvar::new() });
        let filler = fill
            .then(|| {
                let shared = Arc::clone(&shared);
                let builder = thread::Builder::new().name("network-pool".to_owned());
                builder.stack_size(256 << 10).spawn(move || fill_up(&shared))
            })
            .transpose()
            .map_err(failed("start a thread"))?;
        Ok(Self { shared, wall: Wall::start(), filler })
    }

    /// A way out for sandbox `id` under `egress`.
    ///
    /// # Errors
    /// See [`NetworkError`].
    pub fn take(
        &self,
        id: &str,
        egress: &Egress,
        events: Option<EventSender>,
    ) -> Result<Lease, NetworkError> {
        let resolvers = self.resolvers();
        let has_names = egress.rules.iter().any(super::egress::Rule::has_name);
        if has_names && resolvers.is_empty() {
            return Err(NetworkError::NoResolver);
        }
        let place = self.place()?;
        let ready = self.shared.lock().ready.pop();
        self.shared.changed.notify_all();
        let mut slot = match ready {
            Some(slot) => slot,
            None => Slot::prepare(self.shared.host.as_fd(), self.shared.options.connections)?,
        };
        let own = Links::open()
            .and_then(|mut links| links.addresses())
            .map_err(failed("list this host's addresses"))?;
        slot.inside.commit(&rules::allow(egress, &own)).map_err(failed("set a sandbox's rules"))?;
        let named = Named::open(slot.wire, egress)?;
        let Slot { tap, namespace, inside, dns, log, inner, wire: _ } = slot;
        let face = self.wall.know(inner, id, events.clone());
        let guard = Guard::start(id, egress.clone(), resolvers, (inside, dns, log), events)
            .map_err(failed("start a thread"))?;
        Ok(Lease { tap, guard, _face: face, _named: named, _namespace: namespace, _place: place })
    }

    /// Takes over the way out of a sandbox whose monitor has outlived the process that made it, and
    /// which was made with `egress`: names are answered and denials told again. Its rules have been
    /// in force all along. The namespace is found through the monitor's own tap, so nothing needs to
    /// be kept anywhere; the former owner must be gone.
    ///
    /// # Errors
    /// [`NetworkError::Kernel`], also when the monitor has no network.
    pub fn adopt(
        &self,
        id: &str,
        monitor: u32,
        egress: &Egress,
        events: Option<EventSender>,
    ) -> Result<Lease, NetworkError> {
        let tap = tap_of(monitor).map_err(failed("find a monitor's tap"))?;
        let namespace =
            kernel::namespace_of_tap(tap.as_fd()).map_err(failed("find a tap's namespace"))?;
        let place = self.place()?;
        let (inside, wire) = thread::scope(|scope| {
            let enter = || {
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), network)?;
                let inside =
                    (Netfilter::open()?, name_socket()?, super::log::Log::open(rules::LOG_GROUP)?);
                Ok((inside, Links::open()?.peer(UPLINK)?))
            };
            let thread = thread::Builder::new().spawn_scoped(scope, enter)?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")))
        })
        .map_err(failed("enter a sandbox's namespace"))?;
        let inner = inner_of(wire).map_err(failed("find a wire's address"))?;
        let named = Named::open(wire, egress)?;
        let face = self.wall.know(inner, id, events.clone());
        let guard = Guard::start(id, egress.clone(), self.resolvers(), inside, events)
            .map_err(failed("start a thread"))?;
        Ok(Lease { tap, guard, _face: face, _named: named, _namespace: namespace, _place: place })
    }

    fn resolvers(&self) -> Vec<SocketAddr> {
        match &self.shared.options.resolvers {
            given if given.is_empty() => host_resolvers(),
            given => given.clone(),
        }
    }

    /// A place for one more sandbox.
    fn place(&self) -> Result<Place, NetworkError> {
        let mut state = self.shared.lock();
        if state.in_use >= self.shared.options.most {
            return Err(NetworkError::Exhausted(state.in_use));
        }
        state.in_use += 1;
        Ok(Place(Arc::clone(&self.shared)))
    }

    /// How full it is.
    #[must_use]
    pub fn status(&self) -> PoolStatus {
        let state = self.shared.lock();
        PoolStatus { ready: state.ready.len(), in_use: state.in_use }
    }

    /// Why the last attempt to prepare a slot in advance failed; absent if it did not.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.shared.lock().trouble.clone()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(filler) = self.filler.take() {
            let _ = filler.join();
        }
        self.shared.lock().ready.clear();
    }
}

fn fill_up(shared: &Shared) {
    let options = &shared.options;
    let mut state = shared.lock();
    loop {
        if state.closing {
            return;
        }
        let wanted = options.ready.min(options.most.saturating_sub(state.in_use));
        if state.ready.len() >= wanted {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        drop(state);
        let made = Slot::prepare(shared.host.as_fd(), options.connections);
        state = shared.lock();
        match made {
            Ok(slot) => {
                state.trouble = None;
                state.ready.push(slot);
            }
            Err(error) => {
                state.trouble = Some(error.to_string());
                // Whoever asks meanwhile tries for himself and is told.
                let pause = std::time::Duration::from_secs(1);
                let waited = shared.changed.wait_timeout(state, pause);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

/// The place in the pool that a lease takes up.
#[derive(Debug)]
struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.in_use = state.in_use.saturating_sub(1);
        drop(state);
        self.0.changed.notify_all();
    }
}

/// What the host lets through for one sandbox that it lets through for nobody else.
#[derive(Debug)]
struct Named {
    keys: Vec<Vec<u8>>,
}

impl Named {
    fn open(wire: u32, egress: &Egress) -> Result<Self, NetworkError> {
        let keys: Vec<_> =
            rules::named_addresses(egress).map(|address| entrance_key(wire, address)).collect();
        let mut batch = Batch::of(rules::HOST_TABLE);
        for key in &keys {
            batch.add_element(rules::NAMED, key, None);
        }
        if !batch.is_empty() {
            let open = || Netfilter::open()?.commit(&batch);
            open().map_err(failed("open a named destination on the host"))?;
        }
        Ok(Self { keys })
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let mut batch = Batch::of(rules::HOST_TABLE);
        for key in &self.keys {
            batch.remove_element(rules::NAMED, key);
        }
        if !batch.is_empty() {
            let _ = Netfilter::open().and_then(|mut filter| filter.commit(&batch));
        }
    }
}

/// One sandbox's way out. Dropping it takes the way apart.
#[derive(Debug)]
pub struct Lease {
    tap: OwnedFd,
    guard: Guard,
    _face: Face,
    _named: Named,
    _namespace: OwnedFd,
    _place: Place,
}

impl Lease {
    /// The tap, to be handed to the monitor.
    #[must_use]
    pub fn tap(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }

    /// What was denied so far.
    #[must_use]
    pub fn counts(&self) -> super::EgressCounts {
        self.guard.counts()
    }
}

/// A namespace, ready to be used.
#[derive(Debug)]
struct Slot {
    tap: OwnedFd,
    namespace: OwnedFd,
    /// The packet filter inside.
    inside: Netfilter,
    /// Where the guest asks for names.
    dns: UdpSocket,
    /// What the filter says about denied packets.
    log: super::log::Log,
    /// The host's end.
    wire: u32,
    /// The address of the other end, which the host sees the sandbox behind.
    inner: Ipv4Addr,
}

/// The part that is made inside.
struct Inside {
    tap: OwnedFd,
    namespace: OwnedFd,
    filter: Netfilter,
    dns: UdpSocket,
    log: super::log::Log,
}

impl Slot {
    fn prepare(host: BorrowedFd<'_>, connections: u32) -> Result<Self, NetworkError> {
        for _ in 0..8 {
            match Self::try_prepare(host, connections) {
                // Somebody else was given the same name in between.
                Err(NetworkError::Kernel { source, .. })
                    if source.kind() == io::ErrorKind::AlreadyExists => {}
                result => return result,
            }
        }
        Err(failed("find a free name for a wire")(io::ErrorKind::AlreadyExists.into()))
    }

    fn try_prepare(host: BorrowedFd<'_>, connections: u32) -> Result<Self, NetworkError> {
        let number = free_number()?;
        let name = wire_name(number);
        let (outer, inner) = wire_addresses(number);
        // A thread of its own, as a thread does not come back from a namespace it made.
        let inside = thread::scope(|scope| {
            let build = || Inside::build(host, &name, inner, outer, connections);
            let thread = thread::Builder::new().spawn_scoped(scope, build);
            match thread.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err(failed("prepare a namespace")(io::Error::other("a panic"))),
                Err(error) => Err(failed("start a thread")(error)),
            }
        })?;
        let mut links = Links::open().map_err(failed("open a netlink socket"))?;
        let wire = links.index(&name).map_err(failed("find the host's end of a wire"))?;
        links.add_address(wire, outer, 31).map_err(failed("set a wire's address"))?;
        links.set_up(wire, None).map_err(failed("switch a wire on"))?;
        let Inside { tap, namespace, filter, dns, log } = inside;
        Ok(Self { tap, namespace, inside: filter, dns, log, wire, inner })
    }
}

impl Inside {
    fn build(
        host: BorrowedFd<'_>,
        name: &str,
        inner: Ipv4Addr,
        outer: Ipv4Addr,
        connections: u32,
    ) -> Result<Self, NetworkError> {
        kernel::new_network_namespace().map_err(failed("make a network namespace"))?;
        let namespace = own_namespace().map_err(failed("open a network namespace"))?;
        // First of all: whatever comes later, it comes behind the filter.
        let mut filter = Netfilter::open().map_err(failed("open a netfilter socket"))?;
        filter
            .commit(&rules::namespace(connections))
            .map_err(failed("set a namespace's packet filter"))?;
        let log = super::log::Log::open(rules::LOG_GROUP)
            .map_err(failed("listen to the packet filter"))?;
        // No addresses of its own, and nothing asked on the guest's wire.
        quiet_ipv6();
        let mut links = Links::open().map_err(failed("open a netlink socket"))?;
        links
            .add_pair(UPLINK, name, host.as_raw_fd())
            .map_err(failed("make a wire to the host"))?;
        let uplink = links.index(UPLINK).map_err(failed("find a wire"))?;
        links.add_address(uplink, inner, 31).map_err(failed("set a wire's address"))?;
        links.set_up(uplink, None).map_err(failed("switch a wire on"))?;
        links.add_default_route(outer).map_err(failed("set a namespace's route"))?;
        let tap = kernel::create_tap(TAP).map_err(failed("make a tap interface"))?;
        let index = links.index(TAP).map_err(failed("find a tap interface"))?;
        links.add_address(index, GATEWAY, PREFIX).map_err(failed("set a tap's address"))?;
        links.set_up(index, Some(GATEWAY_MAC)).map_err(failed("switch a tap on"))?;
        links
            .add_neighbour(index, GUEST, GUEST_MAC)
            .map_err(failed("set a guest's hardware address"))?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1")
            .map_err(failed("switch a namespace's forwarding on"))?;
        let dns = name_socket().map_err(failed("listen for names"))?;
        Ok(Self { tap, namespace, filter, dns, log })
    }
}

/// Where a guest asks for names.
fn name_socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((GATEWAY, 53))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A copy of the descriptor that a monitor has of its tap.
fn tap_of(monitor: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(monitor).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    for entry in fs::read_dir(format!("/proc/{monitor}/fd"))?.flatten() {
        if fs::read_link(entry.path()).is_ok_and(|target| target == Path::new("/dev/net/tun"))
            && let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok())
        {
            return Ok(pidfd_getfd(&process, number, PidfdGetfdFlags::empty())?);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "the monitor has no tap"))
}

/// Interfaces of the namespace that come up from now on get no IPv6 addresses and ask for none.
/// Packets are still seen, so that the filter counts them.
fn quiet_ipv6() {
    for (setting, value) in
        [("addr_gen_mode", "1"), ("accept_ra", "0"), ("router_solicitations", "0")]
    {
        // A kernel without IPv6 has none of these, and needs none.
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/default/{setting}"), value);
    }
}

fn own_namespace() -> io::Result<OwnedFd> {
    File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
}

fn wire_name(number: u32) -> String {
    WIRES.replace('*', &format!("{number:04x}"))
}

/// The host's address and the namespace's.
fn wire_addresses(number: u32) -> (Ipv4Addr, Ipv4Addr) {
    let outer = u32::from(WIRE_ADDRESSES.0) + 2 * number;
    (Ipv4Addr::from(outer), Ipv4Addr::from(outer + 1))
}

/// The namespace's address of the wire whose host's end is interface `wire`.
fn inner_of(wire: u32) -> io::Result<Ipv4Addr> {
    let links = Links::open()?.list()?;
    let prefix = WIRES.trim_end_matches('*');
    let number = links
        .into_iter()
        .find(|(index, _)| *index == wire)
        .and_then(|(_, name)| u32::from_str_radix(name.strip_prefix(prefix)?, 16).ok());
    number.map(|number| wire_addresses(number).1).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A number nobody on this host uses. Where two look at the same time, the name they both try is
/// given to one, and the other fails; so they look in different places.
fn free_number() -> Result<u32, NetworkError> {
    let mut links = Links::open().map_err(failed("open a netlink socket"))?;
    for _ in 0..64 {
        let mut bytes = [0; 4];
        getrandom::fill(&mut bytes).map_err(|error| {
            failed("choose a wire's number")(io::Error::other(error.to_string()))
        })?;
        let number = u32::from_ne_bytes(bytes) % WIRES_MOST;
        if links.index(&wire_name(number)).is_err() {
            return Ok(number);
        }
    }
    let used = links.list().map_or(0, |list| list.len());
    Err(NetworkError::Exhausted(used))
}

/// The host's filter and its forwarding, once for all sandboxes.
fn prepare_host() -> Result<(), NetworkError> {
    const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";
    let forwards = fs::read_to_string(FORWARD)
        .map_err(failed("read whether this host forwards"))?
        .trim()
        .starts_with('1');
    let mut filter = Netfilter::open().map_err(failed("open a netfilter socket"))?;
    match filter.commit(&rules::host(!forwards)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => result.map_err(failed("set the host's packet filter"))?,
    }
    // After the filter, so that nothing passes in between.
    if !forwards {
        fs::write(FORWARD, "1").map_err(failed("switch this host's forwarding on"))?;
    }
    Ok(())
}

/// Removes what killed processes left in the host's set.
fn sweep() -> io::Result<()> {
    let living: Vec<u32> = Links::open()?.list()?.into_iter().map(|(index, _)| index).collect();
    let mut filter = Netfilter::open()?;
    for key in filter.elements(rules::HOST_TABLE, rules::NAMED)? {
        let Some(interface) = key.first_chunk::<4>().map(|bytes| u32::from_ne_bytes(*bytes)) else {
            continue;
        };
        if !living.contains(&interface) {
            let mut batch = Batch::of(rules::HOST_TABLE);
            batch.remove_element(rules::NAMED, &key);
            // Somebody else may sweep at the same time.
            let _ = filter.commit(&batch);
        }
    }
    Ok(())
}

/// Whom the host asks for names.
fn host_resolvers() -> Vec<SocketAddr> {
    let text = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let address = (words.next() == Some("nameserver")).then(|| words.next()).flatten()?;
            Some(SocketAddr::new(address.parse::<IpAddr>().ok()?, 53))
        })
        .take(3)
        .collect()
}
