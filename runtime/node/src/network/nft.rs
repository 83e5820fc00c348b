//! nftables over netlink: transactions of tables, chains, sets and rules.
//!
//! Written by hand on top of `netlink-packet-netfilter`, because nothing ready-made serves: the
//! crate `rustables` is under the GPL, `nftnl` needs C libraries, `nftables` runs the `nft`
//! program, and `netlink-packet-netfilter` itself knows neither connection tracking nor limits,
//! logs, rejections, masquerading or counters. Numbers are those of Linux,
//! `include/uapi/linux/netfilter/nf_tables.h`; what rules mean is in [`super::rules`].

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::Ipv4Net;
use netlink_packet_core::{
    DefaultNla, Emitable, NLA_F_NESTED, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL,
    NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, NlasIterator,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    NetfilterSubsystem,
};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::netlink::{Netlink, bytes};

/// Message numbers (`enum nf_tables_msg_types`).
mod message {
    pub const NEW_TABLE: u8 = 0;
    pub const NEW_CHAIN: u8 = 3;
    pub const NEW_RULE: u8 = 6;
    pub const NEW_SET: u8 = 9;
    pub const NEW_ELEMENTS: u8 = 12;
    pub const GET_ELEMENTS: u8 = 13;
    pub const DELETE_ELEMENTS: u8 = 14;
    pub const NEW_OBJECT: u8 = 18;
    pub const GET_OBJECT: u8 = 19;
}

/// Hooks of the `inet` family (`enum nf_inet_hooks`).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Hook {
    Prerouting = 0,
    Input = 1,
    Forward = 2,
    Output = 3,
    Postrouting = 4,
}

/// What a base chain is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Filter,
    Nat,
}

/// What happens to a packet that no rule of a base chain decides about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Policy {
    Drop = 0,
    Accept = 1,
}

/// The object type of a counter.
const OBJECT_COUNTER: u32 = 1;

/// Registers are addressed in units of four bytes, the first number of them being 8.
const REGISTER: u32 = 8;
/// The verdict register.
const VERDICT: u32 = 0;

fn attribute(kind: u16, value: impl Into<Vec<u8>>) -> DefaultNla {
    DefaultNla::new(kind, value.into())
}

fn number(kind: u16, value: u32) -> DefaultNla {
    attribute(kind, value.to_be_bytes())
}

fn long(kind: u16, value: u64) -> DefaultNla {
    attribute(kind, value.to_be_bytes())
}

fn text(kind: u16, value: &str) -> DefaultNla {
    attribute(kind, [value.as_bytes(), &[0]].concat())
}

fn nest(kind: u16, children: &[DefaultNla]) -> DefaultNla {
    let mut value = vec![0; children.buffer_len()];
    children.emit(&mut value);
    attribute(kind | NLA_F_NESTED, value)
}

/// `NFTA_DATA_VALUE` inside `kind`.
fn data(kind: u16, value: &[u8]) -> DefaultNla {
    nest(kind, &[attribute(1, value)])
}

/// One rule being written, as a list of expressions that each decide whether the next one runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rule(Vec<DefaultNla>);

impl Rule {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn expression(mut self, name: &str, attributes: &[DefaultNla]) -> Self {
        self.0.push(nest(1, &[text(1, name), nest(2, attributes)]));
        self
    }

    /// Loads a property of the packet (`enum nft_meta_keys`).
    fn meta(self, register: u32, key: u32) -> Self {
        self.expression("meta", &[number(1, register), number(2, key)])
    }

    /// Loads bytes of the network header (1) or the transport header (2).
    fn payload(self, register: u32, base: u32, offset: u32, length: u32) -> Self {
        let attributes =
            [number(1, register), number(2, base), number(3, offset), number(4, length)];
        self.expression("payload", &attributes)
    }

    /// Goes on if the register compares so: 0 equal, 1 not equal, 3 at most, 5 at least.
    fn compare(self, register: u32, operation: u32, value: &[u8]) -> Self {
        self.expression("cmp", &[number(1, register), number(2, operation), data(3, value)])
    }

