//! Where the tests find CUDA's libraries: as scripts/cuda-libraries leaves them.

use std::path::{Path, PathBuf};

/// The file in PALINGENESIS_CUDA_LIBRARIES, or in cuda-libraries of the target directory,
/// whose name begins so; none, and a line, where there is none.
pub fn find(prefix: &str) -> Option<PathBuf> {
    let directory = std::env::var_os("PALINGENESIS_CUDA_LIBRARIES").map_or_else(
        || {
            // The test's own file is target/PROFILE/deps/NAME.
            let own = std::env::current_exe().unwrap();
            own.ancestors().nth(3).unwrap_or(Path::new("target")).join("cuda-libraries")
        },
        PathBuf::from,
    );
    let names = std::fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut fitting: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(prefix)).collect();
    fitting.sort();
    if fitting.is_empty() {
        eprintln!("SKIPPED: no {prefix} in {}: see scripts/cuda-libraries", directory.display());
    }
    fitting.pop().map(|name| directory.join(name))
}
