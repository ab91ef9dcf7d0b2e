//! Who runs in the next step, as a policy: queues and budgets in, a plan out. It has no clock, no device and
//! no pages; it knows requests as numbers that grow with their arrival.
//!
//! - One step holds decode rows and chunks of prefill alike. Decode rows come first, one each; what is left of
//!   the rows goes to prompts, the oldest first, each but the last leaving half of it to those behind.
//! - Requests start in the order of arrival, none overtakes another.
//! - Where pages run out the youngest gives up its own and waits again, before all that came after it. So the
//!   oldest never gives way, always advances and comes to an end; then another one is the oldest: none starves.

use std::collections::{BTreeSet, VecDeque};

/// Names a request: the later it arrived, the larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What one step may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Requests that run at once: no more than `rows`, so that each advances in every step.
    pub running: usize,
    /// Rows of one step.
    pub rows: usize,
    /// Rows of prefill in a step that also decodes: what the others' next tokens wait for.
    pub prefill_beside_decode: usize,
}

/// The rows of one request in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Whose.
    pub id: RequestId,
    /// How many: 1 or more.
    pub rows: usize,
}

/// The queues.
#[derive(Debug)]
pub struct Scheduler {
    budget: Budget,
    /// In the order of arrival.
    waiting: VecDeque<RequestId>,
    running: BTreeSet<RequestId>,
}

impl Scheduler {
    /// Empty queues.
    pub fn new(budget: Budget) -> Self {
        let running = budget.running.clamp(1, budget.rows.max(1));
        Scheduler {
            budget: Budget { running, ..budget },
            waiting: VecDeque::new(),
            running: BTreeSet::new(),
        }
    }

