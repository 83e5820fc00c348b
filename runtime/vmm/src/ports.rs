//! Port I/O: serial console, keyboard-controller reset, ACPI power registers, the doorbell and the
//! host's clock.
//!
//! Everything else reads as ones and swallows writes, like an empty bus.

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use parbake_protocol::vmm::{CLOCK_PORTS, DOORBELL_PORT, StopReason, doorbell};
use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::layout;

/// What a port access means beyond the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The doorbell rang with this value.
    Doorbell(u32),
    /// The guest ends.
    Stop(StopReason),
}

/// Raises the serial port's interrupt.
struct Line(EventFd);

impl Trigger for Line {
    type E = std::io::Error;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.write(1)
    }
}

/// The console's log, cut off at a limit so that a guest cannot fill the host's disk.
struct ConsoleLog {
    file: Option<File>,
    room: u64,
}

impl Write for ConsoleLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let length = bytes.len() as u64;
        if let Some(file) = &mut self.file {
            // A full disk must not stop the guest: the log is a convenience.
            if length <= self.room {
                self.room -= length;
                if file.write_all(bytes).is_err() {
                    self.file = None;
                }
            } else {
                let _ =
                    file.write_all(b"\n[parbake: console limit reached, the rest is dropped]\n");
                self.file = None;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The saved serial port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSerial {
    /// Baud divisor low and high, interrupt enable and identification, line control and status,
    /// modem control and status, scratch.
    pub registers: [u8; 9],
    /// Received, not yet read; at most 64 bytes.
    pub received: Vec<u8>,
}

/// The port bus of one machine.
pub struct Ports {
    serial: Mutex<Serial<Line, NoEvents, ConsoleLog>>,
    /// The moment the guest last asked for; not part of the state, as it is out of date at once.
    asked: AtomicU64,
}

impl Ports {
    /// A bus whose console output goes to `console` until `limit` bytes are written. `interrupt`
    /// is wired to [`layout::SERIAL_GSI`].
    pub fn new(console: Option<File>, limit: u64, interrupt: EventFd) -> Self {
        let log = ConsoleLog { file: console, room: limit };
        Self { serial: Mutex::new(Serial::new(Line(interrupt), log)), asked: AtomicU64::new(0) }
    }

    /// Like [`Self::new`], continuing a saved port; false when the state is impossible.
    pub fn restored(
        console: Option<File>,
        limit: u64,
        interrupt: EventFd,
        saved: &SavedSerial,
    ) -> Option<Self> {
        let [low, high, ier, iir, lcr, lsr, mcr, msr, scratch] = saved.registers;
        let state = SerialState {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: ier,
            interrupt_identification: iir,
            line_control: lcr,
            line_status: lsr,
            modem_control: mcr,
            modem_status: msr,
            scratch,
            in_buffer: saved.received.clone(),
        };
        let log = ConsoleLog { file: console, room: limit };
        let serial = Serial::from_state(&state, Line(interrupt), NoEvents, log).ok()?;
        Some(Self { serial: Mutex::new(serial), asked: AtomicU64::new(0) })
    }

    /// The serial port's state. Only while no vCPU runs.
    pub fn save(&self) -> SavedSerial {
        let state = self.serial.lock().unwrap_or_else(PoisonError::into_inner).state();
        SavedSerial {
            registers: [
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            received: state.in_buffer,
        }
    }

    /// A vCPU wrote to a port.
    pub fn write(&self, port: u16, data: &[u8]) -> Effect {
        match (port, data) {
            (DOORBELL_PORT, &[a, b, c, d]) => match u32::from_le_bytes([a, b, c, d]) {
                doorbell::POWER_OFF => Effect::Stop(StopReason::PowerOff),
                value => Effect::Doorbell(value),
            },
            (layout::SLEEP_CONTROL_PORT, &[value]) => {
                const SLP_EN: u8 = 1 << 5;
                if value & SLP_EN != 0 && (value >> 2) & 7 == layout::S5_TYPE {
                    Effect::Stop(StopReason::PowerOff)
                } else {
                    Effect::None
                }
            }
            (layout::RESET_PORT, &[layout::RESET_VALUE]) => Effect::Stop(StopReason::Reset),
            (layout::I8042_PORT, &[0xfe]) => Effect::Stop(StopReason::Reset),
            (layout::SERIAL_PORT..=0x3ff, bytes) => {
                let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
                let offset = (port - layout::SERIAL_PORT) as u8;
                for &byte in bytes {
                    // Only a full interrupt counter can fail here, and then one is pending anyway.
                    let _ = serial.write(offset, byte);
                }
                Effect::None
            }
            _ => Effect::None,
        }
    }

    /// A vCPU reads a port.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        match port {
            layout::SERIAL_PORT..=0x3ff => {
                let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
                let offset = (port - layout::SERIAL_PORT) as u8;
                data.iter_mut().for_each(|byte| *byte = serial.read(offset));
            }
            port if CLOCK_PORTS.contains(&port) && data.len() == 4 => {
                if port == CLOCK_PORTS[0] {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
                    self.asked.store(now, Ordering::Relaxed);
                }
                let bytes = self.asked.load(Ordering::Relaxed).to_le_bytes();
                let half = if port == CLOCK_PORTS[0] { &bytes[..4] } else { &bytes[4..] };
                data.copy_from_slice(half);
            }
            layout::I8042_PORT | layout::SLEEP_CONTROL_PORT..=layout::RESET_PORT => data.fill(0),
            _ => data.fill(0xff),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(console: Option<File>, limit: u64) -> Ports {
        Ports::new(console, limit, EventFd::new(libc::EFD_NONBLOCK).expect("eventfd"))
    }

    #[test]
    fn power_reset_and_doorbell_have_effects_and_the_rest_has_none() {
        let bus = ports(None, 0);
        let cases: [(u16, &[u8], Effect); 9] = [
            (DOORBELL_PORT, &[1, 0x10, 0, 0], Effect::Doorbell(0x1001)),
            (DOORBELL_PORT, &[2, 0, 0, 0], Effect::Stop(StopReason::PowerOff)),
            (DOORBELL_PORT, &[2], Effect::None),
            (0x600, &[0x34], Effect::Stop(StopReason::PowerOff)),
            (0x600, &[0x14], Effect::None),
            (0x602, &[1], Effect::Stop(StopReason::Reset)),
            (0x64, &[0xfe], Effect::Stop(StopReason::Reset)),
            (0x64, &[0xd1], Effect::None),
            (0xcf8, &[0, 0, 0, 0x80], Effect::None),
        ];
        for (port, data, effect) in cases {
            assert_eq!(bus.write(port, data), effect, "port {port:#x} data {data:?}");
        }
        let mut data = [0; 4];
        bus.read(0xcfc, &mut data);
        assert_eq!(data, [0xff; 4]);
    }

    #[test]
    fn the_clock_gives_both_halves_of_one_moment() {
        let ports = ports(None, 0);
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let mut bytes = [0; 8];
        let (low, high) = bytes.split_at_mut(4);
        ports.read(CLOCK_PORTS[0], low);
        ports.read(CLOCK_PORTS[1], high);
        let told = u64::from_le_bytes(bytes);
        let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        assert!((before..=after).contains(&told), "{before} {told} {after}");
        // Other widths are an empty bus.
        let mut byte = [0];
        ports.read(CLOCK_PORTS[0], &mut byte);
        assert_eq!(byte, [0xff]);
    }

    #[test]
    fn the_console_stops_at_its_limit_with_one_line_saying_so() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let bus = ports(Some(file.reopen().expect("reopen")), 5);
        for byte in b"hello world" {
            bus.write(layout::SERIAL_PORT, &[*byte]);
        }
        let text = std::fs::read_to_string(file.path()).expect("read");
        assert_eq!(text, "hello\n[parbake: console limit reached, the rest is dropped]\n");
    }

    #[test]
    fn a_saved_serial_port_comes_back_equal() {
        let bus = ports(None, 0);
        bus.write(layout::SERIAL_PORT + 7, &[0x5a]);
        bus.write(layout::SERIAL_PORT + 1, &[0x03]);
        let saved = bus.save();
        let line = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        let again = Ports::restored(None, 0, line, &saved).expect("possible state");
        assert_eq!(again.save(), saved);
        let mut scratch = [0];
        again.read(layout::SERIAL_PORT + 7, &mut scratch);
        assert_eq!(scratch, [0x5a]);
    }
}
