//! Drives one monitor by hand: `drive PARBAKE_VMM CONFIG.json`, then one command a line on
//! standard input: `pause`, `resume`, `status`, `quit`, `snapshot DIRECTORY DISKS`,
//! `wait VALUE` (for a doorbell) or `sleep MILLISECONDS`. Everything the monitor says is printed
//! with the milliseconds since its start.
#![allow(missing_docs)]

#[path = "../tests/support/channel.rs"]
mod channel;

use std::path::Path;
use std::time::Duration;

use channel::Monitor;
use parbake_protocol::vmm::{Event, Message, Request};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(binary), Some(config)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: drive PARBAKE_VMM CONFIG.json < commands");
        std::process::exit(2);
    };
    let config = std::fs::read(config).expect("configuration");
    let config = serde_json::from_slice(&config).expect("configuration");
    let mut monitor = Monitor::spawn_binary(Path::new(&binary), &config);
    monitor.patience(Duration::from_secs(600));
    for line in std::io::stdin().lines() {
        let line = line.expect("command");
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            ["pause"] => say(&mut monitor, &Request::Pause),
            ["resume"] => say(&mut monitor, &Request::Resume),
            ["status"] => say(&mut monitor, &Request::Status),
            ["quit"] => say(&mut monitor, &Request::Quit),
            ["snapshot", directory, disks] => {
                std::fs::create_dir_all(directory).expect("directory");
                let (_, report) =
                    monitor.snapshot(Path::new(directory), disks.parse().expect("disks"));
                println!("{:>10.3} {report:?}", at(&monitor));
            }
            ["wait", value] => {
                let value: u32 = value.parse().expect("value");
                while listen(&mut monitor) != Some(Event::Doorbell { value }) {}
            }
            ["sleep", time] => {
                std::thread::sleep(Duration::from_millis(time.parse().expect("milliseconds")));
            }
            _ => eprintln!("what is {line:?}?"),
        }
    }
    while listen(&mut monitor).is_some() {}
    println!("{:>10.3} exit code {}", at(&monitor), monitor.wait());
}

fn at(monitor: &Monitor) -> f64 {
    monitor.spawned.elapsed().as_secs_f64() * 1000.0
}

fn say(monitor: &mut Monitor, request: &Request) {
    let reply = monitor.request(request);
    println!("{:>10.3} {reply:?}", at(monitor));
}

/// Prints the next event; none at the end of the channel.
fn listen(monitor: &mut Monitor) -> Option<Event> {
    let event = match monitor.pending.pop_front() {
        Some(event) => event,
        None => match monitor.message()? {
            Message::Event(event) => event,
            Message::Reply(reply) => panic!("unexpected {reply:?}"),
        },
    };
    println!("{:>10.3} {event:?}", at(monitor));
    Some(event)
}
