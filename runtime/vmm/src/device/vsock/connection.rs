//! One connection: a unix stream on the host's side, a pair of ports on the guest's.
//!
//! ```text
//!  host connects:  Asked ──REQUEST──► Requested ──RESPONSE from guest──► Established
//!  guest connects:                              Accepted ──RESPONSE──────► Established
//!  end:            Established ──SHUTDOWN both from guest, RST either way──► Draining ─► gone
//! ```
//! A draining connection is unknown to the guest already; it only lives until the host has taken
//! what the guest sent before. Each direction can end by itself: the guest's `SHUTDOWN` with one
//! flag half-closes the stream, the stream's end becomes a `SHUTDOWN` with one flag.
//!
//! Buffers: to the guest none, data goes from the stream into its buffers, at most its credit; from
//! the guest one, of at most the credit it was given ([`BUFFER`] bytes), used only while the host's
//! reader is slow.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::num::Wrapping;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::packet::{
    HOST_CID, Header, Ports, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM, op,
};
use crate::device::ring::Buffers;
use crate::device::sys;

/// Credit given to the guest: the most it may send before the host has taken any of it.
pub(super) const BUFFER: u32 = 128 << 10;

/// The most payload in one packet to the guest.
const MAX_PAYLOAD: usize = 64 << 10;

/// Where a connection is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The host wants it; the guest has not been told.
    Asked,
    /// The guest has been asked.
    Requested,
    /// The guest wanted it; it has not been told that it has it.
    Accepted,
    /// Both sides have it.
    Established,
    /// The guest is done with it, or must be told so by `RST`.
    Draining,
}

/// The guest broke the protocol on this connection; it is reset.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation;

/// What the guest's packet leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The connection goes on.
    Keep,
    /// The guest forgot the connection: its ports are free, what it sent is still delivered.
    Release,
}

/// One connection.
pub(super) struct Connection {
    stream: UnixStream,
    pub(super) ports: Ports,
    pub(super) state: State,
    /// Waits for its turn to send to the guest.
    pub(super) queued: bool,
    /// The guest still gets a `RST`.
    reset: bool,
    credit_update: bool,
    /// The stream may have data, or its end, for the guest.
    readable: bool,
    ended: bool,
    hung_up: bool,
    /// The guest's half-close was passed on.
    half_closed: bool,
    /// The host takes no more of what the guest sends.
    deaf: bool,
    /// What the guest was told by `SHUTDOWN`, and what it said itself.
    told_shutdown: u32,
    guest_shutdown: u32,
    /// The guest's receive buffer and how much of what was sent it has taken.
    guest_buffer: u32,
    guest_taken: Wrapping<u32>,
    sent: Wrapping<u32>,
    asked_credit: bool,
    /// From the guest, not yet taken by the host.
    backlog: VecDeque<u8>,
    taken: Wrapping<u32>,
    told_taken: Wrapping<u32>,
}

impl Connection {
    /// A connection over the nonblocking `stream`.
    pub(super) fn new(stream: UnixStream, ports: Ports, state: State) -> Self {
        Self {
            stream,
            ports,
            state,
            queued: false,
            reset: false,
            credit_update: false,
            readable: true,
            ended: false,
            hung_up: false,
            half_closed: false,
            deaf: false,
            told_shutdown: 0,
            guest_shutdown: 0,
            guest_buffer: 0,
            guest_taken: Wrapping(0),
            sent: Wrapping(0),
            asked_credit: false,
            backlog: VecDeque::new(),
            taken: Wrapping(0),
            told_taken: Wrapping(0),
        }
    }

    /// Takes note of the credit every packet of the guest carries.
    pub(super) fn note_credit(&mut self, header: &Header) {
        self.guest_buffer = header.buf_alloc;
        self.guest_taken = Wrapping(header.fwd_cnt);
        if self.credit() > 0 {
            self.asked_credit = false;
        }
    }

    /// Bytes the guest can take. A guest that claims nonsense has none.
    fn credit(&self) -> u32 {
        self.guest_buffer.saturating_sub((self.sent - self.guest_taken).0)
    }

