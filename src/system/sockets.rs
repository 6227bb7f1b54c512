//! TCP as the pre-flight needs it and std does not have it: a port without
//! SO_REUSEADDR, a connection that is only begun, one that ends with a reset, what has
//! not arrived, and waiting for many at a time.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Connections that the kernel keeps until they are accepted; it takes the smaller of this
/// and net.core.somaxconn.
const BACKLOG: libc::c_int = 65535;

/// A socket address as the kernel reads it.
enum Raw {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl Raw {
    fn new(address: SocketAddr) -> Raw {
        match address {
            SocketAddr::V4(address) => Raw::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: address.ip().to_bits().to_be() },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => Raw::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
        }
    }

    fn parts(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        match self {
            Raw::V4(address) => ((&raw const *address).cast(), size_of::<libc::sockaddr_in>() as libc::socklen_t),
            Raw::V6(address) => ((&raw const *address).cast(), size_of::<libc::sockaddr_in6>() as libc::socklen_t),
        }
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A TCP socket that never waits and is closed by exec.
fn socket(family: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes numbers only.
    let fd = checked(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: socket has just opened it, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set(fd: RawFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value lives through the call and has the length we say.
    let result = unsafe {
        libc::setsockopt(fd, level, option, (&raw const value).cast(), size_of::<libc::c_int>() as libc::socklen_t)
    };
    checked(result).map(drop)
}

/// Listens at this address; at `[::]` for IPv4 too. Without `reuse` it fails where
/// connections of a listener before are not over, as a program's own bind would that does
/// not ask for SO_REUSEADDR (std always does).
///
/// # Errors
/// What socket(2), bind(2) and listen(2) say.
pub fn listen(address: SocketAddr, reuse: bool) -> io::Result<TcpListener> {
    let socket = socket(if address.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET })?;
    let fd = socket.as_raw_fd();
    if address.is_ipv6() {
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)?;
    }
    if reuse {
        set(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    }
    let raw = Raw::new(address);
    let (pointer, length) = raw.parts();
    // SAFETY: the address lives through the call and has the length we say.
    checked(unsafe { libc::bind(fd, pointer, length) })?;
    // SAFETY: takes numbers only.
    checked(unsafe { libc::listen(fd, BACKLOG) })?;
    Ok(TcpListener::from(socket))
}

/// Begins to connect and does not wait. The socket is writable once it is decided;
/// `take_error` tells how.
///
/// # Errors
/// What connect(2) says at once.
pub fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(if to.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET })?;
    let raw = Raw::new(to);
    let (pointer, length) = raw.parts();
    // SAFETY: the address lives through the call and has the length we say.
    match checked(unsafe { libc::connect(socket.as_raw_fd(), pointer, length) }) {
        // Interrupted, it goes on all the same.
        Err(error) if !matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => Err(error),
        _ => Ok(TcpStream::from(socket)),
    }
}

/// The address of this node that the kernel would send from.
pub fn source(to: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if to.is_ipv6() { ([0u16; 8], 0).into() } else { ([0u8; 4], 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// How many bytes the other side's kernel has not said to have got.
///
/// # Errors
/// What tcp(7)'s SIOCOUTQ says.
pub fn unsent(socket: &TcpStream) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int, which lives through the call.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) })?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Lets a socket that listens keep fewer connections, for a test.
#[cfg(test)]
pub fn keep(socket: &TcpListener, backlog: libc::c_int) {
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::listen(socket.as_raw_fd(), backlog) }, 0);
}

/// Lets the kernel find out that the peer is gone without a word: asked when nothing was
/// heard for a third of `limit`, given up when nothing came back for all of it. What a
/// listener accepts has it from the listener, and TCP_NODELAY too.
pub fn watch(socket: &impl AsRawFd, limit: Duration) {
    let fd = socket.as_raw_fd();
    let number = |value: u128| libc::c_int::try_from(value).unwrap_or(libc::c_int::MAX);
    let third = number((limit.as_secs() / 3).max(1).into());
    // A kernel without one of them still has the others, and the pings.
    let _ = set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    let _ = set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    let _ = set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, third);
    let _ = set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, third);
    let _ = set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 2);
    let _ = set(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, number(limit.as_millis()));
}

/// Closes it with a reset, so that nothing of it stays: the port can be bound again at
/// once. What the peer has not got by now is lost.
pub fn reset(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the value lives through the call and has the length we say.
    unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        );
    }
    drop(stream);
}

/// In milliseconds, rounded up so that nobody asks again too early.
fn millis(limit: Duration) -> libc::c_int {
    libc::c_int::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
}

/// Waits until one of these is readable (or writable, where the second says so), has
/// failed or was hung up, or `limit` has passed. Which are.
pub fn wait(which: &[(BorrowedFd<'_>, bool)], limit: Duration) -> Vec<bool> {
    let asked = |(fd, write): &(BorrowedFd<'_>, bool)| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: if *write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
        revents: 0,
    };
    let mut polled: Vec<libc::pollfd> = which.iter().map(asked).collect();
    // SAFETY: the array is ours and as long as we say.
    let found = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis(limit)) };
    // Interrupted or failed: none is, and the caller looks at its deadlines.
    polled.iter().map(|polled| found > 0 && polled.revents != 0).collect()
}

/// Many descriptors that are waited for together.
#[derive(Debug)]
pub struct Many(OwnedFd);

