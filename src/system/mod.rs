//! The few calls to libc that std does not offer, each behind a safe function.
//! Together with `spank/` and `capi` the only place with `unsafe`. No rule of
//! the product lives here.

pub mod access;
pub mod affinity;
pub mod child;
pub mod clock;
pub mod dropped;
pub mod folder;
pub mod interfaces;
pub mod limits;
pub mod log;
pub mod mempolicy;
pub mod output;
pub mod program;
pub mod random;
pub mod resolver;
pub mod shared;
pub mod sockets;
pub mod supervisor;
pub mod user;
pub mod variables;
