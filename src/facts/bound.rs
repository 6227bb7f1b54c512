//! Whether the user chose the CPUs or the memory of a step's tasks, as srun
//! reads it from its command line and its environment. It tells nobody: Slurm
//! sets SLURM_CPU_BIND in the tasks also where it chose by itself.

use super::Environment;
use super::task::UserBound;
use crate::config::printable;

/// An option of srun and what stands for it.
struct Choice {
    /// Its names, and how many of their letters getopt_long needs: fewer would be
    /// another option's, too.
    options: &'static [(&'static str, usize)],
    variable: &'static str,
    /// Words of its value that choose nothing.
    manners: &'static [&'static str],
}

const CPU: Choice = Choice {
    // The second one for the mpirun of Open MPI.
    options: &[("--cpu-bind", "--cpu-b".len()), ("--cpu_bind", "--cpu_".len())],
    variable: "SLURM_CPU_BIND",
    manners: &["q", "quiet", "v", "verbose"],
};

const MEM: Choice = Choice {
    options: &[("--mem-bind", "--mem-b".len())],
    variable: "SLURM_MEM_BIND",
    manners: &["q", "quiet", "v", "verbose", "sort", "nosort"],
};

impl UserBound {
    /// What srun's words, `srun` itself the first, and its environment say.
    /// `command` are those of the words that belong to the user's program; where
    /// they do not stand at the end, all words count, and what is bound by chance
    /// merely stays as it is.
    pub fn of(words: &[String], command: &[String], environment: &Environment) -> UserBound {
        let options = options(words, command);
        UserBound { cpu: CPU.made(options, environment), mem: MEM.made(options, environment) }
    }
}

/// The words that are srun's own, without its name.
pub(super) fn options<'a>(words: &'a [String], command: &[String]) -> &'a [String] {
    // The command's first word may differ: --bcast makes it the copy's path.
    let arguments = command.get(1..).filter(|arguments| words.len() > command.len() && words.ends_with(arguments));
    let options = match arguments {
        Some(arguments) => &words[..words.len() - arguments.len() - 1],
        None => words,
    };
    options.get(1..).unwrap_or_default()
}

impl Choice {
    fn made(&self, options: &[String], environment: &Environment) -> Option<String> {
        if let Some(value) = self.option(options) {
            return self.chooses(value).then(|| format!("{}={}", self.options[0].0, printable(value)));
        }
        let value = environment.get(self.variable).filter(|value| self.chooses(value))?;
        let from = if self.is_slurm_s(value, environment) { "left by an outer step" } else { "exported" };
        Some(format!("{}={} ({from})", self.variable, printable(value)))
    }

