//! Commands: with their streams on an upgraded connection, or as one line of JSON an event.

use std::io::{self, Cursor, Read};
use std::sync::mpsc;

use axum::Extension;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::header::{CONNECTION, CONTENT_TYPE, UPGRADE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::OnUpgrade;
use parbake_protocol::agent::{ExecEvent as Happened, WindowSize};

use super::body;
use super::{Body, Shared, blocking};
use crate::listen::Actor;
use crate::manager::{Execution, gone};
use crate::model::{Data, ExecEvent, ExecRequest, ExitStatus, StartFailure};
use crate::problem::{Kind, Problem, Refusal};
use crate::socket::Socket;
use crate::wire::{self, Frame};

/// Run a command
///
/// Plainly, the answer is a stream of events, one JSON document a line, and a caller who goes away
/// ends the command. With `Connection: Upgrade` and `Upgrade: parbake-exec/1` the connection then
/// carries frames both ways, for standard input, terminals and signals: a little-endian 32-bit
/// length of what follows, a kind byte, a payload. To the command: 0x10 stdin, 0x11 end of stdin,
/// 0x12 window size (JSON), 0x13 signal (JSON). From it: 0x90 started (JSON), 0x91 stdout, 0x92
/// stderr, 0x93 credit (JSON), 0x94 exited (`ExitStatus`), 0x95 failed (`StartFailure`). At most
/// 262144 bytes of stdin may be sent beyond the credit received.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "commands",
    params(("id" = String, Path)), request_body = ExecRequest,
    responses(
        (status = 200, description = "Events, one a line", content_type = "application/x-ndjson",
            body = ExecEvent),
        (status = 101, description = "The command was started; frames follow"),
        (status = "default", body = Refusal)))]
pub async fn exec(
    State(manager): State<Shared>,
    Extension(Actor(actor)): Extension<Actor>,
    Path(id): Path<String>,
    headers: HeaderMap,
    mut request: Request,
) -> Result<Response, Problem> {
    let wanted = headers.get(UPGRADE).map(|value| value.as_bytes().to_owned());
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let Body(order) = Body::<ExecRequest>::from_request(request, &()).await?;
    match (wanted, upgrade) {
        (None, _) => plain(manager, actor, id, order).await,
        (Some(name), Some(upgrade)) if name.eq_ignore_ascii_case(wire::PROTOCOL.as_bytes()) => {
            streams(manager, actor, id, order, upgrade).await
        }
        _ => {
            let message = format!("the only upgrade there is is {}", wire::PROTOCOL);
            Err(Problem::new(Kind::BadRequest, message))
        }
    }
}