    /// The stream became readable, writable or hung up.
    pub(super) fn note_host(&mut self, readable: bool, hung_up: bool) {
        self.readable |= readable && !self.ended;
        self.hung_up |= hung_up;
    }

    /// The host's end is gone and the guest never heard of the connection.
    pub(super) fn is_abandoned(&self) -> bool {
        self.hung_up && self.state == State::Asked
    }

    /// The guest accepted. The client learns which host port it got.
    pub(super) fn established(&mut self) -> Result<(), Violation> {
        if self.state != State::Requested {
            return Err(Violation);
        }
        self.state = State::Established;
        let line = format!("OK {}\n", self.ports.host);
        match rustix::net::send(&self.stream, line.as_bytes(), SendFlags::NOSIGNAL) {
            Ok(count) if count == line.len() => {}
            // An empty socket buffer has room for a line; so the client is gone.
            _ => self.deafen(),
        }
        Ok(())
    }

    /// Data from the guest: to the stream, and what it does not take to the backlog.
    pub(super) fn receive(&mut self, mut data: Buffers<'_>) -> Result<(), Violation> {
        let open = matches!(self.state, State::Established | State::Accepted);
        if !open || self.guest_shutdown & SHUTDOWN_SEND != 0 {
            return Err(Violation);
        }
        if self.backlog.len() + data.len() > BUFFER as usize {
            return Err(Violation);
        }
        while self.backlog.is_empty() && data.len() > 0 && !self.deaf {
            match sys::send(&self.stream, data.slices()) {
                Ok(count) => {
                    data.take(count);
                    self.taken += count as u32;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => self.deafen(),
            }
        }
        if self.deaf {
            self.taken += data.len() as u32;
        } else {
            let mut rest = vec![0; data.len()];
            data.read(&mut rest);
            self.backlog.extend(rest);
        }
        self.consider_credit_update();
        Ok(())
    }

    /// The stream may be writable: passes on the backlog, and then the guest's half-close.
    pub(super) fn flush(&mut self) {
        while !self.backlog.is_empty() {
            let (front, _) = self.backlog.as_slices();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.stream, front, flags) {
                Ok(count) => {
                    self.backlog.drain(..count);
                    self.taken += count as u32;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    self.deafen();
                    return;
                }
            }
        }
        if self.backlog.is_empty() {
            if self.backlog.capacity() > 0 {
                self.backlog = VecDeque::new();
            }
            if self.guest_shutdown & SHUTDOWN_SEND != 0 && !self.half_closed {
                self.half_closed = true;
                let _ = self.stream.shutdown(Shutdown::Write);
            }
        }
        self.consider_credit_update();
    }

    /// The host's reader is gone: what the guest sends goes nowhere, and the guest is told.
    fn deafen(&mut self) {
        self.deaf = true;
        self.taken += self.backlog.len() as u32;
        self.backlog = VecDeque::new();
    }

    fn consider_credit_update(&mut self) {
        if (self.taken - self.told_taken).0 >= BUFFER / 4 {
            self.credit_update = true;
        }
    }

    /// The guest asks for its credit.
    pub(super) fn answer_credit(&mut self) {
        self.credit_update = true;
    }

