//! Machines that nobody has: each GPU has a card of the training's fabric at its
//! switch, and other cards are near no GPU, or at the switches of a few. Whatever
//! the numbers, names and addresses, the choice is the same.

use super::common::machine::Machine;
use super::common::planned::{Seen, faults};
use super::{Random, shuffled};

/// What such machines differ in.
struct Form {
    gpus: usize,
    /// PIX or PXB: how a GPU and its card are joined.
    joined: &'static str,
    /// Cards of the fabric near no GPU (storage).
    far: usize,
    /// Slower Ethernet cards at the first GPUs' switches.
    beside: usize,
}

fn description(form: &Form, random: &mut Random) -> String {
    let Form { gpus, joined, far, beside } = *form;
    let all = gpus + far + beside;
    let numbers = shuffled(&(0..all).collect::<Vec<_>>(), random.below(1000) as u64);
    let names: Vec<String> = numbers.iter().map(|number| format!("mlx5_{number}")).collect();
    let (own, rest) = names.split_at(gpus);
    let (storage, ethernet) = rest.split_at(far);
    let half = |gpu: usize| usize::from(gpu >= gpus / 2);
    let list = |names: &[String]| names.iter().map(|name| format!("{name} = \"\"")).collect::<Vec<_>>().join(", ");
    let numa: Vec<String> = (0..gpus).map(|gpu| half(gpu).to_string()).collect();
    let far_numa: Vec<String> = storage.iter().enumerate().map(|(n, name)| format!("{name} = {}", n % 2)).collect();
    let mut matrix = format!("     {}\n", names.join(" "));
    for gpu in 0..gpus {
        let mut cells = Vec::new();
        for nic in 0..all {
            // Those at the switches of the first GPUs are that near to these only.
            let at = if nic < gpus { Some(nic) } else { nic.checked_sub(gpus + far) };
            cells.push(match at {
                Some(at) if at == gpu => {
                    if nic < gpus {
                        joined
                    } else {
                        "PIX"
                    }
                }
                Some(at) if half(at) == half(gpu) => "NODE",
                None if (nic - gpus) % 2 == half(gpu) => "NODE",
                _ => "SYS",
            });
        }
        matrix += &format!("gpu{gpu} {}\n", cells.join(" "));
    }
    let rates = ["100 Gb/sec (4X EDR)", "200 Gb/sec (4X HDR)", "400 Gb/sec (4X NDR)"];
    let (rate, link) = (rates[1 + random.below(2)], ["InfiniBand", "Ethernet"][random.below(2)]);
    let want: Vec<String> = own.iter().map(|name| format!("[\"{name}\"]")).collect();
    let exclude: Vec<String> = rest.iter().map(|name| format!("\"{name}\"")).collect();
    let mut nics = format!(
        "[[nics]]\npci = \"15b3:1021\"\nlink = \"{link}\"\nrate = \"{rate}\"\ndevices = {{ {} }}\n",
        list(&[own, storage].concat())
    );
    if beside > 0 {
        nics += &format!(
            "[[nics]]\npci = \"15b3:101d\"\nlink = \"Ethernet\"\nrate = \"{}\"\ndevices = {{ {} }}\n",
            rates[0],
            list(ethernet)
        );
    }
    format!(
        "addresses = \"reconstructed\"\nsource = []\ncpus = {{ 0 = \"0-7\", 1 = \"8-15\" }}\n\
         [gpu]\nvendor = \"nvidia\"\nmodel = \"NVIDIA H100\"\npci = \"10de:2330\"\n{nics}\
         [expect]\nwant = [{}]\nexclude = [{}]\n\
         [pci]\ngpu_numa = [{}]\nnic_numa = {{ {} }}\nmatrix = \"\"\"\n{matrix}\"\"\"\n",
        want.join(", "),
        exclude.join(", "),
        numa.join(", "),
        far_numa.join(", ")
    )
}

#[test]
fn made_up_machines_get_the_cards_at_their_switches() {
    let mut random = Random(7);
    for round in 0..60 {
        let gpus = [2, 4, 8][random.below(3)];
        let form = Form {
            gpus,
            joined: ["PIX", "PXB"][random.below(2)],
            far: random.below(4),
            // Fewer than half of the GPUs have such a card.
            beside: random.below(gpus.div_ceil(2)),
        };
        let text = description(&form, &mut random);
        let seen = Seen::of(Machine::parse(&format!("made up {round}"), &text));
        let faults = faults(&seen.machine, &seen.gpus(), &seen.node, &seen.choice());
        assert!(faults.is_empty(), "{}\n{text}", faults.join("\n"));
    }
}
