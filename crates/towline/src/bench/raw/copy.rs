//! Copies between two mappings by the plainest loops there are.
//!
//! **Cost.** What memory can do at most: [`Stores::Streaming`] moves each line over the bus twice (read, written),
//! [`Stores::Cached`] three times (the line that is overwritten is fetched first). Pieces that lie scattered cost a miss
//! at each start, and the look-up of a page: four pages abreast, and one line of each of the next four, hide both in part.

use anyhow::Result;
use towline_wire::blocks::{Extent, Run};

use super::Mapping;

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Pages that are copied in turn: as many streams as keep the processor's prefetchers busy.
const ABREAST: usize = 4;

/// Where a page of a run goes to, comes from, and its bytes.
type Page = (*mut u8, *const u8, usize);

/// How the destination is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Into the caches: the C library's `memmove`.
    Cached,
    /// Past them, in the widest units that the processor has.
    Streaming,
}

impl Mapping {
    /// Copies `runs` in order: `local` is here, `remote` in `source`, which must be another memory.
    ///
    /// # Errors
    /// At the first run that leaves either mapping.
    pub(crate) fn copy_from(&self, source: &Self, runs: &[Run], stores: Stores) -> Result<()> {
        if stores == Stores::Cached {
            for run in runs {
                let (to, from, bytes) = self.ends(source, run)?;
                // SAFETY: both ranges were checked; `copy` allows overlap, should both be one memory.
                unsafe { std::ptr::copy(from, to, bytes) };
            }
            return Ok(());
        }
        let ends = runs.iter().flat_map(pages).map(|page| self.ends(source, &page));
        let pages = ends.collect::<Result<Vec<_>>>()?;
        let mut groups = pages.chunks(ABREAST).peekable();
        while let Some(group) = groups.next() {
            // SAFETY: all ranges were checked.
            unsafe { stream(group, groups.peek().copied().unwrap_or(&[])) };
        }
        order();
        Ok(())
    }

    /// Where a run goes to and comes from, and its bytes.
    fn ends(&self, source: &Self, run: &Run) -> Result<Page> {
        let to = self.at(Extent { offset: run.local, len: run.len })?;
        let from = source.at(Extent { offset: run.remote, len: run.len })?;
        Ok((to, from.cast_const(), usize::try_from(run.len)?))
    }
}

/// A run in parts of a page.
fn pages(run: &Run) -> impl Iterator<Item = Run> + use<> {
    let Run { local, remote, len } = *run;
    let part = move |at| Run { local: local + at, remote: remote + at, len: PAGE.min(len - at) };
    (0..len.div_ceil(PAGE)).map(move |index| part(index * PAGE))
}

/// Orders non-temporal stores, which no release store does, before whatever follows.
fn order() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it; it only waits for stores.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Copies pages, where they are alike a step of each in turn; the first lines of the `later` ones are on their way then.
///
/// # Safety
/// Each page is one to write, one to read, and bytes that are valid for both. If they overlap the result is unspecified bytes.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(group: &[Page], later: &[Page]) {
    later.iter().for_each(|(_, from, _)| x86::touch(*from));
    let alike = |(to, _, len): &Page| to.addr().is_multiple_of(x86::LINE) && *len as u64 == PAGE;
    match *group {
        [a, b, c, d] if group.iter().all(alike) => {
            // SAFETY: the caller's; each begins a line and is whole steps.
            unsafe { x86::stream([a, b, c, d].map(|(to, from, _)| (to, from)), a.2) };
        }
        _ => group.iter().for_each(|(to, from, len)| {
            let head = to.align_offset(x86::LINE).min(*len);
            let body = (len - head) / x86::STEP * x86::STEP;
            let (middle, source) = (to.wrapping_add(head), from.wrapping_add(head));
            // SAFETY: a part of the caller's ranges.
            unsafe { std::ptr::copy(*from, *to, head) };
            // SAFETY: as above; it begins a line and is whole steps.
            unsafe { x86::stream([(middle, source)], body) };
            let (tail, source) = (middle.wrapping_add(body), source.wrapping_add(body));
            // SAFETY: a part of the caller's ranges.
            unsafe { std::ptr::copy(source, tail, len - head - body) };
        }),
    }
}

