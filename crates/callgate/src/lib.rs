//! callgate
