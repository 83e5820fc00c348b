//! The name service's messages: the few kinds we read, and the fewer we write.
//!
//! Nothing a guest sends is passed on, and nothing a resolver sends comes back. A question is
//! rebuilt from the name alone (in lower case, so that not even the spelling carries anything), and
//! an answer from the addresses alone.

use std::net::Ipv4Addr;

use simple_dns::rdata::{A, RData};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, RCODE, ResourceRecord, TYPE};

/// Links of aliases followed.
const MOST_ALIASES: usize = 8;
/// Most addresses in an answer: it then always fits into 512 bytes.
const MOST_ADDRESSES: usize = 12;

/// A guest's question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    /// Lower case, no final dot.
    pub name: String,
    id: u16,
    /// As it was spelled: clients look at that.
    spelled: String,
    kind: QTYPE,
}

/// What is said to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The name stands for these.
    Addresses {
        /// At least one.
        addresses: Vec<Ipv4Addr>,
        /// Seconds.
        ttl: u32,
    },
    /// The name exists, and nothing is known that was asked for.
    Nothing,
    /// There is no such name.
    NoSuchName,
    /// It was not looked up.
    Refused,
    /// It could not be looked up.
    Failed,
}

/// Reads a guest's packet.
///
/// # Errors
/// It is no question we take: what to answer, or nothing.
pub(crate) fn question(packet: &[u8]) -> Result<Question, Option<Vec<u8>>> {
    let parsed = Packet::parse(packet).map_err(|_| None)?;
    if parsed.has_flags(PacketFlag::RESPONSE) {
        return Err(None);
    }
    let refused = || {
        let mut reply = Packet::new_reply(parsed.id());
        *reply.rcode_mut() = RCODE::Refused;
        Some(reply.build_bytes_vec().unwrap_or_default())
    };
    let [question] = parsed.questions.as_slice() else { return Err(refused()) };
    if question.qclass != QCLASS::CLASS(CLASS::IN) {
        return Err(refused());
    }
    let spelled = spell(&question.qname).ok_or_else(refused)?;
    let name = spelled.to_ascii_lowercase();
    Ok(Question { name, id: parsed.id(), spelled, kind: question.qtype })
}

/// A name as text, if it is of letters, digits, hyphens and underscores.
fn spell(name: &Name<'_>) -> Option<String> {
    let mut text = String::new();
    for label in name.as_bytes() {
        let fine = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if label.is_empty() || !label.iter().all(fine) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(std::str::from_utf8(label).ok()?);
    }
    (!text.is_empty() && text.len() <= 253).then_some(text)
}

impl Question {
    /// Whether it asks for IPv4 addresses.
    pub(crate) fn has_addresses(&self) -> bool {
        self.kind == QTYPE::TYPE(TYPE::A)
    }