/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(group: &[Page], _later: &[Page]) {
    // SAFETY: the caller's.
    group.iter().for_each(|(to, from, len)| unsafe { std::ptr::copy(*from, *to, *len) });
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Bytes of a cache line.
    pub(super) const LINE: usize = 64;
    /// Bytes that are copied before it is the next page's turn.
    pub(super) const STEP: usize = 2 * LINE;

    /// Asks for one line, so that the processor looks up where its page lies.
    pub(super) fn touch(line: *const u8) {
        // SAFETY: a hint: it faults nowhere, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }

    /// In the widest units that the processor has.
    ///
    /// # Safety
    /// As [`super::stream`]; destinations begin a line, `len` is whole steps.
    pub(super) unsafe fn stream<const N: usize>(pages: [(*mut u8, *const u8); N], len: usize) {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the caller's, and the processor has the instructions.
            unsafe { stream_512(pages, len) };
        } else if is_x86_feature_detected!("avx") {
            // SAFETY: as above.
            unsafe { stream_256(pages, len) };
        } else {
            // SAFETY: as above; every x86-64 has these instructions.
            unsafe { stream_128(pages, len) };
        }
    }

    /// A loop of loads and non-temporal stores of one width.
    macro_rules! streaming {
        ($name:ident, $feature:literal, $unit:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// As [`stream`]; the processor has the feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name<const N: usize>(pages: [(*mut u8, *const u8); N], len: usize) {
                const WIDTH: usize = size_of::<$unit>();
                for at in (0..len).step_by(STEP) {
                    for (to, from) in pages {
                        let (to, from) = (to.wrapping_add(at), from.wrapping_add(at));
                        let units: [$unit; STEP / WIDTH] = std::array::from_fn(|unit| {
                            // SAFETY: inside the caller's range.
                            unsafe { $load(from.wrapping_add(unit * WIDTH).cast()) }
                        });
                        for (index, unit) in units.into_iter().enumerate() {
                            // SAFETY: inside the caller's range, and aligned to its width.
                            unsafe { $store(to.wrapping_add(index * WIDTH).cast(), unit) };
                        }
                    }
                }
            }
        };
    }

    streaming!(stream_512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);
    streaming!(stream_256, "avx", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    streaming!(stream_128, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
}

#[cfg(test)]
mod tests {
    use super::super::tests::{bytes, mapped};
    use super::*;

    #[test]
    fn runs_arrive_whole_and_nothing_else_changes() {
        let ((source, from), (target, to)) = (mapped(100_000, 0), mapped(100_000, 0xff));
        // Aligned and not, shorter than a turn, a page, many turns and a rest.
        let runs = [(0, 64, 4096), (5000, 3, 200), (8192, 9000, 4096), (20_001, 30_000, 70_000)]
            .map(|(local, remote, len)| Run { local, remote, len });
        for stores in [Stores::Cached, Stores::Streaming] {
            target.write_from(0, &vec![0xee; 100_000]).unwrap();
            let mut expected = bytes(&target);
            to.copy_from(&from, &runs, stores).unwrap();
            for Run { local, remote, len } in runs {
                let [local, remote, len] = [local, remote, len].map(|at| usize::try_from(at).unwrap());
                expected[local..local + len].copy_from_slice(&bytes(&source)[remote..remote + len]);
            }
            assert!(bytes(&target) == expected, "{stores:?}");
        }
        let outside = [Run { local: 99_999, remote: 0, len: 2 }];
        assert!(to.copy_from(&from, &outside, Stores::Cached).is_err());
    }

    /// The processor of the machine at hand uses one of them; the test runs all that it has.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_width_moves_the_same_bytes() {
        let ((source, from), (target, to)) = (mapped(8192, 0), mapped(8192, 0xff));
        let (to, from) = (to.base.as_ptr(), from.base.as_ptr().cast_const());
        type Loop = unsafe fn([(*mut u8, *const u8); 1], usize);
        let widths: [(bool, Loop); 3] = [
            (is_x86_feature_detected!("avx512f"), x86::stream_512),
            (is_x86_feature_detected!("avx"), x86::stream_256),
            (true, x86::stream_128),
        ];
        for (_, stream) in widths.into_iter().filter(|(has, _)| *has) {
            target.write_from(0, &[0; 8192]).unwrap();
            // SAFETY: both mappings have 8192 bytes, start a page, and the processor has the instructions.
            unsafe { stream([(to, from)], 8192) };
            order();
            assert!(bytes(&target) == bytes(&source));
        }
    }
}
