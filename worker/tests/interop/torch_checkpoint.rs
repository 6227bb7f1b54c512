//! What `write` of dcp.py has PyTorch save, read back: for tests/dcp.rs and
//! examples/dcp_interop.rs.

use std::path::Path;

use palingenesis_worker::checkpoint::PartMut;
use palingenesis_worker::checkpoint::dcp::{Dcp, Dtype, verify};
use palingenesis_worker::shard::Division;
use serde_json::json;

const TENSORS: [(&str, &[usize], Dtype); 13] = [
    ("model.rows", &[7, 5], Dtype::F32),
    ("model.columns", &[4, 6], Dtype::F32),
    ("model.bf16", &[9, 4], Dtype::Bf16),
    ("model.f16", &[5], Dtype::F16),
    ("model.f64", &[3, 2, 2], Dtype::F64),
    ("model.i64", &[6], Dtype::I64),
    ("model.i32", &[6], Dtype::I32),
    ("model.i16", &[6], Dtype::I16),
    ("model.i8", &[6], Dtype::I8),
    ("model.one", &[1], Dtype::F32),
    ("model.scalar", &[], Dtype::F32),
    ("model.turned", &[6, 4], Dtype::F32),
    ("model.empty", &[0, 3], Dtype::F32),
];

/// Reads everything as `world` ranks would; panics if a number is another.
pub fn check(dir: &Path, world: usize) {
    assert_eq!(verify(dir), []);
    let dcp = Dcp::open(dir).unwrap();
    for (k, (name, shape, dtype)) in TENSORS.into_iter().enumerate() {
        let info = dcp.tensor(name).unwrap();
        assert_eq!((info.shape.as_slice(), info.dtype), (shape, dtype), "{name}");
        let len = shape.iter().product();
        let division = Division { len, world };
        let mut all = Vec::new();
        for rank in 0..world {
            let range = division.of(rank);
            let mut data = vec![f32::NAN; range.len()];
            dcp.read(&mut PartMut { name, shape, range, data: &mut data }).unwrap();
            all.append(&mut data);
        }
        let wanted: Vec<f32> = (0..len).map(|at| ((at * 7 + k) % 64) as f32 - 32.0).collect();
        assert_eq!(all, wanted, "{name}");
    }
    assert_eq!(dcp.number("step").unwrap(), (1u64 << 40) as f64 + 1.0);
    assert_eq!(dcp.number("optimizer.state.rows.step").unwrap(), 5.0);
    assert_eq!(dcp.number("train_state.step").unwrap(), 7.0);
    assert_eq!(dcp.object("train_state.text").unwrap(), json!("é"));
    assert_eq!(dcp.object("train_state.list").unwrap(), json!([1, -2.5, null, true]));
    assert_eq!(dcp.object("train_state.big").unwrap(), json!(1u64 << 63));
    assert_eq!(dcp.number("optimizer.param_groups.0.lr").unwrap(), 1e-3);
    assert_eq!(dcp.object("optimizer.param_groups.0.betas").unwrap(), json!([0.9, 0.95]));
}
