//! What a step computes: pure decisions over the state of the running sequences and the pool.
//!
//! A step is one forward pass over at most `step_tokens` tokens. Sequences that decode come first, one token each; what
//! is left of the budget goes to prompts, first come first served, in chunks, and in small ones while others decode:
//! a long prompt of one user then slows the stream of another, but doesn't stall it. `step_tokens > batch_max` keeps
//! at least one token for a prompt in every step, so prompts always progress, and the oldest sequence is never
//! preempted while another one runs, so it always ends: no schedule starves anybody.

/// Prompt tokens of a step in which others decode. A CPU computes some 200 prompt tokens a second of a model of 135 M
/// weights (2 threads), so streams pause for a third of a second, not for the 2.5 s of a whole step of 512.
const PROMPT_TOKENS_BESIDE_DECODE: usize = 64;

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// Tokens of one forward pass.
    pub(super) step_tokens: usize,
    /// Sequences that run at once.
    pub(super) batch_max: usize,
    /// Tokens in a block.
    pub(super) block_tokens: usize,
}

impl Bounds {
    /// Bounds under which every sequence progresses, whatever was configured.
    pub(super) fn new(step_tokens: usize, batch_max: usize, block_tokens: usize) -> Self {
        let batch_max = batch_max.max(1);
        Self { step_tokens: step_tokens.max(batch_max + 1), batch_max, block_tokens: block_tokens.max(1) }
    }

    /// The same bounds for a model that takes at most `step_tokens` tokens a step.
    pub(super) fn within(self, step_tokens: usize) -> Self {
        let step_tokens = self.step_tokens.min(step_tokens.max(1));
        Self { step_tokens, batch_max: self.batch_max.min(step_tokens.saturating_sub(1).max(1)), ..self }
    }
}

/// A running sequence as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Leading tokens whose KV is computed.
    pub(super) computed: usize,
    /// All tokens known so far; one more than `computed` while decoding.
    pub(super) known: usize,
    /// Blocks held.
    pub(super) blocks: usize,
}

/// Tokens of one sequence that the step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    /// Which running sequence.
    pub(super) row: usize,
    /// How many tokens, from the first uncomputed one.
    pub(super) tokens: usize,
    /// Blocks that it lacks for them.
    pub(super) grow: usize,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Compute these; nothing when no sequence runs.
    Run(Vec<Work>),
    /// Take this sequence's blocks away, then plan again: an older one can't go on without them.
    Preempt(usize),
}

/// Plans a step for `rows`, oldest first, with `available` blocks in the pool.
pub(super) fn plan(rows: &[Row], bounds: Bounds, available: usize) -> Plan {
    let mut step = Step { bounds, budget: bounds.step_tokens, available, works: Vec::new() };
    let decoding = |row: &Row| row.known - row.computed == 1;
    // Both passes keep the order of arrival.
    for decode in [true, false] {
        if !decode && !step.works.is_empty() {
            step.budget = step.budget.min(PROMPT_TOKENS_BESIDE_DECODE);
        }
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| decoding(row) == decode) {
            if !step.add(index, row) {
                return Plan::Preempt(rows.len() - 1);
            }
        }
    }
    Plan::Run(step.works)
}

struct Step {
    bounds: Bounds,
    budget: usize,
    available: usize,
    works: Vec<Work>,
}

impl Step {
    /// Gives a row its share of the budget; false when blocks for that are missing.
    fn add(&mut self, row: usize, state: &Row) -> bool {
        let tokens = (state.known - state.computed).min(self.budget);
        let needed = (state.computed + tokens).div_ceil(self.bounds.block_tokens);
        let grow = needed.saturating_sub(state.blocks);
        if grow > self.available {
            return false;
        }
        if tokens > 0 {
            self.budget -= tokens;
            self.available -= grow;
            self.works.push(Work { row, tokens, grow });
        }
        true
    }
}

