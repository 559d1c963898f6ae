//! Two 256-bit registers a vector.

use std::arch::x86_64::*;

use super::super::Kernel;
use super::super::simd::{Half, LANES, Simd};

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Asks the processor, once; the answer is cached by the standard library.
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        let here = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        here.then_some(Self(()))
    }

    /// Runs `kernel` compiled for AVX2.
    #[inline]
    pub(crate) fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<K: Kernel>(token: Avx2, kernel: K) -> K::Output {
            kernel.run(token)
        }
        // SAFETY: `self` proves that the machine has the enabled features.
        unsafe { inner(self, kernel) }
    }
}

/// Applies an AVX2 instruction to both halves.
macro_rules! both {
    ($name:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        [op!($name(a[0], b[0])), op!($name(a[1], b[1]))]
    }};
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    /// Columns 0–7 and 8–15; of each the even k, then the odd k, as i16.
    type W = [[__m256i; 2]; 2];
    /// Even k, odd k, as i16.
    type A = [__m256i; 2];

    #[inline(always)]
    fn prefetch(self, at: &[u8]) {
        op!(_mm_prefetch::<_MM_HINT_T0>(at.as_ptr().cast()));
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        [op!(_mm256_set1_ps(x)); 2]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [__m256; 2] {
        let halves: &[[f32; 8]] = from.as_chunks().0;
        [memory_op!(_mm256_loadu_ps(halves[0].as_ptr())), memory_op!(_mm256_loadu_ps(halves[1].as_ptr()))]
    }

    #[inline(always)]
    fn load_half(self, from: &[Half; LANES]) -> [__m256; 2] {
        let halves: &[[Half; 8]] = from.as_chunks().0;
        let low = memory_op!(_mm_loadu_si128(halves[0].as_ptr().cast()));
        let high = memory_op!(_mm_loadu_si128(halves[1].as_ptr().cast()));
        [op!(_mm256_cvtph_ps(low)), op!(_mm256_cvtph_ps(high))]
    }

    #[inline(always)]
    fn store_half(self, value: [__m256; 2], to: &mut [Half; LANES]) {
        let halves: &mut [[Half; 8]] = to.as_chunks_mut().0;
        for (half, value) in halves.iter_mut().zip(value) {
            let bits = op!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value));
            memory_op!(_mm_storeu_si128(half.as_mut_ptr().cast(), bits));
        }
    }

    #[inline(always)]
    fn store(self, value: [__m256; 2], to: &mut [f32; LANES]) {
        let halves: &mut [[f32; 8]] = to.as_chunks_mut().0;
        memory_op!(_mm256_storeu_ps(halves[0].as_mut_ptr(), value[0]));
        memory_op!(_mm256_storeu_ps(halves[1].as_mut_ptr(), value[1]));
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        [op!(_mm256_fmadd_ps(a[0], b[0], c[0])), op!(_mm256_fmadd_ps(a[1], b[1], c[1]))]
    }

    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn first(self, count: usize, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        let count = op!(_mm256_set1_epi32(i32::try_from(count).unwrap_or(i32::MAX)));
        let low = op!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        let high = op!(_mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
        let low = op!(_mm256_cmpgt_epi32(count, low));
        let high = op!(_mm256_cmpgt_epi32(count, high));
        let masks = [op!(_mm256_castsi256_ps(low)), op!(_mm256_castsi256_ps(high))];
        [op!(_mm256_blendv_ps(b[0], a[0], masks[0])), op!(_mm256_blendv_ps(b[1], a[1], masks[1]))]
    }

    #[inline(always)]
    fn add_exponent(self, value: [__m256; 2], shift: [__m256; 2]) -> [__m256; 2] {
        let mut out = value;
        for (out, shift) in out.iter_mut().zip(shift) {
            let bits = op!(_mm256_castps_si256(shift));
            let shifted = op!(_mm256_slli_epi32::<23>(bits));
            let value = op!(_mm256_castps_si256(*out));
            let sum = op!(_mm256_add_epi32(value, shifted));
            *out = op!(_mm256_castsi256_ps(sum));
        }
        out
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [__m256i; 2] {
        [op!(_mm256_set1_epi32(x)); 2]
    }

    #[inline(always)]
    fn to_f32(self, value: [__m256i; 2]) -> [__m256; 2] {
        [op!(_mm256_cvtepi32_ps(value[0])), op!(_mm256_cvtepi32_ps(value[1]))]
    }

    #[inline(always)]
    fn weights(self, from: &[u8; 4 * LANES]) -> [[__m256i; 2]; 2] {
        let halves: &[[u8; 32]] = from.as_chunks().0;
        let low_bytes = op!(_mm256_set1_epi16(0xff));
        let mut out = [[low_bytes; 2]; 2];
        for (out, half) in out.iter_mut().zip(halves) {
            let bytes = memory_op!(_mm256_loadu_si256(half.as_ptr().cast()));
            *out = [op!(_mm256_and_si256(bytes, low_bytes)), op!(_mm256_srli_epi16::<8>(bytes))];
        }
        out
    }

    #[inline(always)]
    fn activations(self, four: i32) -> [__m256i; 2] {
        let bytes = op!(_mm256_set1_epi32(four));
        let low = op!(_mm256_slli_epi16::<8>(bytes));
        [op!(_mm256_srai_epi16::<8>(low)), op!(_mm256_srai_epi16::<8>(bytes))]
    }

    #[inline(always)]
    fn dot(self, acc: [__m256i; 2], weights: [[__m256i; 2]; 2], activations: [__m256i; 2]) -> [__m256i; 2] {
        let mut out = acc;
        for (out, weights) in out.iter_mut().zip(weights) {
            let even = op!(_mm256_madd_epi16(weights[0], activations[0]));
            let odd = op!(_mm256_madd_epi16(weights[1], activations[1]));
            let four = op!(_mm256_add_epi32(even, odd));
            *out = op!(_mm256_add_epi32(*out, four));
        }
        out
    }

    #[inline(always)]
    fn half_columns(self, rows: &[Half], stride: usize, pair: usize) -> ([__m256; 2], [__m256; 2]) {
        let (mut even, mut odd) = ([[0; 2]; LANES], [[0; 2]; LANES]);
        for (row, (even, odd)) in rows.chunks_exact(stride).zip(even.iter_mut().zip(&mut odd)) {
            *even = row[2 * pair];
            *odd = row[2 * pair + 1];
        }
        (self.load_half(&even), self.load_half(&odd))
    }

    /// Eight columns of sixteen rows at a time, by 24 shuffles.
    #[inline(always)]
    fn transpose_halves(self, rows: &[Half], stride: usize, columns: &mut [[f32; LANES]]) {
        let (eights, rest) = columns.as_chunks_mut::<8>();
        let done = 8 * eights.len();
        for (eight, columns) in eights.iter_mut().enumerate() {
            let halves = self.transpose(self.eight(rows, stride, eight));
            for (column, halves) in columns.iter_mut().zip(halves) {
                let low = op!(_mm256_castsi256_si128(halves));
                let high = op!(_mm256_extracti128_si256::<1>(halves));
                self.store([op!(_mm256_cvtph_ps(low)), op!(_mm256_cvtph_ps(high))], column);
            }
        }
        for (pair, columns) in rest.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (even, odd) = self.half_columns(rows, stride, done / 2 + pair);
            self.store(even, &mut columns[0]);
            self.store(odd, &mut columns[1]);
        }
    }
}

