use super::*;
use crate::config::{Bind, Fabric, Isolate, KEYS, Launch, Memory, NicDown, PortRange, Switch};

const FILE: &str = "/etc/palingenesis/palingenesis.toml";

fn parse(text: &str) -> Site {
    Site::parse(FILE, text).unwrap_or_else(|error| panic!("{text}\n{error}"))
}

fn finding(text: &str) -> String {
    Site::parse(FILE, text).expect_err(text).finding()
}

fn user() -> User {
    User { name: Some("ada".into()), uid: 1000 }
}

const EXAMPLE: &str = r#"
profile = "mixtral"
ports = "21000-21999"
cache = "/shared/{user}/cache"
local = "/scratch/{uid}"
debug = true
log = "info"

[rules]
port-range = "off"

[env]
NCCL_IB_HCA = "=mlx5_0,mlx5_1"
NCCL_IB_SL = 1

[force]
NCCL_NET = "IB"

[profiles.mixtral]
base = "megatron"
env = { NVTE_FWD_LAYERNORM_SM_MARGIN = "16" }

[partition.gpu]
launch = "agent"
debug = false
[partition.gpu.env]
NCCL_IB_SL = "2"

[node."gpu[01-16]"]
fabric = "roce"
port = 21500
[node."gpu[01-16]".force]
NCCL_IB_SL = "3"
[node."gpu0*"]
fabric = "tcp"
"#;

#[test]
fn the_more_specific_section_wins_key_by_key_and_variable_by_variable() {
    let site = parse(EXAMPLE);
    assert_eq!((site.log(), site.profile_names()), (LogLevel::Info, vec!["mixtral".to_string()]));
    let top = site.view(Some("cpu"), Some("cpu1"), &user());
    assert_eq!(top.settings.profile_name(), "mixtral");
    assert_eq!(top.settings.ports, Some(PortRange { low: 21000, high: 21999 }));
    assert_eq!(top.settings.cache.as_deref(), Some("/shared/ada/cache"));
    assert_eq!(top.settings.local.as_deref(), Some("/scratch/1000"));
    assert!(top.settings.debug && !top.settings.show);
    assert_eq!(top.settings.rules.get("port-range"), Some(&CheckLevel::Off));
    let variable = |view: &SiteView, name: &str| {
        let found: Vec<_> = view.env.iter().filter(|variable| variable.name == name).cloned().collect();
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        (found[0].value.clone(), found[0].force, found[0].place.clone())
    };
    assert_eq!(variable(&top, "NCCL_IB_SL"), ("1".into(), false, format!("{FILE}:14")));
    assert_eq!(variable(&top, "NCCL_NET"), ("IB".into(), true, format!("{FILE}:17")));

    let partition = site.view(Some("gpu"), Some("cpu1"), &user());
    assert_eq!(partition.settings.launch, Launch::Agent);
    assert!(!partition.settings.debug, "the partition takes the word back");
    assert_eq!(variable(&partition, "NCCL_IB_SL").0, "2");

    let node = site.view(Some("gpu"), Some("gpu12"), &user());
    assert_eq!((node.settings.fabric, node.settings.launch), (Fabric::Roce, Launch::Agent));
    // A port stands instead of the range of the top.
    assert_eq!((node.settings.port, node.settings.ports), (Some(21500), None));
    let (value, force, _) = variable(&node, "NCCL_IB_SL");
    assert_eq!((value.as_str(), force), ("3", true));
    assert_eq!(variable(&node, "NCCL_IB_HCA").0, "=mlx5_0,mlx5_1");
    // Of two that fit the later one.
    assert_eq!(site.view(None, Some("gpu07"), &user()).settings.fabric, Fabric::Tcp);

    let profile = &node.profiles["mixtral"];
    assert_eq!((profile.base, profile.env[0].value.as_str()), (Profile::Megatron, "16"));
}

#[test]
fn the_user_s_settings_stand_above_it_and_a_site_profile_has_its_base() {
    let view = parse(EXAMPLE).view(Some("gpu"), Some("n1"), &user());
    let settings = view.under(&Settings::default());
    assert_eq!((settings.profile_name(), settings.profile), ("mixtral", Profile::Megatron));
    assert!(settings.is_of_site("ports") && settings.is_of_site("profile"));
    let own = Settings::parse("fsdp,port=23000", crate::config::Source::Option).unwrap();
    let settings = view.under(&own);
    assert_eq!((settings.profile_name(), settings.port, settings.ports), ("fsdp", Some(23000), None));
}

