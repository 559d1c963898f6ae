//! Sixteen lanes, as an interface: what the kernels may ask of an instruction set.
//!
//! Why sixteen: one AVX-512 register of f32, two of AVX2, and the number of columns in a panel and of tokens in a
//! chunk of attention. The lane count is part of the arithmetic (reductions add lanes in a fixed tree), so it's the
//! same on every machine. [`Scalar`] defines the meaning; the others must agree to the bit.

/// Lanes of every vector here.
pub const LANES: usize = 16;

/// An IEEE half float as it lies in memory: little-endian, no alignment asked.
pub type Half = [u8; 2];

/// Sixteen-lane arithmetic. A value of the implementing type proves that the machine has the instructions.
pub trait Simd: Copy + Send + Sync {
    /// 16 × f32.
    type F: Copy;
    /// 16 × i32.
    type I: Copy;
    /// 64 weights: 16 columns × 4 along k, each stored as `w + 128`.
    type W: Copy;
    /// 4 activations along k, for every column.
    type A: Copy;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// Sixteen consecutive values.
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// Sixteen half floats.
    fn load_half(self, from: &[Half; LANES]) -> Self::F;
    /// Rounds to half floats, to nearest even.
    fn store_half(self, value: Self::F, to: &mut [Half; LANES]);
    /// Writes the lanes out.
    fn store(self, value: Self::F, to: &mut [f32; LANES]);
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`; `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`; `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The first `count` lanes of `a`, the others of `b`.
    fn first(self, count: usize, a: Self::F, b: Self::F) -> Self::F;
    /// Adds the low bits of `shift`'s representation to the exponent of `value`: `value * 2^n` for
    /// `shift = 1.5 * 2^23 + n`, while the result stays normal.
    fn add_exponent(self, value: Self::F, shift: Self::F) -> Self::F;

    /// `x` in every lane.
    fn splat_i32(self, x: i32) -> Self::I;
    /// Nearest f32 of each lane.
    fn to_f32(self, value: Self::I) -> Self::F;
    /// Weights of four consecutive k, column by column.
    fn weights(self, from: &[u8; 4 * LANES]) -> Self::W;
    /// Four signed bytes, the lowest first in k.
    fn activations(self, four: i32) -> Self::A;
    /// `acc + Σ (w + 128) · a` over the four k of each column, exact.
    fn dot(self, acc: Self::I, weights: Self::W, activations: Self::A) -> Self::I;

    /// Column `2 * pair` and the one after it of sixteen rows of `stride` half floats: `(even, odd)`, a lane a row.
    /// `rows` holds 16 rows.
    fn half_columns(self, rows: &[Half], stride: usize, pair: usize) -> (Self::F, Self::F);

    /// All columns of sixteen rows of `stride` half floats, in order, a lane a row: `columns` has `stride` of them, an
    /// even number.
    #[inline(always)]
    fn transpose_halves(self, rows: &[Half], stride: usize, columns: &mut [[f32; LANES]]) {
        for (pair, columns) in columns.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (even, odd) = self.half_columns(rows, stride, pair);
            self.store(even, &mut columns[0]);
            self.store(odd, &mut columns[1]);
        }
    }

    /// Asks for the cache line where `at` starts; changes no value.
    #[inline(always)]
    fn prefetch(self, _at: &[u8]) {}

    /// All lanes, added pairwise: distance 8, 4, 2, 1.
    #[inline(always)]
    fn sum(self, value: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// The largest lane; NaN only if the first lanes are.
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] = if lanes[i] > lanes[i + width] { lanes[i] } else { lanes[i + width] };
            }
            width /= 2;
        }
        lanes[0]
    }

    /// e^x to about 2 ulp for x in [-87, 88]; outside it is clamped. Exactly 1 for 0.
    ///
    /// x = n·ln 2 + r; Taylor to degree 6 for |r| ≤ ln 2 / 2 (its error, r^7/5040, is 1.2e-7 relative), then the
    /// exponent grows by n. ln 2 in two parts after Cody and Waite.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
        let x = self.min(self.max(x, self.splat(-87.0)), self.splat(88.0));
        let shift = self.fma(x, self.splat(std::f32::consts::LOG2_E), self.splat(ROUND));
        let n = self.sub(shift, self.splat(ROUND));
        let r = self.fma(n, self.splat(-355.0 / 512.0), x);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.0 / 720.0);
        for coefficient in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.fma(p, r, self.splat(coefficient));
        }
        self.add_exponent(p, shift)
    }
}

/// Portable lanes: the meaning of every operation.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

/// One operation on each lane.
macro_rules! lanewise {
    ($a:ident, $b:ident => $value:expr) => {{
        let mut out = [0.0; LANES];
        for (out, ($a, $b)) in out.iter_mut().zip($a.into_iter().zip($b)) {
            *out = $value;
        }
        out
    }};
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type W = [u8; 4 * LANES];
    type A = [i8; 4];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }

    #[inline(always)]
    fn load_half(self, from: &[Half; LANES]) -> Self::F {
        from.map(|half| half::f16::from_le_bytes(half).to_f32())
    }

    #[inline(always)]
    fn store_half(self, value: Self::F, to: &mut [Half; LANES]) {
        *to = value.map(|lane| half::f16::from_f32(lane).to_le_bytes());
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        *to = value;
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b => a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b => a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b => a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b => a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for (out, (a, b)) in out.iter_mut().zip(a.into_iter().zip(b)) {
            *out = a.mul_add(b, *out);
        }
        out
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b => if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b => if a < b { a } else { b })
    }

    #[inline(always)]
    fn first(self, count: usize, a: Self::F, b: Self::F) -> Self::F {
        let mut out = b;
        for (out, a) in out.iter_mut().zip(a).take(count) {
            *out = a;
        }
        out
    }

    #[inline(always)]
    fn add_exponent(self, value: Self::F, shift: Self::F) -> Self::F {
        lanewise!(value, shift => f32::from_bits(value.to_bits().wrapping_add(shift.to_bits() << 23)))
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        [x; LANES]
    }

    #[inline(always)]
    fn to_f32(self, value: Self::I) -> Self::F {
        value.map(|lane| lane as f32)
    }

    #[inline(always)]
    fn weights(self, from: &[u8; 4 * LANES]) -> Self::W {
        *from
    }

    #[inline(always)]
    fn activations(self, four: i32) -> Self::A {
        four.to_le_bytes().map(|byte| byte.cast_signed())
    }

    #[inline(always)]
    fn dot(self, acc: Self::I, weights: Self::W, activations: Self::A) -> Self::I {
        let mut out = acc;
        for (out, column) in out.iter_mut().zip(weights.as_chunks::<4>().0) {
            for (w, a) in column.iter().zip(activations) {
                *out += i32::from(*w) * i32::from(a);
            }
        }
        out
    }

    #[inline(always)]
    fn half_columns(self, rows: &[Half], stride: usize, pair: usize) -> (Self::F, Self::F) {
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for (row, (even, odd)) in rows.chunks_exact(stride).zip(even.iter_mut().zip(&mut odd)) {
            *even = half::f16::from_le_bytes(row[2 * pair]).to_f32();
            *odd = half::f16::from_le_bytes(row[2 * pair + 1]).to_f32();
        }
        (even, odd)
    }
}
