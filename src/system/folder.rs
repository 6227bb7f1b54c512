//! Directories by descriptor, one path component at a time: nothing is followed
//! that the caller has not looked at. Calls may wait as long as a file server
//! does; run them in a child ([`super::child`]).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// An open directory; not necessarily one that may be read.
#[derive(Debug)]
pub struct Folder(OwnedFd);

/// What a name in a directory is.
#[derive(Debug)]
pub enum Found {
    /// A directory.
    Folder(Folder),
    /// A symbolic link.
    Link {
        /// Whose it is.
        owner: u32,
        /// Where it leads.
        target: String,
    },
    /// Neither.
    Other,
}

/// A directory's owner and rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The device of its file system.
    pub device: u64,
    /// Whose it is.
    pub owner: u32,
    /// The permission bits.
    pub mode: u32,
}

/// What a file system says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// `f_type` of statfs(2).
    pub kind: u64,
    /// Bytes that the user may still write.
    pub free: u64,
    /// Not one byte more; a file system that counts none is never full.
    pub no_space: bool,
    /// Not one file more; likewise.
    pub no_inodes: bool,
    /// Mounted read-only.
    pub read_only: bool,
    /// Mounted noexec.
    pub no_exec: bool,
}

fn c(name: &str) -> io::Result<CString> {
    CString::new(name).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn done(outcome: libc::c_int) -> io::Result<()> {
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn opened(descriptor: libc::c_int) -> io::Result<OwnedFd> {
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just opened it, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn openat(at: libc::c_int, name: &str, flags: libc::c_int) -> io::Result<OwnedFd> {
    let name = c(name)?;
    // SAFETY: a C string that outlives the call.
    opened(unsafe { libc::openat(at, name.as_ptr(), flags | libc::O_CLOEXEC, 0o600) })
}

/// Statistics of an open file of any kind.
fn stat(descriptor: &OwnedFd) -> io::Result<libc::stat> {
    // SAFETY: all zeros are a valid stat.
    let mut data: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `data` has room for the answer.
    done(unsafe { libc::fstat(descriptor.as_raw_fd(), &raw mut data) })?;
    Ok(data)
}

impl From<std::fs::File> for Folder {
    fn from(folder: std::fs::File) -> Folder {
        Folder(folder.into())
    }
}

impl Folder {
    /// `/`.
    ///
    /// # Errors
    /// What open says.
    pub fn root() -> io::Result<Folder> {
        Ok(Folder(openat(libc::AT_FDCWD, "/", libc::O_PATH | libc::O_DIRECTORY)?))
    }

    /// What `name`, one component or `..`, is. A link is looked at, not followed.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn find(&self, name: &str) -> io::Result<Found> {
        let at = self.0.as_raw_fd();
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        // O_DIRECTORY, because a file system mounted on demand is mounted for it only.
        let error = match openat(at, name, flags | libc::O_DIRECTORY) {
            Ok(folder) => return Ok(Found::Folder(Folder(folder))),
            Err(error) => error,
        };
        if !matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP)) {
            return Err(error);
        }
        let entry = openat(at, name, flags)?;
        let data = stat(&entry)?;
        if data.st_mode & libc::S_IFMT != libc::S_IFLNK {
            return Ok(Found::Other);
        }
        let mut target = [0u8; libc::PATH_MAX as usize];
        // SAFETY: an empty C string means the link itself; the buffer is as long as we say.
        let length =
            unsafe { libc::readlinkat(entry.as_raw_fd(), c"".as_ptr(), target.as_mut_ptr().cast(), target.len()) };
        let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
        let target = String::from_utf8(target[..length].to_vec()).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Found::Link { owner: data.st_uid, target })
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// What mkdir says.
    pub fn make(&self, name: &str, mode: u32) -> io::Result<()> {
        let name = c(name)?;
        // SAFETY: an open descriptor and a C string.
        done(unsafe { libc::mkdirat(self.0.as_raw_fd(), name.as_ptr(), mode) })
    }

    /// Owner and rights.
    ///
    /// # Errors
    /// What fstat says.
    pub fn status(&self) -> io::Result<Status> {
        let data = stat(&self.0)?;
        Ok(Status { device: data.st_dev, owner: data.st_uid, mode: data.st_mode & 0o7777 })
    }

    /// What its file system says of itself.
    ///
    /// # Errors
    /// What statfs says.
    pub fn room(&self) -> io::Result<Room> {
        // SAFETY: all zeros are a valid statfs.
        let mut data: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and `data` has room for the answer.
        done(unsafe { libc::fstatfs(self.0.as_raw_fd(), &raw mut data) })?;
        // SAFETY: all zeros are a valid statvfs.
        let mut flags: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        done(unsafe { libc::fstatvfs(self.0.as_raw_fd(), &raw mut flags) })?;
        let block = flags.f_frsize.max(1);
        Ok(Room {
            // 32 bits, some of which libc's type shows as a sign.
            kind: data.f_type as u64 & 0xffff_ffff,
            free: flags.f_bavail.saturating_mul(block),
            no_space: flags.f_blocks > 0 && flags.f_bavail == 0,
            no_inodes: flags.f_files > 0 && flags.f_favail == 0,
            read_only: flags.f_flag & libc::ST_RDONLY != 0,
            no_exec: flags.f_flag & libc::ST_NOEXEC != 0,
        })
    }

    /// Whether this process may make files here, without trying.
    ///
    /// # Errors
    /// Why not.
    pub fn may_write(&self) -> io::Result<()> {
        // SAFETY: an open descriptor and a C string.
        done(unsafe { libc::faccessat(self.0.as_raw_fd(), c".".as_ptr(), libc::W_OK | libc::X_OK, 0) })
    }

    /// Makes a file that must not exist and writes one block to it. It is left
    /// there.
    ///
    /// # Errors
    /// What open, write and fsync say; a file that could be made is removed.
    pub fn write_file(&self, name: &str) -> io::Result<()> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let file = openat(self.0.as_raw_fd(), name, flags)?;
        let block = [0u8; 4096];
        // SAFETY: the buffer is as long as we say.
        let written = unsafe { libc::write(file.as_raw_fd(), block.as_ptr().cast(), block.len()) };
        let outcome = match usize::try_from(written) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(written) if written < block.len() => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            // A file server tells only now that there is no room.
            // SAFETY: an open descriptor.
            Ok(_) => match done(unsafe { libc::fsync(file.as_raw_fd()) }) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                outcome => outcome,
            },
        };
        if outcome.is_err() {
            let _ = self.remove(name);
        }
        outcome
    }

    /// Makes an empty file that must not exist.
    ///
    /// # Errors
    /// What open says.
    pub fn make_file(&self, name: &str) -> io::Result<()> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        openat(self.0.as_raw_fd(), name, flags).map(drop)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// What unlink says.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let name = c(name)?;
        // SAFETY: an open descriptor and a C string.
        done(unsafe { libc::unlinkat(self.0.as_raw_fd(), name.as_ptr(), 0) })
    }

    /// Links the file `name` into `other`, under the same name.
    ///
    /// # Errors
    /// What link says.
    pub fn link(&self, name: &str, other: &Folder) -> io::Result<()> {
        let name = c(name)?;
        // SAFETY: two open descriptors and a C string.
        done(unsafe { libc::linkat(self.0.as_raw_fd(), name.as_ptr(), other.0.as_raw_fd(), name.as_ptr(), 0) })
    }
}

/// The user this process acts as.
pub fn user() -> u32 {
    // SAFETY: geteuid has no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

/// A file name that nobody can foresee.
///
/// # Errors
/// What getrandom says.
pub fn unforeseen_name() -> io::Result<String> {
    let hex: String = super::random::bytes::<12>()?.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!(".palingenesis-{hex}"))
}