/// Whether the oldest waiting sequence may start when `running` others run and `headroom` blocks would be left after
/// it took those for all its known tokens (`None` when there aren't enough). One block for each running sequence is
/// kept back: without it, the newcomer would soon be preempted, and its prompt computed twice.
pub(super) fn admits(bounds: Bounds, running: usize, headroom: Option<usize>) -> bool {
    running < bounds.batch_max && headroom.is_some_and(|left| left >= running)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds = Bounds { step_tokens: 32, batch_max: 8, block_tokens: 16 };

    fn row(computed: usize, known: usize, blocks: usize) -> Row {
        Row { computed, known, blocks }
    }

    fn tokens(plan: &Plan) -> Vec<(usize, usize)> {
        let Plan::Run(works) = plan else { panic!("{plan:?}") };
        works.iter().map(|work| (work.row, work.tokens)).collect()
    }

    #[test]
    fn decoding_comes_before_an_older_prompt() {
        let rows = [row(0, 100, 7), row(20, 21, 2), row(5, 6, 1)];
        assert_eq!(tokens(&plan(&rows, BOUNDS, 0)), [(1, 1), (2, 1), (0, 30)]);
    }

    #[test]
    fn prompts_are_served_in_order_of_arrival_with_what_the_budget_leaves() {
        let rows = [row(0, 20, 2), row(0, 20, 2), row(0, 20, 2)];
        assert_eq!(tokens(&plan(&rows, BOUNDS, 0)), [(0, 20), (1, 12)]);
    }

    #[test]
    fn prompts_get_the_whole_step_only_while_nobody_decodes() {
        let bounds = Bounds::new(512, 8, 16);
        let rows = [row(0, 1000, 63), row(3, 4, 1), row(0, 1000, 63)];
        assert_eq!(tokens(&plan(&rows, bounds, 0)), [(1, 1), (0, 64)]);
        assert_eq!(tokens(&plan(&rows[..1], bounds, 0)), [(0, 512)]);
    }

    #[test]
    fn a_prompt_progresses_beside_a_full_batch_of_decodes() {
        let bounds = Bounds::new(1, 4, 16);
        let rows = [row(0, 50, 4), row(3, 4, 1), row(3, 4, 1), row(3, 4, 1)];
        assert_eq!(tokens(&plan(&rows, bounds, 0)), [(1, 1), (2, 1), (3, 1), (0, 2)]);
    }

    #[test]
    fn a_small_model_step_bounds_the_batch_too() {
        assert_eq!(BOUNDS.within(4), Bounds { step_tokens: 4, batch_max: 3, block_tokens: 16 });
        assert_eq!(BOUNDS.within(1), Bounds { step_tokens: 1, batch_max: 1, block_tokens: 16 });
        assert_eq!(BOUNDS.within(1000), BOUNDS);
    }

    #[test]
    fn a_full_block_is_followed_by_a_new_one() {
        assert_eq!(plan(&[row(16, 17, 1)], BOUNDS, 1), Plan::Run(vec![Work { row: 0, tokens: 1, grow: 1 }]));
        assert_eq!(plan(&[row(15, 16, 1)], BOUNDS, 0), Plan::Run(vec![Work { row: 0, tokens: 1, grow: 0 }]));
    }

    #[test]
    fn the_youngest_is_preempted_when_an_older_one_cannot_grow() {
        let rows = [row(16, 17, 1), row(0, 10, 1)];
        assert_eq!(plan(&rows, BOUNDS, 0), Plan::Preempt(1));
        assert_eq!(plan(&rows[..1], BOUNDS, 0), Plan::Preempt(0), "alone: the others' blocks are lent out");
    }

    #[test]
    fn the_youngest_is_preempted_when_it_cannot_grow_itself() {
        assert_eq!(plan(&[row(3, 4, 1), row(16, 17, 1)], BOUNDS, 0), Plan::Preempt(1));
    }

    #[test]
    fn a_newcomer_leaves_a_block_for_each_that_runs() {
        assert!(admits(BOUNDS, 0, Some(0)));
        assert!(!admits(BOUNDS, 2, Some(1)));
        assert!(admits(BOUNDS, 2, Some(2)));
        assert!(!admits(BOUNDS, 8, Some(100)));
        assert!(!admits(BOUNDS, 0, None));
    }

    fn rows() -> impl Strategy<Value = Vec<Row>> {
        let row = (0..60usize, 1..60usize).prop_map(|(computed, pending)| Row {
            computed,
            known: computed + pending,
            blocks: computed.div_ceil(16),
        });
        prop::collection::vec(row, 0..9)
    }

    proptest! {
        #[test]
        fn a_step_keeps_its_bounds_and_serves_every_decode(
            rows in rows(), step in 0..64usize, available in 0..30usize,
        ) {
            let bounds = Bounds::new(step, 8, 16);
            match plan(&rows, bounds, available) {
                Plan::Preempt(youngest) => prop_assert_eq!(youngest + 1, rows.len()),
                Plan::Run(works) => {
                    prop_assert!(works.iter().map(|work| work.tokens).sum::<usize>() <= bounds.step_tokens);
                    prop_assert!(works.iter().map(|work| work.grow).sum::<usize>() <= available);
                    prop_assert!(rows.is_empty() || !works.is_empty(), "somebody progresses");
                    let served = |index| works.iter().any(|work| work.row == index);
                    for (index, row) in rows.iter().enumerate() {
                        prop_assert!(row.known - row.computed > 1 || served(index), "row {} stalls", index);
                    }
                    for work in &works {
                        let row = rows[work.row];
                        prop_assert!(work.tokens >= 1 && row.computed + work.tokens <= row.known);
                        prop_assert!((row.blocks + work.grow) * 16 >= row.computed + work.tokens);
                    }
                }
            }
        }

        #[test]
        fn everybody_ends_whatever_arrives(mut rows in rows()) {
            let bounds = Bounds::new(8, 8, 16);
            let mut steps = 0;
            while !rows.is_empty() {
                let Plan::Run(works) = plan(&rows, bounds, usize::MAX / 2) else { unreachable!("memory abounds") };
                for work in &works {
                    rows[work.row].computed += work.tokens;
                    rows[work.row].blocks += work.grow;
                }
                rows.retain(|row| row.computed < row.known);
                steps += 1;
                prop_assert!(steps <= 8 * 60, "somebody starves");
            }
        }
    }
}
