//! Links, addresses and routes, and the socket both kinds of netlink messages go through.
//!
//! `rtnetlink` drives the same messages through an async runtime; here a few requests run one after
//! the other on a thread that is in the right namespace, so only its message crates are used.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};

/// How long the kernel may take for one request.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest part of an answer; the kernel makes none larger unless asked.
const BUFFER: usize = 32 << 10;

/// A netlink socket of the namespace its maker was in.
#[derive(Debug)]
pub(crate) struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self { socket, sequence: 0 })
    }

    pub(crate) fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.socket, bytes, SendFlags::empty())?;
        Ok(())
    }

    /// Takes the messages that are there, waiting for the first.
    pub(crate) fn receive<M>(&self) -> io::Result<Vec<NetlinkMessage<M>>>
    where
        M: NetlinkDeserializable + NetlinkSerializable,
    {
        self.receive_with(RecvFlags::empty())
    }

    /// Takes the messages that are there; `WouldBlock` if none is.
    pub(crate) fn poll<M>(&self) -> io::Result<Vec<NetlinkMessage<M>>>
    where
        M: NetlinkDeserializable + NetlinkSerializable,
    {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with<M>(&self, flags: RecvFlags) -> io::Result<Vec<NetlinkMessage<M>>>
    where
        M: NetlinkDeserializable + NetlinkSerializable,
    {
        let mut buffer = vec![0; BUFFER];
        let (_, length) = rustix::net::recv(&self.socket, &mut buffer[..], flags)?;
        let mut rest = buffer.get(..length.min(BUFFER)).unwrap_or_default();
        let mut messages = Vec::new();
        while rest.len() >= 16 {
            let message = NetlinkMessage::deserialize(rest).map_err(io::Error::other)?;
            let step = (message.header.length as usize).next_multiple_of(4).max(16);
            rest = rest.get(step..).unwrap_or_default();
            messages.push(message);
        }
        Ok(messages)
    }

    /// Sends one request and waits until the kernel has done it.
    pub(crate) fn request<M>(&mut self, message: M, flags: u16) -> io::Result<()>
    where
        M: NetlinkDeserializable + NetlinkSerializable,
        NetlinkPayload<M>: From<M>,
    {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        header.sequence_number = self.next_sequence();
        self.send(&bytes(NetlinkMessage::new(header, message.into())))?;
        loop {
            for answer in self.receive::<M>()? {
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                if let NetlinkPayload::Error(error) = answer.payload {
                    return if error.code.is_none() { Ok(()) } else { Err(error.to_io()) };
                }
            }
        }
    }

    /// Sends one request for a list and returns it.
    pub(crate) fn dump<M>(&mut self, message: M) -> io::Result<Vec<M>>
    where
        M: NetlinkDeserializable + NetlinkSerializable,
        NetlinkPayload<M>: From<M>,
    {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        header.sequence_number = self.next_sequence();
        self.send(&bytes(NetlinkMessage::new(header, message.into())))?;
        let mut list = Vec::new();
        loop {
            for answer in self.receive::<M>()? {
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::InnerMessage(message) => list.push(message),
                    NetlinkPayload::Done(_) => return Ok(list),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    _ => {}
                }
            }
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A message as it goes to the kernel.
pub(crate) fn bytes<M: NetlinkSerializable>(mut message: NetlinkMessage<M>) -> Vec<u8> {
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Links, addresses and routes of one namespace.
#[derive(Debug)]
pub(crate) struct Links(Netlink);

impl Links {
    /// Those of the calling thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        Netlink::open(NETLINK_ROUTE).map(Self)
    }

    pub(crate) fn index(&self, name: &str) -> io::Result<u32> {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::DGRAM,
            None,
        )?;
        Ok(rustix::net::netdevice::name_to_index(&socket, name)?)
    }

    /// A pair of interfaces: `here`, and `there` in the namespace of `other`.
    pub(crate) fn add_pair(&mut self, here: &str, there: &str, other: RawFd) -> io::Result<()> {
        let mut peer = LinkMessage::default();
        peer.attributes =
            vec![LinkAttribute::IfName(there.to_owned()), LinkAttribute::NetNsFd(other)];
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(here.to_owned()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
            ]),
        ];
        self.0.request(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Sets an interface's hardware address, if one is given, and switches it on.
    pub(crate) fn set_up(&mut self, index: u32, mac: Option<[u8; 6]>) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
        message.attributes =
            mac.map(|mac| LinkAttribute::Address(mac.to_vec())).into_iter().collect();
        self.0.request(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Index and name of every interface.
    pub(crate) fn list(&mut self) -> io::Result<Vec<(u32, String)>> {
        let list = self.0.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        Ok(list
            .into_iter()
            .filter_map(|message| {
                let RouteNetlinkMessage::NewLink(link) = message else { return None };
                let name = link.attributes.into_iter().find_map(|attribute| match attribute {
                    LinkAttribute::IfName(name) => Some(name),
                    _ => None,
                })?;
                Some((link.header.index, name))
            })
            .collect())
    }

    pub(crate) fn add_address(
        &mut self,
        index: u32,
        address: Ipv4Addr,
        prefix: u8,
    ) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = prefix;
        message.header.index = index;
        message.attributes = vec![
            AddressAttribute::Local(address.into()),
            AddressAttribute::Address(address.into()),
        ];
        self.0.request(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The number of the interface at the other end of a pair, in the other's namespace.
    pub(crate) fn peer(&mut self, name: &str) -> io::Result<u32> {
        let list = self.0.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        list.into_iter()
            .find_map(|message| {
                let RouteNetlinkMessage::NewLink(link) = message else { return None };
                let named = |attribute: &LinkAttribute| {
                    matches!(attribute, LinkAttribute::IfName(found) if found == name)
                };
                if !link.attributes.iter().any(named) {
                    return None;
                }
                link.attributes.iter().find_map(|attribute| match attribute {
                    LinkAttribute::Link(index) => Some(*index),
                    _ => None,
                })
            })
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Every IPv4 address of the namespace.
    pub(crate) fn addresses(&mut self) -> io::Result<Vec<Ipv4Addr>> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        let list = self.0.dump(RouteNetlinkMessage::GetAddress(message))?;
        Ok(list
            .into_iter()
            .filter_map(|message| {
                let RouteNetlinkMessage::NewAddress(address) = message else { return None };
                address.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Local(IpAddr::V4(address)) => Some(*address),
                    _ => None,
                })
            })
            .collect())
    }

    pub(crate) fn add_default_route(&mut self, gateway: Ipv4Addr) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::Static;
        message.header.scope = RouteScope::Universe;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![RouteAttribute::Gateway(RouteAddress::Inet(gateway))];
        self.0.request(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Who has `address` behind an interface, for good: nobody needs to ask.
    pub(crate) fn add_neighbour(
        &mut self,
        index: u32,
        address: Ipv4Addr,
        mac: [u8; 6],
    ) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = index;
        message.header.state = NeighbourState::Permanent;
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        self.0.request(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_EXCL)
    }
}
