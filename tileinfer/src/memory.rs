//! Large pages for memory that is read from end to end again and again.

/// Tells the system that `memory`, which nobody has touched yet, is best made of large pages: walking the tables of
/// small ones costs up to half of the read bandwidth. A wish, not more: nothing changes but speed, and where the
/// system has no such wish, nothing at all.
pub fn wish_for_large_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    {
        /// Below a few large pages (of 2 MiB as a rule) there is nothing to gain.
        const LEAST: usize = 4 << 20;
        const PAGE: usize = 4096;
        let range = memory.as_ptr_range();
        let start = range.start.addr().next_multiple_of(PAGE);
        let end = range.end.addr() / PAGE * PAGE;
        if end.saturating_sub(start) >= LEAST {
            let first = range.start.with_addr(start).cast_mut().cast();
            // SAFETY: whole pages within memory that the caller owns; the advice does not change what they hold.
            unsafe { libc::madvise(first, end - start, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_holds_what_it_held() {
        for len in [0, 1, 5000, 9 << 20] {
            let mut bytes = vec![0_u8; len];
            wish_for_large_pages(&bytes);
            assert!(bytes.iter().all(|b| *b == 0));
            bytes.fill(7);
            wish_for_large_pages(&bytes);
            assert!(bytes.iter().all(|b| *b == 7));
        }
    }
}
