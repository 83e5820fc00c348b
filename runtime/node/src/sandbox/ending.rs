//! What a machine tells of itself, and how it came to an end.

use std::time::{Duration, Instant, SystemTime};

use parbake_protocol::agent::ClientError;
use parbake_protocol::vmm::{Event, StopReason, doorbell};

use super::{Sandbox, SandboxError, SandboxOptions};
use crate::event::{EventKind, SandboxEvent};
use crate::limits::stall::StallWatch;
use crate::limits::{Limit, LimitHit};
use crate::monitor::{MonitorError, log_tail};

impl Sandbox {
    /// The limits it has reached so far, each once; looks, and does not wait.
    pub fn limit_hits(&mut self) -> &[LimitHit] {
        let _ = self.ended_by_itself();
        if let Some(group) = &self.cgroup {
            let (kills, denied, throttled) =
                (group.memory_kills(), group.pids_denied(), group.throttled());
            if kills > 0 && !self.stall.as_ref().is_some_and(StallWatch::ended) {
                self.hit(Limit::Memory, "it needed more host memory than it may have");
            }
            if denied > 0 {
                self.hit(Limit::Pids, "its monitor wanted more threads than it may have");
            }
            if throttled > 0 {
                self.hit(Limit::Cpu, "it was held back to its share of the processors");
            }
        }
        &self.hits
    }

    pub(super) fn hit(&mut self, limit: Limit, detail: &str) {
        if self.hits.iter().any(|hit| hit.limit == limit) {
            return;
        }
        let hit = LimitHit { limit, detail: detail.to_owned() };
        self.hits.push(hit.clone());
        if let Some(events) = &self.events {
            let (sandbox, at) = (self.id.clone(), SystemTime::now());
            let _ = events.try_send(SandboxEvent { sandbox, at, kind: EventKind::LimitHit(hit) });
        }
    }

    /// How the machine ended, if it has; looks, and does not wait.
    pub fn ended_by_itself(&mut self) -> Option<SandboxError> {
        loop {
            let soon = Instant::now() + Duration::from_millis(1);
            let event = self.monitor.next_event(soon).map_err(|error| self.gone(error));
            match event.and_then(|event| self.unless_ended(event)) {
                Ok(_) => {}
                Err(SandboxError::Monitor(MonitorError::Timeout(_))) => return None,
                Err(ended) => return Some(ended),
            }
        }
    }

    /// Waits until the vCPUs run.
    pub(super) fn wait_started(
        &mut self,
        begun: Instant,
        options: &SandboxOptions,
    ) -> Result<(), SandboxError> {
        loop {
            if let Event::Started { stages, jail } = self.next_event(begun, options)? {
                self.timings.started = begun.elapsed();
                self.timings.stages = stages;
                self.timings.jail.splice(0..0, jail);
                return Ok(());
            }
        }
    }

    /// Waits until the agent rings the doorbell.
    pub(super) fn wait_ready(
        &mut self,
        begun: Instant,
        options: &SandboxOptions,
    ) -> Result<(), SandboxError> {
        self.wait_started(begun, options)?;
        loop {
            match self.next_event(begun, options)? {
                Event::Doorbell { value: doorbell::READY } => return Ok(()),
                Event::Doorbell { value: doorbell::BOOT_FAILED } => {
                    return Err(self.ended("the agent could not bring it up".to_owned()));
                }
                _ => {}
            }
        }
    }

    /// The next event that does not end the machine.
    pub(super) fn next_event(
        &mut self,
        begun: Instant,
        options: &SandboxOptions,
    ) -> Result<Event, SandboxError> {
        let limit = begun + options.ready_timeout;
        loop {
            if options.cancelled.is_some_and(|cancelled| cancelled()) {
                return Err(SandboxError::Interrupted);
            }
            let soon = Instant::now() + Duration::from_millis(200);
            match self.monitor.next_event(limit.min(soon)) {
                Ok(event) => return self.unless_ended(event),
                Err(MonitorError::Timeout(_)) if Instant::now() >= limit => {
                    return Err(SandboxError::NotReady {
                        after: options.ready_timeout,
                        console: log_tail(&self.rundir.console()),
                    });
                }
                Err(MonitorError::Timeout(_)) => {}
                Err(error) => return Err(self.gone(error)),
            }
        }
    }

    /// The event, unless it says that the machine is gone.
    pub(super) fn unless_ended(&mut self, event: Event) -> Result<Event, SandboxError> {
        match event {
            Event::DiskFull { .. } => {
                self.hit(
                    Limit::Disk,
                    "it wrote as much to its disk as it may; further writes fail",
                );
                Ok(event)
            }
            Event::Doorbell { value: doorbell::PROCESS_LIMIT } => {
                self.hit(Limit::GuestProcesses, "it has as many processes as it may have");
                Ok(event)
            }
            Event::Stopped { reason: StopReason::Expired, .. } => {
                self.hit(Limit::Lifetime, "its lifetime is over");
                Err(self.limit(Limit::Lifetime))
            }
            Event::Failed { kind, message } => Err(MonitorError::Failed { kind, message }.into()),
            Event::Stopped { reason, detail } => {
                let how = match reason {
                    StopReason::PowerOff => "it switched itself off",
                    StopReason::Reset => "it reset itself, as after a kernel panic",
                    StopReason::Crash => "its processor stopped",
                    StopReason::Quit | StopReason::Expired => "it was ended",
                };
                let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
                Err(self.ended(format!("{how}{detail}")))
            }
            event => Ok(event),
        }
    }

    /// Why a monitor that is gone is gone, as far as its group knows.
    pub(super) fn gone(&mut self, error: MonitorError) -> SandboxError {
        let stalled = self.stall.as_ref().is_some_and(StallWatch::ended);
        if matches!(error, MonitorError::Died { .. }) && stalled {
            self.hit(
                Limit::Memory,
                "it needed more host memory than it may have: nearly all of its time went into \
                 reading again what had to make room",
            );
            return self.limit(Limit::Memory);
        }
        let killed = self.cgroup.as_ref().is_some_and(|group| group.memory_kills() > 0);
        if matches!(error, MonitorError::Died { .. }) && killed {
            self.hit(Limit::Memory, "it needed more host memory than it may have");
            return self.limit(Limit::Memory);
        }
        error.into()
    }

    pub(super) fn limit(&self, limit: Limit) -> SandboxError {
        let hit = self.hits.iter().find(|hit| hit.limit == limit);
        let detail = hit.map(|hit| hit.detail.clone()).unwrap_or_default();
        SandboxError::Limit(LimitHit { limit, detail })
    }

    pub(super) fn ended(&self, reason: String) -> SandboxError {
        SandboxError::GuestEnded { reason, console: log_tail(&self.rundir.console()) }
    }

    /// An agent that stops answering often means a machine that is gone; that says more.
    pub fn blame(&mut self, error: ClientError) -> SandboxError {
        let options =
            SandboxOptions { ready_timeout: Duration::from_millis(200), ..Default::default() };
        let begun = Instant::now();
        loop {
            match self.next_event(begun, &options) {
                // Of no matter; the end may come after it.
                Ok(_) => {}
                Err(
                    ended @ (SandboxError::GuestEnded { .. }
                    | SandboxError::Limit(_)
                    | SandboxError::Monitor(_)),
                ) => return ended,
                Err(_) => return SandboxError::Agent(error),
            }
        }
    }
}
