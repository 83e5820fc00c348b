//! The block device (VIRTIO 1.2, 5.2): a read-only base with a private copy-on-write overlay.
//!
//! Requests are done in order and at once, straight between files and guest memory; nothing is
//! ever in flight between two calls, so quiescing has nothing to wait for. A flush has nothing to
//! do either: the overlay is meant to vanish with the monitor. A volume that outlives it is
//! another matter ([`direct`]).

mod direct;
mod map;
mod overlay;

use std::fs::File;
use std::path::Path;

use parbake_protocol::vmm::Disk;
use serde::{Deserialize, Serialize};

use self::direct::Direct;
use self::map::SavedMap;
use self::overlay::{DiskError, Layers};
use super::ring::{self, Buffers, Chain};
use super::{Activation, DeviceError, Progress, SavedDevice, VirtioDevice};
use crate::filling::DiskFilling;

const KIND: &str = "block";
/// A volume that outlives the machine, as states know it.
const VOLUME: &str = "workspace";
const VERSION: u32 = 1;
const DEVICE_TYPE: u32 = 2;
const QUEUE_SIZES: [u16; 1] = [256];

const SECTOR: u64 = 512;
const HEADER: usize = 16;
const ID: usize = 20;

/// Most segments of a request, and most bytes of each: together the most a request can ask.
const SEGMENTS: u32 = 126;
const SEGMENT_BYTES: u32 = 128 << 10;
const MAX_REQUEST: usize = (SEGMENTS * SEGMENT_BYTES) as usize;
/// Limits of one discard or write-zeroes request.
const ZERO_SECTORS: u32 = 1 << 21;
const ZERO_SEGMENTS: usize = 16;
/// When a pass over the queue ends, so that other devices get their turn.
const PASS_CHAINS: usize = 256;
const PASS_BYTES: usize = 32 << 20;

const F_SIZE_MAX: u64 = 1 << 1;
const F_SEG_MAX: u64 = 1 << 2;
const F_RO: u64 = 1 << 5;
const F_BLK_SIZE: u64 = 1 << 6;
const F_FLUSH: u64 = 1 << 9;
const F_TOPOLOGY: u64 = 1 << 10;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

const S_OK: u8 = 0;
const S_IOERR: u8 = 1;
const S_UNSUPP: u8 = 2;

/// Why a request is refused.
enum Refused {
    /// The driver asked for something that is not to be had.
    Request(u8),
    /// The disk could not.
    Disk(DiskError),
}

impl From<DiskError> for Refused {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

/// Trouble on the host's side, told once: a guest could cause it again and again.
enum Trouble {
    None,
    New(DiskError),
    Told,
}

/// Where the blocks are.
enum Backing {
    Layers(Layers),
    Direct(Direct),
}

/// The block device.
pub struct Block {
    backing: Backing,
    read_only: bool,
    config: [u8; 60],
    id: [u8; ID],
    trouble: Trouble,
    full: Full,
}

/// Whether the write limit has been reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Full {
    No,
    New,
    Told,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    map: SavedMap,
    read_only: bool,
}

impl Block {
    /// Opens the files `disk` names and an empty private overlay. Copies nothing.
    pub fn open(disk: &Disk) -> Result<Self, DeviceError> {
        let layers = Layers::open(disk)?;
        let config = config_space(layers.sectors());
        Ok(Self::new(Backing::Layers(layers), config, disk.read_only))
    }

    /// The slot for a volume that outlives the machine; empty without `file`.
    pub fn open_volume(file: Option<&Path>) -> Result<Self, DeviceError> {
        let direct = Direct::open(file)?;
        let config = config_space(direct.sectors());
        Ok(Self::new(Backing::Direct(direct), config, false))
    }

    fn new(backing: Backing, config: [u8; 60], read_only: bool) -> Self {
        let (id, trouble, full) = ([0; ID], Trouble::None, Full::No);
        let mut block = Self { backing, read_only, config, id, trouble, full };
        block.set_id("parbake");
        block
    }

    /// Asks before each read of a file that is not all there yet.
    pub fn fill_from(&mut self, filling: DiskFilling) {
        if let Backing::Layers(layers) = &mut self.backing {
            layers.fill_from(filling);
        }
    }

    /// Sets what the guest reads as the disk's serial number; 20 bytes of it.
    pub fn set_id(&mut self, id: &str) {
        self.id = [0; ID];
        for (to, from) in self.id.iter_mut().zip(id.bytes()) {
            *to = from;
        }
    }

