//! What a node's leader brings to the pre-flight.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plan::Plan;

/// A node, as its leader describes it. Bounded where it is read: it comes from another
/// machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeReport {
    /// NodeName.
    pub node: String,
    /// Its index in the step.
    pub node_rank: u32,
    /// The plugin's version.
    pub version: String,
    /// What every node must have decided alike: name and value.
    pub step: BTreeMap<String, String>,
}

/// The longest report, in bytes of JSON.
pub const LONGEST: usize = 64 * 1024;

impl NodeReport {
    /// What this node's leader knows.
    pub fn of(plan: &Plan) -> NodeReport {
        let step = &plan.step;
        let mut common = BTreeMap::new();
        common.insert("nodes".to_string(), step.node_list.clone());
        common.insert("world size".to_string(), step.world_size.to_string());
        NodeReport {
            node: step.node.clone(),
            node_rank: step.node_rank,
            version: env!("CARGO_PKG_VERSION").into(),
            step: common,
        }
    }

    /// As it is sent.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads what another node has sent.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_bytes(bytes: &[u8]) -> Result<NodeReport, String> {
        if bytes.len() > LONGEST {
            return Err(format!("a report of {} bytes", bytes.len()));
        }
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}
