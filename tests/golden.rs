//! Real machines: which cards belong to which GPU there, and which carry no
//! training traffic, from what is published about them.

mod common;

use common::machine::{Addresses, Machine};

#[test]
fn trees() {
    let machines = Machine::all();
    assert_eq!(machines.len(), 24);
    for machine in &machines {
        let tree = machine.tree();
        let devices = std::fs::read_dir(tree.root().join("sys/bus/pci/devices")).unwrap();
        let mut count = 0;
        for device in devices {
            let path = device.unwrap().path();
            assert!(path.join("numa_node").is_file(), "{}", path.display());
            count += 1;
        }
        println!(
            "{} {count} functions, {} files {:?}",
            machine.name,
            tree.files().len(),
            machine.addresses == Addresses::Published
        );
    }
}
