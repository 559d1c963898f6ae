//! The workers, what is known of them, and how many requests each holds.
//!
//! The pool turns clocks and locks into the [`View`] that [`crate::choose`] decides on. Choosing and counting
//! happen under one short lock, so a thousand requests at once spread as well as a thousand in a row. Counts are
//! given back by [`Held`], whatever way a request ends.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use crate::choose::{self, Candidate, Fitness, Route, Shape, View, WorkerId};
use crate::config::{Config, WorkerUrl};
use crate::health::{Health, Tolerance};
use crate::models::Model;

/// What a worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Prefill,
    Decode,
    Aggregated,
}

impl Role {
    /// The word for labels and messages.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) role: Role,
    pub(crate) url: WorkerUrl,
    in_flight: AtomicUsize,
    health: Mutex<Health>,
    models: RwLock<Option<Arc<[Model]>>>,
}

impl Worker {
    fn new(role: Role, url: WorkerUrl) -> Self {
        Self {
            role,
            url,
            in_flight: AtomicUsize::new(0),
            health: Mutex::default(),
            models: RwLock::new(None),
        }
    }

    /// The models it listed, or none while it hasn't.
    pub(crate) fn models(&self) -> Option<Arc<[Model]>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Remembers what it listed.
    pub(crate) fn set_models(&self, models: Vec<Model>) {
        *self.models.write().unwrap_or_else(PoisonError::into_inner) = Some(models.into());
    }

    /// Its health, to tell it something.
    pub(crate) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is known to lack `model`; what hasn't been listed isn't known.
    fn lacks(&self, model: &str) -> bool {
        self.models().is_some_and(|models| models.iter().all(|known| known.id != model))
    }
}

/// All workers of the deployment. The set is fixed today; ids are places in it.
#[derive(Debug)]
pub(crate) struct Pool {
    workers: Vec<Worker>,
    tolerance: Tolerance,
    turn: Mutex<usize>,
}

/// What the deployment knows of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Knowledge {
    /// Some worker listed it.
    Listed,
    /// Every worker that could answer listed its models, and it was in none.
    Absent,
    /// A worker that could serve it hasn't listed its models.
    Unknown,
}

impl Pool {
    pub(crate) fn new(config: &Config) -> Self {
        let of = |role, urls: &[WorkerUrl]| -> Vec<Worker> {
            urls.iter().map(|url| Worker::new(role, url.clone())).collect()
        };
        let mut workers = of(Role::Prefill, &config.prefill);
        workers.extend(of(Role::Decode, &config.decode));
        workers.extend(of(Role::Aggregated, &config.aggregated));
        let limits = &config.limits;
        let tolerance = Tolerance { failures_max: limits.failures_max.max(1), cool_down: limits.cool_down };
        Self { workers, tolerance, turn: Mutex::new(0) }
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.workers.iter().enumerate().map(|(index, worker)| (WorkerId(index), worker))
    }

    /// The worker of an id this pool gave out.
    pub(crate) fn worker(&self, id: WorkerId) -> &Worker {
        &self.workers[id.0]
    }

    pub(crate) fn is_usable(&self, worker: &Worker, now: Instant) -> bool {
        worker.health().is_usable(self.tolerance, now)
    }

    /// A request failed for a reason that is the worker's.
    pub(crate) fn handle_failure(&self, id: WorkerId) {
        self.worker(id).health().handle_failure(self.tolerance, Instant::now());
    }

    /// A request was answered.
    pub(crate) fn handle_success(&self, id: WorkerId) {
        self.worker(id).health().handle_success();
    }

    /// Whether anyone serves `model`. Only usable workers can say no.
    pub(crate) fn knowledge(&self, model: &str) -> Knowledge {
        let now = Instant::now();
        let mut unlisted = self.workers.is_empty();
        for worker in &self.workers {
            match worker.models() {
                Some(models) if models.iter().any(|known| known.id == model) => return Knowledge::Listed,
                Some(_) => {}
                None => unlisted |= self.is_usable(worker, now),
            }
        }
        let silent = self.workers.iter().all(|worker| worker.models().is_none());
        if unlisted || silent { Knowledge::Unknown } else { Knowledge::Absent }
    }

    /// What the choice may look at, for a request for `model` (or for any).
    pub(crate) fn view(&self, model: Option<&str>) -> View {
        let now = Instant::now();
        let mut view = View::default();
        for (id, worker) in self.workers() {
            let usable = self.is_usable(worker, now) && !model.is_some_and(|model| worker.lacks(model));
            let candidate = Candidate {
                id,
                in_flight: worker.in_flight.load(Ordering::Relaxed),
                fitness: if usable { Fitness::Usable } else { Fitness::Unusable },
            };
            match worker.role {
                Role::Prefill => view.prefill.push(candidate),
                Role::Decode => view.decode.push(candidate),
                Role::Aggregated => view.aggregated.push(candidate),
            }
        }
        view
    }

