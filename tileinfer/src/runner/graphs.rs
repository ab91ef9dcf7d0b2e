//! Which steps are recorded and replayed: those of a shape that has been seen before. It knows shapes and counts
//! steps; what a step computes and how a device records it are the backend's.

use std::collections::HashMap;

use crate::backend::StepLayout;

/// Rows of a step whose spans may have any length: a token, a few drafts to verify.
const FEW_ROWS: usize = 16;

/// Rows of a step of one row a span: many sequences that decode together.
const MANY_ROWS: usize = 128;

/// Shapes that are remembered. A recording takes about a megabyte of device memory.
const MOST: usize = 128;

/// All that a recording depends on besides the addresses of the buffers that every step shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    spans: usize,
    wanted: usize,
    /// Which of the two step buffers holds the layout.
    second: bool,
}

/// What to do with a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan<'a, G> {
    /// Launch its ops one by one.
    Launch,
    /// Record it, give the recording to [`Graphs::keep`] and replay it.
    Record,
    /// Replay this.
    Replay(&'a G),
}

/// Recordings by shape.
#[derive(Debug)]
pub(super) struct Graphs<G> {
    /// Whether anything is recorded.
    on: bool,
    shapes: HashMap<Shape, Seen<G>>,
    /// The shape of the step planned last.
    current: Option<Shape>,
    /// Steps planned.
    steps: u64,
    /// Times that the buffers had moved when the shapes below were seen.
    moves: usize,
}

#[derive(Debug)]
struct Seen<G> {
    graph: Option<G>,
    /// The step of that shape last planned.
    step: u64,
}

impl<G> Graphs<G> {
    /// No recordings yet, or never any.
    pub(super) fn new(on: bool) -> Self {
        Graphs {
            on,
            shapes: HashMap::new(),
            current: None,
            steps: 0,
            moves: 0,
        }
    }

