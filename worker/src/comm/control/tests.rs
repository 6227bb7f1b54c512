//! What takes another version of the program, or the group's own parts.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

use super::wire::{self, GREETING, Hello, Message, Session, Side, VERSION};
use super::*;

fn terms(rank: u32, world_size: u32, port: u16) -> Terms {
    Terms {
        rank,
        world_size,
        host: format!("n{rank}"),
        master: ("127.0.0.1".to_owned(), port),
        key: Key::from_hex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"),
        start: Duration::from_secs(20),
        silence: Duration::from_secs(10),
    }
}

/// One that no program has, outside of those that the kernel gives to anybody.
fn free_port() -> u16 {
    loop {
        let random: [u8; 2] = palingenesis::system::random::bytes().unwrap();
        let port = 20_000 + u16::from_ne_bytes(random) % 12_000;
        if palingenesis::system::sockets::listen((Ipv4Addr::UNSPECIFIED, port).into(), false).is_ok() {
            return port;
        }
    }
}

/// Shows the key as a program of this version does, and hears what rank 0 says.
fn join_as(port: u16, key: &Key, version: u16, hello: &Hello) -> Message {
    let began = Instant::now();
    let mut stream = loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut greeting = [0; GREETING];
    stream.read_exact(&mut greeting).unwrap();
    let reply = wire::versioned_reply(version, Some(key), &greeting, hello, &[5; 32]).unwrap();
    stream.write_all(&reply).unwrap();
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).unwrap();
    assert!(wire::proves(Some(key), &greeting, &reply, &proof));
    let mut session = Session::new(Some(key), Side::Client, &greeting, &reply);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    session.open(&bytes).unwrap().unwrap().0
}

#[test]
fn another_version_is_told_with_both_hosts() {
    let hello = |release: &str| Hello {
        rank: 1,
        world_size: 2,
        host: "n1".to_owned(),
        port: 40001,
        release: release.to_owned(),
    };
    let own = server::RELEASE;
    for (version, release) in [(VERSION, "0.0.9"), (VERSION + 1, "0.2.0"), (VERSION + 1, own)] {
        let terms = terms(0, 2, free_port());
        let (port, key) = (terms.master.1, terms.key.clone().unwrap());
        let rank0 = std::thread::spawn(move || Control::join(&terms, 40000).unwrap_err().to_string());
        let expected = format!(
            "rank 1 on n1 runs palingenesis-worker {release} (protocol {version}), rank 0 on n0 {own} (protocol \
             {VERSION}); install the same one on all nodes"
        );
        assert_eq!(
            join_as(port, &key, version, &hello(release)),
            Message::Stop { why: expected.clone(), again: false }
        );
        assert_eq!(rank0.join().unwrap(), expected);
    }
}

#[test]
fn ranks_are_told_as_runs() {
    assert_eq!(ranks([3, 5, 6, 7, 9]), "3 5-7 9");
    assert_eq!(ranks([u32::MAX - 1, u32::MAX]), "4294967294-4294967295");
    assert_eq!(ranks([]), "");
}

#[test]
fn many_ranks_meet() {
    const WORLD: u32 = 64;
    let port = free_port();
    // All but rank 0 are there first.
    let join = |rank| {
        let terms = terms(rank, WORLD, port);
        std::thread::spawn(move || Control::join(&terms, 40_000 + rank as u16).unwrap())
    };
    let others: Vec<_> = (1..WORLD).map(join).collect();
    std::thread::sleep(Duration::from_millis(100));
    let mut joined = vec![join(0).join().unwrap()];
    joined.extend(others.into_iter().map(|thread| thread.join().unwrap()));
    for (_, peers) in &joined {
        let expected = (0..WORLD).map(|rank| (rank, format!("n{rank}"), 40_000 + rank as u16));
        assert!(peers.iter().map(|peer| (peer.rank, peer.host.clone(), peer.address.port())).eq(expected));
    }
    // Rank 0 last: it waits for the others.
    while let Some((control, _)) = joined.pop() {
        assert!(control.broken().is_none());
        control.end();
    }
}

#[test]
fn a_world_of_one_meets_nobody() {
    let (control, peers) = Control::join(&terms(0, 1, 0), 40000).unwrap();
    assert_eq!(peers.len(), 1);
    assert_eq!(control.verdict(Duration::ZERO).map(|error| error.to_string()), None);
    control.fail("nobody hears it");
    control.end();
    let error = Control::join(&terms(1, 1, 0), 40000).unwrap_err().to_string();
    assert_eq!(error, "RANK=1 is not below WORLD_SIZE=1");
}

#[test]
fn what_a_rank_waits_for_itself_goes_before_what_its_device_does() {
    let (control, _) = Control::join(&terms(0, 1, 0), 40000).unwrap();
    let (watch, tag) = (control.watch(), Tag::of("block", 1));
    let at = || control.shared.at().text();
    control.enter(4, Op::Exchange, tag, 0);
    control.leave();
    watch.stand(3, Op::AllGather, tag, true);
    assert_eq!(at(), "all_gather #3 of block 1");
    control.enter(5, Op::Barrier, tag, 0);
    assert_eq!(at(), "barrier #5 of block 1");
    control.leave();
    assert_eq!(at(), "all_gather #3 of block 1");
    watch.stand(3, Op::AllGather, tag, false);
    assert_eq!(at(), "its own work after barrier #5 of block 1");
    watch.stand(6, Op::AllReduce, tag, false);
    assert_eq!(at(), "its own work after all_reduce #6 of block 1");
}

#[test]
fn what_rank_0_saw_elsewhere_all_are_told() {
    let port = free_port();
    let joined = std::sync::Arc::new(std::sync::Barrier::new(3));
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let joined = std::sync::Arc::clone(&joined);
            std::thread::spawn(move || {
                let (control, _) = Control::join(&terms(rank, 3, port), 40000).unwrap();
                let watch = control.watch();
                joined.wait();
                if rank == 0 {
                    watch.break_off(CommError::Own("its GPU is gone".to_owned()));
                }
                watch.broken().to_string()
            })
        })
        .collect();
    let said: Vec<String> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert_eq!(
        said,
        ["its GPU is gone", "rank 0 on n0 has ended: its GPU is gone", "rank 0 on n0 has ended: its GPU is gone"]
    );
}
