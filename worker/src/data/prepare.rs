//! `palingenesis-worker prepare`: text files become a directory of token shards. It is made
//! under another name beside its place and renamed when all of it is on the disk, so that a
//! directory of that name is always whole; nothing is ever overwritten.

use std::fmt;
use std::fs;
use std::io::{self as std_io, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;

use super::dataset::{ABOUT, About, ShardAbout, Source};
use super::documents::{Documents, Piece, Split, named_json_lines};
use super::encode::Encoder;
use super::shard::{MOST_TOKENS, Width, Writer, sync_directory};
use super::{DataError, Result, io, wrong};

/// Text that is tokenized at once; bounds the memory.
const ROUND: usize = 8 << 20;

/// Makes token shards of text
///
/// Texts are UTF-8, a file is one document unless --split says otherwise; of *.jsonl each
/// line is one. After each document comes the token that ends texts.
#[derive(Debug, Clone, clap::Args)]
pub struct PrepareArgs {
    /// The directory to make, data.path of the configuration
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// A Hugging Face tokenizer.json, or the directory that has it
    #[arg(long, value_name = "FILE", required_unless_present = "bytes", conflicts_with = "bytes")]
    pub tokenizer: Option<PathBuf>,
    /// A token for each byte: 257 in all, for trials
    #[arg(long)]
    pub bytes: bool,
    /// The token that ends texts [default: the eos_token of tokenizer_config.json]
    #[arg(long, value_name = "TOKEN", conflicts_with = "bytes")]
    pub eos: Option<String>,
    /// Lines of TEXT alone separate documents ('%' in fortunes); '' is for empty lines
    #[arg(long, value_name = "TEXT")]
    pub split: Option<String>,
    /// The key of a document's text in *.jsonl [default: text]; the standard input, too, is then lines of JSON
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// The most tokens of a shard
    #[arg(long, value_name = "N", default_value_t = 100_000_000,
          value_parser = clap::value_parser!(u64).range(1..=MOST_TOKENS))]
    pub shard_tokens: u64,
    /// Text files; - is the standard input
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// What was made.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The directory.
    pub dir: PathBuf,
    /// Tokens in all shards, ends of text among them.
    pub tokens: u64,
    /// Documents; those of blanks only are left out.
    pub documents: u64,
    /// Bytes of text read.
    pub bytes: u64,
    /// Files of tokens.
    pub shards: usize,
    /// Ids are below this: the model's vocab_size must be at least as large.
    pub vocab: usize,
    /// How long it took.
    pub took: Duration,
    /// Unfinished directories of earlier runs, which were killed.
    pub left_over: Vec<PathBuf>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} tokens of {} documents in {} shard{}, {:.2} bytes a token, vocabulary {}, {:.1} s",
            self.dir.display(),
            self.tokens,
            self.documents,
            self.shards,
            if self.shards == 1 { "" } else { "s" },
            self.bytes as f64 / self.tokens.max(1) as f64,
            self.vocab,
            self.took.as_secs_f64()
        )?;
        for path in &self.left_over {
            write!(f, "\nunfinished, of an earlier run: {}; remove it unless one still runs", path.display())?;
        }
        Ok(())
    }
}

/// Makes the directory.
///
/// # Errors
/// It exists already, a file cannot be read or is no text, the tokenizer is none, or the disk
/// is full. Nothing is left behind.
pub fn run(args: &PrepareArgs) -> Result<Summary> {
    let began = Instant::now();
    let out = std::path::absolute(&args.out).map_err(io("cannot be made", &args.out))?;
    let (Some(parent), Some(name)) = (out.parent(), out.file_name()) else {
        return wrong(format!("--out {}: no name of a directory", args.out.display()));
    };
    if fs::read_dir(&out).map_or(out.symlink_metadata().is_ok(), |mut entries| entries.next().is_some()) {
        return exists(&out);
    }
    let encoder = match &args.tokenizer {
        Some(path) => Encoder::open(path, args.eos.as_deref())?,
        None => Encoder::bytes(),
    };
    fs::create_dir_all(parent).map_err(io("cannot be made", parent))?;
    let prefix = format!(".{}.tmp-", name.to_string_lossy());
    let left_over = siblings(parent, &prefix);
    let work = Work::begin(parent.join(format!("{prefix}{}", std::process::id())))?;
    let mut shards = Shards::new(&work.dir, Width::of(encoder.vocab), args.shard_tokens);
    let mut about = About::new(encoder.about(), encoder.vocab, encoder.eos);
    let bar = progress(&args.files);
    for file in &args.files {
        about.sources.push(tokenize(file, split_of(file, args), &encoder, &mut shards, &bar)?);
    }
    bar.finish_and_clear();
    about.shards = shards.finish()?;
    about.tokens = about.shards.iter().map(|shard| shard.tokens).sum();
    about.documents = about.sources.iter().map(|source| source.documents).sum();
    if about.tokens == 0 {
        return wrong("no text in any of the files; nothing was made");
    }
    for (name, content) in encoder.files() {
        write_file(&work.dir.join(name), content)?;
    }
    let mut text = serde_json::to_vec_pretty(&about).map_err(|error| DataError::Wrong(error.to_string()))?;
    text.push(b'\n');
    write_file(&work.dir.join(ABOUT), &text)?;
    work.commit(&out)?;
    Ok(Summary {
        dir: out,
        tokens: about.tokens,
        documents: about.documents,
        bytes: about.sources.iter().map(|source| source.bytes).sum(),
        shards: about.shards.len(),
        vocab: about.vocab,
        took: began.elapsed(),
        left_over,
    })
}