    /// What to do with a step of `layout` in the first or the `second` step buffer, where shared buffers have
    /// moved `moves` times so far: recordings hold addresses, so those made before the last move are dropped.
    ///
    /// The first step of a shape is launched, which loads its kernels and makes its scratch; the second is
    /// recorded, so that a shape that never comes again costs nothing.
    pub(super) fn plan(&mut self, layout: &StepLayout, second: bool, moves: usize) -> Plan<'_, G> {
        if self.moves != moves {
            self.shapes.clear();
            self.moves = moves;
        }
        let (rows, spans) = (layout.rows(), layout.spans());
        let short = rows <= FEW_ROWS || rows <= MANY_ROWS && spans == rows;
        self.current = None;
        if !self.on || rows == 0 || !short {
            return Plan::Launch;
        }
        let shape = Shape {
            rows,
            spans,
            wanted: layout.wanted.len(),
            second,
        };
        self.current = Some(shape);
        self.steps += 1;
        if !self.shapes.contains_key(&shape) {
            self.forget_oldest();
            let seen = Seen {
                graph: None,
                step: self.steps,
            };
            self.shapes.insert(shape, seen);
            return Plan::Launch;
        }
        let seen = self.shapes.get_mut(&shape).expect("was just found");
        seen.step = self.steps;
        seen.graph.as_ref().map_or(Plan::Record, Plan::Replay)
    }

    /// Keeps the recording of the step planned last.
    pub(super) fn keep(&mut self, graph: G) -> Option<&G> {
        let seen = self.shapes.get_mut(&self.current?)?;
        Some(seen.graph.insert(graph))
    }

    fn forget_oldest(&mut self) {
        if self.shapes.len() < MOST {
            return;
        }
        let oldest = self.shapes.iter().min_by_key(|(_, seen)| seen.step);
        if let Some(shape) = oldest.map(|(&shape, _)| shape) {
            self.shapes.remove(&shape);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spans of these lengths, of which `wanted` rows are wanted.
    fn layout(spans: &[usize], wanted: usize) -> StepLayout {
        let mut layout = StepLayout {
            span_rows: vec![0],
            wanted: (0..wanted as u32).collect(),
            ..StepLayout::default()
        };
        for &rows in spans {
            layout.positions.extend(0..rows as u32);
            layout.span_rows.push(layout.positions.len() as u32);
        }
        layout
    }

    /// Recordings that count: each is the number of recordings made before it.
    struct Counting {
        graphs: Graphs<usize>,
        recorded: usize,
    }

    impl Counting {
        fn new(on: bool) -> Self {
            Counting {
                graphs: Graphs::new(on),
                recorded: 0,
            }
        }

        /// The recording that a step replays, none if it is launched.
        fn step(&mut self, layout: &StepLayout, second: bool, moves: usize) -> Option<usize> {
            match self.graphs.plan(layout, second, moves) {
                Plan::Launch => None,
                Plan::Replay(&graph) => Some(graph),
                Plan::Record => {
                    self.recorded += 1;
                    self.graphs.keep(self.recorded - 1).copied()
                }
            }
        }
    }

    #[test]
    fn a_shape_is_recorded_when_it_comes_again() {
        let mut steps = Counting::new(true);
        let one = layout(&[1], 1);
        let replayed: Vec<_> = (0..4).map(|_| steps.step(&one, false, 0)).collect();
        assert_eq!(replayed, [None, Some(0), Some(0), Some(0)]);
        assert_eq!(steps.recorded, 1);
    }

    #[test]
    fn whatever_a_recording_depends_on_is_another_shape() {
        let mut steps = Counting::new(true);
        let shapes = [
            (layout(&[1], 1), false),
            (layout(&[1], 1), true),
            (layout(&[1], 0), false),
            (layout(&[1, 1], 1), false),
            (layout(&[2], 1), false),
            (layout(&[2], 2), false),
        ];
        for (layout, second) in &shapes {
            assert_eq!(steps.step(layout, *second, 0), None);
        }
        for turn in 0..2 {
            for (i, (layout, second)) in shapes.iter().enumerate() {
                assert_eq!(steps.step(layout, *second, 0), Some(i), "turn {turn}");
            }
        }
    }

    #[test]
    fn positions_and_tokens_are_no_part_of_a_shape() {
        let mut steps = Counting::new(true);
        let mut step = layout(&[4], 1);
        steps.step(&step, false, 0);
        assert_eq!(steps.step(&step, false, 0), Some(0));
        step.positions = vec![900, 901, 902, 903];
        step.tables = vec![7; 9];
        step.wanted = vec![3];
        assert_eq!(steps.step(&step, false, 0), Some(0));
    }

    #[test]
    fn prefill_is_launched() {
        let mut steps = Counting::new(true);
        let long = [
            layout(&[17], 1),
            layout(&[512], 1),
            layout(&[16, 1], 1),
            layout(&[1; 129], 129),
            layout(&[], 0),
        ];
        let short = [
            layout(&[16], 16),
            layout(&[15, 1], 2),
            layout(&[1; 17], 17),
            layout(&[1; 128], 128),
        ];
        for _ in 0..3 {
            for layout in &long {
                assert_eq!(steps.step(layout, false, 0), None);
            }
        }
        for layout in &short {
            steps.step(layout, false, 0);
            assert!(steps.step(layout, false, 0).is_some(), "{layout:?}");
        }
    }

    #[test]
    fn buffers_that_move_take_their_recordings_along() {
        let mut steps = Counting::new(true);
        let (one, four, long) = (layout(&[1], 1), layout(&[4], 4), layout(&[300], 300));
        for layout in [&one, &four, &one, &four] {
            steps.step(layout, false, 0);
        }
        assert_eq!(steps.recorded, 2);
        // The step that makes them move is not of a shape that is recorded.
        assert_eq!(steps.step(&long, false, 1), None);
        assert_eq!(steps.step(&one, false, 1), None);
        assert_eq!(steps.step(&four, false, 1), None);
        assert_eq!(steps.step(&one, false, 1), Some(2));
        assert_eq!(steps.step(&four, false, 1), Some(3));
        assert_eq!(steps.step(&one, false, 1), Some(2));
    }

    #[test]
    fn what_was_not_used_longest_is_forgotten() {
        let mut steps = Counting::new(true);
        for rows in 1..=MANY_ROWS {
            for _ in 0..2 {
                steps.step(&layout(&vec![1; rows], 1), false, 0);
            }
        }
        assert_eq!(steps.step(&layout(&[1], 1), false, 0), Some(0));
        // One more shape than are remembered: two rows are the oldest now.
        assert_eq!(steps.step(&layout(&[2], 2), false, 0), None);
        assert_eq!(steps.graphs.shapes.len(), MOST);
        assert_eq!(steps.step(&layout(&[1], 1), false, 0), Some(0));
        assert_eq!(steps.step(&layout(&[1, 1], 1), false, 0), None);
    }

    #[test]
    fn nothing_is_recorded_where_nothing_can_be() {
        let mut steps = Counting::new(false);
        for _ in 0..3 {
            assert_eq!(steps.step(&layout(&[1], 1), false, 0), None);
        }
        assert!(steps.graphs.shapes.is_empty());
    }

    #[test]
    fn a_recording_that_failed_is_tried_again() {
        let mut graphs = Graphs::<usize>::new(true);
        let one = layout(&[1], 1);
        assert_eq!(graphs.plan(&one, false, 0), Plan::Launch);
        assert_eq!(graphs.plan(&one, false, 0), Plan::Record);
        assert_eq!(graphs.plan(&one, false, 0), Plan::Record);
        assert_eq!(graphs.keep(5), Some(&5));
        assert_eq!(graphs.plan(&one, false, 0), Plan::Replay(&5));
    }
}
