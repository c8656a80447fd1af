//! Against servers that each test starts for itself.

mod script;
mod server;