fn exists<T>(out: &Path) -> Result<T> {
    wrong(format!("--out {}: exists already and is never overwritten; name another or remove it", out.display()))
}

/// What separates the documents of a file.
fn split_of(file: &Path, args: &PrepareArgs) -> Split {
    let json = named_json_lines(file) || (file == Path::new("-") && args.key.is_some());
    match &args.split {
        _ if json => Split::Json(args.key.clone().unwrap_or_else(|| "text".into())),
        Some(line) => Split::Line(line.trim_ascii_end().to_string()),
        None => Split::Files,
    }
}

/// All documents of a file into the shards, in their order, whatever the threads do.
fn tokenize(file: &Path, split: Split, encoder: &Encoder, shards: &mut Shards, bar: &ProgressBar) -> Result<Source> {
    let mut documents = Documents::open(file, split)?;
    let (mut count, mut told) = (0, 0);
    loop {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut bytes = 0;
        while bytes < ROUND {
            let Some(piece) = documents.next()? else { break };
            // What a piece takes besides its text counts, too.
            bytes += piece.text.len() + 64;
            pieces.push(piece);
        }
        if pieces.is_empty() {
            break;
        }
        let encoded: Vec<Result<Vec<u32>>> = pieces
            .par_iter()
            .with_min_len(16.min(pieces.len() / 4 + 1))
            .map(|piece| encoder.encode(file, piece))
            .collect();
        for ids in encoded {
            shards.push(&ids?)?;
        }
        count += pieces.iter().filter(|piece| piece.ends).count() as u64;
        bar.inc(documents.bytes - told);
        told = documents.bytes;
    }
    Ok(Source { file: file.display().to_string(), bytes: documents.bytes, documents: count })
}

/// On a terminal only: indicatif draws nowhere else.
fn progress(files: &[PathBuf]) -> ProgressBar {
    let bytes: Option<u64> =
        files.iter().map(|file| fs::metadata(file).ok().filter(|data| data.is_file()).map(|data| data.len())).sum();
    let bar = bytes.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let template = "{wide_bar} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
    if let (Some(_), Ok(style)) = (bytes, ProgressStyle::with_template(template)) {
        bar.set_style(style);
    }
    bar
}

/// Directories that a run which was killed left beside its target.
fn siblings(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

fn write_file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || -> std_io::Result<()> {
        let mut file = fs::File::create_new(path)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write().map_err(io("cannot be written", path))
}

/// The directory until it is whole; goes away with its contents unless committed.
struct Work {
    dir: PathBuf,
    committed: bool,
}

impl Work {
    fn begin(dir: PathBuf) -> Result<Work> {
        fs::create_dir(&dir).map_err(io("cannot be made", &dir))?;
        Ok(Work { dir, committed: false })
    }

    fn commit(mut self, out: &Path) -> Result<()> {
        sync_directory(&self.dir)?;
        match fs::rename(&self.dir, out) {
            Ok(()) => self.committed = true,
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory
                ) =>
            {
                return exists(out);
            }
            Err(error) => return Err(io("cannot get its name", out)(error)),
        }
        out.parent().map_or(Ok(()), sync_directory)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.committed {
            // The reason why it is not needed is told; another one would hide it.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Files of tokens, one after the other.
struct Shards<'a> {
    dir: &'a Path,
    width: Width,
    most: u64,
    open: Option<Writer>,
    done: Vec<ShardAbout>,
}

impl Shards<'_> {
    fn new(dir: &Path, width: Width, most: u64) -> Shards<'_> {
        Shards { dir, width, most, open: None, done: Vec::new() }
    }

    fn name(&self) -> String {
        format!("tokens-{:05}.bin", self.done.len())
    }

    /// Appends; a document may go on in the next file.
    fn push(&mut self, mut ids: &[u32]) -> Result<()> {
        while !ids.is_empty() {
            let writer = match &mut self.open {
                Some(writer) => writer,
                None => {
                    let path = self.dir.join(self.name());
                    self.open.insert(Writer::create(&path, self.width)?)
                }
            };
            let space = usize::try_from(self.most - writer.tokens()).unwrap_or(usize::MAX);
            let (now, later) = ids.split_at(space.min(ids.len()));
            writer.push(now)?;
            if writer.tokens() == self.most {
                self.close()?;
            }
            ids = later;
        }
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        if let Some(writer) = self.open.take() {
            let file = self.name();
            let path = self.dir.join(&file);
            let done = writer.finish()?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o444))
                .map_err(io("cannot be made read-only", &path))?;
            self.done.push(ShardAbout { file, tokens: done.tokens, crc32: format!("{:08x}", done.crc32) });
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<ShardAbout>> {
        self.close()?;
        Ok(self.done)
    }
}
