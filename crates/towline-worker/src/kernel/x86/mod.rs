//! The x86 instruction sets behind `Simd`.
//!
//! [`Avx2`] and [`Avx512`] are proofs: the only way to get one is [`Avx2::detect`] or [`Avx512::detect`], so every
//! method may use the instructions. `enter` compiles a kernel with them.
//!
//! Integer dot products are exact on both: VNNI's `vpdpbusd` accumulates u8 × i8 without saturating; AVX2's
//! `vpmaddubsw` would saturate, so bytes are widened to even and odd i16 and multiplied with `vpmaddwd`.

/// Calls one instruction on values.
macro_rules! op {
    ($name:ident $(::<$constant:tt>)? ( $($argument:expr),* )) => {{
        // SAFETY: `self` proves that the machine has the instruction; it works on values.
        unsafe { $name $(::<$constant>)? ($($argument),*) }
    }};
}

/// Calls one instruction that reads or writes memory through the pointer of a reference.
macro_rules! memory_op {
    ($name:ident $(::<$constant:tt>)? ( $($argument:expr),* )) => {{
        // SAFETY: `self` proves that the machine has the instruction; its pointer comes from a reference to an array of
        // exactly the size it accesses, and it asks no alignment.
        unsafe { $name $(::<$constant>)? ($($argument),*) }
    }};
}

mod avx2;
mod avx512;

pub(crate) use avx2::Avx2;
pub(crate) use avx512::Avx512;
