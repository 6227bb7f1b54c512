//! A port for a test's own ranks.

use std::net::TcpListener;

/// One that nobody has now, below those that the kernel gives to anybody: nobody takes it
/// before the test does.
pub fn free_port(address: &str) -> u16 {
    loop {
        let random: [u8; 2] = palingenesis::system::random::bytes().unwrap();
        let port = 20_000 + u16::from_ne_bytes(random) % 12_000;
        if TcpListener::bind((address, port)).is_ok() {
            return port;
        }
    }
}