    fn masked(self, register: u32, mask: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).unwrap_or(0);
        let zero = vec![0; mask.len()];
        let attributes = [
            number(1, register),
            number(2, register),
            number(3, length),
            data(4, mask),
            data(5, &zero),
        ];
        self.expression("bitwise", &attributes)
    }

    fn interface(self, key: u32, name: &str, operation: u32) -> Self {
        let value: Vec<u8> = match name.strip_suffix('*') {
            Some(prefix) => prefix.into(),
            None => {
                let mut whole = name.as_bytes().to_vec();
                whole.resize(16, 0);
                whole
            }
        };
        self.meta(REGISTER, key).compare(REGISTER, operation, &value)
    }

    /// Came in through the interface; a final `*` stands for any ending.
    pub(crate) fn from(self, name: &str) -> Self {
        self.interface(6, name, 0)
    }

    pub(crate) fn not_from(self, name: &str) -> Self {
        self.interface(6, name, 1)
    }

    /// Goes out through the interface.
    pub(crate) fn to(self, name: &str) -> Self {
        self.interface(7, name, 0)
    }

    pub(crate) fn not_to(self, name: &str) -> Self {
        self.interface(7, name, 1)
    }

    pub(crate) fn ipv4(self) -> Self {
        self.meta(REGISTER, 15).compare(REGISTER, 0, &[2])
    }

    pub(crate) fn ipv6(self) -> Self {
        self.meta(REGISTER, 15).compare(REGISTER, 0, &[10])
    }

    pub(crate) fn protocol(self, number: u8) -> Self {
        self.meta(REGISTER, 16).compare(REGISTER, 0, &[number])
    }

    fn address_in(self, offset: u32, net: Ipv4Net, operation: u32) -> Self {
        let rule = self.payload(REGISTER, 1, offset, 4);
        let rule = match net.prefix_len() {
            32 => rule,
            _ => rule.masked(REGISTER, &net.netmask().octets()),
        };
        rule.compare(REGISTER, operation, &net.network().octets())
    }

    pub(crate) fn destination(self, net: Ipv4Net) -> Self {
        // Every address is in it, and the kernel takes no empty mask.
        if net.prefix_len() == 0 { self } else { self.address_in(16, net, 0) }
    }

    pub(crate) fn source(self, net: Ipv4Net) -> Self {
        self.address_in(12, net, 0)
    }

    pub(crate) fn source_not(self, address: Ipv4Addr) -> Self {
        self.address_in(12, Ipv4Net::from(address), 1)
    }

    fn port(self, offset: u32, first: u16, last: u16) -> Self {
        let rule = self.payload(REGISTER, 2, offset, 2);
        if first == last {
            return rule.compare(REGISTER, 0, &first.to_be_bytes());
        }
        rule.compare(REGISTER, 5, &first.to_be_bytes()).compare(REGISTER, 3, &last.to_be_bytes())
    }

    pub(crate) fn ports(self, first: u16, last: u16) -> Self {
        self.port(2, first, last)
    }

    pub(crate) fn source_port(self, port: u16) -> Self {
        self.port(0, port, port)
    }

    /// The first byte of an ICMP header.
    pub(crate) fn icmp_type(self, kind: u8) -> Self {
        self.payload(REGISTER, 2, 0, 1).compare(REGISTER, 0, &[kind])
    }

    fn tracked(self, states: u32) -> Self {
        self.expression("ct", &[number(1, REGISTER), number(2, 0)])
            .masked(REGISTER, &states.to_ne_bytes())
            .compare(REGISTER, 1, &[0; 4])
    }

    /// Belongs to a connection that was let through, or is an error about one.
    pub(crate) fn established(self) -> Self {
        self.tracked(2 | 4)
    }

    pub(crate) fn invalid(self) -> Self {
        self.tracked(1)
    }

    /// More connections than `count` are open.
    pub(crate) fn connections_over(self, count: u32) -> Self {
        self.expression("connlimit", &[number(1, count), number(2, 1)])
    }

    /// `destination address . protocol . destination port` is in the set.
    pub(crate) fn flow_in(self, set: &str) -> Self {
        self.payload(REGISTER, 1, 16, 4)
            .meta(REGISTER + 1, 16)
            .payload(REGISTER + 2, 2, 2, 2)
            .lookup(set)
    }

    /// `incoming interface's number . destination address` is in the set.
    pub(crate) fn entrance_in(self, set: &str) -> Self {
        self.meta(REGISTER, 4).payload(REGISTER + 1, 1, 16, 4).lookup(set)
    }

    fn lookup(self, set: &str) -> Self {
        self.expression("lookup", &[text(1, set), number(2, REGISTER)])
    }

    /// Adds the packet to a counter of the table.
    pub(crate) fn count(self, counter: &str) -> Self {
        self.expression("objref", &[number(1, OBJECT_COUNTER), text(2, counter)])
    }

    /// Goes on at most so often a second, after `burst` for free.
    pub(crate) fn at_most(self, per_second: u64, burst: u32) -> Self {
        let attributes = [long(1, per_second), long(2, 1), number(3, burst), number(4, 0)];
        self.expression("limit", &attributes)
    }

    /// Sends the packet's headers to whoever listens to `group`.
    pub(crate) fn log(self, group: u16, prefix: &str) -> Self {
        let attributes =
            [attribute(1, group.to_be_bytes()), text(2, prefix), number(3, super::rules::LOGGED)];
        self.expression("log", &attributes)
    }

    fn verdict(self, code: i32, chain: Option<&str>) -> Self {
        let mut verdict = vec![attribute(1, code.to_be_bytes())];
        verdict.extend(chain.map(|chain| text(2, chain)));
        self.expression("immediate", &[number(1, VERDICT), nest(2, &[nest(2, &verdict)])])
    }

    pub(crate) fn accept(self) -> Self {
        self.verdict(1, None)
    }

    pub(crate) fn drop(self) -> Self {
        self.verdict(0, None)
    }

    /// Goes through another chain and comes back.
    pub(crate) fn jump(self, chain: &str) -> Self {
        self.verdict(-3, Some(chain))
    }

    /// Goes to another chain for good.
    pub(crate) fn goto(self, chain: &str) -> Self {
        self.verdict(-4, Some(chain))
    }

    /// Drops, and tells the sender that it was forbidden.
    pub(crate) fn reject(self) -> Self {
        // `NFT_REJECT_ICMPX_UNREACH`, `NFT_REJECT_ICMPX_ADMIN_PROHIBITED`.
        self.expression("reject", &[number(1, 2), attribute(2, [3])])
    }

    /// Goes out under the address of the outgoing interface.
    pub(crate) fn masquerade(self) -> Self {
        self.expression("masq", &[])
    }
}

