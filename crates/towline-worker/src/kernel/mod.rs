//! The hot loops: everything a forward pass does per element.
//!
//! **Why it exists.** The engine promises that a token's logits are bitwise the same whatever shares its batch,
//! however its prompt was cut, wherever its blocks lie and however many threads run. Libraries choose their reduction
//! order by shape and thread count, so the loops are ours: each output element is computed by one thread in one fixed
//! order of operations, and that order is written once, generic over [`simd::Simd`], for every instruction set.
//!
//! **How.** [`Level`] is found out once. A kernel is a struct of its operands whose [`Kernel::run`] is inlined into
//! one entry point a level, compiled with that level's instructions. Floating point in Rust is never reassociated
//! or contracted behind one's back, so scalar, AVX2 and AVX-512 agree to the bit; tests hold them to it.
//!
//! **Unsafe.** Only here in the crate: the instructions (`x86`), the team's borrowed closure ([`team`]) and matrices
//! that members write in disjoint pieces (`shared`), and the weights' memory ([`arena`]).

mod aligned;
pub mod arena;
pub mod attention;
pub mod matmul;
pub mod matrix;
pub mod quantize;
pub(crate) mod shared;
pub mod simd;
pub mod team;
pub mod vector;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "calls vector instructions after detecting them")]
pub(crate) mod x86;

use simd::{Scalar, Simd};

/// An instruction set the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Portable Rust: what aarch64 and old machines run.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
}

impl Level {
    /// The widest this machine has.
    pub fn best() -> Self {
        Self::available().into_iter().max().unwrap_or(Self::Scalar)
    }

    /// All this machine has, narrowest first.
    pub fn available() -> Vec<Self> {
        [Self::Scalar, Self::Avx2, Self::Avx512].into_iter().filter(|level| level.is_here()).collect()
    }

    fn is_here(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::Avx512::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs `kernel` compiled for this level; the scalar one where the machine lacks it.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 if let Some(token) = x86::Avx512::detect() => token.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 if let Some(token) = x86::Avx2::detect() => token.enter(kernel),
            _ => kernel.run(Scalar),
        }
    }
}

/// A loop with its operands. `run` must be `#[inline(always)]`, and so must be what it calls with `simd`, closures
/// excluded: code that is not inlined into the entry point is compiled without the level's instructions.
pub trait Kernel {
    /// What the loop yields.
    type Output;

    /// The loop.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}
