//! Who wins: for every variable of the catalog and every combination of those
//! who may set it.

use super::catalog::{self, Kind};
use super::merge;
use super::tests::World;
use super::*;
use crate::config::{Profile, Settings, Source};
use crate::facts::task::FileValue;

const USER: u32 = 1;
const IMAGE: u32 = 2;
const FILE: u32 = 4;
const SITE: u32 = 8;
const SITE_PROFILE: u32 = 16;
const FORCE: u32 = 32;

/// In the order of the rule, highest first, with the value each sets.
const LAYERS: [(u32, &str); 6] = [
    (FORCE, "forced"),
    (USER, "users"),
    (IMAGE, "images"),
    (FILE, "files"),
    (SITE, "sites"),
    (SITE_PROFILE, "site-profiles"),
];

fn variable(name: &str, value: &str, force: bool) -> SiteVariable {
    let place = "palingenesis.toml:1".into();
    SiteVariable { name: name.into(), value: value.into(), force, place, of_node: false }
}

fn world(name: &str, layers: u32, container: bool) -> World {
    let mut world = World::new("n[1-2]", "2(x2)", 1);
    let has = |layer| layers & layer != 0;
    if has(USER) {
        world.environment.set(name, "users");
    }
    if container {
        world.task.container = Container::Inside;
        world.submitted = Some(world.environment.clone());
        if has(IMAGE) {
            world.environment.set(name, "images");
        }
    }
    if has(FILE) {
        let file = "/etc/nccl.conf".to_string();
        world.task.nccl_files.push(FileValue { name: name.into(), value: "files".into(), file });
    }
    let mut site = SiteView::default();
    if has(SITE) {
        site.env.push(variable(name, "sites", false));
    }
    if has(FORCE) {
        site.env.push(variable(name, "forced", true));
    }
    let mut profile = SiteProfile { base: Profile::Megatron, ..SiteProfile::default() };
    if has(SITE_PROFILE) {
        profile.env.push(variable(name, "site-profiles", false));
    }
    site.profiles.insert("ours".into(), profile);
    world.site = Some(site);
    world
}

fn planned(world: &World) -> Plan {
    let profiles = ["ours".to_string()];
    let settings = Settings::parse_with("ours,checks=off", Source::Option, &profiles).unwrap();
    world.plan_with(&settings).unwrap()
}

/// Formatted only when an assertion fails.
struct Lazy<F>(F);

impl<F: Fn() -> String> std::fmt::Display for Lazy<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&(self.0)())
    }
}

#[test]
fn the_winner_is_the_one_the_rule_names_for_every_variable_and_combination() {
    let mut combinations = 0;
    for entry in catalog::entries().filter(|entry| matches!(entry.kind, Kind::Tuning | Kind::Cache)) {
        let name = entry.name;
        if merge::kind(name).is_some() {
            continue;
        }
        let built_in = planned(&world(name, 0, false)).value(name).map(String::from);
        for layers in 0..64 {
            for container in [false, true] {
                if !container && layers & IMAGE != 0 {
                    continue;
                }
                // Inside a container the image's stands, see there.
                if container && !catalog::put_back(name) {
                    continue;
                }
                combinations += 1;
                let world = world(name, layers, container);
                let plan = planned(&world);
                let what = Lazy(|| format!("{name} with layers {layers:#b}, container {container}: {plan:#?}"));
                let winner = LAYERS.iter().find(|(layer, _)| layers & layer != 0);
                // What the programs will find.
                let removed = plan.unset.iter().any(|note| note.name == name);
                let found = plan.value(name).or(world.environment.get(name).filter(|_| !removed));
                let set = plan.env.iter().find(|variable| variable.name == name);
                let left = plan.left.iter().find(|note| note.name == name);
                match winner {
                    Some((FORCE, value)) => {
                        assert_eq!((found, set.map(|set| set.origin)), (Some(*value), Some(Origin::Site)), "{what}");
                        let above = layers & (USER | IMAGE | FILE) != 0;
                        assert_eq!(above, told(&world).iter().any(|w| w.id == "site-force"), "{what}");
                    }
                    Some((USER, value)) => {
                        assert_eq!(found, Some(*value), "{what}");
                        if layers & IMAGE != 0 {
                            let set = set.expect("it is put back");
                            assert_eq!(set.origin, Origin::User, "{what}");
                            assert!(set.why.contains("yours") && set.why.contains("images"), "{what}");
                        } else if layers & (SITE | SITE_PROFILE) != 0 || built_in.is_some() {
                            assert!(set.is_none() && left.is_some_and(|left| left.why.contains("yours")), "{what}");
                        }
                    }
                    Some((IMAGE, value)) => {
                        assert_eq!(found, Some(*value), "{what}");
                        if layers & (SITE | SITE_PROFILE) != 0 || built_in.is_some() {
                            assert!(set.is_none() && left.is_some_and(|left| left.why.contains("image")), "{what}");
                        }
                    }
                    // NCCL reads its files itself.
                    Some((FILE, _)) => {
                        assert_eq!(found, None, "{what}");
                        if layers & (SITE | SITE_PROFILE) != 0 || built_in.is_some() {
                            assert!(left.is_some_and(|left| left.why.contains("/etc/nccl.conf")), "{what}");
                        }
                    }
                    Some((_, value)) => {
                        assert_eq!((found, set.map(|set| set.origin)), (Some(*value), Some(Origin::Site)), "{what}");
                    }
                    None => assert_eq!(found, built_in.as_deref(), "{what}"),
                }
                assert!(plan.env.iter().filter(|variable| variable.name == name).count() <= 1, "{what}");
            }
        }
    }
    println!("{combinations} combinations");
    assert!(combinations > 96);
}

