//! Which way guests run: on this machine's KVM, or in the lab.

use std::fmt;
use std::str::FromStr;

use crate::probe::{HostReport, Item, State};

/// What the user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostChoice {
    /// KVM where it can run stock guests, else the lab.
    #[default]
    Auto,
    /// KVM, even one that looks unable to: for bare guests and special kernels.
    Kvm,
    /// The lab.
    Lab,
}

/// Which way guests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostMode {
    /// On `/dev/kvm`.
    Kvm,
    /// In the lab.
    Lab,
}

/// A word that is none of the choices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a host: say auto, kvm or lab")]
pub struct ParseHostError(String);

impl FromStr for HostChoice {
    type Err = ParseHostError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Kvm),
            "lab" => Ok(Self::Lab),
            other => Err(ParseHostError(other.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for HostChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Lab => "lab",
        })
    }
}

/// Guests cannot run the way that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// Neither way.
    #[error("guests can run neither on KVM ({kvm}) nor in the lab ({lab})")]
    Neither {
        /// What KVM lacks.
        kvm: String,
        /// What the lab lacks.
        lab: String,
        /// What to do.
        hints: Vec<String>,
    },
    /// `/dev/kvm` was asked for and cannot be used.
    #[error("--host kvm: {kvm}")]
    NoKvm {
        /// What it lacks.
        kvm: String,
        /// What to do.
        hints: Vec<String>,
    },
    /// The lab was asked for and cannot be started.
    #[error("--host lab: {lab}")]
    NoLab {
        /// What it lacks.
        lab: String,
        /// What to do.
        hints: Vec<String>,
    },
}

impl ModeError {
    /// What the user can do, one sentence each.
    #[must_use]
    pub fn hints(&self) -> &[String] {
        match self {
            Self::Neither { hints, .. } | Self::NoKvm { hints, .. } | Self::NoLab { hints, .. } => {
                hints
            }
        }
    }
}

/// What is wrong with each item, in one line.
fn reasons<'a>(items: impl Iterator<Item = &'a Item>) -> String {
    let texts = items.filter_map(|item| match &item.state {
        State::Missing { why, .. } => Some(format!("{}: {why}", item.title)),
        State::Ok { .. } => None,
    });
    texts.collect::<Vec<_>>().join("; ")
}

fn fixes<'a>(items: impl Iterator<Item = &'a Item>) -> Vec<String> {
    let texts = items.filter_map(|item| match &item.state {
        State::Missing { fix, .. } => Some(fix.clone()),
        State::Ok { .. } => None,
    });
    let mut texts: Vec<String> = texts.collect();
    texts.dedup();
    texts
}

impl HostChoice {
    /// Settles how guests run on the machine that `report` describes.
    ///
    /// # Errors
    /// What is missing, and how to mend it.
    pub fn resolve(self, report: &HostReport) -> Result<HostMode, ModeError> {
        let lab = || reasons(report.lab_obstacles());
        let kvm = || reasons(report.kvm_obstacles());
        match self {
            Self::Auto if report.kvm_usable => Ok(HostMode::Kvm),
            Self::Auto | Self::Lab if report.lab_usable => Ok(HostMode::Lab),
            Self::Auto => Err(ModeError::Neither {
                kvm: kvm(),
                lab: lab(),
                hints: fixes(report.lab_obstacles().chain(report.kvm_obstacles())),
            }),
            Self::Lab => Err(ModeError::NoLab { lab: lab(), hints: fixes(report.lab_obstacles()) }),
            Self::Kvm if report.missing(&["kvm-device"]).next().is_none() => Ok(HostMode::Kvm),
            Self::Kvm => Err(ModeError::NoKvm {
                kvm: reasons(report.missing(&["kvm-device"])),
                hints: fixes(report.missing(&["kvm-device"])),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(present: &[&str]) -> HostReport {
        let ids = ["kvm-device", "cpu-virtualization", "qemu", "virtiofsd", "memory"];
        let items: Vec<Item> = ids
            .into_iter()
            .map(|id| Item {
                id,
                title: id,
                needed_for: "tests",
                state: if present.contains(&id) {
                    State::Ok { detail: String::new() }
                } else {
                    State::Missing { why: "gone".into(), fix: format!("install {id}") }
                },
            })
            .collect();
        let all = |ids: &[&str]| ids.iter().all(|id| present.contains(id));
        HostReport {
            kvm_usable: all(&["kvm-device", "cpu-virtualization"]),
            lab_usable: all(&["qemu", "virtiofsd", "memory"]),
            items,
        }
    }

    #[test]
    fn every_choice_on_every_kind_of_machine() {
        use HostChoice::{Auto, Kvm, Lab};
        let lab: &[&str] = &["qemu", "virtiofsd", "memory"];
        let hardware: &[&str] = &["kvm-device", "cpu-virtualization"];
        let software: &[&str] = &["kvm-device", "qemu", "virtiofsd", "memory"];
        let cases = [
            (hardware, Auto, Ok(HostMode::Kvm)),
            (hardware, Kvm, Ok(HostMode::Kvm)),
            (hardware, Lab, Err("--host lab: qemu: gone; virtiofsd: gone; memory: gone")),
            (software, Auto, Ok(HostMode::Lab)),
            (software, Kvm, Ok(HostMode::Kvm)),
            (lab, Auto, Ok(HostMode::Lab)),
            (lab, Kvm, Err("--host kvm: kvm-device: gone")),
            (&[], Lab, Err("--host lab: qemu: gone; virtiofsd: gone; memory: gone")),
        ];
        for (machine, choice, expected) in cases {
            let actual = choice.resolve(&report(machine)).map_err(|error| error.to_string());
            assert_eq!(actual, expected.map_err(str::to_owned), "{choice} on {machine:?}");
        }
        let error = Auto.resolve(&report(&["memory"])).unwrap_err();
        assert!(error.to_string().contains("kvm-device: gone"), "{error}");
        assert_eq!(error.hints()[..2], ["install qemu", "install virtiofsd"]);
    }

    #[test]
    fn choices_parse_as_they_print() {
        for choice in [HostChoice::Auto, HostChoice::Kvm, HostChoice::Lab] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("KVM".parse::<HostChoice>().is_err());
    }
}
