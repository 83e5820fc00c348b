//! The distance between a vCPU's time-stamp counter and the host's (Linux,
//! `Documentation/virt/kvm/devices/vcpu.rst`, "KVM_VCPU_TSC_CTRL"); kvm-ioctls has no call for it
//! on x86.
//!
//! Writing each vCPU's counter would set each a little later than the one before; offsets keep
//! them exactly as far apart as they were.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)`.
pub const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;
/// `_IOW(KVMIO, 0xe2, struct kvm_device_attr)`.
pub const KVM_GET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee2;

/// The vCPU's offset; none on hosts before Linux 5.16.
pub fn offset(fd: &VcpuFd) -> Option<u64> {
    let mut value = 0u64;
    call(fd, KVM_GET_DEVICE_ATTR, &mut value).then_some(value)
}

/// Sets the vCPU's offset; false where the host cannot.
pub fn set_offset(fd: &VcpuFd, mut value: u64) -> bool {
    call(fd, KVM_SET_DEVICE_ATTR, &mut value)
}

fn call(fd: &VcpuFd, request: libc::c_ulong, value: &mut u64) -> bool {
    let attr = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: std::ptr::from_mut(value) as u64,
    };
    // SAFETY: `attr` and the 8 bytes it points at live through the call; the attribute is a u64.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw const attr) == 0 }
}
