//! Answers that follow a grammar: JSON schemas and calls of tools become masks of allowed tokens, through the
//! `llguidance` crate. It knows tokens and grammars; not requests, and not what the text means.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use tileinfer::engine::Constraint;
use tileinfer::sampling::TokenMask;
use tileinfer::tokenizer::Tokenizer;
use tileinfer::{Error, Result};

use crate::output::{Marks, ToolStyle};

/// A tokenizer's tokens, ready for grammars.
pub(crate) struct Grammars {
    factory: ParserFactory,
    tokenizer: Tokenizer,
    /// The token that stands for the end of a text in masks.
    end: u32,
}

/// What an answer has to be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// JSON that a schema describes.
    Json(Value),
    /// At least one call of one of these tools: names and schemas of their arguments.
    Calls {
        style: ToolStyle,
        tools: Vec<(String, Value)>,
        most: usize,
    },
}

/// JSON as models like to write it: a blank or a short indented line break, so that blanks come to an end.
const WHITESPACE: &str = "(\\n[ ]{0,24}|[ ])?";

impl Grammars {
    /// Reads all tokens. `stop_ids` end texts.
    pub(crate) fn new(tokenizer: &Tokenizer, stop_ids: &[u32]) -> Result<Self, String> {
        let size = tokenizer.vocab_size() as u32;
        let end = stop_ids.first().copied().unwrap_or(0);
        let words: Vec<Vec<u8>> = (0..size)
            .map(|id| {
                let special = tokenizer.is_special(id) || stop_ids.contains(&id);
                match tokenizer.token(id) {
                    Some(name) if special => {
                        [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
                    }
                    Some(_) => tokenizer.token_bytes(id).unwrap_or_default(),
                    None => Vec::new(),
                }
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, end), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory =
            ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
        factory.quiet();
        Ok(Grammars {
            factory,
            tokenizer: tokenizer.clone(),
            end,
        })
    }

    /// What makes an answer take `form`. `stop_ids` may end it once it is complete. With `reasoning`, the text
    /// is free until its closing mark.
    ///
    /// # Errors
    /// [`Error::Usage`] if the schema is not one, or is not supported.
    pub(crate) fn constraint(
        &self,
        form: &Form,
        stop_ids: Arc<[u32]>,
        reasoning: Option<Reasoning>,
    ) -> Result<Box<dyn Constraint>> {
        let grammar = self.grammar(form, reasoning.is_some());
        let parser = self
            .factory
            .create_parser(TopLevelGrammar::from_lark(grammar));
        let parser = parser
            .map_err(|error| Error::usage(format!("the schema cannot be followed: {error}")))?;
        let matcher = Matcher::new(Ok(parser));
        let (tokenizer, end) = (self.tokenizer.clone(), self.end);
        Ok(Box::new(Following {
            matcher,
            stop_ids,
            end,
            reasoning,
            seen: Vec::new(),
            tokenizer,
        }))
    }

    /// The grammar of `form` in llguidance's dialect of Lark.
    fn grammar(&self, form: &Form, after_reasoning: bool) -> String {
        let blanks = if after_reasoning {
            "/[\\n ]{0,2}/ "
        } else {
            ""
        };
        match form {
            Form::Json(schema) => format!("start: {blanks}%json {}\n", compact(schema)),
            Form::Calls { style, tools, most } => {
                let call = |name: &str, schema: &Value| match style {
                    ToolStyle::Apertus => object(json!({name: schema}), &[name]),
                    ToolStyle::Llama => object(
                        json!({"name": {"const": name}, "parameters": schema}),
                        &["name", "parameters"],
                    ),
                    _ => object(
                        json!({"name": {"const": name}, "arguments": schema}),
                        &["name", "arguments"],
                    ),
                };
                let calls: Vec<Value> = tools
                    .iter()
                    .map(|(name, schema)| call(name, schema))
                    .collect();
                // References inside a tool's schema are rooted at the schema itself.
                let any = json!({"anyOf": calls});
                let Marks { open, close } = style.marks();
                match style {
                    ToolStyle::Hermes => {
                        let more = if *most > 1 { " (\"\\n\" call)*" } else { "" };
                        let (open, close) = (self.mark(open), self.mark(close));
                        let body = compact(&any);
                        format!(
                            "start: {blanks}call{more}\ncall: {open} \"\\n\" body \"\\n\" {close}\nbody: %json {body}\n"
                        )
                    }
                    ToolStyle::Llama => format!("start: {blanks}%json {}\n", compact(&any)),
                    ToolStyle::Mistral | ToolStyle::Apertus => {
                        let list =
                            json!({"type": "array", "items": any, "minItems": 1, "maxItems": most});
                        format!(
                            "start: {blanks}{} %json {}\n",
                            self.mark(open),
                            compact(&list)
                        )
                    }
                }
            }
        }
    }

    /// A mark as one token if it is a special one, else as text.
    fn mark(&self, text: &str) -> String {
        match self
            .tokenizer
            .token_id(text)
            .filter(|&id| self.tokenizer.is_special(id))
        {
            Some(id) => format!("<[{id}]>"),
            None => Value::from(text).to_string(),
        }
    }
}

fn object(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// The schema as text, with how blanks are written beside it.
fn compact(schema: &Value) -> String {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    if let Value::Object(fields) = &mut schema {
        fields.insert(
            "x-guidance".to_owned(),
            json!({"whitespace_pattern": WHITESPACE}),
        );
    }
    schema.to_string()
}

/// Reasoning before the form begins.
#[derive(Debug, Clone)]
pub(crate) struct Reasoning {
    /// The one token that opens it, if the prompt has not.
    pub(crate) open: Option<u32>,
    /// What closes it.
    pub(crate) close: &'static str,
}

/// An answer on its way through a grammar.
struct Following {
    matcher: Matcher,
    stop_ids: Arc<[u32]>,
    end: u32,
    /// Until it is closed.
    reasoning: Option<Reasoning>,
    /// The reasoning's bytes.
    seen: Vec<u8>,
    tokenizer: Tokenizer,
}

impl Constraint for Following {
    fn mask(&mut self) -> Result<Option<Arc<TokenMask>>> {
        if let Some(reasoning) = &self.reasoning {
            let mut mask = TokenMask::none(self.tokenizer.vocab_size());
            match reasoning.open {
                Some(open) if self.seen.is_empty() => mask.allow(open),
                // Not even an end: the form is still to come.
                _ => mask = all_but(self.tokenizer.vocab_size(), &self.stop_ids, self.end),
            }
            return Ok(Some(Arc::new(mask)));
        }
        if self.matcher.is_stopped() {
            return match self.matcher.get_error() {
                Some(error) => Err(Error::Bug(format!("the grammar broke off: {error}"))),
                None => Ok(None),
            };
        }
        let bits = self
            .matcher
            .compute_mask()
            .map_err(|error| Error::Bug(format!("no mask: {error}")))?;
        let mut mask = TokenMask::from_words(bits.as_slice().to_vec());
        if mask.is_allowed(self.end) {
            mask.forbid(self.end);
            self.stop_ids.iter().for_each(|&id| mask.allow(id));
        }
        // Complete, and nothing that could be said would end it.
        Ok(mask
            .words()
            .iter()
            .any(|&word| word != 0)
            .then(|| Arc::new(mask)))
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        if let Some(reasoning) = &self.reasoning {
            self.seen
                .extend(self.tokenizer.token_bytes(token).unwrap_or_default());
            let close = reasoning.close.as_bytes();
            if self.seen.windows(close.len()).any(|window| window == close) {
                self.reasoning = None;
            }
            return Ok(());
        }
        self.matcher
            .consume_token(token)
            .map_err(|error| Error::Bug(format!("the grammar refused a token: {error}")))
    }
}

fn all_but(size: usize, stop_ids: &[u32], end: u32) -> TokenMask {
    let mut mask = TokenMask::from_words(vec![u32::MAX; size.div_ceil(32)]);
    mask.forbid(end);
    stop_ids.iter().for_each(|&id| mask.forbid(id));
    mask
}
