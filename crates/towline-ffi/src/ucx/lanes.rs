//! What an endpoint's bytes can go over: its lanes.
//!
//! From 1.14 on UCX is asked (`ucp_ep_query`). 1.13 takes the same question and answers nothing, so there its printed description
//! (`ucp_ep_print_info`) is read; what can't be read is unknown, never guessed. Either way lanes are what UCX *may* use: which of
//! them a read of some size takes, its protocol table decides.

use std::ffi::c_void;

use super::abi::{EP_ATTR_TRANSPORTS, EpAttr, TransportEntry, Transports};
use super::{Endpoint, UcxError, Version, text};

/// The first version whose `ucp_ep_query` knows transports.
const QUERY_SINCE: Version = Version { major: 1, minor: 14, release: 0 };
/// Most lanes of an endpoint, in any version (`UCP_MAX_LANES` is 6 to 64).
const LANES_MAX: usize = 64;

/// One lane.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane {
    /// UCX's word for the transport: `rc_verbs`, `rc_mlx5`, `tcp`, `sysv`, `cma`, …
    pub transport: String,
    /// The device: `mlx5_0:1`, `eth0`, `memory`.
    pub device: String,
    /// What it is used for, as far as it is said: `rma`, `am`, `rma_bw#0`, `wireup`, `cm`.
    pub uses: Vec<String>,
}

/// An endpoint's lanes, and how they are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// Each lane once.
    pub lanes: Vec<Lane>,
    /// How they are known.
    pub source: Source,
}

/// How lanes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The library was asked.
    Query,
    /// Its printed description was read.
    PrintInfo,
}

impl Endpoint {
    /// Asks for its lanes. They may change until the peer has answered, which a [`flush`](super::Batch::flush) shows. Nothing when the
    /// library doesn't say, or not in a way that is understood.
    ///
    /// # Errors
    /// UCX's.
    pub fn lanes(&self) -> Result<Option<Lanes>, UcxError> {
        let printed = parse(&self.describe());
        if self.ucx().version() < QUERY_SINCE {
            return Ok(printed.map(|lanes| Lanes { lanes, source: Source::PrintInfo }));
        }
        let mut lanes = self.query()?;
        // Uses are only printed. Where the two disagree on what there is, the answer counts.
        for lane in &mut lanes {
            let same = |told: &&Lane| (&told.transport, &told.device) == (&lane.transport, &lane.device);
            if let Some(told) = printed.iter().flatten().find(same) {
                lane.uses.clone_from(&told.uses);
            }
        }
        Ok((!lanes.is_empty()).then_some(Lanes { lanes, source: Source::Query }))
    }

    fn query(&self) -> Result<Vec<Lane>, UcxError> {
        let none = TransportEntry { transport_name: std::ptr::null(), device_name: std::ptr::null() };
        let mut entries = [none; LANES_MAX];
        let mut attr = EpAttr {
            field_mask: EP_ATTR_TRANSPORTS,
            name: [0; 32],
            local_sockaddr: [0; 16],
            remote_sockaddr: [0; 16],
            transports: Transports {
                entries: entries.as_mut_ptr(),
                num_entries: u32::try_from(LANES_MAX).unwrap_or(u32::MAX),
                entry_size: size_of::<TransportEntry>(),
            },
            user_data: std::ptr::null_mut(),
        };
        let Some(endpoint) = self.0.handle() else { return Ok(Vec::new()) };
        // SAFETY: an endpoint of this thread's; the structure has room for what its mask asks for, and the list for what it says.
        let status = unsafe { (self.ucx().table.ucp_ep_query)(endpoint, &raw mut attr) };
        self.ucx().words.check("ucp_ep_query", status)?;
        let found = usize::try_from(attr.transports.num_entries).unwrap_or(0).min(LANES_MAX);
        let mut lanes: Vec<Lane> = Vec::new();
        for entry in &entries[..found] {
            // SAFETY: UCX has filled it with texts of its own.
            let transport = unsafe { text(entry.transport_name) };
            // SAFETY: as above.
            let device = unsafe { text(entry.device_name) };
            if let (Some(transport), Some(device)) = (transport, device) {
                let lane = Lane { transport, device, uses: Vec::new() };
                if !lanes.contains(&lane) {
                    lanes.push(lane);
                }
            }
        }
        Ok(lanes)
    }

