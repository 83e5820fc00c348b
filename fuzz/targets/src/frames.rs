//! Bytes from the other side, cut anywhere: never a panic, and what is understood is understood
//! the same again.

use parbake_protocol::agent::FrameReader;

/// Runs one input.
pub fn run(data: &[u8]) {
    let (cut, data) = data.split_first().map_or((1, data), |(c, d)| (usize::from(*c).max(1), d));
    let mut reader = FrameReader::new();
    for piece in data.chunks(cut) {
        reader.push(piece);
        loop {
            match reader.next_buffered() {
                Ok(Some(frame)) => {
                    let mut bytes = Vec::new();
                    frame.encode(&mut bytes).expect("a received frame is short enough to send");
                    let again = FrameReader::new().next(&mut bytes.as_slice());
                    assert_eq!(again.expect("own frame"), Some(frame));
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}
