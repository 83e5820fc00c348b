//! Files in and out of sandboxes: single ones through the agent, trees as tar through the guest's
//! own `tar`.

use std::io::{self, Read, Write};
use std::sync::Arc;

use parbake_protocol::agent::{ClientError, ExecEvent, ExecRequest as Order, FileInfo, PutRequest};
use serde_json::json;

use super::Manager;
use super::run::told;
use crate::model::Stored;
use crate::problem::{Kind, Problem};

/// The most of what `tar` complains about.
const MAX_COMPLAINT: usize = 4 << 10;

/// Where a transfer's bytes go or come from, on the guest's side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// An absolute path; any bytes but NUL.
    pub path: Vec<u8>,
    /// Permission bits of a stored file.
    pub mode: u32,
    /// Owner of a stored file as `user`, `uid`, `user:group`, `uid:gid`; empty: root.
    pub owner: String,
    /// Make missing directories.
    pub parents: bool,
}

/// Reads so much and no more.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, "too large"))?;
        Ok(count)
    }
}

impl Manager {
    /// Stores a file in a sandbox; it appears complete or not at all.
    ///
    /// # Errors
    /// The sandbox's, or the guest's.
    pub fn put_file(
        &self,
        actor: &str,
        id: &str,
        to: &Transfer,
        data: impl Read,
    ) -> Result<Stored, Problem> {
        let done = self.put_file_inner(actor, id, to, data);
        done.map_err(|problem| self.failed(actor, "fileIn", Some(id), problem))
    }

    fn put_file_inner(
        &self,
        actor: &str,
        id: &str,
        to: &Transfer,
        data: impl Read,
    ) -> Result<Stored, Problem> {
        self.refuse_when_draining()?;
        let (ticket, _) = self.ticket(id)?;
        let shown = String::from_utf8_lossy(&to.path);
        self.report(actor, "fileIn", Some(id), json!({ "path": shown, "mode": to.mode }))?;
        let request = PutRequest {
            path: to.path.clone(),
            mode: to.mode,
            owner: to.owner.clone(),
            parents: to.parents,
        };
        let limit = self.config.transfer_limit;
        let data = Bounded { inner: data, left: limit };
        let bytes =
            self.connect(&ticket)?.put_file(request, data).map_err(|error| match error {
                ClientError::Local(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                    too_large(limit)
                }
                error => error.into(),
            })?;
        self.note(actor, "fileInDone", Some(id), json!({ "path": shown, "bytes": bytes }));
        Ok(Stored { bytes })
    }

    /// Fetches a file from a sandbox. `opened` is told about it before its first byte.
    ///
    /// # Errors
    /// The sandbox's, or the guest's; part of the file may have been delivered by then.
    pub fn get_file(
        &self,
        actor: &str,
        id: &str,
        path: &[u8],
        opened: impl FnOnce(&FileInfo),
        sink: impl Write,
    ) -> Result<Stored, Problem> {
        let done = self.get_file_inner(actor, id, path, opened, sink);
        done.map_err(|problem| self.failed(actor, "fileOut", Some(id), problem))
    }

    fn get_file_inner(
        &self,
        actor: &str,
        id: &str,
        path: &[u8],
        opened: impl FnOnce(&FileInfo),
        sink: impl Write,
    ) -> Result<Stored, Problem> {
        self.refuse_when_draining()?;
        let (ticket, _) = self.ticket(id)?;
        let shown = String::from_utf8_lossy(path);
        self.report(actor, "fileOut", Some(id), json!({ "path": shown }))?;
        let limit = self.config.transfer_limit;
        let client = self.connect(&ticket)?;
        let info =
            client.get_file_after(path, limit, opened, sink).map_err(|error| match error {
                ClientError::TooLarge { limit } => too_large(limit),
                error => error.into(),
            })?;
        let bytes = info.size;
        self.note(actor, "fileOutDone", Some(id), json!({ "path": shown, "bytes": bytes }));
        Ok(Stored { bytes })
    }

    /// Unpacks a tar archive into a directory of a sandbox.
    ///
    /// # Errors
    /// The sandbox's, or the guest's; part of the archive may have been unpacked by then.
    pub fn put_archive(
        self: &Arc<Self>,
        actor: &str,
        id: &str,
        to: &Transfer,
        data: impl Read,
    ) -> Result<Stored, Problem> {
        let done = self.put_archive_inner(actor, id, to, data);
        done.map_err(|problem| self.failed(actor, "treeIn", Some(id), problem))
    }

    fn put_archive_inner(
        self: &Arc<Self>,
        actor: &str,
        id: &str,
        to: &Transfer,
        data: impl Read,
    ) -> Result<Stored, Problem> {
        self.refuse_when_draining()?;
        let (ticket, _) = self.ticket(id)?;
        let shown = String::from_utf8_lossy(&to.path);
        self.report(actor, "treeIn", Some(id), json!({ "path": shown }))?;
        if to.parents {
            let make = [&b"mkdir"[..], b"-p", b"--", &to.path];
            self.tool(&ticket, &make, io::empty(), &mut io::sink())?;
        }
        let limit = self.config.transfer_limit;
        let unpack = [&b"tar"[..], b"-x", b"-f", b"-", b"-C", &to.path];
        let data = Bounded { inner: data, left: limit };
        let bytes = self.tool(&ticket, &unpack, data, &mut io::sink())?;
        self.note(actor, "treeInDone", Some(id), json!({ "path": shown, "bytes": bytes }));
        Ok(Stored { bytes })
    }

