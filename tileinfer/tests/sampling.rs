//! The sampling module from outside: against reference distributions computed in float64, and by counting
//! what it draws.

use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;
use tileinfer::sampling::{
    Distribution, Logprobs, SampleRow, SamplingParams, Scratch, Stream, TokenCounts, TokenMask,
    accept_chain, accept_draft, distribution, draw, residual, sample, sample_with_distribution,
    verify,
};

const TOLERANCE: f64 = 1e-6;

fn golden(name: &str) -> Value {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/sampling");
    serde_json::from_str(&std::fs::read_to_string(dir.join(name)).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_u64().unwrap() as u32)
        .collect()
}

fn logits(value: &Value) -> Vec<f32> {
    let values = value.as_array().unwrap().iter();
    values
        .map(|x| x.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32))
        .collect()
}

fn warm() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    }
}

fn params(value: &Value) -> SamplingParams {
    let mut params = warm();
    for (name, value) in value.as_object().unwrap() {
        let number = || value.as_f64().unwrap() as f32;
        match name.as_str() {
            "temperature" => params.temperature = number(),
            "top_k" => params.top_k = value.as_u64().unwrap() as u32,
            "top_p" => params.top_p = number(),
            "min_p" => params.min_p = number(),
            "repetition_penalty" => params.repetition_penalty = number(),
            "presence_penalty" => params.presence_penalty = number(),
            "frequency_penalty" => params.frequency_penalty = number(),
            "logit_bias" => {
                let entries = value.as_object().unwrap().iter();
                params.logit_bias = entries
                    .map(|(id, bias)| (id.parse().unwrap(), bias.as_f64().unwrap() as f32))
                    .collect();
            }
            other => panic!("unknown parameter {other}"),
        }
    }
    params.validate().unwrap();
    params
}

/// A distribution of a case, given as the probabilities of all tokens.
fn dense(probs: &[f64]) -> Distribution {
    let (ids, probs) = (0..)
        .zip(probs)
        .filter(|(_, p)| **p > 0.0)
        .map(|(id, p)| (id, *p as f32))
        .unzip();
    Distribution { ids, probs }
}

fn assert_close(got: &Distribution, expected: &[f64], name: &str) {
    assert!(
        got.ids.iter().all(|&id| (id as usize) < expected.len()),
        "{name}"
    );
    for (id, &expected) in (0..).zip(expected) {
        let prob = f64::from(got.prob(id));
        assert!(
            (prob - expected).abs() <= TOLERANCE,
            "{name}: token {id} has {prob}, not {expected}"
        );
        assert_eq!(
            prob > 1e-30,
            expected > 1e-30,
            "{name}: token {id} has {prob}, not {expected}"
        );
    }
}

#[test]
fn filters_give_the_reference_distributions() {
    let golden = golden("filters.json");
    let mut scratch = Scratch::default();
    let (mut transformers, mut either) = (0, 0);
    for case in golden["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let params = params(&case["params"]);
        let logits = logits(&case["logits"]);
        let output = ids(&case["output_ids"]);
        let expected = if case["transformers"].is_null() {
            assert_eq!(case["differ"], false, "{name}");
            either += 1;
            &case["vllm"]
        } else {
            transformers += 1;
            &case["transformers"]
        };
        let mut probs = vec![0.0; logits.len()];
        for (id, prob) in ids(&expected["ids"])
            .into_iter()
            .zip(floats(&expected["probs"]))
        {
            probs[id as usize] = prob;
        }
        // However the output is split into what was committed and drafts not yet verified.
        for committed in [0, output.len() / 2, output.len()] {
            let mut counts = TokenCounts::new(&ids(&case["prompt_ids"]));
            output[..committed]
                .iter()
                .for_each(|&id| counts.push_output(id));
            let mut row = SampleRow::new(&params, 1, 2);
            row.counts = Some(&counts);
            row.drafts = &output[committed..];
            let got = distribution(&row, &logits, &mut scratch).unwrap();
            if case["tie"] == true && !params.is_greedy() {
                let mut expected: Vec<f64> = probs.iter().copied().filter(|&p| p > 0.0).collect();
                expected.sort_by(|a, b| b.total_cmp(a));
                assert_eq!(got.ids.len(), expected.len(), "{name}");
                for (got, expected) in got.probs.iter().zip(expected) {
                    assert!((f64::from(*got) - expected).abs() <= TOLERANCE, "{name}");
                }
            } else {
                assert_close(&got, &probs, name);
            }
            let token = sample(&row, &logits, &mut scratch).unwrap();
            assert!(got.prob(token) > 0.0, "{name}");
        }
    }
    assert_eq!((transformers, either), (72, 13));
}

