//! What srun was asked to do when a rank or a node fails, from its own words and
//! variables: it tells nobody.

use super::Environment;

/// The options about failures, and those that tell whose a line of output is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// `--kill-on-bad-exit`, or SLURM_KILL_BAD_EXIT: whether the ranks left are ended when
    /// one fails. `None`: slurm.conf's KillOnBadExit counts.
    pub kill: Option<bool>,
    /// `--no-kill`, or SLURM_NO_KILL: the step goes on when a node fails.
    pub no_kill: bool,
    /// `--wait`, or SLURM_WAIT: seconds after the first rank's end, however it ended, after
    /// which the ranks left are ended; 0 is never. `None`: slurm.conf's WaitTime counts.
    pub wait: Option<u32>,
    /// `--label`, or a file for each rank.
    pub labelled: bool,
}

/// srun's short options that take a value, attached or as the next word (srun(1)).
const WITH_VALUE: &str = "AaBCcDdeGgiJLMmNnopPqrSTtUuwWx";
/// And those whose value, if any, is attached.
const WITH_ATTACHED: &str = "IkK";

/// Long options and the shortest unique beginning that getopt_long takes for them.
const KILL: (&str, usize) = ("--kill-on-bad-exit", "--k".len());
const NO_KILL: (&str, usize) = ("--no-kill", "--no-k".len());
const WAIT: (&str, usize) = ("--wait", "--wa".len());
const LABEL: (&str, usize) = ("--label", "--la".len());
const OUTPUT: (&str, usize) = ("--output", "--ou".len());

impl Policy {
    /// What srun's words, `srun` itself the first, and its environment say. `command` are
    /// those of the words that belong to the user's program; where they do not stand at
    /// the end, all words count.
    pub fn of(words: &[String], command: &[String], environment: &Environment) -> Policy {
        let mut policy = Policy::default();
        let variable = |name: &str| environment.get(name).filter(|value| !value.is_empty());
        policy.kill = variable("SLURM_KILL_BAD_EXIT").map(is_on);
        policy.no_kill = environment.get("SLURM_NO_KILL").is_some_and(|value| !matches!(value, "off" | "0"));
        policy.wait = variable("SLURM_WAIT").and_then(|value| value.parse().ok());
        policy.labelled = environment.get("SLURM_LABELIO").is_some_and(is_on)
            || ["SLURM_STDOUTMODE", "SRUN_OUTPUT"].iter().any(|name| variable(name).is_some_and(has_rank));
        let mut words = super::bound::options(words, command).iter();
        while let Some(word) = words.next() {
            if word.starts_with("--") {
                policy.take_long(word, &mut words);
            } else if let Some(cluster) = word.strip_prefix('-') {
                policy.take_short(cluster, &mut words);
            }
        }
        policy
    }

    fn take_long<'a>(&mut self, word: &str, words: &mut impl Iterator<Item = &'a String>) {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let is = |(option, least): (&str, usize)| name.len() >= least && option.starts_with(name);
        if is(KILL) {
            self.kill = Some(value.is_none_or(is_on));
        } else if is(NO_KILL) {
            self.no_kill = value != Some("off");
        } else if is(LABEL) {
            self.labelled = true;
        } else if is(WAIT) || is(OUTPUT) {
            let next = if value.is_none() { words.next().map(String::as_str) } else { value };
            self.take_value(if is(WAIT) { 'W' } else { 'o' }, next.unwrap_or_default());
        }
    }

    fn take_short<'a>(&mut self, cluster: &str, words: &mut impl Iterator<Item = &'a String>) {
        for (index, option) in cluster.char_indices() {
            let attached = &cluster[index + option.len_utf8()..];
            match option {
                'K' => self.kill = Some(attached.is_empty() || is_on(attached)),
                'k' => self.no_kill = attached != "off",
                'l' => self.labelled = true,
                _ => {}
            }
            if WITH_VALUE.contains(option) {
                let value = if attached.is_empty() { words.next().map_or("", String::as_str) } else { attached };
                self.take_value(option, value);
            }
            if WITH_VALUE.contains(option) || WITH_ATTACHED.contains(option) {
                return;
            }
        }
    }

    fn take_value(&mut self, option: char, value: &str) {
        match option {
            'W' => self.wait = value.parse().ok().or(self.wait),
            'o' => self.labelled |= has_rank(value),
            _ => {}
        }
    }
}

fn is_on(value: &str) -> bool {
    value.trim() != "0"
}

/// `%t` of a file name, also `%4t`.
fn has_rank(name: &str) -> bool {
    name.split('%').skip(1).any(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with('t'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(line: &str, variables: &[(&str, &str)]) -> Policy {
        let words: Vec<String> = line.split(' ').map(String::from).collect();
        let at = words.iter().position(|word| word == "a.out").unwrap();
        let environment = variables.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Policy::of(&words, &words[at..], &environment)
    }

    /// srun(1) of 22.05.
    #[test]
    fn the_options_in_their_forms() {
        let kill = |line: &str| policy(line, &[]).kill;
        for line in [
            "srun -K a.out",
            "srun -lK -N2 a.out",
            "srun --kill-on-bad-exit a.out",
            "srun --kill a.out",
            "srun -K1 a.out",
        ] {
            assert_eq!(kill(line), Some(true), "{line}");
        }
        for line in ["srun -K0 a.out", "srun --kill-on-bad-exit=0 a.out"] {
            assert_eq!(kill(line), Some(false), "{line}");
        }
        // The program's, a job's name, an address.
        for line in ["srun a.out -K", "srun -J -K a.out", "srun -JK a.out", "srun -N 2 a.out --kill-on-bad-exit"] {
            assert_eq!(kill(line), None, "{line}");
        }
        assert!(policy("srun -k a.out", &[]).no_kill && policy("srun --no-kill a.out", &[]).no_kill);
        assert!(!policy("srun --no-kill=off a.out", &[]).no_kill && !policy("srun a.out -k", &[]).no_kill);
        for line in ["srun -W 30 a.out", "srun -W30 a.out", "srun --wait=30 a.out", "srun -n2 --wait 30 a.out"] {
            assert_eq!(policy(line, &[]).wait, Some(30), "{line}");
        }
        for line in ["srun -l a.out", "srun --label a.out", "srun -o x-%t.log a.out", "srun --output=%j-%4t.log a.out"]
        {
            assert!(policy(line, &[]).labelled, "{line}");
        }
        for line in ["srun -o %j.log a.out", "srun -N2 a.out -l", "srun --output x.log a.out"] {
            assert!(!policy(line, &[]).labelled, "{line}");
        }
    }

    #[test]
    fn the_words_stand_above_the_variables() {
        assert_eq!(policy("srun a.out", &[("SLURM_KILL_BAD_EXIT", "1")]).kill, Some(true));
        assert_eq!(policy("srun a.out", &[("SLURM_KILL_BAD_EXIT", "0")]).kill, Some(false));
        assert_eq!(policy("srun -K a.out", &[("SLURM_KILL_BAD_EXIT", "0")]).kill, Some(true));
        let found = policy("srun a.out", &[("SLURM_WAIT", "60"), ("SLURM_NO_KILL", "1"), ("SLURM_LABELIO", "1")]);
        assert_eq!(found, Policy { kill: None, no_kill: true, wait: Some(60), labelled: true });
    }
}
