//! The packet filters: one inside each sandbox's namespace, one on the host.
//!
//! ```text
//!                 namespace of one sandbox                           host
//!  guest ── tap0 ─► prerouting ─► forward ─► masquerade ── veth ─► forward ─► masquerade ─► world
//!                    IPv6, forged  named, blocked,                   no neighbour, no host,
//!                    source: drop  allow, open; else rejected        no metadata; else on
//!                └► input: DNS to our resolver; else rejected     └► input: drop
//! ```
//! Each wall holds alone what matters most: even a namespace that let everything through would not
//! reach the host, its metadata service or another sandbox. New connections *to* a sandbox exist
//! nowhere. Everything denied is counted, and logged with a limit to whoever listens inside the
//! namespace, or on the host.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use super::egress::{Destination, Egress, Protocol, Rule as Allowed, blocked_nets, is_blocked};
use super::nft::{Batch, Hook, Kind, Policy, Rule};
use super::pool::{GATEWAY, GUEST, TAP, WIRE_ADDRESSES, WIRES};

/// The table inside a namespace.
pub(crate) const TABLE: &str = "parbake";
/// The table of the host. Its number changes whenever its content does.
pub(crate) const HOST_TABLE: &str = "parbake_2";
/// The set of flows that answered names have opened.
pub(crate) const OPEN: &str = "open";
/// Most flows in it.
pub(crate) const MOST_OPEN: u32 = 1024;
/// The host's set of destinations that are blocked unless named, and were named.
pub(crate) const NAMED: &str = "named";
/// The group logs of a namespace go to.
pub(crate) const LOG_GROUP: u16 = 1;
/// The group the host's log goes to.
pub(crate) const HOST_LOG_GROUP: u16 = 0x5042;
/// Bytes of each denied packet that are looked at.
pub(crate) const LOGGED: u32 = 64;

/// Logged packets a second, and at once.
const LOG_RATE: (u64, u32) = (50, 100);

/// The counters of a namespace's table; each names what it counts.
pub(crate) const COUNTERS: [&str; 5] = ["denied", "blocked", "forged", "ipv6", "flood"];

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const ECHO_REQUEST: u8 = 8;

/// Why a packet was denied, by the prefix of its log entry, for people.
pub(crate) fn reason(prefix: &str) -> &'static str {
    match prefix {
        "blocked" => "blocked",
        "forged" => "forged source",
        "ipv6" => "IPv6",
        "flood" => "too many connections",
        "wall" => "kept back by the host",
        _ => "not allowed",
    }
}

/// The filter of a namespace whose sandbox may reach nothing yet.
pub(crate) fn namespace(connections: u32) -> Batch {
    const FLOW: u32 = (7 << 12) | (12 << 6) | 13;
    let mut batch = Batch::of(TABLE);
    batch.create_table();
    for counter in COUNTERS {
        batch.counter(counter);
    }
    batch.set(OPEN, FLOW, 12, MOST_OPEN);
    for chain in COUNTERS.iter().chain(&["named", "host", "allow", "new"]) {
        batch.chain(chain);
    }
    for counter in COUNTERS {
        let (rate, burst) = LOG_RATE;
        if counter == "ipv6" {
            // What every kernel says on an interface that comes up: router and neighbour
            // solicitations, group reports.
            batch.rule(counter, Rule::new().protocol(ICMPV6).drop());
        }
        batch.rule(counter, Rule::new().count(counter));
        batch.rule(counter, Rule::new().at_most(rate, burst).log(LOG_GROUP, counter));
        let end = Rule::new();
        batch.rule(
            counter,
            if matches!(counter, "denied" | "blocked") { end.reject() } else { end.drop() },
        );
    }
    batch.rule("new", Rule::new().connections_over(connections).goto("flood"));
    batch.rule("new", Rule::new().accept());

    // Before connections are tracked, so that forgeries leave no trace there.
    batch.base_chain("prerouting", (Hook::Prerouting, -300), Kind::Filter, Policy::Accept);
    batch.rule("prerouting", Rule::new().ipv6().goto("ipv6"));
    batch.rule("prerouting", Rule::new().from(TAP).source_not(GUEST).goto("forged"));

    batch.base_chain("input", (Hook::Input, 0), Kind::Filter, Policy::Drop);
    let resolver = Rule::new().from(TAP).ipv4().destination(GATEWAY.into());
    batch.rule("input", resolver.protocol(UDP).ports(53, 53).accept());
    batch.rule("input", Rule::new().from(TAP).goto("denied"));

    batch.base_chain("output", (Hook::Output, 0), Kind::Filter, Policy::Drop);
    batch.rule("output", Rule::new().to(TAP).ipv4().protocol(UDP).source_port(53).accept());
    // Rejections and "fragmentation needed".
    batch.rule("output", Rule::new().to(TAP).ipv4().protocol(ICMP).accept());

    batch.base_chain("forward", (Hook::Forward, 0), Kind::Filter, Policy::Drop);
    batch.rule("forward", Rule::new().established().accept());
    batch.rule("forward", Rule::new().invalid().drop());
    batch.rule("forward", Rule::new().not_from(TAP).drop());
    batch.rule("forward", Rule::new().jump("named"));
    for net in blocked_nets() {
        batch.rule("forward", Rule::new().destination(net).goto("blocked"));
    }
    batch.rule("forward", Rule::new().jump("host"));
    batch.rule("forward", Rule::new().jump("allow"));
    batch.rule("forward", Rule::new().flow_in(OPEN).goto("new"));
    batch.rule("forward", Rule::new().goto("denied"));

    batch.base_chain("postrouting", (Hook::Postrouting, 100), Kind::Nat, Policy::Accept);
    batch.rule("postrouting", Rule::new().not_to(TAP).masquerade());
    batch
}

