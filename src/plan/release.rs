//! Which releases of Slurm a step with the flag can run on. Pure: who asks has read
//! the release.

use thiserror::Error;

/// Year and month of a Slurm release: 22.05 is (22, 5).
pub type Release = (u32, u32);

/// The oldest that works. 21.08 was the first to compare a SPANK plugin's release with
/// its own before it loads it, and to number its errors as all later ones do
/// (RELEASE_NOTES of 21.08). Before, any plugin is loaded, so that it must say itself
/// where it does not belong.
pub const OLDEST: Release = (21, 8);

/// A Slurm that is too old.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{program} is of Slurm {year}.{month:02}, and palingenesis needs {oldest_year}.{oldest_month:02} or newer: an older \
     Slurm loads a plugin that was made for another release and numbers its errors otherwise; have Slurm upgraded, or \
     start the job without --palingenesis",
    oldest_year = OLDEST.0,
    oldest_month = OLDEST.1
)]
pub struct TooOld {
    /// Which program of Slurm, and where.
    program: String,
    year: u32,
    month: u32,
}

/// Whether `program`, of this release, can carry a step with the flag. One that does not
/// tell its release has compared it with ours.
///
/// # Errors
/// When it is too old.
pub fn check(program: &str, release: Option<Release>) -> Result<(), TooOld> {
    match release {
        Some((year, month)) if (year, month) < OLDEST => Err(TooOld { program: program.into(), year, month }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_the_loader_s_check_is_refused() {
        for old in [(20, 2), (20, 11), (21, 7)] {
            assert!(check("srun", Some(old)).is_err(), "{old:?}");
        }
        for new in [Some((21, 8)), Some((22, 5)), Some((24, 11)), Some((26, 5)), None] {
            assert_eq!(check("srun", new), Ok(()), "{new:?}");
        }
    }

    #[test]
    fn the_line_names_program_release_reason_and_cure() {
        let line = check("slurmstepd on n1", Some((20, 11))).unwrap_err().to_string();
        for part in ["slurmstepd on n1 is of Slurm 20.11", "21.08 or newer", "upgraded", "without --palingenesis"] {
            assert!(line.contains(part), "'{part}' is missing: {line}");
        }
    }
}
