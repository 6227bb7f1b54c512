//! Directories by descriptor, one path component at a time: nothing is followed
//! that the caller has not looked at. Calls may wait as long as a file server
//! does; run them in a child ([`super::child`]).

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
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
    /// Its number on that.
    pub inode: u64,
    /// Whose it is.
    pub owner: u32,
    /// The permission bits.
    pub mode: u32,
}

/// A file as its directory names it; a link is not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Whether it is a regular file.
    pub regular: bool,
    /// Its number on its file system.
    pub inode: u64,
    /// Whose it is.
    pub owner: u32,
    /// Whether no other name leads to it.
    pub alone: bool,
    /// Its length.
    pub size: u64,
    /// When it was written, by the clock of whoever keeps it, in seconds.
    pub written: i64,
}

impl Entry {
    fn of(data: &libc::stat) -> Entry {
        Entry {
            regular: data.st_mode & libc::S_IFMT == libc::S_IFREG,
            inode: data.st_ino,
            owner: data.st_uid,
            alone: data.st_nlink == 1,
            size: u64::try_from(data.st_size).unwrap_or_default(),
            written: data.st_mtime,
        }
    }
}

/// What a file system says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// `f_type` of statfs(2).
    pub kind: u64,
    /// Bytes that the user may still write.
    pub free: u64,
    /// All bytes, free or not.
    pub size: u64,
    /// Files that the user may still make, and all; 0 and 0 where none are counted.
    pub files: (u64, u64),
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

/// The names of `linux_dirent64`s: inode and offset of 8 bytes each, length of 2, type of
/// 1, name up to a NUL.
fn entries(bytes: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = bytes;
    while let Some(length) = rest.get(16..18) {
        let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
        let Some(name) = rest.get(19..length) else { break };
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        names.extend(std::str::from_utf8(name).ok().filter(|name| !matches!(*name, "." | "..")).map(String::from));
        rest = &rest[length..];
    }
    names
}

impl From<File> for Folder {
    fn from(folder: File) -> Folder {
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

    /// A directory by its path, every link in it followed: for one that the user named.
    ///
    /// # Errors
    /// What open says.
    pub fn at(path: &str) -> io::Result<Folder> {
        Ok(Folder(openat(libc::AT_FDCWD, path, libc::O_PATH | libc::O_DIRECTORY)?))
    }

    /// What it is, by whatever name: its file system's number and its own there.
    ///
    /// # Errors
    /// What fstat says.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let data = stat(&self.0)?;
        Ok((data.st_dev, data.st_ino))
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
        Ok(Status { device: data.st_dev, inode: data.st_ino, owner: data.st_uid, mode: data.st_mode & 0o7777 })
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
            size: flags.f_blocks.saturating_mul(block),
            files: (flags.f_favail, flags.f_files),
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

    /// Makes a file that must not exist, for its owner alone, with this content, and
    /// waits until it is where it is kept. What its directory says of it then.
    ///
    /// # Errors
    /// What open, write and fsync say; a file that could be made is removed.
    pub fn write_new(&self, name: &str, content: &[u8]) -> io::Result<Entry> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let mut file = File::from(openat(self.0.as_raw_fd(), name, flags)?);
        let written = file.write_all(content).and_then(|()| match file.sync_all() {
            // Some file systems have nothing to wait for.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            outcome => outcome,
        });
        let entry = written.and_then(|()| stat(&OwnedFd::from(file))).map(|data| Entry::of(&data));
        if entry.is_err() {
            let _ = self.remove(name);
        }
        entry
    }

    /// What `name` is, without opening it.
    ///
    /// # Errors
    /// What fstatat says.
    pub fn entry(&self, name: &str) -> io::Result<Entry> {
        let name = c(name)?;
        // SAFETY: all zeros are a valid stat.
        let mut data: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: an open descriptor, a C string, and room for the answer.
        done(unsafe { libc::fstatat(self.0.as_raw_fd(), name.as_ptr(), &raw mut data, libc::AT_SYMLINK_NOFOLLOW) })?;
        Ok(Entry::of(&data))
    }