impl Avx2 {
    /// Columns `8 * eight ..` of sixteen rows of `stride` half floats: row i, and row 8 + i above it.
    #[inline(always)]
    fn eight(self, rows: &[Half], stride: usize, eight: usize) -> [__m256i; 8] {
        let mut out = [op!(_mm256_setzero_si256()); 8];
        let (low, high) = rows.split_at(8 * stride);
        let rows = low.chunks_exact(stride).zip(high.chunks_exact(stride));
        for ((low, high), out) in rows.zip(&mut out) {
            let (low, high): (&[[Half; 8]], &[[Half; 8]]) = (low.as_chunks().0, high.as_chunks().0);
            let low = memory_op!(_mm_loadu_si128(low[eight].as_ptr().cast()));
            let high = memory_op!(_mm_loadu_si128(high[eight].as_ptr().cast()));
            *out = op!(_mm256_set_m128i(high, low));
        }
        out
    }

    /// Transposes 8 × 8 half floats in each 128 bits.
    #[inline(always)]
    fn transpose(self, rows: [__m256i; 8]) -> [__m256i; 8] {
        let (mut pairs, mut fours, mut out) = (rows, rows, rows);
        for i in (0..8).step_by(2) {
            pairs[i] = op!(_mm256_unpacklo_epi16(rows[i], rows[i + 1]));
            pairs[i + 1] = op!(_mm256_unpackhi_epi16(rows[i], rows[i + 1]));
        }
        // Pairs hold columns 0 to 3 of rows 2g and 2g + 1 in pairs[2g], 4 to 7 in pairs[2g + 1].
        for half in 0..2 {
            let (first, second) = (4 * half, 4 * half + 2);
            for j in 0..2 {
                fours[4 * half + 2 * j] = op!(_mm256_unpacklo_epi32(pairs[first + j], pairs[second + j]));
                fours[4 * half + 2 * j + 1] = op!(_mm256_unpackhi_epi32(pairs[first + j], pairs[second + j]));
            }
        }
        // fours[4h + c] holds columns 2c and 2c + 1 of rows 4h to 4h + 3.
        for c in 0..4 {
            out[2 * c] = op!(_mm256_unpacklo_epi64(fours[c], fours[4 + c]));
            out[2 * c + 1] = op!(_mm256_unpackhi_epi64(fours[c], fours[4 + c]));
        }
        out
    }
}
