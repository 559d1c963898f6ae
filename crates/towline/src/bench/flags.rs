//! What `bench kv` may be asked, and the cases that it comes to.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args, ValueEnum};
use serde::Serialize;
use towline_fabric::UcxConfig;
use towline_fabric::region::REGION_BYTES_MAX;
use towline_wire::receipt::{Op, TransportKind};

use super::case::Case;
use super::model::{MODELS, Model};
use super::pattern::WORD_BYTES;
use super::reshard::Reshard;
use super::shape::Shape;
use crate::cli::UcxArgs;
use crate::value::{ByteSize, listen_address};

/// What moves when nothing is said.
const DEFAULT_SIZE: ByteSize = ByteSize(256 << 20);
/// Most cases of one sweep: each takes seconds.
const CASES_MAX: usize = 1024;
/// Peers of a pattern with many when their number isn't given.
const MANY: u32 = 2;
/// Where the shuffles start: the same order in every run, so that runs compare.
const SHUFFLE: u64 = 0x746f_776c_696e_6521;

/// `towline bench kv`.
#[derive(Args, Clone, Debug)]
pub(crate) struct KvArgs {
    /// Wire to measure; repeatable, or separated by commas
    #[arg(long, value_name = "TRANSPORT", value_enum, value_delimiter = ',', default_values = ["shm", "tcp"])]
    pub(crate) transport: Vec<Wire>,
    /// Bytes of one transfer, 4KiB or 256MiB; repeatable, or separated by commas; without it and without --model, 256MiB
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    pub(crate) size: Vec<ByteSize>,
    /// Bytes of a block (page); repeatable, or separated by commas; without it, one contiguous piece
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    pub(crate) block: Vec<ByteSize>,
    /// Whether the owner's memory is read or written; repeatable, or separated by commas
    #[arg(long, value_name = "OP", value_enum, value_delimiter = ',', default_value = "read")]
    pub(crate) op: Vec<OpWord>,
    /// Order of the blocks on both sides; without it, random where there are blocks
    #[arg(long, value_name = "ORDER", value_enum)]
    pub(crate) order: Option<Order>,
    /// Transfers in flight at once, each of --size; repeatable, or separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) batch: Vec<u32>,
    /// Who has the memory: one process, many that one initiator takes from, or one that many initiators take from
    #[arg(long, value_name = "PATTERN", value_enum, default_value = "one-to-one")]
    pub(crate) pattern: Pattern,
    /// The many of --pattern; without it, 2, or as many as --connect names
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) peers: Option<u32>,
    /// Move the KV of this model's prompts, in its own blocks of 16 tokens, in place of --size and --block
    #[arg(long, value_name = "MODEL", value_parser = PossibleValuesParser::new(MODELS.map(|model| model.name)))]
    pub(crate) model: Option<String>,
    /// With --model: tokens of a prompt; repeatable, or separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "8000",
          value_parser = clap::value_parser!(u32).range(1..=16_000_000))]
    pub(crate) isl: Vec<u32>,
    /// With --model: move a prompt between engines that share its KV over different ranks, as FROM:TO, tp4:tp1 or
    /// tp2pp2:tp8-nhd (tensor-parallel ranks, pipeline stages, heads before or after tokens); repeatable, or by commas
    #[arg(long, value_name = "FROM:TO", value_delimiter = ',')]
    pub(crate) reshard: Vec<Reshard>,
    /// Timed repetitions of each case, after one to warm up
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) repeat: u32,
    /// Threads that copy over shared memory, and that the memory's limit is measured with
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) copy_threads: u8,
    /// TCP streams between a pair, and threads that serve them
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) tcp_streams: u8,
    #[command(flatten)]
    pub(crate) ucx: UcxArgs,
    /// Check every byte after each repetition, outside the timer, with a new source and a poisoned destination
    #[arg(long, value_name = "VERIFY", value_enum, default_value = "full")]
    pub(crate) verify: Verify,
    /// Serve memory at this address until stopped, for another process's --connect; port 0 takes a free one
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    pub(crate) listen: Option<SocketAddr>,
    /// Measure against the processes that listen there, instead of own ones; several for many-to-one, by commas
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub(crate) connect: Vec<String>,
    /// File with the cluster's key, 64 hexadecimal digits, for --listen and --connect; or give it in TOWLINE_CLUSTER_KEY
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_key_file: Option<PathBuf>,
    /// Compare with an earlier run's JSON lines; exit 1 where GB/s fell by more than --tolerance
    #[arg(long, value_name = "FILE")]
    pub(crate) baseline: Option<PathBuf>,
    /// With --baseline: how much slower is still the same, in percent; repeats on a shared machine differ by 10 to 30
    #[arg(long, value_name = "PERCENT", default_value = "30", value_parser = clap::value_parser!(u8).range(1..=99))]
    pub(crate) tolerance: u8,
    /// Also draw the figures and their limits into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Stop when standard input closes, so that a child never outlives its parent
    #[arg(long, hide = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set,
          default_value = "false", default_missing_value = "true")]
    pub(crate) stop_with_parent: bool,
}

