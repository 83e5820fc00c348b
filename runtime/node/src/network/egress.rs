//! What a sandbox may reach: nothing but what is named.
//!
//! ```text
//! allow=10.0.0.5:443            one address, one TCP port
//! allow=10.1.0.0/16:8000-8100   a network, a range of ports
//! allow=10.0.0.53:53/udp        UDP
//! allow=10.0.0.5/icmp           echo requests
//! allow=10.0.0.5                every TCP and UDP port, and echo requests
//! allow=packages.example:443    whatever address our own resolver has just been given for the name
//! allow=*.packages.example:443  any name below it
//! allow=*                       any address, and every name is answered; also `*:443` and the like
//! ```
//! Some destinations stay closed whatever a wider rule says: this host itself, cloud metadata
//! (169.254.0.0/16), loopback, multicast and the like ([`ALWAYS_BLOCKED`]). A rule that names
//! nothing but such an address or a network inside one of them opens it. An answer of the name
//! service never does.
//!
//! IPv6 does not leave a sandbox: it is switched off in the guest and dropped outside.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// Most rules one sandbox can have.
pub const MAX_RULES: usize = 128;

/// Most ports of one rule for a name: each is opened by itself for each address.
pub const MAX_NAME_PORTS: u16 = 16;

/// Networks that no rule for a wider network and no name opens (RFC 6890; RFC 3927 for metadata
/// services): address and prefix length.
pub const ALWAYS_BLOCKED: &[(Ipv4Addr, u8)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    // Metadata services of clouds that do not keep to 169.254.0.0/16.
    (Ipv4Addr::new(100, 100, 100, 200), 32),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    // The inside of every sandbox, and the wires from sandboxes to the host.
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// What one sandbox may reach.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Egress {
    /// Whatever matches any of them may leave; none: nothing may.
    pub rules: Vec<Rule>,
}

/// One destination that may be reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rule {
    /// Where.
    pub to: Destination,
    /// By which protocol.
    pub protocol: Protocol,
    /// First and last port; absent: every port.
    pub ports: Option<(u16, u16)>,
}

/// Where a rule leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A network, or an address as a network of one.
    Net(Ipv4Net),
    /// A name.
    Name(NamePattern),
    /// Any address and any name.
    Anywhere,
}

/// A protocol a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP echo.
    Icmp,
    /// All of them.
    Any,
}

/// A host name, or all names below one. Lower case, without a final dot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern {
    name: String,
    below: bool,
}

/// Why a rule is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{rule:?} is not a destination: {why}")]
pub struct RuleError {
    rule: String,
    why: &'static str,
}

impl Egress {
    /// Parses `none`, or rules separated by commas, each with or without `allow=` in front.
    ///
    /// # Errors
    /// [`RuleError`] names the first word that is no rule.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let text = text.trim();
        if text == "none" {
            return Ok(Self::default());
        }
        let rules = text
            .split(',')
            .map(|word| {
                let word = word.trim();
                word.strip_prefix("allow=").unwrap_or(word).parse()
            })
            .collect::<Result<Vec<Rule>, _>>()?;
        if rules.len() > MAX_RULES {
            return Err(RuleError { rule: text.to_owned(), why: "too many destinations" });
        }
        Ok(Self { rules })
    }

    /// Whether nothing may leave.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.rules.is_empty()
    }

    /// The rules whose name patterns match `name` (lower case, no final dot).
    pub fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Rule> {
        self.rules.iter().filter(move |rule| match &rule.to {
            Destination::Name(pattern) => pattern.matches(name),
            Destination::Anywhere => true,
            Destination::Net(_) => false,
        })
    }
}

impl Rule {
    /// Whether it leads to a name.
    #[must_use]
    pub fn has_name(&self) -> bool {
        matches!(self.to, Destination::Name(_))
    }

    /// Whether this rule names a destination that is otherwise always blocked.
    #[must_use]
    pub fn names_blocked(&self) -> bool {
        match &self.to {
            Destination::Net(net) => blocked_nets().any(|blocked| blocked.contains(net)),
            Destination::Name(_) | Destination::Anywhere => false,
        }
    }
}

