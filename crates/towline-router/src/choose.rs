//! Which workers serve a request: pure functions over a view, so that a simulator can drive the same choice.
//!
//! Today's policy is least in flight, ties in turn. Later policies (measured paths, domains, contracts, prefix
//! overlap) add columns to [`Candidate`] and terms to the cost; the shell that asks stays as it is.
//! Cost: three short passes over the candidates of a role, no allocation.

/// A worker's place in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub usize);

/// Whether a worker may be chosen for the request at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fitness {
    /// Alive, as far as is known, and not known to lack the model.
    Usable,
    /// Cooling down, failing its probes, or without the model.
    Unusable,
}

/// One worker, as far as the choice is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which worker.
    pub id: WorkerId,
    /// Requests it holds through this router.
    pub in_flight: usize,
    /// Whether it may be chosen.
    pub fitness: Fitness,
}

/// Everything the choice may look at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Prefill workers.
    pub prefill: Vec<Candidate>,
    /// Decode workers.
    pub decode: Vec<Candidate>,
    /// Workers that do both.
    pub aggregated: Vec<Candidate>,
}

/// Which kinds of route a request can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A pair, or an aggregated worker when there is none.
    Any,
    /// An aggregated worker only: one set of transfer parameters can't carry the request.
    OneWorker,
}

/// The workers for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Two legs.
    Pair {
        /// Computes the prompt.
        prefill: WorkerId,
        /// Writes the tokens.
        decode: WorkerId,
    },
    /// One leg.
    Aggregated(WorkerId),
}

/// The route for the `turn`-th request, or none if nobody can take it.
#[must_use]
pub fn route(view: &View, shape: Shape, turn: usize) -> Option<Route> {
    let pair = match shape {
        Shape::Any => pair(&view.prefill, &view.decode, turn),
        Shape::OneWorker => None,
    };
    pair.or_else(|| one(&view.aggregated, None, turn).map(Route::Aggregated))
}

/// Prefill and decode chosen together. The cost of a pair is the sum of both loads, so the best pairs are every
/// least-loaded prefill with every least-loaded decode; `turn` walks through all of them.
fn pair(prefill: &[Candidate], decode: &[Candidate], turn: usize) -> Option<Route> {
    let (fastest, writers) = (Ties::of(prefill, None)?, Ties::of(decode, None)?);
    let prefill = fastest.pick(prefill, turn)?;
    // In step, both lists repeat after their least common multiple: one step aside then, or some pairs never meet.
    let round = fastest.count / gcd(fastest.count, writers.count) * writers.count;
    let decode = writers.pick(decode, turn.wrapping_add(turn / round))?;
    Some(Route::Pair { prefill, decode })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least-loaded usable worker other than `except`; the `turn`-th of those that tie.
#[must_use]
pub fn one(candidates: &[Candidate], except: Option<WorkerId>, turn: usize) -> Option<WorkerId> {
    Ties::of(candidates, except)?.pick(candidates, turn)
}

/// The usable workers with the least load.
struct Ties {
    in_flight: usize,
    count: usize,
    except: Option<WorkerId>,
}

impl Ties {
    fn of(candidates: &[Candidate], except: Option<WorkerId>) -> Option<Self> {
        let usable = || candidates.iter().filter(|c| eligible(c, except));
        let in_flight = usable().map(|c| c.in_flight).min()?;
        let count = usable().filter(|c| c.in_flight == in_flight).count();
        Some(Self { in_flight, count, except })
    }

    fn pick(&self, candidates: &[Candidate], turn: usize) -> Option<WorkerId> {
        candidates
            .iter()
            .filter(|c| eligible(c, self.except) && c.in_flight == self.in_flight)
            .nth(turn % self.count)
            .map(|c| c.id)
    }
}

fn eligible(candidate: &Candidate, except: Option<WorkerId>) -> bool {
    candidate.fitness == Fitness::Usable && Some(candidate.id) != except
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn worker(id: usize, in_flight: usize) -> Candidate {
        Candidate { id: WorkerId(id), in_flight, fitness: Fitness::Usable }
    }

    fn down(id: usize) -> Candidate {
        Candidate { fitness: Fitness::Unusable, ..worker(id, 0) }
    }

    #[test]
    fn least_in_flight_wins_and_ties_take_turns() {
        let pool = [worker(0, 2), worker(1, 1), worker(2, 1)];
        let picks: Vec<_> = (0..4).filter_map(|turn| one(&pool, None, turn)).map(|id| id.0).collect();
        assert_eq!(picks, [1, 2, 1, 2]);
    }

    #[test]
    fn unusable_and_excepted_workers_are_never_chosen() {
        let pool = [down(0), worker(1, 5), worker(2, 9)];
        assert_eq!(one(&pool, None, 7), Some(WorkerId(1)));
        assert_eq!(one(&pool, Some(WorkerId(1)), 7), Some(WorkerId(2)));
        assert_eq!(one(&pool[..2], Some(WorkerId(1)), 7), None);
    }

    #[test]
    fn turns_walk_through_every_equal_pair() {
        for (prefills, decodes) in [(1, 1), (2, 2), (2, 3), (3, 2), (4, 4)] {
            let view = View {
                prefill: (0..prefills).map(|id| worker(id, 0)).collect(),
                decode: (10..10 + decodes).map(|id| worker(id, 0)).collect(),
                aggregated: vec![],
            };
            let seen: BTreeSet<_> = (0..prefills * decodes * 2)
                .map(|turn| match route(&view, Shape::Any, turn) {
                    Some(Route::Pair { prefill, decode }) => (prefill, decode),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(seen.len(), prefills * decodes, "{prefills}x{decodes}");
        }
    }

    #[test]
    fn aggregated_serves_when_no_pair_is_whole() {
        let view =
            View { prefill: vec![worker(0, 0)], decode: vec![down(1)], aggregated: vec![worker(2, 3)] };
        assert_eq!(route(&view, Shape::Any, 0), Some(Route::Aggregated(WorkerId(2))));
        let whole = View { decode: vec![worker(1, 0)], ..view.clone() };
        assert!(matches!(route(&whole, Shape::Any, 0), Some(Route::Pair { .. })));
        assert_eq!(route(&whole, Shape::OneWorker, 0), Some(Route::Aggregated(WorkerId(2))));
        assert_eq!(route(&View::default(), Shape::Any, 0), None);
    }
}
