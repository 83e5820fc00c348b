//! A program elsewhere with this process's stdin, stdout, stderr, terminal and signals.

use std::io::{self, IsTerminal, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parbake_protocol::agent::{
    Client, ClientError, ExecEvent, ExecInput, ExecOutput, ExecRequest, Exit, Failure, Stream,
    WindowSize,
};
use rustix::termios::{OptionalActions, Termios};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;

/// How a program elsewhere ended.
#[derive(Debug)]
pub enum Ended {
    /// It ran.
    Exited(Exit),
    /// It could not be started.
    Failed(Failure),
    /// A second signal cut the connection, which ended it.
    HungUp,
}

/// The size of this terminal; 80 by 24 where it does not say.
pub fn window_size() -> WindowSize {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
            WindowSize { rows: size.ws_row, columns: size.ws_col }
        }
        _ => WindowSize { rows: 24, columns: 80 },
    }
}

/// What goes to a program elsewhere; for several threads.
pub trait Input: Clone + Send + 'static {
    /// Sends standard input; waits while the program does not read.
    ///
    /// # Errors
    /// The program is gone or has closed its input.
    fn write_stdin(&self, data: &[u8]) -> io::Result<()>;
    /// Ends standard input.
    ///
    /// # Errors
    /// The channel's.
    fn close_stdin(&self) -> io::Result<()>;
    /// Tells the size of the terminal.
    ///
    /// # Errors
    /// The channel's.
    fn resize(&self, size: WindowSize) -> io::Result<()>;
    /// Delivers a signal.
    ///
    /// # Errors
    /// The channel's.
    fn signal(&self, number: i32) -> io::Result<()>;
    /// Lets go, which ends the program and everything it started.
    ///
    /// # Errors
    /// The channel's.
    fn hang_up(&self) -> io::Result<()>;
}

/// What comes from a program elsewhere.
pub trait Output {
    /// Why nothing more comes.
    type Error;
    /// Waits for what happens next.
    ///
    /// # Errors
    /// The channel's.
    fn next_event(&mut self) -> Result<ExecEvent, Self::Error>;
}

impl<S: Stream + Send + 'static> Input for ExecInput<S> {
    fn write_stdin(&self, data: &[u8]) -> io::Result<()> {
        Self::write_stdin(self, data)
    }
    fn close_stdin(&self) -> io::Result<()> {
        Self::close_stdin(self)
    }
    fn resize(&self, size: WindowSize) -> io::Result<()> {
        Self::resize(self, size)
    }
    fn signal(&self, number: i32) -> io::Result<()> {
        Self::signal(self, number)
    }
    fn hang_up(&self) -> io::Result<()> {
        Self::hang_up(self)
    }
}

impl<S: Stream> Output for ExecOutput<S> {
    type Error = ClientError;
    fn next_event(&mut self) -> Result<ExecEvent, ClientError> {
        Self::next_event(self)
    }
}

/// What of this process is connected.
#[derive(Debug, Clone, Copy)]
pub struct Attach {
    /// The program has a terminal: this one, in raw mode.
    pub tty: bool,
    /// Standard input.
    pub stdin: bool,
}

/// Runs `request`, connecting standard input if the request says so. `started` is called once,
/// when the program has started.
///
/// # Errors
/// See [`ClientError`].
pub fn run<S: Stream + Send + 'static>(
    client: Client<S>,
    request: ExecRequest,
    started: impl FnMut(),
) -> Result<Ended, ClientError> {
    let what = Attach { tty: request.tty.is_some(), stdin: request.stdin };
    let (input, output) = client.exec(request)?.split();
    attach(&input, output, what, started)
}

/// Connects this process to a program that was started elsewhere, until it ends.
///
/// Signals are passed on. A second SIGINT, SIGTERM or SIGHUP within the run hangs up instead, which
/// ends the program and everything it started.
///
/// # Errors
/// The output's.
pub fn attach<I: Input, O: Output>(
    input: &I,
    mut output: O,
    what: Attach,
    mut started: impl FnMut(),
) -> Result<Ended, O::Error> {
    let raw = if what.tty { RawTerminal::enter() } else { None };
    let (wants_stdin, has_tty) = (what.stdin, what.tty);
    let over = Arc::new(AtomicBool::new(false));
    let hung_up = Arc::new(AtomicBool::new(false));

    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH]);
    let handle = signals.as_ref().ok().map(Signals::handle);
    let watcher = signals.ok().map(|mut signals| {
        let (input, hung_up) = (input.clone(), Arc::clone(&hung_up));
        std::thread::spawn(move || {
            let mut asked = false;
            for signal in signals.forever() {
                let sent = match signal {
                    SIGWINCH if has_tty => input.resize(window_size()),
                    SIGWINCH => Ok(()),
                    SIGINT | SIGTERM | SIGHUP if asked => {
                        hung_up.store(true, Ordering::Relaxed);
                        input.hang_up()
                    }
                    _ => {
                        asked |= matches!(signal, SIGINT | SIGTERM | SIGHUP);
                        input.signal(signal)
                    }
                };
                if sent.is_err() {
                    return;
                }
            }
        })
    });
    if wants_stdin {
        let (input, over) = (input.clone(), Arc::clone(&over));
        // Not joined: a read of standard input cannot be interrupted; the process ends it.
        std::thread::spawn(move || {
            let mut buffer = vec![0; 32 << 10];
            let mut stdin = std::io::stdin().lock();
            loop {
                match stdin.read(&mut buffer) {
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => {
                        let _ = input.close_stdin();
                        return;
                    }
                    Ok(count) => {
                        if over.load(Ordering::Relaxed)
                            || input.write_stdin(&buffer[..count]).is_err()
                        {
                            return;
                        }
                    }
                }
            }
        });
    }

    let mut stdout = std::io::stdout().lock();
    let mut stderr = std::io::stderr().lock();
    let mut broken = false;
    let ended = loop {
        let written = match output.next_event() {
            Ok(ExecEvent::Started { .. }) => {
                started();
                Ok(())
            }
            Ok(ExecEvent::Stdout(bytes)) if !broken => {
                stdout.write_all(&bytes).and_then(|()| stdout.flush())
            }
            Ok(ExecEvent::Stderr(bytes)) => stderr.write_all(&bytes),
            Ok(ExecEvent::Stdout(_)) => Ok(()),
            Ok(ExecEvent::Exited(exit)) => break Ok(Ended::Exited(exit)),
            Ok(ExecEvent::Failed(failure)) => break Ok(Ended::Failed(failure)),
            Err(_) if hung_up.load(Ordering::Relaxed) => break Ok(Ended::HungUp),
            Err(error) => break Err(error),
        };
        if written.is_err() && !broken {
            // Whoever read our output is gone: the program learns it as it would locally.
            broken = true;
            let _ = input.signal(rustix::process::Signal::PIPE.as_raw());
        }
    };
    over.store(true, Ordering::Relaxed);
    drop(raw);
    if let (Some(handle), Some(watcher)) = (handle, watcher) {
        handle.close();
        let _ = watcher.join();
    }
    ended
}

/// Whether standard input should be connected: it is not a terminal, or `interactive` was asked.
pub fn connect_stdin(interactive: bool) -> bool {
    interactive || !std::io::stdin().is_terminal()
}

/// The terminal in raw mode; as it was again on drop.
#[derive(Debug)]
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Option<Self> {
        let stdin = std::io::stdin();
        let before = rustix::termios::tcgetattr(&stdin).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(&stdin, OptionalActions::Now, &raw).ok()?;
        Some(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.before);
    }
}