    /// The guest's `SHUTDOWN`.
    pub(super) fn shut_down(&mut self, flags: u32) -> Result<Outcome, Violation> {
        if !matches!(self.state, State::Established | State::Accepted) {
            return Err(Violation);
        }
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            let _ = self.stream.shutdown(Shutdown::Read);
            self.readable = false;
        }
        self.flush();
        if self.guest_shutdown == SHUTDOWN_BOTH {
            // The guest waits for the answer; nothing more can come from it.
            self.reset();
        }
        Ok(Outcome::Keep)
    }

    /// The guest's `RST`. What it sent before an orderly end is still delivered.
    pub(super) fn reset_by_guest(&mut self) -> Outcome {
        self.state = State::Draining;
        self.reset = false;
        if self.guest_shutdown & SHUTDOWN_SEND == 0 {
            self.deafen();
        }
        Outcome::Release
    }

    /// Ends the connection towards the guest with a `RST`.
    pub(super) fn reset(&mut self) {
        self.state = State::Draining;
        self.reset = true;
    }

    /// Ends it because the guest broke the protocol: nothing more is delivered.
    pub(super) fn abort(&mut self) {
        self.deafen();
        self.reset();
    }

    /// Nobody needs this connection any more.
    pub(super) fn is_finished(&self) -> bool {
        self.state == State::Draining && !self.reset && self.backlog.is_empty()
    }

    /// Whether [`Self::produce`] has something.
    pub(super) fn has_packet(&self) -> bool {
        match self.state {
            State::Asked | State::Accepted => true,
            State::Requested => self.hung_up,
            State::Draining => self.reset,
            State::Established => {
                self.credit_update
                    || self.shutdown_due() != 0
                    || self.may_read() && (self.credit() > 0 || !self.asked_credit)
            }
        }
    }

    fn may_read(&self) -> bool {
        self.readable && !self.ended && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// What the guest should be told by `SHUTDOWN` and was not.
    fn shutdown_due(&self) -> u32 {
        let mut due = 0;
        if self.ended {
            due |= SHUTDOWN_SEND;
        }
        if self.deaf || self.ended && self.hung_up {
            due |= SHUTDOWN_RECEIVE;
        }
        if due & !self.told_shutdown != 0 { due } else { 0 }
    }

    /// The next packet to the guest, its payload in `room`; `None` if there is none after all.
    pub(super) fn produce(&mut self, guest_cid: u64, room: &Buffers<'_>) -> Option<Header> {
        let (op, flags, len) = self.next(room)?;
        self.credit_update = false;
        self.told_taken = self.taken;
        Some(Header {
            src_cid: HOST_CID,
            dst_cid: guest_cid,
            src_port: self.ports.host,
            dst_port: self.ports.guest,
            len,
            kind: TYPE_STREAM,
            op,
            flags,
            buf_alloc: BUFFER,
            fwd_cnt: self.taken.0,
        })
    }

    fn next(&mut self, room: &Buffers<'_>) -> Option<(u16, u32, u32)> {
        match self.state {
            State::Asked => {
                self.state = State::Requested;
                return Some((op::REQUEST, 0, 0));
            }
            State::Requested if self.hung_up => {
                self.state = State::Draining;
                return Some((op::RST, 0, 0));
            }
            State::Requested => return None,
            State::Accepted => {
                self.state = State::Established;
                return Some((op::RESPONSE, 0, 0));
            }
            State::Draining => {
                return std::mem::take(&mut self.reset).then_some((op::RST, 0, 0));
            }
            State::Established => {}
        }
        if self.may_read()
            && self.credit() > 0
            && let Some(len) = self.read(room)
        {
            return Some((op::RW, 0, len));
        }
        let shutdown = self.shutdown_due();
        if shutdown != 0 {
            self.told_shutdown = shutdown;
            return Some((op::SHUTDOWN, shutdown, 0));
        }
        if self.credit_update {
            return Some((op::CREDIT_UPDATE, 0, 0));
        }
        if self.may_read() && self.credit() == 0 && !self.asked_credit {
            self.asked_credit = true;
            return Some((op::CREDIT_REQUEST, 0, 0));
        }
        None
    }

    /// Moves stream data into `room`; `None` when there is none now.
    ///
    /// The room is not used up: when nothing came, the next connection gets the same.
    fn read(&mut self, room: &Buffers<'_>) -> Option<u32> {
        let wanted = room.len().min(MAX_PAYLOAD).min(self.credit() as usize);
        let part = room.clone().take(wanted);
        match sys::readv(&self.stream, part.slices()) {
            Ok(0) => self.ended = true,
            Ok(count) => {
                self.sent += count as u32;
                return Some(count as u32);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => self.readable = false,
            Err(_) => {
                self.ended = true;
                self.hung_up = true;
            }
        }
        None
    }
}
