//! The socket device, its clients and its listeners.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use parbake_protocol::vmm;
use parbake_vmm::device::VirtioDevice;
use parbake_vmm::device::vsock::Vsock;
use crate::machine::{Bench, Input, drive};
use tempfile::TempDir;

struct Sockets {
    directory: TempDir,
    generation: usize,
    clients: Vec<UnixStream>,
    listener: Option<UnixListener>,
}

impl Bench for Sockets {
    fn device(&mut self) -> Box<dyn VirtioDevice> {
        self.generation += 1;
        let socket = self.directory.path().join(self.generation.to_string());
        let port = self.directory.path().join(format!("{}_1", self.generation));
        let listener = UnixListener::bind(port).expect("listener");
        listener.set_nonblocking(true).expect("nonblocking");
        self.listener = Some(listener);
        Box::new(Vsock::open(&vmm::Vsock { guest_cid: 3, socket }).expect("vsock"))
    }

    fn header(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let (op, ports, len) = (input.byte() % 9, input.byte(), input.half() % 2048);
        let mut header = Vec::from(3u64.to_le_bytes());
        header.extend(2u64.to_le_bytes());
        header.extend(u32::from(ports & 3).to_le_bytes());
        header.extend(u32::from(ports >> 4 & 3).to_le_bytes());
        header.extend(u32::from(len).to_le_bytes());
        header.extend([1, 0, op, 0]);
        header.extend(u32::from(input.byte() % 4).to_le_bytes());
        header.extend((u32::from(input.byte()) << 8).to_le_bytes());
        header.extend(u32::from(input.byte()).to_le_bytes());
        header
    }

    fn host(&mut self, input: &mut Input<'_>) {
        let index = usize::from(input.byte());
        let count = self.clients.len();
        match input.byte() % 6 {
            0 if count < 8 => {
                let socket = self.directory.path().join(self.generation.to_string());
                if let Ok(mut client) = UnixStream::connect(socket) {
                    client.set_nonblocking(true).expect("nonblocking");
                    let port = input.byte() % 4;
                    let _ = client.write_all(format!("CONNECT {port}\n").as_bytes());
                    self.clients.push(client);
                }
            }
            1 if count < 8 => {
                if let Some(Ok((client, _))) = self.listener.as_ref().map(UnixListener::accept) {
                    client.set_nonblocking(true).expect("nonblocking");
                    self.clients.push(client);
                }
            }
            2 if count > 0 => {
                let len = input.byte().into();
                let _ = self.clients[index % count].write(&input.bytes(len));
            }
            3 if count > 0 => {
                let _ = self.clients[index % count].read(&mut [0; 4096]);
            }
            4 if count > 0 => {
                let how = [std::net::Shutdown::Read, std::net::Shutdown::Write][index & 1];
                let _ = self.clients[index / 2 % count].shutdown(how);
            }
            5 if count > 0 => drop(self.clients.swap_remove(index % count)),
            _ => {}
        }
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut bench = Sockets { directory, generation: 0, clients: Vec::new(), listener: None };
    drive(&mut bench, data);
}
