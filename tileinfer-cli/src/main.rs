//! The tileinfer command.
fn main() {}
