//! Variables that NCCL reads or read and does not document: its parameters by
//! release (NCCL_PARAM and getenv in its source). They are here so that a
//! misspelt name is told from an unusual one. Versions are the first and last
//! public release seen to read a name.

use super::Grammar::{Integer, Text};
use super::{Entry, Kind, Reader};

/// Read by current releases.
pub(super) const NCCL_INTERNALS: &[Entry] = &[
    number("NCCL_ALLGATHERV_ENABLE", "2.29", "1"),
    number("NCCL_CHUNK_SIZE", "2.12", "0"),
    number("NCCL_COMM_SHRINK_SHARE_RESOURCES", "2.27", ""),
    number("NCCL_COMM_SPLIT_SHARE_RESOURCES", "2.18", ""),
    number("NCCL_CONNECT_ROUND_MAX_PEERS", "2.19.4", "128"),
    number("NCCL_DEV_API_JIT", "2.30.7", "0"),
    number("NCCL_DISABLE_MEM_MANAGER", "2.29.7", "0"),
    number("NCCL_ELASTIC_BUFFER_REGISTER", "2.30", "1"),
    number("NCCL_ENABLE_VERSION_CHECK", "2.29", "1"),
    number("NCCL_GDAKI_USE_RELIABLE_DB", "2.29.7", "0"),
    number("NCCL_GDRCOPY_FIFO_ENABLE", "2.9", "1"),
    number("NCCL_GDRCOPY_FLUSH_ENABLE", "2.9", "0"),
    number("NCCL_GDRCOPY_SYNC_ENABLE", "2.12", "1"),
    number("NCCL_GIN_ENABLE", "2.28.7", "1"),
    number("NCCL_GIN_ERROR_QUERY_SEC", "2.28.7", "10"),
    number("NCCL_GIN_GDAKI_MAX_DEST_RD_ATOMIC", "2.30", ""),
    number("NCCL_GIN_GDAKI_MAX_QP_RD_ATOMIC", "2.30", ""),
    number("NCCL_GIN_GDAKI_NIC_HANDLER", "2.28.7", "0"),
    number("NCCL_GIN_GDAKI_QP_DEPTH", "2.28.7", "128"),
    number("NCCL_GIN_IB_TC", "2.30.7", "-1"),
    number("NCCL_GIN_NCONNECTIONS", "2.29.7", ""),
    text("NCCL_GIN_PLUGIN", "2.29.7", ""),
    number("NCCL_GIN_PLUGIN_REF_COUNT", "2.29.7", "0"),
    number("NCCL_GIN_PROXY_QUEUE_SIZE", "2.28.7", "-1"),
    number("NCCL_GIN_TYPE", "2.28.7", "-1"),
    number("NCCL_GRAPH_HELPER_DISABLE", "2.11", "0"),
    number("NCCL_GROUP_CUDA_STREAM", "", ""),
    text("NCCL_IBVERBS_LIB", "2.30", ""),
    number("NCCL_IB_DEVICE_PCI_ORDER", "2.29.7", "1"),
    number("NCCL_IB_MQP_RETRY_ALL", "2.24", "0"),
    number("NCCL_IB_MQP_RETRY_CNT", "2.24", "34"),
    number("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "2.24", "100"),
    number("NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS", "2.29.7", ""),
    number("NCCL_IB_QUERY_PORT_SPEED", "2.30.7", "1"),
    number("NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", "2.29.7", ""),
    number("NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS", "2.29.7", "1"),
    number("NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY", "2.29.7", "10"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT", "2.30", "5000"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL", "2.30", "500"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE", "2.30", "5"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE", "2.30", "5"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT", "2.30", "4000"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX", "2.30", "5"),
    number("NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY", "2.30", "200"),
    number("NCCL_IB_SUBNET_PREFIX_LEN", "2.30.7", "24"),
    number("NCCL_IGNORE_DISABLED_P2P", "2.12", "0"),
    number("NCCL_L1_SHARED_MEMORY_CARVEOUT", "2.12.10", "0"),
    number("NCCL_LL128_BUFFSIZE", "2.7", ""),
    number("NCCL_LL128_C2C", "2.27", "1"),
    number("NCCL_LL128_NTHREADS", "2.5", ""),
    number("NCCL_LL_BUFFSIZE", "2.7", ""),
    number("NCCL_LSA_TEAM_SIZE", "2.29.7", "0"),
    number("NCCL_MAX_NRINGS", "", ""),
    number("NCCL_MIN_NRINGS", "", ""),
    number("NCCL_MLOPART_RDMA_ENABLE", "2.30.7", "0"),
    number("NCCL_MNNVL_CROSS_CLIQUE", "2.30", "0"),
    number("NCCL_MNNVL_RAIL_PER_HOST", "2.28.7", "0"),
    number("NCCL_MNNVL_SCATTER_NETS_ENABLE", "2.27.5", "1"),
    number("NCCL_NET_DISABLE_INTRA", "2.12", "0"),
    number("NCCL_NET_GDR_MLOPART", "2.30.7", "0"),
    number("NCCL_NET_OPTIONAL_RECV_COMPLETION", "2.24", "1"),
    number("NCCL_NET_OVERHEAD", "2.18", ""),
    number("NCCL_NET_PLUGIN_REF_COUNT", "2.26", "0"),
    number("NCCL_NUM_RMA_CTX", "2.29", ""),
    number("NCCL_NVB_PRECONNECT", "2.9.9", "1"),
    number("NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE", "2.27", ""),
    number("NCCL_NVTX_DISABLE", "2.28", "0"),
    number("NCCL_P2P_EPOCH_ENABLE", "2.29", "1"),
    number("NCCL_P2P_MAX_PEERS", "2.30", ""),
    number("NCCL_P2P_PER_CHANNEL_NET_BW", "2.29", "14"),
    number("NCCL_P2P_READ_ENABLE", "2.7", ""),
    number("NCCL_P2P_SCHEDULE_GROUP_SIZE", "2.28.7", ""),
    number("NCCL_P2P_USE_CUDA_MEMCPY", "2.13", "0"),
    number("NCCL_PAT_ENABLE", "2.23", "2"),
    number("NCCL_PROGRESS_APPENDOP_FREQ", "2.16.5", "8"),
    number("NCCL_PROXY_APPEND_BATCH_SIZE", "2.16", "16"),
    number("NCCL_PROXY_DUMP_SIGNAL", "2.14", "-1"),
    number("NCCL_RMA_DISABLE", "2.30.7", "0"),
    text("NCCL_RMA_PLUGIN", "2.30.7", ""),
    number("NCCL_RMA_PLUGIN_REF_COUNT", "2.30.7", "0"),
    number("NCCL_RMA_PROXY_DUMP_SIGNAL", "2.29", "-1"),
    number("NCCL_RMA_PROXY_QUEUE_SIZE", "2.29", "-1"),
    number("NCCL_SHADOW_MEMPOOL_MAX_SIZE", "2.30.7", "1073741824"),
    number("NCCL_SHM_LOCALITY", "2.13", ""),
    number("NCCL_SINGLE_PROC_MEM_REG_ENABLE", "2.28", "0"),
    number("NCCL_SOCKET_INLINE", "2.27", "128"),
    number("NCCL_SOCKET_MIN_TASKSIZE", "2.27", "65536"),
    number("NCCL_SYM_CE_THRESHOLD", "2.29", "8388608"),
    number("NCCL_SYM_CTAS", "2.27", "0"),
    text("NCCL_SYM_KERNEL", "2.27", ""),
    number("NCCL_SYM_NOWIN_ENABLE", "2.29", "0"),
    number("NCCL_SYM_REUSE_SYSMEM_HANDLES", "2.30.4", "0"),
    number("NCCL_SYM_RS_GIN_CHUNK_SIZE", "2.30.7", "-1"),
    number("NCCL_SYM_TMA_ENABLE", "2.30", "0"),
    text("NCCL_THREAD_THRESHOLDS", "2.5", ""),
    number("NCCL_TOPO_SPLIT_MLOPART", "2.30.7", "1"),
    number("NCCL_UNPACK_DOUBLE_NCHANNELS", "2.22", "1"),
    number("NCCL_WIN_STRIDE", "2.27", "-1"),
    number("NCCL_WORK_ARGS_BYTES", "2.22", ""),
    number("NCCL_WORK_FIFO_BYTES", "2.22", ""),
];

/// No longer read.
pub(super) const NCCL_GONE: &[Entry] = &[
    gone("NCCL_AGG_ALLOC_MODE", "2.10", "2.12"),
    gone("NCCL_CREATE_THREAD_CONTEXT", "2.13", "2.30.4"),
    gone("NCCL_GDRCOPY_TAIL_ENABLE", "2.9", "2.11"),
    gone("NCCL_GIN_COUNTER_POOL_SIZE", "2.28.7", "2.29"),
    gone("NCCL_GIN_EXCLUSIVE_CONTEXTS", "2.29.7", "2.29.7"),
    gone("NCCL_GIN_NCONTEXTS", "2.28.7", "2.29"),
    gone("NCCL_GIN_SIGNAL_POOL_SIZE", "2.28.7", "2.29"),
    gone("NCCL_GRAPH", "2.5", "2.5"),
    gone("NCCL_NCCL_ALLOC_P2P_NET_LL_BUFFERS", "2.14", "2.16"),
    gone("NCCL_PROXY_PROFILE", "2.12", "2.22"),
    gone("NCCL_SHM_MEMCPY_MODE", "2.13", "2.30.4"),
    gone("NCCL_SHM_USE_CUDA_MEMCPY", "2.13", "2.30.4"),
];

const MEANING: &str = "internal to NCCL, not in its guide: never set it in scripts";
const SOURCE: &str = "NVIDIA/nccl:src";

const fn number(name: &'static str, since: &'static str, default: &'static str) -> Entry {
    let entry = Entry::new(name, Reader::Nccl, Kind::Tuning, Integer(i64::MIN, i64::MAX), MEANING);
    let default = if default.is_empty() { "chosen at run time" } else { default };
    entry.internal().since(since).default(default).source(SOURCE)
}

const fn text(name: &'static str, since: &'static str, default: &'static str) -> Entry {
    Entry::new(name, Reader::Nccl, Kind::Tuning, Text, MEANING).internal().since(since).default(default).source(SOURCE)
}

const fn gone(name: &'static str, since: &'static str, until: &'static str) -> Entry {
    let entry = Entry::new(name, Reader::Nobody, Kind::Foreign, Text, "nothing any more; was internal to NCCL");
    entry.internal().since(since).until(until).source(SOURCE)
}