/// Wires that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wire {
    /// Shared memory of one host
    Shm,
    /// TCP
    Tcp,
    /// UCX, which is opened at run time
    Ucx,
}

/// Directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OpWord {
    /// Remote to local
    Read,
    /// Local to remote
    Write,
}

/// How blocks follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Side by side on both sides
    Contiguous,
    /// Shuffled on each side, with gaps
    Random,
}

/// Who moves with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pattern {
    /// One owner, one initiator
    OneToOne,
    /// Many owners, one initiator that moves with all at once
    ManyToOne,
    /// One owner, many initiators (agents of one process) at once
    OneToMany,
    /// The ranks of one engine and those of another, all pairs at once: what --reshard makes of it
    #[value(skip)]
    Reshard,
}

impl Pattern {
    /// The word of the flag.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::OneToOne => "one-to-one",
            Self::ManyToOne => "many-to-one",
            Self::OneToMany => "one-to-many",
            Self::Reshard => "reshard",
        }
    }
}

/// How much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Verify {
    /// Every byte
    Full,
    /// None
    Off,
}

/// What is moved, before wires and directions.
struct Load {
    shape: Shape,
    block_bytes: Option<u64>,
    order: Order,
    model: Option<(&'static Model, u32)>,
    reshard: Option<Reshard>,
}

impl KvArgs {
    /// How UCX is opened, if it is measured.
    pub(crate) fn ucx(&self) -> Option<UcxConfig> {
        self.transport.contains(&Wire::Ucx).then(|| self.ucx.config())
    }

    /// Every case of the sweep, in order.
    ///
    /// # Errors
    /// What was asked and can't be.
    pub(crate) fn cases(&self) -> Result<Vec<Case>> {
        let loads = self.loads()?;
        let peers = if self.reshard.is_empty() { self.peers()? } else { 1 };
        let mut cases = Vec::new();
        for load in &loads {
            for batch in &self.batch {
                for wire in &self.transport {
                    cases.extend(self.op.iter().map(|op| self.case(load, (*wire, *op), *batch, peers)));
                }
            }
        }
        for case in cases.iter().filter(|case| case.reshard.is_some() && !self.connect.is_empty()) {
            let (named, owners) = (self.connect.len(), case.owners());
            ensure!(named == owners as usize, "{owners} owners are needed, and --connect names {named}");
        }
        ensure!(cases.len() <= CASES_MAX, "{} cases: a sweep has at most {CASES_MAX}", cases.len());
        Ok(cases)
    }

    fn case(&self, load: &Load, (wire, op): (Wire, OpWord), batch: u32, peers: u32) -> Case {
        let transport = match wire {
            Wire::Shm => TransportKind::Shm,
            Wire::Tcp => TransportKind::Tcp,
            Wire::Ucx => TransportKind::Ucx,
        };
        let op = match op {
            OpWord::Read => Op::Read,
            OpWord::Write => Op::Write,
        };
        let Load { shape, block_bytes, order, model, reshard } = *load;
        let (pattern, peers) = match reshard {
            Some(Reshard { from, to }) => (Pattern::Reshard, from.count().max(to.count())),
            None => (self.pattern, peers),
        };
        let mut case =
            Case { transport, op, pattern, peers, batch, order, block_bytes, model, reshard, shape };
        case.shape.lanes = case.lanes();
        case
    }

