//! What is mapped for UCX: regions, for peers and for transfers of this agent, and other memory of its transfers.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use towline_ffi::ucx::{Context, Mapped, Reach, UcxError};
use towline_wire::id::RegionId;

use super::FORMAT;
use crate::region::{Access, Attacher, Memory};

/// How far the library is.
#[derive(Default)]
enum Stage {
    #[default]
    Opening,
    Open(Arc<Context>),
    Closed(String),
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct Book {
    stage: Stage,
    regions: BTreeMap<RegionId, Registered>,
}

struct Registered {
    memory: Arc<Memory>,
    access: Access,
    mapped: Option<Arc<Mapped>>,
}

/// What was a region.
pub(super) struct Gone(#[expect(dead_code, reason = "only to be dropped")] Option<Arc<Mapped>>);

impl Book {
    /// Why the transport can't be used; nothing while it opens or once it is open.
    pub(super) fn why_closed(&self) -> Option<String> {
        match &self.stage {
            Stage::Closed(why) => Some(why.clone()),
            Stage::Opening | Stage::Open(_) => None,
        }
    }

    /// Whether the library is still being opened.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.stage, Stage::Opening)
    }

    /// The library is open: gives the keys of what was registered before.
    pub(super) fn open(&mut self, context: &Arc<Context>) -> Vec<(RegionId, Vec<u8>)> {
        self.stage = Stage::Open(Arc::clone(context));
        let regions = self.regions.iter_mut();
        regions.filter_map(|(id, region)| Some((*id, region.offer(*id, context)?))).collect()
    }

    /// It can't be opened, or was closed.
    pub(super) fn close(&mut self, why: &str) {
        self.stage = Stage::Closed(why.into());
        self.regions.values_mut().for_each(|region| region.mapped = None);
    }

    /// Takes a region in, and gives its key if it can be offered now.
    pub(super) fn register(&mut self, id: RegionId, memory: &Arc<Memory>, access: Access) -> Option<Vec<u8>> {
        let mut region = Registered { memory: Arc::clone(memory), access, mapped: None };
        let key = match &self.stage {
            Stage::Open(context) => region.offer(id, context),
            Stage::Opening | Stage::Closed(_) => None,
        };
        self.regions.insert(id, region);
        key
    }

    /// Takes it out.
    pub(super) fn deregister(&mut self, id: RegionId) -> Gone {
        Gone(self.regions.remove(&id).and_then(|region| region.mapped))
    }
}

impl Registered {
    /// Maps it for peers. What can't be mapped isn't offered, and that is said: other transports may reach it.
    fn offer(&mut self, id: RegionId, context: &Arc<Context>) -> Option<Vec<u8>> {
        let reach = match self.access {
            Access::PeersRead => Reach::PeersRead,
            Access::PeersWrite => Reach::PeersWrite,
        };
        let Some(held) = self.memory.held() else {
            tracing::info!(region = %id, "a file's memory is not offered over ucx: its pages may go");
            return None;
        };
        let base = held_base(&self.memory)?;
        let offered = context.map(Arc::new(held), reach).and_then(|mapped| Ok((mapped.key()?, mapped)));
        match offered {
            Ok((key, mapped)) => {
                self.mapped = Some(Arc::new(mapped));
                Some([&[FORMAT][..], &base.to_le_bytes(), &key].concat())
            }
            Err(error) => {
                tracing::warn!(region = %id, %error, "region not offered over ucx; see ulimit -l");
                None
            }
        }
    }
}

/// Where a memory begins, as peers name it.
fn held_base(memory: &Memory) -> Option<u64> {
    use towline_ffi::pinned::Pinned as _;
    memory.held().map(|held| held.base().as_ptr().expose_provenance() as u64)
}

/// The base address and UCX's key in a region's key on a card.
pub(super) fn parse_key(key: &[u8]) -> Option<(u64, &[u8])> {
    let (base, key) = key.strip_prefix(&[FORMAT])?.split_first_chunk()?;
    Some((u64::from_le_bytes(*base), key))
}

/// Local memory of transfers, mapped once for each.
pub(super) struct Local {
    context: Arc<Context>,
    attacher: Attacher,
    /// What to detach from at the end.
    known: Vec<Weak<Memory>>,
}

impl Local {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), attacher: Attacher::new(), known: Vec::new() }
    }

    /// The memory, mapped. Nothing for a file's.
    ///
    /// # Errors
    /// UCX's.
    pub(super) fn map(&mut self, memory: &Arc<Memory>) -> Result<Option<Arc<Mapped>>, UcxError> {
        let Some(held) = memory.held() else { return Ok(None) };
        let mut is_new = false;
        let mapped = memory.attached(self.attacher, || {
            is_new = true;
            self.context.map(Arc::new(held), Reach::Local).map(Arc::new)
        })?;
        if is_new {
            // Those that are gone make room, so that the list is as long as twice what is in use at most.
            if self.known.len() == self.known.capacity() {
                self.known.retain(|memory| memory.strong_count() > 0);
            }
            self.known.push(Arc::downgrade(memory));
        }
        Ok(Some(mapped))
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.known.iter().filter_map(Weak::upgrade).for_each(|memory| memory.detach(self.attacher));
    }
}