    /// Requests that wait, in the order in which they will start.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = RequestId> {
        self.waiting.iter().copied()
    }

    /// Requests that run, the oldest first.
    pub fn running(&self) -> impl ExactSizeIterator<Item = RequestId> {
        self.running.iter().copied()
    }

    /// A new request waits.
    pub fn arrive(&mut self, id: RequestId) {
        let place = self.waiting.partition_point(|&other| other < id);
        self.waiting.insert(place, id);
    }

    /// A request is over, wherever it was.
    pub fn leave(&mut self, id: RequestId) {
        self.running.remove(&id);
        self.waiting.retain(|&other| other != id);
    }

    /// Who may start next, if there is a place.
    pub fn candidate(&self) -> Option<RequestId> {
        self.waiting
            .front()
            .copied()
            .filter(|_| self.running.len() < self.budget.running)
    }

    /// Starts the [`Scheduler::candidate`].
    pub fn start(&mut self) {
        self.running.extend(self.waiting.pop_front());
    }

    /// Who has to give up pages for `id`: the youngest, if it is younger; else none, and `id` itself has to
    /// unless it runs alone.
    pub fn victim(&self, id: RequestId) -> Option<RequestId> {
        self.running
            .last()
            .copied()
            .filter(|&youngest| youngest > id)
    }

    /// A running request gave up its pages and waits again.
    pub fn preempt(&mut self, id: RequestId) {
        if self.running.remove(&id) {
            self.arrive(id);
        }
    }

    /// The next step, the oldest first. `ready` says how many rows a running request could use: one that
    /// decodes has a single row, one whose next token is still to be read has none.
    pub fn plan(&self, ready: impl Fn(RequestId) -> usize) -> Vec<Share> {
        let mut shares: Vec<Share> = Vec::with_capacity(self.running.len());
        let mut prompts: Vec<Share> = Vec::new();
        for &id in &self.running {
            match ready(id) {
                0 => {}
                1 => shares.push(Share { id, rows: 1 }),
                rows => prompts.push(Share { id, rows }),
            }
        }
        let decode = shares.len();
        let mut left = self.budget.rows - decode;
        if decode > 0 {
            left = left.min(self.budget.prefill_beside_decode.max(1));
        }
        let mut taken = vec![0; prompts.len()];
        for (i, prompt) in prompts.iter().enumerate() {
            let most = if i + 1 == prompts.len() {
                left
            } else {
                left.div_ceil(2)
            };
            taken[i] = prompt.rows.min(most);
            left -= taken[i];
        }
        for (prompt, taken) in prompts.iter().zip(&mut taken) {
            let more = (prompt.rows - *taken).min(left);
            *taken += more;
            left -= more;
        }
        shares.extend(prompts.iter().zip(taken).map(|(prompt, rows)| Share {
            id: prompt.id,
            rows,
        }));
        shares.retain(|share| share.rows > 0);
        shares.sort_unstable_by_key(|share| share.id);
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn ids(numbers: &[u64]) -> Vec<RequestId> {
        numbers.iter().map(|&number| RequestId(number)).collect()
    }

    fn scheduler(running: usize, rows: usize, beside: usize, arrivals: u64) -> Scheduler {
        let mut scheduler = Scheduler::new(Budget {
            running,
            rows,
            prefill_beside_decode: beside,
        });
        (0..arrivals).for_each(|id| scheduler.arrive(RequestId(id)));
        while scheduler.candidate().is_some() {
            scheduler.start();
        }
        scheduler
    }

    fn plan(scheduler: &Scheduler, ready: &[usize]) -> Vec<(u64, usize)> {
        let plan = scheduler.plan(|id| ready[id.0 as usize]);
        plan.iter().map(|share| (share.id.0, share.rows)).collect()
    }

    #[test]
    fn decode_rows_come_first_and_prompts_share_the_rest() {
        let four = scheduler(8, 16, 16, 4);
        assert_eq!(plan(&four, &[100, 1, 0, 1]), [(0, 14), (1, 1), (3, 1)]);
        assert_eq!(
            plan(&four, &[100, 100, 100, 1]),
            [(0, 8), (1, 4), (2, 3), (3, 1)]
        );
        assert_eq!(
            plan(&four, &[100, 2, 2, 1]),
            [(0, 11), (1, 2), (2, 2), (3, 1)],
            "what the short leave, the oldest gets"
        );
        assert_eq!(plan(&four, &[5, 5, 5, 5]), [(0, 5), (1, 5), (2, 3), (3, 3)]);
        assert!(plan(&four, &[0; 4]).is_empty());
    }

    #[test]
    fn prefill_beside_decode_is_bounded() {
        let two = scheduler(8, 64, 8, 2);
        assert_eq!(plan(&two, &[1, 100]), [(0, 1), (1, 8)]);
        assert_eq!(plan(&two, &[0, 100]), [(1, 64)]);
    }

    #[test]
    fn no_more_run_than_there_are_rows() {
        let many = scheduler(100, 4, 4, 9);
        assert_eq!(many.running().collect::<Vec<_>>(), ids(&[0, 1, 2, 3]));
        assert_eq!(many.candidate(), None);
        assert_eq!(
            plan(&many, &[1, 1, 1, 50]),
            [(0, 1), (1, 1), (2, 1), (3, 1)],
            "a prompt advances beside decoders"
        );
    }

    #[test]
    fn the_youngest_gives_way_and_comes_back_first() {
        let mut scheduler = scheduler(3, 8, 8, 5);
        assert_eq!(scheduler.victim(RequestId(0)), Some(RequestId(2)));
        assert_eq!(scheduler.victim(RequestId(2)), None);
        scheduler.preempt(RequestId(2));
        assert_eq!(scheduler.waiting().collect::<Vec<_>>(), ids(&[2, 3, 4]));
        scheduler.preempt(RequestId(4));
        assert_eq!(
            scheduler.waiting().len(),
            3,
            "one that waits cannot give way"
        );
        assert_eq!(scheduler.candidate(), Some(RequestId(2)));
        scheduler.leave(RequestId(3));
        scheduler.leave(RequestId(0));
        assert_eq!(
            scheduler
                .waiting()
                .chain(scheduler.running())
                .collect::<Vec<_>>(),
            ids(&[2, 4, 1])
        );
    }

    /// Random arrivals, lengths, cancels and budgets over a made-up pool of pages: budgets are kept, every
    /// running request with work advances, and all come to an end within the work there is.
    #[test]
    fn random_traffic_keeps_the_promises() {
        let mut state = 3u64;
        let mut random = move |n: usize| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for _ in 0..300 {
            let budget = Budget {
                running: 1 + random(6),
                rows: 1 + random(24),
                prefill_beside_decode: random(12),
            };
            let mut scheduler = Scheduler::new(budget);
            let total_pages = 4 + random(20);
            // Rows still to run before the first token, tokens still to come, and pages (one a row) held.
            let mut requests: HashMap<RequestId, (usize, usize, usize)> = HashMap::new();
            let mut arrived = 0;
            let mut steps = 0;
            while arrived < 30 || !requests.is_empty() {
                if arrived < 30 && random(3) > 0 {
                    let prompt = 1 + random(total_pages - 2);
                    let output = 1 + random(total_pages - prompt);
                    scheduler.arrive(RequestId(arrived));
                    requests.insert(RequestId(arrived), (prompt, output, 0));
                    arrived += 1;
                }
                if random(20) == 0 && arrived > 0 {
                    let id = RequestId(random(arrived as usize) as u64);
                    scheduler.leave(id);
                    requests.remove(&id);
                }
                while scheduler.candidate().is_some() {
                    scheduler.start();
                }
                let plan = scheduler.plan(|id| requests[&id].0);
                assert!(plan.iter().map(|share| share.rows).sum::<usize>() <= budget.rows);
                assert_eq!(
                    plan.first().map(|share| share.id),
                    scheduler.running().next(),
                    "the oldest advances"
                );
                let decoding = scheduler.running().filter(|id| requests[id].0 == 1).count();
                assert_eq!(
                    plan.iter()
                        .filter(|share| requests[&share.id].0 == 1)
                        .count(),
                    decoding,
                    "who decodes too"
                );
                assert!(plan.len() <= budget.running && plan.is_sorted_by_key(|share| share.id));
                let oldest = plan.first().copied();
                for share in plan {
                    if !scheduler.running.contains(&share.id) {
                        continue;
                    }
                    let held = |requests: &HashMap<_, (usize, usize, usize)>| {
                        requests.values().map(|r| r.2).sum::<usize>()
                    };
                    while held(&requests) + share.rows > total_pages {
                        let victim = scheduler.victim(share.id).unwrap_or(share.id);
                        scheduler.preempt(victim);
                        let request = requests.get_mut(&victim).unwrap();
                        (request.0, request.2) = (request.0 + request.2, 0);
                        if victim == share.id {
                            break;
                        }
                    }
                    if !scheduler.running.contains(&share.id) {
                        assert_ne!(Some(share), oldest, "the oldest never gives way");
                        continue;
                    }
                    let request = requests.get_mut(&share.id).unwrap();
                    request.2 += share.rows;
                    request.0 -= share.rows;
                    if request.0 == 0 {
                        request.1 -= 1;
                        request.0 = 1;
                    }
                    if request.1 == 0 {
                        requests.remove(&share.id);
                        scheduler.leave(share.id);
                    }
                }
                steps += 1;
                assert!(steps < 30 * (2 * total_pages + 60), "somebody starves");
            }
            assert_eq!(
                (scheduler.waiting().len(), scheduler.running().len()),
                (0, 0)
            );
        }
    }
}