#[test]
fn ties_at_the_boundaries() {
    let mut scratch = Scratch::default();
    let mut ids = |logits: &[f32], top_k, top_p| {
        let params = SamplingParams {
            top_k,
            top_p,
            ..warm()
        };
        distribution(&SampleRow::new(&params, 0, 0), logits, &mut scratch)
            .unwrap()
            .ids
    };
    let logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0, -1.0, 2.0];
    assert_eq!(ids(&logits, 3, 1.0), [1, 2, 3, 4, 7]);
    assert_eq!(ids(&logits, 0, 0.6), [1, 2, 3]);
    assert_eq!(ids(&[0.0; 8], 0, 0.45), [0, 1, 2, 3]);
    assert_eq!(ids(&[0.0, -0.0, 0.0, -1.0], 2, 1.0), [0, 1, 2]);
    assert_eq!(ids(&[-0.0, 0.0, -1.0], 0, 1e-6), [0]);
}

#[test]
fn drafts_are_accepted_as_the_reference_does() {
    let golden = golden("speculative.json");
    let mut scratch = Scratch::default();
    for case in golden["triples"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let p = dense(&floats(&case["p"]));
        let q = dense(&floats(&case["q"]));
        if let Some(made_from) = case.get("made_from") {
            let params = params(&made_from["params"]);
            for (side, of) in [("target_logits", "p"), ("draft_logits", "q")] {
                let row = SampleRow::new(&params, 0, 0);
                let got = distribution(&row, &logits(&made_from[side]), &mut scratch).unwrap();
                assert_close(&got, &floats(&case[of]), name);
            }
        }
        let got = residual(&p, &q);
        let total: f64 = got.probs.iter().map(|&p| f64::from(p)).sum();
        assert!((total - 1.0).abs() < TOLERANCE, "{name}: {total}");
        if case.get("fragile").is_some() {
            continue;
        }
        assert_close(&got, &floats(&case["residual"]), name);
        let draft = case["draft"].as_u64().unwrap() as u32;
        let accept = case["accept"].as_f64().unwrap() as f32;
        let largest_uniform = 1.0 - f32::EPSILON / 2.0;
        let just_below = (accept * (1.0 - 1e-6)).min(largest_uniform);
        assert_eq!(
            accept_draft(&p, &q, draft, just_below),
            accept > 0.0,
            "{name}"
        );
        let just_above = accept * (1.0 + 1e-6) + 1e-30;
        if just_above < 1.0 {
            assert!(!accept_draft(&p, &q, draft, just_above), "{name}");
        }
    }
}

#[test]
fn chains_end_where_the_reference_ends_them() {
    let golden = golden("speculative.json");
    for case in golden["chains"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let rows = |side: &str| -> Vec<Distribution> {
            case[side]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| dense(&floats(row)))
                .collect()
        };
        let uniforms: Vec<f32> = floats(&case["uniforms"])
            .iter()
            .map(|&u| u as f32)
            .collect();
        let verdict =
            accept_chain(&rows("p"), &rows("q"), &ids(&case["drafts"]), &uniforms).unwrap();
        assert_eq!(
            verdict.accepted as u64,
            case["accepted"].as_u64().unwrap(),
            "{name}"
        );
        assert_close(&verdict.next, &floats(&case["next"]), name);
    }
}

type Counts = HashMap<Vec<u32>, u32>;

/// Asserts that Pearson's chi-square of the counts is within five deviations of its mean (and a little for
/// the skew of few degrees of freedom). Outcomes expected less than five times are counted as one.
fn assert_law(counts: &Counts, expected: &[(Vec<u32>, f64)], n: u32, name: &str) {
    let n = f64::from(n);
    let count = |outcome| f64::from(counts.get(outcome).copied().unwrap_or(0));
    let known: f64 = expected.iter().map(|(outcome, _)| count(outcome)).sum();
    assert_eq!(known, n, "{name}: an outcome that cannot be: {counts:?}");
    let (mut chi, mut cells) = (0.0, 0.0);
    let mut rare = (0.0, 0.0);
    for (outcome, prob) in expected {
        if prob * n < 5.0 {
            rare = (rare.0 + count(outcome), rare.1 + prob * n);
        } else {
            chi += (count(outcome) - prob * n).powi(2) / (prob * n);
            cells += 1.0;
        }
    }
    if rare.1 >= 5.0 {
        chi += (rare.0 - rare.1).powi(2) / rare.1;
        cells += 1.0;
    }
    let freedom: f64 = cells - 1.0;
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt() + 10.0;
    assert!(
        chi < limit,
        "{name}: chi-square {chi} with {freedom} degrees of freedom"
    );
}

