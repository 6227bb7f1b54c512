//! Network devices, from /sys/class/net.

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetDevice {
    /// Its name (eth0).
    pub name: String,
    /// Whether it is up and running, as NCCL asks of one (IFF_UP, IFF_RUNNING).
    pub up: bool,
    /// Its speed in Mb/s, where the driver tells one.
    pub mbps: Option<u32>,
}