    /// Does one request; how many bytes were written to the guest.
    fn request(&mut self, mut chain: Chain<'_>) -> Result<u32, DeviceError> {
        let Some(mut status) = chain.writable.split_tail(1) else {
            return Err(DeviceError::Driver("a disk request without room for its status".into()));
        };
        let mut header = [0u8; HEADER];
        if chain.readable.read(&mut header) < HEADER {
            return Err(DeviceError::Driver("a disk request without a whole header".into()));
        }
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let kind = u32::from_le_bytes([t0, t1, t2, t3]);
        let sector = u64::from_le_bytes(sector);
        let room = chain.writable.len();
        let outcome = self.execute(kind, sector, chain.readable, chain.writable);
        let (code, written) = match outcome {
            Ok(written) => (S_OK, written as u32 + 1),
            // `len` promises that the bytes before it were written (2.7.8.2): after a failure that
            // holds for the status only where nothing was to come before it.
            Err(refused) => (self.refuse(refused), u32::from(room == 0)),
        };
        status.write(&[code]);
        Ok(written)
    }

    fn execute(
        &mut self,
        kind: u32,
        sector: u64,
        readable: Buffers<'_>,
        mut writable: Buffers<'_>,
    ) -> Result<usize, Refused> {
        let offset = sector.checked_mul(SECTOR).ok_or(Refused::Request(S_IOERR));
        match kind {
            T_IN => {
                let len = whole_sectors(writable.len())?;
                match &self.backing {
                    Backing::Layers(layers) => layers.read(offset?, writable)?,
                    Backing::Direct(direct) => direct.read(offset?, writable)?,
                }
                Ok(len)
            }
            T_OUT => {
                whole_sectors(readable.len())?;
                self.writable()?;
                match &mut self.backing {
                    Backing::Layers(layers) => layers.write(offset?, readable)?,
                    Backing::Direct(direct) => direct.write(offset?, readable)?,
                }
                Ok(0)
            }
            T_FLUSH => {
                if let Backing::Direct(direct) = &self.backing {
                    direct.flush()?;
                }
                Ok(0)
            }
            T_GET_ID => Ok(writable.write(&self.id)),
            T_DISCARD | T_WRITE_ZEROES => {
                self.writable()?;
                self.zero(kind, readable)?;
                Ok(0)
            }
            _ => Err(Refused::Request(S_UNSUPP)),
        }
    }

    /// The status byte for a refusal; keeps the host's first trouble for the machine to tell.
    fn refuse(&mut self, refused: Refused) -> u8 {
        match refused {
            Refused::Request(code) => return code,
            Refused::Disk(DiskError::Range) => {}
            Refused::Disk(error) => {
                if matches!(error, DiskError::Limit) && self.full == Full::No {
                    self.full = Full::New;
                }
                if matches!(self.trouble, Trouble::None) {
                    self.trouble = Trouble::New(error);
                }
            }
        }
        S_IOERR
    }

    fn writable(&self) -> Result<(), Refused> {
        if self.read_only { Err(Refused::Request(S_IOERR)) } else { Ok(()) }
    }

    /// Both commands give zeroes: a discarded block is given back and reads as such.
    fn zero(&mut self, kind: u32, mut segments: Buffers<'_>) -> Result<(), Refused> {
        if segments.len() == 0
            || !segments.len().is_multiple_of(16)
            || segments.len() / 16 > ZERO_SEGMENTS
        {
            return Err(Refused::Request(S_IOERR));
        }
        let mut raw = [0u8; 16];
        while segments.read(&mut raw) == raw.len() {
            let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = raw;
            let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
            let count = u32::from_le_bytes([n0, n1, n2, n3]);
            let flags = u32::from_le_bytes([f0, f1, f2, f3]);
            // Bit 0, "unmap", means something for write-zeroes only (5.2.6.2).
            if flags & !1 != 0 || (kind == T_DISCARD && flags != 0) {
                return Err(Refused::Request(S_UNSUPP));
            }
            if count > ZERO_SECTORS {
                return Err(Refused::Request(S_IOERR));
            }
            let offset = sector.checked_mul(SECTOR).ok_or(Refused::Request(S_IOERR))?;
            let len = u64::from(count) * SECTOR;
            match &mut self.backing {
                Backing::Layers(layers) => layers.zero(offset, len)?,
                Backing::Direct(direct) => direct.zero(offset, len)?,
            }
        }
        Ok(())
    }
}

fn whole_sectors(len: usize) -> Result<usize, Refused> {
    if !len.is_multiple_of(SECTOR as usize) || len > MAX_REQUEST {
        Err(Refused::Request(S_IOERR))
    } else {
        Ok(len)
    }
}

