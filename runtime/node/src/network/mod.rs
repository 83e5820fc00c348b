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

/// Reads a guest's question and what a resolver says to it, for `fuzz`.
#[doc(hidden)]
pub fn fuzz_names(question: &[u8], answer: &[u8]) {
    if let Ok(question) = names::question(question) {
        let id = answer.first_chunk().map_or(0, |id| u16::from_be_bytes(*id));
        let said = names::answer(answer, id, &question).unwrap_or(names::Answer::Failed);
        assert!(question.answer(&said).len() <= 512, "an answer fits into a datagram");
        assert!(question.to_resolver(id).len() <= 512);
    }
}

#[cfg(test)]
mod tests;
