//! `docs/faults.md`, written from the table that the tests run, and held fresh by the test here.

use std::fmt::Write;
use std::path::Path;

use super::fault::{Cell, Row};
use super::table::ROWS;

const HEAD: &str = "\
# What happens when something fails

<!-- Generated from crates/towline-fabric/tests/it/faults/table.rs: UPDATE_DOCS=1 cargo test -p towline-fabric faults::page -->

One agent reads from another, and something goes wrong. Each line below is a test that was run, over shared memory and over
TCP, with real processes where a process dies or stops. It says how the operation that was under way ends for its caller:
*success* means that all bytes are in place, that the fence, read after them, holds the ticket's generation, and that every digest
is equal; of a write, that the owner found every byte; with a notification, that the digests are equal, as the fence is the caller's to
read next; of a release, that it was answered.

Whatever the line, these were checked after it:

- The caller had its answer: at once where a connection's end told, else by its deadline, give or take what a busy machine takes
  to wake a thread.
- Every block of the destination came back: at once where nothing could write into it any more, else after the transport had
  drained or, 1 s later, had been closed by force. Written over then, the blocks stayed as they were, also when the other side
  woke up and sent the rest.
- No transfer, peer or session was left counted as under way.
- The process lived, and the next transfer with another peer succeeded.

*Queued*: posted, and nothing has been asked of the owner yet. *Slices moving*: some are in place, some under way, some not begun.
*Path opens*: the control session is authenticated and has brought the card; the data connection (tcp) or the mapping session
(shm) has not been answered. Success of a transfer with a notification says that the data is in place and that the notification
was handed to the control session, not that it arrived.

What an error means, and whether to try again, here or elsewhere, stands with each variant in `towline_fabric`'s documentation.
";

fn page() -> String {
    let mut page = HEAD.to_owned();
    let mut title = "";
    for row in ROWS {
        let (section, what) = row.fault.section();
        if section != title {
            title = section;
            write!(
                page,
                "\n## {section}\n\n{what}\n\n| when | over shm | over tcp | |\n| --- | --- | --- | --- |\n"
            )
            .unwrap();
        }
        writeln!(page, "{}", line(row)).unwrap();
    }
    page
}

fn line(row: &Row) -> String {
    let detail = row.fault.detail();
    let when = if detail.is_empty() {
        row.state.words().to_owned()
    } else {
        format!("{detail} ({})", row.state.words())
    };
    format!("| {when} | {} | {} | {} |", cell(row.shm), cell(row.tcp), row.note)
}

fn cell(cell: Cell) -> String {
    let word = |end: &&str| if end.contains("::") { format!("`{end}`") } else { format!("*{end}*") };
    match cell {
        Cell::Ends(ends) => ends.iter().map(word).collect::<Vec<_>>().join(" or "),
        Cell::Never(why) => format!("can't happen: {why}"),
    }
}

#[test]
fn the_page_of_faults_is_fresh() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/faults.md");
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, page).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(
        found, page,
        "docs/faults.md is stale: UPDATE_DOCS=1 cargo test -p towline-fabric faults::page"
    );
}

#[test]
fn no_row_stands_twice_and_each_section_is_one_piece() {
    let mut sections = Vec::new();
    for (index, row) in ROWS.iter().enumerate() {
        let same = |other: &&Row| (other.fault, other.state) == (row.fault, row.state);
        assert!(!ROWS[..index].iter().any(|other| same(&other)), "{:?} {:?}", row.fault, row.state);
        let (section, _) = row.fault.section();
        if sections.last() != Some(&section) {
            assert!(!sections.contains(&section), "{section} comes in two pieces");
            sections.push(section);
        }
    }
}
