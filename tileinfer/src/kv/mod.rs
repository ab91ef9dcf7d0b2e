//! The paged KV cache as book-keeping: which pages a sequence holds, and what is in them. It knows page
//! numbers and token ids; the keys and values themselves live with the backend.

mod layout;
mod pool;
mod prefix;
mod sequence;
mod smoothing;

pub use layout::{KvElement, KvLayout, PAGE_SIZE};
pub use pool::{Page, PagePool};
pub use prefix::PrefixCache;
pub use sequence::{BlockTable, PageCopy, Sequence};
pub use smoothing::{KeySmoothing, factors as smoothing_factors};
