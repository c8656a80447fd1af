//! What several files of these tests use.

use callgate::{Limit, Limiter};

/// The exit code, and what was written to the output and to the errors.
pub(crate) fn run(args: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = ["callgate"].iter().chain(args);
    let code = callgate_cli::run(args.copied(), &mut out, &mut err);
    let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    (code, out, err)
}

/// Limits whose buckets do not fill while a test runs.
pub(crate) fn limiter(url: &str) -> Limiter {
    Limiter::builder()
        .limit("lookup", Limit::per_day(1).burst(2))
        .limit("crm", Limit::per_day(10).burst(20).per(["tenant"]))
        .limit("search", Limit::per_day(1).burst(5).per(["tenant", "user"]))
        .default_limit(Limit::per_day(1).burst(3))
        .store(url)
        .build()
        .expect("a store")
}