/// [`ALWAYS_BLOCKED`] as networks.
pub fn blocked_nets() -> impl Iterator<Item = Ipv4Net> {
    ALWAYS_BLOCKED.iter().filter_map(|&(address, prefix)| Ipv4Net::new(address, prefix).ok())
}

/// Whether an address is in one of [`ALWAYS_BLOCKED`].
#[must_use]
pub fn is_blocked(address: Ipv4Addr) -> bool {
    blocked_nets().any(|net| net.contains(&address))
}

impl NamePattern {
    /// Whether `name` (lower case, no final dot) is meant.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        if self.below {
            name.strip_suffix(&self.name)
                .and_then(|rest| rest.strip_suffix('.'))
                .is_some_and(|rest| !rest.is_empty())
        } else {
            name == self.name
        }
    }
}

impl FromStr for NamePattern {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (below, name) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        if name.len() > 253 || !name.split('.').all(label) {
            return Err("neither an IPv4 address or network nor a host name");
        }
        // Otherwise a mistyped address would be looked up.
        if name.rsplit('.').next().is_some_and(|top| top.bytes().all(|b| b.is_ascii_digit())) {
            return Err("neither an IPv4 address or network nor a host name");
        }
        if below && !name.contains('.') {
            return Err("a whole top-level domain; name at least two labels");
        }
        Ok(Self { name, below })
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        parse_rule(text).map_err(|why| RuleError { rule: text.to_owned(), why })
    }
}

fn parse_rule(text: &str) -> Result<Rule, &'static str> {
    if text.contains('[') || text.matches(':').count() > 1 {
        return Err("IPv6 does not leave a sandbox");
    }
    let (rest, protocol) = match text.rsplit_once('/') {
        Some((rest, "tcp")) => (rest, Some(Protocol::Tcp)),
        Some((rest, "udp")) => (rest, Some(Protocol::Udp)),
        Some((rest, "icmp")) => (rest, Some(Protocol::Icmp)),
        _ => (text, None),
    };
    let (place, ports) = match rest.split_once(':') {
        Some((place, ports)) => (place, Some(parse_ports(ports)?)),
        None => (rest, None),
    };
    if protocol == Some(Protocol::Icmp) && ports.is_some() {
        return Err("ICMP has no ports");
    }
    let to = if place == "*" {
        Destination::Anywhere
    } else if let Ok(address) = place.parse::<Ipv4Addr>() {
        Destination::Net(Ipv4Net::from(address))
    } else if place.contains('/') {
        let net: Ipv4Net = place.parse().map_err(|_| "not a network, a protocol or a port")?;
        Destination::Net(net.trunc())
    } else {
        Destination::Name(place.parse()?)
    };
    if matches!(to, Destination::Name(_)) {
        match ports {
            None => return Err("a name needs a port, as in packages.example:443"),
            Some((first, last)) if last - first >= MAX_NAME_PORTS => {
                return Err("too many ports for a name");
            }
            Some(_) => {}
        }
    }
    let protocol = protocol.unwrap_or(if ports.is_some() { Protocol::Tcp } else { Protocol::Any });
    Ok(Rule { to, protocol, ports })
}

fn parse_ports(text: &str) -> Result<(u16, u16), &'static str> {
    let port = |text: &str| match text.parse::<u16>() {
        Ok(0) | Err(_) => Err("ports are 1 to 65535"),
        Ok(port) => Ok(port),
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    if first > last { Err("the range of ports is empty") } else { Ok((first, last)) }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below { "*." } else { "" }, self.name)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.to {
            Destination::Net(net) if net.prefix_len() == 32 => write!(f, "{}", net.addr())?,
            Destination::Net(net) => write!(f, "{net}")?,
            Destination::Name(name) => write!(f, "{name}")?,
            Destination::Anywhere => write!(f, "*")?,
        }
        match self.ports {
            Some((first, last)) if first == last => write!(f, ":{first}")?,
            Some((first, last)) => write!(f, ":{first}-{last}")?,
            None => {}
        }
        match (self.protocol, self.ports) {
            (Protocol::Udp, _) => write!(f, "/udp"),
            (Protocol::Icmp, _) => write!(f, "/icmp"),
            (Protocol::Tcp, None) => write!(f, "/tcp"),
            (Protocol::Tcp, Some(_)) | (Protocol::Any, _) => Ok(()),
        }
    }
}

