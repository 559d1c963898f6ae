//! From parts to bytes: the block lists of whole blocks, and the runs of all else.

use std::collections::BTreeMap;
use std::ops::Range;

use super::pool::{GroupView, Lane};
use super::{ListPair, ReshardError};
use crate::blocks::{BASES_MAX, BlockList, INDICES_MAX, Run};
use crate::layout::GroupKind;

/// How many pieces a plan may still have.
pub(super) struct Budget {
    left: u64,
    pieces_max: u64,
}

impl Budget {
    pub(super) fn new(pieces_max: u64) -> Self {
        Self { left: pieces_max, pieces_max }
    }

    fn spend(&mut self, pieces: u64) -> Result<(), ReshardError> {
        self.left = self.left.checked_sub(pieces).ok_or_else(|| self.exceeded())?;
        Ok(())
    }

    fn exceeded(&self) -> ReshardError {
        ReshardError::Pieces { pieces_max: self.pieces_max }
    }
}

/// Heads of a part of a layer, on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice {
    pub(super) local: Lane,
    pub(super) remote: Lane,
    /// Heads that both have.
    pub(super) heads: u64,
    /// Bytes of one head of one token.
    pub(super) item: u64,
}

/// What one pair of groups has to move: slices, all over the same two block tables.
#[derive(Debug)]
pub(super) struct Bundle<'a> {
    pub(super) local: &'a GroupView<'a>,
    pub(super) remote: &'a GroupView<'a>,
    pub(super) slices: Vec<Slice>,
}

type Groups = (usize, usize);

/// Block lists and runs of one transfer.
pub(super) fn emit(
    bundles: &BTreeMap<Groups, Bundle<'_>>,
    tokens: &Range<u64>,
    budget: &mut Budget,
) -> Result<(Vec<ListPair>, Vec<Run>), ReshardError> {
    let (mut lists, mut runs) = (Vec::new(), Vec::new());
    for (groups, bundle) in bundles {
        let tokens = needed(bundle.local.layout.kind, tokens);
        let size = bundle.local.layout.part_tokens();
        let whole = tokens.start.div_ceil(size)..tokens.end / size;
        if size != bundle.remote.layout.part_tokens() || whole.is_empty() {
            bundle.runs(tokens, &mut runs, budget)?;
            continue;
        }
        bundle.runs(tokens.start..whole.start * size, &mut runs, budget)?;
        bundle.lists(*groups, whole.clone(), &mut lists, budget)?;
        bundle.runs(whole.end * size..tokens.end, &mut runs, budget)?;
    }
    runs.sort_unstable_by_key(|run: &Run| run.local);
    runs.dedup_by(|next, last| join(last, next, u64::MAX));
    Ok((lists, runs))
}

/// The tokens that a group of that kind needs of `tokens`.
fn needed(kind: GroupKind, tokens: &Range<u64>) -> Range<u64> {
    match kind {
        GroupKind::State => 0..1,
        GroupKind::SlidingWindow { window_tokens } => {
            tokens.start.max(tokens.end.saturating_sub(u64::from(window_tokens)))..tokens.end
        }
        GroupKind::Full | GroupKind::Mla => tokens.clone(),
    }
}

