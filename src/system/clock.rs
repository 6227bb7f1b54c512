//! The time of day, for people.

use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// "12:03:04.512" in this host's time zone, with the day before it where that is not
/// `today`'s.
pub fn time_of_day(ns: u64, today: u64) -> String {
    let (Some(then), Some(today)) = (local(ns), local(today)) else {
        return format!("{} s after 1970", ns / 1_000_000_000);
    };
    let same = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday);
    let day = if same { String::new() } else { format!("{} ", date(&then)) };
    let (hour, minute, second) = (then.tm_hour, then.tm_min, then.tm_sec);
    format!("{day}{hour:02}:{minute:02}:{second:02}.{:03}", ns / 1_000_000 % 1000)
}

/// "2026-11-30 12:03:04" in this host's time zone.
pub fn date_and_time(ns: u64) -> String {
    match local(ns) {
        Some(then) => format!("{} {:02}:{:02}:{:02}", date(&then), then.tm_hour, then.tm_min, then.tm_sec),
        None => format!("{} s after 1970", ns / 1_000_000_000),
    }
}

fn date(time: &libc::tm) -> String {
    format!("{:04}-{:02}-{:02}", i64::from(time.tm_year) + 1900, time.tm_mon + 1, time.tm_mday)
}

fn local(ns: u64) -> Option<libc::tm> {
    let seconds = libc::time_t::try_from(ns / 1_000_000_000).ok()?;
    // SAFETY: all zeros are a valid tm.
    let mut time: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: two pointers that live through the call.
    let done = unsafe { libc::localtime_r(&raw const seconds, &raw mut time) };
    (!done.is_null()).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_is_told_where_it_is_not_today() {
        // Noon and one second before, by any zone on one day.
        let noon = 1_796_040_000_000_000_000;
        let text = time_of_day(noon + 512_000_000, noon);
        assert!(text.len() == 12 && text.ends_with(":00.512"), "{text}");
        let earlier = time_of_day(noon - 3 * 86_400_000_000_000, noon);
        assert!(earlier.starts_with("2026-11-2") && earlier.len() == 23, "{earlier}");
        assert!(date_and_time(noon).starts_with("2026-") && date_and_time(noon).len() == 19);
        let _ = (time_of_day(u64::MAX, 0), date_and_time(u64::MAX), now());
    }
}
