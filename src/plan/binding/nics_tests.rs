//! Which cards are chosen on real machines, and by which rule.

use super::machine::*;

/// The nearest cards as each machine's source has them, and what must stay out.
#[test]
fn real_machines() {
    let table: [(&str, &[&str], &[&str]); 10] = [
        (
            "dgx h100",
            &["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"],
            &["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"],
        ),
        (
            "dell roce",
            &["mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"],
            &["mlx5_0", "mlx5_1", "mlx5_6", "mlx5_7"],
        ),
        ("hgx with four cards", &["NIC0", "NIC0", "NIC1", "NIC1", "NIC2", "NIC2", "NIC3", "NIC3"], &["NIC4", "NIC5"]),
        ("lassen", &["mlx5_0 mlx5_1", "mlx5_0 mlx5_1", "mlx5_2 mlx5_3", "mlx5_2 mlx5_3"], &[]),
        (
            "azure nd a100",
            &["mlx5_ib0", "mlx5_ib1", "mlx5_ib2", "mlx5_ib3", "mlx5_ib4", "mlx5_ib5", "mlx5_ib6", "mlx5_ib7"],
            &["mlx5_an0"],
        ),
        (
            "aws p4d",
            &[
                "rdmap10s27",
                "rdmap10s27",
                "rdmap20s27",
                "rdmap20s27",
                "rdmap90s27",
                "rdmap90s27",
                "rdmapa0s27",
                "rdmapa0s27",
            ],
            &[],
        ),
        ("gb200", &["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4"], &["mlx5_2", "mlx5_5"]),
        (
            "oci h100",
            &[
                "mlx5_0 mlx5_1",
                "mlx5_3 mlx5_4",
                "mlx5_5 mlx5_6",
                "mlx5_7 mlx5_8",
                "mlx5_9 mlx5_10",
                "mlx5_12 mlx5_13",
                "mlx5_14 mlx5_15",
                "mlx5_16 mlx5_17",
            ],
            &["mlx5_2", "mlx5_11"],
        ),
        ("ex235a", &["cxi0", "cxi0", "cxi1", "cxi1", "cxi2", "cxi2", "cxi3", "cxi3"], &[]),
        ("mi200", &["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"], &[]),
    ];
    for ((name, machine), (known, nearest, out)) in all().into_iter().zip(table) {
        assert_eq!(name, known);
        let nics = machine.choose("");
        assert_eq!(machine.of_gpus(&nics), nearest, "{name}");
        assert_eq!(machine.excluded(&nics), out, "{name}: {:?}", nics.verdicts);
        assert_eq!((nics.unclear, nics.fallbacks), (None, vec![]), "{name}");
        assert!(nics.verdicts.iter().all(|verdict| !verdict.why.is_empty()), "{name}");
    }
}