#[test]
fn every_mistake_is_one_line_with_file_line_and_reason() {
    for (text, line, parts) in [
        ("prot = 1", 1, &["unknown key 'prot' (did you mean 'port'?)"][..]),
        ("\n\nbanana = 1", 3, &["unknown key 'banana'"]),
        ("[partiton.gpu]", 1, &["unknown section 'partiton' (did you mean 'partition'?)"]),
        ("profile = \"mixtrl\"\n[profiles.mixtral]", 1, &["'mixtrl' for profile", "did you mean 'mixtral'?"]),
        ("fabric = \"infiniban\"", 1, &["bad value 'infiniban' for fabric", "did you mean 'infiniband'?"]),
        ("port = 80", 1, &["bad value '80' for port", "below 1024"]),
        ("port = [1]", 1, &["port is a list, but must be text"]),
        ("port = 2e4", 1, &["port is a number with a point"]),
        ("fabric = true", 1, &["fabric is true or false, but must be text"]),
        ("show = \"true\"", 1, &["show is text, but must be true or false, without quotes"]),
        ("ports = \"30000-20000\"", 1, &["ends (20000) before it begins (30000)"]),
        ("port = 21000\nports = \"21000-22000\"", 2, &["port and ports are both given"]),
        ("off = true", 1, &["off is a word for a command line"]),
        ("log = \"verbose\"", 1, &["bad value 'verbose' for log", "off, error, info or debug"]),
        ("[partition.gpu]\nlog = \"info\"", 2, &["log stands at the top of the file only"]),
        ("[partition.gpu.partition.x]", 1, &["partition stands at the top of the file only"]),
        ("[partition]\nfabric = \"tcp\"", 2, &["write it below [partition.NAME]"]),
        ("[node.\"gpu[1-\"]", 1, &["bad node pattern"]),
        ("[rules]\nport-rnge = \"off\"", 2, &["unknown check 'port-rnge' (did you mean 'port-range'?)"]),
        ("[rules]\nport-range = \"no\"", 2, &["bad value 'no' for port-range", "off, warn or error"]),
        ("port-range = \"off\"", 1, &["port-range is a check: write it below [rules]"]),
        ("NCCL_IB_TIMEOUT = \"22\"", 1, &["unknown key 'NCCL_IB_TIMEOUT'", "below [env] or [force]"]),
        ("cache = \"hf\"", 1, &["bad value 'hf' for cache", "not absolute"]),
        ("cache = \"/c/{usr}\"", 1, &["only {user} and {uid} stand for something"]),
        ("[env]\nA = true", 2, &["A is true, but a variable's value is text"]),
        ("[env]\nA = [\"b\"]", 2, &["A is a list"]),
        ("[env]\nA = \"a\\u0000b\"", 2, &["the value of A holds a line break or a control character"]),
        ("[env]\nA = \"\"\"a\nb\"\"\"", 2, &["the value of A holds a line break"]),
        ("[env]\n\"A B\" = \"1\"", 2, &["is no name of a variable"]),
        ("[env]\nA = \"1\"\n[force]\nA = \"2\"", 4, &["A stands below [env] and below [force]"]),
        ("[env]\nprofile = \"fsdp\"", 2, &["profile is a setting", "above the first [section]"]),
        ("[env]\nnic-deny = []", 2, &["nic-deny is a setting", "above the first [section]"]),
        ("[env]\nA = \"1\"\nA = \"2\"", 3, &["not TOML: duplicate key"]),
        ("a = = 1", 1, &["not TOML: "]),
        ("[profiles.mixtral]\nbase = \"megatorn\"", 2, &["no built-in profile 'megatorn' (did you mean 'megatron'?)"]),
        ("[profiles.mixtral]\nbas = \"megatron\"", 2, &["unknown key 'bas' in a profile (did you mean 'base'?)"]),
        ("[profiles.show]", 1, &["profile 'show' cannot have that name", "a meaning already"]),
        ("[profiles.\"a,b\"]", 1, &["profile 'a,b' cannot have that name"]),
        ("profiles = 1", 1, &["profiles is a number, but must be a section"]),
        ("nic-alow = []", 1, &["unknown key 'nic-alow' (did you mean 'nic-allow'?)"]),
        ("[node.\"g*\"]\nnic-dney = []", 2, &["unknown key 'nic-dney' (did you mean 'nic-deny'?)"]),
        ("[node]\nnic-deny = []", 2, &["nic-deny stands in no section of a node", "write it below [node.NAME]"]),
        ("nic-allow = \"mlx5_0\"", 1, &["nic-allow is text, but must be a list of texts"]),
        ("nic-allow = [\"mlx5_0\",\n  7]", 2, &["nic-allow holds what is no text"]),
        ("nic-allow = [\n\"mlx5_0:1\"]", 2, &["'mlx5_0:1' in nic-allow names a port", "ports are not written here"]),
        ("nic-deny = [\"=mlx5_0\"]", 1, &["'=mlx5_0' in nic-deny begins with a sign of NCCL_IB_HCA"]),
        ("nic-deny = [\"mlx5_0,mlx5_1\"]", 1, &["each is a text of its own"]),
        ("[profiles.x]\nnic-allow = []", 2, &["unknown key 'nic-allow' in a profile"]),
        ("bind = \"cpu,nic\"", 1, &["bad value 'cpu,nic' for bind", "joined by +"]),
        ("isolate = true", 1, &["isolate is true or false, but must be text: \"off|env\""]),
        ("exclusive = true", 1, &["exclusive is true or false, but must be text: \"off|on\""]),
        ("rails = \"0\"", 1, &["bad value '0' for rails", "from 1 to 16"]),
        ("nic-down = \"ignore\"", 1, &["bad value 'ignore' for nic-down", "warn|fail"]),
    ] {
        let said = finding(text);
        assert!(said.starts_with(&format!("{FILE}:{line}: ")), "{text:?}: {said}");
        for part in parts {
            assert!(said.contains(part), "{text:?}: '{part}' is missing in: {said}");
        }
        let refusal = Site::parse(FILE, text).unwrap_err().to_string();
        assert!(!refusal.contains('\n') && refusal.contains("palingenesis doctor --config"), "{refusal}");
    }
}

