//! The guest's network interface.

use std::fs;
use std::io;

use parbake_protocol::agent::NetworkConfig;

use crate::kernel::{LinkChange, add_default_route, change_link};

/// Switches the loopback interface on.
///
/// # Errors
/// The kernel has no IPv4.
pub fn loopback() -> io::Result<()> {
    change_link("lo", LinkChange::Up)
}

/// Gives an interface its identity. It goes down and up in between, which forgets the routes and
/// neighbours of the machine this one was cloned from.
///
/// # Errors
/// Names the setting that was refused.
pub fn configure(config: &NetworkConfig) -> io::Result<()> {
    let change = |what: &str, change| {
        change_link(&config.interface, change)
            .map_err(|e| named(&format!("{} {what}", config.interface), &e))
    };
    change("down", LinkChange::Down)?;
    // Announces the new address to whoever still remembers another machine at it.
    let setting = |family: &str, name: &str, value: &str| {
        fs::write(format!("/proc/sys/net/{family}/conf/{}/{name}", config.interface), value)
    };
    setting("ipv4", "arp_notify", "1").map_err(|e| named("arp_notify", &e))?;
    // It does not leave the sandbox; programs that find no address of it do not try. A kernel
    // without IPv6 has no such file.
    let _ = setting("ipv6", "disable_ipv6", "1");
    if let Some(mac) = config.mac {
        change("hardware address", LinkChange::Mac(mac))?;
    }
    change("address", LinkChange::Address(config.address))?;
    change("mask", LinkChange::Mask(mask(config.prefix)))?;
    change("up", LinkChange::Up)?;
    if let Some(gateway) = config.gateway {
        add_default_route(gateway).map_err(|e| named("default route", &e))?;
    }
    Ok(())
}

/// Switches an interface off that a frozen machine had on, so that a clone without a network is
/// told so at once. A machine that has no such interface, or has it off, is left alone.
///
/// # Errors
/// The kernel refused.
pub fn off(interface: &str) -> io::Result<()> {
    let Ok(flags) = fs::read_to_string(format!("/sys/class/net/{interface}/flags")) else {
        return Ok(());
    };
    let flags = flags.trim().strip_prefix("0x").unwrap_or_default();
    match u32::from_str_radix(flags, 16) {
        Ok(flags) if flags & 1 != 0 => change_link(interface, LinkChange::Down),
        _ => Ok(()),
    }
}

/// The content of `/etc/resolv.conf`.
pub fn resolver(servers: &[[u8; 4]]) -> String {
    servers.iter().map(|[a, b, c, d]| format!("nameserver {a}.{b}.{c}.{d}\n")).collect()
}

fn mask(prefix: u8) -> [u8; 4] {
    let host_bits = 32u32.saturating_sub(prefix.into());
    u32::MAX.checked_shl(host_bits).unwrap_or(0).to_be_bytes()
}

fn named(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot set {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::mask;

    #[test]
    fn masks() {
        let table = [(0, [0; 4]), (8, [255, 0, 0, 0]), (30, [255, 255, 255, 252]), (32, [255; 4])];
        for (prefix, wanted) in table {
            assert_eq!(mask(prefix), wanted, "/{prefix}");
        }
        assert_eq!(mask(200), [255; 4]);
    }
}
