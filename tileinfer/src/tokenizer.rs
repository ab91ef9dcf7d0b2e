//! Text to token ids and back, by a model's own `tokenizer.json`.
//!
//! The `tokenizers` crate encodes. Decoding is this module's own, token by token, so that streamed
//! text and whole text are one thing and raw bytes can be had; it knows the two kinds of decoder
//! that language models use, byte-level and SentencePiece, and refuses others by name. Nothing here
//! knows about models, sampling or chat.

mod decode;
mod stop;

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use crate::{Error, Result};
use decode::{Decoding, Piece};

pub use decode::{DecodeStream, TextStream};
pub use stop::{StopStrings, StopText};

/// A model's tokenizer. Clones share one copy of the vocabulary.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>, Shown);

/// Special tokens that are not left out with the others.
type Shown = Arc<[String]>;

struct Inner {
    /// Named in errors.
    path: PathBuf,
    vocabulary: tokenizers::Tokenizer,
    decoding: Decoding,
    vocab_size: OnceLock<usize>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tokenizer").field(&self.0.path).finish()
    }
}

impl Tokenizer {
    /// Read `tokenizer.json` of a model directory.
    ///
    /// # Errors
    /// As [`Tokenizer::from_file`].
    pub fn from_dir(dir: &Path) -> Result<Self> {
        Self::from_file(&dir.join("tokenizer.json"))
    }

    /// Read a `tokenizer.json`.
    ///
    /// # Errors
    /// The model is bad if the file is missing, is not a tokenizer, or decodes in a way that is
    /// not supported; reading it may fail.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::bad_model(
                path,
                "there is no such file, and text cannot become token ids without it; download the model's tokenizer files too",
            ),
            _ => Error::io(path, error),
        })?;
        Self::from_bytes(path, &bytes)
    }

    /// Read the bytes of a `tokenizer.json`; `path` names them in errors.
    ///
    /// # Errors
    /// As [`Tokenizer::from_file`].
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        let bad = |reason: String| Error::bad_model(path, reason);
        // The crate panics where JSON breaks off inside some of its types, so the syntax is
        // checked first; the guard below is for whatever else a damaged file may set off.
        serde_json::from_slice::<serde::de::IgnoredAny>(bytes)
            .map_err(|error| bad(format!("is not JSON ({error}); download it again")))?;
        let mut vocabulary = guarded(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|reason| bad(format!("is not a tokenizer that can be used: {reason}")))?;
        // A prompt must never be cut or filled up because of what training left in the file.
        vocabulary
            .with_truncation(None)
            .map_err(|error| bad(error.to_string()))?
            .with_padding(None);
        let decoding = Decoding::new(vocabulary.get_decoder()).map_err(bad)?;
        let inner = Inner {
            path: path.to_owned(),
            vocabulary,
            decoding,
            vocab_size: OnceLock::new(),
        };
        Ok(Self(Arc::new(inner), Arc::default()))
    }

    /// The same tokenizer, whose `skip_special` leaves these tokens in: those that mark a model's reasoning
    /// are part of its text for some readers.
    #[must_use]
    pub fn showing(&self, tokens: &[&str]) -> Self {
        let shown = tokens.iter().map(|&token| token.to_owned()).collect();
        Self(Arc::clone(&self.0), shown)
    }

    /// Token ids of `text`. Tokens spelled out in the text, such as `<|im_end|>`, become their ids;
    /// `add_special_tokens` adds what the post-processor adds, usually BOS. The text of a chat
    /// template is encoded without, because the template wrote BOS itself.
    ///
    /// # Errors
    /// The model is bad if its tokenizer has no token for some text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        guarded(|| self.0.vocabulary.encode_fast(text, add_special_tokens))
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|reason| {
                Error::bad_model(&self.0.path, format!("cannot encode the text: {reason}"))
            })
    }

    /// Token ids of a raw prompt: with the post-processor's special tokens, but with a single BOS
    /// where the text already starts with it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, true)?;
        if let (Some(bos), [first, second, ..]) = (self.bos()?, ids.as_slice())
            && *first == bos
            && *second == bos
        {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// The token that the post-processor puts before every text, if it does.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn bos(&self) -> Result<Option<u32>> {
        // Some tokenizers frame a text on both sides; what stands first in an empty frame of two
        // is still BOS, what stands alone is BOS only if it also precedes text.
        let framed = self.encode("a", true)?;
        let plain = self.encode("a", false)?;
        let starts = framed.first().copied();
        Ok(starts.filter(|first| Some(first) != plain.first()))
    }

    /// Text of `ids`. Bytes that are not text become U+FFFD; ids that no token has are skipped.
    /// `skip_special` leaves out the tokens marked as special.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut stream = self.decode_stream(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id));
        }
        text.push_str(&stream.finish());
        text
    }

    /// The bytes of `ids`, as [`Tokenizer::decode`] but with those that are not text kept.
    pub fn decode_bytes(&self, ids: &[u32], skip_special: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut is_first = true;
        for &id in ids {
            if let Some(piece) = self.piece(id, skip_special, is_first) {
                bytes.extend_from_slice(piece.bytes());
                is_first = false;
            }
        }
        self.0.decoding.strip_start(&mut bytes);
        bytes
    }

    /// Decoding one token at a time.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream {
        DecodeStream::new(self.clone(), skip_special)
    }

    /// The id of a token, by its spelling in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.vocabulary.token_to_id(token)
    }

    /// The spelling of a token in the vocabulary: in a byte-level one a blank is `Ġ`, in a
    /// SentencePiece one it is `▁`.
    pub fn token(&self, id: u32) -> Option<String> {
        let added = self.0.vocabulary.get_added_vocabulary();
        added.simple_id_to_token(id).or_else(|| {
            use tokenizers::Model;
            self.0.vocabulary.get_model().id_to_token(id)
        })
    }

    /// Whether the token is one of those that `skip_special` leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id)
            .is_some_and(|token| self.is_special_token(&token))
    }

    /// The bytes that a token stands for in the middle of a text.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.piece(id, false, false)
            .map(|piece| piece.bytes().to_vec())
    }

    /// One more than the highest id. Ids below it need not all have a token, and the model's
    /// logits may be more.
    pub fn vocab_size(&self) -> usize {
        *self.0.vocab_size.get_or_init(|| {
            let vocabulary = self.0.vocabulary.get_vocab(true);
            let highest = vocabulary.values().max();
            highest.map_or(0, |&id| id as usize + 1)
        })
    }

    fn is_special_token(&self, token: &str) -> bool {
        let added = self.0.vocabulary.get_added_vocabulary();
        added.is_special_token(token) && !self.1.iter().any(|shown| shown == token)
    }

    /// What a token adds to a text, `None` if no token has the id or it is to be skipped.
    fn piece(&self, id: u32, skip_special: bool, is_first: bool) -> Option<Piece> {
        let token = self.token(id)?;
        if skip_special && self.is_special_token(&token) {
            return None;
        }
        Some(self.0.decoding.piece(token, is_first))
    }
}

/// Run a call into the `tokenizers` crate; its error or panic as a sentence.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => Err(panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("its contents do not fit together")
            .to_owned()),
    }
}
