//! Rank 0's bytes on all ranks, such as the unique id by which they make an NCCL
//! communicator: for programs that have no store of their own. The meeting is the
//! pre-flight's, with a rank in a node's place, and nothing is asked in it. Blocks; no
//! thread, no wait without a deadline, nothing is printed.

use std::net::IpAddr;
use std::time::Duration;

use super::key::Key;
use super::preflight::rounds::done;
use super::preflight::{self, Leader, Next, Outcome, Ranks, Terms, Unreachable, Waiting, Work};

/// The most bytes: an NCCL unique id has 128.
pub const LONGEST: usize = 64 << 10;

/// How many absent ranks are named.
const NAMED: usize = 8;

/// Who exchanges, and where they meet.
#[derive(Debug)]
pub struct Meeting {
    /// This rank; 0 waits for the others.
    pub rank: u32,
    /// All of them.
    pub world_size: u32,
    /// What MASTER_ADDR resolves to here.
    pub addresses: Vec<IpAddr>,
    /// MASTER_PORT: nothing else may listen there meanwhile.
    pub port: u16,
    /// Of this exchange alone.
    pub key: Key,
    /// How long the others are waited for.
    pub limit: Duration,
}

/// Rank 0's bytes; `own` counts on rank 0 only.
///
/// # Errors
/// One line that says who did not come or could not be reached, and why.
pub fn from_rank_0(meeting: &Meeting, own: &[u8]) -> Result<Vec<u8>, String> {
    if own.len() > LONGEST {
        return Err(format!("{} bytes are more than {LONGEST}", own.len()));
    }
    if meeting.world_size <= 1 {
        return Ok(own.to_vec());
    }
    let terms = Terms {
        nodes: (0..meeting.world_size).map(|rank| format!("of rank {rank}")).collect(),
        node_rank: meeting.rank,
        addresses: meeting.addresses.clone(),
        ports: vec![meeting.port],
        key: meeting.key.clone(),
        arrival: meeting.limit,
    };
    let mut giving = Giving { bytes: own, world_size: meeting.world_size, limit: meeting.limit };
    match preflight::lead(&terms, &mut giving) {
        Outcome::Go { told, .. } => Ok(told),
        Outcome::Stop(why) | Outcome::Failed(why) => Err(why),
        Outcome::Lost => Err("the connection to rank 0 ended before its bytes had come: see what rank 0 says".into()),
        Outcome::NoPort(faults) => {
            let faults: Vec<String> =
                faults.iter().map(|&(port, error)| format!("{port}: {}", reason(error))).collect();
            Err(format!("rank 0 cannot listen on port {}", faults.join(", ")))
        }
        Outcome::Unreached(attempts) => {
            let ways: Vec<String> = attempts
                .iter()
                .map(|attempt| format!("{} port {} ({})", attempt.to.0, attempt.to.1, fault(attempt.fault)))
                .collect();
            let limit = meeting.limit.as_secs();
            Err(format!("rank {} did not reach rank 0 within {limit} s: {}", meeting.rank, ways.join(", ")))
        }
    }
}

fn reason(number: i32) -> String {
    std::io::Error::from_raw_os_error(number).to_string()
}

fn fault(fault: Unreachable) -> String {
    match fault {
        Unreachable::Refused => "nobody listens there".into(),
        Unreachable::Silent => "no answer, as behind a firewall".into(),
        Unreachable::Stranger => {
            "who listens there does not know this launch's PALINGENESIS_STORE_KEY, or is at another exchange".into()
        }
        Unreachable::NoRoute(number) | Unreachable::Other(number) => reason(number),
    }
}

/// Rank 0 gives its bytes when all are there.
struct Giving<'a> {
    bytes: &'a [u8],
    world_size: u32,
    limit: Duration,
}

impl Leader for Giving<'_> {
    fn ranks(&mut self) -> Ranks {
        Ranks::Here
    }

    fn work(&mut self, _question: &[u8]) -> Box<dyn Work> {
        done(Vec::new())
    }

    fn next(&mut self, _round: usize, _answers: &[Vec<u8>]) -> Next {
        Next::Go((0..self.world_size).map(|_| self.bytes.to_vec()).collect())
    }

    fn without(&mut self, waiting: &Waiting) -> Next {
        let mut named: Vec<String> = waiting.absent.iter().take(NAMED).map(u32::to_string).collect();
        if waiting.absent.len() > NAMED {
            named.push(format!("{} more", waiting.absent.len() - NAMED));
        }
        let what = if waiting.absent.len() == 1 { "rank" } else { "ranks" };
        Next::Stop(format!("{what} {} did not come to rank 0 within {} s", named.join(", "), self.limit.as_secs()))
    }

    fn tell(&mut self, _waiting: &Waiting) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn key(digit: &str) -> Key {
        Key::from_hex(&digit.repeat(64)).unwrap()
    }

    fn meeting(rank: u32, world_size: u32, port: u16, key: Key) -> Meeting {
        let addresses = vec!["127.0.0.1".parse().unwrap()];
        Meeting { rank, world_size, addresses, port, key, limit: Duration::from_secs(4) }
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// Every rank's result, rank 0 starting last.
    fn all(world: u32, come: &[u32], key_of: impl Fn(u32) -> Key + Sync) -> Vec<Result<Vec<u8>, String>> {
        let port = free_port();
        std::thread::scope(|scope| {
            let key_of = &key_of;
            let ranks: Vec<_> = come
                .iter()
                .rev()
                .map(|&rank| {
                    let own = format!("of {rank}").into_bytes();
                    scope.spawn(move || from_rank_0(&meeting(rank, world, port, key_of(rank)), &own))
                })
                .collect();
            ranks.into_iter().rev().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_get_what_rank_0_gave() {
        for world in [1, 2, 5] {
            let ranks: Vec<u32> = (0..world).collect();
            for result in all(world, &ranks, |_| key("a")) {
                assert_eq!(result.unwrap(), b"of 0");
            }
        }
    }

    #[test]
    fn one_exchange_after_another_on_the_same_port_does_not_mix_them() {
        let port = free_port();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    for number in 0..5u8 {
                        let key = key("b").derive_from(&[b"exchange", &[number]]);
                        let got = from_rank_0(&meeting(rank, 3, port, key), &[number, rank as u8]);
                        assert_eq!(got.unwrap(), [number, 0], "rank {rank}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_to_all() {
        let results = all(4, &[0, 1, 3], |_| key("c"));
        for result in results {
            assert_eq!(result.unwrap_err(), "rank 2 did not come to rank 0 within 4 s");
        }
    }

    #[test]
    fn who_does_not_know_the_key_gets_nothing() {
        let results = all(2, &[0, 1], |rank| key(if rank == 0 { "d" } else { "e" }));
        assert!(results[0].as_ref().unwrap_err().starts_with("rank 1 did not come"), "{results:?}");
        let why = results[1].as_ref().unwrap_err();
        assert!(why.starts_with("rank 1 did not reach rank 0 within 4 s: 127.0.0.1 port "), "{why}");
        assert!(why.contains("PALINGENESIS_STORE_KEY"), "{why}");
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let why = from_rank_0(&meeting(0, 2, port, key("f")), b"id").unwrap_err();
        assert!(why.starts_with(&format!("rank 0 cannot listen on port {port}: Address already in use")), "{why}");
    }

    #[test]
    fn too_many_bytes_are_refused_before_anybody_is_met() {
        let why = from_rank_0(&meeting(0, 2, 1, key("0")), &vec![0; LONGEST + 1]).unwrap_err();
        assert_eq!(why, "65537 bytes are more than 65536");
    }
}