    /// UCX's own description, for people: lanes, and which protocol is used up to which size. Empty if it can't be had, or was closed.
    pub fn describe(&self) -> String {
        let Some(endpoint) = self.0.handle() else { return String::new() };
        let (mut buffer, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: two variables of this call's, which live until the stream is closed.
        let stream = unsafe { libc::open_memstream(&raw mut buffer, &raw mut len) };
        if stream.is_null() {
            return String::new();
        }
        // SAFETY: an endpoint of this thread's, and a stream that is open.
        unsafe { (self.ucx().table.ucp_ep_print_info)(endpoint, stream) };
        // SAFETY: opened above, closed once.
        unsafe { libc::fclose(stream) };
        if buffer.is_null() {
            return String::new();
        }
        // SAFETY: the stream has left so many bytes there.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) };
        let text = String::from_utf8_lossy(bytes).into_owned();
        // SAFETY: allocated by the stream, and given to the caller of it.
        unsafe { libc::free(buffer.cast::<c_void>()) };
        text
    }
}

/// Reads lanes from a description, whose lines are like
/// `#   lane[0]:  2:rc_verbs/rxe0:1.0 md[2]  -> md[2]/ib/sysdev[255]  rma_bw#0 am am_bw#0`.
fn parse(description: &str) -> Option<Vec<Lane>> {
    let lanes: Option<Vec<Lane>> = description.lines().filter_map(lane).collect();
    lanes.filter(|lanes| !lanes.is_empty())
}

/// One line: nothing if it is about no lane; nothing inside if it is and can't be understood.
fn lane(line: &str) -> Option<Option<Lane>> {
    let line = line.trim_start_matches(['#', ' ']);
    let (_, rest) = line.strip_prefix("lane[")?.split_once("]:")?;
    let mut words = rest.split_whitespace();
    let resource = words.next().and_then(|word| word.split_once(':')).and_then(|(index, rest)| {
        let (transport, device) = rest.split_once('/')?;
        // The path of a device with several is at its end: `mlx5_0:1.0`.
        let device = match device.rsplit_once('.') {
            Some((device, path)) if path.bytes().all(|byte| byte.is_ascii_digit()) => device,
            _ => device,
        };
        index.parse::<u32>().ok().map(|_| (transport.to_owned(), device.to_owned()))
    });
    let Some((transport, device)) = resource else { return Some(None) };
    // Later versions tell a size of segments first.
    let uses = words.skip_while(|word| *word != "->").skip(2);
    let uses = uses.filter(|word| *word != "seg" && !word.bytes().all(|byte| byte.is_ascii_digit()));
    Some(Some(Lane { transport, device, uses: uses.map(str::to_owned).collect() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(transport: &str, device: &str, uses: &[&str]) -> Lane {
        let uses = uses.iter().map(|word| (*word).to_owned()).collect();
        Lane { transport: transport.into(), device: device.into(), uses }
    }

    #[test]
    fn lanes_are_read_as_each_version_prints_them() {
        // UCX 1.13.1, UCP 1.23.0, and what a device with a port looks like.
        let old = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n\
            #                 lane[0]:  0:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] am am_bw#0 keepalive wireup\n\
            #\n#                  rma_bw: mds #\n";
        assert_eq!(parse(old), Some(vec![lane("tcp", "lo", &["am", "am_bw#0", "keepalive", "wireup"])]));
        let new = "# UCP endpoint \n#                 lane[0]:  1:sysv/memory.0 md[1]  -> md[1]/sysv/sysdev[255] seg 4294967295 am\n";
        assert_eq!(parse(new), Some(vec![lane("sysv", "memory", &["am"])]));
        let two = "# lane[0]:  2:rc_verbs/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[0] rma_bw#0 am\n\
            # lane[1]:  5:rc_verbs/mlx5_1:1.1 md[3] -> md[3]/ib/sysdev[1] rma_bw#1\n";
        let expected =
            [lane("rc_verbs", "mlx5_0:1", &["rma_bw#0", "am"]), lane("rc_verbs", "mlx5_1:1", &["rma_bw#1"])];
        assert_eq!(parse(two), Some(expected.into()));
    }

    #[test]
    fn what_cant_be_read_is_unknown() {
        for text in [
            "",
            "# UCP endpoint",
            "# lane[0]: what is this",
            "# lane[0]: x:tcp/lo.0 md[0]",
            "# lane[0]: 0:tcp",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let one_of_two = "# lane[0]:  0:tcp/lo.0 md[0] -> md[0]/tcp am\n# lane[1]:  something new\n";
        assert_eq!(parse(one_of_two), None, "half of the lanes would be a wrong answer");
    }
}
