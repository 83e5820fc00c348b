//! What a namespace's packet filter says about the packets it denied (`nfnetlink_log`).

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use netlink_packet_core::NetlinkPayload;
use netlink_packet_netfilter::nflog::{
    ConfigCmd, ConfigMode, PacketNla, Timeout, ULogMessage, config_request,
};
use netlink_packet_netfilter::{NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::netlink::Netlink;
use super::rules;

/// A denied packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denied {
    /// Where it came from.
    pub source: Option<Ipv4Addr>,
    /// Where it would have gone.
    pub destination: String,
    /// Its port, where the protocol has ports and the packet was long enough.
    pub port: Option<u16>,
    /// The protocol's name.
    pub protocol: String,
    /// Which rule denied it.
    pub prefix: String,
}

/// A listener to one group, in the namespace its maker was in.
#[derive(Debug)]
pub(crate) struct Log(Netlink);

impl Log {
    pub(crate) fn open(group: u16) -> io::Result<Self> {
        let mut socket = Netlink::open(NETLINK_NETFILTER)?;
        let mode = ConfigMode::new_packet(rules::LOGGED);
        let timeout: Timeout = Duration::from_millis(50).into();
        let message = config_request(
            NetfilterProtoFamily::Unspec,
            group,
            vec![ConfigCmd::Bind.into(), mode.into(), timeout.into()],
        );
        let NetlinkPayload::InnerMessage(message) = message.payload else {
            return Err(io::Error::other("not a request"));
        };
        socket.request(message, 0)?;
        Ok(Self(socket))
    }

    /// What was denied since the last look, without waiting.
    pub(crate) fn take(&self) -> Vec<Denied> {
        let mut denied = Vec::new();
        // Bounded, so that a flood does not keep names from being answered.
        for _ in 0..16 {
            match self.0.poll::<NetfilterMessage>() {
                Ok(messages) => denied.extend(messages.into_iter().filter_map(|message| {
                    let NetlinkPayload::InnerMessage(message) = message.payload else {
                        return None;
                    };
                    let NetfilterMessageInner::ULog(ULogMessage::Packet(attributes)) =
                        message.inner
                    else {
                        return None;
                    };
                    read(&attributes)
                })),
                // The kernel says that it dropped some; the counters have them.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(_) => break,
            }
        }
        denied
    }
}

impl AsFd for Log {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn read(attributes: &[PacketNla]) -> Option<Denied> {
    let mut prefix = String::new();
    let mut packet = None;
    for attribute in attributes {
        match attribute {
            PacketNla::Prefix(text) => prefix = text.to_string_lossy().into_owned(),
            PacketNla::Payload(bytes) => packet = Some(bytes),
            _ => {}
        }
    }
    let packet = packet?;
    let (destination, port, protocol) = headers(packet)?;
    Some(Denied { source: source(packet), destination, port, protocol, prefix })
}

/// Where an IPv4 packet came from.
fn source(packet: &[u8]) -> Option<Ipv4Addr> {
    let address: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
    (packet.first()? >> 4 == 4).then(|| address.into())
}

/// Destination, port and protocol of an IP packet, as far as it goes.
fn headers(packet: &[u8]) -> Option<(String, Option<u16>, String)> {
    let (destination, protocol, rest) = match packet.first()? >> 4 {
        4 => {
            let length = usize::from(packet.first()? & 0xf) * 4;
            let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
            (Ipv4Addr::from(address).to_string(), *packet.get(9)?, packet.get(length..))
        }
        6 => {
            let address: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            (Ipv6Addr::from(address).to_string(), *packet.get(6)?, packet.get(40..))
        }
        _ => return None,
    };
    let port = match protocol {
        6 | 17 | 132 | 136 => rest
            .and_then(|rest| rest.get(2..4))
            .and_then(|port| port.try_into().ok())
            .map(u16::from_be_bytes),
        _ => None,
    };
    Some((destination, port, rules::protocol_name(protocol)))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::{headers, source};

    #[test]
    fn reads_what_there_is_of_a_packet() {
        let mut tcp = vec![0x45; 1];
        tcp.resize(24, 0);
        tcp[9] = 6;
        tcp[16..20].copy_from_slice(&[10, 0, 0, 9]);
        tcp[22..24].copy_from_slice(&443u16.to_be_bytes());
        assert_eq!(headers(&tcp), Some(("10.0.0.9".into(), Some(443), "tcp".into())));
        tcp[12..16].copy_from_slice(&[198, 18, 0, 1]);
        assert_eq!(source(&tcp), Some(Ipv4Addr::new(198, 18, 0, 1)));
        assert_eq!(source(&tcp[..15]), None);
        assert_eq!(source(&[0x60; 44]), None);
        // Options push the ports away; a cut packet has none.
        tcp[0] = 0x46;
        assert_eq!(headers(&tcp), Some(("10.0.0.9".into(), None, "tcp".into())));
        for length in 0..20 {
            assert_eq!(headers(&tcp[..length]), None);
        }
        let mut six = vec![0x60; 44];
        six[6] = 17;
        assert!(headers(&six).is_some_and(|(_, port, name)| port == Some(0x6060) && name == "udp"));
        assert_eq!(headers(&[0x50; 60]), None);
    }
}