/// The warnings with the checks on: values such as "users" are none that a
/// check would pass, so what they find is only told.
fn told(world: &World) -> Vec<Warning> {
    let settings = Settings::parse_with("ours,checks=warn", Source::Option, &["ours".to_string()]).unwrap();
    world.plan_with(&settings).unwrap().warnings
}

#[test]
fn facts_of_the_step_stand_above_all() {
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"] {
        let free = planned(&world(name, 0, false)).value(name).map(String::from);
        for layers in 0..64 {
            let plan = planned(&world(name, layers, layers & IMAGE != 0));
            assert_eq!(plan.value(name).map(String::from), free, "{name} {layers:#b}");
        }
    }
}

/// What is asked for in this very srun stands above what an image brings along
/// and the site says for all, and below the user's own variable.
#[test]
fn what_an_option_brings_stands_between_the_user_and_the_image() {
    for (name, spec, value) in [
        ("NCCL_DEBUG", "debug", "INFO"),
        ("NCCL_ALGO", "deterministic", "Ring"),
        ("NCCL_SOCKET_IFNAME", "iface=ib0", "=ib0"),
    ] {
        for layers in 0..16 {
            let mut world = world(name, layers, true);
            world.interfaces = vec![Interface { name: "ib0".into(), address: "10.0.0.1".parse().unwrap(), prefix: 24 }];
            let spec = format!("checks=off,{spec}");
            let plan = world.plan(&spec).unwrap_or_else(|refusal| panic!("{spec}: {refusal}"));
            let found = plan.value(name).or(world.environment.get(name));
            let expected = if layers & USER != 0 { "users" } else { value };
            assert_eq!(found, Some(expected), "{name} {layers:#b}: {plan:#?}");
            if layers & (USER | IMAGE) == IMAGE {
                let set = plan.env.iter().find(|variable| variable.name == name).unwrap();
                assert!(set.why.contains("instead of images, the image's"), "{}", set.why);
            }
        }
    }
}

/// A value of the user's is not lost by being nothing.
#[test]
fn an_empty_value_is_a_value() {
    let mut world = World::new("n[1-2]", "2(x2)", 0).export(&[("NCCL_DEBUG", ""), ("NCCL_IB_TIMEOUT", "")]);
    let plan = world.plan("debug").unwrap();
    assert_eq!((plan.value("NCCL_DEBUG"), plan.value("NCCL_IB_TIMEOUT")), (None, None));
    // In a container whose image has another.
    world.submitted = Some(world.environment.clone());
    world.task.container = Container::Inside;
    world.environment.set("NCCL_DEBUG", "VERSION");
    assert_eq!(world.plan("").unwrap().value("NCCL_DEBUG"), Some(""));
}

/// A forced list is the site's alone, and the user is told what went.
#[test]
fn a_forced_list_replaces_the_user_s() {
    let name = "PYTORCH_CUDA_ALLOC_CONF";
    let mut world = World::new("n[1-2]", "2(x2)", 0).export(&[(name, "max_split_size_mb:128")]);
    let mut site = SiteView::default();
    site.env.push(variable(name, "expandable_segments:False", true));
    world.site = Some(site);
    let plan = world.plan("fsdp").unwrap();
    assert_eq!(plan.value(name), Some("expandable_segments:False"));
    let told: Vec<&Warning> = plan.warnings.iter().filter(|warning| warning.id == "site-force").collect();
    assert!(told.len() == 1 && told[0].message.contains("max_split_size_mb:128"), "{told:?}");
}

