//! Which files CUDA is opened from. Where they are looked for is the library's: the doctor
//! shows the same.

use std::path::Path;

use palingenesis::facts::Environment;
use palingenesis::facts::cuda::{self, Libraries};

use super::start::Places;

/// Looks for all of them; `directory` goes before all else.
#[must_use]
pub fn find(directory: Option<&Path>, environment: &Environment) -> Libraries {
    cuda::find(Path::new("/"), directory, environment)
}

/// What one GPU needs.
///
/// # Errors
/// The first that is missing, and where it was looked for, in one line.
pub fn places(found: &Libraries) -> Result<Places, String> {
    let path = |library: &Result<cuda::Found, cuda::Missing>| match library {
        Ok(found) => Ok(found.path.clone()),
        Err(missing) => Err(missing.to_string()),
    };
    Ok(Places {
        driver: path(&found.driver)?,
        nvrtc: path(&found.nvrtc)?,
        nvrtc_builtins: found.nvrtc_builtins.clone(),
        cublaslt: path(&found.cublaslt)?,
    })
}
