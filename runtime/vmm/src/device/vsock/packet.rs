//! The header of a vsock packet (VIRTIO 1.2, 5.10.6).
//!
//! The `virtio-vsock` crate parses packets too, but wants the payload in one descriptor; newer
//! Linux drivers spread it over several. A header is 44 bytes: reading it here costs less than the
//! detour.

/// Size of a header.
pub(super) const HEADER: usize = 44;

/// The host's context id.
pub(super) const HOST_CID: u64 = 2;

/// The only kind of socket offered.
pub(super) const TYPE_STREAM: u16 = 1;

/// `VIRTIO_VSOCK_OP_*`.
pub(super) mod op {
    pub(in super::super) const REQUEST: u16 = 1;
    pub(in super::super) const RESPONSE: u16 = 2;
    pub(in super::super) const RST: u16 = 3;
    pub(in super::super) const SHUTDOWN: u16 = 4;
    pub(in super::super) const RW: u16 = 5;
    pub(in super::super) const CREDIT_UPDATE: u16 = 6;
    pub(in super::super) const CREDIT_REQUEST: u16 = 7;
}

/// `VIRTIO_VSOCK_SHUTDOWN_RCV`: the sender receives no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// `VIRTIO_VSOCK_SHUTDOWN_SEND`: the sender sends no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
/// Both.
pub(super) const SHUTDOWN_BOTH: u32 = 3;

/// A connection's ends. The guest's CID is not part of it: it changes with a restore, and then
/// there are no connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// A header, in whatever direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn decode(raw: &[u8; HEADER]) -> Self {
        let word = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: word(28) as u16,
            op: (word(28) >> 16) as u16,
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut raw = [0u8; HEADER];
        let mut put = |at: usize, bytes: &[u8]| raw[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        raw
    }

    /// The ports of a packet the guest sent.
    pub(super) fn ports_from_guest(&self) -> Ports {
        Ports { host: self.dst_port, guest: self.src_port }
    }

    /// A refusal of this packet.
    pub(super) fn reset_for(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: op::RST,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_round_trip_and_has_the_specified_layout() {
        let header = Header {
            src_cid: 0x0102_0304_0506_0708,
            dst_cid: HOST_CID,
            src_port: 0x1111_2222,
            dst_port: 0x3333_4444,
            len: 5,
            kind: TYPE_STREAM,
            op: op::RW,
            flags: SHUTDOWN_BOTH,
            buf_alloc: 0x5555_6666,
            fwd_cnt: 0x7777_8888,
        };
        let raw = header.encode();
        assert_eq!(Header::decode(&raw), header);
        assert_eq!(raw[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(raw[28..32], [1, 0, 5, 0]);
        assert_eq!(raw[40..], [0x88, 0x88, 0x77, 0x77]);
    }
}
