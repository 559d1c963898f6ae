//! Files as memory: peers read them and write into them, and nobody dies of one that is cut short meanwhile.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use tempfile::NamedTempFile;
use towline_fabric::{Access, Memory, Peer, RegionOptions, TransferError};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, Receipt, TransportKind};

use crate::child::{Serving, command};
use crate::support::*;

const BYTES: u64 = 5 << 20;
/// Where in the file the memory begins: at no page.
const OFFSET: u64 = 1000;

fn writable() -> RegionOptions {
    RegionOptions { peer_writable: true, ..RegionOptions::default() }
}

/// A file that shows `pattern(seed, BYTES)` from `OFFSET` on, and ends 1000 bytes later.
fn file(seed: u8) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    let around = [0xee; 1000];
    std::fs::write(file.path(), [&around[..], &pattern(seed, BYTES), &around[..]].concat()).unwrap();
    file
}

fn open(path: &Path) -> Arc<Memory> {
    Arc::new(Memory::open_file(path, OFFSET, BYTES, Access::PeersWrite).unwrap())
}

/// The bytes of the file that the memory is.
fn part(file: &NamedTempFile) -> Vec<u8> {
    let whole = std::fs::read(file.path()).unwrap();
    let (before, rest) = whole.split_at(1000);
    let (part, after) = rest.split_at(usize::try_from(BYTES).unwrap());
    assert!(before == [0xee; 1000] && after == [0xee; 1000], "nothing else changes");
    part.to_vec()
}

/// Moves `block` bytes from `block * index` on, to or from the same place of `local`.
fn transfer(
    peer: &Peer,
    (op, local, region): (Op, &Arc<Memory>, RegionId),
    (block, index): (u64, u32),
) -> Result<Receipt, TransferError> {
    let list = || blocks(block, [index]);
    peer.transfer(request(op, local, region, (list(), list())))?.wait(PATIENCE).expect("an outcome in time")
}

#[test]
fn peers_read_a_file_and_what_they_write_is_in_it() {
    for kind in KINDS {
        let file = file(4);
        let pair = Pair::to(kind, open(file.path()), writable());
        let local = memory(BYTES);
        let receipt = transfer(&pair.peer, (Op::Read, &local, pair.region.id()), (BYTES, 0)).unwrap();
        assert!(contents(&local) == pattern(4, BYTES), "{kind}");
        let word = if kind == TransportKind::Shm { "cma" } else { "socket" };
        assert_eq!((receipt.verified_by.as_str(), receipt.bytes), (word, BYTES));
        local.write_from(0, &pattern(7, BYTES)).unwrap();
        for piece in [(BYTES, 0), (64, 1000)] {
            transfer(&pair.peer, (Op::Write, &local, pair.region.id()), piece).unwrap();
        }
        assert!(part(&file) == pattern(7, BYTES), "{kind}");
        assert!(contents(pair.region.memory()) == pattern(7, BYTES));
    }
}

#[test]
fn a_file_is_read_into_and_written_from() {
    for case in CASES {
        let pair = Pair::of(case, BYTES, writable());
        pair.region.memory().write_from(0, &pattern(1, BYTES)).unwrap();
        let file = file(9);
        let local = open(file.path());
        for piece in [(64, 1000), (BYTES, 0)] {
            transfer(&pair.peer, (Op::Read, &local, pair.region.id()), piece).unwrap();
        }
        assert!(part(&file) == pattern(1, BYTES), "{case:?}");
        local.write_from(0, &pattern(2, BYTES)).unwrap();
        transfer(&pair.peer, (Op::Write, &local, pair.region.id()), (BYTES, 0)).unwrap();
        assert!(contents(pair.region.memory()) == pattern(2, BYTES), "{case:?}");
    }
}

