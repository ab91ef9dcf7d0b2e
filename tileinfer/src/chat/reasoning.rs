//! Where a model's reasoning begins and ends in its text. It knows spellings, not token ids.

use super::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// The spellings in use: Qwen3, SmolLM3 and many more; Apertus; Magistral.
const SPELLINGS: [ReasoningMarks; 3] = [
    ReasoningMarks {
        open: "<think>",
        close: "</think>",
    },
    ReasoningMarks {
        open: "<|inner_prefix|>",
        close: "<|inner_suffix|>",
    },
    ReasoningMarks {
        open: "[THINK]",
        close: "[/THINK]",
    },
];

/// What stands before and after a model's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningMarks {
    /// Before it.
    pub open: &'static str,
    /// After it.
    pub close: &'static str,
}

impl ReasoningMarks {
    /// The marks of a model: those that its tokenizer has tokens for, or that its template names.
    pub fn of(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<Self> {
        let is_token = |mark: &str| tokenizer.token_id(mark).is_some();
        SPELLINGS.into_iter().find(|marks| {
            (is_token(marks.open) && is_token(marks.close))
                || (template.mentions(marks.open) && template.mentions(marks.close))
        })
    }

    /// Whether a prompt ends inside reasoning, so that the answer starts in it.
    pub fn is_open_after(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }
}

/// What a piece of an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerPart {
    /// The model thinks aloud.
    Reasoning,
    /// The model answers.
    Answer,
}

/// Tells reasoning and answer apart in a text that comes piece by piece. The marks themselves are dropped.
#[derive(Debug)]
pub struct ReasoningSplit {
    marks: Option<ReasoningMarks>,
    part: AnswerPart,
    /// What may be the beginning of a mark.
    held: String,
}

impl ReasoningSplit {
    /// A split at `marks`; without any, all is answer. `inside` says that the text starts in reasoning.
    pub fn new(marks: Option<ReasoningMarks>, inside: bool) -> Self {
        let part = if inside && marks.is_some() {
            AnswerPart::Reasoning
        } else {
            AnswerPart::Answer
        };
        ReasoningSplit {
            marks,
            part,
            held: String::new(),
        }
    }

    /// Hands what `text` makes known to `emit`.
    pub fn push(&mut self, text: &str, emit: &mut dyn FnMut(AnswerPart, &str)) {
        let Some(marks) = self.marks else {
            return emit(self.part, text);
        };
        self.held.push_str(text);
        loop {
            let mark = match self.part {
                AnswerPart::Answer => marks.open,
                AnswerPart::Reasoning => marks.close,
            };
            let Some(at) = self.held.find(mark) else {
                let known = self.held.len() - overlap(&self.held, mark);
                if known > 0 {
                    emit(self.part, &self.held[..known]);
                }
                self.held.drain(..known);
                return;
            };
            if at > 0 {
                emit(self.part, &self.held[..at]);
            }
            self.held.drain(..at + mark.len());
            self.part = match self.part {
                AnswerPart::Answer => AnswerPart::Reasoning,
                AnswerPart::Reasoning => AnswerPart::Answer,
            };
        }
    }

    /// Hands what was held back to `emit`, once no more text will come.
    pub fn finish(&mut self, emit: &mut dyn FnMut(AnswerPart, &str)) {
        if !self.held.is_empty() {
            emit(self.part, &self.held);
            self.held.clear();
        }
    }
}

/// Bytes at the end of `text` that `mark` begins with.
fn overlap(text: &str, mark: &str) -> usize {
    (1..mark.len().min(text.len() + 1))
        .rev()
        .find(|&length| text.as_bytes().ends_with(&mark.as_bytes()[..length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str, piece: usize, inside: bool) -> (String, String) {
        let mut split = ReasoningSplit::new(Some(SPELLINGS[0]), inside);
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut emit = |part: AnswerPart, text: &str| match part {
            AnswerPart::Reasoning => reasoning.push_str(text),
            AnswerPart::Answer => answer.push_str(text),
        };
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(piece) {
            split.push(&piece.iter().collect::<String>(), &mut emit);
        }
        split.finish(&mut emit);
        (reasoning, answer)
    }

    #[test]
    fn pieces_of_any_size_give_the_same_parts() {
        let cases = [
            ("", false, "", ""),
            ("plain", false, "", "plain"),
            ("<think>why</think>because", false, "why", "because"),
            ("why</think>because", true, "why", "because"),
            ("a<think>b</think>c<think>d", false, "bd", "ac"),
            (
                "no <thin mark < <<think>é≠</thi</think>ü",
                false,
                "é≠</thi",
                "no <thin mark < <ü",
            ),
            ("held <think", false, "", "held <think"),
            ("</think>", false, "", "</think>"),
        ];
        for (text, inside, reasoning, answer) in cases {
            for piece in 1..=text.len().max(1) {
                let expected = (reasoning.to_owned(), answer.to_owned());
                assert_eq!(split(text, piece, inside), expected, "{text} by {piece}");
            }
        }
    }

    #[test]
    fn without_marks_all_is_answer() {
        let mut split = ReasoningSplit::new(None, true);
        let mut seen = Vec::new();
        split.push("<think>x", &mut |part, text| {
            seen.push((part, text.to_owned()));
        });
        assert_eq!(seen, [(AnswerPart::Answer, "<think>x".to_owned())]);
    }

    #[test]
    fn a_prompt_may_open_the_reasoning() {
        assert!(SPELLINGS[0].is_open_after("<|im_start|>assistant\n<think>\n"));
        assert!(!SPELLINGS[0].is_open_after("assistant\n<think>\n\n</think>\n\n"));
    }

    #[test]
    fn marks_that_are_special_tokens_can_be_shown() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../testdata/golden/models/qwen3");
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let ids = tokenizer.encode("<|im_start|>a<|im_end|>", false).unwrap();
        assert_eq!(tokenizer.decode(&ids, true), "a");
        let shown = tokenizer.showing(&["<|im_start|>"]);
        assert_eq!(shown.decode(&ids, true), "<|im_start|>a");
        assert_eq!(shown.decode(&ids, false), "<|im_start|>a<|im_end|>");
        assert_eq!(tokenizer.decode(&ids, true), "a");
    }
}