async fn plain(
    manager: Shared,
    actor: String,
    id: String,
    order: ExecRequest,
) -> Result<Response, Problem> {
    if order.tty.is_some() || order.stdin {
        let message = format!("stdin and tty want a connection upgraded to {}", wire::PROTOCOL);
        return Err(Problem::new(Kind::BadRequest, message)
            .hint("all of the input at once goes into `input`"));
    }
    let input = order.input.as_ref().map(Data::bytes).transpose();
    let input = input.map_err(|why| Problem::new(Kind::BadRequest, format!("input: {why}")))?;
    let detach = order.detach;
    let mut execution = blocking(move || manager.exec(&actor, &id, &order)).await?;
    let hang_up = HangUp(execution.input.clone());
    let (writer, body) = body::writer(hang_up);
    if let Some(bytes) = input {
        let input = execution.input.clone();
        std::thread::spawn(move || {
            // A command that does not read it has its reasons.
            let _ = input.write_stdin(&bytes).and_then(|()| input.close_stdin());
        });
    }
    std::thread::spawn(move || {
        loop {
            let event = match execution.next_event() {
                Ok(Happened::Started { pid }) => ExecEvent::Started { pid },
                Ok(Happened::Stdout(bytes)) => ExecEvent::Stdout(Data::new(bytes)),
                Ok(Happened::Stderr(bytes)) => ExecEvent::Stderr(Data::new(bytes)),
                Ok(Happened::Exited(exit)) => ExecEvent::Exited(ExitStatus::from(&exit)),
                Ok(Happened::Failed(failure)) => ExecEvent::Failed(StartFailure {
                    exit_code: failure.shell_code(),
                    message: failure.to_string(),
                }),
                Err(error) => ExecEvent::Failed(gone(&error)),
            };
            let last = matches!(event, ExecEvent::Exited(_) | ExecEvent::Failed(_));
            let started = matches!(event, ExecEvent::Started { .. });
            let mut line = serde_json::to_vec(&event).unwrap_or_default();
            line.push(b'\n');
            if writer.send(line).is_err() || last {
                return;
            }
            if detach && started {
                return execution.leave();
            }
        }
    });
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// Ends a command when its caller has gone.
struct HangUp(parbake_protocol::agent::ExecInput<std::os::unix::net::UnixStream>);

impl Drop for HangUp {
    fn drop(&mut self) {
        let _ = self.0.hang_up();
    }
}

async fn streams(
    manager: Shared,
    actor: String,
    id: String,
    order: ExecRequest,
    upgrade: OnUpgrade,
) -> Result<Response, Problem> {
    if order.input.is_some() {
        let message = "on an upgraded connection standard input is sent as frames";
        return Err(Problem::new(Kind::BadRequest, message));
    }
    let detach = order.detach;
    let execution = blocking(move || manager.exec(&actor, &id, &order)).await?;
    tokio::spawn(async move {
        // Dropping the execution ends the command.
        let Ok(upgraded) = upgrade.await else { return };
        let Ok((socket, rest)) = Socket::of(upgraded) else { return };
        std::thread::spawn(move || relay(execution, socket, rest, detach));
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, wire::PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// Carries frames both ways until the command or the caller is gone.
fn relay(mut execution: Execution, mut socket: Socket, rest: bytes::Bytes, detach: bool) {
    let (Ok(reader), Ok(credits)) = (socket.try_clone(), socket.try_clone()) else { return };
    let input = execution.input.clone();
    let writing = std::sync::Arc::new(std::sync::Mutex::new(()));
    let turn = std::sync::Arc::clone(&writing);
    let listener = std::thread::spawn(move || {
        // Ended by the socket's end, of which either side sees to it.
        let _ = listen(&input, Cursor::new(rest).chain(reader), credits, &turn);
        let _ = input.hang_up();
    });
    loop {
        let frame = match execution.next_event() {
            Ok(Happened::Started { pid }) => Frame::Started(pid),
            Ok(Happened::Stdout(bytes)) => Frame::Stdout(bytes),
            Ok(Happened::Stderr(bytes)) => Frame::Stderr(bytes),
            Ok(Happened::Exited(exit)) => Frame::Exited(ExitStatus::from(&exit)),
            Ok(Happened::Failed(failure)) => Frame::Failed(StartFailure {
                exit_code: failure.shell_code(),
                message: failure.to_string(),
            }),
            Err(error) => Frame::Failed(gone(&error)),
        };
        let last = matches!(frame, Frame::Exited(_) | Frame::Failed(_))
            || (detach && matches!(frame, Frame::Started(_)));
        let sent = {
            let _turn = writing.lock();
            frame.write(&mut socket)
        };
        if sent.is_err() || last {
            break;
        }
    }
    if detach {
        execution.leave();
    } else {
        drop(execution);
    }
    socket.shut_down();
    let _ = listener.join();
}

/// Passes on what the caller sends. Standard input waits for the command in a thread of its own, so
/// that a signal never waits behind it.
fn listen(
    input: &parbake_protocol::agent::ExecInput<std::os::unix::net::UnixStream>,
    mut reader: impl Read,
    mut credits: Socket,
    turn: &std::sync::Mutex<()>,
) -> io::Result<()> {
    let waiting = std::sync::atomic::AtomicUsize::new(0);
    let (pass, passed) = mpsc::channel::<Option<Vec<u8>>>();
    std::thread::scope(|scope| {
        let waiting = &waiting;
        scope.spawn(move || {
            while let Ok(piece) = passed.recv() {
                let Some(bytes) = piece else {
                    let _ = input.close_stdin();
                    continue;
                };
                if input.write_stdin(&bytes).is_err() {
                    return;
                }
                waiting.fetch_sub(bytes.len(), std::sync::atomic::Ordering::SeqCst);
                let count = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                let _turn = turn.lock();
                if Frame::Credit(count).write(&mut credits).is_err() {
                    return;
                }
            }
        });
        let result = loop {
            let frame = match Frame::read(&mut reader) {
                Ok(Some(frame)) => frame,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            let done = match frame {
                Frame::Stdin(bytes) => {
                    let held = waiting.fetch_add(bytes.len(), std::sync::atomic::Ordering::SeqCst)
                        + bytes.len();
                    if held > wire::WINDOW {
                        break Err(io::Error::other("more than the window was sent"));
                    }
                    // Its reader ends when the command does not read any more.
                    let _ = pass.send(Some(bytes));
                    Ok(())
                }
                Frame::StdinEnd => {
                    let _ = pass.send(None);
                    Ok(())
                }
                Frame::Resize(size) => {
                    input.resize(WindowSize { rows: size.rows, columns: size.columns })
                }
                Frame::Signal(number) => input.signal(number),
                _ => Err(io::Error::other("a frame that only parbaked sends")),
            };
            if done.is_err() {
                break done;
            }
        };
        // Lets the other thread go, wherever it waits.
        let _ = input.hang_up();
        drop(pass);
        result
    })
}