impl Many {
    /// Of none.
    ///
    /// # Errors
    /// What epoll_create1(2) says.
    pub fn new() -> io::Result<Many> {
        // SAFETY: takes numbers only.
        let fd = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: epoll_create1 has just opened it, and nobody else owns it.
        Ok(Many(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn control(&self, what: libc::c_int, fd: BorrowedFd<'_>, token: u64, events: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors are open, and the event lives through the call.
        checked(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, fd.as_raw_fd(), &mut event) }).map(drop)
    }

    /// Adds one, which leaves when it is closed. `token` is said when it is readable.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN)
    }

    /// Whether it is waited for until it is writable too.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn writing(&self, fd: BorrowedFd<'_>, token: u64, write: bool) -> io::Result<()> {
        let events = if write { libc::EPOLLIN | libc::EPOLLOUT } else { libc::EPOLLIN };
        self.control(libc::EPOLL_CTL_MOD, fd, token, events)
    }

    /// Whether it is waited for until it is readable.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn reading(&self, fd: BorrowedFd<'_>, token: u64, read: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, if read { libc::EPOLLIN } else { 0 })
    }

    /// Readable when one of them is ready.
    pub fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }

    /// The tokens of those that are ready, 256 at most; does not wait.
    pub fn ready(&self, tokens: &mut Vec<u64>) {
        const ROOM: usize = 256;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; ROOM];
        // SAFETY: the array is ours and as long as we say.
        let found = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), ROOM as libc::c_int, 0) };
        tokens.clear();
        tokens.extend(events.iter().take(usize::try_from(found).unwrap_or(0)).map(|event| event.u64));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::os::fd::AsFd;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn any() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 0).into()
    }

    /// The other end of a connection that was begun.
    fn accepted(listener: &TcpListener) -> TcpStream {
        assert_eq!(wait(&[(listener.as_fd(), false)], SOON), [true]);
        listener.accept().unwrap().0
    }

    #[test]
    fn a_connection_is_begun_without_waiting_and_tells_how_it_went() {
        let listener = listen(any(), false).unwrap();
        let to = listener.local_addr().unwrap();
        let mut stream = connect(to).unwrap();
        let mut other = accepted(&listener);
        assert_eq!(wait(&[(stream.as_fd(), true)], SOON), [true]);
        assert!(stream.take_error().unwrap().is_none());
        assert_eq!(source(to), Some(Ipv4Addr::LOCALHOST.into()));
        // It does not wait for what is not there.
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        other.write_all(b"x").unwrap();
        assert_eq!(wait(&[(stream.as_fd(), false)], SOON), [true]);
        assert_eq!(stream.read(&mut [0; 9]).unwrap(), 1);
        drop((other, listener));
        let refused = connect(to).and_then(|stream| {
            wait(&[(stream.as_fd(), true)], SOON);
            stream.take_error()?.map_or(Ok(()), Err)
        });
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn after_a_reset_the_port_is_free_at_once() {
        let listener = listen(any(), false).unwrap();
        let at = listener.local_addr().unwrap();
        let mut stream = TcpStream::connect(at).unwrap();
        let other = accepted(&listener);
        drop(listener);
        // Its connection still has it.
        assert_eq!(listen(at, false).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        reset(other);
        assert!(listen(at, false).is_ok());
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn ipv4_comes_to_a_listener_of_ipv6() {
        match listen((Ipv6Addr::UNSPECIFIED, 0).into(), false) {
            Ok(listener) => {
                let port = listener.local_addr().unwrap().port();
                assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
            }
            Err(error) => eprintln!("SKIPPED: no IPv6 on this machine: {error}"),
        }
    }

    /// <https://man7.org/linux/man-pages/man7/tcp.7.html>: TCP_USER_TIMEOUT in milliseconds.
    #[test]
    fn what_is_accepted_is_watched_as_its_listener_is() {
        let listener = listen(any(), false).unwrap();
        watch(&listener, Duration::from_secs(15));
        let _stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = accepted(&listener);
        assert!(other.nodelay().unwrap());
        for (level, option, expected) in [
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 15_000),
        ] {
            let mut value: libc::c_int = 0;
            let mut length = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: the kernel writes one int, which is ours.
            let result =
                unsafe { libc::getsockopt(other.as_raw_fd(), level, option, (&raw mut value).cast(), &mut length) };
            assert_eq!((result, value), (0, expected), "option {option}");
        }
    }

    #[test]
    fn of_many_those_that_are_ready_are_named() {
        let many = Many::new().unwrap();
        let listener = listen(any(), false).unwrap();
        many.add(listener.as_fd(), 7).unwrap();
        let mut tokens = vec![1];
        many.ready(&mut tokens);
        assert!(tokens.is_empty(), "{tokens:?}");
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(wait(&[(many.fd(), false)], SOON), [true]);
        many.ready(&mut tokens);
        assert_eq!(tokens, [7]);
        many.reading(listener.as_fd(), 7, false).unwrap();
        many.ready(&mut tokens);
        assert!(tokens.is_empty(), "{tokens:?}");
        many.add(stream.as_fd(), 8).unwrap();
        many.writing(stream.as_fd(), 8, true).unwrap();
        many.ready(&mut tokens);
        assert_eq!(tokens, [8]);
        drop(stream);
        many.ready(&mut tokens);
        assert!(tokens.is_empty(), "{tokens:?}");
    }
}