/// The key of a set of flows.
pub(crate) fn flow_key(address: Ipv4Addr, protocol: u8, port: u16) -> Vec<u8> {
    [&address.octets()[..], &[protocol, 0, 0, 0], &port.to_be_bytes(), &[0, 0]].concat()
}

/// The key of a set of entrances.
pub(crate) fn entrance_key(interface: u32, address: Ipv4Addr) -> Vec<u8> {
    [interface.to_ne_bytes(), address.octets()].concat()
}

/// Changes to one table of the `inet` family that happen together or not at all.
#[derive(Debug)]
pub(crate) struct Batch {
    table: &'static str,
    messages: Vec<(u8, u16, Vec<DefaultNla>)>,
}

impl Batch {
    pub(crate) fn of(table: &'static str) -> Self {
        Self { table, messages: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    fn push(&mut self, kind: u8, flags: u16, attributes: Vec<DefaultNla>) {
        self.messages.push((kind, flags, attributes));
    }

    /// Creates the table; the whole batch fails with `AlreadyExists` if it is there.
    pub(crate) fn create_table(&mut self) {
        self.push(message::NEW_TABLE, NLM_F_CREATE | NLM_F_EXCL, vec![text(1, self.table)]);
    }

    pub(crate) fn base_chain(
        &mut self,
        name: &str,
        (hook, priority): (Hook, i32),
        kind: Kind,
        policy: Policy,
    ) {
        let hook = [number(1, hook as u32), attribute(2, priority.to_be_bytes())];
        let kind = if kind == Kind::Nat { "nat" } else { "filter" };
        let attributes = vec![
            text(1, self.table),
            text(3, name),
            nest(4, &hook),
            number(5, policy as u32),
            text(7, kind),
        ];
        self.push(message::NEW_CHAIN, NLM_F_CREATE, attributes);
    }

    pub(crate) fn chain(&mut self, name: &str) {
        self.push(message::NEW_CHAIN, NLM_F_CREATE, vec![text(1, self.table), text(3, name)]);
    }

    pub(crate) fn counter(&mut self, name: &str) {
        let attributes = vec![
            text(1, self.table),
            text(2, name),
            number(3, OBJECT_COUNTER),
            nest(4, &[long(1, 0), long(2, 0)]),
        ];
        self.push(message::NEW_OBJECT, NLM_F_CREATE, attributes);
    }

    /// A set of keys of `key_bytes`, of `key_type` for people who list it, whose elements may have
    /// a time to live.
    pub(crate) fn set(&mut self, name: &str, key_type: u32, key_bytes: u32, most: u32) {
        const TIMEOUT: u32 = 0x10;
        let id = u32::try_from(self.messages.len()).unwrap_or(0);
        let attributes = vec![
            text(1, self.table),
            text(2, name),
            number(3, TIMEOUT),
            number(4, key_type),
            number(5, key_bytes),
            nest(9, &[number(1, most)]),
            number(10, id),
        ];
        self.push(message::NEW_SET, NLM_F_CREATE, attributes);
    }

    pub(crate) fn rule(&mut self, chain: &str, Rule(expressions): Rule) {
        let attributes = vec![text(1, self.table), text(2, chain), nest(4, expressions.as_slice())];
        self.push(message::NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, attributes);
    }

    pub(crate) fn add_element(&mut self, set: &str, key: &[u8], lives: Option<Duration>) {
        let mut element = vec![data(1, key)];
        element.extend(
            lives.map(|lives| long(4, u64::try_from(lives.as_millis()).unwrap_or(u64::MAX))),
        );
        let list = nest(3, &[nest(1, &element)]);
        let attributes = vec![text(1, self.table), text(2, set), list];
        self.push(message::NEW_ELEMENTS, NLM_F_CREATE, attributes);
    }

    pub(crate) fn remove_element(&mut self, set: &str, key: &[u8]) {
        let list = nest(3, &[nest(1, &[data(1, key)])]);
        self.push(message::DELETE_ELEMENTS, 0, vec![text(1, self.table), text(2, set), list]);
    }
}

/// The packet filter of one namespace.
#[derive(Debug)]
pub(crate) struct Netfilter(Netlink);

impl Netfilter {
    /// That of the calling thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        Netlink::open(NETLINK_NETFILTER).map(Self)
    }

    /// Carries a batch out, completely or not at all.
    pub(crate) fn commit(&mut self, batch: &Batch) -> io::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let begin = self.0.next_sequence();
        let mut all = control(ControlMessage::BatchBegin, begin);
        let mut last = begin;
        for (index, (kind, flags, attributes)) in batch.messages.iter().enumerate() {
            last = self.0.next_sequence();
            let mut header = NetlinkHeader::default();
            let answer = if index + 1 == batch.messages.len() { NLM_F_ACK } else { 0 };
            header.flags = NLM_F_REQUEST | answer | flags;
            header.sequence_number = last;
            all.extend(bytes(NetlinkMessage::new(header, tables(*kind, attributes).into())));
        }
        let end = self.0.next_sequence();
        all.extend(control(ControlMessage::BatchEnd, end));
        self.0.send(&all)?;
        let mut failed = None;
        loop {
            for answer in self.0.receive::<NetfilterMessage>()? {
                let sequence = answer.header.sequence_number;
                if sequence < begin || sequence > end {
                    continue;
                }
                let NetlinkPayload::Error(error) = answer.payload else { continue };
                if error.code.is_some() {
                    let error = error.to_io();
                    // About the batch as a whole: nothing else will follow.
                    if sequence == begin {
                        return Err(error);
                    }
                    failed.get_or_insert(error);
                }
                if sequence == last {
                    return failed.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// How many packets a counter has seen.
    pub(crate) fn counter(&mut self, table: &str, name: &str) -> io::Result<u64> {
        let request = [text(1, table), text(2, name), number(3, OBJECT_COUNTER)];
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST;
        header.sequence_number = self.0.next_sequence();
        let message = tables(message::GET_OBJECT, &request);
        self.0.send(&bytes(NetlinkMessage::new(header, message.into())))?;
        loop {
            for answer in self.0.receive::<NetfilterMessage>()? {
                if answer.header.sequence_number != header.sequence_number {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(message) => {
                        return packets(&message)
                            .ok_or_else(|| io::Error::other("a counter without a number"));
                    }
                    _ => {}
                }
            }
        }
    }

    /// The keys in a set.
    pub(crate) fn elements(&mut self, table: &str, set: &str) -> io::Result<Vec<Vec<u8>>> {
        let request = [text(1, table), text(2, set)];
        let list = self.0.dump(tables(message::GET_ELEMENTS, &request))?;
        let mut keys = Vec::new();
        for message in &list {
            let Some(elements) = find(&attributes(message), 3) else { continue };
            for element in children(&elements) {
                if let Some(key) =
                    find(&children(&element.1), 1).and_then(|key| find(&children(&key), 1))
                {
                    keys.push(key);
                }
            }
        }
        Ok(keys)
    }
}

fn tables(kind: u8, attributes: &[DefaultNla]) -> NetfilterMessage {
    NetfilterMessage::new(
        NetfilterHeader::new(NetfilterProtoFamily::Inet, 0, 0),
        Raw { kind, attributes: attributes.to_vec() },
    )
}

/// A message of the tables' subsystem whose attributes are ready.
struct Raw {
    kind: u8,
    attributes: Vec<DefaultNla>,
}

impl From<Raw> for NetfilterMessageInner {
    fn from(raw: Raw) -> Self {
        Self::Other {
            subsys: NetfilterSubsystem::NfTables,
            message_type: raw.kind,
            attributes: raw.attributes,
        }
    }
}

fn control(message: ControlMessage, sequence: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST;
    header.sequence_number = sequence;
    let subsystem = u16::from(u8::from(NetfilterSubsystem::NfTables));
    let message = NetfilterMessage::new(
        NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, subsystem),
        message,
    );
    bytes(NetlinkMessage::new(header, message.into()))
}

type Attributes = Vec<(u16, Vec<u8>)>;

/// The attributes of an answer, as they came.
fn attributes(message: &NetfilterMessage) -> Attributes {
    let mut bytes = vec![0; message.inner.buffer_len()];
    message.inner.emit(&mut bytes);
    children(&bytes)
}

fn children(bytes: &[u8]) -> Attributes {
    NlasIterator::new(bytes)
        .map_while(Result::ok)
        .map(|attribute| (attribute.kind(), attribute.value().to_vec()))
        .collect()
}

fn find(attributes: &Attributes, kind: u16) -> Option<Vec<u8>> {
    attributes.iter().find(|(found, _)| *found == kind).map(|(_, value)| value.clone())
}

fn packets(message: &NetfilterMessage) -> Option<u64> {
    let data = find(&attributes(message), 4)?;
    let packets = find(&children(&data), 2)?;
    Some(u64::from_be_bytes(packets.try_into().ok()?))
}
