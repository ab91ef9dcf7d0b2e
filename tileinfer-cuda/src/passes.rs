//! Which kernels attend to the rows of a step: keys split over blocks where there are few queries, else whole, and in
//! steps of tokens and prompts some of both. Which way changes the time, not the results.

use std::ops::Range;

use crate::ops::AttentionTile;

/// The spans of a step, as attention sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spans<'a> {
    /// First row of each span, then the number of rows.
    pub(crate) first_rows: &'a [usize],
    /// Query heads of a kv head.
    pub(crate) together: usize,
    /// Values a head.
    pub(crate) head_dim: usize,
    /// Whether the step is being recorded: its rows may be spread over its spans in another way when it is replayed.
    pub(crate) recording: bool,
}

/// One launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pass {
    /// Which of [`crate::ops::attention_tiles`], and of the lists of groups made for them.
    pub(crate) list: usize,
    /// Which groups of that list.
    pub(crate) groups: Range<usize>,
    /// The step's rows up to the last one of these groups.
    pub(crate) rows: usize,
    /// Keys whole, not split over blocks.
    pub(crate) whole: bool,
}

impl Spans<'_> {
    /// The launches of a step with so many groups in each list. `fills`: the groups of the last list keep the device
    /// busy; `splits`: there is room for what split attention leaves of so many rows.
    pub(crate) fn passes(
        self,
        tiles: &[AttentionTile; 3],
        counts: [usize; 3],
        fills: bool,
        splits: &dyn Fn(usize) -> bool,
    ) -> Vec<Pass> {
        let all = self.first_rows.last().copied().unwrap_or(0);
        let every = |list: usize, whole| Pass {
            list,
            groups: 0..counts[list],
            rows: all,
            whole,
        };
        // Heads of 16 in tiles of 16 queries are fewer products than a block has warps, so that warps share
        // a sum: other bits than in a wider tile. No real model has such heads.
        let is_short =
            |rows: &usize| rows * self.together <= tiles[0].queries && self.head_dim > 16;
        let spans = || self.first_rows.windows(2).map(|rows| rows[1] - rows[0]);
        if spans().all(|rows| is_short(&rows)) {
            return vec![every(0, false)];
        }
        if !fills && splits(all) {
            return vec![every(1, false)];
        }
        // Tokens that stand before the first prompt: the keys of each are split, as they are without the prompt.
        let short: Vec<usize> = spans().take_while(is_short).collect();
        let rows = short.iter().sum();
        if self.recording || short.is_empty() || !splits(rows) {
            return vec![every(2, true)];
        }
        let runs = |list: usize| {
            let most = (tiles[list].queries / self.together).max(1);
            short.iter().map(|rows| rows.div_ceil(most)).sum::<usize>()
        };
        let tokens = Pass {
            list: 0,
            groups: 0..runs(0),
            rows,
            whole: false,
        };
        let rest = Pass {
            groups: runs(2)..counts[2],
            ..every(2, true)
        };
        vec![tokens, rest]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Type;
    use crate::ops::{HeadGroup, attention_tiles};

    const TOGETHER: usize = 4;

    /// The passes of a step of spans of so many rows, and the groups in each list.
    fn passes(
        spans: &[usize],
        head_dim: usize,
        recording: bool,
        fills: bool,
        room: usize,
    ) -> (Vec<Pass>, [usize; 3]) {
        let tiles = attention_tiles(
            Type::Bf16,
            HeadGroup {
                queries: TOGETHER,
                head_dim,
                int8: false,
            },
        );
        let counts = tiles.map(|tile| {
            let most = (tile.queries / TOGETHER).max(1);
            spans.iter().map(|rows| rows.div_ceil(most)).sum()
        });
        let mut first_rows = vec![0];
        first_rows.extend(spans.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        }));
        let spans = Spans {
            first_rows: &first_rows,
            together: TOGETHER,
            head_dim,
            recording,
        };
        let passes = spans.passes(&tiles, counts, fills, &|rows| rows <= room);
        (passes, counts)
    }

    #[test]
    fn tokens_before_a_prompt_are_a_pass_of_their_own() {
        let (passes, counts) = passes(&[1, 1, 3, 200, 1], 128, false, true, 1000);
        let [tokens, rest] = &passes[..] else {
            panic!("{passes:?}");
        };
        assert_eq!((tokens.list, tokens.whole, tokens.rows), (0, false, 5));
        assert_eq!((rest.list, rest.whole, rest.rows), (2, true, 206));
        // Tiles of 16 queries hold four rows, of 64 sixteen.
        assert_eq!(
            (tokens.groups.clone(), rest.groups.clone()),
            (0..3, 3..counts[2])
        );
        assert_eq!(counts[2], 3 + 13 + 1);
    }

    #[test]
    fn other_steps_are_one_pass_over_all_groups() {
        for (spans, head_dim, recording, fills, room, list, whole) in [
            (&[1, 4, 2][..], 128, false, true, 0, 0, false),
            (&[1, 4, 2], 16, false, false, 99, 1, false),
            (&[1, 40], 128, false, false, 99, 1, false),
            (&[1, 40], 128, true, true, 99, 2, true),
            (&[40, 1, 1], 128, false, true, 99, 2, true),
            (&[1, 40], 128, false, true, 0, 2, true),
            (&[1, 40], 16, false, true, 99, 2, true),
        ] {
            let (passes, counts) = passes(spans, head_dim, recording, fills, room);
            let expected = Pass {
                list,
                groups: 0..counts[list],
                rows: spans.iter().sum(),
                whole,
            };
            assert_eq!(passes, [expected], "{spans:?} of {head_dim}");
        }
    }
}
