//! Documents out of text files, piece by piece, so that memory does not grow with a document
//! or a file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use palingenesis::config::printable;

use super::{DataError, Result, io as io_error, wrong};

/// Where a longer document is cut. Tokenizers need some fifty times as much memory.
const PIECE: usize = 1 << 20;
/// The longest line of JSON.
const LINE: u64 = 256 << 20;

/// Of a document, or all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// UTF-8 if the file is.
    pub text: Vec<u8>,
    /// The document's last one.
    pub ends: bool,
    /// The line of the file in which it begins, from 1.
    pub line: u64,
}

/// What separates documents.
#[derive(Debug, Clone)]
pub enum Split {
    /// Nothing: a file is one document.
    Files,
    /// Lines that consist of this, but for blanks at their end; of nothing: empty lines.
    Line(String),
    /// Lines of JSON, each a document in the value of this key.
    Json(String),
}

/// The documents of one file.
pub struct Documents {
    path: PathBuf,
    input: Box<dyn BufRead>,
    split: Split,
    piece: usize,
    /// Read, but not given out.
    pending: Vec<u8>,
    /// The line in which `pending` begins, and the one that is read next.
    pending_line: u64,
    line: u64,
    /// `pending` ends with a line's end.
    at_start: bool,
    /// The document has pieces that were given out.
    begun: bool,
    ready: VecDeque<Piece>,
    ended: bool,
    /// Bytes read so far.
    pub bytes: u64,
}

impl Documents {
    /// Opens a file; "-" is the standard input.
    pub fn open(path: &Path, split: Split) -> Result<Documents> {
        let input: Box<dyn BufRead> = if path == Path::new("-") {
            Box::new(BufReader::with_capacity(1 << 20, io::stdin()))
        } else {
            if path.is_dir() {
                return wrong(format!("{}: is a directory; name the files in it", path.display()));
            }
            let file = File::open(path).map_err(io_error("cannot be opened", path))?;
            Box::new(BufReader::with_capacity(1 << 20, file))
        };
        Documents::new(path, input, split, PIECE)
    }

    /// The same of an open one, in pieces of about so many bytes.
    pub fn new(path: &Path, mut input: Box<dyn BufRead>, split: Split, piece: usize) -> Result<Documents> {
        let start = input.fill_buf().map_err(io_error("cannot be read", path))?;
        if let Some((kind, cure)) = packed(path, start) {
            return wrong(format!("{}: is {kind}, not text; {cure}", path.display()));
        }
        let mut bytes = 0;
        if start.starts_with(b"\xef\xbb\xbf") {
            // A byte order mark says nothing in UTF-8, and would become a token.
            input.consume(3);
            bytes = 3;
        }
        Ok(Documents {
            path: path.into(),
            input,
            split,
            piece,
            pending: Vec::new(),
            pending_line: 1,
            line: 1,
            at_start: true,
            begun: false,
            ready: VecDeque::new(),
            ended: false,
            bytes,
        })
    }

    /// The next piece; documents of blanks only are passed over.
    pub fn next(&mut self) -> Result<Option<Piece>> {
        while self.ready.is_empty() && !self.ended {
            match self.split.clone() {
                Split::Json(key) => self.read_json(&key)?,
                Split::Files => self.read_text(None)?,
                Split::Line(separator) => self.read_text(Some(separator.as_bytes()))?,
            }
        }
        Ok(self.ready.pop_front())
    }

    /// A line, or so much of it as `most`; false at the end of the file.
    fn read_line(&mut self, most: u64, line: &mut Vec<u8>) -> Result<bool> {
        let read = (&mut self.input).take(most).read_until(b'\n', line);
        let read = read.map_err(io_error("cannot be read", &self.path))?;
        self.bytes += read as u64;
        Ok(read > 0)
    }

    fn read_text(&mut self, separator: Option<&[u8]>) -> Result<()> {
        let mut line = Vec::new();
        if !self.read_line(self.piece as u64, &mut line)? {
            self.ended = true;
            self.finish();
            return Ok(());
        }
        let begins = std::mem::replace(&mut self.at_start, line.ends_with(b"\n"));
        self.line += u64::from(self.at_start);
        if begins && separator.is_some_and(|separator| line.trim_ascii_end() == separator) {
            self.finish();
            return Ok(());
        }
        self.pending.append(&mut line);
        self.cut(true);
        Ok(())
    }

