//! A sandbox's way out: a namespace with a tap in it, a policy, and a resolver.

pub mod egress;

pub use egress::Egress;
