//! Matrix products and row operations: every instruction set, tile and team gives the same bits, and the right ones.

use towline_worker::kernel::arena::Arena;
use towline_worker::kernel::matmul::{Into, Product};
use towline_worker::kernel::matrix::{Matrix, Q8Row};
use towline_worker::kernel::quantize::Activations;
use towline_worker::kernel::team::Team;
use towline_worker::kernel::{Level, vector};

fn wave(len: usize, step: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * step).sin() * (1.0 + (i % 7) as f32)).collect()
}

fn matrix(n: usize, k: usize) -> (Matrix, Vec<Vec<f32>>) {
    let mut matrix = Matrix::zeros(&mut Arena::default(), n, k);
    let rows: Vec<Q8Row> = (0..n).map(|n| Q8Row::quantize(&wave(k, 0.37 + n as f32 * 0.011))).collect();
    rows.iter().enumerate().for_each(|(column, row)| matrix.set_row(column, row));
    (matrix, rows.iter().map(|row| row.values().take(k).collect()).collect())
}

fn product(level: Level, members: usize, matrix: &Matrix, inputs: &[Vec<f32>]) -> Vec<f32> {
    let mut team = Team::new(members).unwrap();
    let mut activations = Activations::new();
    activations.fill(&mut team, level, (inputs.len(), matrix.k()), |row, values| {
        values.copy_from_slice(&inputs[row])
    });
    let mut out = vec![0.0; inputs.len() * matrix.n_padded()];
    Product { level, matrix, rows: &activations, into: Into::Store }.run(&mut team, &mut out);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn products_are_right_within_quantisation() {
    for (n, k) in [(16, 32), (40, 96), (7, 50), (33, 576)] {
        let (matrix, weights) = matrix(n, k);
        let inputs: Vec<Vec<f32>> = (0..3).map(|row| wave(k, 0.21 + row as f32 * 0.07)).collect();
        let out = product(Level::Scalar, 1, &matrix, &inputs);
        for (row, input) in inputs.iter().enumerate() {
            for (column, weights) in weights.iter().enumerate() {
                let exact: f64 = input.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                let size: f64 =
                    input.iter().zip(weights).map(|(x, w)| f64::from(x * w).powi(2)).sum::<f64>().sqrt();
                let found = f64::from(out[row * matrix.n_padded() + column]);
                assert!(
                    (found - exact).abs() <= 0.05 * size + 1e-4,
                    "{n}×{k} [{row}][{column}]: {found} for {exact}"
                );
            }
        }
    }
}

#[test]
fn every_level_tile_and_team_gives_the_same_bits() {
    let (matrix, _) = matrix(83, 160);
    let inputs: Vec<Vec<f32>> = (0..19).map(|row| wave(160, 0.11 + row as f32 * 0.05)).collect();
    let alone: Vec<Vec<u32>> = inputs
        .iter()
        .map(|row| bits(&product(Level::Scalar, 1, &matrix, std::slice::from_ref(row))))
        .collect();
    for level in Level::available() {
        for rows in (1..=9).chain([16, 17, 19]) {
            for members in 1..=3 {
                let out = bits(&product(level, members, &matrix, &inputs[..rows]));
                assert_eq!(out, alone[..rows].concat(), "{level:?}, {rows} rows, {members} members");
            }
        }
    }
}

#[test]
fn extreme_inputs_give_the_same_bits_on_every_level() {
    let mut input = vec![0.0; 64];
    (input[0], input[1], input[33]) = (f32::MAX, f32::MIN_POSITIVE, -1e-38);
    let mut matrix = Matrix::zeros(&mut Arena::default(), 16, 64);
    (0..16).for_each(|column| matrix.set_row(column, &Q8Row::quantize(&[-1.0; 64])));
    let expected = product(Level::Scalar, 1, &matrix, &[input.clone(), vec![-3.0; 64]]);
    assert!((expected[16] - 192.0).abs() < 0.1, "−127 × −127 everywhere: {}", expected[16]);
    for level in Level::available() {
        assert_eq!(bits(&product(level, 1, &matrix, &[input.clone(), vec![-3.0; 64]])), bits(&expected));
    }
}

#[test]
fn adding_keeps_what_was_there() {
    let (matrix, _) = matrix(32, 64);
    let input = wave(64, 0.3);
    let mut team = Team::new(2).unwrap();
    let mut activations = Activations::new();
    activations.fill(&mut team, Level::best(), (1, 64), |_, values| values.copy_from_slice(&input));
    let mut out = vec![1.5; 32];
    Product { level: Level::best(), matrix: &matrix, rows: &activations, into: Into::Add }
        .run(&mut team, &mut out);
    let plain = product(Level::best(), 1, &matrix, &[input]);
    assert!(out.iter().zip(plain).all(|(sum, product)| *sum == 1.5 + product));
}

#[test]
fn row_operations_agree_on_every_level_and_with_f64() {
    for len in [16, 50, 576] {
        let (x, weight) = (wave(len, 0.4), wave(len, 0.9));
        let run = |level| {
            let (mut norm, mut gate) = (vec![0.0; len], vec![0.0; len]);
            vector::rms_norm(level, &x, &weight, 1e-5, &mut norm);
            vector::silu_gate(level, &x, &weight, &mut gate);
            let mut half = vec![0; len / 16 * 32];
            vector::to_half(level, &x[..len / 16 * 16], &mut half);
            (norm, gate, half)
        };
        let (norm, gate, half) = run(Level::Scalar);
        for level in Level::available() {
            let found = run(level);
            assert_eq!(
                (bits(&found.0), bits(&found.1), found.2),
                (bits(&norm), bits(&gate), half.clone()),
                "{level:?}"
            );
        }
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / len as f64;
        for i in 0..len {
            let (x, weight) = (f64::from(x[i]), f64::from(weight[i]));
            let exact = x / (mean + 1e-5).sqrt() * weight;
            assert!((f64::from(norm[i]) - exact).abs() < 1e-5 * (1.0 + exact.abs()));
            let exact = x / (1.0 + (-x).exp()) * weight;
            assert!(
                (f64::from(gate[i]) - exact).abs() < 1e-5 * (1.0 + exact.abs()),
                "silu({x})·{weight}: {} for {exact}",
                gate[i]
            );
        }
    }
}
