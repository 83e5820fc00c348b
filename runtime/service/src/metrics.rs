//! What Prometheus scrapes.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// From a millisecond, as on good hardware, to half a minute, as in the lab.
const SECONDS: [f64; 16] = [
    0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 3.0, 10.0,
    30.0,
];

/// Where something failed, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FailureLabels {
    /// What was asked for.
    pub operation: String,
    /// The refusal's word.
    pub kind: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Layer {
    layer: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: String,
}

/// All metrics of a service.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    restore: Histogram,
    agent_ready: Histogram,
    create: Histogram,
    first_exec: Histogram,
    sandboxes: Family<InState, Gauge>,
    layers: Family<Layer, Gauge>,
    executions_running: Gauge,
    executions: Counter,
    failures: Family<FailureLabels, Counter>,
    denied_egress: Counter,
    adopted: Counter,
    audit_lines: Gauge<u64, AtomicU64>,
}

/// What is counted only when somebody looks.
#[derive(Debug, Default)]
pub struct Now {
    /// A word for each sandbox's state.
    pub states: Vec<String>,
    /// The isolation layers of all sandboxes.
    pub layers: Vec<String>,
    /// Commands running.
    pub executions: u32,
    /// Lines of the audit log.
    pub audit_lines: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        let histogram = || Histogram::new(SECONDS);
        let mut metrics = Self {
            registry: Registry::with_prefix("parbake"),
            restore: histogram(),
            agent_ready: histogram(),
            create: histogram(),
            first_exec: histogram(),
            sandboxes: Family::default(),
            layers: Family::default(),
            executions_running: Gauge::default(),
            executions: Counter::default(),
            failures: Family::default(),
            denied_egress: Counter::default(),
            adopted: Counter::default(),
            audit_lines: Gauge::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let seconds = [
            ("restore", "Starting the monitor to its vCPUs running", &self.restore),
            ("agent_ready", "Starting the monitor to the guest being its own", &self.agent_ready),
            ("create", "A creation's request to its answer", &self.create),
            ("first_exec", "A sandbox's first command, request to start", &self.first_exec),
        ];
        for (name, help, histogram) in seconds {
            self.registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let registry = &mut self.registry;
        registry.register("sandboxes", "Sandboxes by state", self.sandboxes.clone());
        let help = "Sandboxes with this isolation layer in force";
        registry.register("jail_layers", help, self.layers.clone());
        let running = self.executions_running.clone();
        registry.register("executions_running", "Commands running", running);
        registry.register("executions", "Commands started", self.executions.clone());
        registry.register("failures", "Requests refused or failed", self.failures.clone());
        let denied = self.denied_egress.clone();
        registry.register("denied_egress", "Connections denied to guests", denied);
        registry.register("adopted", "Sandboxes taken over at start", self.adopted.clone());
        registry.register("audit_lines", "Lines of the audit log", self.audit_lines.clone());
    }

    /// A sandbox was made.
    pub fn created(&self, started: Duration, ready: Duration, total: Duration) {
        self.restore.observe(started.as_secs_f64());
        self.agent_ready.observe(ready.as_secs_f64());
        self.create.observe(total.as_secs_f64());
    }

    /// A command was started; `first` if it is the sandbox's first.
    pub fn executed(&self, first: bool, took: Duration) {
        self.executions.inc();
        if first {
            self.first_exec.observe(took.as_secs_f64());
        }
    }

    /// Something was refused or failed.
    pub fn failed(&self, operation: &str, kind: &str) {
        let labels = FailureLabels { operation: operation.to_owned(), kind: kind.to_owned() };
        self.failures.get_or_create(&labels).inc();
    }

    /// Guests were denied so many connections.
    pub fn denied_egress(&self, count: u64) {
        self.denied_egress.inc_by(count);
    }

    /// A sandbox was taken over.
    pub fn adopted(&self) {
        self.adopted.inc();
    }

    /// Everything, in the text format.
    pub fn encode(&self, now: &Now) -> String {
        self.sandboxes.clear();
        for state in &now.states {
            self.sandboxes.get_or_create(&InState { state: state.clone() }).inc();
        }
        self.layers.clear();
        for layer in &now.layers {
            self.layers.get_or_create(&Layer { layer: layer.clone() }).inc();
        }
        self.executions_running.set(now.executions.into());
        self.audit_lines.set(now.audit_lines);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