    /// Packs a directory, or a file, of a sandbox into a tar archive. Names in it are relative to
    /// the path, or the file's own.
    ///
    /// # Errors
    /// The sandbox's, or the guest's; part of the archive may have been delivered by then.
    pub fn get_archive(
        self: &Arc<Self>,
        actor: &str,
        id: &str,
        path: &[u8],
        mut sink: impl Write + Send,
    ) -> Result<Stored, Problem> {
        let done = self.get_archive_inner(actor, id, path, &mut sink);
        done.map_err(|problem| self.failed(actor, "treeOut", Some(id), problem))
    }

    fn get_archive_inner(
        self: &Arc<Self>,
        actor: &str,
        id: &str,
        path: &[u8],
        sink: &mut (dyn Write + Send),
    ) -> Result<Stored, Problem> {
        self.refuse_when_draining()?;
        let (ticket, _) = self.ticket(id)?;
        let shown = String::from_utf8_lossy(path);
        self.report(actor, "treeOut", Some(id), json!({ "path": shown }))?;
        let pack = [&b"tar"[..], b"-c", b"-f", b"-", b"-C", path, b"."];
        let limit = self.config.transfer_limit;
        let mut counted = Counted { sink, bytes: 0, limit };
        self.tool(&ticket, &pack, io::empty(), &mut counted)?;
        let bytes = counted.bytes;
        self.note(actor, "treeOutDone", Some(id), json!({ "path": shown, "bytes": bytes }));
        Ok(Stored { bytes })
    }

    /// Runs a program of the guest's as its root, without the image's settings, with input and
    /// output of ours; returns how much of the input it was given.
    fn tool(
        self: &Arc<Self>,
        ticket: &super::run::Ticket,
        argv: &[&[u8]],
        mut data: impl Read,
        sink: &mut (dyn Write + Send),
    ) -> Result<u64, Problem> {
        let limit = self.config.transfer_limit;
        let mut order = Order::new(argv.iter().map(|word| word.to_vec()));
        order.no_template_defaults = true;
        order.stdin = true;
        let (input, mut output, first) = self.launch(ticket.entry(), order)?;
        let program = String::from_utf8_lossy(argv.first().copied().unwrap_or_default());
        let mut first = Some(first);
        std::thread::scope(|scope| {
            // Output is read while input is written, or both would wait for each other.
            let reader = scope.spawn(move || {
                let mut complaint = Vec::new();
                loop {
                    let event = match first.take() {
                        Some(event) => event,
                        None => output.next_event()?,
                    };
                    match event {
                        ExecEvent::Started { .. } => {}
                        ExecEvent::Stdout(bytes) => {
                            sink.write_all(&bytes).map_err(ClientError::Local)?;
                        }
                        ExecEvent::Stderr(bytes) => {
                            let room = MAX_COMPLAINT.saturating_sub(complaint.len());
                            complaint.extend_from_slice(&bytes[..bytes.len().min(room)]);
                        }
                        ExecEvent::Exited(exit) => return Ok((exit, complaint)),
                        ExecEvent::Failed(failure) => return Err(ClientError::Failed(failure)),
                    }
                }
            });
            let sent = feed(&mut data, &input);
            if sent.is_err() {
                // Half an archive is none: the program must not think that it is complete.
                let _ = input.hang_up();
            }
            let ended = reader.join().map_err(|_| Problem::new(Kind::Internal, "a thread died"))?;
            let sent = match sent {
                Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                    return Err(too_large(limit));
                }
                Err(error) => return Err(Problem::because(Kind::BadRequest, &error)),
                Ok(sent) => sent,
            };
            match ended {
                Ok((exit, _)) if exit.code == Some(0) => Ok(sent),
                Ok((_, complaint)) => {
                    let complaint = String::from_utf8_lossy(&complaint);
                    let shown: String = complaint
                        .trim()
                        .chars()
                        .map(|c| if c.is_control() { ' ' } else { c })
                        .collect();
                    Err(Problem::new(
                        Kind::GuestRefused,
                        format!("{program} in the guest: {shown}"),
                    ))
                }
                Err(ClientError::Failed(failure)) if failure.shell_code() == 127 => {
                    Err(Problem::new(
                        Kind::GuestRefused,
                        format!("the guest has no {program}, which directories need"),
                    )
                    .hint("copy single files, or put tar into the image"))
                }
                Err(ClientError::Local(error)) if error.kind() == io::ErrorKind::FileTooLarge => {
                    Err(too_large(limit))
                }
                Err(error) => Err(self.blame(ticket.entry(), error)),
            }
        })
    }
}

/// Sends everything; how much that was. A program that has ended needs no more.
fn feed(
    data: &mut impl Read,
    input: &parbake_protocol::agent::ExecInput<std::os::unix::net::UnixStream>,
) -> io::Result<u64> {
    let mut buffer = vec![0; 64 << 10];
    let mut sent = 0;
    loop {
        let count = match data.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if input.write_stdin(&buffer[..count]).is_err() {
            return Ok(sent);
        }
        sent += count as u64;
    }
    let _ = input.close_stdin();
    Ok(sent)
}

fn too_large(limit: u64) -> Problem {
    Problem::new(Kind::TooLarge, format!("it has more than {limit} bytes"))
        .hint("start parbaked with a larger --transfer-limit")
}

/// Writes so much and no more.
struct Counted<'a> {
    sink: &'a mut (dyn Write + Send),
    bytes: u64,
    limit: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes + bytes.len() as u64 > self.limit {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, told(&too_large(self.limit))));
        }
        let count = self.sink.write(bytes)?;
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}
