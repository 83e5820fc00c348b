//! An agent on a unix socket, in this process, that leaves this machine alone.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use parbake_agent::listen::Listener;
use parbake_agent::serve::{Options, serve};
use parbake_protocol::agent::{Client, ClientError, ExecRequest, Output};

/// A serving agent.
pub struct Served {
    directory: tempfile::TempDir,
}

impl Served {
    /// Starts one.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = Listener::unix(directory.path().join("agent")).expect("listen");
        std::thread::spawn(move || serve(&listener, Options::default()));
        Self { directory }
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("agent")
    }

    /// A directory for the test.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A raw stream.
    pub fn stream(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
        stream
    }

    /// A client.
    pub fn client(&self) -> Client<UnixStream> {
        Client::new(self.stream())
    }

    /// Runs a request without input to its end.
    pub fn run(&self, request: ExecRequest) -> Result<Output, ClientError> {
        let mut session = self.client().exec(request)?;
        session.output.set_timeout(Some(Duration::from_secs(20))).expect("timeout");
        session.wait_with_output(64 << 20)
    }

    /// Runs a shell script to its end.
    pub fn sh(&self, script: &str) -> Output {
        self.run(ExecRequest::new(["sh", "-c", script])).expect(script)
    }
}

/// Waits until `condition` holds, for 10 s at most.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
