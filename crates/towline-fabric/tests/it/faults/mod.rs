//! The fault matrix: every fault in every state of a transfer, over each transport, and the page that says what happens.
//!
//! [`table`] has the rows; each is a test here and a line of docs/faults.md, so the page says nothing that was not run.
//! A row's test plays its fault over both transports at once, compares how the operation ended with the row, and then
//! demands what must hold after any fault: every block of the destination is back, what is written into it stays, no
//! transfer is counted as under way, and the process does the next transfer with somebody else.
//!
//! Beside the table, [`order`] holds the order of data, fence and notification by trying every interleaving, [`opening`] what
//! a connect is told when several things end it, and [`liar`] what a transport's word is worth.

mod cards;
mod churn;
mod ends;
mod fault;
mod gate;
mod liar;
mod lists;
mod nomem;
mod opening;
mod order;
mod owner;
mod page;
mod pool;
mod process;
mod readers;
mod reading;
mod scene;
mod stage;
mod states;
mod table;
mod valve;

use towline_wire::receipt::TransportKind;

use crate::support::KINDS;
use fault::{Cell, Fault, Row};
use scene::Scene;
use table::ROWS;

/// Runs the row of that test over every transport to which it applies, side by side.
fn run(test: &str) {
    let row = ROWS.iter().find(|row| row.test == test).unwrap();
    std::thread::scope(|scope| {
        for kind in KINDS {
            scope.spawn(move || check(row, kind));
        }
    });
}

fn check(row: &Row, kind: TransportKind) {
    let cell = row.cell(kind);
    let Cell::Ends(expected) = cell else { return };
    for end in play(row, kind, cell) {
        assert!(
            expected.contains(&end),
            "{kind}: {:?} when {}: {end}, not {expected:?}",
            row.fault,
            row.state.words()
        );
    }
}

/// How it ended, each time it was tried; what must hold afterwards has been checked.
fn play(row: &Row, kind: TransportKind, cell: Cell) -> Vec<&'static str> {
    match row.fault {
        Fault::ReaderKilled | Fault::ReaderStopped | Fault::ReaderSilent => {
            vec![readers::play((row.fault, row.state), kind)]
        }
        Fault::NoMemory => vec![nomem::play(row.state, kind)],
        Fault::Card(flaw) => vec![cards::play(flaw, kind)],
        Fault::Lists(flaw) => lists::play(flaw, kind),
        Fault::Churn => vec![churn::play(kind)],
        fault => {
            let mut scene = Scene::new(kind, row.state, cell.runs_out());
            let under_way = scene.reach(row.state);
            scene.inflict(fault, &under_way);
            let (end, peer) = scene.finish(under_way);
            scene.settle((fault, row.state), (end, peer));
            vec![end]
        }
    }
}
