//! The server on loopback, over a runner without a model.

mod common;
mod messages;
mod clients;
mod routes;
mod structured;
