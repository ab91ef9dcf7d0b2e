//! What the server tells Prometheus: under vLLM's names, `tileinfer:` before them where vLLM has `vllm:`, so that
//! dashboards and alerts made for one need only another prefix. Counts come from the engine when they are asked
//! for; times are observed as events pass.

use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tileinfer::engine::{Ended, Event, MetricsSnapshot};

/// Times of requests.
#[derive(Debug)]
pub(crate) struct ServerMetrics {
    queue: Histogram,
    to_first: Histogram,
    between: Histogram,
    whole: Histogram,
    prefill: Histogram,
    decode: Histogram,
    running: Histogram,
    per_token: Histogram,
    prompt_tokens: Histogram,
    generated_tokens: Histogram,
}

const SECONDS: [f64; 16] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
const TOKENS: [f64; 12] = [
    1.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 3.2e4, 1.28e5,
];

impl Default for ServerMetrics {
    fn default() -> Self {
        let seconds = || Histogram::new(SECONDS);
        let tokens = || Histogram::new(TOKENS);
        ServerMetrics {
            queue: seconds(),
            to_first: seconds(),
            between: seconds(),
            whole: seconds(),
            prefill: seconds(),
            decode: seconds(),
            running: seconds(),
            per_token: seconds(),
            prompt_tokens: tokens(),
            generated_tokens: tokens(),
        }
    }
}

/// When a request arrived, and when it last had a token.
#[derive(Debug)]
pub(crate) struct Clock {
    arrived: Instant,
    last: Option<Instant>,
}

impl Clock {
    /// It arrives now.
    pub(crate) fn start() -> Self {
        Clock {
            arrived: Instant::now(),
            last: None,
        }
    }
}

impl ServerMetrics {
    /// Takes note of an event of a request.
    pub(crate) fn observe(&self, event: &Event, clock: &mut Clock) {
        match event {
            Event::Tokens { .. } => {
                let now = Instant::now();
                match clock.last.replace(now) {
                    Some(before) => self.between.observe((now - before).as_secs_f64()),
                    None => self.to_first.observe((now - clock.arrived).as_secs_f64()),
                }
            }
            Event::End(Ended::Finished(finished)) => {
                let seconds = |time: Duration| time.as_secs_f64();
                let times = &finished.times;
                self.queue.observe(seconds(times.to_start));
                self.whole.observe(seconds(times.to_end));
                self.running
                    .observe(seconds(times.to_end.saturating_sub(times.to_start)));
                self.prompt_tokens.observe(finished.prompt_tokens as f64);
                self.generated_tokens
                    .observe(finished.completion_tokens as f64);
                if finished.completion_tokens == 0 {
                    return;
                }
                let decode = seconds(times.to_end.saturating_sub(times.to_first));
                self.prefill
                    .observe(seconds(times.to_first.saturating_sub(times.to_start)));
                self.decode.observe(decode);
                if finished.completion_tokens > 1 {
                    self.per_token
                        .observe(decode / (finished.completion_tokens - 1) as f64);
                }
            }
            _ => {}
        }
    }

    /// All of it in the text format of OpenMetrics.
    pub(crate) fn render(
        &self,
        model: &str,
        engine: MetricsSnapshot,
    ) -> Result<String, std::fmt::Error> {
        let label = ("model_name".into(), model.to_owned().into());
        let mut registry = Registry::with_labels([label].into_iter());
        let mut histogram = |name: &str, help: &str, histogram: &Histogram| {
            registry.register(format!("tileinfer:{name}"), help, histogram.clone());
        };
        histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token",
            &self.to_first,
        );
        histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a request",
            &self.between,
        );
        histogram(
            "e2e_request_latency_seconds",
            "From arrival to the end",
            &self.whole,
        );
        histogram(
            "request_queue_time_seconds",
            "From arrival to the start",
            &self.queue,
        );
        histogram(
            "request_prefill_time_seconds",
            "From the start to the first token",
            &self.prefill,
        );
        histogram(
            "request_decode_time_seconds",
            "From the first token to the end",
            &self.decode,
        );
        histogram(
            "request_inference_time_seconds",
            "From the start to the end",
            &self.running,
        );
        histogram(
            "request_time_per_output_token_seconds",
            "Between two tokens, on the average of a request",
            &self.per_token,
        );
        histogram(
            "request_prompt_tokens",
            "Tokens of a prompt",
            &self.prompt_tokens,
        );
        histogram(
            "request_generation_tokens",
            "Tokens of an answer",
            &self.generated_tokens,
        );
        registry.register_collector(Box::new(EngineCounts(engine)));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// The engine's own counts at one moment.
#[derive(Debug)]
struct EngineCounts(MetricsSnapshot);

impl Collector for EngineCounts {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let engine = &self.0;
        let mut level = |name: &str, help: &str, value: f64| {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(
                &format!("tileinfer:{name}"),
                help,
                None,
                gauge.metric_type(),
            )?)
        };
        level(
            "num_requests_running",
            "Requests that run",
            engine.running as f64,
        )?;
        level(
            "num_requests_waiting",
            "Requests that wait",
            engine.waiting as f64,
        )?;
        let used = engine.pages_in_use as f64 / engine.pages.max(1) as f64;
        level(
            "kv_cache_usage_perc",
            "Share of the KV cache's pages that requests hold; 1 is all",
            used,
        )?;
        let cached = engine.pages_cached as f64 / engine.pages.max(1) as f64;
        level(
            "prefix_cache_usage_perc",
            "Share of the pages that only the prefix cache holds; 1 is all",
            cached,
        )?;
        let mut total = |name: &str, help: &str, value: u64| {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(
                &format!("tileinfer:{name}"),
                help,
                None,
                counter.metric_type(),
            )?)
        };
        total("prompt_tokens", "Tokens of prompts", engine.prompt_tokens)?;
        total(
            "generation_tokens",
            "Tokens generated",
            engine.generated_tokens,
        )?;
        total(
            "spec_decode_num_draft_tokens",
            "Drafts verified",
            engine.drafted_tokens,
        )?;
        total(
            "spec_decode_num_accepted_tokens",
            "Drafts that became part of an answer",
            engine.accepted_tokens,
        )?;
        total(
            "prefix_cache_queries",
            "Tokens of prompts looked for in the prefix cache",
            engine.prompt_tokens,
        )?;
        total(
            "prefix_cache_hits",
            "Tokens of prompts found there",
            engine.cached_tokens,
        )?;
        total(
            "num_preemptions",
            "Requests that gave up their pages for a while",
            engine.preemptions,
        )?;
        total("engine_steps", "Steps launched", engine.steps)?;
        total(
            "pages_lost",
            "Times that an idle engine could not account for a page",
            engine.pages_lost,
        )?;
        let name = "tileinfer:request_success";
        let counter = ConstCounter::new(0_u64);
        let mut by_reason = encoder.encode_descriptor(
            name,
            "Requests that ended, by how",
            None,
            counter.metric_type(),
        )?;
        for (reason, count) in [
            ("stop", engine.finished_stop),
            ("length", engine.finished_length),
            ("abort", engine.cancelled),
            ("error", engine.failed),
        ] {
            let label = [("finished_reason", reason)];
            ConstCounter::new(count).encode(by_reason.encode_family(&label)?)?;
        }
        Ok(())
    }
}