#[test]
fn whole_rounds_follow_the_law() {
    let golden = golden("speculative.json");
    for case in golden["laws"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let by_prefix = |side: &str| -> HashMap<Vec<u32>, Distribution> {
            let rows = case[side].as_array().unwrap().iter();
            rows.map(|row| (ids(&row["after"]), dense(&floats(&row["probs"]))))
                .collect()
        };
        let (p, q) = (by_prefix("p"), by_prefix("q"));
        let k = case["drafts"].as_u64().unwrap() as usize;
        let rounds = 60_000_u32;
        let mut emitted = Counts::new();
        let mut accepted = vec![0_u32; k + 1];
        for round in 0..rounds {
            // Half of the rounds are told apart by the seed, half by the position.
            let (seed, position) = if round % 2 == 0 {
                (u64::from(round), 17)
            } else {
                (5, 10 * u64::from(round))
            };
            let mut drafts = Vec::new();
            let (mut p_rows, mut q_rows) = (vec![p[&drafts].clone()], Vec::new());
            for i in 0..k {
                let from = &q[&drafts];
                drafts.push(draw(from, seed, position + i as u64, Stream::Draft).unwrap());
                q_rows.push(from.clone());
                p_rows.push(p[&drafts].clone());
            }
            let (stay, token) = verify(&p_rows, &q_rows, &drafts, seed, position).unwrap();
            accepted[stay] += 1;
            drafts.truncate(stay);
            drafts.push(token);
            *emitted.entry(drafts).or_default() += 1;
        }
        let expected: Vec<(Vec<u32>, f64)> = case["emitted"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| (ids(&row["tokens"]), row["prob"].as_f64().unwrap()))
            .collect();
        assert_law(&emitted, &expected, rounds, name);
        let n = f64::from(rounds);
        for (count, prob) in accepted.iter().zip(floats(&case["accepted"])) {
            let off = (f64::from(*count) / n - prob).abs();
            assert!(
                off <= 5.0 * (prob * (1.0 - prob) / n).sqrt() + 1e-9,
                "{name}: {accepted:?}"
            );
        }
        let tokens: f64 = emitted
            .iter()
            .map(|(t, c)| t.len() as f64 * f64::from(*c))
            .sum();
        let mean = case["tokens_per_round"].as_f64().unwrap();
        assert!(
            (tokens / n - mean).abs() < 5.0 * k as f64 / n.sqrt(),
            "{name}"
        );
    }
}

/// A row of logits as models make them: most far down, a few in the lead, cut to bf16.
fn model_like_logits(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 16_777_216.0
    };
    (0..n)
        .map(|_| {
            let bell: f32 = (0..6).map(|_| uniform()).sum::<f32>() - 3.0;
            let lead = if uniform() < 0.002 {
                8.0 * uniform()
            } else {
                0.0
            };
            f32::from_bits((4.0 * bell + lead).to_bits() & 0xffff_0000)
        })
        .collect()
}

/// Draws from the filtered logits, over positions and over seeds, against the distribution.
#[test]
fn draws_follow_the_distribution() {
    let mut scratch = Scratch::default();
    let logits = model_like_logits(3000, 4);
    for (name, n, params) in [
        (
            "no filter",
            6_000,
            SamplingParams {
                temperature: 0.8,
                ..warm()
            },
        ),
        (
            "top_k, top_p",
            40_000,
            SamplingParams {
                top_k: 20,
                top_p: 0.95,
                ..warm()
            },
        ),
        (
            "top_p, min_p",
            20_000,
            SamplingParams {
                temperature: 2.0,
                top_p: 0.9,
                min_p: 0.02,
                ..warm()
            },
        ),
    ] {
        let mut row = SampleRow::new(&params, 9, 0);
        let from = distribution(&row, &logits, &mut scratch).unwrap();
        let expected: Vec<(Vec<u32>, f64)> = from
            .ids
            .iter()
            .zip(&from.probs)
            .map(|(&id, &p)| (vec![id], f64::from(p)))
            .collect();
        for along_seed in [false, true] {
            let (mut sampled, mut drawn) = (Counts::new(), Counts::new());
            for i in 0..n {
                let i = u64::from(i);
                (row.seed, row.position) = if along_seed { (i, 3) } else { (3, i) };
                *sampled
                    .entry(vec![sample(&row, &logits, &mut scratch).unwrap()])
                    .or_default() += 1;
                let token = draw(&from, row.seed, row.position, Stream::Draft).unwrap();
                *drawn.entry(vec![token]).or_default() += 1;
            }
            assert_law(&sampled, &expected, n, name);
            assert_law(&drawn, &expected, n, name);
        }
    }
}

