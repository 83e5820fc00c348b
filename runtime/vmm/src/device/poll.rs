//! The host side of a device as one descriptor.
//!
//! Two nested epoll sets: the inner one watches the device's sockets; the outer one, which the
//! machine's event loop sees, watches the inner one. Taking the inner set out of the outer one is
//! all it takes to be silent while the device is quiet, and nothing that happens meanwhile is lost.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::DeviceError;

/// The most events taken in one pass.
const EVENTS: usize = 64;

/// Token of [`Poll::ring`].
pub(super) const DOORBELL: u64 = u64::MAX;

/// The descriptor, and what is behind it.
pub(super) struct Poll {
    outer: OwnedFd,
    inner: OwnedFd,
    doorbell: OwnedFd,
    paused: bool,
}

fn failed(error: rustix::io::Errno) -> DeviceError {
    DeviceError::io("watching a device's host side", error)
}

impl Poll {
    pub(super) fn new() -> Result<Self, DeviceError> {
        let outer = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        let inner = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let doorbell = eventfd(0, flags).map_err(failed)?;
        let poll = Self { outer, inner, doorbell, paused: true };
        poll.watch(&poll.doorbell, DOORBELL, EventFlags::IN)?;
        let mut poll = poll;
        poll.resume()?;
        Ok(poll)
    }

    /// What the event loop polls.
    pub(super) fn fd(&self) -> RawFd {
        self.outer.as_raw_fd()
    }

    /// Watches `fd`; its events carry `token`.
    pub(super) fn watch(
        &self,
        fd: impl AsFd,
        token: u64,
        flags: EventFlags,
    ) -> Result<(), DeviceError> {
        epoll::add(&self.inner, fd, EventData::new_u64(token), flags).map_err(failed)
    }

    /// Stops watching `fd`. (Closing it has the same effect.)
    pub(super) fn forget(&self, fd: impl AsFd) -> Result<(), DeviceError> {
        epoll::delete(&self.inner, fd).map_err(failed)
    }

    /// Makes the descriptor readable, until the next [`Self::events`].
    pub(super) fn ring(&self) {
        // Fails only when it is ringing already.
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
    }

    /// What happened, as tokens and flags; does not wait.
    pub(super) fn events(&self) -> Result<Vec<(u64, EventFlags)>, DeviceError> {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let buffer = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.inner, buffer, Some(&now)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        }
        let mut happened = Vec::with_capacity(events.len());
        for event in events {
            // The structure is packed: copy its fields out.
            let (token, flags) = ({ event.data }.u64(), event.flags);
            if token == DOORBELL {
                let _ = rustix::io::read(&self.doorbell, &mut [0u8; 8]);
            } else {
                happened.push((token, flags));
            }
        }
        Ok(happened)
    }

    /// From here on the descriptor is not readable.
    pub(super) fn pause(&mut self) -> Result<(), DeviceError> {
        if !self.paused {
            epoll::delete(&self.outer, &self.inner).map_err(failed)?;
            self.paused = true;
        }
        Ok(())
    }

    /// The reverse of [`Self::pause`].
    pub(super) fn resume(&mut self) -> Result<(), DeviceError> {
        if self.paused {
            let data = EventData::new_u64(0);
            epoll::add(&self.outer, &self.inner, data, EventFlags::IN).map_err(failed)?;
            self.paused = false;
        }
        Ok(())
    }
}
