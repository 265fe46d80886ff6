//! How much memory this process has.

/// Resident bytes of this process; 0 where `/proc` cannot say.
pub(crate) fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|field| field.parse().ok());
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    pages.unwrap_or(0_u64).saturating_mul(page)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_running_process_has_some_memory() {
        assert!(super::resident_bytes() > 100 << 10);
    }
}