/// What a row gives depends neither on what the scratch was used for before, nor on tokens that are
/// masked, padding or too unlikely, nor on whether the distribution was asked for.
#[test]
fn a_token_is_a_function_of_its_row() {
    let logits = model_like_logits(5000, 11);
    let mut padded = logits.clone();
    padded.extend([50.0, f32::NAN, f32::INFINITY]);
    let mut shared = Scratch::default();
    let mut all = TokenMask::none(5000);
    (0..5000).for_each(|id| all.allow(id));
    for params in [
        SamplingParams::default(),
        SamplingParams {
            temperature: 0.7,
            ..warm()
        },
        SamplingParams {
            temperature: 1.3,
            top_k: 50,
            ..warm()
        },
        SamplingParams {
            temperature: 1.3,
            top_p: 0.9,
            ..warm()
        },
        SamplingParams {
            temperature: 1.3,
            top_p: 0.99,
            min_p: 0.001,
            ..warm()
        },
    ] {
        for position in 0..20 {
            let mut row = SampleRow::new(&params, 77, position);
            let token = sample(&row, &logits, &mut Scratch::default()).unwrap();
            assert_eq!(sample(&row, &logits, &mut shared).unwrap(), token);
            let from = distribution(&row, &logits, &mut Scratch::default()).unwrap();
            let both = sample_with_distribution(&row, &logits, &mut shared).unwrap();
            assert_eq!(both, (token, from.clone()));
            row.vocab_limit = 5000;
            assert_eq!(
                sample_with_distribution(&row, &padded, &mut shared).unwrap(),
                both
            );
            row.mask = Some(&all);
            assert_eq!(
                sample_with_distribution(&row, &padded, &mut shared).unwrap(),
                both
            );
            // Alone among those that the token competed with, it is the same token.
            let without_filters = SamplingParams {
                temperature: params.temperature,
                ..warm()
            };
            let mut only = TokenMask::none(5000);
            from.ids.iter().for_each(|&id| only.allow(id));
            row.mask = Some(&only);
            row.params = &without_filters;
            assert_eq!(sample(&row, &padded, &mut shared).unwrap(), token);
        }
    }
}

/// A sequence of draws, pinned: these tokens must not change from build to build.
#[test]
fn draws_are_pinned() {
    let logits = model_like_logits(1000, 1);
    let params = SamplingParams {
        temperature: 1.5,
        top_k: 40,
        top_p: 0.95,
        ..warm()
    };
    let draw = |i| {
        sample(
            &SampleRow::new(&params, 42, i),
            &logits,
            &mut Scratch::default(),
        )
        .unwrap()
    };
    let tokens: Vec<u32> = (0..12).map(draw).collect();
    assert_eq!(
        tokens,
        [987, 455, 784, 179, 156, 179, 222, 156, 748, 282, 504, 434]
    );
}