    /// Chooses a route and counts its workers.
    pub(crate) fn route(self: &Arc<Self>, model: &str, shape: Shape) -> Option<HeldRoute> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let route = choose::route(&self.view(Some(model)), shape, *turn)?;
        *turn = turn.wrapping_add(1);
        Some(match route {
            Route::Pair { prefill, decode } => {
                HeldRoute::Pair { prefill: self.hold(prefill), decode: self.hold(decode) }
            }
            Route::Aggregated(id) => HeldRoute::Aggregated(self.hold(id)),
        })
    }

    /// Another worker of the role of `except`, counted; what a retry asks for.
    pub(crate) fn other(self: &Arc<Self>, model: &str, except: WorkerId) -> Option<Held> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let view = self.view(Some(model));
        let candidates = match self.worker(except).role {
            Role::Prefill => &view.prefill,
            Role::Decode => &view.decode,
            Role::Aggregated => &view.aggregated,
        };
        choose::one(candidates, Some(except), *turn).map(|id| self.hold(id))
    }

    fn hold(self: &Arc<Self>, id: WorkerId) -> Held {
        self.worker(id).in_flight.fetch_add(1, Ordering::Relaxed);
        Held { pool: Arc::clone(self), id }
    }
}

/// A [`Route`] whose workers are counted.
#[derive(Debug)]
pub(crate) enum HeldRoute {
    Pair { prefill: Held, decode: Held },
    Aggregated(Held),
}

/// A worker holding one of our requests; dropping it gives the count back.
#[derive(Debug)]
pub(crate) struct Held {
    pool: Arc<Pool>,
    id: WorkerId,
}

impl Held {
    pub(crate) fn id(&self) -> WorkerId {
        self.id
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.pool.worker(self.id)
    }

    pub(crate) fn handle_failure(&self) {
        self.pool.handle_failure(self.id);
    }

    pub(crate) fn handle_success(&self) {
        self.pool.handle_success(self.id);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.worker().in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(prefill: usize, decode: usize) -> Arc<Pool> {
        let urls = |count: usize, base: usize| -> Vec<WorkerUrl> {
            (0..count).map(|i| format!("http://127.0.0.1:{}", base + i).parse().unwrap()).collect()
        };
        Arc::new(Pool::new(&Config {
            prefill: urls(prefill, 1000),
            decode: urls(decode, 2000),
            ..Config::default()
        }))
    }

    fn loads(pool: &Pool) -> Vec<usize> {
        pool.workers().map(|(_, w)| w.in_flight.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn held_workers_are_counted_and_given_back() {
        let pool = pool(2, 2);
        let routes: Vec<_> = (0..4).map(|_| pool.route("m", Shape::Any).unwrap()).collect();
        assert_eq!(loads(&pool), [2, 2, 2, 2]);
        drop(routes);
        assert_eq!(loads(&pool), [0, 0, 0, 0]);
    }

    #[test]
    fn failing_worker_is_routed_around_and_models_are_respected() {
        let pool = pool(2, 1);
        for _ in 0..3 {
            pool.handle_failure(WorkerId(0));
        }
        for _ in 0..3 {
            match pool.route("m", Shape::Any).unwrap() {
                HeldRoute::Pair { prefill, .. } => assert_eq!(prefill.id(), WorkerId(1)),
                HeldRoute::Aggregated(_) => panic!("no aggregated worker here"),
            }
        }
        pool.worker(WorkerId(1)).set_models(vec![Model::named("other")]);
        assert!(pool.route("m", Shape::Any).is_none());
        pool.handle_success(WorkerId(0));
        assert!(pool.route("m", Shape::Any).is_some());
    }

    #[test]
    fn model_is_absent_only_when_every_usable_worker_has_said_so() {
        let pool = pool(1, 1);
        assert_eq!(pool.knowledge("m"), Knowledge::Unknown);
        pool.worker(WorkerId(0)).set_models(vec![Model::named("other")]);
        assert_eq!(pool.knowledge("m"), Knowledge::Unknown);
        pool.worker(WorkerId(1)).set_models(vec![Model::named("other")]);
        assert_eq!(pool.knowledge("m"), Knowledge::Absent);
        assert_eq!(pool.knowledge("other"), Knowledge::Listed);
    }
}
