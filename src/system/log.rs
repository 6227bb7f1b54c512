//! Lines to the node's log, by the datagram socket that syslogd or journald
//! listens on. Nothing is kept open and nothing is waited for: what cannot be
//! written at once is lost.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;

use log::{Level, LevelFilter, Log, Metadata, Record};
use syslog::{Facility, LogFormat, Logger, LoggerBackend, Severity};

/// Where syslogd listens (syslog(3)).
const SOCKET: &str = "/dev/log";
/// The program's name in the log.
const IDENT: &str = "palingenesis";

/// `<priority>ident[pid]: text`, as syslog(3) writes it but for the time, which
/// syslogd adds: that of the syslog crate is UTC, where local time is meant.
struct Format;

impl LogFormat<&str> for Format {
    fn format<W: Write>(&self, writer: &mut W, severity: Severity, message: &str) -> syslog::Result<()> {
        let priority = Facility::LOG_DAEMON as u8 | severity as u8;
        // One write_fmt is one datagram.
        write!(writer, "<{priority}>{IDENT}[{}]: {message}", std::process::id()).map_err(syslog::Error::Write)
    }
}

/// The logger behind log's macros. Without state, so that nothing is left when
/// Slurm unloads us.
struct ToSyslog;

impl Log for ToSyslog {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        let text = record.args().to_string();
        // No log, or a full one: nobody is there to be told.
        let _ = socket().map(|socket| {
            let mut logger = Logger::new(LoggerBackend::Unix(socket), Format);
            match record.level() {
                Level::Error => logger.err(text.as_str()),
                Level::Warn => logger.warning(text.as_str()),
                Level::Info => logger.info(text.as_str()),
                Level::Debug | Level::Trace => logger.debug(text.as_str()),
            }
        });
    }

    fn flush(&self) {}
}

/// Not the syslog crate's own, which waits where the log is full.
fn socket() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.connect(SOCKET)?;
    Ok(socket)
}

/// Writes one line as an error or for information.
pub fn write(error: bool, text: &str) {
    static LOGGER: ToSyslog = ToSyslog;
    // It is ours already from the second line on.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(LevelFilter::Info);
    if error { log::error!("{text}") } else { log::info!("{text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_what_syslog_3_writes() {
        let mut line = Vec::new();
        Format.format(&mut line, Severity::LOG_ERR, "text").unwrap();
        // Facility daemon is 3, severity err is 3 (syslog.h): 3 * 8 + 3.
        assert_eq!(String::from_utf8(line).unwrap(), format!("<27>palingenesis[{}]: text", std::process::id()));
    }
}
