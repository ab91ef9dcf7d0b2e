//! Pages that a mapped file has lost. When another program cuts a file short, or its disk fails, touching what is
//! gone raises SIGBUS, which ends a process without a word. A program may ask for a word: the signal's handler
//! looks the address up in a table of all mapped files and names the file. It decided not to repair anything.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::{Error, Result};

/// Files that are watched at once; a model of more shards is mapped all the same.
const SLOTS: usize = 1024;
/// The start of a slot that is being filled.
const CLAIMED: usize = 1;

/// A mapped file: addresses from `start` up to `end`, and its name. A `start` of 0 is a free slot.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    path: AtomicPtr<c_char>,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        path: AtomicPtr::new(ptr::null_mut()),
    }
}; SLOTS];

/// What was done about SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// From now on, touching a page that a mapped weight file has lost ends the process with exit code 1 and a sentence
/// on stderr that names the file, instead of a crash. What else raises SIGBUS is left to whoever handled it before.
///
/// This is for programs: a library that is a guest in another process should not decide how that ends.
///
/// # Errors
/// `Io` if the system refuses.
pub fn exit_on_lost_pages() -> Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let refused = || Error::io("SIGBUS", std::io::Error::last_os_error());
    // SAFETY: all-zero bytes are a valid `sigaction`: no handler, an empty mask, no flags.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: with a null pointer for the new action this only writes the present one to `before`, which lives.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
        return Err(refused());
    }
    // The handler reads it, so it is there first.
    let _ = BEFORE.set(before);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = lost;
    action.sa_sigaction = handler as usize;
    // On the thread's alternate stack, where there is one: a fault may come from a stack that is full.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` is fully set and its handler has the signature that SA_SIGINFO asks for and calls nothing
    // but what is safe in a signal handler.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(refused());
    }
    Ok(())
}

/// The handler. It only loads atomics and calls `write`, `_exit` and `sigaction`, all of which may be called here.
extern "C" fn lost(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the system passes a valid `siginfo_t`, and for SIGBUS its address field is the one that is set.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let start = slot.start.load(Ordering::Acquire);
        if start <= CLAIMED || !(start..slot.end.load(Ordering::Acquire)).contains(&address) {
            continue;
        }
        let path = slot.path.load(Ordering::Acquire);
        if path.is_null() {
            continue;
        }
        say(b"tileinfer: ");
        // SAFETY: the slot holds a string that ends with a zero byte and is freed only once the slot is cleared,
        // which happens before the file is unmapped. The thread that faulted still reads the mapping, so it is not.
        say(unsafe { std::slice::from_raw_parts(path.cast::<u8>(), libc::strlen(path)) });
        say(b": the file was cut short while it was in use, or its disk failed: get the model again and start over\n");
        // SAFETY: ends the process without running anything else of it.
        unsafe { libc::_exit(1) };
    }
    if let Some(before) = BEFORE.get() {
        // The instruction that faulted runs again when this returns, under the action there was before.
        // SAFETY: `before` is what the system gave us for this signal.
        unsafe { libc::sigaction(signal, ptr::from_ref(before), ptr::null_mut()) };
    }
}

fn say(text: &[u8]) {
    // SAFETY: the bytes are valid for their length. Where nobody listens nothing is lost, so the result is ignored.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// Keeps a mapped file in the table. It has to be dropped before the file is unmapped.
#[derive(Debug)]
pub(super) struct Watch(Option<usize>);

impl Watch {
    /// Watches `bytes`, the mapping of the file at `path`.
    pub(super) fn new(path: &Path, bytes: &[u8]) -> Self {
        let Ok(path) = CString::new(path.as_os_str().as_encoded_bytes()) else {
            // No file has such a name.
            return Watch(None);
        };
        let start = bytes.as_ptr() as usize;
        let free = TABLE.iter().position(|slot| {
            let claim =
                slot.start
                    .compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
            claim.is_ok()
        });
        if let Some(index) = free {
            let slot = &TABLE[index];
            slot.path.store(path.into_raw(), Ordering::Release);
            slot.end.store(
                start + bytes.len().next_multiple_of(4096),
                Ordering::Release,
            );
            slot.start.store(start, Ordering::Release);
        }
        Watch(free)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(index) = self.0 else {
            return;
        };
        let slot = &TABLE[index];
        // From here on no address is in the slot's range.
        slot.end.store(0, Ordering::Release);
        let path = slot.path.swap(ptr::null_mut(), Ordering::AcqRel);
        slot.start.store(0, Ordering::Release);
        if !path.is_null() {
            // SAFETY: it came from `CString::into_raw` in `new` and was taken out of the slot just now, once.
            drop(unsafe { CString::from_raw(path) });
        }
    }
}
