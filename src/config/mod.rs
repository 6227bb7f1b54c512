//! What people asked for: the option's grammar, its environment equivalents, the
//! site file, and which of them counts. Parses and merges; it reads nothing of
//! the machine but the site file and decides nothing about a job.

mod nearest;
pub mod nics;
mod plugstack;
pub mod site;
mod spec;

pub use nearest::nearest;
pub use plugstack::{Plugstack, PlugstackError};
pub use spec::{
    APART, Bind, CheckLevel, Fabric, Gid, Isolate, KEYS, Key, Launch, LogLevel, Memory, NicDown, PortRange, Preflight,
    Profile, Rendezvous, Settings, Source, SpecError, Switch, WORDS, WarmPer, check_directory, help, key_named,
    printable, profiles_in, visible,
};
pub(crate) use spec::{check_host, parse_port, turns};

use crate::facts::Environment;

/// The flag's environment equivalent in srun's environment.
pub const FLAG_VARIABLE: &str = "PALINGENESIS";
/// Prefix of the variables that supply a value for one key.
pub const KEY_PREFIX: &str = "PALINGENESIS_OPT_";

/// How the flag was given on a command line, or inherited from sbatch or
/// salloc. Slurm spells "no argument" in three ways: NULL, "" and, when the
/// option went through sbatch's environment, "(null)" (`src/common/spank.c`
/// prints a NULL pointer with %s).
pub fn option_argument(argument: Option<&str>) -> &str {
    match argument {
        None | Some("(null)") => "",
        Some(text) => text,
    }
}

/// What stands on a command line, or was handed down by sbatch or salloc.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given<'a> {
    /// The argument of `--palingenesis`, if the option was given (last one wins,
    /// an srun's own beats what sbatch handed down).
    pub option: Option<&'a str>,
    /// The arguments of the options of [`APART`], in that order.
    pub apart: [Option<&'a str>; APART.len()],
    /// Names of the profiles that the site file defines.
    pub site_profiles: &'a [String],
}

