//! How much memory there is, and how a size is written for a person.

use std::fs;

/// Bytes that this process may still take: what the kernel calls available, within the limits of the control
/// group and of the address space (`ulimit -v`).
pub(crate) fn available() -> u64 {
    let limits = [
        meminfo("MemAvailable:"),
        control_group_room(),
        address_space_room(),
    ];
    limits.into_iter().flatten().min().unwrap_or(u64::MAX)
}

/// Bytes of memory that the machine has, if it says.
pub(crate) fn total() -> Option<u64> {
    meminfo("MemTotal:")
}

fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix(field))?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()?;
    Some(kilobytes * 1024)
}

/// What is left of the limit of a control group of version 2, as containers see it.
fn control_group_room() -> Option<u64> {
    let read = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse().ok()
    };
    let limit = read("memory.max")?;
    // Cached pages of files are given back when memory runs short.
    let stat = fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let cached: u64 = stat
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok())
        .unwrap_or(0);
    let used = read("memory.current")?.saturating_sub(cached);
    Some(limit.saturating_sub(used))
}

fn address_space_room() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let limit: u64 = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes: u64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()?;
    Some(limit.saturating_sub(kilobytes * 1024))
}

/// `bytes` for a person.
pub(crate) fn readable(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} bytes"),
        1_000..1_000_000 => format!("{:.0} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}
