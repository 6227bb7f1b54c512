//! What a warm-up writes, as lines for the step's output: nothing that moves a
//! terminal's cursor, a progress bar now and then only, not more than people can read.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::config::turns;

/// How many of the last lines are kept.
pub const KEPT: usize = 20;

/// Characters of a line.
const LONGEST: usize = 500;

/// Bytes of a line that are looked at.
const LOOKED_AT: usize = 4 * LONGEST;

/// How often a progress bar that is drawn over and over is shown.
const PROGRESS: Duration = Duration::from_secs(10);

/// Lines at once, and lines a second behind those.
const BURST: f64 = 500.0;
const RATE: f64 = 50.0;

/// The output of one command.
#[derive(Debug)]
pub struct Lines {
    /// Of the line that has not ended.
    begun: Vec<u8>,
    /// What would be drawn over next.
    drawn: Vec<u8>,
    shown: Instant,
    /// The last lines, and whether each was shown.
    last: VecDeque<(String, bool)>,
    left_out: u64,
    budget: f64,
    at: Instant,
}

impl Lines {
    /// None yet.
    pub fn new(now: Instant) -> Lines {
        Lines {
            begun: Vec::new(),
            drawn: Vec::new(),
            shown: now,
            last: VecDeque::new(),
            left_out: 0,
            budget: BURST,
            at: now,
        }
    }

    /// Takes what was written; the lines to show.
    pub fn take(&mut self, bytes: &[u8], now: Instant) -> Vec<String> {
        self.budget = (self.budget + now.saturating_duration_since(self.at).as_secs_f64() * RATE).min(BURST);
        self.at = now;
        let mut show = Vec::new();
        for byte in bytes {
            match byte {
                b'\n' => {
                    let line = if self.begun.is_empty() { &self.drawn } else { &self.begun };
                    let line = readable(line);
                    self.begun.clear();
                    self.drawn.clear();
                    self.line(line, &mut show);
                }
                b'\r' if !self.begun.is_empty() => {
                    self.drawn = std::mem::take(&mut self.begun);
                    if now.saturating_duration_since(self.shown) >= PROGRESS {
                        let line = readable(&self.drawn);
                        self.shown = now;
                        self.line(line, &mut show);
                    }
                }
                b'\r' => {}
                _ if self.begun.len() < LOOKED_AT => self.begun.push(*byte),
                _ => {}
            }
        }
        show
    }

    /// No more comes. The lines still to show: the last ones always are.
    pub fn end(&mut self) -> Vec<String> {
        let mut show = self.take(b"\n", self.at);
        let hidden: Vec<String> = self.last.iter().filter(|(_, shown)| !shown).map(|(line, _)| line.clone()).collect();
        let gone = self.left_out.saturating_sub(hidden.len() as u64);
        if gone > 0 {
            show.push(left_out(gone));
        }
        self.left_out = 0;
        show.extend(hidden);
        show
    }

    /// The last lines.
    pub fn last(&self) -> Vec<String> {
        self.last.iter().map(|(line, _)| line.clone()).collect()
    }

    fn line(&mut self, line: String, show: &mut Vec<String>) {
        if line.trim().is_empty() {
            return;
        }
        let shown = self.budget >= 1.0;
        if shown {
            self.budget -= 1.0;
            if self.left_out > 0 {
                show.push(left_out(self.left_out));
                self.left_out = 0;
            }
            show.push(line.clone());
        } else {
            self.left_out += 1;
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back((line, shown));
    }
}

fn left_out(lines: u64) -> String {
    format!("({lines} lines left out: too many at a time)")
}

/// Without what a terminal would take for orders.
fn readable(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let mut kept = String::new();
    let mut characters = text.chars().peekable();
    let mut count = 0;
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' | '\u{9b}' => {
                // ESC [ … letter; ESC ] … BEL or ESC \; another has one character.
                let kind = if character == '\u{9b}' { Some('[') } else { characters.next() };
                match kind {
                    Some('[') => while characters.next().is_some_and(|next| !('@'..='~').contains(&next)) {},
                    Some(']') => while characters.next().is_some_and(|next| next != '\u{7}' && next != '\u{1b}') {},
                    _ => {}
                }
                continue;
            }
            '\t' => kept.push(' '),
            _ if character.is_control() || turns(character) => continue,
            _ => kept.push(character),
        }
        count += 1;
        if count == LONGEST {
            if characters.peek().is_some() {
                kept.push('…');
            }
            break;
        }
    }
    kept.truncate(kept.trim_end().len());
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(parts: &[&[u8]]) -> Vec<String> {
        let now = Instant::now();
        let mut lines = Lines::new(now);
        let mut all: Vec<String> = parts.iter().flat_map(|part| lines.take(part, now)).collect();
        all.extend(lines.end());
        all
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        assert_eq!(shown(&[b"a", b"b\nc\r", b"\n\n", b"  d  "]), ["ab", "c", "  d"]);
        assert_eq!(shown(&["gr\u{fc}n\n".as_bytes(), b"\xff\xfe\n"]), ["gr\u{fc}n", "\u{fffd}\u{fffd}"]);
        assert!(shown(&[]).is_empty());
    }

    #[test]
    fn a_terminal_is_given_no_orders() {
        assert_eq!(shown(&[b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\ty\x08\x00\n"]), ["red x y"]);
        assert_eq!(shown(&["a\u{202e}b\u{9b}31mc\n".as_bytes()]), ["abc"]);
        assert_eq!(shown(&[b"\x1b[31\n", b"\x1b\n"]), [""; 0]);
    }

    #[test]
    fn a_progress_bar_is_its_last_state_and_now_and_then_one_between() {
        assert_eq!(shown(&[b"10%\r20%\r", b"100%\n"]), ["100%"]);
        assert_eq!(shown(&[b"10%\r100%\r\n"]), ["100%"]);
        let start = Instant::now();
        let mut lines = Lines::new(start);
        assert!(lines.take(b"1%\r", start).is_empty());
        assert_eq!(lines.take(b"5%\r", start + Duration::from_secs(11)), ["5%"]);
        assert!(lines.take(b"6%\r", start + Duration::from_secs(12)).is_empty());
        assert_eq!(lines.end(), ["6%"]);
    }

    #[test]
    fn long_lines_are_cut_and_floods_keep_their_end() {
        let long = shown(&[&vec![b'x'; 100_000]]);
        assert_eq!(long.len(), 1);
        assert_eq!(long[0].chars().count(), LONGEST + 1);
        let flood: String = (0..100_000).map(|number| format!("line {number}\n")).collect();
        let all = shown(&[flood.as_bytes()]);
        assert_eq!(all.len(), 500 + 1 + KEPT);
        assert_eq!(all[0], "line 0");
        assert_eq!(all[500], "(99480 lines left out: too many at a time)");
        assert_eq!(all.last().unwrap(), "line 99999");
    }

    #[test]
    fn the_last_lines_are_kept() {
        let now = Instant::now();
        let mut lines = Lines::new(now);
        let text: String = (0..30).map(|number| format!("{number}\n")).collect();
        lines.take(text.as_bytes(), now);
        lines.end();
        let last = lines.last();
        assert_eq!((last.len(), last[0].as_str(), last[19].as_str()), (KEPT, "10", "29"));
    }
}
