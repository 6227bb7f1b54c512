//! A container plugin that comes after ours imports its image's environment
//! over what we set. Nothing can be done from here but to say which names the
//! user must have kept.

use std::collections::BTreeSet;

use crate::facts::task::Container;

use super::marks::Marks;
use super::{Facts, Plan, catalog};

/// Every name that is set here, and every one of the user's that would be put
/// back if we came after the plugin: any of them may stand in the image
/// (<https://github.com/NVIDIA/pyxis/issues/124>).
pub(super) fn decide(plan: &mut Plan, facts: &Facts, marks: &Marks) {
    if facts.task.container != Container::ComesLater {
        return;
    }
    // No image has facts of a rank's place.
    let set = plan.env.iter().map(|variable| variable.name.as_str()).filter(|name| !name.starts_with("PALINGENESIS_"));
    let users = facts.environment.iter().map(|(name, _)| name);
    let users = users.filter(|name| catalog::put_back(name) && marks.users(facts.environment, name).is_some());
    let names: BTreeSet<&str> = set.chain(users).collect();
    let kept = &facts.task.container_keeps;
    let open: Vec<&str> = names.into_iter().filter(|name| !kept.iter().any(|kept| kept == name)).collect();
    if open.is_empty() {
        return;
    }
    let list = open.join(",");
    let give = if kept.is_empty() {
        format!("give srun --container-env={list}")
    } else {
        format!("add these to the names in --container-env: {list}")
    };
    plan.warn(
        "container-order",
        "the container plugin comes after palingenesis on this cluster, so what the image sets replaces your values \
         and the ones set here"
            .into(),
        format!(
            "{give}, or ask the cluster's admins to list palingenesis after the container plugin in plugstack.conf"
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Environment;
    use crate::plan::tests::World;
    use crate::plan::{Origin, Severity, Warning};

    fn comes_later(kept: &[&str]) -> World {
        let mut world = World::new("n[1-2]", "2(x2)", 0);
        world.task.container = Container::ComesLater;
        world.task.container_keeps = kept.iter().map(|name| name.to_string()).collect();
        world.export(&[("NCCL_IB_TIMEOUT", "21"), ("PATH", "/bin"), ("MY_OWN", "1")])
    }

    fn warned(world: &World, spec: &str) -> Option<Warning> {
        let mut found = world.plan(spec).unwrap().warnings;
        found.retain(|warning| warning.id == "container-order");
        assert!(found.len() <= 1, "{found:?}");
        found.pop()
    }

    fn listed(warning: &Warning) -> Vec<String> {
        let list = warning.cure.split_once("--container-env").unwrap().1;
        let list = list.trim_start_matches(['=', ':', ' ']);
        crate::facts::container::names(list.split_once(", or ask").unwrap().0)
    }

    /// <https://github.com/NVIDIA/pyxis/issues/124>
    #[test]
    fn every_name_that_the_image_could_replace_is_listed_until_it_is_kept() {
        let warning = warned(&comes_later(&[]), "").unwrap();
        assert_eq!(warning.severity, Severity::Warning);
        let names = listed(&warning);
        for name in ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NCCL_IB_TIMEOUT", "NCCL_DEBUG"] {
            assert!(names.iter().any(|listed| listed == name), "{name} is not in {names:?}");
        }
        // Whose values belong to the image, or are nobody's business.
        for name in ["PATH", "MY_OWN", "PALINGENESIS_SET"] {
            assert!(!names.iter().any(|listed| listed == name), "{name} is in {names:?}");
        }
        let some = warned(&comes_later(&["MASTER_ADDR", "OTHER"]), "").unwrap();
        assert_eq!(listed(&some), names.iter().filter(|name| *name != "MASTER_ADDR").cloned().collect::<Vec<_>>());
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(warned(&comes_later(&all), ""), None);
        assert_eq!(warned(&comes_later(&[]), "container-order=off"), None);
        assert!(comes_later(&[]).refusal("container-order=error").contains("--container-env="));
    }

    #[test]
    fn without_a_container_or_inside_it_there_is_nothing_to_warn_of() {
        for container in [Container::None, Container::Inside] {
            let mut world = comes_later(&[]);
            world.task.container = container;
            assert_eq!(warned(&world, ""), None);
        }
    }

    fn inside(submitted: &[(&str, &str)], image: &[(&str, &str)]) -> World {
        let mut world = World::new("n[1-2]", "2(x2)", 3);
        world.task.container = Container::Inside;
        let environment = submitted.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        world.submitted = Some(environment.collect::<Environment>());
        world.export(submitted).export(image)
    }

    /// What enroot's hook 50-slurm-pytorch.sh and pyxis put into the
    /// environment of a container with PyTorch is no wish of the user's.
    #[test]
    fn ranks_and_meeting_place_of_the_container_s_runtime_are_not_the_user_s() {
        let hook = [
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "61044"),
            ("RANK", "2"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "7"),
        ];
        let plan = inside(&[], &hook).plan("").unwrap();
        assert_eq!(plan.value("MASTER_ADDR"), Some("n1"));
        let port: u16 = plan.value("MASTER_PORT").unwrap().parse().unwrap();
        assert!((20000..=31999).contains(&port), "{port}");
        for (name, value) in [("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")] {
            assert_eq!(plan.value(name), Some(value), "{name}");
        }
        assert_eq!(plan.warnings, []);
        // The user's own are, and stand above the image's.
        let plan = inside(&[("MASTER_ADDR", "10.0.0.9"), ("MASTER_PORT", "23456")], &hook).plan("").unwrap();
        assert_eq!((plan.value("MASTER_ADDR"), plan.value("MASTER_PORT")), (Some("10.0.0.9"), Some("23456")));
        // A shell is no rank, whatever the runtime says.
        let plan = inside(&[], &hook).plan("launch=shell").unwrap();
        for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE"] {
            assert!(plan.unset.iter().any(|note| note.name == name), "{name}");
        }
    }

    #[test]
    fn a_name_that_the_container_does_not_know_is_said_to_be_looked_up_there() {
        use crate::facts::network::Resolution;
        let mut world = inside(&[], &[]);
        world.resolution = Resolution::Failed("Name or service not known".into());
        let refusal = world.refusal("");
        assert!(refusal.contains("rank 0's host n1 does not resolve") && refusal.contains("on n2 (in its container)"));
        world.rank0.address = Some("10.1.2.3".into());
        let plan = world.plan("").unwrap();
        assert_eq!(plan.value("MASTER_ADDR"), Some("10.1.2.3"));
    }

    #[test]
    fn the_user_s_tuning_is_put_back_and_the_image_s_own_stays_below_it() {
        let user = [("NCCL_IB_TIMEOUT", "21"), ("PATH", "/home/u/bin"), ("HOME", "/home/u"), ("LD_PRELOAD", "/u.so")];
        let image = [
            ("NCCL_IB_TIMEOUT", "18"),
            ("PATH", "/opt/bin"),
            ("HOME", "/root"),
            ("LD_PRELOAD", "/i.so"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
        ];
        let plan = inside(&user, &image).plan("").unwrap();
        let timeout = plan.env.iter().find(|variable| variable.name == "NCCL_IB_TIMEOUT").unwrap();
        assert_eq!((timeout.value.as_str(), timeout.origin), ("21", Origin::User));
        assert!(timeout.why.contains("image has 18"), "{}", timeout.why);
        for name in ["PATH", "HOME", "LD_PRELOAD", "NCCL_SOCKET_IFNAME"] {
            assert_eq!(plan.value(name), None, "{name}");
        }
    }

    /// What is not UTF-8 is known with other characters in place of its bytes: a
    /// path put back so would lead elsewhere.
    #[test]
    fn a_value_that_is_not_utf_8_is_not_put_back_changed() {
        let broken = String::from_utf8_lossy(b"/data/caf\xe9").into_owned();
        for name in ["HF_HOME", "NCCL_IB_TIMEOUT", "NCCL_TOPO_FILE"] {
            let plan = inside(&[(name, &broken)], &[(name, "/image")]).plan("").unwrap();
            assert_eq!(plan.value(name), None, "{name}");
            let why = &plan.left.iter().find(|note| note.name == name).unwrap().why;
            assert!(why.contains("not UTF-8"), "{name}: {why}");
        }
        // A directory to be made neither.
        assert_eq!(crate::config::check_directory(&broken), Err("it is not UTF-8".into()));
    }
}
