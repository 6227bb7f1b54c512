//! What std does not offer of sockets, each behind a safe function. Nothing here waits.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Connects to a Unix socket by its name in the abstract namespace. Where its queue is
/// full that is an error: std's connect would wait.
///
/// # Errors
/// What socket(2) and connect(2) say.
pub(super) fn connect(name: &[u8]) -> io::Result<UnixStream> {
    // SAFETY: all bytes zero are a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // An abstract name begins with a zero.
    let Some(path) = address.sun_path[1..].get_mut(..name.len()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    path.iter_mut().zip(name).for_each(|(to, byte)| *to = *byte as libc::c_char);
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes numbers only.
    let fd = checked(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: socket has just opened it, and nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the address lives through the call and is at least as long as we say.
    checked(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length as libc::socklen_t) })?;
    Ok(UnixStream::from(fd))
}

/// The user at the other end of a Unix socket.
///
/// # Errors
/// What getsockopt(2) says.
pub(super) fn user(socket: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most as many bytes as we say, into what is ours.
    checked(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    })?;
    Ok(peer.uid)
}

/// How many bytes the kernel may hold for the other end; it takes less where the system's
/// limit (net.core.wmem_max) is lower.
pub(super) fn room(socket: &impl AsFd, bytes: usize) {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: the value lives through the call and has the length we say.
    unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
    }
}
