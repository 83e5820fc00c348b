//! The thread beside a sandbox with a network: answers its questions for names and passes on what
//! its packet filter denied.
//!
//! ```text
//!   guest's question ─► allowed? ─ no ─► refused, told
//!                          │ yes
//!                          ▼
//!                   host's resolver ─► addresses ─► opened in the filter ─► answered
//! ```
//! One thread a sandbox: a guest that floods its own holds up nobody else. All its sockets but the
//! ones to the resolvers are inside the sandbox's namespace.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::egress::{Egress, is_blocked};
use super::log::Log;
use super::names::{self, Answer, Question};
use super::nft::{Batch, Netfilter, flow_key};
use super::rules;
use crate::event::{EventKind, EventSender, SandboxEvent};

/// Questions under way at a time.
const MOST_PENDING: usize = 32;
/// Until the next resolver is asked, and how often altogether.
const RESOLVER_PATIENCE: Duration = Duration::from_secs(2);
const TRIES: usize = 4;
/// Questions a second, and at once. A name of an allowed zone could carry data to whoever serves
/// the zone: this bounds how much.
const QUESTION_RATE: f64 = 20.0;
const QUESTION_BURST: f64 = 100.0;
/// Bounds of an answer's time to live.
const SHORTEST: u32 = 5;
const LONGEST: u32 = 3600;
/// A connection may begin a little after its name has expired.
const GRACE: Duration = Duration::from_secs(5);

/// What was denied so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressCounts {
    /// Packets that no rule allows.
    pub denied: u64,
    /// Packets to destinations that are always blocked.
    pub blocked: u64,
    /// Packets from an address that is not the guest's.
    pub forged: u64,
    /// IPv6 packets.
    pub ipv6: u64,
    /// New connections beyond the most.
    pub flood: u64,
    /// Questions for names that were not looked up.
    pub names: u64,
    /// Events that did not fit into the listener's channel.
    pub untold: u64,
}

/// The thread and what it shares.
#[derive(Debug)]
pub(crate) struct Guard {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    filter: Mutex<Netfilter>,
    names: AtomicU64,
    untold: AtomicU64,
}