/// What lets a policy's addresses out of a namespace, and keeps it off those of the host that no
/// rule names. (The host drops what comes to it anyway. Here, it is told.)
pub(crate) fn allow(egress: &Egress, host: &[Ipv4Addr]) -> Batch {
    let mut batch = Batch::of(TABLE);
    let named: Vec<_> = named_addresses(egress).collect();
    for address in host.iter().filter(|address| !named.contains(address) && !is_blocked(**address))
    {
        batch.rule("host", Rule::new().destination((*address).into()).goto("blocked"));
    }
    for rule in &egress.rules {
        let net = match &rule.to {
            Destination::Net(net) => *net,
            Destination::Anywhere => Ipv4Net::default(),
            Destination::Name(_) => continue,
        };
        let chain = if rule.names_blocked() { "named" } else { "allow" };
        for matching in matches(rule, net) {
            batch.rule(chain, matching.goto("new"));
        }
    }
    batch
}

fn matches(rule: &Allowed, net: Ipv4Net) -> Vec<Rule> {
    let with = |protocol: u8| {
        let matching = Rule::new().destination(net).protocol(protocol);
        match (protocol, rule.ports) {
            (ICMP, _) => matching.icmp_type(ECHO_REQUEST),
            (_, Some((first, last))) => matching.ports(first, last),
            (_, None) => matching,
        }
    };
    match rule.protocol {
        Protocol::Tcp => vec![with(TCP)],
        Protocol::Udp => vec![with(UDP)],
        Protocol::Icmp => vec![with(ICMP)],
        Protocol::Any => vec![with(TCP), with(UDP), with(ICMP)],
    }
}

/// The protocols of a name's rule as numbers.
pub(crate) fn numbers(protocol: Protocol) -> &'static [u8] {
    match protocol {
        Protocol::Tcp => &[TCP],
        Protocol::Udp => &[UDP],
        Protocol::Icmp => &[],
        Protocol::Any => &[TCP, UDP],
    }
}

/// A protocol's name, or its number.
pub(crate) fn protocol_name(number: u8) -> String {
    match number {
        TCP => "tcp".to_owned(),
        UDP => "udp".to_owned(),
        ICMP => "icmp".to_owned(),
        ICMPV6 => "icmpv6".to_owned(),
        other => other.to_string(),
    }
}

/// The host's filter. `guard`: this host forwarded nothing before, and goes on forwarding nothing
/// but what comes from sandboxes.
pub(crate) fn host(guard: bool) -> Batch {
    const ENTRANCE: u32 = (7 << 6) | 7;
    let wires = Ipv4Net::new(WIRE_ADDRESSES.0, WIRE_ADDRESSES.1).unwrap_or_default();
    let mut batch = Batch::of(HOST_TABLE);
    batch.create_table();
    batch.counter("host");
    batch.counter("blocked");
    batch.set(NAMED, ENTRANCE, 8, 65_536);
    batch.chain("refused");
    batch.chain("told");
    let (rate, burst) = LOG_RATE;
    batch.rule("told", Rule::new().at_most(rate, burst).log(HOST_LOG_GROUP, "wall"));
    batch.rule("told", Rule::new().drop());
    batch.rule("refused", Rule::new().count("blocked"));
    batch.rule("refused", Rule::new().goto("told"));
    batch.chain("leaving");
    batch.rule("leaving", Rule::new().ipv6().goto("refused"));
    batch.rule("leaving", Rule::new().to(WIRES).goto("refused"));
    batch.rule("leaving", Rule::new().established().accept());
    batch.rule("leaving", Rule::new().entrance_in(NAMED).accept());
    for net in blocked_nets() {
        batch.rule("leaving", Rule::new().destination(net).goto("refused"));
    }
    batch.rule("leaving", Rule::new().accept());

    batch.base_chain("forward", (Hook::Forward, -10), Kind::Filter, Policy::Accept);
    batch.rule("forward", Rule::new().from(WIRES).goto("leaving"));
    batch.rule("forward", Rule::new().to(WIRES).established().accept());
    batch.rule("forward", Rule::new().to(WIRES).drop());
    if guard {
        batch.rule("forward", Rule::new().drop());
    }

    batch.base_chain("input", (Hook::Input, -10), Kind::Filter, Policy::Accept);
    let entering = || Rule::new().from(WIRES);
    batch.rule("input", entering().ipv4().entrance_in(NAMED).accept());
    batch.rule("input", entering().count("host"));
    batch.rule("input", entering().goto("told"));

    batch.base_chain("postrouting", (Hook::Postrouting, 100), Kind::Nat, Policy::Accept);
    let own = Rule::new().ipv4().source(wires).not_to(WIRES);
    batch.rule("postrouting", own.masquerade());
    batch
}

/// What a rule that names a blocked destination, or one of the host's own addresses, opens on the
/// host: single addresses only.
pub(crate) fn named_addresses(egress: &Egress) -> impl Iterator<Item = Ipv4Addr> {
    egress.rules.iter().filter_map(|rule| match &rule.to {
        Destination::Net(net) if net.prefix_len() == 32 => Some(net.addr()),
        _ => None,
    })
}
