//! Which frames are needed, and how they are fetched: close ones together, and not too many at once.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};

use crate::artifact::{ArtifactConfig, ArtifactError};
use crate::assembly::{Assembly, Target};
use crate::pack::{Directory, Frame};

/// Frames this close together are fetched in one request.
pub(crate) const MAX_GAP: u64 = 128 * 1024;
/// How much one request fetches at most, so that several run side by side.
const MAX_REQUEST: u64 = 16 * 1024 * 1024;

/// Frames that are fetched in one request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) pack: u16,
    pub(crate) frames: Vec<u32>,
}

/// For each frame, where its pages go.
pub(crate) type Needed = HashMap<(u16, u32), Vec<Target>>;

pub(crate) fn needed_frames(
    assembly: &Assembly,
    directories: &BTreeMap<u16, Directory>,
    config: &ArtifactConfig,
) -> Result<Needed, ArtifactError> {
    let mut needed = Needed::new();
    for target in assembly.targets() {
        let extent = &target.extent;
        let frame: Option<&Frame> = directories
            .get(&extent.pack)
            .and_then(|directory| directory.frames().get(extent.frame as usize));
        let end = usize::from(extent.first) + extent.count as usize;
        if frame.is_none_or(|frame| frame.pages.len() < end) {
            let pack = config.packs.get(usize::from(extent.pack)).map(|record| record.pack);
            let what = match pack {
                Some(pack) => format!("a page map points outside of pack {pack}"),
                None => format!("a page map names pack {}", extent.pack),
            };
            return Err(ArtifactError::Inconsistent(what));
        }
        needed.entry((extent.pack, extent.frame)).or_default().push(target);
    }
    Ok(needed)
}

/// Groups frames into requests.
pub(crate) fn jobs(needed: &Needed, directories: &BTreeMap<u16, Directory>) -> Vec<Job> {
    let mut keys: Vec<_> = needed.keys().copied().collect();
    keys.sort_unstable();
    let mut jobs: Vec<Job> = Vec::new();
    for (pack, number) in keys {
        let frame = &directories[&pack].frames()[number as usize];
        if let Some(job) = jobs.last_mut()
            && job.pack == pack
        {
            let (start, len) = job.span(directories);
            let end = frame.offset + u64::from(frame.len);
            if frame.offset - (start + len) <= MAX_GAP && end - start <= MAX_REQUEST {
                job.frames.push(number);
                continue;
            }
        }
        jobs.push(Job { pack, frames: vec![number] });
    }
    jobs
}

impl Job {
    pub(crate) fn span(&self, directories: &BTreeMap<u16, Directory>) -> (u64, u64) {
        self.span_in(&directories[&self.pack])
    }

    /// Where in the pack the frames start, and how long they are with the gaps between them.
    pub(crate) fn span_in(&self, directory: &Directory) -> (u64, u64) {
        let frame = |number: Option<&u32>| number.map(|&n| &directory.frames()[n as usize]);
        match (frame(self.frames.first()), frame(self.frames.last())) {
            (Some(first), Some(last)) => {
                (first.offset, last.offset + u64::from(last.len) - first.offset)
            }
            _ => (0, 0),
        }
    }
}

/// Skips to a frame and reads it.
pub(crate) fn read_frame(
    reader: &mut dyn Read,
    position: &mut u64,
    frame: &Frame,
) -> io::Result<Vec<u8>> {
    let gap = frame.offset - *position;
    let skipped = io::copy(&mut Read::take(&mut *reader, gap), &mut io::sink())?;
    let mut bytes = vec![0; frame.len as usize];
    if skipped < gap {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    reader.read_exact(&mut bytes)?;
    *position = frame.offset + u64::from(frame.len);
    Ok(bytes)
}