/// `struct virtio_blk_config` (5.2.4).
fn config_space(sectors: u64) -> [u8; 60] {
    let mut config = [0u8; 60];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    put(8, &SEGMENT_BYTES.to_le_bytes());
    put(12, &SEGMENTS.to_le_bytes());
    put(20, &(SECTOR as u32).to_le_bytes());
    // 8 sectors to a physical block, none of them offset; 4 KiB is also the best size.
    put(24, &[3, 0]);
    put(26, &8u16.to_le_bytes());
    put(36, &ZERO_SECTORS.to_le_bytes());
    put(40, &(ZERO_SEGMENTS as u32).to_le_bytes());
    // Discards aligned to a block give its space back.
    put(44, &8u32.to_le_bytes());
    put(48, &ZERO_SECTORS.to_le_bytes());
    put(52, &(ZERO_SEGMENTS as u32).to_le_bytes());
    put(56, &[1]);
    config
}

impl VirtioDevice for Block {
    fn kind(&self) -> &'static str {
        match self.backing {
            Backing::Layers(_) => KIND,
            Backing::Direct(_) => VOLUME,
        }
    }

    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        let common = F_SIZE_MAX | F_SEG_MAX | F_BLK_SIZE | F_FLUSH | F_TOPOLOGY;
        common | if self.read_only { F_RO } else { F_DISCARD | F_WRITE_ZEROES }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_bytes(&self.config, offset, data);
    }

    fn queue_event(
        &mut self,
        active: &mut Activation,
        _index: usize,
    ) -> Result<Progress, DeviceError> {
        let Activation { memory, queues, interrupt, .. } = active;
        let Some(queue) = queues.first_mut() else { return Ok(Progress::Idle) };
        let (mut chains, mut bytes) = (0, 0);
        let progress = loop {
            let Some(chain) = ring::pop(queue, memory)? else {
                break ring::rearm(queue, memory)?;
            };
            chains += 1;
            bytes += (chain.readable.len() + chain.writable.len()).min(MAX_REQUEST);
            let head = chain.head;
            let written = self.request(chain)?;
            ring::push_used(queue, memory, head, written)?;
            if chains == PASS_CHAINS || bytes >= PASS_BYTES {
                break Progress::More;
            }
        };
        if chains > 0 {
            ring::notify(queue, memory, interrupt)?;
        }
        Ok(progress)
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        match &self.backing {
            Backing::Layers(layers) => {
                let saved = Saved { map: layers.saved_map(), read_only: self.read_only };
                SavedDevice::encode(KIND, VERSION, &saved)
            }
            // What is mounted in the frozen machine would be changed behind its back.
            Backing::Direct(direct) if direct.is_there() => Err(DeviceError::state(
                VOLUME,
                "a machine that has a workspace is not written out; take it off first",
            )),
            Backing::Direct(_) => SavedDevice::encode(VOLUME, VERSION, &()),
        }
    }

    fn restore(
        &mut self,
        saved: &SavedDevice,
        active: Option<&mut Activation>,
    ) -> Result<(), DeviceError> {
        let layers = match &mut self.backing {
            Backing::Layers(layers) => layers,
            Backing::Direct(direct) => {
                saved.decode::<()>(VOLUME, VERSION)?;
                if let (true, Some(active)) = (direct.is_there(), active) {
                    // It was frozen without sectors; now there are some.
                    active.interrupt.signal_config();
                }
                return Ok(());
            }
        };
        let saved: Saved = saved.decode(KIND, VERSION)?;
        if saved.read_only != self.read_only {
            return Err(DeviceError::state(KIND, "read-only there and writable here, or reverse"));
        }
        layers.restore_map(&saved.map).map_err(|what| DeviceError::state(KIND, what))
    }

    fn write_disk(&self, out: &File) -> Result<Option<u64>, DeviceError> {
        let Backing::Layers(layers) = &self.backing else { return Ok(None) };
        let written = layers.write_overlay(out);
        written.map(Some).map_err(|error| DeviceError::io("writing a disk's overlay", error))
    }

    fn take_trouble(&mut self) -> Option<DeviceError> {
        let trouble = std::mem::replace(&mut self.trouble, Trouble::Told);
        let error = match trouble {
            Trouble::New(error) => error,
            other => {
                self.trouble = other;
                return None;
            }
        };
        let source = match error {
            DiskError::Io(source) => source,
            other => std::io::Error::other(other.to_string()),
        };
        Some(DeviceError::io(
            "a disk request of the guest failed (later ones are not told)",
            source,
        ))
    }

    fn take_full(&mut self) -> bool {
        let new = self.full == Full::New;
        if new {
            self.full = Full::Told;
        }
        new
    }

    fn overlay_bytes(&self) -> Option<u64> {
        match &self.backing {
            Backing::Layers(layers) => Some(layers.private_bytes()),
            Backing::Direct(_) => None,
        }
    }
}

#[cfg(test)]
mod tests;