    fn read_json(&mut self, key: &str) -> Result<()> {
        let mut line = Vec::new();
        if !self.read_line(LINE + 1, &mut line)? {
            self.ended = true;
            return Ok(());
        }
        let number = self.line;
        let wrong_line = |why: String| DataError::Wrong(format!("{}:{number}: {why}", self.path.display()));
        if line.len() as u64 > LINE {
            return Err(wrong_line(format!("a line of more than {LINE} bytes; each document needs a line of its own")));
        }
        if !line.trim_ascii().is_empty() {
            let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&line)
                .map_err(|error| wrong_line(format!("no object of JSON: {error}; each line must be one")))?;
            match object.get(key) {
                Some(serde_json::Value::String(text)) => self.pending = text.as_bytes().to_vec(),
                Some(_) => return Err(wrong_line(format!("the value of \"{}\" is no text", printable(key)))),
                None => {
                    let keys: Vec<String> = object.keys().take(8).map(|key| printable(key)).collect();
                    return Err(wrong_line(format!(
                        "no key \"{}\"; name the text's key with --key, here are: {}",
                        printable(key),
                        keys.join(", ")
                    )));
                }
            }
        }
        self.pending_line = number;
        // Lines within the text are none of the file.
        self.cut(false);
        self.finish();
        self.line += 1;
        Ok(())
    }

    /// Gives out what of `pending` is more than a piece, cut where tokenizers part words
    /// anyway. `of_file`: its lines are the file's.
    fn cut(&mut self, of_file: bool) {
        if self.pending.len() <= self.piece {
            return;
        }
        let text = std::mem::take(&mut self.pending);
        let mut rest = text.as_slice();
        while rest.len() > self.piece {
            let (first, after) = rest.split_at(place_to_cut(&rest[..self.piece]));
            self.ready.push_back(Piece { text: first.to_vec(), ends: false, line: self.pending_line });
            if of_file {
                self.pending_line += first.iter().filter(|byte| **byte == b'\n').count() as u64;
            }
            rest = after;
        }
        self.pending = rest.to_vec();
        self.begun = true;
    }

    fn finish(&mut self) {
        let text = std::mem::take(&mut self.pending);
        if self.begun || !text.trim_ascii().is_empty() {
            self.ready.push_back(Piece { text, ends: true, line: self.pending_line });
        }
        self.pending_line = self.line;
        self.begun = false;
    }
}

/// The last place in the second half of `text` where a line begins, else where a blank
/// stands after a word, else where a character begins. Byte-level BPE gives the same tokens
/// with and without the first two: its words never reach from one line into the next, and
/// take the blank before them along.
fn place_to_cut(text: &[u8]) -> usize {
    // Lead bytes of all white space outside of ASCII: C2, E1, E2, E3.
    let begins_word = |byte: u8| byte.is_ascii_graphic() || (byte >= 0xc3 && !(0xe1..=0xe3).contains(&byte));
    let places = || (text.len() / 2 + 1..text.len()).rev();
    places()
        .find(|at| text[at - 1] == b'\n' && begins_word(text[*at]))
        .or_else(|| places().find(|at| text[*at] == b' ' && text[at - 1].is_ascii_graphic()))
        .or_else(|| places().find(|at| text[*at] & 0xc0 != 0x80))
        .unwrap_or(text.len())
}

/// Whether a file's name says that each of its lines is a document.
pub fn named_json_lines(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("jsonl") || end.eq_ignore_ascii_case("ndjson"))
}