#[test]
fn errors_say_what_is_wrong() {
    let mut scratch = Scratch::default();
    let nothing = TokenMask::none(4);
    for params in [&SamplingParams::default(), &warm()] {
        let mut row = SampleRow::new(params, 0, 0);
        let nan = sample(&row, &[0.0, 1.0, f32::NAN], &mut scratch).unwrap_err();
        assert!(nan.to_string().contains("token 2 is NaN"), "{nan}");
        row.mask = Some(&nothing);
        let masked = sample(&row, &[0.0, 1.0, 2.0, 3.0], &mut scratch).unwrap_err();
        assert!(masked.to_string().contains("may come next"), "{masked}");
        let nan = sample(&row, &[0.0, f32::NAN, 2.0, 3.0], &mut scratch).unwrap_err();
        assert!(nan.to_string().contains("token 1 is NaN"), "{nan}");
        assert!(sample(&SampleRow::new(params, 0, 0), &[], &mut scratch).is_err());
    }
    let biased = SamplingParams {
        logit_bias: vec![(3, 1.0)],
        ..SamplingParams::default()
    };
    let error = sample(&SampleRow::new(&biased, 0, 0), &[0.0; 3], &mut scratch).unwrap_err();
    assert!(error.to_string().contains("token 3"), "{error}");
    let uncounted = SamplingParams {
        presence_penalty: 1.0,
        ..SamplingParams::default()
    };
    let error = sample(&SampleRow::new(&uncounted, 0, 0), &[0.0; 3], &mut scratch).unwrap_err();
    assert!(error.to_string().contains("counts"), "{error}");
    let invalid = SamplingParams {
        temperature: f32::NAN,
        ..SamplingParams::default()
    };
    assert!(sample(&SampleRow::new(&invalid, 0, 0), &[0.0; 3], &mut scratch).is_err());
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -30.0_f32..30.0,
        3 => (-8_i32..8).prop_map(|x| x as f32 * 0.5),
        1 => Just(f32::NEG_INFINITY),
        1 => prop_oneof![Just(f32::MAX), Just(f32::MIN), Just(0.0), Just(-0.0), Just(1e-40)],
    ]
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(0.0_f32), Just(1.0), 1e-5_f32..0.1, 0.1_f32..5.0];
    let top_k = prop_oneof![Just(0_u32), 1_u32..5, 1_u32..400];
    let top_p = prop_oneof![Just(1.0_f32), 1e-6_f32..1.0];
    let min_p = prop_oneof![Just(0.0_f32), 0.0_f32..=1.0];
    (temperature, top_k, top_p, min_p).prop_map(|(temperature, top_k, top_p, min_p)| {
        SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            ..SamplingParams::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_row_gives_a_distribution(
        logits in prop::collection::vec(any_logit(), 1..300),
        params in any_params(),
        seed: u64,
        position: u64,
    ) {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assume!(best > f32::NEG_INFINITY);
        let argmax = logits.iter().position(|&x| x == best).unwrap() as u32;
        let mut scratch = Scratch::default();
        let row = SampleRow::new(&params, seed, position);
        let (token, got) = sample_with_distribution(&row, &logits, &mut scratch).unwrap();
        prop_assert_eq!(sample(&row, &logits, &mut scratch).unwrap(), token);
        prop_assert!(got.prob(token) > 0.0);
        prop_assert_eq!(got.ids[0], argmax);
        let total: f64 = got.probs.iter().map(|&p| f64::from(p)).sum();
        prop_assert!((total - 1.0).abs() < 1e-6, "{}", total);
        for (pair, probs) in got.ids.windows(2).zip(got.probs.windows(2)) {
            let (a, b) = (logits[pair[0] as usize], logits[pair[1] as usize]);
            prop_assert!(a > b || (a == b && pair[0] < pair[1]));
            prop_assert!(probs[0] >= probs[1]);
        }
        if params.is_greedy() {
            prop_assert_eq!(got, Distribution::one_hot(argmax));
            return Ok(());
        }
        if params.top_k > 0 {
            let least = logits[*got.ids.last().unwrap() as usize];
            let larger = logits.iter().filter(|&&x| x > least).count();
            prop_assert!(larger < params.top_k as usize);
        }
        if params.min_p > 0.0 {
            prop_assert!(got.probs.last().unwrap() / got.probs[0] >= params.min_p * 0.999_999);
        }
    }

    /// A permutation of the ids permutes the distribution, as long as no two logits are equal.
    #[test]
    fn ids_are_only_names(
        logits in prop::collection::btree_set(-4000_i32..4000, 2..200),
        params in any_params(),
        shift in 1_usize..200,
    ) {
        let logits: Vec<f32> = logits.into_iter().map(|x| x as f32 / 256.0).collect();
        let mut turned = logits.clone();
        turned.rotate_left(shift % logits.len());
        let n = logits.len() as u32;
        let mut scratch = Scratch::default();
        let row = SampleRow::new(&params, 0, 0);
        let straight = distribution(&row, &logits, &mut scratch).unwrap();
        let turned = distribution(&row, &turned, &mut scratch).unwrap();
        let back: Vec<u32> = turned.ids.iter().map(|id| (id + shift as u32) % n).collect();
        // Sums by id round differently after a turn, so top-p may decide otherwise at its very edge.
        let common = back.len().min(straight.ids.len());
        prop_assert!(back.len().max(straight.ids.len()) - common <= 1);
        prop_assert_eq!(&back[..common], &straight.ids[..common]);
    }

    #[test]
    fn log_probabilities_sum_to_one(logits in prop::collection::vec(any_logit(), 1..300), n in 1_usize..300) {
        prop_assume!(logits.iter().any(|&x| x > f32::NEG_INFINITY));
        let row = Logprobs::new(&logits, usize::MAX).unwrap();
        let all = row.top(logits.len());
        let total: f64 = all.iter().map(|t| f64::from(t.logprob).exp()).sum();
        prop_assert!((total - 1.0).abs() < 1e-5, "{}", total);
        prop_assert_eq!(&row.top(n)[..], &all[..n.min(all.len())]);
    }
}