/// An srun in a step with a merged list: the whole is taken for the user's, whose
/// keys then win over those of another profile; nothing of it grows.
#[test]
fn a_merged_list_in_an_srun_of_a_step_stays_as_it_is() {
    let name = "PYTORCH_CUDA_ALLOC_CONF";
    let outer = World::new("n[1-2]", "2(x2)", 0).export(&[(name, "max_split_size_mb:128")]).plan("fsdp").unwrap();
    let mut inner = World::new("n[1-2]", "2(x2)", 0);
    inner.step.step_id = 1;
    for variable in &outer.env {
        inner.environment.set(&variable.name, &variable.value);
    }
    let again = inner.plan("fsdp").unwrap();
    assert_eq!(again.value(name), None);
    assert!(again.left.iter().any(|note| note.name == name && note.why.contains("yours")), "{again:#?}");
}

#[test]
fn lists_are_merged_and_the_users_keys_win() {
    let name = "PYTORCH_CUDA_ALLOC_CONF";
    let with = |users: Option<&str>| {
        let mut world = World::new("n[1-2]", "2(x2)", 0);
        if let Some(users) = users {
            world.environment.set(name, users);
        }
        world.plan("fsdp").unwrap()
    };
    assert_eq!(with(None).value(name), Some("expandable_segments:True"));
    let merged = with(Some("max_split_size_mb:128"));
    assert_eq!(merged.value(name), Some("max_split_size_mb:128,expandable_segments:True"));
    assert_eq!(merged.env.iter().find(|variable| variable.name == name).map(|v| v.origin), Some(Origin::User));
    assert_eq!(with(Some("expandable_segments:False")).value(name), None);
    // Set and empty: PyTorch's defaults are wanted.
    assert_eq!(with(Some("")).value(name), None);
    // The newer name, where the user has that one: two would fight.
    let mut newer = World::new("n[1-2]", "2(x2)", 0);
    newer.environment.set("PYTORCH_ALLOC_CONF", "max_split_size_mb:128");
    let plan = newer.plan("fsdp").unwrap();
    assert_eq!(plan.value("PYTORCH_ALLOC_CONF"), Some("max_split_size_mb:128,expandable_segments:True"));
    assert_eq!(plan.value(name), None);
}

#[test]
fn an_srun_in_a_step_takes_the_site_s_and_the_profile_s_values_anew() {
    let mut outer = World::new("n[1-2]", "2(x2)", 0);
    let mut site = SiteView::default();
    site.env.push(variable("NCCL_IB_TC", "106", false));
    outer.site = Some(site);
    let first = outer.plan("megatron,debug").unwrap();
    let mut inner = World::new("n[1-2]", "2(x2)", 0);
    inner.step.step_id = 1;
    for variable in &first.env {
        inner.environment.set(&variable.name, &variable.value);
    }
    let plan = inner.plan("").unwrap();
    // The site file no longer says it, and debug was not asked for again.
    for gone in ["NCCL_IB_TC", "TORCH_CPP_LOG_LEVEL", "TORCH_NCCL_HIGH_PRIORITY"] {
        assert!(plan.unset.iter().any(|note| note.name == gone), "{gone}: {plan:#?}");
    }
    assert_eq!(plan.value("NCCL_DEBUG"), Some("WARN"));
}

/// <https://github.com/pytorch/pytorch/issues/64864>
#[test]
fn threads_are_the_rank_s_share_of_the_cpus() {
    let threads = |mask: u32, on_node: Option<&str>, users: Option<&str>| {
        let mut world = World::new("n1", "8", 0);
        world.task.cpus = Some(mask);
        for (name, value) in [("SLURM_CPUS_ON_NODE", on_node), ("OMP_NUM_THREADS", users)] {
            if let Some(value) = value {
                world.environment.set(name, value);
            }
        }
        world.plan("").unwrap().value("OMP_NUM_THREADS").map(String::from)
    };
    // Bound: the mask. Unbound: each has all 64, and an eighth is its share.
    assert_eq!(threads(8, Some("64"), None).as_deref(), Some("8"));
    assert_eq!(threads(64, Some("64"), None).as_deref(), Some("8"));
    assert_eq!(threads(2, Some("64"), None).as_deref(), Some("2"));
    assert_eq!(threads(4, None, None).as_deref(), Some("4"));
    assert_eq!(threads(1, Some("4"), None).as_deref(), Some("1"));
    assert_eq!(threads(8, Some("64"), Some("3")), None);
}