    fn peers(&self) -> Result<u32> {
        let named = u32::try_from(self.connect.len()).unwrap_or(u32::MAX);
        match self.pattern {
            Pattern::OneToOne | Pattern::Reshard => {
                let one = self.peers.is_none_or(|peers| peers == 1) && named <= 1;
                ensure!(one, "one-to-one has one peer: give --pattern many-to-one or one-to-many for more");
                Ok(1)
            }
            Pattern::ManyToOne if named > 0 => {
                let fits = self.peers.is_none_or(|peers| peers == named) && named <= 64;
                ensure!(fits, "--connect names {named} owners, and --peers doesn't agree (at most 64)");
                Ok(named)
            }
            Pattern::OneToMany if named > 1 => {
                bail!("one-to-many has one owner, and --connect names {named}")
            }
            _ => Ok(self.peers.unwrap_or(MANY)),
        }
    }

    fn loads(&self) -> Result<Vec<Load>> {
        if let Some(name) = &self.model {
            ensure!(
                self.size.is_empty() && self.block.is_empty(),
                "--model gives --size and --block: leave them out"
            );
            let prompts = self.isl.iter().map(|isl| self.prompt(name, *isl)).collect::<Result<Vec<_>>>()?;
            return if self.reshard.is_empty() { Ok(prompts) } else { self.reshards(&prompts) };
        }
        ensure!(self.reshard.is_empty(), "--reshard moves the KV of a model: give --model");
        let sizes = if self.size.is_empty() { &[DEFAULT_SIZE][..] } else { &self.size };
        if let Some(size) = sizes.iter().find(|size| size.0 > REGION_BYTES_MAX) {
            bail!("--size {size}: a memory has at most {}", ByteSize(REGION_BYTES_MAX));
        }
        if self.block.is_empty() {
            ensure!(
                self.order != Some(Order::Random),
                "--order random needs --block: one piece has no order"
            );
            return sizes.iter().map(|size| whole(*size)).collect();
        }
        let pairs = sizes.iter().flat_map(|size| self.block.iter().map(move |block| (*size, *block)));
        pairs.map(|(size, block)| self.load(size, block, None)).collect()
    }

    /// Each prompt between each pair of engines.
    fn reshards(&self, prompts: &[Load]) -> Result<Vec<Load>> {
        let alone = self.pattern == Pattern::OneToOne && self.peers.is_none() && self.batch == [1];
        ensure!(alone, "--reshard gives --pattern, --peers and --batch: leave them out");
        let mut loads = Vec::new();
        for Load { shape, block_bytes, order, model, .. } in prompts {
            let (found, _) = model.context("no model")?;
            for reshard in &self.reshard {
                reshard
                    .prompt(found, shape.blocks, shape.shuffle)
                    .with_context(|| format!("--reshard {reshard} doesn't fit {}", found.name))?;
                let (block_bytes, order, reshard) = (*block_bytes, *order, Some(*reshard));
                loads.push(Load { shape: *shape, block_bytes, order, model: *model, reshard });
            }
        }
        Ok(loads)
    }

    fn prompt(&self, name: &str, isl: u32) -> Result<Load> {
        let Some(model) = Model::find(name) else { bail!("no model {name}") };
        let (size, block) = (model.prompt_bytes(isl.into()), model.block_bytes());
        self.load(ByteSize(size), ByteSize(block), Some((model, isl)))
    }