/// What a file is that begins so and is no text, and what to do.
fn packed(path: &Path, start: &[u8]) -> Option<(&'static str, String)> {
    let kinds: [(&[u8], _, _); 6] = [
        (b"\x1f\x8b", "gzip", Ok("zcat")),
        (b"\x28\xb5\x2f\xfd", "zstd", Ok("zstdcat")),
        (b"\xfd7zXZ\0", "xz", Ok("xzcat")),
        (b"BZh91AY&SY", "bzip2", Ok("bzcat")),
        (b"PK\x03\x04", "a zip archive", Err("unpack it")),
        (b"PAR1", "Parquet", Err("export its text as lines of JSON (.jsonl)")),
    ];
    let (_, kind, cure) = kinds.into_iter().find(|(mark, ..)| start.starts_with(mark))?;
    // A stream has no name that tells what its lines are.
    let key = if named_json_lines(&path.with_extension("")) { "--key KEY " } else { "" };
    let unpack = |by: &str| format!("unpack it: {by} FILE | palingenesis-worker prepare ... {key}-");
    Some((kind, cure.map_or_else(str::to_string, unpack)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str, split: Split, piece: usize) -> Vec<(String, bool, u64)> {
        let input = Box::new(io::Cursor::new(text.as_bytes().to_vec()));
        let mut documents = Documents::new(Path::new("x"), input, split, piece).unwrap();
        let mut all = Vec::new();
        while let Some(piece) = documents.next().unwrap() {
            all.push((String::from_utf8(piece.text).unwrap(), piece.ends, piece.line));
        }
        assert_eq!(documents.bytes, text.len() as u64);
        all
    }

    fn whole(text: &str, line: u64) -> (String, bool, u64) {
        (text.into(), true, line)
    }

    #[test]
    fn fortunes_are_split_at_their_percent_signs() {
        let text = "one\n-- A\n%\ntwo % of\n% not alone\n%  \r\n\n%\n%%\nthree";
        let split = Split::Line("%".into());
        let expected = [whole("one\n-- A\n", 1), whole("two % of\n% not alone\n", 4), whole("%%\nthree", 9)];
        assert_eq!(pieces(text, split, 100), expected);
    }

    #[test]
    fn empty_lines_and_files_split_too() {
        let text = "\u{feff}a\nb\n\n \n\nc\n";
        assert_eq!(pieces(text, Split::Line(String::new()), 100), [whole("a\nb\n", 1), whole("c\n", 6)]);
        assert_eq!(pieces(text, Split::Files, 100), [whole("a\nb\n\n \n\nc\n", 1)]);
        assert_eq!(pieces(" \n\n", Split::Files, 100), []);
        assert_eq!(pieces("", Split::Files, 100), []);
    }

    #[test]
    fn long_documents_come_in_pieces_cut_where_words_part() {
        let text = "alpha beta one\ngamma  delta\nepsilon\n%\nzeta";
        let all = pieces(text, Split::Line("%".into()), 16);
        let first: String = all.iter().take_while(|(_, ends, _)| !ends).map(|(text, ..)| text.as_str()).collect();
        assert_eq!(first + &all[all.len() - 2].0, "alpha beta one\ngamma  delta\nepsilon\n");
        assert_eq!(all.last(), Some(&whole("zeta", 5)));
        assert_eq!(all[0], ("alpha beta one\n".into(), false, 1));
        // No place but between characters.
        for (text, _, _) in pieces(&"\u{1f600}".repeat(50), Split::Files, 13) {
            assert!(text.chars().all(|c| c == '\u{1f600}'));
        }
        // A separator's look-alike in the middle of a line longer than a piece.
        let long = format!("{}%\nx\n", "y".repeat(16));
        let all = pieces(&long, Split::Line("%".into()), 16);
        assert_eq!(all.iter().map(|(text, ..)| text.as_str()).collect::<String>(), long);
        assert_eq!(all.iter().filter(|(_, ends, _)| *ends).count(), 1);
    }

    #[test]
    fn json_lines_are_documents() {
        let text = "{\"text\":\"a\\nb\",\"n\":1}\n\n{\"text\":\"  \"}\n{\"text\":\"c\"}";
        assert_eq!(pieces(text, Split::Json("text".into()), 100), [whole("a\nb", 1), whole("c", 4)]);
        let fault = |text: &str| {
            let input = Box::new(io::Cursor::new(text.as_bytes().to_vec()));
            let mut documents = Documents::new(Path::new("x.jsonl"), input, Split::Json("text".into()), 9).unwrap();
            loop {
                match documents.next() {
                    Ok(Some(_)) => (),
                    Ok(None) => panic!("no error"),
                    Err(error) => return error.to_string(),
                }
            }
        };
        assert_eq!(
            fault("{\"text\":\"a\"}\n{\"content\":\"b\"}\n"),
            "x.jsonl:2: no key \"text\"; name the text's key with --key, here are: content"
        );
        assert_eq!(fault("{\"text\":5}"), "x.jsonl:1: the value of \"text\" is no text");
        assert!(fault("plain").starts_with("x.jsonl:1: no object of JSON"));
    }

    /// A tokenizer's memory is a multiple of its text: no kind of file may give it all at once.
    #[test]
    fn no_piece_is_longer_than_a_piece() {
        let text: String = (0..2000).map(|number| format!("word {number}\n")).collect();
        let json = serde_json::json!({ "text": text }).to_string();
        let one_line = text.replace('\n', " ");
        for (content, split, lines) in [
            (text.as_str(), Split::Files, true),
            (one_line.as_str(), Split::Files, false),
            (json.as_str(), Split::Json("text".into()), false),
        ] {
            let all = pieces(content, split, 100);
            assert!(all.iter().all(|(text, ..)| text.len() <= 100 && !text.is_empty()));
            let whole: String = all.iter().map(|(text, ..)| text.as_str()).collect();
            assert_eq!(whole, if content == json { text.as_str() } else { content });
            assert_eq!(all.iter().filter(|(_, ends, _)| *ends).count(), 1);
            let last = all.last().unwrap();
            assert!(last.1 && if lines { last.2 > 1900 } else { last.2 == 1 }, "{last:?}");
        }
    }

    #[test]
    fn packed_files_are_told_by_their_kind() {
        let fault = |name: &str, start: &[u8]| {
            let input = Box::new(io::Cursor::new(start.to_vec()));
            Documents::new(Path::new(name), input, Split::Files, 9).err().unwrap().to_string()
        };
        let prepare = "FILE | palingenesis-worker prepare ...";
        let gzip = b"\x1f\x8b\x08\0";
        assert_eq!(fault("a.gz", gzip), format!("a.gz: is gzip, not text; unpack it: zcat {prepare} -"));
        // What comes out must not be taken for one document.
        let cure = format!("unpack it: zcat {prepare} --key KEY -");
        assert_eq!(fault("a.jsonl.gz", gzip), format!("a.jsonl.gz: is gzip, not text; {cure}"));
        assert_eq!(fault("a", b"PK\x03\x04"), "a: is a zip archive, not text; unpack it");
    }
}
