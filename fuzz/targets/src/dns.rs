//! What a guest asks the resolver, and what a resolver answers.

/// Runs one input: the length of the guest's packet in a byte, the packet, and what answers it.
pub fn run(bytes: &[u8]) {
    let Some((length, packets)) = bytes.split_first() else { return };
    let (question, answer) = packets.split_at(usize::from(*length).min(packets.len()));
    parbake_node::network::fuzz_names(question, answer);
}