#[test]
fn a_file_opened_for_reading_takes_no_writes_of_peers() {
    let file = file(3);
    let memory = Memory::open_file(file.path(), OFFSET, BYTES, Access::PeersRead).unwrap();
    let memory = Arc::new(memory);
    let (owner, _) = start(config("owner"));
    assert!(owner.register(Arc::clone(&memory), writable()).is_err());
    let region = owner.register(Arc::clone(&memory), RegionOptions::default()).unwrap();
    let (reader, _) = start(config("reader"));
    for kind in KINDS {
        let peer = wait(reader.connect(owner.address(), only(kind))).unwrap();
        assert!(read(&peer, region.id(), BYTES).unwrap() == pattern(3, BYTES));
        let into = transfer(&peer, (Op::Read, &memory, region.id()), (BYTES, 0));
        assert!(matches!(into, Err(TransferError::NotWritable { .. })), "{into:?}");
    }
}

/// Serves a file until its input ends.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_serves_a_file() {
    let path = std::env::var("TOWLINE_TEST_FILE").unwrap();
    let (owner, _) = start(config("child"));
    let region = owner.register(open(Path::new(&path)), writable()).unwrap();
    println!("\nserving {} {}", owner.address(), region.id());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// The file is cut in the middle. What is left can be read, before and after; what is gone can't be read or written, in
/// large pieces or in small ones, which come together with their requests; and the owner lives.
#[test]
fn an_owner_whose_file_is_cut_short_refuses_what_is_gone_and_goes_on() {
    for kind in KINDS {
        let file = file(5);
        let mut owner = command("file::child_serves_a_file");
        owner.env("TOWLINE_TEST_FILE", file.path());
        let owner = Serving::of(owner);
        let (reader, _) = start(config("reader"));
        let peer = wait(reader.connect(&owner.address, only(kind))).unwrap();
        let local = memory(BYTES);
        transfer(&peer, (Op::Read, &local, owner.region), (BYTES, 0)).unwrap();
        file.as_file().set_len(OFFSET + BYTES / 2).unwrap();
        let last = u32::try_from(BYTES / 64 - 1).unwrap();
        for op in [Op::Read, Op::Write] {
            for piece in [(BYTES, 0), (64, last)] {
                let error = transfer(&peer, (op, &local, owner.region), piece).unwrap_err();
                match kind {
                    TransportKind::Tcp => {
                        assert!(matches!(error, TransferError::OutOfRange { .. }), "{error}")
                    }
                    _ => {
                        assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
                        assert!(error.to_string().contains("Bad address"), "{error}");
                    }
                }
            }
            let half = transfer(&peer, (Op::Read, &local, owner.region), (BYTES / 2, 0));
            assert_eq!(half.unwrap().bytes, BYTES / 2, "{kind}");
        }
        assert_eq!(wait(peer.ping()), Ok(()), "the owner lives");
        assert!(std::fs::metadata(file.path()).unwrap().len() == OFFSET + BYTES / 2, "nobody made it longer");
    }
}

#[test]
fn who_reads_into_a_file_that_is_cut_short_has_an_error_and_goes_on() {
    for case in CASES {
        let pair = Pair::of(case, BYTES, writable());
        let file = file(6);
        let local = open(file.path());
        // Checked when it is prepared, and cut before it is posted.
        let list = || blocks(BYTES, [0]);
        let prepared = [Op::Read, Op::Write]
            .map(|op| pair.peer.prepare(pair.request(op, &local, (list(), list()))).unwrap());
        file.as_file().set_len(OFFSET + BYTES / 2).unwrap();
        for op in [Op::Read, Op::Write] {
            let error = transfer(&pair.peer, (op, &local, pair.region.id()), (BYTES / 4, 3)).unwrap_err();
            let said = matches!(&error, TransferError::OutOfRange { detail } if detail.starts_with("local"));
            assert!(said, "{case:?}, {op:?}: {error}");
            transfer(&pair.peer, (op, &local, pair.region.id()), (BYTES / 4, 1)).unwrap();
        }
        for prepared in prepared {
            // Over tcp the first takes the connection along.
            let outcome = prepared.post().and_then(|mut transfer| transfer.wait(PATIENCE).unwrap());
            let error = outcome.unwrap_err();
            assert!(
                matches!(error, TransferError::Unreachable { .. } | TransferError::OutOfRange { .. }),
                "{case:?}: {error}"
            );
        }
        let again = wait(pair.reader.connect(pair.owner.address(), only(case.kind))).unwrap();
        transfer(&again, (Op::Read, &memory(BYTES), pair.region.id()), (BYTES, 0)).unwrap();
    }
}

