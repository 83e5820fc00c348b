//! Conditions a bake waits for, looked at from inside the guest: `parbake-agent check …` exits
//! with 0 when one holds, with 1 and a sentence when it does not.
//!
//! It needs nothing of the image: no shell, no tools, no name service. A bake runs it as
//! `/proc/1/exe`, which stays the agent when the initramfs it came from is long gone.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How long a connection may take, and each part of an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest status line read, and the most of a body.
const LONGEST_HEAD: usize = 16 << 10;
const LARGEST_BODY: u64 = 256 << 20;

/// Looks, and tells by the exit code.
pub fn run(mut words: impl Iterator<Item = OsString>) -> ExitCode {
    let mut word = || words.next().unwrap_or_default();
    let kind = word();
    let subject = word();
    let text = subject.to_string_lossy();
    let result = match kind.as_bytes() {
        b"tcp" => match text.parse() {
            Ok(port) => tcp(port),
            Err(_) => Err(format!("{text:?} is no port")),
        },
        b"http" => match word().to_string_lossy().parse() {
            Ok(status) => http(&text, status),
            Err(_) => Err("the status is no number".to_owned()),
        },
        b"file" => file(Path::new(&subject)),
        b"process" => process(subject.as_bytes()),
        b"alive" => alive(&text),
        _ => {
            eprintln!("no such check: {}", kind.to_string_lossy());
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// A port of the loopback accepts a connection, by either protocol.
fn tcp(port: u16) -> Result<(), String> {
    connect(None, port).map(drop).map_err(|error| format!("port {port}: {error}"))
}

/// Connects to an address of the guest; without one, to the loopback.
fn connect(address: Option<IpAddr>, port: u16) -> io::Result<TcpStream> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let addresses = match &address {
        Some(address) => std::slice::from_ref(address),
        None => &loopback[..],
    };
    let mut first = None;
    for address in addresses {
        match TcpStream::connect_timeout(&SocketAddr::new(*address, port), PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
}

/// A GET request is answered with this status. The body is read too, so that whoever answers has
/// done all of its work.
fn http(url: &str, status: u16) -> Result<(), String> {
    let target = Target::parse(url)?;
    let failed = |error: io::Error| format!("{url}: {error}");
    let mut stream = connect(target.address, target.port).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: parbake\r\nAccept: */*\r\nConnection: close\r\n\r\n",
        target.path, target.authority
    );
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    while !head.contains(&b'\n') {
        let read = stream.read(&mut buffer).map_err(failed)?;
        if read == 0 {
            return Err(format!("{url}: the answer ended in its first line"));
        }
        head.extend_from_slice(&buffer[..read]);
        if head.len() > LONGEST_HEAD {
            return Err(format!("{url}: the answer is not HTTP"));
        }
    }
    let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
    let mut words = line.split_ascii_whitespace();
    let code = words
        .next()
        .filter(|version| version.starts_with("HTTP/1."))
        .and_then(|_| words.next())
        .and_then(|code| code.parse::<u16>().ok())
        .ok_or_else(|| format!("{url}: the answer is not HTTP"))?;
    // What comes late, or never, does not change the status.
    let _ = io::copy(&mut stream.take(LARGEST_BODY), &mut io::sink());
    if code == status { Ok(()) } else { Err(format!("{url}: status {code}, not {status}")) }
}

/// An address of the guest, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct Target<'a> {
    authority: &'a str,
    /// Absent: the loopback.
    address: Option<IpAddr>,
    port: u16,
    path: &'a str,
}

impl<'a> Target<'a> {
    fn parse(url: &'a str) -> Result<Self, String> {
        let bad = |why: &str| Err(format!("{url:?}: {why}"));
        let Some(rest) = url.strip_prefix("http://") else {
            return bad("it must begin with http://");
        };
        if rest.bytes().any(|byte| byte.is_ascii_control() || byte == b' ') {
            return bad("it has a space or a control character in it");
        }
        let (authority, path) = match rest.find('/') {
            Some(slash) => (&rest[..slash], &rest[slash..]),
            None => (rest, "/"),
        };
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => match port.parse() {
                Ok(port) => (host, port),
                Err(_) => return bad("the port is no number"),
            },
            _ => (authority, 80),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = match host.parse::<IpAddr>() {
            Ok(address) if address.is_unspecified() => None,
            Ok(address) => Some(address),
            Err(_) if host == "localhost" => None,
            Err(_) => return bad("the host must be localhost or an address"),
        };
        Ok(Self { authority, address, port, path })
    }
}

fn file(path: &Path) -> Result<(), String> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// A process has this name: its program's file name, or what it calls itself.
fn process(name: &[u8]) -> Result<(), String> {
    let shown = || String::from_utf8_lossy(name).into_owned();
    let entries = fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?;
    // The kernel keeps 15 bytes of a name.
    let short = &name[..name.len().min(15)];
    for entry in entries.flatten() {
        let pid = entry.file_name();
        if !pid.as_bytes().iter().all(u8::is_ascii_digit) || !runs(&entry.path()) {
            continue;
        }
        let comm = fs::read(entry.path().join("comm")).unwrap_or_default();
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let program = command.split(|byte| *byte == 0).next().unwrap_or_default();
        let program = Path::new(OsStr::from_bytes(program)).file_name().unwrap_or_default();
        let is_self = pid.to_str().and_then(|pid| pid.parse().ok()) == Some(std::process::id());
        if !is_self && (comm.trim_ascii_end() == short || program.as_bytes() == name) {
            return Ok(());
        }
    }
    Err(format!("no process is named {:?}", shown()))
}

fn alive(pid: &str) -> Result<(), String> {
    let number = pid.parse::<u32>().map_err(|_| format!("{pid:?} is no process id"))?;
    if runs(&Path::new("/proc").join(number.to_string())) {
        Ok(())
    } else {
        Err(format!("process {number} has ended"))
    }
}

/// Whether a directory of `/proc` is there and is not one of a dead process.
fn runs(directory: &Path) -> bool {
    let stat = fs::read(directory.join("stat")).unwrap_or_default();
    // The state stands behind the name, which may hold anything, in brackets.
    let state = stat.iter().rposition(|byte| *byte == b')').and_then(|at| stat.get(at + 2));
    state.is_some_and(|state| !matches!(state, b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_is_open_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        tcp(port).unwrap();
        drop(listener);
        assert!(tcp(port).unwrap_err().contains(&port.to_string()));
        let six = TcpListener::bind("[::1]:0");
        if let Ok(six) = six {
            tcp(six.local_addr().unwrap().port()).unwrap();
        }
    }

    #[test]
    fn an_answer_counts_by_its_status() {
        // An address of its own: what another test tries on the loopback's ports does not get here.
        let listener = TcpListener::bind("127.0.0.7:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for answer in [
                &b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"[..],
                b"HTTP/1.0 503 Not Yet\r\n\r\n",
                b"SSH-2.0-x\r\n",
                b"",
            ] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    request.push(byte[0]);
                }
                assert!(request.starts_with(b"GET /health?x=1 HTTP/1.1\r\n"));
                stream.write_all(answer).unwrap();
            }
        });
        let url = format!("http://{address}/health?x=1");
        http(&url, 200).unwrap();
        assert!(http(&url, 200).unwrap_err().contains("503"));
        assert!(http(&url, 200).unwrap_err().contains("not HTTP"));
        assert!(http(&url, 200).unwrap_err().contains("ended"));
        server.join().unwrap();
    }

    #[test]
    fn addresses_are_taken_apart() {
        let target = |url| Target::parse(url).map(|t| (t.address, t.port, t.path.to_owned()));
        assert_eq!(target("http://localhost"), Ok((None, 80, "/".to_owned())));
        assert_eq!(target("http://0.0.0.0:8080/a/b"), Ok((None, 8080, "/a/b".to_owned())));
        let six = Some(IpAddr::V6(Ipv6Addr::LOCALHOST));
        assert_eq!(target("http://[::1]:1/"), Ok((six, 1, "/".to_owned())));
        assert_eq!(target("http://[::1]/"), Ok((six, 80, "/".to_owned())));
        for bad in
            ["https://localhost", "http://db/", "http://localhost:x/", "http://localhost/a b"]
        {
            assert!(target(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn processes_are_found_by_name_and_number() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        process(b"sleep").unwrap();
        alive(&child.id().to_string()).unwrap();
        child.kill().unwrap();
        // Not yet waited for: dead all the same.
        while alive(&child.id().to_string()).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait().unwrap();
        assert!(process(b"no-such-process-name").is_err());
        assert!(alive("x").is_err());
        file(Path::new("/proc/self")).unwrap();
        assert!(file(Path::new("/no/such")).unwrap_err().contains("/no/such"));
    }
}