impl Guard {
    pub(crate) fn start(
        id: &str,
        egress: Egress,
        resolvers: Vec<SocketAddr>,
        (filter, dns, log): (Netfilter, UdpSocket, Log),
        events: Option<EventSender>,
    ) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let shared = Arc::new(Shared {
            filter: Mutex::new(filter),
            names: AtomicU64::new(0),
            untold: AtomicU64::new(0),
        });
        let worker = Worker {
            id: id.to_owned(),
            egress,
            resolvers,
            dns,
            log,
            events,
            shared: Arc::clone(&shared),
            stop: Arc::clone(&stop),
            pending: Vec::new(),
            open: HashMap::new(),
            credit: QUESTION_BURST,
            credited: Instant::now(),
        };
        let thread = thread::Builder::new()
            .name("egress".to_owned())
            .stack_size(128 << 10)
            .spawn(move || worker.run())?;
        Ok(Self { stop, thread: Some(thread), shared })
    }

    pub(crate) fn counts(&self) -> EgressCounts {
        let mut filter = self.shared.filter.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = |name| filter.counter(rules::TABLE, name).unwrap_or(0);
        EgressCounts {
            denied: count("denied"),
            blocked: count("blocked"),
            forged: count("forged"),
            ipv6: count("ipv6"),
            flood: count("flood"),
            names: self.shared.names.load(Ordering::Relaxed),
            untold: self.shared.untold.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A question that a resolver has been asked.
struct Pending {
    question: Question,
    from: SocketAddr,
    /// Of its own, so that its port is not to be guessed.
    socket: UdpSocket,
    id: u16,
    tries: usize,
    deadline: Instant,
}

struct Worker {
    id: String,
    egress: Egress,
    resolvers: Vec<SocketAddr>,
    dns: UdpSocket,
    log: Log,
    events: Option<EventSender>,
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    pending: Vec<Pending>,
    /// Open flows and until when.
    open: HashMap<(Ipv4Addr, u8, u16), Instant>,
    credit: f64,
    credited: Instant,
}

impl Worker {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            let next = self.pending.iter().map(|pending| pending.deadline).min();
            let timeout = next.map(|next| timespec(next.saturating_duration_since(now)));
            let mut sources = vec![
                PollFd::new(&*self.stop, PollFlags::IN),
                PollFd::new(&self.dns, PollFlags::IN),
                PollFd::new(&self.log, PollFlags::IN),
            ];
            sources.extend(
                self.pending
                    .iter()
                    .map(|p| PollFd::from_borrowed_fd(p.socket.as_fd(), PollFlags::IN)),
            );
            match poll(&mut sources, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            let ready: Vec<bool> =
                sources.iter().map(|source| !source.revents().is_empty()).collect();
            drop(sources);
            let is_ready = |index: usize| ready.get(index).copied().unwrap_or(false);
            if is_ready(0) {
                // What was denied last is told all the same.
                self.tell_denied();
                return;
            }
            if is_ready(2) {
                self.tell_denied();
            }
            // From the end, as answered ones are taken out.
            for index in (0..self.pending.len()).rev() {
                if is_ready(3 + index) {
                    self.answered(index);
                } else if self.pending.get(index).is_some_and(|p| p.deadline <= Instant::now()) {
                    self.ask_again(index);
                }
            }
            if is_ready(1) {
                self.questions();
            }
        }
    }

    fn tell(&self, kind: EventKind) {
        let Some(events) = &self.events else { return };
        let event = SandboxEvent { sandbox: self.id.clone(), at: SystemTime::now(), kind };
        if events.try_send(event).is_err() {
            self.shared.untold.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn tell_denied(&self) {
        for denied in self.log.take() {
            self.tell(EventKind::EgressDenied {
                destination: denied.destination,
                port: denied.port,
                protocol: denied.protocol,
                reason: rules::reason(&denied.prefix).to_owned(),
            });
        }
    }

    fn questions(&mut self) {
        let mut buffer = [0; 1500];
        for _ in 0..MOST_PENDING {
            let Ok((length, from)) = self.dns.recv_from(&mut buffer) else { return };
            let packet = buffer.get(..length).unwrap_or_default();
            match names::question(packet) {
                Ok(question) => self.question(question, from),
                Err(None) => {}
                Err(Some(refusal)) => {
                    self.shared.names.fetch_add(1, Ordering::Relaxed);
                    let _ = self.dns.send_to(&refusal, from);
                }
            }
        }
    }

    fn question(&mut self, question: Question, from: SocketAddr) {
        let refusal = if self.egress.matching(&question.name).next().is_none() {
            Some("no rule allows it")
        } else if !question.has_addresses() {
            // Nothing but addresses is ever asked for: that is all a rule opens, and all that
            // comes back.
            self.reply(&question.answer(&Answer::Nothing), from);
            return;
        } else if self.pending.len() >= MOST_PENDING || !self.may_ask() {
            Some("too many questions")
        } else {
            None
        };
        if let Some(reason) = refusal {
            self.shared.names.fetch_add(1, Ordering::Relaxed);
            self.reply(&question.answer(&Answer::Refused), from);
            let name = question.name.chars().take(253).collect();
            self.tell(EventKind::NameDenied { name, reason: reason.to_owned() });
            return;
        }
        match self.ask(&question, 0) {
            Ok((socket, id)) => {
                let deadline = Instant::now() + RESOLVER_PATIENCE;
                self.pending.push(Pending { question, from, socket, id, tries: 1, deadline });
            }
            Err(_) => self.reply(&question.answer(&Answer::Failed), from),
        }
    }

    fn may_ask(&mut self) -> bool {
        let now = Instant::now();
        let earned = now.duration_since(self.credited).as_secs_f64() * QUESTION_RATE;
        self.credit = (self.credit + earned).min(QUESTION_BURST);
        self.credited = now;
        let enough = self.credit >= 1.0;
        if enough {
            self.credit -= 1.0;
        }
        enough
    }

    fn ask(&self, question: &Question, attempt: usize) -> io::Result<(UdpSocket, u16)> {
        let resolver = self.resolvers.get(attempt % self.resolvers.len().max(1));
        let resolver = resolver.ok_or(io::ErrorKind::NotFound)?;
        let any: SocketAddr =
            if resolver.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        let socket = UdpSocket::bind(any)?;
        socket.set_nonblocking(true)?;
        socket.connect(resolver)?;
        let mut id = [0; 2];
        getrandom::fill(&mut id).map_err(|error| io::Error::other(error.to_string()))?;
        let id = u16::from_ne_bytes(id);
        socket.send(&question.to_resolver(id))?;
        Ok((socket, id))
    }

    fn ask_again(&mut self, index: usize) {
        let mut pending = self.pending.swap_remove(index);
        if pending.tries < TRIES
            && let Ok((socket, id)) = self.ask(&pending.question, pending.tries)
        {
            pending.tries += 1;
            (pending.socket, pending.id) = (socket, id);
            pending.deadline = Instant::now() + RESOLVER_PATIENCE;
            self.pending.push(pending);
        } else {
            self.reply(&pending.question.answer(&Answer::Failed), pending.from);
        }
    }

    fn answered(&mut self, index: usize) {
        let mut buffer = [0; 4096];
        let Some(pending) = self.pending.get(index) else { return };
        let received = pending.socket.recv(&mut buffer);
        let Ok(length) = received else {
            // Nobody there: the next one, at once.
            self.ask_again(index);
            return;
        };
        let packet = buffer.get(..length).unwrap_or_default();
        let Some(answer) = names::answer(packet, pending.id, &pending.question) else { return };
        let pending = self.pending.swap_remove(index);
        let answer = match answer {
            Answer::Addresses { addresses, ttl } => self.open(&pending.question, addresses, ttl),
            other => other,
        };
        self.reply(&pending.question.answer(&answer), pending.from);
    }

    /// Opens what was answered, for as long as the answer holds.
    fn open(&mut self, question: &Question, addresses: Vec<Ipv4Addr>, ttl: u32) -> Answer {
        let addresses: Vec<_> =
            addresses.into_iter().filter(|address| !is_blocked(*address)).collect();
        if addresses.is_empty() {
            self.shared.names.fetch_add(1, Ordering::Relaxed);
            let reason = "it leads to blocked addresses only".to_owned();
            self.tell(EventKind::NameDenied { name: question.name.clone(), reason });
            return Answer::Nothing;
        }
        let ttl = ttl.clamp(SHORTEST, LONGEST);
        let lives = Duration::from_secs(ttl.into()) + GRACE;
        let mut flows = Vec::new();
        // Where everything may be reached, an answer opens nothing more.
        for rule in self.egress.matching(&question.name).filter(|rule| rule.has_name()) {
            let (first, last) = rule.ports.unwrap_or((0, 0));
            for &protocol in rules::numbers(rule.protocol) {
                for port in first..=last {
                    flows.extend(addresses.iter().map(|address| (*address, protocol, port)));
                }
            }
        }
        if self.open_flows(&flows, lives).is_err() {
            return Answer::Failed;
        }
        self.tell(EventKind::NameOpened {
            name: question.name.clone(),
            addresses: addresses.clone(),
            ttl_seconds: ttl,
        });
        Answer::Addresses { addresses, ttl }
    }

    fn open_flows(&mut self, flows: &[(Ipv4Addr, u8, u16)], lives: Duration) -> io::Result<()> {
        let now = Instant::now();
        self.open.retain(|_, until| *until > now);
        let mut filter = self.shared.filter.lock().unwrap_or_else(PoisonError::into_inner);
        for flow in flows {
            let key = flow_key(flow.0, flow.1, flow.2);
            let mut fresh = Batch::of(rules::TABLE);
            fresh.add_element(rules::OPEN, &key, Some(lives));
            let done = if self.open.contains_key(flow) {
                // Kernels before 6.12 do not prolong an element that is there.
                let mut again = Batch::of(rules::TABLE);
                again.remove_element(rules::OPEN, &key);
                again.add_element(rules::OPEN, &key, Some(lives));
                // It may have expired this very moment.
                filter.commit(&again).or_else(|_| filter.commit(&fresh))
            } else {
                filter.commit(&fresh)
            };
            done?;
            self.open.insert(*flow, now + lives);
        }
        Ok(())
    }

    fn reply(&self, packet: &[u8], to: SocketAddr) {
        let _ = self.dns.send_to(packet, to);
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
