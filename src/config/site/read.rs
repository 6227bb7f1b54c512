//! Opens the site file so that nothing that may lie there can hold or mislead a
//! root daemon.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};

use super::SiteError;

/// The largest site file in bytes; one that is written by hand is far smaller.
pub const LARGEST: u64 = 256 * 1024;

/// A file that can be read.
#[derive(Debug)]
pub struct Found {
    /// What stands in it.
    pub text: String,
    /// Whether root alone can change it.
    pub trusted: Result<(), SiteError>,
    /// What keeps users from reading it; srun reads it as its user.
    pub hidden: Option<String>,
}

/// The file's text; `None` where there is none.
///
/// # Errors
/// When it cannot be read, is no text, or may be written by others than root: what
/// stands in it is set in every user's jobs
/// (<https://github.com/qiskit-community/spank-plugins/issues/72>).
pub fn load(file: &str) -> Result<Option<String>, SiteError> {
    let found = look(file)?;
    found.map(|found| found.trusted.map(|()| found.text)).transpose()
}

/// The file, whoever may write it; `None` where there is none.
///
/// # Errors
/// When it cannot be read or is no text.
pub fn look(file: &str) -> Result<Option<Found>, SiteError> {
    let wrong = |why: String| SiteError::of_file(file, why);
    // Without O_NONBLOCK a fifo holds whoever opens it.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(file);
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let cure = "every user must be able to read it (chmod a+r, and a+x for its directories)";
            return Err(wrong(format!("cannot be opened: {}; {cure}", reason(&error))));
        }
        Err(error) => return Err(wrong(format!("cannot be opened: {}", reason(&error)))),
    };
    let data = opened.metadata().map_err(|error| wrong(format!("cannot be looked at: {}", reason(&error))))?;
    check(&data).map_err(wrong)?;
    let trusted = trust(&data).map_err(wrong);
    let mode = data.mode() & 0o7777;
    let hidden = (mode & 0o004 == 0).then(|| {
        format!("{file} is not readable by all (mode {mode:04o}): whoever cannot read it is refused; chmod a+r")
    });
    let text = text(opened).map_err(wrong)?;
    Ok(Some(Found { text, trusted, hidden }))
}

fn check(data: &Metadata) -> Result<(), String> {
    let kind = data.file_type();
    if kind.is_dir() {
        return Err("is a directory; it must be a file".into());
    }
    if !kind.is_file() {
        let what = if kind.is_fifo() { "a fifo" } else { "no regular file" };
        return Err(format!("is {what}; it must be a regular file"));
    }
    if data.len() > LARGEST {
        return Err(format!("is {} bytes long; {LARGEST} are the most", data.len()));
    }
    Ok(())
}

fn trust(data: &Metadata) -> Result<(), String> {
    if data.uid() != 0 {
        return Err(format!("is writable by others than root: it belongs to user {} (chown root)", data.uid()));
    }
    if data.mode() & 0o022 != 0 {
        return Err(format!("is writable by others than root (mode {:04o}; chmod go-w)", data.mode() & 0o7777));
    }
    Ok(())
}

fn text(opened: File) -> Result<String, String> {
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    opened.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {}", reason(&error)))?;
    if bytes.len() as u64 > LARGEST {
        return Err(format!("is longer than {LARGEST} bytes"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count() + 1;
        format!("is not UTF-8 in line {line}")
    })
}

/// The system's words without std's number.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}
