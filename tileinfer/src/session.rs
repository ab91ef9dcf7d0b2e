//! A conversation: one timeline of tokens in the cache. Every turn renders the whole conversation again and
//! runs only what differs from what is cached.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Result;
use crate::chat::{ChatMessage, ChatRequest, ChatTemplate};
use crate::engine::{FinishReason, Generation, GenerationOptions, StepLoop};
use crate::generate::{GenerationStats, answer};
use crate::kv::Sequence;
use crate::sampling::SamplingParams;
use crate::tokenizer::{StopStrings, Tokenizer};

/// How a session answers. May be changed between turns.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// From logits to the distribution that tokens are drawn from.
    pub sampling: SamplingParams,
    /// Key of the noise.
    pub seed: u64,
    /// Tokens that end an answer.
    pub stop_ids: Vec<u32>,
    /// Texts that end an answer; none of them is part of it.
    pub stop_strings: Vec<String>,
    /// Tokens of an answer at most; without a number, to the end of the context.
    pub max_tokens: Option<usize>,
    /// Whether the model may reason first; without a word, as its template says.
    pub thinking: Option<bool>,
}

/// A conversation with a model.
pub struct Session {
    steps: StepLoop,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    /// How it answers.
    pub options: SessionOptions,
    messages: Vec<ChatMessage>,
    sequence: Option<Sequence>,
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// Whether it ended because the context is full.
    pub context_full: bool,
    /// What the turn cost.
    pub stats: TurnStats,
}

/// Counts and times of one turn: [`GenerationStats::cached_tokens`] of the prompt were reused from the cache,
/// the rest was prefilled.
pub type TurnStats = GenerationStats;

impl Session {
    /// A session without messages. `steps` is its own: the cache holds this conversation alone.
    pub fn new(
        steps: StepLoop,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        options: SessionOptions,
    ) -> Self {
        Session {
            steps,
            tokenizer,
            template,
            options,
            messages: Vec::new(),
            sequence: None,
        }
    }

    /// The conversation so far.
    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    /// Replaces the conversation; what is cached of the new one is reused.
    pub fn set_messages(&mut self, messages: Vec<ChatMessage>) {
        self.messages = messages;
    }

    /// Sets the system message, or takes it away.
    pub fn set_system(&mut self, text: Option<String>) {
        self.messages.retain(|message| message.role != "system");
        if let Some(text) = text {
            self.messages.insert(0, ChatMessage::new("system", text));
        }
    }

    /// Clears the conversation, the system message included, and frees its pages.
    pub fn reset(&mut self) {
        self.messages.clear();
        self.sequence = None;
    }

    /// The decode loop, for its limits and counts.
    pub fn steps(&self) -> &StepLoop {
        &self.steps
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Continues a text as it is, outside the conversation, with what is cached of it. `on_progress` and `on_text`
    /// are those of [`reply`](Self::reply).
    pub fn continue_text(
        &mut self,
        text: &str,
        on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let prompt = self.tokenizer.encode_prompt(text)?;
        self.run(&prompt, on_progress, on_text)
    }

    /// Adds a user message and the model's answer to it. `on_progress` hears how much of the prompt has run,
    /// `on_text` gets the answer as it comes, and both may break off; what came until then is the answer. If
    /// nothing came, and on an error, the conversation is left as it was.
    pub fn reply(
        &mut self,
        text: &str,
        on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let before = self.messages.len();
        self.messages.push(ChatMessage::new("user", text));
        let result = self
            .prompt()
            .and_then(|prompt| self.run(&prompt, on_progress, on_text));
        match &result {
            Ok(reply) if reply.stats.completion_tokens > 0 => self
                .messages
                .push(ChatMessage::new("assistant", reply.text.clone())),
            _ => self.messages.truncate(before),
        }
        result
    }

    /// The conversation as the model reads it, up to where it answers.
    pub fn prompt(&self) -> Result<Vec<u32>> {
        let mut request = ChatRequest::answer(&self.messages);
        if let Some(thinking) = self.options.thinking {
            request
                .variables
                .insert("enable_thinking".to_owned(), thinking.into());
        }
        let text = self.template.render(&self.template.accommodate(request)?)?;
        self.tokenizer.encode(&text, false)
    }

    fn run(
        &mut self,
        prompt: &[u32],
        on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let options = GenerationOptions {
            sampling: Arc::new(self.options.sampling.clone()),
            seed: self.options.seed,
            max_tokens: self.options.max_tokens,
            stop_ids: self.options.stop_ids.clone().into(),
            vocabulary: self.tokenizer.vocab_size(),
            top_logprobs: None,
        };
        let stops = self.options.stop_strings.clone();
        // What is refused before it runs costs nothing that is cached.
        Generation::check(prompt, &options, self.steps.limits().max_length)?;
        StopStrings::new(stops.clone())?;
        let sequence = self
            .sequence
            .take()
            .unwrap_or_else(|| self.steps.new_sequence());
        let (steps, tokenizer) = (&mut self.steps, &self.tokenizer);
        let answer = answer(
            steps,
            tokenizer,
            sequence,
            prompt,
            options,
            &stops,
            on_progress,
            on_text,
        )?;
        let generated = answer.generated;
        self.sequence = Some(generated.sequence);
        Ok(Reply {
            text: answer.text,
            finish: generated.finish,
            context_full: generated.context_full,
            stats: generated.stats,
        })
    }
}
