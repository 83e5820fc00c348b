//! The guest's network interface.

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