/// Cards of one node may be others' elsewhere: a list is one thing.
#[test]
fn the_most_specific_section_s_list_of_cards_holds_as_a_whole() {
    let site = parse(
        "nic-allow = [\"mlx5_[0-7]\"]\nnic-deny = [\"mlx5_7\", \"0000:29:00.0\"]\n\
         [partition.gpu]\nnic-allow = [\n  \"ib0\", # of old nodes\n  \"ib1\",\n]\n\
         [node.\"gpu[1-4]\"]\nnic-deny = [\"ib1\"]\n[node.gpu4]\nnic-allow = []\nnic-deny = []\n",
    );
    let rules = |partition, node| {
        let nics = site.view(Some(partition), Some(node), &user()).nics;
        let list = |list: Vec<NicPattern>| list.iter().map(NicPattern::to_string).collect::<Vec<_>>().join(" ");
        (nics.allow.map(list), list(nics.deny))
    };
    let of = |allow: &str, deny: &str| (Some(allow.to_string()), deny.to_string());
    assert_eq!(rules("cpu", "n1"), of("mlx5_[0-7]", "mlx5_7 0000:29:00.0"));
    assert_eq!(rules("gpu", "n1"), of("ib0 ib1", "mlx5_7 0000:29:00.0"));
    assert_eq!(rules("gpu", "gpu1"), of("ib0 ib1", "ib1"));
    assert_eq!(rules("gpu", "gpu4"), (None, String::new()));
    let text = site.text() + &site.view_text(Some("gpu"), Some("gpu1"), &user());
    for line in [
        "    nic-allow = [\"mlx5_[0-7]\"]",
        "    nic-deny = [\"mlx5_7\", \"0000:29:00.0\"]",
        "    nic-allow = []",
        "    nic-allow = [\"ib0\", \"ib1\"]",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[test]
fn the_keys_of_binding_have_their_place_in_the_file() {
    let text = "bind = \"cpu+nic\"\nmem = \"bind\"\nisolate = \"env\"\nexclusive = \"on\"\nrails = \"2\"\nnic-down = \"fail\"\n";
    let view = parse(text).view(None, None, &user());
    let settings = view.under(&Settings::default());
    assert_eq!(settings.bind, Bind { cpu: true, mem: false, nic: true });
    assert_eq!((settings.mem, settings.isolate, settings.exclusive), (Memory::Bind, Isolate::Env, Switch::On));
    assert_eq!((settings.rails, settings.nic_down), (Some(2), NicDown::Fail));
    let own = Settings::parse("bind=off,rails=4", crate::config::Source::Option).unwrap();
    let settings = view.under(&own);
    assert_eq!((settings.bind.to_string().as_str(), settings.rails, settings.mem), ("off", Some(4), Memory::Bind));
}

#[test]
fn what_torchrun_reads_besides_ranks_and_addresses_is_an_admin_s_to_set() {
    let site = parse(
        "[env]\nPET_MAX_RESTARTS = \"0\"\nPET_TEE = \"3\"\nPET_LOG_DIR = \"/tmp\"\nJAX_COMPILATION_CACHE_DIR = \"/c\"\n",
    );
    assert_eq!(site.view(None, None, &user()).env.len(), 4);
}

#[test]
fn variables_that_are_no_admin_s_to_set_are_refused_with_the_reason() {
    for (name, why) in [
        ("RANK", "a fact of the step"),
        ("WORLD_SIZE", "a fact of the step"),
        ("LOCAL_RANK", "a fact of the step"),
        ("MASTER_ADDR", "the settings port, ports, master, suffix and iface"),
        ("MASTER_PORT", "the settings port, ports, master, suffix and iface"),
        ("PET_NODE_RANK", "a fact of the step"),
        ("PET_RDZV_ENDPOINT", "a fact of the step"),
        ("JAX_PROCESS_ID", "a fact of the step"),
        ("TORCHELASTIC_USE_AGENT_STORE", "a fact of the step"),
        ("SLURM_NTASKS", "Slurm's own"),
        ("CUDA_VISIBLE_DEVICES", "Slurm decides"),
        ("LD_PRELOAD", "loads code"),
        ("PALINGENESIS", "our own"),
        ("PALINGENESIS_OPT_PORT", "our own"),
        ("HOME", "the user"),
        ("HF_TOKEN", "a secret"),
        ("WANDB_API_KEY", "a secret"),
        ("AWS_SECRET_ACCESS_KEY", "a secret"),
    ] {
        for table in ["[env]", "[force]", "[partition.p.env]", "[node.\"n*\".force]", "[profiles.x.env]"] {
            let said = finding(&format!("{table}\n{name} = \"s3cr3t\""));
            assert!(said.contains(&format!(":2: {name} cannot be set here: it ")) && said.contains(why), "{said}");
            assert!(!said.contains("s3cr3t"), "{said}");
        }
    }
}

/// NCCL reads integers by strtoll, so that a word is 0 (NCCL, src/misc/param.cc).
#[test]
fn a_value_against_its_grammar_is_a_warning_with_its_line() {
    let site = parse("[env]\nNCCL_IB_TIMEOUT = \"120\"\nFOO = \"bar\"\n");
    let [warning] = site.warnings() else { panic!("{:?}", site.warnings()) };
    assert!(warning.starts_with(&format!("{FILE}:2: NCCL_IB_TIMEOUT=120: 120 is outside the range")), "{warning}");
    assert!(parse("[env]\nNCCL_IB_TIMEOUT = \"22\"").warnings().is_empty());
}

#[test]
fn empty_files_say_nothing() {
    for text in ["", "\n", "# only a comment\n", "\u{feff}", "\r\n# windows\r\n"] {
        let view = parse(text).view(Some("p"), Some("n"), &user());
        assert_eq!(view, SiteView { file: FILE.into(), ..SiteView::default() }, "{text:?}");
    }
}

/// srun knows neither the nodes nor, outside a job, the partition.
#[test]
fn before_the_place_is_known_findings_are_as_mild_as_anywhere() {
    let site = parse(
        "[rules]\nport-range = \"error\"\n[partition.p]\nchecks = \"warn\"\n[node.n1.rules]\nport-range = \"off\"\n",
    );
    let level = |partition, node| {
        let view = site.view(partition, node, &user());
        (view.settings.checks, view.settings.rules.get("port-range").copied())
    };
    assert_eq!(level(None, None), (CheckLevel::Warn, Some(CheckLevel::Off)));
    assert_eq!(level(Some("q"), None), (CheckLevel::Error, Some(CheckLevel::Off)));
    assert_eq!(level(Some("q"), Some("n2")), (CheckLevel::Error, Some(CheckLevel::Error)));
}

#[test]
fn a_user_s_name_that_is_no_part_of_a_path_becomes_the_number() {
    let site = parse("cache = \"/c/{user}-{uid}\"");
    for (name, expected) in [
        (Some("ada"), "/c/ada-1000"),
        (None, "/c/1000-1000"),
        (Some(""), "/c/1000-1000"),
        (Some("../root"), "/c/1000-1000"),
        (Some(".."), "/c/1000-1000"),
        (Some("a/b"), "/c/1000-1000"),
        (Some("ada@example.org"), "/c/ada@example.org-1000"),
    ] {
        let user = User { name: name.map(String::from), uid: 1000 };
        assert_eq!(site.view(None, None, &user).settings.cache.as_deref(), Some(expected));
    }
    assert_eq!(parse("cache = \"/a, b#c%20\"").view(None, None, &user()).settings.cache.as_deref(), Some("/a, b#c%20"));
}

/// The documented file: every line that is an example is right, and nothing that
/// may stand in a site file is missing.
#[test]
fn the_file_in_etc_names_everything_and_its_examples_are_right() {
    let text = include_str!("../../../etc/palingenesis.toml");
    assert!(text.lines().all(|line| line.is_empty() || line.starts_with('#')), "all of it is commented out");
    parse(text);
    let uncommented: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("##") || line.contains('=') && !line.starts_with("## "))
        .map(|line| line.trim_start_matches('#'))
        .collect();
    // Settings with two # exclude others: each by itself.
    let alone = ["port = 29400", "iface = \"ib0\"", "master = \"node1\"", "warm = \"uv sync\""];
    let without: Vec<&str> = uncommented.iter().copied().filter(|line| !alone.contains(line)).collect();
    let site = parse(&without.join("\n"));
    assert!(site.warnings().is_empty(), "{:?}", site.warnings());
    for line in alone {
        assert!(uncommented.contains(&line), "{line}");
        parse(line);
    }
    let has = |name: &str| uncommented.iter().any(|line| line.starts_with(&format!("{name} = ")));
    for key in KEYS {
        assert!(has(key.name), "{} is not in etc/palingenesis.toml", key.name);
    }
    for word in parse::SITE_WORDS.iter().chain(&parse::LISTS).chain(&["log"]) {
        assert!(has(word), "{word}");
    }
    for section in ["[rules]", "[env]", "[force]", "[profiles.", "[partition.", "[node."] {
        assert!(uncommented.iter().any(|line| line.starts_with(section)), "{section}");
    }
}

#[test]
fn no_text_panics() {
    let pieces = [
        "[",
        "]",
        "\"",
        "'",
        "=",
        ".",
        "\n",
        "{",
        "}",
        ",",
        "#",
        "env",
        "force",
        "rules",
        "node",
        "partition",
        "profiles",
        "port",
        "cache",
        "A",
        "1",
        "true",
        "\"x\"",
        "\u{0}",
        "ä",
        "\\u",
        "0x",
        "1979-05-27",
        "[[",
        "]]",
        "\"\"\"",
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..5_000 {
        let mut text = String::new();
        loop {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            match pieces.get((state >> 8) as usize % (pieces.len() + 3)) {
                Some(piece) => text.push_str(piece),
                None => break,
            }
        }
        if let Err(error) = Site::parse(FILE, &text) {
            assert!(!error.to_string().contains(['\n', '\0']), "{text:?}: {error}");
        }
    }
}

/// Each of these is within [`LARGEST`], and is read by slurmstepd.
#[test]
fn a_file_made_to_exhaust_its_reader_is_an_error() {
    let many = 100_000;
    let texts = [
        "[".repeat(2 * many),
        format!("a={}", "[".repeat(2 * many)),
        format!("a={}{}", "[".repeat(many), "]".repeat(many)),
        format!("a={}", "{a=".repeat(many / 2)),
        format!("{}a=1", "a.".repeat(many)),
        format!("[{}a]", "a.".repeat(many)),
        format!("[[{}a]]", "a.".repeat(many)),
        format!("env={{{}A=1}}", "a.".repeat(many)),
        "[a.b]\n".repeat(many / 4),
        format!("a=\"{}", "\\u0041".repeat(many / 4)),
    ];
    for text in texts {
        assert!(text.len() as u64 <= LARGEST, "{}", text.len());
        assert!(finding(&text).contains(": "), "{}", &text[..10]);
    }
    // 262144 names each, in 52 bytes.
    let section = |number: usize| format!("[node.\"a{number}[0-65535],b[0-65535],c[0-65535],d[0-65535]\"]\n");
    let text: String = (0..4000).map(section).collect();
    let found = finding(&text);
    assert!(found.starts_with(&format!("{FILE}:2: the file's patterns stand for more than 262144 names")), "{found}");
    parse(&section(0));
}
