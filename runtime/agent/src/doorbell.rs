//! The doorbell: one 32-bit `OUT` tells the monitor what no polling should have to find out.
#![allow(unsafe_code)]

use std::io;

use parbake_protocol::vmm::DOORBELL_PORT;

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
