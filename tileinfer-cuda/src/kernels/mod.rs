//! kernels
// Device code is one unsafe block from its first line to its last: the contract of an entry point
// (pointers, sizes, alignment) covers its body, and the launch plans beside it uphold it.
#![allow(unsafe_op_in_unsafe_fn)]
pub mod activation;
pub mod attention;
pub mod linear;
pub mod norm;
pub mod rope;
pub mod rows;
pub mod sample;
pub mod views;
