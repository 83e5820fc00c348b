//! A sandbox's way out: a namespace with a tap in it, a policy, and a resolver.
//!
//! ```text
//! egress   what may be reached, as people write it
//! pool     namespaces prepared in advance; a lease is one sandbox's
//! rules    the packet filters inside and on the host        nft      how they are told the kernel
//! guard    the thread beside a sandbox: names, denials      names    the name service's messages
//! netlink  links, addresses, routes                         log      what the filter denied
//! ```

pub mod egress;
mod guard;
pub(crate) mod kernel;
mod log;
mod names;
mod netlink;
mod nft;
pub mod pool;
mod rules;
mod wall;

pub use egress::Egress;
pub use guard::EgressCounts;
pub use pool::{Lease, NetworkError, Pool, PoolOptions};

#[cfg(test)]
mod tests;
