//! getaddrinfo(3), the resolver the training program will use too. It has no
//! deadline: call it in a child ([`super::child`]).

use std::net::ToSocketAddrs;

/// The addresses of `host`, separated by blanks, or `!` and the reason.
pub fn lookup(host: &str) -> Vec<u8> {
    // std calls getaddrinfo for a name with a port.
    match (host, 0u16).to_socket_addrs() {
        Ok(addresses) => {
            let words: Vec<String> = addresses.map(|address| address.ip().to_string()).collect();
            words.join(" ").into_bytes()
        }
        Err(error) => {
            let text = error.to_string();
            let reason = text.strip_prefix("failed to lookup address information: ").unwrap_or(&text);
            format!("!{reason}").into_bytes()
        }
    }
}
