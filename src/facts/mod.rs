//! Reads the world: the step as Slurm describes it, the node, the network, the
//! environment. No decision is taken here and nothing is changed.
//!
//! What is read from files takes a root directory, so that a recorded machine
//! can be planned anywhere.

pub mod container;
pub mod environment;
mod files;
pub mod gpus;
pub mod hostlist;
pub mod netdevs;
pub mod network;
pub mod program;
pub mod rdma;
pub mod step;
pub mod task;
pub mod user;

pub use environment::Environment;
pub use netdevs::NetDevice;
pub use program::{Program, StartFacts};
pub use rdma::RdmaPort;
pub use step::{Step, StepError};
pub use task::TaskFacts;
pub use user::User;

use std::path::Path;

/// What the node itself says, read once per node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFacts {
    /// Model names of the GPUs, as the NVIDIA driver prints them; empty
    /// without the driver.
    pub gpu_models: Vec<String>,
    /// The kernel's range of ports for outgoing connections, if known.
    pub ephemeral_ports: Option<(u16, u16)>,
    /// Ports of RDMA devices; `None`: not known.
    pub rdma: Option<Vec<RdmaPort>>,
    /// Network devices; `None`: not known.
    pub netdevs: Option<Vec<NetDevice>>,
    /// What could not be read, in words.
    pub unknown: Vec<String>,
}

impl NodeFacts {
    /// Reads a few small files below `root`. What cannot be read stays empty
    /// and is named in `unknown`; a missing driver is no fault.
    pub fn read(root: &Path) -> NodeFacts {
        let mut unknown = Vec::new();
        let gpu_models = gpus::models(root).unwrap_or_else(|why| {
            unknown.push(why);
            Vec::new()
        });
        let ephemeral_ports = network::ephemeral_ports(root).unwrap_or_else(|why| {
            unknown.push(why);
            None
        });
        let rdma = rdma::ports(root).unwrap_or_else(|why| {
            unknown.push(why);
            None
        });
        let netdevs = netdevs::devices(root).unwrap_or_else(|why| {
            unknown.push(why);
            None
        });
        NodeFacts { gpu_models, ephemeral_ports, rdma, netdevs, unknown }
    }
}

/// What srun alone can know of rank 0, handed to the tasks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rank0 {
    /// NodeName of the node that holds global rank 0.
    pub host: Option<String>,
    /// Its numeric address, from its NodeAddr.
    pub address: Option<String>,
}
