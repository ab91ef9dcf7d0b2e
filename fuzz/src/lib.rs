//! The fuzz targets, and what the fuzzer needs besides. What is done with an input is in `targets`.

mod targets;

pub use targets::*;

/// The fuzzer aborts in the panic hook. Panics of a library that we catch and report are no finding, so the hook
/// goes away; a panic that nobody catches still ends the fuzzer.
pub fn quiet() {
    std::panic::set_hook(Box::new(|_| {}));
}