impl<'a> Given<'a> {
    /// `--palingenesis=SPEC` and nothing else.
    pub fn spec(spec: &'a str) -> Given<'a> {
        Given { option: Some(spec), ..Given::default() }
    }
}

/// What the user's settings are, or `None` when the flag was not given at all.
///
/// `PALINGENESIS=SPEC` counts as the flag when the option is absent.
/// `PALINGENESIS_OPT_<KEY>` supplies a value for a key that neither names.
/// One of [`APART`]'s options alone is no flag.
///
/// # Errors
/// The first thing that is not understood, naming where it stands.
pub fn resolve(given: Given, environment: &Environment) -> Result<Option<Settings>, SpecError> {
    let mut settings = match (given.option, environment.get(FLAG_VARIABLE)) {
        (Some(argument), _) => {
            Settings::parse_with(option_argument(Some(argument)), Source::Option, given.site_profiles)?
        }
        (None, Some(spec)) => Settings::parse_with(spec, Source::Variable(FLAG_VARIABLE.into()), given.site_profiles)?,
        (None, None) => return Ok(None),
    };
    if !settings.off && !settings.help {
        for (key, text) in APART.iter().zip(given.apart) {
            text.map_or(Ok(()), |text| settings.take_apart(key, text))?;
        }
    }
    if !settings.off && !settings.help {
        for (name, value) in environment.iter() {
            if let Some(key) = name.strip_prefix(KEY_PREFIX) {
                settings.supply(name, key, value, given.site_profiles)?;
            }
        }
        settings.check_combination()?;
        settings.check_length()?;
    }
    Ok(Some(settings))
}

/// The option of sbatch or salloc, as seen in the job's environment; an srun in
/// the job takes it over (`src/common/spank.c`; measured with 22.05, 24.11 and 26.05).
const HANDED_DOWN: &str = "SLURM_SPANK__SLURM_SPANK_OPTION_palingenesis_palingenesis";

/// The same for the options of [`APART`].
pub const APART_HANDED_DOWN: [&str; APART.len()] = [
    "SLURM_SPANK__SLURM_SPANK_OPTION_palingenesis_palingenesis_cache",
    "SLURM_SPANK__SLURM_SPANK_OPTION_palingenesis_palingenesis_output",
    "SLURM_SPANK__SLURM_SPANK_OPTION_palingenesis_palingenesis_warm",
];

/// Marks the values a step was given, and begins with the step's "JOB.STEP"; see
/// `plan/marks.rs`.
pub const MARKS: &str = "PALINGENESIS_SET";
/// The settings a step was given, in canonical form. Not read by srun: it belongs
/// to its step only.
pub const SPEC_OF_STEP: &str = "PALINGENESIS_SPEC";

/// The site file of the step this process runs in, where it is not the usual one.
pub fn site_file_of_step(environment: &Environment) -> Option<&str> {
    of_this_step(environment).and(environment.get(site::FILE_OF_STEP))
}

/// The settings that were given to the step this process runs in.
fn of_this_step(environment: &Environment) -> Option<&str> {
    let (job, step) = (environment.get("SLURM_JOB_ID")?, environment.get("SLURM_STEP_ID")?);
    let marked = environment.get(MARKS)?.split(' ').next()?;
    environment.get(SPEC_OF_STEP).filter(|_| marked == format!("{job}.{step}"))
}

/// The settings of the step this process runs in, else those an srun with the
/// flag would have from here: those of [`resolve`] with the option handed down by
/// sbatch or salloc, and those of the bare flag where nothing gives it.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_flagged(
    spec: Option<&str>,
    environment: &Environment,
    site_profiles: &[String],
) -> Result<Settings, SpecError> {
    let option = spec.or(of_this_step(environment)).or(environment.get(HANDED_DOWN));
    // Its profile was one of the site file when the step started.
    let of_step = of_this_step(environment).filter(|_| spec.is_none()).map(profiles_in).unwrap_or_default();
    let site_profiles = &[site_profiles, &of_step].concat();
    // The settings of this step hold them already.
    let apart = APART_HANDED_DOWN.map(|name| environment.get(name).filter(|_| of_this_step(environment).is_none()));
    let given = Given { option, apart, site_profiles };
    match resolve(given, environment)? {
        Some(settings) => Ok(settings),
        None => Ok(resolve(Given { option: Some(""), ..given }, environment)?.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve_flagged_(spec: Option<&str>, environment: &Environment) -> Result<Settings, SpecError> {
        resolve_flagged(spec, environment, &[])
    }

    fn env(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect()
    }

    #[test]
    fn without_the_flag_key_variables_mean_nothing() {
        let vars = env(&[("PALINGENESIS_OPT_PORT", "nonsense"), ("PALINGENESIS_SET", "x")]);
        assert_eq!(resolve(Given::default(), &vars), Ok(None));
    }

    #[test]
    fn what_an_srun_with_the_flag_would_have() {
        let keys = env(&[("PALINGENESIS_OPT_PORT", "22000")]);
        assert_eq!(resolve_flagged_(None, &keys).unwrap().port, Some(22000));
        assert_eq!(resolve_flagged_(Some("port=23000"), &keys).unwrap().port, Some(23000));
        assert!(resolve_flagged_(None, &env(&[("PALINGENESIS", "off")])).unwrap().off);
        assert_eq!(resolve_flagged_(None, &env(&[])), Ok(Settings::default()));
        let of_sbatch = env(&[(HANDED_DOWN, "port=24000"), ("PALINGENESIS", "port=21000")]);
        assert_eq!(resolve_flagged_(None, &of_sbatch).unwrap().port, Some(24000));
        assert_eq!(resolve_flagged_(Some("port=23000"), &of_sbatch).unwrap().port, Some(23000));
        assert_eq!(resolve_flagged_(None, &env(&[(HANDED_DOWN, "(null)")])), Ok(Settings::default()));
        let in_step = |marks| {
            let step = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "1"), (HANDED_DOWN, "port=24000")];
            let own = [(SPEC_OF_STEP, "port=25000"), (MARKS, marks)];
            resolve_flagged_(None, &env(&[step.as_slice(), own.as_slice()].concat())).unwrap().port
        };
        assert_eq!(in_step("7.1 RANK=0"), Some(25000));
        // Inherited from another step.
        assert_eq!(in_step("7.0 RANK=0"), Some(24000));
    }

    #[test]
    fn the_three_spellings_of_no_argument_are_the_same() {
        for argument in ["", "(null)"] {
            let settings = resolve(Given::spec(argument), &env(&[])).unwrap().unwrap();
            assert_eq!(settings, Settings::default());
        }
        assert_eq!(option_argument(None), "");
    }

    #[test]
    fn the_option_beats_the_flag_variable_and_the_key_variables() {
        let vars = env(&[("PALINGENESIS", "port=21000"), ("PALINGENESIS_OPT_PORT", "22000")]);
        let port = |option| resolve(Given { option, ..Given::default() }, &vars).unwrap().unwrap().port;
        assert_eq!(port(None), Some(21000));
        assert_eq!(port(Some("port=23000")), Some(23000));
        assert_eq!(port(Some("default")), Some(22000));
        assert!(resolve(Given::spec("off"), &vars).unwrap().unwrap().off);
    }

    #[test]
    fn an_unknown_key_variable_names_the_nearest() {
        let vars = env(&[("PALINGENESIS", ""), ("PALINGENESIS_OPT_PROT", "22000")]);
        let error = resolve(Given::default(), &vars).unwrap_err().to_string();
        assert!(error.contains("PALINGENESIS_OPT_PROT"), "{error}");
        assert!(error.contains("PALINGENESIS_OPT_PORT"), "{error}");
    }

    #[test]
    fn a_dash_in_a_key_is_written_as_an_underscore() {
        let vars = env(&[
            ("PALINGENESIS", "rails=2"),
            ("PALINGENESIS_OPT_NIC_DOWN", "fail"),
            ("PALINGENESIS_OPT_BIND", "cpu+nic"),
            ("PALINGENESIS_OPT_RAILS", "4"),
        ]);
        let settings = resolve(Given::default(), &vars).unwrap().unwrap();
        assert_eq!((settings.nic_down, settings.rails), (NicDown::Fail, Some(2)));
        assert_eq!(settings.to_string(), "bind=cpu+nic,rails=2,nic-down=fail");
        let vars = env(&[("PALINGENESIS", ""), ("PALINGENESIS_OPT_NIC_DOWN", "stop")]);
        let error = resolve(Given::default(), &vars).unwrap_err().to_string();
        assert!(error.contains("nic-down in PALINGENESIS_OPT_NIC_DOWN") && error.contains("warn|fail"), "{error}");
    }

    #[test]
    fn our_other_variables_are_never_read_as_settings() {
        let vars = env(&[("PALINGENESIS", ""), ("PALINGENESIS_STORE_KEY", "k"), ("PALINGENESIS_SET", "s")]);
        assert_eq!(resolve(Given::default(), &vars).unwrap(), Some(Settings::default()));
    }

    /// A longer one would not reach the nodes whole, and the step run without.
    #[test]
    fn what_is_given_in_several_places_must_fit_into_one_spec() {
        // Each blank is three characters in SPEC.
        let directory = format!("/{}", "a ".repeat(500));
        let one = Given { option: Some("debug"), apart: [Some(&directory), None, None], ..Given::default() };
        let settings = resolve(one, &env(&[])).unwrap().unwrap();
        let again = Settings::parse(&settings.to_string(), Source::Option).unwrap();
        assert_eq!(again.cache.as_deref(), Some(directory.as_str()));
        let local = directory.replace(' ', "%20");
        let keys = env(&[("PALINGENESIS_OPT_LOCAL", local.as_str())]);
        let error = resolve(one, &keys).unwrap_err().to_string();
        assert!(error.contains("PALINGENESIS_OPT_*") && error.contains("2048"), "{error}");
        let checks: Vec<(String, &str)> = crate::plan::checks::ids()
            .map(|id| (format!("{KEY_PREFIX}{}", id.to_ascii_uppercase().replace('-', "_")), "error"))
            .collect();
        let checks: Vec<(&str, &str)> = checks.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        match resolve(Given::spec(""), &env(&checks)) {
            Ok(settings) => {
                let spec = settings.unwrap().to_string();
                assert!(Settings::parse(&spec, Source::Option).is_ok(), "{spec}");
            }
            Err(error) => assert!(matches!(error, SpecError::TooLong { .. }), "{error}"),
        }
    }

    #[test]
    fn key_variables_and_the_spec_may_not_contradict_each_other() {
        let vars = env(&[("PALINGENESIS_OPT_PORTS", "21000-22000")]);
        let error = resolve(Given::spec("port=21500"), &vars).unwrap_err().to_string();
        assert!(error.contains("port") && error.contains("ports"), "{error}");
    }
}
