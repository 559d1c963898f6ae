//! Who is told of a prompt's KV hears of it in order, and never of layers that are not stored.

use std::sync::mpsc::{Receiver, Sender, channel};

use towline_worker::engine::{Job, KvProgress};
use towline_worker::pool::Blocks;

use crate::engine_rig::{BLOCK, PATIENCE, answer, config, expected, job, prompt, rig};

/// What was told.
#[derive(Debug, PartialEq, Eq)]
enum News {
    Started(usize),
    Layers(usize),
    Stopped,
    Dropped,
}

/// Passes it on, and keeps the blocks as a handoff does.
#[derive(Debug)]
struct Teller {
    news: Sender<News>,
    blocks: Option<Blocks>,
}

impl KvProgress for Teller {
    fn handle_started(&mut self, blocks: Blocks) {
        _ = self.news.send(News::Started(blocks.len()));
        self.blocks = Some(blocks);
    }

    fn handle_layers(&mut self, layers: usize) {
        _ = self.news.send(News::Layers(layers));
    }

    fn handle_stopped(&mut self) {
        self.blocks = None;
        _ = self.news.send(News::Stopped);
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.blocks = None;
        _ = self.news.send(News::Dropped);
    }
}

fn told(job: Job) -> (Job, Receiver<News>) {
    let (news, heard) = channel();
    (Job { progress: Some(Box::new(Teller { news, blocks: None })), ..job }, heard)
}

fn all(heard: &Receiver<News>) -> Vec<News> {
    let mut news = vec![];
    while news.last() != Some(&News::Dropped) {
        news.push(heard.recv_timeout(PATIENCE).unwrap());
    }
    news
}

#[test]
fn layers_are_told_once_the_whole_prompt_is_stored() {
    let rig = rig(32, config(4));
    // Three steps of 16 tokens: the model has one layer, and only the last step completes it.
    let (job, heard) = told(job(&prompt(1, 40), 3));
    let mut handle = rig.submit(job);
    assert_eq!(answer(&mut handle).tokens, expected(&prompt(1, 40), 3));
    assert_eq!(all(&heard), [News::Started(10), News::Layers(1), News::Dropped]);
    drop(handle);
    rig.check_blocks_are_back();
}

#[test]
fn a_preempted_job_is_told_to_take_back_what_it_lent_and_starts_anew() {
    // Room for the second's 23 blocks beside two of the first, which wants a third while the second still computes.
    let rig = rig(25, config(4));
    rig.controls.allow(0);
    let mut first = rig.submit(job(&prompt(1, 4), 30));
    let (second, heard) = told(job(&prompt(2, 90), 1));
    let mut second = rig.submit(second);
    rig.controls.open();
    assert_eq!(answer(&mut first).tokens, expected(&prompt(1, 4), 30));
    assert_eq!(answer(&mut second).tokens, expected(&prompt(2, 90), 1));
    let (start, stop) = (News::Started(23), News::Stopped);
    assert_eq!(all(&heard), [start, stop, News::Started(23), News::Layers(1), News::Dropped]);
    assert_eq!(rig.engine.stats().preemptions, 1);
    drop((first, second));
    rig.check_blocks_are_back();
}

#[test]
fn a_cancelled_job_drops_whom_it_told() {
    let rig = rig(32, config(4));
    rig.controls.allow(0);
    let (job, heard) = told(job(&prompt(1, 40), 3));
    drop(rig.submit(job));
    rig.controls.open();
    assert_eq!(all(&heard).last(), Some(&News::Dropped));
    assert_eq!(BLOCK, 4, "the counts above are of blocks of four");
}
