//! What the benchmark says while it works: progress goes to standard error, results to standard output.

/// Writes one line of progress to standard error. A closed standard error is no reason to stop.
macro_rules! progress {
    ($($part:tt)*) => {{
        use std::io::Write as _;
        let mut stderr = std::io::stderr().lock();
        writeln!(stderr, $($part)*).unwrap_or_default();
    }};
}

/// Writes text to standard output, with the error that a closed pipe gives.
pub(crate) fn print(text: &str) -> crate::error::Result<()> {
    use crate::error::Context;
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .during("writing the results")
}

pub(crate) use progress;
