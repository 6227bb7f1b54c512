//! Whole trainings by ranks that are threads: the same numbers at every world size, and
//! after every resume.

mod common;

use std::fs;
use std::path::Path;

use common::{Place, losses};

fn assert_close(one: &[(u64, f64)], other: &[(u64, f64)], what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for ((step, one), (at, other)) in one.iter().zip(other) {
        assert!(step == at && (one - other).abs() <= 1e-5 * one.abs(), "{what}, step {step}: {one} and {other}");
    }
}

fn output(dir: &Path) -> String {
    format!("train.output_dir={}", dir.display())
}

#[test]
fn the_loss_is_the_same_at_world_sizes_1_to_4_over_50_steps() {
    let place = Place::new("worlds");
    let at = |world: u32| {
        let dir = place.dir(&format!("world-{world}"));
        common::train(world, &place, &["train.steps=50", &output(&dir)]);
        losses(&dir)
    };
    let alone = at(1);
    assert_eq!(alone.len(), 50);
    assert!(alone[49].1 < alone[0].1 - 1.0, "it learns nothing: {:?} to {:?}", alone[0], alone[49]);
    for world in 2..=4 {
        assert_close(&alone, &at(world), &format!("world size {world}"));
    }
}

#[test]
fn a_resumed_training_goes_on_bit_by_bit_and_at_another_world_size_within_1e_5() {
    let place = Place::new("resume");
    let whole = place.dir("whole");
    let steps = ["train.steps=20", "checkpoint.every=10"];
    common::train(2, &place, &[&steps[..], &[&output(&whole)]].concat());
    let all = losses(&whole);
    let model = |dir: &Path| fs::read(dir.join("final/model.safetensors")).unwrap();

    for world in [2, 1, 3] {
        let again = place.dir(&format!("again-{world}"));
        fs::create_dir_all(&again).unwrap();
        common::copy(&whole.join("step-10"), &again.join("step-10"));
        common::train(world, &place, &[&steps[..], &[&output(&again)]].concat());
        let resumed = losses(&again);
        assert_eq!(resumed.first().map(|(step, _)| *step), Some(11));
        if world == 2 {
            assert_eq!(resumed, all[10..], "other bits than without the interruption");
            assert!(model(&again) == model(&whole), "the same losses, another model");
        } else {
            assert_close(&resumed, &all[10..], &format!("resumed at world size {world}"));
        }
    }
}