impl Bundle<'_> {
    /// Runs of `tokens`, cut where a block ends on either side.
    fn runs(&self, tokens: Range<u64>, runs: &mut Vec<Run>, budget: &mut Budget) -> Result<(), ReshardError> {
        let (ours, theirs) = (self.local.layout.part_tokens(), self.remote.layout.part_tokens());
        let mut at = tokens.start;
        while at < tokens.end {
            let ends = [tokens.end, (at / ours + 1) * ours, (at / theirs + 1) * theirs];
            let count = ends.into_iter().min().unwrap_or(tokens.end) - at;
            let (local, remote) = (self.local.block(at / ours)?, self.remote.block(at / theirs)?);
            for slice in &self.slices {
                let from = Run {
                    local: at_token(&slice.local, local, at % ours),
                    remote: at_token(&slice.remote, remote, at % theirs),
                    len: 0,
                };
                let before = runs.len();
                copy(slice, from, count, Sink { runs, run_bytes_max: u64::MAX, budget })?;
                budget.spend((runs.len() - before) as u64)?;
            }
            at += count;
        }
        Ok(())
    }

    /// Lists of the sequence's blocks `whole`, of equal size on both sides.
    fn lists(
        &self,
        (group, remote_group): Groups,
        whole: Range<u64>,
        lists: &mut Vec<ListPair>,
        budget: &mut Budget,
    ) -> Result<(), ReshardError> {
        let patterns = self.patterns(whole.end - whole.start, budget)?;
        let locals = whole.clone().map(|block| self.local.block(block)).collect::<Result<Vec<_>, _>>()?;
        let remotes = whole.map(|block| self.remote.block(block)).collect::<Result<Vec<_>, _>>()?;
        let side = |group, bases, block_bytes, stride, indices: &[u32]| BlockList {
            group: u16::try_from(group).unwrap_or(u16::MAX),
            bases,
            block_bytes,
            stride,
            indices: indices.to_vec(),
        };
        for (shape, bases) in patterns {
            for bases in bases.chunks(BASES_MAX) {
                let local = |indices| {
                    let bases = bases.iter().map(|base| base.local).collect();
                    side(group, bases, shape.len, shape.local_stride, indices)
                };
                let remote = |indices| {
                    let bases = bases.iter().map(|base| base.remote).collect();
                    side(remote_group, bases, shape.len, shape.remote_stride, indices)
                };
                let chunks = locals.chunks(INDICES_MAX).zip(remotes.chunks(INDICES_MAX));
                lists.extend(chunks.map(|(l, r)| ListPair { local: local(l), remote: remote(r) }));
            }
        }
        Ok(())
    }

    /// How block 0 maps to block 0, as every block does: pieces by length and strides, ascending by local offset.
    fn patterns(&self, blocks: u64, budget: &mut Budget) -> Result<BTreeMap<Shape, Vec<Run>>, ReshardError> {
        let size = self.local.layout.part_tokens();
        let mut by_strides: BTreeMap<(u64, u64), Vec<Run>> = BTreeMap::new();
        for slice in &self.slices {
            let strides = (slice.local.stride, slice.remote.stride);
            let runs = by_strides.entry(strides).or_default();
            let from = Run { local: slice.local.start, remote: slice.remote.start, len: 0 };
            copy(slice, from, size, Sink { runs, run_bytes_max: strides.0.min(strides.1), budget })?;
        }
        let mut patterns: BTreeMap<Shape, Vec<Run>> = BTreeMap::new();
        for ((local_stride, remote_stride), mut pieces) in by_strides {
            pieces.sort_unstable_by_key(|piece| piece.local);
            // Longer than a stride, it would be no piece of one block, though arrays of a single block may touch.
            pieces.dedup_by(|next, last| join(last, next, local_stride.min(remote_stride)));
            budget.spend(blocks.saturating_mul(pieces.len() as u64))?;
            for piece in pieces {
                let shape = Shape { local_stride, remote_stride, len: piece.len };
                patterns.entry(shape).or_default().push(piece);
            }
        }
        Ok(patterns)
    }
}

/// What pieces must share to stand in one list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    local_stride: u64,
    remote_stride: u64,
    len: u64,
}

fn at_token(lane: &Lane, block: u32, token: u64) -> u64 {
    lane.start + u64::from(block) * lane.stride + token * lane.token_step
}

/// Where pieces go.
struct Sink<'a> {
    runs: &'a mut Vec<Run>,
    /// Longest run to make by merging.
    run_bytes_max: u64,
    budget: &'a Budget,
}

/// Appends the pieces of `tokens` tokens of a slice, from its first head and token on: as long as both sides allow.
/// At most as many as the budget has left, though they may merge later.
fn copy(slice: &Slice, from: Run, tokens: u64, sink: Sink<'_>) -> Result<(), ReshardError> {
    let Sink { runs, run_bytes_max, budget } = sink;
    let Slice { local, remote, heads, item } = slice;
    let (token_span, head_span) = spans(slice, tokens);
    let most = (runs.len() as u64).saturating_add(budget.left);
    for head in (0..heads / head_span).map(|step| step * head_span) {
        for token in (0..tokens / token_span).map(|step| step * token_span) {
            let next = Run {
                local: from.local + token * local.token_step + head * local.head_step,
                remote: from.remote + token * remote.token_step + head * remote.head_step,
                len: token_span * head_span * item,
            };
            if runs.last_mut().is_some_and(|last| join(last, &next, run_bytes_max)) {
                continue;
            }
            if runs.len() as u64 >= most {
                return Err(budget.exceeded());
            }
            runs.push(next);
        }
    }
    Ok(())
}

/// How many tokens, and how many heads, of a slice follow each other on both sides: all, or one.
fn spans(slice: &Slice, tokens: u64) -> (u64, u64) {
    let Slice { local, remote, heads, item } = *slice;
    let token_step = |step| local.token_step == step && remote.token_step == step;
    let head_step = |step| local.head_step == step && remote.head_step == step;
    if token_step(item) || tokens == 1 {
        let all = heads == 1 || head_step(tokens * item);
        (tokens, if all { heads } else { 1 })
    } else if head_step(item) || heads == 1 {
        let all = token_step(heads * item);
        (if all { tokens } else { 1 }, heads)
    } else {
        (1, 1)
    }
}

/// Lengthens `last` by `next` where they touch on both sides and are not longer than `run_bytes_max` together.
fn join(last: &mut Run, next: &Run, run_bytes_max: u64) -> bool {
    let touch = last.local + last.len == next.local
        && last.remote + last.len == next.remote
        && last.len + next.len <= run_bytes_max;
    if touch {
        last.len += next.len;
    }
    touch
}
