//! RDMA devices and their ports, from /sys/class/infiniband.

/// One port of an RDMA device.
#[derive(Debug, Clone, PartialEq)]
pub struct RdmaPort {
    /// The device (mlx5_0).
    pub device: String,
    /// Its port, from 1.
    pub port: u8,
    /// What it speaks.
    pub link: LinkLayer,
    /// Whether its state is ACTIVE.
    pub active: bool,
    /// Its rate in Gb/s.
    pub gbps: Option<u32>,
    /// The kernel driver (mlx5_core, efa).
    pub driver: Option<String>,
}

/// What an RDMA port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
    /// Neither: AWS EFA says "Unspecified".
    Other,
}