    /// The first `most` bytes of a regular file. Nothing else is waited for or read: a
    /// FIFO, a device, a link.
    ///
    /// # Errors
    /// What open and read say.
    pub fn read_file(&self, name: &str, most: u64) -> io::Result<(Entry, Vec<u8>)> {
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        if !self.entry(name)?.regular {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = openat(self.0.as_raw_fd(), name, flags)?;
        let entry = Entry::of(&stat(&file)?);
        if !entry.regular {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = Vec::new();
        File::from(file).take(most).read_to_end(&mut bytes)?;
        Ok((entry, bytes))
    }

    /// The names in it, in no order, `most` at the most. For small directories of our own.
    ///
    /// # Errors
    /// What open and getdents say.
    pub fn names(&self, most: usize) -> io::Result<Vec<String>> {
        let open = openat(self.0.as_raw_fd(), ".", libc::O_RDONLY | libc::O_DIRECTORY)?;
        let mut names = Vec::new();
        // u64, for the kernel's entries begin at multiples of 8.
        let mut buffer = [0u64; 1024];
        while names.len() < most {
            let size = std::mem::size_of_val(&buffer);
            // SAFETY: the buffer is as long as we say.
            let got = unsafe { libc::syscall(libc::SYS_getdents64, open.as_raw_fd(), buffer.as_mut_ptr(), size) };
            let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
            if got == 0 {
                break;
            }
            let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).take(got).collect();
            names.extend(entries(&bytes));
        }
        names.truncate(most);
        Ok(names)
    }

    /// Asks the file server what has become of this directory, so that names which it has
    /// got from other nodes are found, and those looked for in vain are looked for again:
    /// a client drops what it knows of a directory's names once it sees that the directory
    /// has changed (nfs(5), "Directory entry caching"), and both calls make it look
    /// (statx(2), `AT_STATX_FORCE_SYNC`; nfs(5), "Close-to-open cache consistency").
    pub fn refresh(&self) {
        // SAFETY: all zeros are a valid statx.
        let mut data: libc::statx = unsafe { std::mem::zeroed() };
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC;
        // Not by libc's name for it, which old ones have not.
        // SAFETY: an open descriptor, a C string, and room for the answer.
        unsafe {
            libc::syscall(
                libc::SYS_statx,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                flags,
                libc::STATX_BASIC_STATS,
                &raw mut data,
            )
        };
        let _ = openat(self.0.as_raw_fd(), ".", libc::O_RDONLY | libc::O_DIRECTORY);
    }

    /// The descriptor's number, for /proc/self/fdinfo.
    pub fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Makes a file that must not exist, with this text, for everybody to read.
    ///
    /// # Errors
    /// What open and write say.
    pub fn write_text(&self, name: &str, text: &str) -> io::Result<()> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let name = c(name)?;
        // SAFETY: an open descriptor and a C string.
        let file = opened(unsafe { libc::openat(self.0.as_raw_fd(), name.as_ptr(), flags, 0o644) })?;
        File::from(file).write_all(text.as_bytes())
    }

    /// Writes a text over the beginning of a regular file that has this name alone: another
    /// would be a file from elsewhere, linked here by whoever may write here too.
    ///
    /// # Errors
    /// What open and write say.
    pub fn write_over(&self, name: &str, text: &str) -> io::Result<()> {
        let file = openat(self.0.as_raw_fd(), name, libc::O_WRONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
        let entry = Entry::of(&stat(&file)?);
        if !(entry.regular && entry.alone) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        File::from(file).write_all(text.as_bytes())
    }

    /// The beginning of a regular file.
    ///
    /// # Errors
    /// What open and read say.
    pub fn read(&self, name: &str, longest: u64) -> io::Result<Vec<u8>> {
        let file = openat(self.0.as_raw_fd(), name, libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
        if stat(&file)?.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut text = Vec::new();
        File::from(file).take(longest).read_to_end(&mut text)?;
        Ok(text)
    }

    /// Gives an entry another name in the same directory.
    ///
    /// # Errors
    /// What rename says.
    pub fn rename(&self, name: &str, other: &str) -> io::Result<()> {
        let (name, other, at) = (c(name)?, c(other)?, self.0.as_raw_fd());
        // SAFETY: an open descriptor and two C strings.
        done(unsafe { libc::renameat(at, name.as_ptr(), at, other.as_ptr()) })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// What unlinkat says.
    pub fn remove_folder(&self, name: &str) -> io::Result<()> {
        let name = c(name)?;
        // SAFETY: an open descriptor and a C string.
        done(unsafe { libc::unlinkat(self.0.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) })
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
