//! What happens, for those who listen: the last thousand events and those to come.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::broadcast;

use crate::model::Event;

/// How many events are remembered.
const REMEMBERED: usize = 1024;

/// The feed.
#[derive(Debug)]
pub struct Feed {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    past: VecDeque<Event>,
    /// None once the feed is closed.
    listeners: Option<broadcast::Sender<Event>>,
    /// Held by each listener.
    listening: Arc<()>,
}

/// What is to come, for one listener.
#[derive(Debug)]
pub struct Listener {
    /// Closed when the feed is, and only after all that was told before.
    pub events: broadcast::Receiver<Event>,
    _listening: Arc<()>,
}

impl Default for Feed {
    fn default() -> Self {
        let (listeners, _) = broadcast::channel(REMEMBERED);
        let (past, listening) = (VecDeque::new(), Arc::default());
        let state = State { sequence: 0, past, listeners: Some(listeners), listening };
        Self { state: Mutex::new(state) }
    }
}

impl Feed {
    /// Tells everyone; the event's sequence number is set here.
    pub fn tell(&self, mut event: Event) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.sequence += 1;
        event.sequence = state.sequence;
        if state.past.len() == REMEMBERED {
            state.past.pop_front();
        }
        state.past.push_back(event.clone());
        // Nobody listening is no failure.
        if let Some(listeners) = &state.listeners {
            let _ = listeners.send(event);
        }
    }

    /// Nothing more is to come: listeners come to an end when they have heard what was.
    pub fn close(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).listeners = None;
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::strong_count(&state.listening) - 1
    }

    /// What is remembered after `since`, and what is to come, without a gap between.
    pub fn listen(&self, since: u64) -> (Vec<Event>, Listener) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let past = state.past.iter().filter(|event| event.sequence > since).cloned().collect();
        let events = match &state.listeners {
            Some(listeners) => listeners.subscribe(),
            None => broadcast::channel(1).1,
        };
        (past, Listener { events, _listening: Arc::clone(&state.listening) })
    }
}

/// Now, in milliseconds since 1970.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
