//! What the site file has for ports, hosts and profiles: below what users export,
//! and named as the site's wherever it comes through.

use super::tests::World;
use super::*;
use crate::config::site::Site;
use crate::facts::User;

fn world(site: &str, exported: &[(&str, &str)]) -> World {
    let mut world = World::new("n[1-2]", "1(x2)", 1).export(exported);
    let site = Site::parse("/etc/palingenesis/palingenesis.toml", site).unwrap_or_else(|error| panic!("{error}"));
    world.site = Some(site.view(Some("gpu"), Some("n2"), &User::default()));
    world
}

fn found(plan: &Plan, name: &str) -> (String, Origin) {
    let variable = plan.env.iter().find(|variable| variable.name == name);
    variable.map(|variable| (variable.value.clone(), variable.origin)).unwrap_or_else(|| panic!("no {name}: {plan:?}"))
}

#[test]
fn exported_ports_and_hosts_stand_above_the_site_file_and_options_above_both() {
    let (port, host) = ("MASTER_PORT", "MASTER_ADDR");
    for (site, exported, spec, name, value, origin) in [
        ("port = 21000", &[][..], "", port, "21000", Origin::Site),
        ("port = 21000", &[(port, "22000")], "", port, "22000", Origin::User),
        ("port = 21000", &[(port, "22000")], "port=23000", port, "23000", Origin::Option),
        ("port = 21000", &[], "ports=24000-24000", port, "24000", Origin::Option),
        ("ports = \"25000-25000\"", &[], "", port, "25000", Origin::Site),
        ("ports = \"25000-25000\"", &[(port, "22000")], "", port, "22000", Origin::User),
        ("ports = \"25000-25000\"", &[], "port=23000", port, "23000", Origin::Option),
        ("suffix = \"-ib0\"", &[], "", host, "n1-ib0", Origin::Site),
        ("suffix = \"-ib0\"", &[(host, "10.0.0.9")], "", host, "10.0.0.9", Origin::User),
        ("suffix = \"-ib0\"", &[], "master=10.0.0.8", host, "10.0.0.8", Origin::Option),
        ("suffix = \"-ib0\"", &[], "suffix=-mg", host, "n1-mg", Origin::Option),
        ("master = \"10.0.0.7\"", &[], "", host, "10.0.0.7", Origin::Site),
        ("master = \"10.0.0.7\"", &[(host, "10.0.0.9")], "", host, "10.0.0.9", Origin::User),
        ("master = \"10.0.0.7\"", &[(host, "10.0.0.9")], "suffix=-mg", host, "n1-mg", Origin::Option),
        // No interfaces are known of a described step.
        ("iface = \"ib0\"", &[], "", host, "n1", Origin::Site),
        ("iface = \"ib0\"", &[(host, "10.0.0.9")], "", host, "10.0.0.9", Origin::User),
        ("[partition.gpu]\nport = 21001\n[partition.cpu]\nport = 21002", &[], "", port, "21001", Origin::Site),
    ] {
        let plan = world(site, exported).plan(spec).unwrap_or_else(|error| panic!("{site} {spec}: {error}"));
        assert_eq!(found(&plan, name), (value.to_string(), origin), "{site} {exported:?} {spec}");
        // That something gives way is told of options only.
        let told = plan.warnings.iter().any(|warning| warning.id == "variable-passed-over");
        assert_eq!(told, origin == Origin::Option && !exported.is_empty(), "{site} {exported:?} {spec}");
    }
}

#[test]
fn a_site_s_host_that_cannot_be_right_is_told_as_the_site_s() {
    for (site, parts) in [
        (
            "master = \"127.0.0.1\"",
            &["master=127.0.0.1 of the site file", "have the cluster's admins take master out"][..],
        ),
        ("master = \"n2\"", &["master=n2 of the site file is not rank 0's host", "rank 0 runs on n1"]),
    ] {
        let said = world(site, &[]).refusal("");
        parts.iter().for_each(|part| assert!(said.contains(part), "{site}: {said}"));
    }
}

