//! A kernel's build configuration (`/boot/config-RELEASE`), and which of it is worth recording.

use std::collections::BTreeMap;

/// Options that decide how a bundle boots, restores or keeps a sandbox apart; recorded in every
/// bundle, `n` when the configuration does not set them.
const RECORDED: &[&str] = &[
    "CONFIG_EXT4_FS",
    "CONFIG_HZ",
    "CONFIG_INIT_ON_ALLOC_DEFAULT_ON",
    "CONFIG_KVM_GUEST",
    "CONFIG_MODULE_SIG_FORCE",
    "CONFIG_OVERLAY_FS",
    "CONFIG_PREEMPT_DYNAMIC",
    "CONFIG_PVH",
    "CONFIG_RANDOMIZE_BASE",
    "CONFIG_RANDOM_TRUST_BOOTLOADER",
    "CONFIG_RANDOM_TRUST_CPU",
    "CONFIG_SERIAL_8250_CONSOLE",
    "CONFIG_VIRTIO_BLK",
    "CONFIG_VIRTIO_MMIO",
    "CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES",
    "CONFIG_VIRTIO_NET",
    "CONFIG_VIRTIO_VSOCKETS",
    "CONFIG_VMGENID",
];

/// Parses `CONFIG_X=value` lines; comments and anything else are skipped.
#[must_use]
pub fn parse(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter_map(|line| line.trim().split_once('='));
    lines
        .filter(|(name, _)| name.starts_with("CONFIG_"))
        .map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned()))
        .collect()
}

/// The facts worth recording; empty when the configuration is not known.
#[must_use]
pub fn facts(config: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    if config.is_empty() {
        return BTreeMap::new();
    }
    let value = |name: &str| config.get(name).cloned().unwrap_or_else(|| "n".to_owned());
    RECORDED.iter().map(|name| ((*name).to_owned(), value(name))).collect()
}
