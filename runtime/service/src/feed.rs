//! What happens, for those who listen: the last thousand events and those to come.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
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
    listeners: broadcast::Sender<Event>,
}

impl Default for Feed {
    fn default() -> Self {
        let (listeners, _) = broadcast::channel(REMEMBERED);
        Self { state: Mutex::new(State { sequence: 0, past: VecDeque::new(), listeners }) }
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
        let _ = state.listeners.send(event);
    }

    /// What is remembered after `since`, and what is to come, without a gap between.
    pub fn listen(&self, since: u64) -> (Vec<Event>, broadcast::Receiver<Event>) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let past = state.past.iter().filter(|event| event.sequence > since).cloned().collect();
        (past, state.listeners.subscribe())
    }
}

/// Now, in milliseconds since 1970.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