/// A file of either side loses its pages between the check of a request and its copy, or in the middle of one: at another
/// moment of each transfer.
#[test]
fn a_file_that_is_cut_short_during_a_transfer_ends_nobody() {
    const ROUNDS: u32 = 40;
    for case in CASES {
        let files = [file(1), file(2)];
        let offered = match case.made {
            Made::Own => Arc::new(Memory::allocate_for("own", BYTES, Access::PeersWrite).unwrap()),
            Made::Foreign => open(files[1].path()),
        };
        let pair = Pair::to(case.kind, offered, writable());
        let local = open(files[0].path());
        let mut peer = pair.peer.clone();
        for (op, round) in [Op::Read, Op::Write].iter().flat_map(|op| (0..ROUNDS).map(|round| (*op, round))) {
            let file = files[round as usize % 2].as_file();
            file.set_len(OFFSET + BYTES).unwrap();
            let list = || blocks(BYTES / 16, 0..16);
            let request = pair.request(op, &local, (list(), list()));
            let mut transfer = match peer.transfer(request.clone()) {
                Err(TransferError::Unreachable { .. }) => {
                    // The end of the last round's connection is known only now.
                    peer = wait(pair.reader.connect(pair.owner.address(), only(case.kind))).unwrap();
                    peer.transfer(request).unwrap()
                }
                posted => posted.unwrap(),
            };
            let posted = Instant::now();
            while posted.elapsed() < Duration::from_micros(50) * (round / 2) {
                std::hint::spin_loop();
            }
            file.set_len(OFFSET + 100).unwrap();
            match transfer.wait(PATIENCE).unwrap() {
                Ok(receipt) => assert_eq!(receipt.bytes, BYTES),
                Err(TransferError::Unreachable { .. } | TransferError::OutOfRange { .. }) => {}
                Err(other) => panic!("{case:?}: {other}"),
            }
            file.set_len(OFFSET + BYTES).unwrap();
            if !peer.is_open() {
                peer = wait(pair.reader.connect(pair.owner.address(), only(case.kind))).unwrap();
            }
        }
    }
}

/// What the kernel says when pages go between the check of a request and its copy: here nothing is checked, as the file is
/// mapped by somebody else.
#[test]
#[expect(unsafe_code, reason = "it maps a file by itself")]
fn a_page_that_goes_while_the_kernel_copies_is_an_error_too() {
    for kind in KINDS {
        let file = file(8);
        let (len, both) = (usize::try_from(BYTES).unwrap(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, both, MapFlags::SHARED, file.as_file(), 0) };
        let base = std::ptr::NonNull::new(base.unwrap().cast()).unwrap();
        // SAFETY: not unmapped in this test, and touched by the kernel alone once the file is cut.
        let memory = unsafe { Memory::foreign(base, BYTES, Access::PeersRead, Arc::new(())) }.unwrap();
        let pair = Pair::to(kind, Arc::new(memory), RegionOptions::default());
        file.as_file().set_len(BYTES / 2).unwrap();
        let local = crate::support::memory(BYTES);
        let error = transfer(&pair.peer, (Op::Read, &local, pair.region.id()), (BYTES, 0)).unwrap_err();
        assert!(matches!(error, TransferError::Unreachable { .. }), "{kind}: {error}");
        // Over tcp it takes the connection along.
        let again = wait(pair.reader.connect(pair.owner.address(), only(kind)));
        match again {
            Ok(peer) => _ = transfer(&peer, (Op::Read, &local, pair.region.id()), (BYTES / 2, 0)).unwrap(),
            // Over shm the probe reads the last byte.
            Err(error) => assert!(error.to_string().contains("Bad address"), "{error}"),
        }
    }
}