    fn load(&self, size: ByteSize, block: ByteSize, model: Option<(&'static Model, u32)>) -> Result<Load> {
        let order = self.order.unwrap_or(Order::Random);
        ensure!(
            block.0.is_multiple_of(WORD_BYTES),
            "--block {block}: write a multiple of {WORD_BYTES} bytes"
        );
        let Some(shape) = Shape::blocks(size.0, block.0, (order == Order::Random).then_some(SHUFFLE)) else {
            bail!(
                "--size {size} is not whole blocks of --block {block}, 1 to {}",
                towline_wire::blocks::INDICES_MAX
            )
        };
        Ok(Load { shape, block_bytes: Some(block.0), order, model, reshard: None })
    }
}

fn whole(size: ByteSize) -> Result<Load> {
    ensure!(size.0.is_multiple_of(WORD_BYTES), "--size {size}: write a multiple of {WORD_BYTES} bytes");
    let shape = Shape::contiguous(size.0);
    Ok(Load { shape, block_bytes: None, order: Order::Contiguous, model: None, reshard: None })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Lone {
        #[command(flatten)]
        kv: KvArgs,
    }

    fn cases(words: &str) -> Result<Vec<Case>> {
        Lone::try_parse_from(std::iter::once("kv").chain(words.split_whitespace())).unwrap().kv.cases()
    }

    #[test]
    fn lists_multiply() {
        let found =
            cases("--size 1MiB,4MiB --block 4KiB,64KiB --op read,write --batch 1,4 --transport tcp").unwrap();
        assert_eq!(found.len(), 16);
        assert!(found.iter().all(|case| case.order == Order::Random && case.transport == TransportKind::Tcp));
        let [both] = [cases("").unwrap()];
        assert_eq!(both.len(), 2);
        assert_eq!((both[0].bytes(), both[0].block_bytes), (256 << 20, None));
    }

    #[test]
    fn models_bring_their_own_blocks() {
        let found = cases("--model llama-3.1-8b --isl 8000,16 --transport shm").unwrap();
        assert_eq!((found[0].bytes(), found[0].block_bytes), (500 * (2 << 20), Some(2 << 20)));
        assert_eq!((found[1].bytes(), found[1].shape.blocks), (2 << 20, 1));
    }

    #[test]
    fn patterns_count_owners_initiators_and_lanes() {
        let counts = |words: &str| {
            let case = cases(words).unwrap()[0];
            (case.owners(), case.initiators(), case.lanes(), case.bytes())
        };
        assert_eq!(counts("--size 8 --batch 3"), (1, 1, 3, 24));
        assert_eq!(counts("--size 8 --batch 3 --pattern many-to-one --peers 4"), (4, 1, 3, 96));
        assert_eq!(counts("--size 8 --batch 3 --pattern one-to-many"), (1, 2, 6, 48));
        assert_eq!(counts("--size 8 --pattern many-to-one --connect a:1,b:2,c:3").0, 3);
    }

    #[test]
    fn reshardings_have_an_owner_a_rank_and_count_replicas() {
        let case = |words: &str| {
            let words = format!("--isl 16 --transport shm --model {words}");
            let case = cases(&words).unwrap()[0];
            (case.owners(), case.initiators(), case.bytes())
        };
        let block = 2 << 20;
        assert_eq!(case("llama-3.1-8b --reshard tp4:tp1"), (4, 1, block));
        assert_eq!(case("llama-3.1-8b --reshard tp4:tp1 --op write"), (1, 4, block));
        assert_eq!(case("llama-3.1-8b --reshard tp1:tp16"), (1, 16, 2 * block), "8 heads on 16 ranks");
        assert_eq!(
            case("deepseek-r1 --reshard tp1:tp2pp2").2,
            2 * 70_272 * 16,
            "each stage keeps its latent twice"
        );
        assert_eq!(cases("--model llama-3.1-8b --reshard tp4:tp1,tp1:tp4 --isl 16,32").unwrap().len(), 8);
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_to_do() {
        for (words, part) in [
            ("--size 1MiB --block 3KiB", "not whole blocks"),
            ("--size 1001", "multiple of 8"),
            ("--size 24 --block 12", "multiple of 8"),
            ("--size 8GiB --block 4KiB", "1 to 1048576"),
            ("--size 16777215TiB", "at most 1TiB"),
            ("--order random", "needs --block"),
            ("--model qwen3-8b --size 1MiB", "leave them out"),
            ("--peers 3", "one-to-one has one peer"),
            ("--connect a:1,b:2", "one-to-one has one peer"),
            ("--pattern one-to-many --connect a:1,b:2", "one owner"),
            ("--pattern many-to-one --peers 3 --connect a:1,b:2", "doesn't agree"),
            ("--reshard tp4:tp1", "give --model"),
            ("--model llama-3.1-8b --reshard tp4:tp1 --batch 2", "leave them out"),
            ("--model llama-3.1-8b --reshard tp4:tp1 --pattern one-to-many", "leave them out"),
            ("--model llama-3.1-8b --reshard tp3:tp1", "8 KV heads, which 3 ranks"),
            ("--model llama-3.1-8b --reshard tp1pp33:tp1", "--reshard tp1pp33:tp1 doesn't fit"),
            ("--model llama-3.1-8b --reshard tp4:tp1 --connect a:1", "4 owners are needed"),
        ] {
            let error = format!("{:#}", cases(words).expect_err(words));
            assert!(error.contains(part), "{words}: {error}");
        }
    }
}
