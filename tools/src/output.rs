//! The only place that prints: results to standard output, everything else to standard error.

use std::io::Write as _;

/// Prints a line of the result. A reader that went away (a closed pipe) is no error.
pub(crate) fn line(text: &str) {
    drop(writeln!(std::io::stdout().lock(), "{text}"));
}

/// Prints a result as JSON.
pub(crate) fn json(value: &impl serde::Serialize) {
    let text =
        serde_json::to_string_pretty(value).expect("results have only strings, numbers and lists");
    line(&text);
}

/// Prints a note or an error.
pub(crate) fn note(text: &str) {
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}

/// Bytes for people.
pub(crate) fn bytes(n: u64) -> String {
    indicatif::HumanBytes(n).to_string()
}