#[test]
fn a_site_s_profile_is_its_base_and_more_and_a_missing_one_is_told() {
    let site = "profile = \"mine\"\n[profiles.mine]\nbase = \"fsdp\"\ndebug = true\nenv = { NCCL_IB_SL = \"3\" }";
    let plan = world(site, &[]).plan("").unwrap();
    assert_eq!(plan.step.profile, "mine,debug");
    assert_eq!(found(&plan, "NCCL_IB_SL"), ("3".to_string(), Origin::Site));
    // Of debug, which the profile switches on.
    assert_eq!(found(&plan, "NCCL_DEBUG").0, "INFO");
    // The settings for the nodes stay the user's.
    assert_eq!(plan.value("PALINGENESIS_SPEC"), Some("on"));
    assert_eq!(plan.value("PALINGENESIS_SITE"), None);

    // A worker's shape follows from the base, too.
    let plan = world("profile = \"mine\"\n[profiles.mine]\nbase = \"worker\"", &[]).plan("").unwrap();
    assert_eq!(plan.step.shape, Shape::Worker);

    let unknown = Settings::parse_with("mine", crate::config::Source::Option, &["mine".to_string()]).unwrap();
    let said = world("", &[]).plan_with(&unknown).unwrap_err().to_string();
    assert!(said.contains("profile mine is not in the site file of n2"), "{said}");
}

#[test]
fn another_file_than_the_usual_one_is_named_for_those_who_explain_the_step() {
    let mut world = world("", &[]);
    world.site.as_mut().unwrap().file = "/srv/site.toml".into();
    assert_eq!(world.plan("").unwrap().value("PALINGENESIS_SITE"), Some("/srv/site.toml"));
}

/// Whoever is to correct an interface that a node lacks looks for the word that stands in
/// his own line or file.
#[test]
fn an_interface_that_is_not_there_is_told_by_the_word_that_named_it() {
    use crate::facts::NetDevice;
    use crate::facts::netdevs::NetKind;
    let key = ["iface=eth9 of the site file (NCCL_SOCKET_IFNAME==eth9) names no network device on n2", "name an inter"];
    for (site, exported, spec, parts) in [
        ("iface = \"eth9\"", &[][..], "", &key[..]),
        ("[partition.gpu]\niface = \"eth9\"", &[], "", &key[..]),
        (
            "",
            &[],
            "iface=eth9",
            &["iface=eth9 (NCCL_SOCKET_IFNAME==eth9) names no network device on n2", "name an inter"],
        ),
        ("iface = \"eth0\"", &[], "iface=eth9", &["iface=eth9 (NCCL_SOCKET_IFNAME==eth9) names no network device"]),
        (
            "[env]\nNCCL_SOCKET_IFNAME = \"eth9\"",
            &[],
            "",
            &["NCCL_SOCKET_IFNAME=eth9 in the site file names no", "unset"],
        ),
        ("", &[("NCCL_SOCKET_IFNAME", "eth9")], "", &["NCCL_SOCKET_IFNAME=eth9 names no network device", "unset it"]),
        // The user's own stands above the site file's key, of which Gloo's is left.
        (
            "iface = \"eth9\"",
            &[("NCCL_SOCKET_IFNAME", "eth0")],
            "",
            &["iface=eth9 of the site file (GLOO_SOCKET_IFNAME=eth9)"],
        ),
        (
            "iface = \"eth1\"",
            &[],
            "",
            &["iface=eth1 of the site file (NCCL_SOCKET_IFNAME==eth1) only takes eth1, which is down"],
        ),
    ] {
        // No addresses are known of a described step, by which ranks would be refused before.
        let mut world = world(site, exported);
        let device = |name: &str, up| NetDevice { name: name.into(), up, mbps: None, kind: NetKind::Hardware };
        world.node.netdevs = Some(vec![device("lo", true), device("eth0", true), device("eth1", false)]);
        let spec = format!("{spec},checks=warn");
        let plan = world.plan(&spec).unwrap_or_else(|error| panic!("{site} {spec}: {error}"));
        let found: Vec<&Warning> = plan.warnings.iter().filter(|warning| warning.id == "ifname-missing").collect();
        let [one] = found[..] else { panic!("{site} {spec} {exported:?}: {found:?}") };
        let text = format!("{}; {}", one.message, one.cure);
        for part in parts {
            assert!(text.contains(part), "{site} {spec}: '{part}' is missing in {text}");
        }
        assert!(!parts[0].starts_with("iface") || !text.contains("unset"), "{text}");
    }
}