    /// The value of its last use.
    fn option<'a>(&self, words: &'a [String]) -> Option<&'a str> {
        let is_it =
            |name: &str| self.options.iter().any(|(option, least)| name.len() >= *least && option.starts_with(name));
        let mut words = words.iter();
        let mut last = None;
        while let Some(word) = words.next() {
            match word.split_once('=') {
                Some((name, value)) if is_it(name) => last = Some(value),
                None if is_it(word) => last = words.next().map(String::as_str),
                _ => {}
            }
        }
        last
    }

    fn chooses(&self, value: &str) -> bool {
        value.split(',').map(|word| word.trim().to_ascii_lowercase()).any(|word| {
            // A list's numbers follow their own word.
            !word.is_empty() && !self.manners.contains(&word.as_str())
        })
    }

    /// Whether it is what Slurm sets in a step's tasks, beside its parts.
    fn is_slurm_s(&self, value: &str, environment: &Environment) -> bool {
        let part = |name: &str| environment.get(&format!("{}_{name}", self.variable));
        let kind = part("TYPE").filter(|kind| !kind.is_empty());
        kind.is_some_and(|kind| value.ends_with(&format!("{kind}{}", part("LIST").unwrap_or_default())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    fn of(line: &str, command: &str, variables: &[(&str, &str)]) -> (Option<String>, Option<String>) {
        let environment = variables.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let bound = UserBound::of(&words(line), &words(command), &environment);
        (bound.cpu, bound.mem)
    }

    fn cpu(line: &str) -> Option<String> {
        of(line, "a.out", &[]).0
    }

    #[test]
    fn the_options_in_every_form_that_getopt_long_takes() {
        for line in [
            "srun --cpu-bind=map_cpu:0,1 a.out",
            "srun --cpu_bind=map_cpu:0,1 a.out",
            "srun -n2 --cpu-bind map_cpu:0,1 a.out",
            "srun --cpu-b=map_cpu:0,1 a.out",
            "srun --cpu_ map_cpu:0,1 --palingenesis a.out",
            "srun --cpu-bind=none --cpu-bin=map_cpu:0,1 -- a.out",
        ] {
            assert_eq!(cpu(line).as_deref(), Some("--cpu-bind=map_cpu:0,1"), "{line}");
        }
        for line in [
            "srun a.out",
            "srun -n2 --cpus-per-task=2 --cpu-freq=high a.out",
            // Says only that it is to be printed.
            "srun --cpu-bind=verbose a.out",
            "srun --cpu-bind=none --cpu-bind=q,v a.out",
            "srun --cpu-bind",
            "srun",
            "",
        ] {
            assert_eq!(cpu(line), None, "{line}");
        }
        assert_eq!(cpu("srun --cpu-bind=v,cores a.out").as_deref(), Some("--cpu-bind=v,cores"));
        assert_eq!(of("srun --mem-bind=local a.out", "a.out", &[]), (None, Some("--mem-bind=local".into())));
        assert_eq!(of("srun --mem-b none a.out", "a.out", &[]).1.as_deref(), Some("--mem-bind=none"));
        for line in ["srun --mem=1G --mem-per-cpu=1 a.out", "srun --mem-bind=sort,quiet a.out"] {
            assert_eq!(of(line, "a.out", &[]), (None, None), "{line}");
        }
    }

    #[test]
    fn the_command_s_own_words_are_not_srun_s() {
        let numactl = "numactl --cpu-bind=1 --mem-bind 0 a.out";
        assert_eq!(of(&format!("srun -n2 {numactl}"), numactl, &[]), (None, None));
        // --bcast: the first word is the copy's.
        let copy = numactl.replace("numactl", "/tmp/slurm_bcast_1.0_n1");
        assert_eq!(of(&format!("srun --bcast {numactl}"), &copy, &[]), (None, None));
        let both = format!("srun --cpu-bind=none {numactl}");
        assert_eq!(of(&both, numactl, &[]), (Some("--cpu-bind=none".into()), None));
        // A het step's first component, --multi-prog: the command does not stand at the end.
        assert!(of("srun a --cpu-bind=1 : b", "a --cpu-bind=1", &[]).0.is_some());
        assert_eq!(of("srun --multi-prog file", "file 0\ta\n", &[]), (None, None));
        // A command that srun does not know.
        assert_eq!(of("srun --cpu-bind=none a.out", "", &[]).0.as_deref(), Some("--cpu-bind=none"));
    }

    /// <https://github.com/nebius/soperator/pull/2316>: srun reads the variables as
    /// options, and Slurm sets them in every task.
    #[test]
    fn srun_s_own_variables() {
        let inherited = [
            ("SLURM_CPU_BIND", "quiet,mask_cpu:0x1,0x2"),
            ("SLURM_CPU_BIND_VERBOSE", "quiet"),
            ("SLURM_CPU_BIND_TYPE", "mask_cpu:"),
            ("SLURM_CPU_BIND_LIST", "0x1,0x2"),
        ];
        let found = of("srun a.out", "a.out", &inherited).0;
        assert_eq!(found.as_deref(), Some("SLURM_CPU_BIND=quiet,mask_cpu:0x1,0x2 (left by an outer step)"));
        assert_eq!(of("srun --cpu-bind=none a.out", "a.out", &inherited).0.as_deref(), Some("--cpu-bind=none"));
        for (name, value, expected) in [
            ("SLURM_CPU_BIND", "none", (Some("SLURM_CPU_BIND=none (exported)".to_string()), None)),
            ("SLURM_MEM_BIND", "local", (None, Some("SLURM_MEM_BIND=local (exported)".to_string()))),
            ("SLURM_CPU_BIND", "", (None, None)),
            ("SLURM_CPU_BIND", "verbose", (None, None)),
            ("SLURM_CPU_BIND_TYPE", "mask_cpu:", (None, None)),
            ("SLURM_MEM_BIND", "quiet,sort", (None, None)),
        ] {
            assert_eq!(of("srun a.out", "a.out", &[(name, value)]), expected, "{name}={value}");
        }
        let long = format!("mask_cpu:{}", "0x1,".repeat(1000));
        assert!(of("srun a.out", "a.out", &[("SLURM_CPU_BIND", &long)]).0.is_some_and(|text| text.len() < 150));
    }
}
