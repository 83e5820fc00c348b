//! The monitor's ports: the doorbell, one 32-bit `OUT` that tells what no polling should have to
//! find out, and the host's clock, read at the very moment it is wanted.
#![allow(unsafe_code)]

use std::io;

use parbake_protocol::vmm::{CLOCK_PORTS, DOORBELL_PORT};

/// Writes `value` to the doorbell port. On a machine without one the write goes nowhere.
///
/// # Errors
/// The kernel does not let this process at I/O ports.
#[cfg(target_arch = "x86_64")]
pub fn ring(value: u32) -> io::Result<()> {
    // SAFETY: asks for access to the doorbell's four bytes of port space, for this thread only.
    if unsafe { libc::ioperm(DOORBELL_PORT.into(), 4, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the port belongs to the monitor's doorbell, which only takes note of the value;
    // access was granted above; no memory is touched.
    unsafe {
        std::arch::asm!(
            "out dx, eax",
            in("dx") DOORBELL_PORT,
            in("eax") value,
            options(nomem, nostack, preserves_flags)
        );
    }
    // SAFETY: gives back what was granted above.
    unsafe { libc::ioperm(DOORBELL_PORT.into(), 4, 0) };
    Ok(())
}

/// There is no doorbell on this architecture.
///
/// # Errors
/// Always.
#[cfg(not(target_arch = "x86_64"))]
pub fn ring(_value: u32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The host's wall clock in nanoseconds since 1970, from the monitor. `None` on a machine without
/// that port.
///
/// # Errors
/// The kernel does not let this process at I/O ports.
#[cfg(target_arch = "x86_64")]
pub fn host_clock() -> io::Result<Option<u64>> {
    let [first, second] = CLOCK_PORTS;
    let (from, count) = (first.into(), u64::from(second - first) + 4);
    // SAFETY: asks for access to the clock's eight bytes of port space, for this thread only.
    if unsafe { libc::ioperm(from, count, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let read = |port: u16| {
        let value: u32;
        // SAFETY: the port belongs to the monitor's clock or to an empty bus; reading it changes
        // nothing but the monitor's note of the moment; access was granted above.
        unsafe {
            std::arch::asm!(
                "in eax, dx",
                in("dx") port,
                out("eax") value,
                options(nomem, nostack, preserves_flags)
            );
        }
        value
    };
    let (low, high) = (read(first), read(second));
    // SAFETY: gives back what was granted above.
    unsafe { libc::ioperm(from, count, 0) };
    Ok((high != u32::MAX).then(|| u64::from(high) << 32 | u64::from(low)))
}

/// There is no such port on this architecture.
///
/// # Errors
/// Never.
#[cfg(not(target_arch = "x86_64"))]
pub fn host_clock() -> io::Result<Option<u64>> {
    Ok(None)
}
