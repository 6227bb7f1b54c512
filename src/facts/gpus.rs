//! The node's GPUs as the NVIDIA driver lists them in /proc. No device is
//! opened and no library loaded: inside slurmstepd both can hang.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Model names ("NVIDIA H100 80GB HBM3"), sorted, one per GPU.
///
/// # Errors
/// One line when the driver's directory is there but cannot be read.
pub fn models(root: &Path) -> Result<Vec<String>, String> {
    let directory = root.join("proc/driver/nvidia/gpus");
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("GPU models unknown: {}: {error}", directory.display())),
    };
    let mut models = Vec::new();
    for entry in entries.flatten() {
        let file = entry.path().join("information");
        let text = fs::read(&file).map_err(|error| format!("GPU model unknown: {}: {error}", file.display()))?;
        models.extend(model_in(&String::from_utf8_lossy(&text)));
    }
    models.sort();
    Ok(models)
}

fn model_in(information: &str) -> Option<String> {
    let line = information.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(line.trim().to_string()).filter(|model| !model.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_line_of_the_driver() {
        let text = "Model: \t\t NVIDIA B200\nIRQ:   \t\t 101\nGPU UUID: \t GPU-0\n";
        assert_eq!(model_in(text).as_deref(), Some("NVIDIA B200"));
        assert_eq!(model_in("Model:\n"), None);
        assert_eq!(model_in("\u{0}garbage"), None);
    }

    #[test]
    fn no_driver_is_no_fault() {
        assert_eq!(models(Path::new("/nonexistent")), Ok(Vec::new()));
    }
}