impl fmt::Display for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rules.is_empty() {
            return write!(f, "none");
        }
        let words: Vec<String> = self.rules.iter().map(|rule| format!("allow={rule}")).collect();
        write!(f, "{}", words.join(","))
    }
}

impl FromStr for Egress {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        Self::parse(text)
    }
}

impl TryFrom<String> for Rule {
    type Error = RuleError;

    fn try_from(text: String) -> Result<Self, RuleError> {
        text.parse()
    }
}

impl From<Rule> for String {
    fn from(rule: Rule) -> Self {
        rule.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_and_written_back() {
        let table = [
            ("10.0.0.5:443", "10.0.0.5:443"),
            ("10.0.0.5:443/tcp", "10.0.0.5:443"),
            ("10.0.0.53:53/udp", "10.0.0.53:53/udp"),
            ("10.1.2.3/16:8000-8100", "10.1.0.0/16:8000-8100"),
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("10.0.0.5/icmp", "10.0.0.5/icmp"),
            ("10.0.0.5/tcp", "10.0.0.5/tcp"),
            ("Packages.Example.:443", "packages.example:443"),
            ("*.packages.example:443", "*.packages.example:443"),
            ("0.0.0.0/0:80", "0.0.0.0/0:80"),
            ("*", "*"),
            ("*:443", "*:443"),
            ("*/icmp", "*/icmp"),
        ];
        for (text, written) in table {
            let rule: Rule = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(rule.to_string(), written, "{text}");
            assert_eq!(written.parse::<Rule>(), Ok(rule), "{text}");
        }
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "",
            ":443",
            "10.0.0.5:0",
            "10.0.0.5:70000",
            "10.0.0.5:9-1",
            "10.0.0.256:80",
            "[::1]:80",
            "fd00::1",
            "packages.example",
            "*.example:443",
            "*.",
            "**",
            "a..b:1",
            "10.0.0.0/33:1",
            "x y:1",
            "10.0.0.5:80/icmp",
            "a.example/icmp",
            "a.example:1-99",
            "10.0.0.5/sctp",
            "10.0.0.5:http",
            "-:",
            "999:1",
        ] {
            assert!(text.parse::<Rule>().is_err(), "{text:?} was taken");
        }
        let long = format!("{}:1", "a".repeat(64));
        assert!(long.parse::<Rule>().is_err());
    }

    #[test]
    fn a_policy_is_none_or_a_list() {
        assert!(Egress::parse("none").unwrap().is_none());
        let text = "allow=10.0.0.5:443,allow=packages.example:443";
        assert_eq!(Egress::parse(text).unwrap().to_string(), text);
        assert!(Egress::parse("").is_err());
        assert!(Egress::parse("allow=").is_err());
    }

    #[test]
    fn names_match_whole_labels_only() {
        let matches =
            |pattern: &str, name: &str| pattern.parse::<NamePattern>().unwrap().matches(name);
        assert!(matches("a.example", "a.example"));
        assert!(!matches("a.example", "b.a.example"));
        assert!(matches("*.a.example", "b.a.example"));
        assert!(matches("*.a.example", "c.b.a.example"));
        assert!(!matches("*.a.example", "a.example"));
        assert!(!matches("*.a.example", "ba.example"));
        assert!(!matches("*.a.example", ".a.example"));
    }

    #[test]
    fn only_a_rule_inside_a_blocked_network_opens_it() {
        let names = |text: &str| text.parse::<Rule>().unwrap().names_blocked();
        assert!(names("169.254.169.254:80"));
        assert!(names("169.254.0.0/16:80"));
        assert!(!names("0.0.0.0/0:80"));
        assert!(!names("128.0.0.0/1:80"));
        assert!(!names("*"));
        assert!(!names("10.0.0.5:80"));
        assert!(is_blocked(Ipv4Addr::new(169, 254, 169, 254)));
        assert!(!is_blocked(Ipv4Addr::new(10, 0, 0, 5)));
    }
}
