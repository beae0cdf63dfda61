//! The time of day for `strftime_now`, without a time zone database or the C library's locale.

use std::time::{SystemTime, UNIX_EPOCH};

/// A moment, and how far local time is ahead of UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub unix_seconds: i64,
    /// Seconds to add for local time.
    pub utc_offset: i32,
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Clock {
    /// Now, in UTC.
    pub fn now() -> Clock {
        let unix_seconds = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |s| -s),
        };
        Clock { unix_seconds, utc_offset: 0 }
    }

    /// Python's `strftime` in the C locale; `None` for a directive that is not known.
    pub fn format(&self, format: &str) -> Option<String> {
        use std::fmt::Write as _;
        let local = self.unix_seconds.saturating_add(i64::from(self.utc_offset)).clamp(-62_135_596_800, 253_402_300_799);
        let (days, second) = (local.div_euclid(86_400), local.rem_euclid(86_400));
        let (year, month, day) = civil(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let weekday = (days + 4).rem_euclid(7);
        let day_of_year = days - days_before(year) + 1;
        let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let mut out = String::with_capacity(format.len() * 2);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next()?;
            let bare = directive == '-';
            if bare {
                directive = chars.next()?;
            }
            let mut number = |value: i64, width: usize| {
                let width = if bare { 0 } else { width };
                write!(out, "{value:0width$}")
            };
            let written = match directive {
                'Y' => number(year, 4),
                'y' => number(year.rem_euclid(100), 2),
                'm' => number(month, 2),
                'd' => number(day, 2),
                'H' => number(hour, 2),
                'I' => number(hour12, 2),
                'M' => number(minute, 2),
                'S' => number(second, 2),
                'f' => number(0, 6),
                'j' => number(day_of_year, 3),
                'u' => number(if weekday == 0 { 7 } else { weekday }, 1),
                'w' => number(weekday, 1),
                'U' => number((day_of_year + 6 - weekday) / 7, 2),
                'W' => number((day_of_year + 6 - (weekday + 6) % 7) / 7, 2),
                's' => number(self.unix_seconds, 0),
                'e' => {
                    if bare {
                        write!(out, "{day}")
                    } else {
                        write!(out, "{day:>2}")
                    }
                }
                'B' => write!(out, "{}", MONTHS[month as usize - 1]),
                'b' | 'h' => write!(out, "{}", &MONTHS[month as usize - 1][..3]),
                'A' => write!(out, "{}", DAYS[weekday as usize]),
                'a' => write!(out, "{}", &DAYS[weekday as usize][..3]),
                'p' => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
                'F' => write!(out, "{year:04}-{month:02}-{day:02}"),
                'D' | 'x' => write!(out, "{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
                'T' | 'X' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
                'R' => write!(out, "{hour:02}:{minute:02}"),
                // A naive Python datetime has no zone.
                'z' | 'Z' => Ok(()),
                'n' => writeln!(out),
                't' => write!(out, "\t"),
                '%' => write!(out, "%"),
                _ => return None,
            };
            written.ok()?;
        }
        Some(out)
    }
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    // An average year lands at most one year off.
    let mut year = 1970 + days.div_euclid(365);
    while days_before(year) > days {
        year -= 1;
    }
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut day = days - days_before(year);
    let leap = days_before(year + 1) - days_before(year) == 366;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    (year, month as i64 + 1, day + 1)
}

/// Days from 1970-01-01 to January 1st of a year.
fn days_before(year: i64) -> i64 {
    let leaps = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    365 * (year - 1970) + leaps(year - 1) - leaps(1969)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_python() {
        // Each printed by Python's datetime.fromtimestamp(t, UTC).strftime(...).
        let format = "%Y-%m-%d %H:%M:%S %j %a %b %-d %I%p %y %U %W %B %A";
        let cases = [
            (0, "1970-01-01 00:00:00 001 Thu Jan 1 12AM 70 00 00 January Thursday"),
            (951_782_400, "2000-02-29 00:00:00 060 Tue Feb 29 12AM 00 09 09 February Tuesday"),
            (1_735_689_599, "2024-12-31 23:59:59 366 Tue Dec 31 11PM 24 52 53 December Tuesday"),
            (-1, "1969-12-31 23:59:59 365 Wed Dec 31 11PM 69 52 52 December Wednesday"),
            (4_107_542_400, "2100-03-01 00:00:00 060 Mon Mar 1 12AM 00 09 09 March Monday"),
        ];
        for (unix_seconds, expected) in cases {
            assert_eq!(Clock { unix_seconds, utc_offset: 0 }.format(format).as_deref(), Some(expected));
        }
        let berlin = Clock { unix_seconds: 1_753_999_199, utc_offset: 7200 };
        assert_eq!(berlin.format("%d %b %Y %H:%M %% %e").as_deref(), Some("31 Jul 2025 23:59 % 31"));
    }

    #[test]
    fn odd_input() {
        for unix_seconds in [i64::MIN, i64::MAX] {
            assert!(Clock { unix_seconds, utc_offset: i32::MAX }.format("%F %T").is_some());
        }
        assert_eq!([Clock::now().format("%"), Clock::now().format("%-"), Clock::now().format("%Q")], [None, None, None]);
    }
}