    /// The question a resolver is asked.
    pub(crate) fn to_resolver(&self, id: u16) -> Vec<u8> {
        let mut packet = Packet::new_query(id);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        packet.questions.push(simple_dns::Question::new(
            Name::new_unchecked(&self.name),
            QTYPE::TYPE(TYPE::A),
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        packet.build_bytes_vec().unwrap_or_default()
    }

    /// The packet that answers the guest.
    pub(crate) fn answer(&self, answer: &Answer) -> Vec<u8> {
        let mut packet = Packet::new_reply(self.id);
        packet.set_flags(PacketFlag::RECURSION_DESIRED | PacketFlag::RECURSION_AVAILABLE);
        packet.questions.push(simple_dns::Question::new(
            Name::new_unchecked(&self.spelled),
            self.kind,
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        *packet.rcode_mut() = match answer {
            Answer::Addresses { .. } | Answer::Nothing => RCODE::NoError,
            Answer::NoSuchName => RCODE::NameError,
            Answer::Refused => RCODE::Refused,
            Answer::Failed => RCODE::ServerFailure,
        };
        if let Answer::Addresses { addresses, ttl } = answer {
            packet.answers.extend(addresses.iter().map(|&address| {
                let data = RData::A(A { address: address.into() });
                ResourceRecord::new(Name::new_unchecked(&self.spelled), CLASS::IN, *ttl, data)
            }));
        }
        packet.build_bytes_vec_compressed().unwrap_or_default()
    }
}

/// Reads a resolver's packet; absent: it is no answer to this question.
pub(crate) fn answer(packet: &[u8], id: u16, question: &Question) -> Option<Answer> {
    let parsed = Packet::parse(packet).ok()?;
    if parsed.id() != id || !parsed.has_flags(PacketFlag::RESPONSE) {
        return None;
    }
    let [asked] = parsed.questions.as_slice() else { return None };
    let same = |name: &Name<'_>, wanted: &str| {
        spell(name).is_some_and(|name| name.eq_ignore_ascii_case(wanted))
    };
    if !same(&asked.qname, &question.name) || asked.qtype != QTYPE::TYPE(TYPE::A) {
        return None;
    }
    match parsed.rcode() {
        RCODE::NoError => {}
        RCODE::NameError => return Some(Answer::NoSuchName),
        _ => return Some(Answer::Failed),
    }
    let mut name = question.name.clone();
    let mut ttl = u32::MAX;
    for _ in 0..MOST_ALIASES {
        let alias = parsed.answers.iter().find_map(|record| match &record.rdata {
            RData::CNAME(target) if same(&record.name, &name) => {
                Some((spell(&target.0), record.ttl))
            }
            _ => None,
        });
        let Some((target, lives)) = alias else { break };
        name = target?;
        ttl = ttl.min(lives);
    }
    let mut addresses = Vec::new();
    for record in &parsed.answers {
        if let RData::A(a) = &record.rdata
            && same(&record.name, &name)
            && record.class == CLASS::IN
            && addresses.len() < MOST_ADDRESSES
        {
            addresses.push(Ipv4Addr::from(a.address));
            ttl = ttl.min(record.ttl);
        }
    }
    Some(if addresses.is_empty() { Answer::Nothing } else { Answer::Addresses { addresses, ttl } })
}

#[cfg(test)]
mod tests {
    use simple_dns::rdata::CNAME;

    use super::*;

    fn ask(name: &str, kind: TYPE) -> Vec<u8> {
        let mut packet = Packet::new_query(77);
        packet.questions.push(simple_dns::Question::new(
            Name::new_unchecked(name),
            QTYPE::TYPE(kind),
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        packet.build_bytes_vec().unwrap()
    }

    fn reply(id: u16, name: &str, records: Vec<ResourceRecord<'static>>) -> Vec<u8> {
        let mut packet = Packet::new_reply(id);
        packet.questions.push(simple_dns::Question::new(
            Name::new_unchecked(name),
            QTYPE::TYPE(TYPE::A),
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        packet.answers = records;
        packet.build_bytes_vec_compressed().unwrap()
    }

    fn a(name: &'static str, address: [u8; 4], ttl: u32) -> ResourceRecord<'static> {
        let data = RData::A(A { address: u32::from_be_bytes(address) });
        ResourceRecord::new(Name::new_unchecked(name), CLASS::IN, ttl, data)
    }

    fn alias(name: &'static str, to: &'static str, ttl: u32) -> ResourceRecord<'static> {
        let data = RData::CNAME(CNAME(Name::new_unchecked(to)));
        ResourceRecord::new(Name::new_unchecked(name), CLASS::IN, ttl, data)
    }

    #[test]
    fn a_question_is_rebuilt_from_its_name_alone() {
        let asked = question(&ask("PaCkAgEs.Example", TYPE::A)).unwrap();
        assert_eq!(asked.name, "packages.example");
        let upstream = asked.to_resolver(9);
        let parsed = Packet::parse(&upstream).unwrap();
        assert_eq!(parsed.id(), 9);
        assert_eq!(parsed.questions[0].qname.to_string(), "packages.example");
        assert!(!upstream.windows(8).any(|window| window == b"PaCkAgEs"));
        // The guest sees its own spelling again.
        let answer = asked.answer(&Answer::Nothing);
        assert!(answer.windows(8).any(|window| window == b"PaCkAgEs"));
        assert_eq!(Packet::parse(&answer).unwrap().id(), 77);
    }

    #[test]
    fn what_is_no_question_is_refused_or_ignored() {
        assert_eq!(question(b""), Err(None));
        assert_eq!(question(&[0; 5]), Err(None));
        assert_eq!(question(&reply(1, "a.example", Vec::new())), Err(None));
        let mut two = Packet::new_query(1);
        for name in ["a.example", "b.example"] {
            two.questions.push(simple_dns::Question::new(
                Name::new_unchecked(name),
                QTYPE::TYPE(TYPE::A),
                QCLASS::CLASS(CLASS::IN),
                false,
            ));
        }
        assert!(matches!(question(&two.build_bytes_vec().unwrap()), Err(Some(_))));
        // Bytes that could carry anything.
        assert!(matches!(question(&ask("a b.example", TYPE::A)), Err(Some(_))));
        assert!(!question(&ask("a.example", TYPE::TXT)).unwrap().has_addresses());
    }

    #[test]
    fn aliases_are_followed_and_the_shortest_life_counts() {
        let asked = question(&ask("a.example", TYPE::A)).unwrap();
        let records = vec![
            alias("a.example", "b.example", 60),
            alias("b.example", "c.example", 30),
            a("c.example", [10, 0, 0, 1], 300),
            a("c.example", [10, 0, 0, 2], 300),
            a("other.example", [10, 0, 0, 3], 300),
        ];
        let found = answer(&reply(5, "a.example", records), 5, &asked).unwrap();
        let addresses = vec![Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
        assert_eq!(found, Answer::Addresses { addresses, ttl: 30 });
        let back = asked.answer(&found);
        let parsed = Packet::parse(&back).unwrap();
        assert_eq!(parsed.answers.len(), 2);
        assert!(parsed.answers.iter().all(|record| matches!(record.rdata, RData::A(_))));
    }

    #[test]
    fn an_answer_to_something_else_is_none() {
        let asked = question(&ask("a.example", TYPE::A)).unwrap();
        let records = || vec![a("a.example", [10, 0, 0, 1], 300)];
        assert_eq!(answer(&reply(6, "a.example", records()), 5, &asked), None);
        assert_eq!(answer(&reply(5, "b.example", records()), 5, &asked), None);
        assert_eq!(answer(b"nonsense", 5, &asked), None);
        let circle = vec![alias("a.example", "a.example", 1)];
        assert_eq!(answer(&reply(5, "a.example", circle), 5, &asked), Some(Answer::Nothing));
    }

    #[test]
    fn the_longest_answer_fits_a_packet() {
        let label = "a".repeat(49);
        let name = [label.as_str(); 5].join(".");
        let asked = question(&ask(&name, TYPE::A)).unwrap();
        let addresses = vec![Ipv4Addr::LOCALHOST; MOST_ADDRESSES];
        let packet = asked.answer(&Answer::Addresses { addresses, ttl: 1 });
        assert!(packet.len() <= 512, "{}", packet.len());
    }
}
